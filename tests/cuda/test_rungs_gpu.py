"""The rungs on device="gpu", on a CuPy made of NumPy whose traced launches run on the processor: types, bits and recordings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashviz as fv
from flashviz.cuda import cpu
from flashviz.programs import flash_attention_2_rungs as rungs

pytestmark = pytest.mark.skipif(not cpu.status().usable, reason="no C++ compiler is here")
TILES = {1: (4, 4, 8), 2: (16, 8, 32), "tf32": (16, 16, 16), 3: (16, 16, 16), 4: (16, 16, 16), 5: (32, 32, 32)}
KINDS = [*((name, None) for name in TILES), (3, "bfloat16"), (5, "bfloat16")]


def tensors(d: int, N: int, heads: tuple[int, int] = (2, 1)) -> list[np.ndarray]:
    rng = np.random.default_rng(8)
    return [rng.standard_normal((heads[n > 0], N, d), dtype="f4") for n in range(3)]


@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_a_rung_is_launched_in_its_type_and_traced(fake: Any, name: Any, dtype: str | None) -> None:
    machine = fake()
    Br, Bc, d = TILES[name]
    options = {"rung": name, "dtype": dtype, "Br": Br, "Bc": Bc, "causal": True}
    Q, K, V = tensors(d, Br + 3)
    run = fv.flash_attention_2(Q, K, V, **options, device="gpu")
    want = rungs.program(Q, K, V, **options)
    rungs.loops(want)
    assert (run.device, run.O.dtype) == ("gpu", np.float32)
    assert np.abs(run.O - want.run().O).max() <= want.bound()
    assert run.recording is not None
    assert fv.same(run, want.run()) == []
    assert run.recording.params["multiprocessors"] == 132
    types = {"float32": "<", "float16": "<half, ", "bfloat16": "<bfloat16, "}
    assert types[str(run.params["dtype"])] in machine.launches[-1]["function"]


@pytest.mark.parametrize(("rung", "Bc", "d"), [(1, 4, 64), (2, 16, 64)])
def test_a_decoding_rung_with_splits_of_its_own(fake: Any, rung: int, Bc: int, d: int) -> None:
    fake()
    q, K, V = tensors(d, 5 * Bc, (4, 2))
    run = fv.flash_decoding(q[:, :1], K, V, rung=rung, Bc=Bc, splits=None, device="gpu")
    want = fv.flash_decoding(q[:, :1], K, V, rung=rung, Bc=Bc, splits=run.params["splits"], device="numpy")
    assert run.params["splits"] == 5  # few blocks: a tile each
    assert np.abs(run.O - want.O).max() < 5e-3
    assert fv.same(run, want) == []
