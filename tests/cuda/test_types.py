"""Kernels with type parameters, and 16-bit floats, as arguments, in shared memory and in the header."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashviz as fv
from flashviz.checks.kernel_cases import make_cases, make_plan
from flashviz.cuda import ArgumentError, Kernel, SourceError, cpu, find, launch, plan
from flashviz.cuda.expressions import evaluate
from flashviz.cuda.nvrtc import Nvrtc, NvrtcMissingError
from flashviz.cuda.signatures import parse_signature

COPY = """// @kernel copy
// @grid ceil(N / Rows)
// @block 32 * Warps
// @array x [N, D]
// @array y [N, D]
// @instance T=half Rows=2 D=8 Warps=1 Padded=0
// @instance T=bfloat16 Rows=4 D=8 Warps=2 Padded=1
// @instance T=float Rows=2 D=8 Warps=1 Padded=1
// @shape N=3
#include "include/half.cuh"
#include "include/shared.cuh"
template <typename T, int Rows, int D,
          unsigned Warps,
          bool Padded>
__global__ void __launch_bounds__(32 * (Warps * (1 + 0)), (8 / Warps)) copy(const T* __restrict__ x, T* y, int N) {
    SharedCarver carve;
    const auto tile = carve.tile<T, Rows, D + 8 * Padded>("tile");
    const auto sums = carve.tile<float, Rows, 16 / sizeof(T)>("sums");
    const auto one = carve.vector<Rows>("one");
    for (int e = threadIdx.x; e < Rows * D; e += blockDim.x)
        if (blockIdx.x * Rows + e / D < N) tile[e / D][e % D] = x[blockIdx.x * Rows * D + e];
    __syncthreads();
    for (int e = threadIdx.x; e < Rows * D; e += blockDim.x)
        if (blockIdx.x * Rows + e / D < N) y[blockIdx.x * Rows * D + e] = tile[e / D][e % D];
}
"""
HALF = {"T": "half", "Rows": 2, "D": 8, "Warps": 1, "Padded": 0}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    (tmp_path / "copy.cu").write_text(COPY)
    return tmp_path / "copy.cu"


def with_bits(bits: int) -> np.float32:
    return np.array(bits, np.uint32).view(np.float32)[()]


def test_the_declaration_and_its_instances(copy: Path) -> None:
    source = find(copy)
    assert source.signature.template == ("T", "Rows", "D", "Warps", "Padded")
    assert source.signature.kinds == ("typename", "int", "int", "unsigned", "bool")
    assert [str(p) for p in source.signature.parameters] == ["const T* x", "T* y", "int N"]
    assert [p.type for p in source.signature.resolved(HALF).parameters] == ["half", "half", "int"]
    assert source.header.instances[0] == HALF
    assert list(source.header.instances[0]) == list(HALF)
    assert source.signature.instance(HALF) == "copy<half, 2, 8, 1, 0>"
    assert source.signature.instance({**HALF, "Padded": True}) == "copy<half, 2, 8, 1, 1>"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"T": 2}, "template value T=2 must be the name of a type: float, double, half"),
        ({"T": "fp8"}, "T='fp8' must be the name of a type"),
        ({"Padded": 2}, "Padded=2 must be 0 or 1"),
        ({"Rows": "half"}, "Rows='half' must be a whole number"),
        ({"Rows": True}, "Rows=True must be a whole number"),
    ],
)
def test_template_values_that_are_refused(copy: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        find(copy).signature.instance({**HALF, **change})


@pytest.mark.parametrize(("type", "size"), [("half", 2), ("bfloat16", 2), ("float", 4)])
def test_shared_bytes_count_the_type(copy: Path, type: str, size: int) -> None:
    for padded in (0, 1):
        values = {**HALF, "T": type, "Padded": padded}
        parts = {"tile": size * 2 * (8 + 8 * padded), "sums": 4 * 2 * (16 // size), "one": 8}
        assert find(copy).shared_parts(values) == parts
        assert find(copy).shared_bytes(values) == sum(parts.values())


def test_expressions_know_types() -> None:
    assert evaluate("2 * sizeof(T) + sizeof(half)", {"T": "float"}) == 10
    with pytest.raises(ValueError, match="T is a type, half, and no number"):
        evaluate("T + 1", {"T": "half"})
    with pytest.raises(ValueError, match="U is no type that the launcher knows"):
        evaluate("sizeof(U)", {})


def test_a_header_with_an_unknown_type(copy: Path) -> None:
    copy.write_text(COPY.replace("T=half", "T=quarter"))
    with pytest.raises(SourceError, match="T=quarter is neither a whole number nor a type"):
        find(copy)


@pytest.mark.parametrize(
    "bounds",
    [
        "__launch_bounds__(32 * Warps, 8 / Warps)",
        "__launch_bounds__(32 * (Br / (16 + 0)), max(1, 2))",
        "__launch_bounds__(128)",
    ],
)
def test_launch_bounds_before_and_behind_void(bounds: str) -> None:
    for text in (f"{bounds} void k", f"void {bounds} k"):
        code = (
            f"template <int Br, int Warps>\n__global__ {text}(const float* x) {{}}\n__global__ void other(int n) {{}}"
        )
        assert [str(p) for p in parse_signature(code, "k").parameters] == ["const float* x"]
        assert fv.cuda.sources.blank_others(code, "other").count("{}") == 1


def test_the_plan_follows_the_type(copy: Path) -> None:
    x = np.zeros((3, 8), np.float16)
    ready = plan(Kernel(copy, HALF), {"x": x, "y": x.copy(), "N": 3})
    assert (ready.grid, ready.block, ready.types) == ((2, 1, 1), (32, 1, 1), {"x": "half", "y": "half", "N": "int"})
    wide = plan(Kernel(copy, {**HALF, "T": "float", "Warps": 4}), {"x": x.astype("f4"), "y": x.astype("f4"), "N": 3})
    assert wide.block == (128, 1, 1)
    with pytest.raises(
        ArgumentError, match=r"x takes half\*, an array of float16; got float32 .* Pass x.astype\('float16'\)"
    ):
        plan(Kernel(copy, HALF), {"x": x.astype("f4"), "y": x, "N": 3})
    with pytest.raises(
        ArgumentError,
        match=r"x takes bfloat16\*, .* or of their bits, uint16; got float16 .* Pass flashviz.to_bfloat16\(x\)",
    ):
        plan(Kernel(copy, {**HALF, "T": "bfloat16"}), {"x": x, "y": x, "N": 3})


class _Named:
    """The dtype of ml_dtypes' bfloat16 by the one thing that is asked of it: its name."""

    name = "bfloat16"


class Bfloat16(np.ndarray):
    """An array that calls its dtype bfloat16, as one of ml_dtypes does."""

    @property  # type: ignore[misc]
    def dtype(self) -> Any:  # type: ignore[override]
        return _Named()

    def view(self, *type: Any) -> Any:
        return np.ndarray.view(np.ndarray.view(self, np.ndarray), *type)


def test_an_array_of_a_bfloat16_dtype_is_seen_as_its_bits(copy: Path) -> None:
    bits = fv.to_bfloat16(np.arange(24).reshape(3, 8))
    x, y = bits.view(Bfloat16), np.zeros_like(bits).view(Bfloat16)
    ready = plan(Kernel(copy, {**HALF, "T": "bfloat16"}), {"x": x, "y": y, "N": 3})
    assert ready.arguments["x"].dtype == np.uint16
    assert np.shares_memory(ready.arguments["y"], y)
    np.testing.assert_array_equal(fv.from_bfloat16(x), np.arange(24).reshape(3, 8))


def test_bfloat16_by_value_is_refused() -> None:
    signature = parse_signature("__global__ void k(bfloat16 x) {}", "k")
    with pytest.raises(ArgumentError, match="argument x takes bfloat16, by value, which NumPy has no type for"):
        fv.cuda.signatures.check_arguments(signature, [0.5])


@pytest.mark.parametrize("values", [HALF, {**HALF, "T": "bfloat16"}, {**HALF, "T": "float"}])
def test_sixteen_bits_go_through_a_kernel_on_the_processor(copy: Path, values: dict[str, Any]) -> None:
    if not cpu.status().usable:
        pytest.skip("no C++ compiler is here: pip install ziglang")
    x = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)
    x = fv.to_bfloat16(x) if values["T"] == "bfloat16" else x.astype({"half": "f2", "float": "f4"}[values["T"]])
    y = np.zeros((8, 5), x.dtype).T  # not contiguous
    launch(Kernel(copy, values), {"x": x, "y": y, "N": 5}, device="cpu")
    np.testing.assert_array_equal(y, x)


def test_sixteen_bit_outputs_are_poisoned_and_guarded(copy: Path) -> None:
    if not cpu.status().usable:
        pytest.skip("no C++ compiler is here: pip install ziglang")
    for type in ("half", "bfloat16"):
        dtype = np.float16 if type == "half" else np.uint16
        y = np.zeros((3, 8), dtype)
        copy.write_text(COPY.replace("N) y[", "N && e != 5) y["))
        launch(Kernel(copy, {**HALF, "T": type}), {"x": y.copy(), "y": y, "N": 3}, device="cpu", poison=True)
        seen = fv.from_bfloat16(y) if type == "bfloat16" else y
        assert np.argwhere(np.isnan(seen)).tolist() == [[0, 5], [2, 5]]
        copy.write_text(COPY.replace("e / D < N) y[", "e / D < N + 1) y[").replace("= tile[e / D]", "= tile[0]"))
        with pytest.raises(fv.cuda.KernelError, match=r"y\[24\] was overwritten, and y ends at 23"):
            launch(Kernel(copy, {**HALF, "T": type}), {"x": y.copy(), "y": y, "N": 3}, device="cpu")


def test_a_check_runs_every_type(copy: Path) -> None:
    if not cpu.status().usable:
        pytest.skip("no C++ compiler is here: pip install ziglang")
    report = fv.check(copy, everything=True)
    assert report.ok, report
    assert [case.partition(",")[0] for case in report.cases] == ["copy<T=half", "copy<T=float", "copy<T=bfloat16"]
    copy.write_text(COPY.replace("        if (blockIdx.x * Rows + e / D < N) tile[e / D]", "        tile[e / D]"))
    finding = fv.check(copy, everything=True).findings[0]
    assert (finding.kind, finding.element, finding.case) == ("bounds", "x[24]", f"copy<{_listed(HALF)}> with N=3")


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in values.items())


def test_random_arguments_of_bfloat16_are_normal_numbers(copy: Path) -> None:
    cases, _ = make_cases(copy, everything=True)
    ready = make_plan(copy, next(case for case in cases if case.template["T"] == "bfloat16"))
    values = fv.from_bfloat16(ready.arguments["x"])
    assert np.isfinite(values).all()
    assert 0.3 < values.std() < 3


def test_every_type_compiles(copy: Path) -> None:
    try:
        nvrtc = Nvrtc()
    except NvrtcMissingError as error:
        pytest.skip(str(error))
    source = find(copy)
    names = [source.signature.instance(values) for values in source.header.instances]
    compiled = nvrtc.compile(source.assembled, names, 80)
    assert compiled.ok, compiled.log
    assert set(compiled.resources) == set(names)


@given(st.integers(0, 0xFFFF))
def test_bfloat16_and_back_changes_nothing(bits: int) -> None:
    value = fv.from_bfloat16(np.uint16(bits))
    back = fv.to_bfloat16(value)
    assert back == (bits | 0x40 if np.isnan(value) else bits)


@given(st.floats(width=32))
def test_rounding_to_bfloat16_is_to_nearest_even(x: float) -> None:
    got = int(fv.to_bfloat16(x))
    value = float(fv.from_bfloat16(np.uint16(got)))
    if np.isnan(x):
        assert np.isnan(value)
        return
    if np.isinf(value):
        assert abs(x) >= float(with_bits(0x7F7F8000))
        assert (value > 0) == (x > 0)
        return
    for other in (got - 1, got + 1):
        if other & 0x7FFF < 0x7F80 and other >> 15 == got >> 15:
            away = abs(float(fv.from_bfloat16(np.uint16(other))) - x)
            assert abs(value - x) < away or (abs(value - x) == away and got % 2 == 0)


def test_bfloat16_keeps_shapes_and_refuses_others() -> None:
    assert fv.to_bfloat16(np.zeros((2, 3))[:, ::2]).shape == (2, 2)
    assert fv.to_bfloat16(np.nan) == 0x7FC0
    assert fv.to_bfloat16(1e39) == fv.to_bfloat16(np.inf) == 0x7F80
    with pytest.raises(TypeError, match="bfloat16 bits are uint16; got float32"):
        fv.from_bfloat16(np.float32(1))
