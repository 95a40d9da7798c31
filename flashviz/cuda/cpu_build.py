"""A kernel's source compiled for the processor: which compiler, what is compiled, and the cache of what was.

The assembled source goes, behind ``kernels/host/cuda.hpp`` (the words of CUDA for a host compiler), through the system's C++ compiler,
or through the one in the `ziglang` wheel. One thing the preprocessor cannot say is rewritten first: a ``__shared__`` declaration becomes
an array with a name, a size and fences. Lines keep their numbers.

For checking, the kernel is compiled with -fsanitize=thread, whose calls go to ``kernels/host/checks.cpp`` (no sanitizer is linked), and to
assembly first: the `.loc` directives in it are turned into a table of addresses and lines, so that no debugger or symbol tool is needed.

Compiled libraries are kept by everything they were made from, in the user's cache folder or in FLASHVIZ_CACHE. Written for Linux, macOS and
Windows on x86-64 and arm64. The tests run it on Linux x86-64 with g++ and ziglang; for the others they compile and link, and run nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from flashviz.cuda.cpu_source import HostCompileError, mark_globals, rewrite_shared, with_line_table
from flashviz.cuda.sources import folders

MOST_KEPT = 1000  # files in the cache; past them the least recently used go
CACHE_VARIABLE = "FLASHVIZ_CACHE"
INSTALL = 'pip install "flashviz[cpu]"'
CHECKING = ["-O1", "-g1", "-DFV_CHECK", "-fno-inline", "-fno-optimize-sibling-calls", "-fno-omit-frame-pointer"]
if sys.platform == "win32":  # clang's driver refuses what its compiler can do, and line numbers would be Microsoft's
    CHECKING += ["-gdwarf-4", "-Xclang", "-fsanitize=thread"]
else:
    CHECKING += ["-fsanitize=thread"]
_INLINE_PTX = (
    "the processor runs no inline PTX. include/ptx.cuh has functions for asynchronous copies and tensor cores that run here as well as on a "
    "GPU; wgmma, TMA and what else Hopper added (sm_90a) are not among them: such a kernel needs the GPU."
)
PARTS = (
    "runtime.cpp",
    "checks.cpp",
    "banks.cpp",
    "copies.cpp",
    "order.cpp",
    "tensor.cpp",
)  # of the runtime, compiled once
_PROBLEM = re.compile(r"^(?P<file>[^\n:]*?):(?P<line>\d+):(?:\d+:)? (?:fatal )?error: (?P<text>[^\n]*)", re.M)


class CpuUnavailableError(RuntimeError):
    """No C++ compiler is here; the message says what to install."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: the command that starts it, and what people call it."""

    command: tuple[str, ...]
    name: str

    @property
    def zig(self) -> bool:
        """Whether it is the ziglang wheel's, which links its own C++ library unless told not to."""
        return "ziglang" in self.command


def find_compiler() -> Compiler | None:
    """The system's C++ compiler (CXX, c++, g++, clang++), else the ziglang wheel's, else None."""
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        parts = name.split()
        path = shutil.which(parts[0]) if parts else None
        if path and Path(path).stem.lower() not in ("cl", "clang-cl"):
            return Compiler((path, *parts[1:]), name)
    if importlib.util.find_spec("ziglang") is not None:
        return Compiler((sys.executable, "-m", "ziglang", "c++"), "ziglang")
    return None


def require_compiler() -> Compiler:
    """The compiler. Raises CpuUnavailableError with the one command that adds one."""
    found = find_compiler()
    if found is None:
        raise CpuUnavailableError(
            f"Running CUDA source on the processor needs a C++ compiler, and none is here. To add one: {INSTALL}, "
            "or the system's own (Debian and Ubuntu: apt-get install g++; macOS: xcode-select --install)."
        )
    return found


def cache_folder(part: str = "cpu") -> Path:
    """Where compiled kernels, or another ``part``, are kept: in FLASHVIZ_CACHE, else in the user's cache folder; in a temporary one where
    neither can be written.
    """
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        folder = Path(given)
    elif sys.platform == "win32":
        folder = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "flashviz" / "cache"
    elif sys.platform == "darwin":
        folder = Path.home() / "Library" / "Caches" / "flashviz"
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flashviz"
    folder = folder / part
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return _temporary_cache()


@lru_cache(maxsize=1)
def _temporary_cache() -> Path:
    return Path(tempfile.mkdtemp(prefix="flashviz-cpu-"))


def host_folder() -> Path:
    """The folder of the runtime's sources, kernels/host."""
    found = next((folder / "host" for folder in folders() if (folder / "host" / "cuda.hpp").is_file()), None)
    if found is None:
        raise CpuUnavailableError("kernels/host is not in this installation; install flashviz again.")
    return found


@dataclass(frozen=True)
class Library:
    """A compiled library and whether it had to be compiled now."""

    path: Path
    compiled: bool


def build(assembled: str, instances: Sequence[str], *, check: bool = False, defines: Sequence[str] = ()) -> Library:
    """Compile an assembled source with the named instantiations, or take it from the cache.

    ``defines`` are macros, "NAME" or "NAME=VALUE". With ``check`` memory accesses are observed, at about a tenth of the speed.
    Raises CpuUnavailableError or HostCompileError.
    """
    compiler = require_compiler()
    host = host_folder()
    names = (*sorted(path.name for path in host.glob("*.hpp")), *PARTS, "windows.c")
    runtime = "\0".join((host / name).read_text(encoding="utf-8") for name in names)
    table = ", ".join(f'fv::kernel<&{name}>("{name}")' for name in instances)
    macros = "".join(f"#define {' '.join(define.split('=', 1))}\n" for define in defines)
    assembled = mark_globals(assembled) if sys.platform == "linux" else assembled
    text = (
        f'#include "cuda.hpp"\n{macros}{rewrite_shared(assembled)}\n#line 1 "flashviz"\n'
        f"FV_EXPORT fv::Kernel fv_kernels[] = {{{table}}};\n"
    )
    common = [
        "-std=c++17",
        "-fPIC",
        "-fno-exceptions",
        "-fno-rtti",
        "-fno-threadsafe-statics",
        "-ffp-contract=off",
        "-w",
    ]
    common += ["-fno-sanitize=undefined"] if compiler.zig else []
    common += ["-fstack-clash-protection"] if sys.platform == "linux" else []  # no frame jumps over a stack's guard
    flags = [*common, *(CHECKING if check else ["-O2"])]
    if check and not compiler.zig and "clang" not in compiler_version(compiler.command):
        flags.append("-fno-tree-sra")  # g++ would make four reads of the one of a float4
    folder = cache_folder()
    versions = (compiler.command, compiler_version(compiler.command), sys.platform, runtime)
    path = folder / f"{_key(*versions, flags, text)}{'.dll' if sys.platform == 'win32' else '.so'}"
    if path.is_file():
        with contextlib.suppress(OSError):
            os.utime(path)  # used: not among the first to go
        return Library(path, compiled=False)
    with tempfile.TemporaryDirectory(prefix="flashviz-") as scratch:
        work = Path(scratch)
        objects = []
        for name in PARTS:
            kept = folder / f"{_key(*versions, common, name)}.o"
            if not kept.is_file():
                made = work / f"{name}.o"
                _run(compiler, [*common, "-O2", f"-I{host}", "-c", str(host / name), "-o", str(made)])
                _keep(made, kept)
            objects.append(str(kept))
        source, kernel = work / "kernel.cpp", work / "kernel.o"
        source.write_text(text, encoding="utf-8")
        if check:
            assembly = work / "kernel.s"
            _run(compiler, [*flags, f"-I{host}", "-S", str(source), "-o", str(assembly)])
            assembly.write_text(
                with_line_table(assembly.read_text(encoding="utf-8", errors="surrogateescape")),
                encoding="utf-8",
                errors="surrogateescape",
            )
            _run(compiler, ["-fPIC", "-c", str(assembly), "-o", str(kernel)])
        else:
            _run(compiler, [*flags, f"-I{host}", "-c", str(source), "-o", str(kernel)])
        made = work / "library"
        _run(
            compiler,
            ["-shared", *_link_flags(compiler, host), "-o", str(made), str(kernel), *objects, *_libraries(compiler)],
        )
        _keep(made, path)
    return Library(path, compiled=True)


@lru_cache(maxsize=8)
def compiler_version(command: tuple[str, ...]) -> str:
    """The first line of the compiler's --version, empty when it has none."""
    try:
        done = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.partition("\n")[0]


def _key(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode("utf-8", "surrogateescape")).hexdigest()[:24]


def _keep(made: Path, path: Path) -> None:
    """Put a finished file into the cache: it is there whole or not at all, also when two processes make it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    os.close(handle)
    shutil.copyfile(made, name)
    Path(name).replace(path)
    kept = sorted(path.parent.glob("*.*"), key=_age)
    for old in kept[:-MOST_KEPT] if len(kept) > MOST_KEPT else []:
        with contextlib.suppress(OSError):
            old.unlink()


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another process removed it
        return 0.0


def _link_flags(compiler: Compiler, host: Path) -> list[str]:
    if not compiler.zig:
        return ["-Wl,--export-all-symbols"] if sys.platform == "win32" else []
    # Zig would build its own C++ library first, for minutes; the C library is in the process already.
    special = {"darwin": ["-Wl,-undefined,dynamic_lookup"], "win32": [str(host / "windows.c")]}
    return ["-O2", "-nostdlib", *special.get(sys.platform, [])]


def _libraries(compiler: Compiler) -> list[str]:
    if compiler.zig:
        return ["-lkernel32", "-lucrtbase"] if sys.platform == "win32" else []
    return [] if sys.platform == "win32" else ["-lm"]


def _run(compiler: Compiler, arguments: list[str]) -> None:
    command = [*compiler.command, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, check=False
        )
    except OSError as error:
        raise CpuUnavailableError(f"{compiler.name} does not start: {error}") from None
    if done.returncode:
        problems = [
            (m["file"].rsplit("/", 1)[-1], int(m["line"]), _INLINE_PTX if "poisoned" in m["text"] else m["text"])
            for m in _PROBLEM.finditer(done.stderr)
        ]
        problems = [p for p in problems if p[2] == _INLINE_PTX][:1] or problems
        lines = [f"{file}, line {line}: {text}" for file, line, text in problems[:5]]
        said = lines or [line for line in done.stderr.splitlines() if line.strip()][:5]
        raise HostCompileError("\n".join(said) or f"{compiler.name} failed with status {done.returncode}", problems)
