"""Arrays for the copy engine, and kernels of one architecture: declared, laid out, refused; the driver is a fake one."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashviz import cuda
from flashviz.checks.kernels import check
from flashviz.cuda import tensor_maps
from flashviz.cuda.launching import Limits
from flashviz.cuda.sources import SourceError, find, parse
from flashviz.cuda.tensor_maps import encode, layout, parse_map

SOURCE = """// @kernel   copy
// @grid     min(multiprocessors, H * ceil(N / Rows))
// @block    2 * Rows + 128
// @arch     90a
// @instead  no_such_kernel, flash_attention_2
// @array    x [H, N, D]
// @array    y [H, N, D]
// @map      x const T [Rows, D] swizzle 128
// @map      y T [Rows, D] swizzle Swizzle
// @default  heads = 2 * H
// @instance T=half Rows=64 D=64 Swizzle=128
#include "include/shared.cuh"
struct TensorMap {};

template <typename T, int Rows, int D, int Swizzle>
__global__ void __launch_bounds__(2 * Rows + 128, 1)
copy(const __grid_constant__ TensorMap x, float scale, const __grid_constant__ TensorMap y, int H, int N, int heads) {
    SharedCarver carve;
    const auto X = carve.tile<T, Rows, D>("X");
    const auto bars = carve.tile<Barrier, 2, 3>("bars");
}
"""
VALUES = {"T": "half", "Rows": 64, "D": 64, "Swizzle": 128}
X = np.zeros((3, 100, 64), np.float16)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "copy.cu"
    path.write_text(SOURCE)
    return path


def planned(file: Path, limits: Limits | None = None, **changes: Any) -> cuda.Plan:
    template = {**VALUES, **changes}
    x = np.zeros((3, 100, template["D"]), np.float16 if template["T"] == "half" else np.uint16)
    return cuda.plan(cuda.Kernel(file, template), {"x": x, "scale": 1, "y": x.copy(), "H": 3, "N": 100}, limits)


def test_a_mapped_parameter_is_an_array(file: Path) -> None:
    plan = planned(file)
    x, scale, y, *_ = plan.source.signature.parameters
    assert (str(x), x.mapped, x.output) == ("const T* x", True, False)
    assert (str(y), y.mapped, y.output) == ("T* y", True, True)
    assert (scale.mapped, plan.outputs) == (False, ("y",))
    assert plan.types["x"] == "half"
    assert plan.source.shared_parts(VALUES) == {"X": 64 * 64 * 2, "bars": 2 * 3 * 8}
    with pytest.raises(cuda.ArgumentError, match=r"argument y takes half\*, an array of float16; got float32"):
        cuda.plan(cuda.Kernel(file, VALUES), (X, 1, X.astype("f4"), 3, 100))


def test_the_grid_knows_the_multiprocessors_and_a_default_the_shapes(file: Path) -> None:
    plan = planned(file)
    assert (plan.grid, plan.block) == ((6, 1, 1), (256, 1, 1))
    assert plan.arguments["heads"] == 6
    assert planned(file, Limits(multiprocessors=4)).grid == (4, 1, 1)


def test_the_layout(file: Path) -> None:
    """128 bytes of swizzle are 64 half: d = 128 is two panels. Bytes from row to row, panel to panel, head to head."""
    found = planned(file, D=128).maps["x"]
    assert (found.type, found.sizes, found.strides, found.box) == (
        "half",
        (64, 100, 2, 3),
        (256, 128, 100 * 256),
        (64, 64, 2, 1),
    )
    assert (found.swizzle, found.box_bytes) == (128, 64 * 128 * 2)
    plain = planned(file, Swizzle=0, T="bfloat16", D=128).maps["y"]
    assert (plain.type, plain.sizes, plain.box) == ("bfloat16", (128, 100, 1, 3), (128, 64, 1, 1))
    assert planned(file, Swizzle=32).maps["y"].box == (16, 64, 4, 1)


@pytest.mark.parametrize(
    ("box", "shape", "words"),
    [
        ("[64, 64] swizzle 48", (10, 64), "swizzle 48 is none of 0, 32, 64, 128 bytes"),
        ("[64, 64] swizzle 128", (64,), "at least one row"),
        ("[64, 64] swizzle 128", (3, 0, 64), "at least one row"),
        ("[64, 64] swizzle 128", (10, 128), "a box takes whole rows, of 64 elements; these have 128"),
        ("[64, 96] swizzle 128", (10, 96), "a row of 192 bytes is no multiple of 128 bytes, the swizzle"),
        ("[64, 12] swizzle 0", (10, 12), "a row of 24 bytes is no multiple of 16 bytes"),
        ("[257, 64] swizzle 128", (1000, 64), "64 × 257 × 1 × 1 elements; 256 is the most"),
        ("[64, 512] swizzle 0", (10, 512), "512 × 64 × 1 × 1 elements; 256 is the most"),
    ],
)
def test_what_the_copy_engine_cannot_take(box: str, shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(cuda.ArgumentError, match=words) as caught:
        layout("k", parse_map(f"x const half {box}"), "half", {}, shape)
    assert "k: argument x, shape" in str(caught.value)
    with pytest.raises(cuda.ArgumentError, match="no type bool"):
        layout("k", parse_map("x bool [64, 64] swizzle 128"), "bool", {}, (10, 64))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("// @map      y T", "// @map      y T,", "expected a parameter, its type, the box and the swizzle"),
        ("// @map      y T [Rows, D] swizzle Swizzle\n", "", "no line says what the tensor map y is of"),
        ("// @map      y", "// @map      z", "no line says what the tensor map y is of"),
        ("// @map      x const T", "// @map      H T [1, 1] swizzle 0\n// @map      x const T", "@map H: no parameter"),
        ("y T [Rows", "y U [Rows", "U is no type"),
        ("90a", "90b", "@arch 90b: expected a number"),
    ],
)
def test_what_the_header_says_wrongly(file: Path, old: str, new: str, words: str) -> None:
    assert SOURCE.count(old) == 1
    with pytest.raises(SourceError, match=words):
        parse(SOURCE.replace(old, new), file)


def test_other_architectures_are_refused_with_what_runs_there(file: Path) -> None:
    """sm_90a is no sm_90 and above: code for it runs on nothing else."""
    assert planned(file, Limits(arch=90)).grid == (6, 1, 1)
    for arch in (80, 89, 100, 120):
        with pytest.raises(cuda.LaunchError) as caught:
            planned(file, Limits(arch=arch, name="a GPU"))
        assert str(caught.value) == (
            f"copy runs on sm_90a alone (Hopper: TMA, wgmma); a GPU is sm_{arch}. flash_attention_2 does the same work there."
        )
    with pytest.raises(
        cuda.LaunchError, match=r"a GPU is sm_70\.$"
    ):  # where the other does not run either, it is not named
        planned(file, Limits(arch=70, name="a GPU"))
    assert find(file).targets((75, 80, 90)) == ("90a",)
    assert find("flash_attention_2").targets((70, 80, 90)) == ("80", "90")


def test_the_processor_refuses_and_says_why(file: Path) -> None:
    reason = r"copy cannot be run on the processor: TMA and wgmma are instructions of Hopper GPUs \(sm_90a\)"
    with pytest.raises(cuda.LaunchError, match=reason):
        cuda.launch(cuda.Kernel(file, VALUES), (X, 1, X.copy(), 3, 100), device="cpu")
    report = check(file)
    assert not report.ok
    assert "cannot be run on the processor: TMA and wgmma" in report.problem
    assert find("flash_attention_2").not_on_processor == ""


class FakeDriver:
    """Keeps what it was asked, and writes into the map."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.asked = status, []

    def cuTensorMapEncodeTiled(self, to: Any, *asked: Any) -> int:
        assert to.value % 64 == 0
        ctypes.memset(to, 7, 128)
        self.asked.append([list(a) if isinstance(a, ctypes.Array) else getattr(a, "value", a) for a in asked])
        return self.status


def test_what_the_driver_is_asked(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(tensor_maps, "_driver", lambda: driver)
    made = encode("x", planned(file, D=128).maps["x"], 4096)
    assert made.tobytes() == b"\7" * 128
    assert driver.asked == [
        [6, 4, 4096, [64, 100, 2, 3], [256, 128, 25600], [64, 64, 2, 1], [1, 1, 1, 1], 0, 3, 3, 0],
    ]
    with pytest.raises(cuda.ArgumentError, match="no multiple of 16"):
        encode("x", planned(file).maps["x"], 4098)
    driver.status = 1
    with pytest.raises(
        tensor_maps.TensorMapError, match="argument x: the driver makes no tensor map of it, CUDA error 1"
    ):
        encode("x", planned(file).maps["x"], 4096)


def test_a_launch_passes_the_map_and_compiles_for_this_architecture(
    fake: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = fake()
    monkeypatch.setattr(tensor_maps, "_driver", lambda: FakeDriver())
    cuda.launch(cuda.Kernel(file, VALUES), (X, 1, X.copy(), 3, 100), poison=True)
    x, scale, y, *rest = machine.launches[-1]["args"]
    assert (x.nbytes, y.nbytes) == (128, 128)
    assert isinstance(x, np.void)
    assert (scale, rest) == (np.float32(1), [3, 100, 6])
    assert "-arch=sm_90a" in machine.modules[-1]["options"]
    assert not any(
        option.startswith("-arch") for module in machine.modules[:-1] for option in module["options"]
    )  # CuPy's own choice for all others
