import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import fake_cupy
import numpy as np
import pytest

from flashviz import cuda
from flashviz.cuda import GpuStatus, GpuUnavailableError, Kernel, KernelError, gpu

RUNTIME_ERROR = fake_cupy.CUDARuntimeError


def calm(status: GpuStatus) -> GpuStatus:
    """One line, a full sentence, no traceback."""
    assert "\n" not in status.reason
    assert status.reason.endswith(".")
    assert "Traceback" not in status.reason
    assert "\n" not in status.fix
    return status


def import_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """A cupy package whose import runs ``body``."""
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "cupy", raising=False)


def test_a_usable_gpu(fake: Any) -> None:
    fake()
    status = calm(cuda.status())
    assert status.usable
    assert status.fix == ""
    assert status.versions == "Fake GPU (sm_90), driver 13.0, runtime 13.0, NVRTC 13.0, CuPy 14.0"
    assert (status.shared_per_block, status.multiprocessors) == (232_448, 132)
    assert status.limits.arch == 90


def test_the_answer_is_kept_until_it_is_refreshed(fake: Any) -> None:
    fake()
    first = cuda.status()
    fake(count=0)
    assert cuda.status() is first
    assert not cuda.status(refresh=True).usable


def test_no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(gpu, "import_module", absent)
    status = calm(cuda.status())
    assert (status.usable, status.reason) == (False, "CuPy is not installed.")
    assert status.fix == 'pip install "cupy-cuda13x[ctk]"'


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise ImportError('libcuda.so.1: cannot open\\n\\nmore lines')", "ImportError: libcuda.so.1: cannot open"),
        ("raise RuntimeError('''\\n=====\\nnumpy 3 is not supported\\n''')", "RuntimeError: numpy 3 is not supported"),
        ("class Odd(Exception): pass\nraise Odd", "Odd."),
        ("import nothing_of_that_name", "No module named 'nothing_of_that_name'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_cupy_that_raises_at_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, words: str) -> None:
    """C06."""
    import_raises(tmp_path, monkeypatch, body)
    status = calm(cuda.status())
    assert not status.usable
    assert words in status.reason
    assert status.fix


@pytest.mark.parametrize(
    ("what", "reason", "fix"),
    [
        ({"count": 0}, "There is no GPU here.", ""),
        ({"count": RUNTIME_ERROR(100, "no CUDA-capable device")}, "There is no GPU here.", ""),
        (
            {"count": RUNTIME_ERROR(35, "insufficient"), "driver": 0},
            "There is no NVIDIA driver here.",
            "install the NVIDIA driver",
        ),
        (
            {"count": RUNTIME_ERROR(35, "insufficient"), "driver": 12040},
            "The NVIDIA driver supports CUDA 12.4, older than this CuPy's CUDA 13.0.",
            'pip install "cupy-cuda12x[ctk]"',
        ),
        (
            {"count": RUNTIME_ERROR(999, "cudaErrorUnknown: unknown error")},
            "CUDA does not start: CUDARuntimeError: cudaErrorUnknown",
            "",
        ),
        ({"probe": 0}, "A test kernel ran on the GPU and returned a wrong value.", ""),
        (
            {"nvrtc": RuntimeError("DynamicLibNotFoundError: libnvrtc")},
            "NVRTC, the CUDA compiler that CuPy calls, is not installed",
            'pip install "cupy-cuda13x[ctk]"',
        ),
        ({"nvrtc": RuntimeError("x"), "runtime": 12060}, "NVRTC, the CUDA compiler", 'pip install "cupy-cuda12x[ctk]"'),
        (
            {"launch_error": RuntimeError("CUDA_ERROR_OUT_OF_MEMORY")},
            "A test kernel did not run: RuntimeError: CUDA_ERROR_OUT",
            "pip install",
        ),
        (
            {
                "launch_error": RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU: no kernel image"),
                "capability": (12, 0),
                "driver": 13010,
                "runtime": 12020,
                "nvrtc": (12, 2),
            },
            "the GPU is too new for it (Fake GPU (sm_120), driver 13.1, runtime 12.2, NVRTC 12.2, CuPy 14.0)",
            'pip install "cupy-cuda13x[ctk]"',
        ),
        (
            {
                "launch_error": fake_cupy.CompileException(
                    "nvrtc: error: invalid value for --gpu-architecture (-arch)"
                ),
                "capability": (6, 1),
            },
            "the GPU is too old for it (Fake GPU (sm_61)",
            'pip install "cupy-cuda12x[ctk]"',
        ),
    ],
)
def test_what_is_not_usable_says_why(fake: Any, what: dict[str, Any], reason: str, fix: str) -> None:
    """C05, C06: one calm line, with the versions where they matter, and one command."""
    fake(**what)
    status = calm(cuda.status())
    assert not status.usable
    assert reason in status.reason
    assert status.fix.startswith(fix) if fix else status.fix == ""


def test_status_survives_a_cupy_that_has_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", object())  # type: ignore[arg-type]
    assert not calm(cuda.status()).usable


def test_importing_loads_no_cupy() -> None:
    code = "import sys, flashviz.cuda; print(sorted({m.split('.')[0] for m in sys.modules} & {'cupy', 'matplotlib', 'ipywidgets'}))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "[]"


# ---- launches ----

KERNEL = Kernel("flash_attention_2", {"Br": 32, "Bc": 32, "D": 64})


def arguments(rng: Any = None, Nq: int = 65, Nk: int = 70) -> dict[str, Any]:
    rng = rng or np.random.default_rng(0)
    Q, K, V = (rng.standard_normal(s, dtype=np.float32) for s in ((2, 4, Nq, 64), (2, 2, Nk, 64), (2, 2, Nk, 64)))
    O, L = np.zeros_like(Q), np.zeros((2, 4, Nq), np.float32)
    return {
        "Q": Q,
        "K": K,
        "V": V,
        "O": O,
        "L": L,
        "Nq": Nq,
        "Nk": Nk,
        "scale": 0.125,
        "causal": True,
        "Hq": 4,
        "Hkv": 2,
    }


def test_what_a_launch_gives_to_cupy(fake: Any) -> None:
    machine = fake()
    given = arguments()
    cuda.launch(KERNEL, given)
    (launched,) = machine.launches
    assert launched["function"] == "flash_attention_2<32, 32, 64>"
    assert (launched["grid"], launched["block"], launched["shared_mem"]) == ((3, 4, 2), (512, 1, 1), 37_120)
    scalars = launched["args"][5:]
    assert [type(a) for a in scalars] == [np.int32, np.int32, np.float32, *[np.int32] * 5]
    module = machine.modules[-1]
    assert module["name_expressions"] == ("flash_attention_2<32, 32, 64>",)
    assert "-std=c++17" in module["options"]
    assert module["code"] == cuda.find("flash_attention_2").assembled


def test_outputs_come_back_and_a_view_is_written_in_place(fake: Any) -> None:
    fake()
    given = arguments()
    plain = cuda.launch(KERNEL, given)
    assert plain.outputs["O"] is given["O"]
    view = np.zeros((2, 65, 4, 64), np.float32).swapaxes(1, 2)
    again = cuda.launch(KERNEL, {**given, "O": view, "L": np.zeros_like(given["L"])})
    assert again.outputs["O"] is view
    np.testing.assert_array_equal(view, given["O"])
    assert np.isfinite(view).all()
    assert view.any()


def test_views_equal_contiguous_copies(fake: Any) -> None:
    """A14: q, k, v as slices of one (B, N, 3, H, D) array, and v transposed."""
    machine = fake()
    packed = np.random.default_rng(1).standard_normal((2, 65, 3, 2, 64), dtype=np.float32)
    q, k, v = (packed[:, :, n].transpose(0, 2, 1, 3) for n in range(3))
    v = np.ascontiguousarray(v.swapaxes(2, 3)).swapaxes(2, 3)
    results = []
    for arrays in ((q, k, v), [np.ascontiguousarray(x) for x in (q, k, v)]):
        O, L = np.zeros((2, 2, 65, 64), np.float32), np.zeros((2, 2, 65), np.float32)
        cuda.launch(KERNEL, (*arrays, O, L, 65, 65, 0.125, 0, 2, 2))
        results.append((O, L))
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)
    for launched in machine.launches:
        assert all(a.flags.c_contiguous for a in launched["args"][:5])


def test_arrays_at_an_odd_place_equal_those_at_an_even_one(fake: Any) -> None:
    """Kernels load 16 bytes at once: a view that begins elsewhere reaches them as a copy, and an output comes back."""
    machine = fake()
    even = {n: x.view(fake_cupy.Array) if isinstance(x, np.ndarray) else x for n, x in arguments().items()}
    cuda.launch(KERNEL, even)
    odd = {n: shifted(x) if isinstance(x, np.ndarray) else x for n, x in arguments().items()}
    sys.modules["cupy"].asarray = lambda x: x  # they are the GPU's already
    given = cuda.plan(KERNEL, odd).arguments
    assert all(given[n].data.ptr % 16 == 4 for n in "QKVOL")
    cuda.launch(KERNEL, odd)
    assert all(a.data.ptr % 16 == 0 for a in machine.launches[1]["args"][:5])
    for name in "OL":
        np.testing.assert_array_equal(odd[name], even[name])


def shifted(x: np.ndarray) -> Any:
    """A copy that begins 4 bytes past a multiple of 16."""
    room = np.zeros(x.nbytes + 32, np.uint8)
    start = -room.ctypes.data % 16 + 4
    copy = room[start : start + x.nbytes].view(x.dtype).reshape(x.shape).view(fake_cupy.Array)
    copy[...] = x
    return copy


def test_poison_fills_outputs_first(fake: Any) -> None:
    machine = fake()
    cuda.launch(KERNEL, arguments())
    cuda.launch(KERNEL, arguments(), poison=True)
    assert machine.poisoned == [False, True]


def test_a_module_is_compiled_once_and_a_changed_source_anew(fake: Any, tmp_path: Path) -> None:
    machine = fake()
    copy = tmp_path / "flash_attention_2.cu"
    copy.write_text(cuda.find("flash_attention_2").text)
    kernel = Kernel(copy, KERNEL.template)
    cuda.launch(KERNEL, arguments())
    cuda.launch(kernel, arguments())
    compiled = [m for m in machine.modules if m["name_expressions"]]
    assert len(compiled) == 1
    copy.write_text(copy.read_text().replace("expf(", "__expf("))
    cuda.launch(kernel, arguments())
    assert len([m for m in machine.modules if m["name_expressions"]]) == 2


def test_times(fake: Any) -> None:
    machine = fake()
    times = cuda.launch(KERNEL, arguments(), repeat=5).times
    assert times
    assert times.milliseconds == (1.5,) * 5
    assert times.median == 1.5
    assert len(machine.launches) == 1 + 3 + 5
    assert cuda.launch(KERNEL, arguments()).times is None


def test_shared_memory_beyond_48_kb_is_opted_into(fake: Any) -> None:
    machine = fake()
    cuda.launch(Kernel("flash_attention_2", {"Br": 64, "Bc": 64, "D": 64}), arguments())
    assert machine.launches[0]["shared_mem"] == 82_432  # the fake asserts the attribute


def test_the_gpus_own_limit_counts(fake: Any) -> None:
    fake(optin=65_536)
    with pytest.raises(cuda.LaunchError, match=r"82,432 bytes .* allows 65,536; Br=64, Bc=32 fits \(57,856\)"):
        cuda.launch(Kernel("flash_attention_2", {"Br": 64, "Bc": 64, "D": 64}), arguments())


def test_a_kernel_that_fails_is_named_and_the_next_launch_says_whose_fault_it_is(fake: Any) -> None:
    """C07."""
    machine = fake(sync_error=None)
    cuda.status()
    machine.sync_error = RUNTIME_ERROR(700, "cudaErrorIllegalAddress: an illegal memory access was encountered")
    with pytest.raises(
        KernelError, match=r"flash_attention_2.cu: flash_attention_2<32, 32, 64>, grid .* failed on the GPU: .*illegal"
    ):
        cuda.launch(KERNEL, arguments())
    machine.sync_error = None
    with pytest.raises(KernelError, match=r"An earlier launch, of flash_attention_2.cu: flash_attention_2<32, 32, 64>"):
        cuda.launch(KERNEL, arguments())


def test_a_failure_that_leaves_the_gpu_usable(fake: Any) -> None:
    machine = fake()
    cuda.status()
    machine.launch_error = MemoryError("out of memory")
    with pytest.raises(KernelError, match=r"MemoryError: out of memory\.$"):
        cuda.launch(KERNEL, arguments())
    machine.launch_error = None
    cuda.launch(KERNEL, arguments())


def test_a_kernel_that_does_not_compile(fake: Any) -> None:
    error = fake_cupy.CompileException(
        'flash_attention_2.cu(113): error: identifier "mm" is undefined\n\n1 error detected'
    )
    fake(compile_error=error)
    with pytest.raises(
        KernelError, match=r'does not compile for sm_90.\nflash_attention_2.cu\(113\): error: identifier "mm"'
    ):
        cuda.launch(KERNEL, arguments())


def test_no_gpu_is_an_error_that_says_what_to_install(fake: Any) -> None:
    fake(count=RUNTIME_ERROR(35, "x"), driver=0)
    with pytest.raises(
        GpuUnavailableError, match=r"There is no NVIDIA driver here. To add it: install the NVIDIA driver"
    ):
        cuda.launch(KERNEL, arguments())


def test_arguments_are_checked_before_anything_is_launched(fake: Any) -> None:
    machine = fake()
    with pytest.raises(cuda.ArgumentError, match=r"Q.astype"):
        cuda.launch(KERNEL, {**arguments(), "Q": np.zeros((2, 4, 65, 64))})
    with pytest.raises(cuda.LaunchError, match='device="tpu"'):
        cuda.launch(KERNEL, arguments(), device="tpu")
    assert not machine.launches


def test_a_launcher_launches_and_does_not_wait(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = fake()
    monkeypatch.delitem(fake_cupy.KERNELS, "flash_attention_2")  # nothing is computed
    assert cuda.status().usable
    machine.sync_error = RuntimeError("it waited")
    given = {n: x.view(fake_cupy.Array) if isinstance(x, np.ndarray) else x for n, x in arguments().items()}
    with pytest.raises(cuda.ArgumentError, match="argument Q must be a contiguous CuPy array"):
        gpu.launcher(cuda.plan(KERNEL, given))  # these are NumPy's still
    device = {n: Elsewhere(x) if isinstance(x, np.ndarray) else x for n, x in given.items()}
    launch = gpu.launcher(cuda.plan(KERNEL, device))
    assert machine.launches == []
    launch()
    launch()
    assert [launched["args"][0] for launched in machine.launches] == [device["Q"]] * 2
    device["K"].flags.c_contiguous = False
    with pytest.raises(cuda.ArgumentError, match="argument K must be a contiguous CuPy array"):
        gpu.launcher(cuda.plan(KERNEL, device))
    device["K"].flags.c_contiguous, device["K"].data.ptr = True, 4096 + 8
    with pytest.raises(cuda.ArgumentError, match=r"argument K must be .* that begins at a multiple of 16 bytes"):
        gpu.launcher(cuda.plan(KERNEL, device))


class Elsewhere:
    """An array that is not NumPy's, as far as a launcher looks at one."""

    def __init__(self, x: np.ndarray) -> None:
        self.shape, self.dtype = x.shape, x.dtype
        self.flags = types.SimpleNamespace(c_contiguous=True)
        self.data = types.SimpleNamespace(ptr=4096)
