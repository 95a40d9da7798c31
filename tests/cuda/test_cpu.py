"""The processor as a device: launches, orders, device globals, the access log, and what is refused."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashviz as fv
from flashviz import cuda
from flashviz.cuda import cpu
from flashviz.cuda.cpu_library import ORDERS

pytestmark = pytest.mark.skipif(not cpu.status().usable, reason="no C++ compiler is here: pip install ziglang")

HEADER = "// @kernel k\n// @grid 2\n// @block 64\n// @array x [128]\n// @array y [128]\n"


@pytest.fixture
def kernel(tmp_path: Path) -> Any:
    """``kernel(body, before, **options)`` launches a kernel of two blocks of 64 threads, x and y [128], n an int; gives y."""

    def launch(body: str, before: str = "", header: str = HEADER, **options: Any) -> np.ndarray:
        path = tmp_path / "k.cu"
        path.write_text(
            f"{header}{before}\n__global__ void k(const float* x, float* y, int n) {{\n"
            f"const int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;\n{body}\n}}\n"
        )
        x, y = np.arange(128, dtype=np.float32), np.full(128, 7, np.float32)
        plan = cuda.plan(cuda.Kernel(path, grid=(2,), block=64), (x, y, 5))
        cpu.run(plan, **options)
        return y

    return launch


def test_a_launch_writes_its_outputs_in_place(kernel: Any) -> None:
    assert np.array_equal(kernel("y[i] = 2 * x[i] + n;"), 2 * np.arange(128) + 5)


def test_what_a_kernel_can_ask_about_itself(kernel: Any) -> None:
    y = kernel("y[i] = threadIdx.x + 100 * blockIdx.x + 1000 * blockDim.x + 100000 * gridDim.x + warpSize;")
    i = np.arange(128)
    assert np.array_equal(y, i % 64 + 100 * (i // 64) + 64000 + 200000 + 32)


@pytest.mark.parametrize(
    ("expression", "want"),
    [
        ("__shfl_sync(~0u, x[i], 3)", lambda i: i // 32 * 32 + 3),
        ("__shfl_sync(~0u, x[i], 3, 8)", lambda i: i // 8 * 8 + 3),
        ("__shfl_xor_sync(~0u, x[i], 5)", lambda i: i // 32 * 32 + (i % 32 ^ 5)),
        ("__shfl_up_sync(~0u, x[i], 2)", lambda i: np.where(i % 32 < 2, i, i - 2)),
        ("__shfl_down_sync(~0u, x[i], 2)", lambda i: np.where(i % 32 > 29, i, i + 2)),
        ("__shfl_down_sync(~0u, x[i], 2, 16)", lambda i: np.where(i % 16 > 13, i, i + 2)),
        ("__ballot_sync(~0u, t % 4 == 1) % 65536", lambda i: 0x2222 + 0 * i),
        ("__any_sync(~0u, t == 40)", lambda i: i % 64 // 32),
        ("__all_sync(~0u, t < 40)", lambda i: 1 - i % 64 // 32),
        ("__syncthreads_count(t < 10)", lambda i: 10 + 0 * i),
        ("__syncthreads_or(t == 3) + 2 * __syncthreads_and(t < 64)", lambda i: 3 + 0 * i),
        ("fmaxf(x[i], 60.f) + min(t, n) + max(t, 60) + __int_as_float(0x40000000)", lambda i: np.maximum(i, 60) + np.minimum(i % 64, 5) + np.maximum(i % 64, 60) + 2),
    ],
)  # fmt: skip
def test_intrinsics(kernel: Any, expression: str, want: Any) -> None:
    assert np.array_equal(kernel(f"y[i] = {expression};"), want(np.arange(128)))


def test_a_warp_that_is_not_full_and_lanes_that_have_ended(kernel: Any) -> None:
    y = kernel(
        "y[i] = -1; if (t % 32 >= 20) return; y[i] = __shfl_xor_sync(0xfffff, x[i], 1) + __any_sync(~0u, t == 2);"
    )
    i = np.arange(128)
    assert np.array_equal(y, np.where(i % 32 < 20, (i ^ 1) + (i % 64 < 32), -1))


def test_shared_arrays_static_and_dynamic(kernel: Any, tmp_path: Path) -> None:
    y = kernel(
        "__shared__ float s[2][32], m; s[t / 32][t % 32] = x[i]; if (t == 0) m = 3; __syncthreads();\ny[i] = s[1 - t / 32][31 - t % 32] + m;"
    )
    i = np.arange(128)
    assert np.array_equal(y, i // 64 * 64 + 63 - i % 64 + 3)
    path = tmp_path / "d.cu"
    path.write_text(
        "// @kernel d\n__global__ void d(float* y) { extern __shared__ float s[]; s[threadIdx.x] = threadIdx.x; __syncthreads(); y[threadIdx.x] = s[31 - threadIdx.x]; }"
    )
    out = np.zeros(32, np.float32)
    cuda.launch(cuda.Kernel(path, grid=(1,), block=32, shared_bytes=128), (out,), device="cpu")
    assert np.array_equal(out, np.arange(32)[::-1])


def test_shared_memory_starts_as_nan(kernel: Any) -> None:
    assert np.isnan(kernel("__shared__ float s[64]; y[i] = s[t]; s[t] = 1;")).all()


def test_atomics(kernel: Any) -> None:
    y = kernel(
        "__shared__ int c[3]; if (t < 3) c[t] = 0; __syncthreads();\n"
        "atomicAdd(&c[0], 2); atomicMax(&c[1], t); atomicMin(&c[2], -t); __syncthreads(); y[i] = c[0] + 1000 * c[1] + 100000 * c[2];"
    )
    assert np.array_equal(y, np.full(128, 128 + 63000 - 6300000, np.float32))


@pytest.mark.parametrize("order", ORDERS)
def test_the_order_of_threads_is_the_one_asked_for(kernel: Any, order: str) -> None:
    """A kernel with a race shows the order: the last thread to write wins."""
    y = kernel("__shared__ int last; last = t; __syncthreads(); y[i] = last;", order=order, seed=3)
    if order != "random":
        assert np.array_equal(y, np.full(128, 63 if order == "forward" else 0))
    else:
        assert np.array_equal(
            y, kernel("__shared__ int last; last = t; __syncthreads(); y[i] = last;", order=order, seed=3)
        )
        others = [
            kernel("__shared__ int last; last = t; __syncthreads(); y[i] = last;", order=order, seed=s)[0]
            for s in range(8)
        ]
        assert len({float(v) for v in others}) > 1


def test_an_order_that_does_not_exist(kernel: Any) -> None:
    with pytest.raises(ValueError, match="'sideways' is none of forward, reverse, random"):
        kernel("y[i] = 0;", order="sideways")


def test_poison_and_times(kernel: Any) -> None:
    assert np.isnan(kernel("if (i) y[i] = 1;", poison=True)[0])
    assert kernel("if (i) y[i] = 1;")[0] == 7
    x = np.zeros((2, 8), np.float32)
    run = cuda.Kernel("online_softmax", {"Tile": 4})
    launched = cuda.launch(run, (x, np.empty_like(x), 8), device="cpu", repeat=3)
    assert launched.times is not None
    assert len(launched.times.milliseconds) == 3


def test_a_view_is_written_where_it_is() -> None:
    """A14: an output and inputs that are not contiguous."""
    rng = np.random.default_rng(0)
    packed = rng.standard_normal((1, 33, 3, 2, 8), dtype=np.float32)
    q, k, v = (packed[:, :, n].swapaxes(1, 2) for n in range(3))
    base = np.zeros((1, 33, 2, 8), np.float32)
    O, L = base.swapaxes(1, 2), np.zeros((1, 2, 33), np.float32)
    kernel = cuda.Kernel("flash_attention_2", {"Br": 4, "Bc": 4, "D": 8})
    rest = (33, 33, 0.3, False, 2, 2)
    cuda.launch(kernel, (q, k, v, O, L, *rest), device="cpu")
    copies = [np.ascontiguousarray(a) for a in (q, k, v)]
    want, wl = np.zeros_like(copies[0]), np.zeros_like(L)
    cuda.launch(kernel, (*copies, want, wl, *rest), device="cpu")
    assert np.array_equal(base.swapaxes(1, 2), want)
    assert np.array_equal(L, wl)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("y[i + (i == 127)] = 1; ", r"y\[128\] was overwritten, and y ends at 127"),
        ("__shared__ float s[64]; s[t + 3] = 0; y[i] = 0;", "s ends at 63"),
        (
            "if (t) __syncthreads(); y[i] = 0;",
            r"thread 1 waits at the barrier of line 9, which 1 of 64 threads have ended",
        ),
        ("if (t == 9) __trap(); y[i] = 0;", "thread 9 stopped at line 9: __trap"),
        ("__shared__ float s[20000]; s[t] = 0; y[i] = s[t];", "static shared memory ends at 49,152"),
    ],
)
def test_faults_that_a_plain_launch_sees(kernel: Any, body: str, words: str) -> None:
    with pytest.raises(cuda.KernelError, match=words) as caught:
        kernel(body)
    assert str(caught.value).startswith("k.cu: k, on the processor: ")


def test_a_kernel_that_does_not_compile_names_its_line(kernel: Any) -> None:
    with pytest.raises(cuda.KernelError, match=r"k does not compile for the processor\.\nk\.cu, line 9: .*nothing"):
        kernel("y[i] = nothing;")


def test_a_part_beyond_what_the_launch_gives(tmp_path: Path) -> None:
    x = np.zeros((1, 8), np.float32)
    with pytest.raises(cuda.KernelError, match="dynamic shared memory ends at 40"):
        cuda.launch(cuda.Kernel("online_softmax", {"Tile": 4}, shared_bytes=40), (x, x.copy(), 8), device="cpu")


def test_the_same_checks_as_on_a_gpu() -> None:
    with pytest.raises(cuda.LaunchError, match="needs 541,184 bytes of shared memory a block; an H100 allows 232,448"):
        fv.flash_attention_2(*(np.zeros((4, 512), np.float32),) * 3, Br=64, Bc=64, device="cpu")
    a = np.zeros((1, 8), np.float64)
    kernel = cuda.Kernel("online_softmax", {"Tile": 4})
    with pytest.raises(cuda.ArgumentError, match=r"Pass x\.astype\('float32'\)"):
        cuda.launch(kernel, (a, a, 8), device="cpu")
    with pytest.raises(cuda.LaunchError, match='kernels run on "gpu" and "cpu"'):
        cuda.launch(cuda.Kernel("flash_attention_2"), (), device="tpu")


def test_device_globals(kernel: Any) -> None:
    """What tracing needs: variables and pointers set by name before the launch, and read after it."""
    log, before = np.zeros(128, np.int32), 'extern "C" { __device__ int* fv_log_here; __device__ int fv_factor; }'
    kernel("fv_log_here[i] = fv_factor * i; y[i] = 0; if (i == 7) fv_factor = 5;", before, device_globals={"fv_log_here": log, "fv_factor": np.int32(3)})  # fmt: skip
    assert set(log[:8]) == set(3 * np.arange(8))
    with pytest.raises(KeyError, match='no extern "C" device global called nothing'):
        kernel("y[i] = 0;", device_globals={"nothing": np.int32(1)})
    with pytest.raises(TypeError, match="its dtype says how many bytes"):
        kernel("y[i] = fv_factor;", before, device_globals={"fv_factor": 3})


def test_the_access_log(tmp_path: Path) -> None:
    """Every access, in order, with the action that its thread had begun."""
    path = tmp_path / "k.cu"
    path.write_text(
        HEADER + "__global__ void k(const float* x, float* y) {\n__shared__ float s[64];\n"
        "fv_host_action(3, 1, 9, 0); s[threadIdx.x] = x[threadIdx.x];\n__syncthreads();\n"
        "fv_host_action(5, 2, 1, 2); y[64 * blockIdx.x + threadIdx.x] = s[threadIdx.x ^ 1];\n}\n"
    )
    plan = cuda.plan(cuda.Kernel(path, grid=(2,), block=64), (np.ones(128, np.float32), np.ones(128, np.float32)))
    library = cpu.compile_plan(plan, check=True)
    outcome, _ = cpu.launch_once(library, plan, check=True, log=1000)
    log = outcome.accesses
    assert log is not None
    assert log.total == len(log.records) == 2 * 64 * 4
    names = {number: log.names[number] for number in np.unique(log.records["array"]).tolist()}
    assert sorted(names.values()) == ["s", "x", "y"]
    of = {name: log.records[log.records["array"] == number] for number, name in names.items()}
    assert set(of["x"]["action"]) == {3}
    assert set(of["x"]["first"]) == {9}
    assert not of["x"]["write"].any()
    assert set(zip(*(of["y"][field].tolist() for field in ("action", "tiles", "first", "second", "write", "ordinal")), strict=True)) == {(5, 2, 1, 2, 1, 2)}  # fmt: skip
    second = of["y"][of["y"]["block"] == 1]
    assert np.array_equal(second["element"], 64 + np.arange(64))
    reads = of["s"][of["s"]["write"] == 0]
    assert np.array_equal(reads["element"], reads["thread"] ^ 1)
    short, _ = cpu.launch_once(library, plan, check=True, log=10)
    assert short.accesses is not None
    assert (short.accesses.total, len(short.accesses.records)) == (512, 10)
    assert cpu.launch_once(library, plan, check=True)[0].accesses is None


def test_programs_take_the_processor() -> None:
    rng = np.random.default_rng(0)
    Q, K, V = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 9, 8), (1, 13, 8), (1, 13, 8)))
    run = fv.flash_attention_2(Q, K, V, causal=True, device="cpu")
    same = fv.flash_attention_2(Q, K, V, causal=True, device="numpy")
    assert run.device == "cpu"
    assert run.recording is not None
    assert np.allclose(run.O, same.O, atol=1e-6)
    assert np.allclose(run.L, same.L, atol=1e-6)


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "ziglang" else found(name, *rest)
    )


def test_no_compiler_is_one_calm_error(monkeypatch: pytest.MonkeyPatch) -> None:
    no_compiler(monkeypatch)
    x = np.eye(4, dtype=np.float32)
    with pytest.raises(fv.DeviceError) as caught:
        fv.flash_attention_2(x, x, x, device="cpu")
    assert str(caught.value) == (
        'device="cpu": There is no C++ compiler here. Fix: pip install "flashviz[cpu]" device="numpy" runs the tile program anywhere.'
    )
    with pytest.raises(cuda.CpuUnavailableError, match=r'pip install "flashviz\[cpu\]", or the system\'s own'):
        cuda.launch(
            cuda.Kernel("online_softmax", {"Tile": 4}), (np.zeros((1, 8), np.float32),) * 2 + (8,), device="cpu"
        )
    assert cpu.status() == cpu.CpuStatus(False, "There is no C++ compiler here.", 'pip install "flashviz[cpu]"')
    assert fv.flash_attention_2(x, x, x, device="auto").device in ("numpy", "gpu")


def test_the_doctor_names_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    report = fv.doctor()
    assert "cpu" in report.devices
    assert report["cpu"].status == "ok"
    no_compiler(monkeypatch)
    report = fv.doctor()
    assert "cpu" not in report.devices
    assert "flashviz[cpu]" in report["cpu"].fix


def test_a_second_process_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import numpy as np, flashviz as fv\nfrom flashviz.cuda import cpu_build\nmade = []\nrun = cpu_build._run\n"
        "def counted(*a):\n    made.append(1)\n    return run(*a)\ncpu_build._run = counted\n"
        "x = np.eye(4, dtype='float32')\nfv.online_softmax(x[0], device='cpu', record=False)\nprint(len(made))\n"
    )
    monkeypatch.setenv("FLASHVIZ_CACHE", str(tmp_path))
    counts = [
        int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(2)
    ]
    assert counts[0] > 0
    assert counts[1] == 0


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of a process's mappings")
def test_a_launch_leaves_no_stacks_behind() -> None:
    # Every compiled kernel is a library of its own: stacks kept by each would end at the 65,530 mappings of a process.
    def mappings() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    def run() -> None:
        x = np.zeros((1, 1, 40, 8), dtype="float32")
        L = np.zeros((1, 1, 40), dtype="float32")
        kernel = cuda.Kernel("flash_attention_2", {"Br": 4, "Bc": 4, "D": 8}, block=512)
        arguments = {"Q": x, "K": x, "V": x, "O": np.zeros_like(x), "L": L, "Nq": 40, "Nk": 40, "scale": 1.0}
        cuda.launch(kernel, {**arguments, "causal": 0, "Hq": 1, "Hkv": 1}, device="cpu")

    before = mappings()
    run()
    assert mappings() - before < 300  # the library itself, and not 512 stacks with their guards
