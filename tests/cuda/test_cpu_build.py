"""What is compiled for the processor, with which compiler, and the cache of it."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flashviz import cuda
from flashviz.cuda import cpu, cpu_build, find
from flashviz.cuda.cpu_build import (
    Compiler,
    HostCompileError,
    build,
    cache_folder,
    find_compiler,
    rewrite_shared,
    with_line_table,
)
from flashviz.cuda.cpu_library import load

COMPILER = pytest.mark.skipif(not cpu.status().usable, reason="no C++ compiler is here: pip install ziglang")
SMALL = "__global__ void k(float* y) { y[threadIdx.x] = %s; }"


@pytest.mark.parametrize(
    ("declared", "want"),
    [
        ("__shared__ float s[4][Bc + 1];", 'auto& s = fv::shared<float[4][Bc + 1]>("s", __FILE__, __LINE__);'),
        ("__shared__ int n;", 'auto& n = fv::shared<int>("n", __FILE__, __LINE__);'),
        ("__shared__ alignas(16) unsigned char b[99];", 'auto& b = fv::shared<unsigned char[99]>("b", __FILE__, __LINE__);'),
        ("__shared__ __align__(8) float2 p[2];", 'auto& p = fv::shared<float2[2]>("p", __FILE__, __LINE__);'),
        ("extern __shared__ float d[];", "static float* const d = (float*)fv::arena;"),
        ("__shared__ float a[2], b;", 'auto& a = fv::shared<float[2]>("a", __FILE__, __LINE__); auto& b = fv::shared<float>("b", __FILE__, __LINE__);'),
        ("// __shared__ float s[4];", "// __shared__ float s[4];"),
        ('puts("__shared__ x");', 'puts("__shared__ x");'),
    ],
)  # fmt: skip
def test_shared_declarations(declared: str, want: str) -> None:
    assert rewrite_shared(declared) == want


def test_rewriting_keeps_the_lines() -> None:
    text = "a\n__shared__ float\n  s[4];\nb"
    assert rewrite_shared(text).splitlines()[3] == "b"
    assembled = find("flash_attention_2").assembled
    assert rewrite_shared(assembled).count("\n") == assembled.count("\n")


def test_a_shared_declaration_that_cannot_be_read() -> None:
    with pytest.raises(HostCompileError, match=r"line 2 of the assembled source: .*cannot read"):
        rewrite_shared("\n__shared__ float *p[3], *q;")


def test_the_system_compiler_comes_before_the_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(cpu_build.importlib.util, "find_spec", lambda name: object())
    found = find_compiler()
    assert found is not None
    assert (found.command, found.zig) == ((sys.executable, "-m", "ziglang", "c++"), True)
    for name in ("clang++", "g++", "c++", "mine"):
        program = tmp_path / name
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        monkeypatch.setenv("CXX", "mine -m64" if name == "mine" else "")
        found = find_compiler()
        assert found is not None
        assert not found.zig
        assert found.command == ((str(program), "-m64") if name == "mine" else (str(program),))


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHVIZ_CACHE", str(tmp_path / "given"))
    assert cache_folder() == tmp_path / "given" / "cpu"
    monkeypatch.delenv("FLASHVIZ_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "flashviz" / "cpu"
    if os.name == "posix":
        assert stat.S_IMODE(cache_folder().stat().st_mode) == 0o700
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert cache_folder() == tmp_path / "Library" / "Caches" / "flashviz" / "cpu"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache_folder() == tmp_path / "local" / "flashviz" / "cache" / "cpu"


def test_a_cache_that_cannot_be_made_is_a_temporary_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHVIZ_CACHE", str(tmp_path / "file"))
    folder = cache_folder()
    assert folder.is_dir()
    assert tmp_path not in folder.parents
    assert cache_folder() == folder


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("FLASHVIZ_CACHE", str(tmp_path))
    return tmp_path / "cpu"


@COMPILER
def test_what_was_compiled_is_kept_by_what_it_was_made_from(cache: Path) -> None:
    first = build(SMALL % "1", ["k"])
    assert first.compiled
    again = build(SMALL % "1", ["k"])
    assert (again.path, again.compiled) == (first.path, False)
    others = [
        build(SMALL % "2", ["k"]),
        build(SMALL % "1", ["k"], check=True),
        build(SMALL % "1", ["k"], defines=["A=1"]),
    ]
    assert len({first.path, *(other.path for other in others)}) == 4
    assert all(other.compiled for other in others)
    assert not [path for path in cache.iterdir() if path.name.startswith(".new-")]


@COMPILER
def test_the_cache_stays_small(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(SMALL % "1", ["k"])
    monkeypatch.setattr(cpu_build, "MOST_KEPT", 3)
    for path in cache.iterdir():
        os.utime(path, (1, 1))
    newest = build(SMALL % "2", ["k"]).path
    kept = set(cache.iterdir())
    assert len(kept) == 3
    assert newest in kept


@COMPILER
def test_two_processes_that_compile_the_same(cache: Path) -> None:
    code = "from flashviz.cuda.cpu_build import build; print(build('''%s''', ['k']).path)" % (SMALL % "3")
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {process.communicate()[0].strip() for process in both}
    assert all(process.returncode == 0 for process in both)
    assert len(paths) == 1
    load(Path(paths.pop()))


@COMPILER
def test_the_compilers_errors(cache: Path) -> None:
    with pytest.raises(HostCompileError) as caught:
        build('#line 5 "mine.cu"\n' + SMALL % "1 +", ["k"])
    file, line, text = caught.value.problems[0]
    assert (file, line) == ("mine.cu", 5)
    assert text
    assert str(caught.value).startswith("mine.cu, line 5: ")


def test_a_compiler_that_does_not_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path) -> None:
    monkeypatch.setattr(cpu_build, "find_compiler", lambda: Compiler((str(tmp_path / "absent"),), "absent"))
    with pytest.raises(cpu.CpuUnavailableError, match="absent does not start"):
        build(SMALL % "1", ["k"])


def test_a_line_table_is_made_of_loc_directives() -> None:
    made = with_line_table(
        '\t.file 1 "kernel.cu"\n\t.file 2 "/some/where" "helper.cuh" md5 0x1\nk:\n\t.loc 1 7 3 view 0\n\tnop\n\t.loc 2 9 1\n\tret\n\t.cfi_endproc\n'
    )
    lines = [line.strip() for line in made.splitlines()]
    assert lines[3:10] == [".loc 1 7 3 view 0", lines[4], "nop", ".loc 2 9 1", lines[7], "ret", ".cfi_endproc"]
    table = lines[lines.index(next(line for line in lines if line.endswith("fv_lines:"))) + 1 :]
    assert table[:9] == [f".quad {lines[4][:-1]}", ".long 0", ".long 7", f".quad {lines[7][:-1]}", ".long 1", ".long 9", table[6], ".long 0", ".long 0"]  # fmt: skip
    assert '.asciz "kernel.cu\\nhelper.cuh"' in lines


ZIG = shutil.which("zig") or ""
try:
    import ziglang  # noqa: F401

    ZIG = "ziglang"
except ImportError:
    pass


@pytest.mark.skipif(ZIG != "ziglang", reason="ziglang is not installed: pip install ziglang")
@pytest.mark.parametrize("check", [False, True])
def test_ziglang_runs_the_tensor_core_rungs(check: bool, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cpu_build, "find_compiler", lambda: Compiler((sys.executable, "-m", "ziglang", "c++"), "ziglang")
    )
    rng = np.random.default_rng(0)
    Q, K, V = (rng.standard_normal((1, 2, n, 16)).astype(np.float16) for n in (20, 37, 37))
    O, L = np.zeros_like(Q), np.zeros((1, 2, 20), np.float32)
    kernel = cuda.Kernel("flash_attention_2_async", {"T": "half", "Br": 16, "Bc": 16, "D": 16, "Layout": 2})
    plan = cuda.plan(
        kernel, {"Q": Q, "K": K, "V": V, "O": O, "L": L, "Nq": 20, "Nk": 37, "causal": 1, "Hq": 2, "Hkv": 2}
    )
    outcome, outputs = cpu.launch_once(cpu.compile_plan(plan, check=check), plan, check=check, poison=True)
    assert outcome.fault is None
    assert outcome.unwritten == {}
    q, k, v = (x.astype(np.float64) for x in (Q, K, V))
    s = np.where(np.tri(20, 37, 17, bool), q @ k.swapaxes(2, 3) / 4, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    np.testing.assert_allclose(outputs["O"], p / p.sum(-1, keepdims=True) @ v, atol=3e-3)


@pytest.mark.skipif(ZIG != "ziglang", reason="ziglang is not installed: pip install ziglang")
def test_ziglang_compiles_what_the_system_compiler_does(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = np.linspace(-3, 3, 24, dtype=np.float32).reshape(2, 12), np.zeros((2, 12), np.float32)
    kernel = cuda.Kernel("online_softmax", {"Tile": 4}, function="online_softmax")
    monkeypatch.setattr(
        cpu_build, "find_compiler", lambda: Compiler((sys.executable, "-m", "ziglang", "c++"), "ziglang")
    )
    plan = cuda.plan(kernel, (x, y, 12))
    for check in (False, True):
        outcome, outputs = cpu.launch_once(cpu.compile_plan(plan, check=check), plan, check=check)
        assert outcome.fault is None
        assert np.allclose(outputs["y"].sum(1), 1, atol=1e-6)
    library = cpu.compile_plan(plan, check=True)
    assert any(file == "online_softmax.cu" for _, file, _ in library._read_lines())


OTHERS = {
    "aarch64-macos": "darwin",
    "x86_64-macos": "darwin",
    "x86_64-windows-gnu": "win32",
    "aarch64-linux-gnu": "linux",
}


@pytest.mark.slow
@pytest.mark.skipif(ZIG != "ziglang", reason="ziglang is not installed: pip install ziglang")
@pytest.mark.parametrize("target", OTHERS)
def test_other_systems_compile_and_link(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is run: that the sources, the table of lines and the link are right for systems that are not here."""
    host = cpu_build.host_folder()
    zig = [sys.executable, "-m", "ziglang", "c++", "-target", target, "-fPIC", "-fno-sanitize=undefined"]
    flags = ["-std=c++17", "-fno-exceptions", "-fno-rtti", "-Wall", "-Wextra", "-Werror", "-O2"]
    checking = [flag for flag in cpu_build.CHECKING if flag != "-fsanitize=thread"] + [
        "-gdwarf-4",
        "-Xclang",
        "-fsanitize=thread",
    ]
    source, assembly = tmp_path / "kernel.cpp", tmp_path / "kernel.s"
    source.write_text(
        f'#include "cuda.hpp"\n{rewrite_shared(find("flash_attention_2_async").assembled)}\n'
        'FV_EXPORT fv::Kernel fv_kernels[] = {fv::kernel<&flash_attention_2_async<half, 16, 16, 16, 2>>("k")};\n'
    )

    def run(*arguments: str) -> None:
        done = subprocess.run([*zig, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    for name in cpu_build.PARTS:
        run(*flags, "-c", str(host / name), "-o", str(tmp_path / f"{name}.o"))
    run(
        "-std=c++17",
        "-fno-exceptions",
        "-fno-rtti",
        "-w",
        *checking,
        f"-I{host}",
        "-S",
        str(source),
        "-o",
        str(assembly),
    )
    text = assembly.read_text()
    assert "__tsan_read4" in text
    with monkeypatch.context() as system:
        system.setattr(sys, "platform", OTHERS[target])
        assembly.write_text(with_line_table(text))
        link = cpu_build._link_flags(Compiler(("ziglang",), "ziglang"), host)
        libraries = cpu_build._libraries(Compiler(("ziglang",), "ziglang"))
    assert assembly.read_text().count(".quad") > 100
    run("-c", str(assembly), "-o", str(tmp_path / "kernel.o"))
    objects = [str(tmp_path / f"{name}.o") for name in ("kernel", *cpu_build.PARTS)]
    run("-shared", *link, "-o", str(tmp_path / "library"), *objects, *libraries)


@pytest.mark.slow
@COMPILER
@pytest.mark.skipif(sys.platform != "linux", reason="the other switch is for systems without an own one")
def test_ucontext_switches_as_well(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The portable context switch, for processors without an own one."""
    found = find_compiler()
    assert found is not None
    monkeypatch.setattr(cpu_build, "find_compiler", lambda: Compiler((*found.command, "-DFV_UCONTEXT"), found.name))
    x, y = np.ones((2, 12), np.float32), np.zeros((2, 12), np.float32)
    cuda.launch(cuda.Kernel("online_softmax", {"Tile": 4}), (x, y, 12), device="cpu")
    assert np.allclose(y, 1 / 12)


@COMPILER
def test_a_compiler_other_than_ours_reads_the_runtime_without_warnings(tmp_path: Path) -> None:
    compiler = find_compiler()
    assert compiler is not None
    for name in ("runtime.cpp", "checks.cpp"):
        command = [
            *compiler.command,
            "-std=c++17",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-fno-exceptions",
            "-fno-rtti",
            "-O2",
            "-c",
        ]
        done = subprocess.run(
            [*command, str(cpu_build.host_folder() / name), "-o", str(tmp_path / "x.o")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
