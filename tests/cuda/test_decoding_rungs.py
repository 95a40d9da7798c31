"""The decoding rungs of the ladder: what their files declare, and their numbers on the processor where others do not look."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from programs.oracle import attention

import flashviz as fv
from flashviz import cuda
from flashviz.cuda import ArgumentError, Kernel, cpu, find
from flashviz.ladder import DECODE

VECTORS, HEADS = "flash_decoding_vectors", "flash_decoding_heads"
SMALL = {VECTORS: {"T": "half", "Bc": 8, "D": 64, "Warps": 2}, HEADS: {"T": "half", "Bc": 32, "D": 64, "Warps": 2}}
ALLOWED = {"half": 2.0**-10, "bfloat16": 2.0**-7}  # of max |V|: O and, in the heads rung, P are rounded to T

needs_compiler = pytest.mark.skipif(not cpu.status().usable, reason=cpu.status().reason)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(2311)


def bits(x: np.ndarray, T: str) -> np.ndarray:
    return x.astype(np.float16) if T == "half" else fv.to_bfloat16(x)


def real(x: np.ndarray) -> np.ndarray:
    return fv.from_bfloat16(x) if x.dtype == np.uint16 else x.astype(np.float64)


def decode(
    name: str, Q: Any, K: Any, V: Any, splits: int, *, T: str = "half", causal: int = 0, kv_len: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """O and L of one launch on the processor, from outputs that start as NaN."""
    (B, Hq, Nq, _), (Hkv, Nk) = Q.shape, K.shape[1:3]
    O, L = np.empty_like(Q), np.empty((B, Hq, Nq), np.float32)
    Os, Ls = np.empty((splits, *Q.shape), np.float32), np.empty((splits, B, Hq, Nq), np.float32)
    numbers = {"Nq": Nq, "Nk": Nk, "causal": causal, "Hq": Hq, "Hkv": Hkv, "splits": splits}
    numbers |= {} if kv_len is None else {"kv_len": kv_len}
    arrays = {"Q": Q, "K": K, "V": V, "O": O, "L": L, "Os": Os, "Ls": Ls}
    cuda.launch(Kernel(name, SMALL[name] | {"T": T}), {**arrays, **numbers}, device="cpu", poison=True)
    return real(O), L


def inputs(rng: np.random.Generator, T: str, Hq: int, Hkv: int, Nq: int, Nk: int) -> list[np.ndarray]:
    shapes = ((2, Hq, Nq, 64), (2, Hkv, Nk, 64), (2, Hkv, Nk, 64))
    return [bits(rng.standard_normal(shape, dtype=np.float32), T) for shape in shapes]


@needs_compiler
@pytest.mark.parametrize("name", [VECTORS, HEADS])
@pytest.mark.parametrize("T", ["half", "bfloat16"])
@pytest.mark.parametrize("splits", [1, 2, 9])
def test_what_lies_behind_the_used_keys_is_never_touched(name: str, T: str, splits: int, rng: Any) -> None:
    Q, K, V = inputs(rng, T, 6, 2, 2, 80)
    for used in (0, 1, 61):
        for x in (K, V):
            x[:, :, used:] = bits(np.float32("nan"), T)
            x[:, :, :used] = bits(rng.standard_normal(x[:, :, :used].shape, dtype=np.float32), T)
        O, L = decode(name, Q, K, V, splits, T=T, causal=1, kv_len=used)
        want, want_L = attention(real(Q), real(K), real(V), causal=True, kv_len=used)
        bound = ALLOWED[T] * np.abs(real(V[:, :, :used])).max(initial=1)
        np.testing.assert_allclose(O, want, atol=bound, rtol=0)
        np.testing.assert_allclose(L, want_L, atol=1e-5)  # -inf where no key is seen, in both


@needs_compiler
@pytest.mark.parametrize("name", [VECTORS, HEADS])
def test_the_counts_are_back_at_zero_after_every_launch(name: str, rng: Any) -> None:
    Q, K, V = inputs(rng, "half", 4, 2, 1, 70)
    first = {splits: decode(name, Q, K, V, splits) for splits in (2, 5, 3)}
    for splits in (3, 2, 5, 5):
        for a, b in zip(first[splits], decode(name, Q, K, V, splits), strict=True):
            assert np.array_equal(a, b)


@needs_compiler
@pytest.mark.parametrize("name", [VECTORS, HEADS])
def test_scores_that_no_half_could_hold(name: str, rng: Any) -> None:
    Q, K, V = inputs(rng, "half", 2, 2, 1, 40)
    Q[...], K[...] = 200, 200
    K[:, :, 17] = 201  # scale · q k is 320,000, and one key 1,600 above the others: O is its V
    O, L = decode(name, Q, K, V, 3)
    np.testing.assert_array_equal(O[:, :, 0], real(V[:, :, 17]))
    np.testing.assert_allclose(L, 200 * 201 * 64 / 8, rtol=1e-6)


def test_more_rows_than_an_mma_has_columns_are_refused() -> None:
    Q, K = np.zeros((1, 9, 1, 64), np.float16), np.zeros((1, 1, 16, 64), np.float16)
    with pytest.raises(ArgumentError, match=re.escape("Hq / Hkv * Nq <= 8")):
        decode(HEADS, Q, K, K, 1)


@pytest.mark.parametrize("name", [VECTORS, HEADS])
def test_the_measured_values_are_those_of_an_instance_and_of_the_search(name: str) -> None:
    header = find(name).header
    measured = next(one for one in DECODE if one.kernel == name).measured
    for D, values in measured.items():
        for T in ("half", "bfloat16"):
            assert {"T": T, "D": D, **values} in [dict(instance) for instance in header.instances]
        assert any(all(value in tune[key] for key, value in values.items()) for tune in header.tunes)


@pytest.mark.parametrize("name", [VECTORS, HEADS])
def test_each_barrier_says_what_it_protects(name: str) -> None:
    lines = [line for line in find(name).assembled.splitlines() if re.search(r"__syncthreads\w*\(", line)]
    assert len(lines) == 3
    assert all(len(line.partition("//")[2].split()) > 5 for line in lines)
