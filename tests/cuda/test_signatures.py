from typing import Any

import numpy as np
import pytest

from flashviz.cuda.signatures import ArgumentError, check_arguments, parse_signature
from flashviz.cuda.sources import find

CODE = """template <int N, bool Fast> __global__ void __launch_bounds__(128) k(const float* __restrict__ a, float *b,
    unsigned int n, long long m, bool flag, double x, const int count, float y) {}"""
SIGNATURE = parse_signature(CODE, "k")
GOOD: dict[str, Any] = {
    "a": np.zeros(3, np.float32),
    "b": np.zeros(3, np.float32),
    "n": 1,
    "m": 2**40,
    "flag": True,
    "x": 0.5,
    "count": 3,
    "y": 0.125,
}


def test_the_kernels_declaration() -> None:
    signature = find("flash_attention_2").signature
    assert signature.template == ("Br", "Bc", "D")
    declared = (
        "const float* Q, const float* K, const float* V, float* O, float* L, int Nq, int Nk, float scale, int causal"
    )
    declared += ", int Hq, int Hkv, int kv_len, int window"
    assert ", ".join(map(str, signature.parameters)) == declared
    assert [p.name for p in signature.parameters if p.output] == ["O", "L"]


def test_types() -> None:
    assert [str(p.dtype) for p in SIGNATURE.parameters] == [
        "float32",
        "float32",
        "uint32",
        "int64",
        "bool",
        "float64",
        "int32",
        "float32",
    ]
    assert [p.output for p in SIGNATURE.parameters] == [False, True, *[False] * 6]


def test_numbers_arrive_as_declared() -> None:
    """C01: a Python float never reaches a float parameter as a double."""
    checked = check_arguments(SIGNATURE, GOOD)
    assert list(checked) == list(GOOD)
    for p in SIGNATURE.parameters:
        assert checked[p.name].dtype == p.dtype
    assert checked["y"] == np.float32(0.125)
    assert type(checked["y"]) is np.float32


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("y", 0.1, np.float32(0.1)),
        ("y", np.float64(0.1), np.float32(0.1)),
        ("y", 3, np.float32(3)),
        ("y", -np.inf, np.float32(-np.inf)),
        ("y", np.array(2.0), np.float32(2)),
        ("count", 3.0, np.int32(3)),
        ("count", np.int64(7), np.int32(7)),
        ("count", True, np.int32(1)),
        ("flag", 1, np.bool_(True)),
    ],
)
def test_casts_that_lose_nothing(name: str, value: object, kept: Any) -> None:
    got = check_arguments(SIGNATURE, {**GOOD, name: value})[name]
    assert got == kept
    assert got.dtype == kept.dtype


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("y", 1e300, "argument y takes float; 1e.300 is beyond its range"),
        ("y", 16_777_217, "the whole number 16777217 would arrive as 16777216"),
        ("y", "0.1", "takes float; got str '0.1'. Pass a number"),
        ("y", None, "got None"),
        ("y", np.zeros(2), r"got an array of float64, shape \(2,\)"),
        ("y", 1j, "got complex"),
        ("count", 2.5, "argument count takes int; 2.5 is not a whole number"),
        ("count", float("nan"), "nan is not a whole number"),
        ("count", 3_000_000_000, "3,000,000,000 is out of its range"),
        ("n", -1, "argument n takes unsigned int, 0 to 4,294,967,295; -1 is out"),
        ("flag", 2, "2 is out of its range"),
        (
            "a",
            np.zeros(3),
            r"argument a takes float\*, an array of float32; got float64 of shape \(3,\). Pass a.astype\('float32'\)",
        ),
        ("a", 0.5, r"argument a takes float\*.*got float 0.5. Pass a NumPy or CuPy array"),
        ("a", [1.0], "got list"),
        ("a", np.float32(1), "got float32"),
    ],
)
def test_refusals_name_argument_type_value_and_fix(name: str, value: object, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        check_arguments(SIGNATURE, {**GOOD, name: value})


def test_a_read_only_output_is_refused() -> None:
    b = np.zeros(3, np.float32)
    b.flags.writeable = False
    with pytest.raises(ArgumentError, match="argument b is written by the kernel; the array given is read-only"):
        check_arguments(SIGNATURE, {**GOOD, "b": b})


def test_missing_and_extra_arguments() -> None:
    with pytest.raises(ArgumentError, match=r"k takes 8 arguments .*; 2 were given"):
        check_arguments(SIGNATURE, [1, 2])
    with pytest.raises(ArgumentError, match="b is missing, z is not one of them"):
        check_arguments(SIGNATURE, {**{n: v for n, v in GOOD.items() if n != "b"}, "z": 1})


def test_instances() -> None:
    assert SIGNATURE.instance({"N": 4, "Fast": 1}) == "k<4, 1>"
    with pytest.raises(ArgumentError, match="template on N, Fast: Fast is missing, M is not one of them"):
        SIGNATURE.instance({"N": 4, "M": 1})
    with pytest.raises(ArgumentError, match="N=-4 must be a whole number"):
        SIGNATURE.instance({"N": -4, "Fast": 1})


def test_a_type_that_is_not_known() -> None:
    with pytest.raises(ValueError, match="parameter `float4 x` has a type"):
        parse_signature("__global__ void k(float4 x) {}", "k")
    with pytest.raises(ValueError, match=r"parameter `U x` has a type that the launcher does not know .T, float"):
        parse_signature("template <typename T> __global__ void k(U x) {}", "k")
    with pytest.raises(ValueError, match="`float T` is not an int"):
        parse_signature("template <float T> __global__ void k(float x) {}", "k")
