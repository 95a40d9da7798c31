"""FlashAttention-3 as a program: its numbers, who waits for whom in whichever order the roles run, and planted faults."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import oracle

import flashviz as fv
from flashviz.bfloat16 import from_bfloat16, to_bfloat16
from flashviz.events import Barrier, Change, Event, Launch, Move
from flashviz.programs.flash_attention_3 import FlashAttention3, forward
from flashviz.programs.roles import Deadlock

ORDERS = [(), ("consumer 1",), ("consumer 2", "consumer 1"), ("consumer 2", "producer")]


def inputs(seed: int, Nq: int, Nk: int, d: int = 8, heads: tuple[int, int] = (1, 1), B: int = 1) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((B, h, n, d), "f4") for h, n in ((heads[0], Nq), (heads[1], Nk), (heads[1], Nk))]


def performed(fa: FlashAttention3, order: tuple[str, ...] = ()) -> fv.Run:
    forward(fa, order)
    return fa.run()


def acting(event: Event) -> str:
    return event.trace.role if event.trace is not None else ""


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    Nq=st.integers(1, 40),
    Nk=st.integers(1, 40),
    share=st.integers(1, 5),
    consumers=st.sampled_from([2, 3]),
    Bc=st.integers(1, 9),
    stages=st.integers(2, 5),
    multiprocessors=st.integers(1, 5),
    causal=st.booleans(),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    order=st.sampled_from(ORDERS),
    dtype=st.sampled_from(["float16", "bfloat16"]),
    scale=st.sampled_from([None, 0.0, -0.3, 2.0]),
)
def test_numbers_against_the_oracle_in_every_order(
    seed, Nq, Nk, share, consumers, Bc, stages, multiprocessors, causal, heads, order, dtype, scale
):
    arrays = inputs(seed, Nq, Nk, heads=heads, B=1 + seed % 2)
    sizes: dict[str, Any] = {"Br": share * consumers, "Bc": Bc, "stages": stages, "consumers": consumers}
    fa = FlashAttention3(*arrays, **sizes, multiprocessors=multiprocessors, dtype=dtype, causal=causal, scale=scale)
    run = performed(fa, order)
    held = [from_bfloat16(to_bfloat16(x)) if dtype == "bfloat16" else x.astype(dtype).astype("f4") for x in arrays]
    O, L = oracle.attention(*held, causal=causal, scale=scale)
    assert np.abs(run.O - O).max() <= fa.bound()
    assert np.array_equal(np.isneginf(run.L), np.isneginf(L))
    seen = ~np.isneginf(L)
    assert not seen.any() or np.abs(run.L[seen] - L[seen]).max() <= fa.bound()
    assert run.recording.findings == ()
    assert fv.check_traffic(run) == []


@pytest.mark.parametrize("causal", [False, True])
def test_the_walk_shares_every_row_block_out_once(causal):
    """Persistent blocks: each row block of each head belongs to one; with causal, pairs are of equal work."""
    for Nq, Nk, heads in ((40, 40, 2), (36, 36, 3), (12, 40, 1), (4, 4, 1)):
        fa = FlashAttention3(*inputs(1, Nq, Nk, heads=(heads, 1)), multiprocessors=3, causal=causal)
        taken = []
        for block in range(fa.grid):
            fa.begin(block)
            taken += fa.rows
            assert [i for i, j in fa.walk if j == 0] == fa.rows
        assert sorted(taken) == list(range(heads * fa.a.Tr))
    fa = FlashAttention3(*inputs(1, 32, 32), multiprocessors=4, causal=True)
    work = []
    for block in range(fa.grid):
        fa.begin(block)
        work.append(len(fa.walk))
    assert (fa.grid, set(work)) == (4, {9})  # 8 row blocks of 1 to 8 tiles


@pytest.mark.parametrize(("N", "heads"), [(44, 4), (40, 4), (32, 3), (44, 3)])
def test_causal_pairs_are_equal_work(N, heads):
    """Row blocks of 4 rows, an even or odd number of them, of an even or odd number of heads; as many blocks as pairs."""
    arrays = inputs(0, N, N, heads=(heads, heads))
    fa = FlashAttention3(*arrays, Br=4, Bc=4, multiprocessors=1000, causal=True, record=False)
    assert fa.grid == -(-heads * N // 8)
    work = []
    for block in range(fa.grid):
        fa.begin(block)
        assert len(fa.rows) == 2 or (block >= fa.grid - N // 4 and heads % 2)
        work += [len(fa.walk)] * (len(fa.rows) == 2)
    assert set(work) == {N // 4 + 1}
    assert sum(work) >= heads * (N // 4) * (N // 4 + 1) / 2 - N // 4


def test_the_row_block_that_is_not_full_has_the_fewest_tiles():
    fa = FlashAttention3(*inputs(0, 16, 16), Br=6, Bc=2, consumers=3, causal=True, record=False)
    assert [[fa.rows_of(w, i)[1:] for w in fa.consumers] for i in (0, 1)] == [
        [(-2, 0), (0, 2), (2, 2)],
        [(4, 2), (6, 2), (8, 2)],
    ]
    assert [fa.tiles(i) for i in range(3)] == [2, 5, 8]
    assert fa.tiles(0) == min(fa.tiles(i) for i in range(fa.a.Tr))


def test_each_role_does_its_own_and_says_so():
    recording = fv.flash_attention_3(*inputs(2, 8, 12), device="numpy").recording
    by_role: dict[str, set[str]] = {}
    for step in recording.steps:
        for event in recording.events[step.first : step.end]:
            by_role.setdefault(acting(event), set()).add(step.action)
    does = {"scores", "softmax", "probabilities", "accumulate", "store_l", "store_o", "give_back"}
    assert by_role.pop("") == {""}  # inputs, launch and begin
    assert by_role == {"producer": {"load_k", "load_q", "load_v"}, "consumer 1": does, "consumer 2": does}
    for event in recording.events:
        if isinstance(event, Change) and event.launch >= 0:
            assert event.slot.split(" ")[1] == acting(event).split(" ")[1]  # registers are the consumer's own
        if isinstance(event, Move) and acting(event) == "producer":
            assert event.asynchronous
    where = {slot.name: slot.memory for slot in recording.slots if not slot.shared_by_grid}
    assert {n for n, memory in where.items() if memory == "shared"} == {
        *("Qi 1[0]", "Qi 1[1]", "Qi 2[0]", "Qi 2[1]", "Kj[0]", "Kj[1]", "Vj[0]", "Vj[1]")
    }
    assert {n.split(" ")[0] for n, memory in where.items() if memory == "register"} == {
        *("Sij", "Pij", "mi", "li", "ci", "Oi")
    }
    launch = next(e for e in recording.events if isinstance(e, Launch))
    assert (launch.kernel, launch.grid, launch.threads) == ("flash_attention_3", (1, 1, 1), (384, 1, 1))
    assert [source.language for source in recording.code] == ["python", "cuda"]


def test_the_order_of_a_role_is_that_of_the_kernel():
    """Scores of the next tile come before the values of the last; L of a row block before the softmax of the next, O after it."""
    recording = fv.flash_attention_3(*inputs(2, 8, 8), device="numpy").recording
    mine = [
        (s.action, dict(s.tiles).get("i"), dict(s.tiles).get("j"))
        for s in recording.steps
        if s.action and acting(recording.events[s.first]) == "consumer 2"
    ]
    assert mine == [
        ("scores", 0, 0),
        ("softmax", 0, 0),
        ("probabilities", 0, 0),
        ("scores", 0, 1),
        ("softmax", 0, 1),
        ("accumulate", 0, 0),
        ("probabilities", 0, 1),
        ("scores", 1, 0),
        ("store_l", 0, None),
        ("softmax", 1, 0),
        ("accumulate", 0, 1),
        ("store_o", 0, None),
        ("probabilities", 1, 0),
        ("scores", 1, 1),
        ("give_back", None, None),
        ("softmax", 1, 1),
        ("accumulate", 1, 0),
        ("probabilities", 1, 1),
        ("accumulate", 1, 1),
        ("store_l", 1, None),
        ("store_o", 1, None),
        ("give_back", None, None),
    ]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stages", [2, 3])
def test_a_slot_is_filled_again_when_every_consumer_has_said_that_it_is_empty(stages, order):
    recording = performed(FlashAttention3(*inputs(4, 12, 20), stages=stages), order).recording
    said: dict[str, int] = {}
    filled: dict[str, int] = {}
    for event in recording.events:
        if isinstance(event, Barrier) and event.kind == "arrive":
            said[event.group] = said.get(event.group, 0) + 1
        if isinstance(event, Move) and event.asynchronous and event.parts[0].dst[0] in "KV":
            slot = event.parts[0].dst
            phase = filled.get(slot, 0)
            assert (event.group, event.stage) == (f"{slot} full, phase {phase}", int(slot[3]))
            assert phase == 0 or said[f"{slot} empty, phase {phase - 1}"] == 2
            filled[slot] = phase + 1
    assert sum(filled.values()) == 2 * 3 * 5


def test_a_tile_is_there_when_a_consumer_has_waited_for_it():
    recording = fv.flash_attention_3(*inputs(2, 4, 8), device="numpy").recording
    at = {step.label: n for n, step in enumerate(recording.steps)}
    asked, used = (
        at[f"block 0 · {what}"] for what in ("i = 0 · j = 0 · ask for Kj", "w = 1 · i = 0 · j = 0 · fill Sij")
    )
    assert [recording.content(n, "Kj[0]") is None for n in (asked, used - 1, used)] == [True, True, False]
    assert recording.content(used, "Kj[0]").label == "K0"


def test_the_recording_is_of_the_blocks_asked_for():
    fa = FlashAttention3(*inputs(2, 32, 8), multiprocessors=3, record=[1])
    recording = performed(fa).recording
    assert [b.tile for b in recording.blocks(0)] == [1]
    assert {dict(s.tiles)["i"] for s in recording.steps if s.action == "store_o"} == {1, 4, 7}


# -- faults ----------------------------------------------------------------------------------------------------------------


class Careless(FlashAttention3):
    """Leaves waits out: those of ``role`` whose names have all of ``words``."""

    role, words = "", ("",)

    def waits(self, action: str, *tiles: int) -> list[str]:
        who = "producer" if action.startswith("load") else f"consumer {tiles[0]}"
        found = super().waits(action, *tiles)
        return found if who != self.role else [w for w in found if not all(word in w for word in self.words)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("role", "words", "kind", "slot"),
    [
        ("consumer 1", ("Kj", "full"), "read-arriving", "Kj[0]"),
        ("consumer 2", ("Kj", "full"), "read-arriving", "Kj[0]"),
        ("consumer 2", ("Vj", "full"), "read-arriving", "Vj[0]"),
        ("consumer 2", ("Qi", "full"), "read-arriving", "Qi 2[0]"),
    ],
)
def test_a_consumer_that_does_not_wait_is_found_in_every_order(order, role, words, kind, slot):
    fa = Careless(*inputs(5, 4, 12))
    fa.role, fa.words = role, words
    with np.errstate(all="ignore"):
        run = performed(fa, order)
    found = {(f.kind, f.slot) for f in run.recording.findings}
    early = {("read-empty", slot)}  # before it was even asked for
    assert found & ({(kind, slot)} | early)
    assert {f.slot[:2] for f in run.recording.findings} >= {slot[:2]}


@pytest.mark.parametrize("name", ["Kj", "Vj"])
def test_a_producer_that_does_not_wait_for_room_is_found(name):
    fa = Careless(*inputs(5, 4, 20))
    fa.role, fa.words = "producer", (name, "empty")
    with np.errstate(all="ignore"):
        run = performed(fa)
    assert run.recording.findings[0].kind == "read-arriving"
    assert run.recording.findings[0].slot in (f"{name}[0]", f"{name}[1]")
    assert np.isnan(run.O).any()


def test_q_over_an_o_that_has_not_left_is_found():
    """The third row block's Q comes into the buffer by which the first one's O leaves."""

    class TooEarly(FlashAttention3):
        def store_o(self, w: int, i: int) -> None:
            super().store_o(w, i)
            self.arrived[self.part(w, i)[3]] += 1

    run = performed(TooEarly(*inputs(5, 12, 8)))
    assert ("overwritten-leaving", "Qi 1[0]") in {(f.kind, f.slot) for f in run.recording.findings}


def test_a_word_that_is_never_said_is_a_deadlock_and_names_who_waits():
    class Silent(FlashAttention3):
        def arrive(self, name: str, protects: str = "") -> None:
            if name != "Kj[1] empty, phase 0":
                super().arrive(name, protects)

    with pytest.raises(Deadlock, match=r"producer before load_k\(0, 3\) for Kj\[1\] empty, phase 0") as stuck:
        performed(Silent(*inputs(5, 4, 20)))
    assert "consumer 1 before scores(1, 0, 3) for Kj[1] full, phase 1" in str(stuck.value)


# -- where it runs ---------------------------------------------------------------------------------------------------------


def test_what_is_refused():
    x = np.eye(8, 4)
    for options, words in (
        ({"stages": 1}, "stages=1: a tile of V is used until the next one is there"),
        ({"consumers": 4}, "consumers=4 for Br=4: 2 or 3 warpgroups"),
        ({"Br": 5}, "consumers=2 for Br=5"),
        ({"dtype": "float32"}, "dtype='float32' is none of float16, bfloat16"),
        ({"multiprocessors": 0}, "multiprocessors=0"),
        ({"device": "tpu"}, "device='tpu'"),
    ):
        with pytest.raises(ValueError, match=words):
            fv.flash_attention_3(x, x, x, **{"device": "numpy", **options})
    fa = FlashAttention3(x, x, x)
    with pytest.raises(IndexError, match="block 1: there are 1"):
        fa.begin(1)
    fa.begin(0)
    with pytest.raises(IndexError, match="tile j=7 of row block i=0"):
        fa.load_k(0, 7)
    with pytest.raises(IndexError, match="row block i=3"):
        fa.load_q(1, 3)


def test_other_devices_say_why_not_and_what_runs_instead():
    x = np.eye(8, 4)
    with pytest.raises(fv.DeviceError, match=r"TMA and wgmma .* flash_attention_2_tuned does the same work there"):
        fv.flash_attention_3(x, x, x, device="cpu")
    with pytest.raises(fv.DeviceError, match="takes Br = 128 or 192, not 4"):
        fv.flash_attention_3(x, x, x, device="gpu", record=False)
    assert fv.flash_attention_3(x, x, x, record=False).device == "numpy"
    assert fv.flash_attention_3(x, x, x).device == "numpy"
