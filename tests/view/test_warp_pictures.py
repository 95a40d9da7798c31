"""Pictures of lanes and banks: what is drawn is what is computed, as artists in places, not pixels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

import flashviz as fv
from flashviz.view.palette import HUES, hue_of
from flashviz.warp import LAYOUTS, SHAPES, chunk_address


def cells(axes: Any, across: int = 1) -> dict[tuple[int, int], tuple[int, str]]:
    """By row and column: the lane that is written in the cell, or in the box of so many cells, and its fill."""
    fills = {
        (round(p.get_y()), round(p.get_x())): to_hex(p.get_facecolor())
        for p in axes.patches
        if isinstance(p, Rectangle) and p.get_fill() and (p.get_width(), p.get_height()) == (across, 1)
    }
    texts = {
        (int(t.get_position()[1]), int(t.get_position()[0] - across / 2)): int(t.get_text())
        for t in axes.texts
        if t.get_text().isdigit()
    }
    assert set(texts) == set(fills)
    return {(r, c + n): (texts[r, c], fills[r, c]) for r, c in texts for n in range(across)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lane", [0, 13, 31])
def test_cells_name_their_lanes_and_one_lane_is_dark(shape: str, lane: int) -> None:
    figure = fv.fragments(lane, shape=shape, names=("P", "V", "O"))
    for axes, operand, tensor in zip(figure.axes, "abd", "SVO", strict=True):
        want = fv.fragment(operand, shape)
        found = cells(axes)
        assert np.array_equal([[found[r, c][0] for c in range(want.shape[1])] for r in range(want.shape[0])], want.lane)
        dark = {at for at, (_, fill) in found.items() if fill == HUES[tensor].outline}
        assert dark == {tuple(map(int, at)) for at in np.argwhere(want.lane == lane)}
        names = {t.get_text() for t in axes.texts if not t.get_text().isdigit()}
        assert {n for text in names for n in text.split("\n")} == {f"{operand}[{k}]" for k in range(want.registers)}


def test_what_the_lane_holds_is_listed() -> None:
    (text,) = fv.fragments(5).texts
    assert "lane 5 = 4 · 1 + 1 holds" in text.get_text()
    assert "a[3] = Q[9, 10], Q[9, 11]" in text.get_text()
    assert "d[2] = S[9, 2]" in text.get_text()
    assert fv.fragments(None).texts == []


@pytest.mark.parametrize("shape", ["m64n8k16", "m64n16k16"])
def test_a_warpgroup_is_drawn_thread_by_thread(shape: str) -> None:
    figure = fv.fragments(101, shape=shape, names=("P", "V", "O"))
    for axes, operand in zip(figure.axes, "ad", strict=True):
        want = fv.fragment(operand, shape)
        found = cells(axes, 2)
        assert np.array_equal([[found[r, c][0] for c in range(want.shape[1])] for r in range(64)], want.lane)
        dark = {at for at, (_, fill) in found.items() if fill == hue_of("P" if operand == "a" else "O").outline}
        assert dark == {tuple(map(int, at)) for at in np.argwhere(want.lane == 101)}
    of_a, of_d, said = [text.get_text() for text in figure.texts]
    assert said == "thread 101 = 32 · 3 + 4 · 1 + 1 holds\nV (b) is read from shared memory"
    assert "a[2] = P[49, 10], P[49, 11]" in of_a
    assert "d[2] = O[57, 2]" in of_d
    (said,) = [text.get_text() for text in fv.fragments(None, shape=shape).texts]
    assert said == "Kᵀ (b) is read from shared memory"


def test_fragments_refuse() -> None:
    with pytest.raises(ValueError, match="lane=128: a warpgroup has threads 0 to 127"):
        fv.fragments(128, shape="m64n8k16")
    with pytest.raises(ValueError, match="lane=32: a warp has lanes 0 to 31"):
        fv.fragments(32)
    with pytest.raises(ValueError, match="shape='m8n8k4' is none of m16n8k16, m16n8k8, m64n8k16, m64n16k16"):
        fv.fragments(shape="m8n8k4")
    with pytest.raises(ValueError, match="2 names: give one for each"):
        fv.fragments(names=("Q", "K"))


@pytest.mark.parametrize("d", [64, 128])
def test_chunks_lie_at_their_addresses_and_the_bars_count(d: int) -> None:
    figure = fv.banks(5, d=d)
    for layout, memory, wanted in zip(LAYOUTS, figure.axes[::2], figure.axes[1::2], strict=True):
        boxes = {t.get_text(): t.get_position() for t in memory.texts}
        assert len(boxes) == 8 * d // 8
        for row in range(8):
            for chunk in range(d // 8):
                at = chunk_address(row, chunk, d, layout)
                x, y = boxes[f"{row}.{chunk}"]
                assert (x - 2, int(y)) == (at % 128 // 4, at // 128)
        dark = [p for p in memory.patches if to_hex(p.get_facecolor()) == HUES["K"].outline]
        assert len(dark) == 8
        heights = [int(bar.get_height()) for bar in wanted.patches]
        assert sum(heights) == 32
        assert max(heights) == (8 if layout == "plain" else 1)
        assert memory.get_title() == f"{layout}: {'8 passes' if layout == 'plain' else '1 pass'}"


def test_banks_refuse() -> None:
    with pytest.raises(ValueError, match="chunk=8: rows of 64 have chunks 0 to 7"):
        fv.banks(8)
    with pytest.raises(ValueError, match="at least one layout"):
        fv.banks(layouts=())
    with pytest.raises(ValueError, match="layout='odd'"):
        fv.banks(layouts=("odd",))


@pytest.mark.parametrize("d", [16, 32, 64])
@pytest.mark.parametrize("row", [None, 0, 5])
def test_a_swizzled_piece_stays_in_its_line_and_changes_its_place(d: int, row: int | None) -> None:
    figure = fv.swizzle(row, chunk=1, d=d)
    plain, swizzled, *ways = figure.axes
    where = [{t.get_text(): t.get_position() for t in axes.texts} for axes in (plain, swizzled)]
    assert len(where[0]) == len(where[1]) == 64
    for piece, (x, y) in where[1].items():
        r, c = map(int, piece.split("."))
        at = chunk_address(r, c, d, "swizzled")
        assert (x - 0.5, int(y)) == (at % 128 // 16, at // 128)
        assert int(y) == int(where[0][piece][1])
        mask = {64: r % 8, 32: r // 2 % 4, 16: r // 4 % 2}[
            d
        ]  # CUTLASS: Swizzle<3, 4, 3>, <2, 4, 3> and <1, 4, 3> of the address
        first = 8 * (int(where[0][piece][0]) // (d // 8)) // (64 // d) if d < 64 else 0
        assert int(x) == first + (c ^ mask)
    dark = {(p.get_x(), p.get_y()) for p in swizzled.patches if to_hex(p.get_facecolor()) == HUES["K"].outline}
    names = {f"{row}.{c}" for c in range(d // 8)} if row is not None else {f"{r}.1" for r in range(8)}
    assert dark == {(where[1][n][0] - 0.5, int(where[1][n][1])) for n in names}
    assert len(ways) == (row is not None)
    if row is not None:
        lines = [(round(line.get_xdata()[0] - 0.5), round(line.get_xdata()[1] - 0.5)) for line in ways[0].lines]
        assert sorted(to for _, to in lines) == [c for c, _ in lines] == list(range(d // 8))
        assert f"row {row}: piece c goes to place c xor" in figure.texts[0].get_text()
    else:
        assert swizzled.get_title() == "in shared memory: 1 pass"
        assert plain.get_title() == f"K as in HBM: {8 // (64 // d)} passes"


def test_swizzle_refuses() -> None:
    for options, words in (
        ({"d": 128}, "d=128: a row of 64, 32 or 16 elements"),
        ({"row": 8}, "row=8: the pattern has rows 0 to 7"),
        ({"row": 16, "d": 32}, "row=16: the pattern has rows 0 to 15"),
        ({"chunk": 4, "d": 32}, "chunk=4: rows of 32 have chunks 0 to 3"),
    ):
        with pytest.raises(ValueError, match=words):
            fv.swizzle(**options)
