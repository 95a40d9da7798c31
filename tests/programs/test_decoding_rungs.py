"""The decoding ladder's programs: against the oracle, in registers and in one launch, and their kernels on the processor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import oracle
from programs.test_rungs import rounded
from programs.traced import change

import flashviz as fv
from flashviz import cuda, ladder
from flashviz.cuda import cpu
from flashviz.events import Barrier
from flashviz.programs import flash_decoding
from flashviz.programs import flash_decoding_rungs as rungs
from flashviz.programs.claims import observe
from flashviz.programs.replay import replay

KINDS = [(rung, dtype) for rung in (1, 2) for dtype in ("float16", "bfloat16")]
TILES = {1: (4, 64), 2: (16, 64)}
"""Bc and d: the smallest that a rung's kernel is compiled for."""
on_processor = pytest.mark.skipif(not cpu.status().usable, reason="no C++ compiler is here")


def inputs(seed: int, Nq: int, Nk: int, heads: tuple[int, int], d: int = 8, B: int = 2) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((B, h, n, d), dtype="f4") for h, n in ((heads[0], Nq), (heads[1], Nk), (heads[1], Nk))]


@pytest.mark.parametrize(("rung", "dtype"), KINDS)
@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    Nq=st.integers(1, 4),
    Nk=st.integers(1, 30),
    heads=st.sampled_from([(1, 1), (4, 2), (2, 2)]),
    splits=st.integers(1, 5),
    Bc=st.integers(1, 7),
    causal=st.booleans(),
    used=st.none() | st.integers(0, 30),
)
def test_numbers_against_the_oracle(rung, dtype, seed, Nq, Nk, heads, splits, Bc, causal, used):
    arrays = inputs(seed, Nq, Nk, heads)
    kv_len = None if used is None else min(used, Nk)
    options = {"splits": splits, "Bc": Bc, "causal": causal, "kv_len": kv_len}
    run = fv.flash_decoding(*arrays, rung=rung, dtype=dtype, device="numpy", **options)
    O, L = oracle.attention(*(rounded(x, dtype) for x in arrays), causal=causal, kv_len=kv_len)
    limit = rungs.FlashDecodingRung(*arrays, rung=rung, dtype=dtype, **options).bound()
    assert np.abs(run.O - O).max() <= limit
    assert np.array_equal(np.isneginf(run.L), np.isneginf(L))
    seen = ~np.isneginf(L)
    assert not seen.any() or np.abs(run.L[seen] - L[seen]).max() <= limit
    assert run.recording.findings == ()
    assert fv.check_traffic(run) == []


@pytest.mark.parametrize("rung", [1, 2])
def test_all_in_registers_one_launch_and_no_barrier(rung):
    run = fv.flash_decoding(*inputs(1, 1, 20, (4, 2)), rung=rung, splits=3, Bc=4, device="numpy")
    recording = run.recording
    assert {s.memory for s in recording.slots if not s.shared_by_grid} == {"register"}
    assert [(e.kernel, e.grid) for e in recording.launches] == [
        (ladder.rung(rung, ladder.DECODE).kernel, (3, {1: 4, 2: 2}[rung], 2))
    ]
    assert not [e for e in recording.events if isinstance(e, Barrier)]
    merged = [s.block for s in recording.steps if "load_partials" in s.actions]
    assert [block.tile for block in merged] == [2] * len(merged)
    assert len(merged) == 2 * {1: 4, 2: 2}[rung]


def test_rung_2_reads_keys_once_for_all_queries_that_share_them():
    counted = [fv.traffic(fv.flash_decoding(*inputs(1, 1, 20, (8, 2)), rung=n, Bc=4, device="numpy")) for n in (1, 2)]
    assert [c.trips["K"] for c in counted] == [4, 1]
    assert counted[0].tensors["K"].bytes_read == 4 * counted[1].tensors["K"].bytes_read


def test_one_split_leaves_no_partials():
    run = fv.flash_decoding(*inputs(1, 1, 20, (2, 2)), rung=1, splits=1, device="numpy")
    assert not [s for s in run.recording.slots if s.tensor in ("Os", "Ls")]
    assert {a for s in run.recording.steps for a in s.actions} & {"store_partial", "load_partials"} == set()


def test_splits_that_keep_a_gpu_busy(monkeypatch):
    class Status:
        usable, multiprocessors = True, 132

    shapes = [(2, 8, 1, 64), (2, 2, 4096, 64)]
    q, K = (np.broadcast_to(np.float32(0), shape) for shape in shapes)
    assert flash_decoding.enough_splits(q, K, 64, None, 1, "numpy") == 4
    monkeypatch.setattr(cuda, "status", Status)
    for rung, blocks in ((0, 4), (1, 16), (2, 4)):
        found = flash_decoding.enough_splits(q, K, 64, 4000, rung, "auto")
        assert found == cuda.choose_splits(blocks, 4000, 132, 64) > 1
    assert flash_decoding.enough_splits(q[0], K[0], 64, None, 2, "gpu") == cuda.choose_splits(2, 4096, 132, 64)
    wide = np.broadcast_to(np.float32(0), (1, 16, 4096, 128))  # here a block of rung 2 has a multiprocessor to itself
    found = [flash_decoding.enough_splits(wide[..., :1, :], wide, 128, None, rung, "gpu") for rung in (1, 2)]
    assert found == [cuda.choose_splits(16, 4096, 132, 128, each=each) for each in (2, 1)] == [16, 8]
    monkeypatch.undo()
    assert fv.flash_decoding(q, K[:, :, :64], K[:, :, :64], splits=None, device="numpy").params["splits"] == 4


def test_what_is_refused():
    q, K, V = inputs(1, 3, 8, (8, 2))
    for options, words in (
        ({"rung": 3}, "rung=3 is none of 0, 1, 2"),
        ({"rung": 2}, "12 queries share a head of K and V: rung 2 takes up to 8"),
        ({"rung": 1, "dtype": "float32"}, r"rung 1 \(flash_decoding_vectors\) takes float16 or bfloat16"),
        ({"rung": 1, "causal": True, "window": 2}, "window= with rung=1: flash_decoding_vectors has no window"),
        ({"dtype": "bfloat16"}, r"rung 0 \(flash_decoding\) takes float32"),
    ):
        with pytest.raises(ValueError, match=words):
            fv.flash_decoding(q, K, V, device="numpy", **options)
    for rung, Bc, d, words in (
        (2, 12, 64, "Bc=12, d=64: the kernel of decoding rung 2 takes Bc as a multiple of 16"),
        (1, 3, 64, "Bc=3, d=64: .* a multiple of 256 / d"),
        (1, 64, 48, "Bc=64, d=48: "),
    ):
        with pytest.raises(ValueError, match=words):
            rungs.warps_of(rung, Bc, d)
    assert [rungs.warps_of(1, *tile) for tile in ((4, 64), (256, 64), (128, 128), (8, 128))] == [1, 8, 8, 4]


# -- their kernels, on the processor --------------------------------------------------------------------------------------


def a_program(rung: int, dtype: str, seed: int) -> rungs.FlashDecodingRung:
    rng = np.random.default_rng(seed)
    Bc, d = TILES[rung]
    heads, Nq = [((2, 2), 1), ((4, 2), 2), ((8, 1), 1)][rng.integers(3)]
    Nk = int(rng.integers(1, 5 * Bc))
    options: dict[str, Any] = {"splits": int(rng.integers(1, 4)), "causal": bool(rng.integers(2))}
    options |= {"kv_len": int(rng.integers(0, Nk + 1)) if rng.integers(2) else None}
    arrays = inputs(seed, Nq, Nk, heads, d, int(rng.integers(1, 3)))
    return rungs.FlashDecodingRung(*arrays, rung=rung, dtype=dtype, Bc=Bc, **options)


@on_processor
@pytest.mark.parametrize(("rung", "dtype"), KINDS)
@settings(max_examples=4)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_kernels_do_what_they_name(rung, dtype, seed):
    fd, want = a_program(rung, dtype, seed), a_program(rung, dtype, seed)
    (O, _), recording, false = observe(fd, rungs.forward, lambda: rungs.launch_kernel(fd, "cpu"))
    assert false == []
    rungs.forward(want)
    assert np.abs(O - want.run().O).max() <= fd.bound()
    assert fv.same(recording, want.run()) == []


@on_processor
@pytest.mark.parametrize("rung", [1, 2])
def test_a_run_on_the_processor(rung):
    Bc, d = TILES[rung]
    arrays = inputs(4, 1, 3 * Bc + 1, (4, 2), d)
    run = fv.flash_decoding(*arrays, rung=rung, Bc=Bc, splits=2, device="cpu")
    plain = fv.flash_decoding(*arrays, rung=rung, Bc=Bc, splits=2, device="cpu", record=False)
    assert (run.device, run.recording.source, plain.recording) == ("cpu", "kernel", None)
    assert np.array_equal(run.O, plain.O)


@on_processor
def test_a_block_that_merges_may_be_any():
    """As on a GPU: the block that finished last has the number 0, and its trace comes first."""
    Bc, d = TILES[1]
    arrays = inputs(4, 1, 4 * Bc, (1, 1), d, 1)
    fd = rungs.FlashDecodingRung(*arrays, rung=1, Bc=Bc, splits=2)
    with cuda.tracing([16]) as traces:
        O, _ = rungs.launch_kernel(fd, "cpu")
    (trace,) = traces
    first, last = trace.blocks
    tail = next(n for n, did in enumerate(last.actions) if did.name == "load_partials")
    swapped = (
        replace(first, actions=first.actions + last.actions[tail:]),
        replace(last, actions=last.actions[:tail]),
    )
    replay(fd, [replace(trace, blocks=swapped)])
    assert np.abs(fd.run().O - O).max() <= fd.bound()
    assert fd.run().recording.findings == ()


@on_processor
def test_a_lie_is_reported(monkeypatch, tmp_path):
    change(monkeypatch, tmp_path, "flash_decoding_vectors", ("TRACE(load_v, j)", "TRACE(load_v, last - 1)"))
    Bc, d = TILES[1]
    fd = rungs.FlashDecodingRung(*inputs(4, 1, 4 * Bc, (1, 1), d, 1), rung=1, Bc=Bc, splits=1)
    false = observe(fd, rungs.forward, lambda: rungs.launch_kernel(fd, "cpu"))[2]
    assert (false[0].action, false[0].array) == ("load_v", "V")
    assert "reads V[0, 0, 0, 0], not of V3, which it names" in str(false[0])
