"""Compile a kernel with no GPU and no CuPy: ctypes on the NVRTC library of the wheel `nvidia-cuda-nvrtc` (or `-cu12`).

Unlike CuPy this compiles without `--device-as-default-execution-space`: a helper that lacks `__device__` is an error, as it is for
nvcc. What comes back says what an instantiation costs: registers, shared memory, stack, spills.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OPTIONS = ("-std=c++17",)
_PLACES = (
    "cu1[2-9]/lib/libnvrtc.so.*",
    "cuda_nvrtc/lib/libnvrtc.so.*",
    "cu1[2-9]/bin/**/nvrtc64_*.dll",
    "cuda_nvrtc/bin/nvrtc64_*.dll",
)
_HINTS = (
    (r'expected a ";"', "A ; is missing, perhaps at the end of the line above."),
    (r'identifier "(\w+)" is undefined', "The name {0} is not declared here: misspelt, or declared in another scope?"),
    (r"calling a __host__ function", "A helper that a kernel calls needs __device__ in front."),
    (r"host function", "A helper that a kernel calls needs __device__ in front."),
    (r"uses too much shared data \((\w+) bytes, (\w+) max\)", "Use smaller tiles, or dynamic shared memory."),
    (
        r"could not open source file",
        "NVRTC has no toolkit or host headers: write down what is needed in kernels/include.",
    ),
)


class NvrtcMissingError(ImportError):
    """NVRTC is not installed here."""


@dataclass(frozen=True)
class Resources:
    """What one instantiation uses: registers a thread, bytes of static shared memory a block, bytes of stack and spills a thread."""

    registers: int
    static_shared: int
    stack: int
    spill_stores: int
    spill_loads: int


@dataclass(frozen=True)
class Problem:
    """One error of the compiler. ``line`` is 0 where it names none; ``hint`` says it in plain words, where there are some."""

    file: str
    line: int
    message: str
    hint: str = ""

    def __str__(self) -> str:
        where = f"{self.file}, line {self.line}: " if self.line else ""
        return f"{where}{self.message}" + (f" ({self.hint})" if self.hint else "")


@dataclass(frozen=True)
class Compiled:
    """Outcome of one compilation: machine code and resources by instantiation, or problems. ``log`` is the compiler's own text."""

    ok: bool
    resources: dict[str, Resources]
    problems: tuple[Problem, ...]
    cubin: bytes
    log: str


def library_path() -> Path:
    """The NVRTC library of the installed wheel. Raises NvrtcMissingError with the command that installs it."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for place in _PLACES:
            found = sorted(p for p in Path(folder).glob(place) if "builtins" not in p.name and ".alt." not in p.name)
            if found:
                return found[-1]
    raise NvrtcMissingError("NVRTC is not installed. To add it: pip install nvidia-cuda-nvrtc")


class Nvrtc:
    """The compiler, loaded once. ``version`` is (13, 0) for CUDA 13.0."""

    def __init__(self) -> None:
        path = library_path()
        if sys.platform == "win32":
            import os

            os.add_dll_directory(str(path.parent))
        self._library = ctypes.CDLL(str(path))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)

    def compile(self, code: str, instances: Sequence[str], arch: int | str, options: Sequence[str] = ()) -> Compiled:
        """Compile ``code`` (an assembled source) for ``arch`` (80 for sm_80, "90a" for sm_90a), with the named instantiations.

        Errors of the code are in the result's ``problems``; RuntimeError is raised for NVRTC's own, such as an unknown option.
        """
        result = self._compile(code, instances, arch, (*options, "--ptxas-options=-v"))
        if not result.ok and not result.problems:  # with -v the log lacks the assembler's own error line
            result = self._compile(code, instances, arch, options)
        return result

    def _compile(self, code: str, instances: Sequence[str], arch: int | str, options: Sequence[str]) -> Compiled:
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), code.encode(), b"kernel.cu", 0, None, None)
        try:
            for name in instances:
                self._call("nvrtcAddNameExpression", program, name.encode())
            flags = [flag.encode() for flag in (*OPTIONS, f"-arch=sm_{arch}", *options)]
            status = self._library.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
            log = self._text("nvrtcGetProgramLogSize", "nvrtcGetProgramLog", program).decode(errors="replace")
            if status:
                problems = _problems(log)
                if status != 6 and not problems:  # 6: errors in the code
                    raise RuntimeError(
                        f"NVRTC {'.'.join(map(str, self.version))}: {self._error(status)} for sm_{arch}. {log}".strip()
                    )
                return Compiled(False, {}, problems, b"", log)
            names = {}
            for name in instances:
                lowered = ctypes.c_char_p()
                self._call("nvrtcGetLoweredName", program, name.encode(), ctypes.byref(lowered))
                names[(lowered.value or b"").decode()] = name
            cubin = self._text("nvrtcGetCUBINSize", "nvrtcGetCUBIN", program)
            return Compiled(True, _resources(log, names), (), cubin, log)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, size_of: str, get: str, program: Any) -> bytes:
        size = ctypes.c_size_t()
        self._call(size_of, program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(get, program, buffer)
        return buffer.raw if get == "nvrtcGetCUBIN" else buffer.value

    def _call(self, function: str, *args: Any) -> None:
        status = getattr(self._library, function)(*args)
        if status:
            raise RuntimeError(f"{function}: {self._error(status)}")

    def _error(self, status: int) -> str:
        return str(self._library.nvrtcGetErrorString(status).decode())


def _resources(log: str, names: dict[str, str]) -> dict[str, Resources]:
    """The assembler's report, `--ptxas-options=-v`, by instantiation; ``names`` maps mangled names to them."""
    found = {}
    for block in re.split(r"(?=Compiling entry function ')", log):
        entry = re.match(r"Compiling entry function '(\w+)'", block)
        if not entry:
            continue

        def number(pattern: str, block: str = block) -> int:
            match = re.search(pattern, block)
            return int(match[1]) if match else 0

        found[names.get(entry[1], entry[1])] = Resources(
            registers=number(r"Used (\d+) registers"),
            static_shared=number(r"(\d+) bytes smem"),
            stack=number(r"(\d+) bytes stack frame"),
            spill_stores=number(r"(\d+) bytes spill stores"),
            spill_loads=number(r"(\d+) bytes spill loads"),
        )
    return found


def _problems(log: str) -> tuple[Problem, ...]:
    problems = []
    pattern = r"^(?:(?P<file>[^\n(]+)\((?P<line>\d+)\): (?:catastrophic )?error(?: #\S+)?:|(?:nvrtc|ptxas)[^\n:]*error\s*:|ptxas fatal\s*:)\s*(?P<text>[^\n]*)"
    for match in re.finditer(pattern, log, re.M):
        hint = ""
        for wanted, words in _HINTS:
            if said := re.search(wanted, match["text"]):
                hint = words.format(*said.groups())
                break
        problems.append(Problem(match["file"] or "", int(match["line"] or 0), match["text"], hint))
    return tuple(problems)
