"""The public functions on a real GPU: every rung launched, traced and replayed, against the tile programs. Skipped where there is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashviz as fv
from flashviz import cuda
from flashviz.cuda import gpu
from flashviz.ladder import DECODE, PREFILL, rung

pytestmark = pytest.mark.skipif(not gpu.status().usable, reason=gpu.status().reason or "no GPU")


def kinds(ladder: tuple[Any, ...]) -> list[tuple[int | str, str]]:
    return [
        (one.name, dtype)
        for one in ladder
        if not one.function
        for dtype in (("float16", "bfloat16") if one.dtype == "float16" else ("float32",))
    ]


def tensors(heads: tuple[int, int], Nq: int, Nk: int, d: int) -> list[np.ndarray]:
    rng = np.random.default_rng(9)
    return [rng.standard_normal((heads[n > 0], (Nq, Nk)[n > 0], d), dtype="f4") for n in range(3)]


@pytest.mark.parametrize(("name", "dtype"), kinds(PREFILL))
@pytest.mark.parametrize("d", [64, 128])
def test_a_prefill_rung(name: int | str, dtype: str, d: int) -> None:
    values = rung(name).measured[d]
    Q, K, V = tensors((2, 1), values["Br"] + 3, 2 * values["Br"] + 5, d)
    options: dict[str, Any] = {"rung": name, "Br": values["Br"], "Bc": values["Bc"], "causal": True, "dtype": dtype}
    run = fv.flash_attention_2(Q, K, V, **options, device="gpu")
    want = fv.flash_attention_2(Q, K, V, **options, device="numpy")
    assert run.device == "gpu"
    assert run.O.dtype == np.float32
    assert fv.same(run, want) == []
    assert np.abs(run.O - want.O).max() < {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
    bare = fv.flash_attention_2(Q, K, V, **options, device="gpu", record=False)
    assert bare.recording is None
    assert np.array_equal(bare.O, run.O)


@pytest.mark.parametrize(("name", "dtype"), [kind for kind in kinds(DECODE) if kind[1] != "bfloat16"])
@pytest.mark.parametrize("d", [64, 128])
def test_a_decoding_rung(name: int | str, dtype: str, d: int) -> None:
    Bc = rung(name, DECODE).measured[d]["Bc"]
    q, K, V = tensors((4, 2), 1, 3 * Bc + 7, d)
    run = fv.flash_decoding(q, K, V, rung=name, Bc=Bc, device="gpu")
    want = fv.flash_decoding(q, K, V, rung=name, Bc=Bc, splits=int(run.params["splits"]), device="numpy")
    assert run.device == "gpu"
    for one in fv.same(run, want):  # the block that finishes last merges: which one that is, only the GPU knows
        assert {one.action, one.other_action} == {"load_partials", ""}
    assert np.abs(run.O - want.O).max() < {"float32": 2e-5, "float16": 4e-3}[dtype]


@pytest.mark.skipif("90" not in str(cuda.status().arch), reason="the kernel is for compute capability 9.0")
@pytest.mark.parametrize(("d", "dtype", "causal"), [(64, "float16", True), (128, "bfloat16", False)])
def test_flash_attention_3(d: int, dtype: str, causal: bool) -> None:
    Q, K, V = tensors((4, 2), 300, 500, d)
    consumers = {64: 3, 128: 2}[d]
    options: dict[str, Any] = {"Br": 64 * consumers, "Bc": 128, "stages": consumers, "consumers": consumers}
    options |= {"dtype": dtype, "causal": causal}
    run = fv.flash_attention_3(Q, K, V, **options, device="gpu")
    assert run.device == "gpu"
    assert run.recording is not None
    blocks = int(run.recording.params["multiprocessors"])
    want = fv.flash_attention_3(Q, K, V, **options, multiprocessors=blocks, device="numpy")
    assert fv.same(run, want) == []
    assert np.abs(run.O - want.O).max() < {"float16": 4e-3, "bfloat16": 3e-2}[dtype]
