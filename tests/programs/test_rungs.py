"""The ladder's programs: their numbers against the oracle, where things are and when they arrive, and their kernels on the processor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import oracle
from programs.traced import change

import flashviz as fv
from flashviz import cuda, ladder
from flashviz.bfloat16 import from_bfloat16, to_bfloat16
from flashviz.cuda import cpu
from flashviz.events import Barrier, Change, Move
from flashviz.programs import flash_attention_2_rungs as rungs
from flashviz.programs.claims import FalseClaim, observe
from flashviz.programs.flash_attention_2_registers import DTYPES

NAMES = [rung.name for rung in ladder.PREFILL if rung.name != 0 and not rung.function]
KINDS = [(name, dtype) for name in NAMES for dtype in (DTYPES if ladder.rung(name).dtype == "float16" else [None])]
TILES = {1: (4, 4, 8), 2: (16, 8, 32), "tf32": (16, 16, 16), 3: (16, 16, 16), 4: (16, 16, 16), 5: (32, 32, 32)}
"""Br, Bc and d: the smallest that a rung's kernel is compiled for."""
on_processor = pytest.mark.skipif(not cpu.status().usable, reason="no C++ compiler is here")


def rounded(x: np.ndarray, dtype: str | None) -> np.ndarray:
    if dtype == "bfloat16":
        return from_bfloat16(to_bfloat16(x))
    return x.astype(dtype or "float32").astype("float32")


def inputs(seed: int, Nq: int, Nk: int, d: int, heads: tuple[int, int] = (2, 1), size: float = 1.0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = (heads[0], Nq, d), (heads[1], Nk, d), (heads[1], Nk, d)
    return [size * rng.standard_normal(shape, "f4") for shape in shapes]


@pytest.mark.parametrize(("name", "dtype"), KINDS)
@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    Nq=st.integers(1, 20),
    Nk=st.integers(1, 20),
    tile=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    causal=st.booleans(),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    size=st.sampled_from([0.1, 1.0, 6.0]),
)
def test_numbers_against_the_oracle(name, dtype, seed, Nq, Nk, tile, causal, heads, size):
    arrays = inputs(seed, Nq, Nk, 8, heads, size)
    fa = rungs.program(*arrays, rung=name, dtype=dtype, Br=tile[0], Bc=tile[1], causal=causal, record=False)
    rungs.loops(fa)
    run = fa.run()
    O, L = oracle.attention(*(rounded(x, dtype) for x in arrays), causal=causal)
    assert np.abs(run.O - O).max() <= fa.bound()
    assert np.array_equal(np.isneginf(run.L), np.isneginf(L))
    seen = ~np.isneginf(L)
    assert not seen.any() or np.abs(run.L[seen] - L[seen]).max() <= fa.bound()
    assert np.array_equal(rounded(run.O, dtype), run.O)


def recorded(name: Any, dtype: str | None = None, N: tuple[int, int] = (8, 12), **options: Any) -> Any:
    arrays = inputs(3, *N, 4, (1, 1))
    return fv.flash_attention_2(*arrays, Br=4, Bc=4, rung=name, dtype=dtype, device="numpy", **options)


@pytest.mark.parametrize("name", NAMES)
def test_scores_and_carries_stay_in_registers(name):
    recording = recorded(name).recording
    where = {slot.name.split("[")[0]: (slot.memory, slot.scope) for slot in recording.slots if not slot.shared_by_grid}
    assert {n for n, at in where.items() if at == ("register", "warp")} == {"Sij", "mi", "li", "Oi"}
    told = {"Pij"} if name == 2 else set()  # what its lanes tell each other
    assert {n for n, at in where.items() if at == ("shared", "block")} == {"Qi", "Kj", "Vj"} | told
    assert recording.findings == ()
    assert (recording.algorithm, recording.launches[0].kernel) == ("flash_attention_2", ladder.rung(name).kernel)
    assert recording.params["rung"] == name
    moved = {part.src for e in recording.events if isinstance(e, Move) for part in e.parts if part.dst[0] in "OL"}
    assert moved == ({"Qi", "li"} if name == 5 else {"Oi", "li"})  # out of registers straight to HBM, but on rung 5


def test_no_barrier_between_scores_softmax_and_product():
    def between(recording):
        found = []
        for step in recording.steps:
            for part in step.parts or (step,):
                if part.action in ("scores", "softmax"):
                    events = recording.events[part.first : part.end]
                    last = max(n for n, e in enumerate(events) if isinstance(e, Change))
                    found += [e for e in events[last:] if isinstance(e, Barrier) and e.kind == "block"]
        return len(found)

    assert between(recorded(0).recording) == 2 * 3 * 2  # blocks, tiles, two barriers in each
    assert [between(recorded(name).recording) for name in NAMES] == [0] * len(NAMES)


@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_bytes_across_hbm_are_those_of_the_type(name, dtype):
    run = recorded(name, dtype)
    counted, first = fv.traffic(run), fv.traffic(recorded(0))
    size = 4 if dtype is None else 2
    assert counted.bytes_read == first.bytes_read * size // 4
    assert counted.tensors["O"].bytes_written == 8 * 4 * size
    assert counted.tensors["L"].bytes_written == 8 * 4
    assert counted.trips == first.trips
    assert fv.check_traffic(run) == []


@pytest.mark.parametrize("name", [4, 5])
def test_copies_run_one_tile_ahead_into_two_buffers(name):
    recording = recorded(name).recording
    labels = [step.label for step in recording.steps if step.block == (0, 0, 0)]
    assert labels == [
        "visualize block 0",
        "block 0 · start loading Qi",
        "block 0 · j = 0 · start loading Kj, Vj",
        "block 0 · j = 1 · start loading Kj, Vj",
        "block 0 · j = 0 · wait for Kj, Vj and fill Sij",
        "block 0 · j = 0 · update mi, li and Oi",
        "block 0 · j = 2 · start loading Kj, Vj",
        "block 0 · j = 1 · wait for Kj, Vj and fill Sij",
        "block 0 · j = 1 · update mi, li and Oi",
        "block 0 · j = 2 · wait for Kj, Vj and fill Sij",
        "block 0 · j = 2 · update mi, li and Oi",
        "block 0 · write Oi, Li" + (", by way of Qi" if name == 5 else ""),
    ]
    moves = [e for e in recording.events if isinstance(e, Move) and e.asynchronous and e.block == (0, 0, 0)]
    assert [(m.parts[0].dst, m.stage, m.group) for m in moves if m.parts[0].src.startswith("K")] == [
        *[("Kj[0]", 0, "tile 0"), ("Kj[1]", 1, "tile 1"), ("Kj[0]", 0, "tile 2")]
    ]
    at = {step.label: n for n, step in enumerate(recording.steps)}
    assert recording.content(at["block 0 · j = 1 · start loading Kj, Vj"], "Kj[0]") is None  # issued, not there
    scores = at["block 0 · j = 0 · wait for Kj, Vj and fill Sij"]
    assert recording.content(scores, "Kj[0]").label == "K0"
    assert recording.content(scores, "Kj[1]") is None
    late = at["block 0 · j = 2 · start loading Kj, Vj"]
    assert recording.content(late, "Kj[0]").label == "K0"  # until K2 is waited for


def test_a_buffer_that_is_asked_for_too_early_is_found():
    """Two tiles ahead, with room for two: tile 2 comes into the buffer of tile 0 before tile 0 was used."""
    fa = fv.FlashAttention2Ahead(*inputs(3, 4, 12, 4, (1, 1)), rung=4, Br=4, Bc=4)
    fa.begin(0)
    fa.load_q()
    for j in range(3):
        fa.load_k(j)
        fa.load_v(j)
    for j in range(3):
        fa.scores(j)
        fa.softmax(j)
        fa.accumulate(j)
    fa.store_o()
    run = fa.run()
    assert np.isnan(run.O).all()
    assert [(f.kind, f.slot) for f in run.recording.findings][:2] == [
        ("read-arriving", "Kj[0]"),
        ("read-arriving", "Vj[0]"),
    ]


def test_a_rung_gives_the_recording_of_rung_0_but_for_where_things_are():
    """The same algorithm: each of its steps reads and writes the same slots."""
    done = [
        [
            (s.action, dict(s.tiles))
            for step in recorded(name).recording.steps
            for s in (step.parts or (step,))
            if s.action
        ]
        for name in (0, 1, 2, "tf32", 3)
    ]
    assert all(other == done[0] for other in done[1:])


def test_what_is_refused():
    x = np.eye(4)
    for options, words in (
        ({"rung": 7}, r"rung=7 is none of 0, 1, 2, 'tf32', 3, 4, 5, 6"),
        ({"rung": 1, "dtype": "float16"}, r"dtype='float16': rung 1 \(flash_attention_2_warps\) takes float32"),
        ({"rung": 3, "dtype": "float32"}, r"dtype='float32': rung 3 .* takes float16 or bfloat16"),
        ({"dtype": "float16"}, r"dtype='float16': rung 0 \(flash_attention_2\) takes float32"),
        (
            {"rung": 2, "causal": True, "window": 3},
            r"window= with rung=2: flash_attention_2_registers has no window; rung=0",
        ),
        ({"rung": 3, "kv_len": 3}, "kv_len= with rung=3"),
        ({"rung": 1, "mask": np.ones((4, 4), bool)}, "mask= with rung=1"),
        ({"rung": 1, "device": "tpu"}, "device='tpu'"),
    ):
        with pytest.raises(ValueError, match=words):
            fv.flash_attention_2(x, x, x, **{"device": "numpy", **options})
    assert fv.flash_attention_2(x, x, x, rung=0, dtype="float32", device="numpy").params.get("rung") is None


@pytest.mark.parametrize("make", [fv.flash_attention_2, rungs.program, fv.FlashAttention2Ahead])
@pytest.mark.parametrize("more", [{}, {"dtype": "float32"}, {"Br": 0}])
def test_flash_attention_3_is_called_by_its_own_name(make, more):
    """Before anything else is looked at: there are no arrays here."""
    words = r"rung=6 is flash_attention_3, with a program of its own: call fv.flash_attention_3\(Q, K, V, …\)"
    with pytest.raises(ValueError, match=words):
        make(None, None, None, rung=6, **more)
    x = np.eye(4)
    with pytest.raises(ValueError, match=words):
        fv.flash_attention_2(x, x, x, rung=6, device="gpu", mask=x > 0)
    assert callable(getattr(fv, ladder.rung(6).function))


# -- their kernels, on the processor --------------------------------------------------------------------------------------


@on_processor
@pytest.mark.parametrize(("name", "dtype"), KINDS)
@settings(max_examples=3)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_kernels_do_what_they_name(name, dtype, seed):
    rng = np.random.default_rng(seed)
    Br, Bc, d = TILES[name]
    Nq, Nk = int(rng.integers(1, 2 * Br + 2)), int(rng.integers(1, 3 * Bc + 2))
    heads = [(1, 1), (2, 1), (4, 2)][rng.integers(3)]
    options = {"rung": name, "dtype": dtype, "Br": Br, "Bc": Bc, "causal": bool(rng.integers(2))}
    options["scale"] = [None, 0.0, -0.3][rng.integers(3)]
    arrays = inputs(seed, Nq, Nk, d, heads)
    fa = rungs.program(*arrays, **options)
    (O, _), recording, false = observe(fa, rungs.loops, lambda: rungs.launch_kernel(fa, "cpu"))
    assert false == []
    want = rungs.program(*arrays, **options)
    rungs.loops(want)
    assert np.abs(O - want.run().O).max() <= fa.bound()
    assert fv.same(recording, want.run()) == []
    assert recording.source == "kernel"


@on_processor
def test_tiles_that_a_kernel_cannot_have_are_refused_with_those_that_it_can():
    x = np.eye(16, dtype="float32")
    words = (
        r"flash_attention_2_mma cannot have Br=4, Bc=4, D=16: tiles are made of 16 x 16 operands\. Its header has "
        r'Br=16 Bc=16 D=16, .*; device="numpy" records tiles of any size\.'
    )
    with pytest.raises(cuda.LaunchError, match=words):
        fv.flash_attention_2(x, x, x, rung=3, device="cpu")


@on_processor
@pytest.mark.parametrize("name", NAMES)
def test_a_run_on_the_processor(name):
    Br, Bc, d = TILES[name]
    arrays = inputs(4, Br + 3, 2 * Bc + 1, d)
    run = fv.flash_attention_2(*arrays, rung=name, Br=Br, Bc=Bc, device="cpu")
    plain = fv.flash_attention_2(*arrays, rung=name, Br=Br, Bc=Bc, device="cpu", record=False)
    assert (run.device, run.recording.source, plain.recording) == ("cpu", "kernel", None)
    assert np.array_equal(run.O, plain.O)
    assert np.array_equal(run.L, plain.L)
    assert run.recording.code[1].name == f"{ladder.rung(name).kernel}.cu"


LIES: dict[str, tuple[Any, tuple[str, str], tuple[str, tuple[int, ...]], str]] = {
    # name: (rung, edit, (action, tiles) of the first false claim, what it says)
    "another tensor's tile": (
        1,
        ("Kj[x][c] = k < Nk ? K[(long long)k", "Kj[x][c] = k < Nk ? V[(long long)k"),
        ("load_k", (0,)),
        "reads 0 of the 32 elements of K0",
    ),
    "a line that is missing": (
        1,
        ("        TRACE(accumulate, j);\n", ""),
        ("softmax", (0,)),
        "reads Vj, which it does not name",
    ),
    "the tiles from the last to the first": (
        3,
        ("TRACE(load_v, j);", "TRACE(load_v, tiles - 1 - j);"),
        ("load_v", (2,)),
        "reads V[0, 0, 0, 0], not of V2, which it names",
    ),
    "a prefetch that says the tile of now": (
        4,
        ("TRACE(load_k, j + 1);", "TRACE(load_k, j);"),
        ("load_k", (0,)),
        "reads K[0, 0, 16, 0], not of K0",
    ),
    "the tile after the next": (
        4,
        ("V, (j + 1) * Bc, Nk);", "V, (j + 2) * Bc, Nk);"),
        ("load_v", (1,)),
        "not of V1, which it names",
    ),
}


@on_processor
@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_reported(lie, monkeypatch, tmp_path):
    name, edit, at, words = LIES[lie]
    change(monkeypatch, tmp_path, ladder.rung(name).kernel, edit)
    Br, Bc, d = TILES[name]
    fa = rungs.program(*inputs(5, Br, 3 * Bc, d, (1, 1)), rung=name, Br=Br, Bc=Bc)
    false: list[FalseClaim] = observe(fa, rungs.loops, lambda: rungs.launch_kernel(fa, "cpu"))[2]
    mine = [claim for claim in false if (claim.action, claim.tiles) == at]
    assert mine, [str(claim) for claim in false[:4]]
    assert any(words in str(claim) for claim in mine), [str(claim) for claim in mine]
