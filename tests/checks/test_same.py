"""Two recordings compared by what depends on what; kernels that do it otherwise, on the processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs.traced import an_attention, change, loop_of

import flashviz as fv
from flashviz.checks.same import Difference, same
from flashviz.cuda import cpu
from flashviz.programs import flash_attention_1 as fa1
from flashviz.programs import flash_attention_2 as fa2
from flashviz.programs import flash_decoding as decoding
from flashviz.programs.replay import run_kernel
from flashviz.recorder import Recorder
from flashviz.slots import Block

needs_compiler = pytest.mark.skipif(not cpu.status().usable, reason="no C++ compiler is here")
TILE = ("load_k", "load_v", "scores", "softmax", "accumulate")
RUN = fv.flash_attention_2(*[np.eye(12, 8, dtype="f4")] * 3, device="numpy")


def performed(*actions: tuple[str, int]) -> fv.Recording:
    """One block of one row block and three key tiles that performs these actions between its load and its store."""
    x = np.eye(12, 8, dtype="f4")
    fa = fa2.FlashAttention2(x[:4], x, x)
    fa.begin(0)
    fa.load_q()
    for name, j in actions:
        getattr(fa, name)(j)
    fa.store_o()
    return fa.r.recording()


def tiles(*order: int) -> list[tuple[str, int]]:
    return [(name, j) for j in order for name in TILE]


PLAIN = performed(*tiles(0, 1, 2))


def test_a_recording_is_the_same_as_itself() -> None:
    assert same(RUN, RUN) == []
    assert fv.same(RUN.recording, RUN) == []


@given(st.permutations(tiles(0, 1, 2)))
def test_an_order_is_the_same_exactly_when_what_depends_on_what_is(order: list[tuple[str, int]]) -> None:
    """Against the definition: each action's writes come after the reads and writes of those slots that came before them."""
    slots = {
        "load_k": ("", "K"),
        "load_v": ("", "V"),
        "scores": ("K", "S"),
        "softmax": ("", "SOml"),
        "accumulate": ("SV", "O"),
    }

    def history(actions: list[tuple[str, int]]) -> Any:
        """What each action read and replaced: the action that wrote it last."""
        last: dict[str, Any] = {}
        seen = set()
        for action in actions:
            reads, writes = slots[action[0]]
            seen.add((action, tuple((s, last.get(s)) for s in reads + writes)))
            last |= dict.fromkeys(writes, action)
        return seen

    assert (same(performed(*order), PLAIN) == []) == (history(order) == history(tiles(0, 1, 2)))


def test_loads_that_change_places_are_no_difference() -> None:
    swapped = [(name, j) for j in range(3) for name in ("load_v", "load_k", "scores", "softmax", "accumulate")]
    late = [(name, j) for j in range(3) for name in ("load_k", "scores", "softmax", "load_v", "accumulate")]
    assert same(performed(*swapped), PLAIN) == []
    assert same(performed(*late), PLAIN) == []


def test_a_key_tile_that_is_loaded_before_the_last_scores_is_a_difference_in_the_same_slot() -> None:
    early = [*tiles(0)[:2], ("load_k", 1), *tiles(0)[2:], ("load_v", 1), *tiles(1)[2:], *tiles(2)]
    (difference,) = same(performed(*early), PLAIN)
    assert (difference.action, difference.tiles) == ("scores", (("i", 0), ("j", 0)))


def pipelined(
    prefetch: bool, buffers: int = 0, asynchronous: bool = False, order: tuple[int, ...] = (0, 1, 2)
) -> fv.Recording:
    """Sums over the tiles of K: each loaded when it is used, or one tile ahead, into one slot or alternating ones."""
    r = Recorder("sums")
    K, O = r.tensor("K", np.arange(12.0).reshape(6, 2), tile=2), r.tensor("O", shape=(2,), tile=2)
    slots = [r.slot(f"Kj[{n}]" if buffers else "Kj", (2, 2), tensor="K") for n in range(buffers or 1)]
    total = r.slot("o", (2,))
    r.launch("sums")
    r.block(0)
    pending = list(order)

    def load() -> None:
        j = pending.pop(0)
        with r.step(f"load K{j}", action="load_k", tiles={"j": j}):
            r.move(K[j], slots[j % len(slots)], group=f"K{j}" if asynchronous else None)

    with r.step("init"):
        r.init(total, 0.0)
    if prefetch:
        load()
    for j in order:
        if pending:
            load()
        if asynchronous:
            r.wait(f"K{j}")
        with r.step(f"add {j}", action="add", tiles={"j": j}):
            slot = slots[j % len(slots)]
            r.change(total, r.read(total) + r.read(slot).sum(axis=0), reads=(total, slot))
    with r.step("store", action="store"):
        r.move(total, O[0])
    return r.recording()


@pytest.mark.parametrize("buffers", [0, 2])
def test_a_prefetched_tile_is_no_difference(buffers: int) -> None:
    plain = pipelined(False)
    assert same(pipelined(True, buffers or 3, asynchronous=True), plain) == []
    assert same(pipelined(True, buffers=3), pipelined(False, buffers=3)) == []
    if not buffers:  # issued ahead into the same slot, there when it is waited for
        assert same(pipelined(True, asynchronous=True), plain) == []


def test_tiles_in_another_order_are_a_difference_however_they_are_loaded() -> None:
    for options in ({}, {"asynchronous": True}, {"buffers": 3}):
        (difference,) = same(pipelined(True, order=(0, 2, 1), **options), pipelined(False))  # type: ignore[arg-type]
        assert (difference.action, difference.tiles) == ("load_k", (("j", 2),))


def test_numbers_times_and_barriers_are_not_compared() -> None:
    x, y = np.eye(12, 8, dtype="f4"), np.ones((12, 8), "f4")
    a = fv.flash_attention_2(x, x, x, device="numpy", record=True, keep_values=0)
    b = fv.flash_attention_2(y, y, y, device="numpy")
    assert same(a, b) == []


def test_other_grids_and_missing_blocks() -> None:
    x = np.eye(12, 8, dtype="f4")
    fewer = fv.flash_attention_2(x[:8], x, x, device="numpy")
    found = same(fewer, RUN)
    assert str(found[0]) == (
        "launch 0: one launches flash_attention_2 on (2, 1, 1), the other launches flash_attention_2 on (3, 1, 1)"
    )
    assert str(found[1]) == "flash_attention_2, block 2: only the second recording has this block"
    some = fv.flash_attention_2(x, x, x, device="numpy", record=[1])
    assert [difference.block for difference in same(some, RUN)] == [Block(0, 0, 0), Block(0, 0, 2)]
    q = np.ones((1, 8), "f4")
    decoded = fv.flash_decoding(q, x, x, splits=2, device="numpy")
    assert "the other launches nothing" in str(same(decoded, RUN)[1]) or "on" in str(same(decoded, RUN)[0])


def test_what_is_compared_must_be_a_run() -> None:
    with pytest.raises(TypeError, match="expected a run or a recording, got int"):
        same(3, RUN)
    x = np.eye(4, dtype="f4")
    with pytest.raises(ValueError, match="record=False"):
        same(fv.flash_attention_2(x, x, x, device="numpy", record=False), RUN)


# -- kernels -----------------------------------------------------------------------------------------------------------


def differences(program: Any, loops: Any, launch: Any, expected: Any) -> list[Difference]:
    loops(expected)
    _, recording = run_kernel(program, loops, launch, "cpu")
    return same(recording, expected.run())


ORDERS = {
    # The loop counts n; tile j is what the body and its TRACE lines work on, so the kernel tells the truth.
    "from the last to the first": (
        "for (int n = 0; n < tiles; ++n) { const int j = tiles - 1 - n;\n",
        "load_k",
        3,
        "load_k",
        0,
    ),
    "one skipped": ("for (int j = 0; j < tiles; ++j) { if (j == 2) continue;\n", "load_k", 3, "load_k", 2),
    "the last skipped": ("for (int j = 0; j < tiles - 1; ++j) {\n", "store_o", None, "load_k", 3),
    "one twice": ("for (int n = 0; n <= tiles; ++n) { const int j = n < 2 ? n : n - 1;\n", "load_k", 1, "load_k", 2),
    "two swapped": (
        "for (int n = 0; n < tiles; ++n) { const int j = n == 1 ? 2 : n == 2 ? 1 : n;\n",
        "load_k",
        2,
        "load_k",
        1,
    ),
    "the second first": (
        "for (int n = 0; n < tiles; ++n) { const int j = n < 2 ? 1 - n : n;\n",
        "load_k",
        1,
        "load_k",
        0,
    ),
}


@needs_compiler
@pytest.mark.parametrize("order", ORDERS)
def test_a_kernel_that_visits_other_tiles_is_reported_where_it_first_does(
    order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, action, j, other_action, other_j = ORDERS[order]
    change(monkeypatch, tmp_path, "flash_attention_2", (loop_of("flash_attention_2", "j"), head))
    fa = an_attention()
    found = differences(fa, fa2.forward, lambda: fa2.launch_kernel(fa.a, "cpu"), an_attention())
    assert len(found) == 6  # each block of each head
    first = found[0]
    assert (first.launch, first.block, first.kernel) == (0, Block(0, 0, 0), "flash_attention_2")
    assert (first.action, first.other_action) == (action, other_action)
    assert dict(first.tiles).get("j") == j
    assert dict(first.other_tiles).get("j") == other_j
    said = f"{action} (i = 0, j = {j})" if j is not None else action
    assert f"head 0 · block 0: step {first.step} does {said}" in str(first)
    assert fa.run().recording.steps[first.step].tiles[0] == ("i", 0)


@needs_compiler
def test_a_tile_loaded_twice_is_reported_at_the_second_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "        TRACE(load_v, j);\n"
    again = "        TRACE(load_k, j);\n        for (int e = threadIdx.x; e < Bc * D; e += blockDim.x) {\n"
    again += "            const int k = j * Bc + e / D;\n            Kj[e % D][e / D] = k < Nk ? K[(long long)k * D + e % D] : 0.f;\n        }\n"
    change(monkeypatch, tmp_path, "flash_attention_2", (text, again + text))
    fa = an_attention()
    first = differences(fa, fa2.forward, lambda: fa2.launch_kernel(fa.a, "cpu"), an_attention())[0]
    assert (first.action, dict(first.tiles)["j"], first.other_action) == ("load_k", 0, "scores")


@needs_compiler
def test_row_blocks_in_another_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The inner loop of FlashAttention-1, backwards: right numbers, another order."""
    loop = loop_of("flash_attention_1", "i", depth=8)
    change(
        monkeypatch, tmp_path, "flash_attention_1", (loop, "for (int n = 0; n < Tr; ++n) { const int i = Tr - 1 - n;\n")
    )
    fa, expected = an_attention(fa1.FlashAttention1), an_attention(fa1.FlashAttention1)
    first, second = differences(fa, fa1.forward, lambda: fa1.launch_kernel(fa.a, "cpu"), expected)
    assert (first.block, second.block) == (Block(0, 0, 0), Block(0, 1, 0))
    assert (first.action, dict(first.tiles), dict(first.other_tiles)) == ("load_q", {"j": 0, "i": 2}, {"j": 0, "i": 0})


@needs_compiler
def test_a_combine_that_leaves_a_split_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit = (
        "    for (int s = 0; s < Splits; ++s) {\n        TRACE(load_o, s);",
        "    for (int s = 1; s < Splits; ++s) {\n        TRACE(load_o, s);",
    )
    change(monkeypatch, tmp_path, "flash_decoding", edit)
    q, K = np.ones((1, 8), "f4"), np.ones((12, 8), "f4")
    fd, expected = (decoding.FlashDecoding(q, K, K, splits=3) for _ in range(2))
    (first,) = differences(fd, decoding.forward, lambda: decoding.launch_kernels(fd, "cpu"), expected)
    assert (first.launch, first.kernel, first.action) == (1, decoding.COMBINE, "load_o")
    assert (dict(first.tiles)["s"], dict(first.other_tiles)["s"]) == (1, 0)
