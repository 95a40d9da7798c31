"""The layout: the reference figure's own figures, and for any tile counts nothing that overlaps or sticks out."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from view.pictures import Extent, attention, by_id, collisions, extent, inside

from flashviz import Block, Recorder
from flashviz.recording import Recording
from flashviz.view.facts import layout_for
from flashviz.view.layout import BOTTOM, LEFT, MOST_TILES, RIGHT, SQUARE, TOP, Layout, parts, spread
from flashviz.view.scene import scene
from flashviz.view.shapes import Rect, Text

CANVAS = (LEFT, BOTTOM, RIGHT, TOP)
COLUMNS = {"Q": -2.925, "K": -1.125, "V": 0.675, "O": 2.475, "L": 3.6}
SLOTS = {"Qi": (-3.7, 1.6), "Kj": (-1.95, 1.6), "Sij": (-0.4, 1.2), "Vj": (1.15, 1.6)}
SLOTS |= {"mi": (2.225, 0.25), "li": (2.625, 0.25), "Oi": (3.7, 1.6)}


def solid(recording: Recording, step: int) -> dict[str, Extent]:
    """Everything on a step's canvas that may not touch another: boxes, squares, titles, names and captions."""
    shapes = by_id(scene(recording, step))
    layout = layout_for(recording, recording.steps[step].block, recording.steps[step].launch)
    chip = {s.name for s in recording.slots if not s.shared_by_grid}
    found = {}
    for name, box in layout.boxes.items():
        if not box.hidden and (name not in chip or recording.steps[step].block is not None):
            x, y = box.x - box.w / 2, box.y - box.h / 2
            found[f"box {name}"] = (x, y, x + box.w, y + box.h)
    for key, shape in shapes.items():
        square = key.startswith("square") and isinstance(shape, Rect)
        if square or (isinstance(shape, Text) and shape.text and not key.endswith((".label", ".rest"))):
            found[key] = extent(shape)
    return found


def check(recording: Recording, step: int) -> None:
    """Nothing overlaps, all is inside the canvas, and every label is inside its box."""
    found = solid(recording, step)
    assert list(collisions(found)) == []
    assert [name for name, e in found.items() if not inside(e, CANVAS)] == []
    shapes = by_id(scene(recording, step))
    layout = layout_for(recording, recording.steps[step].block, recording.steps[step].launch)
    for key, shape in shapes.items():
        if key.endswith(".label"):
            name = max((name for name in layout.boxes if key.startswith(f"{name}.")), key=len)  # names may hold dots
            box = found[f"box {name}"]
            assert inside(extent(shape), box), (key, shape.text, extent(shape), box)
            assert shape.size >= 5
    assert layout.zoom is None or all(LEFT <= x <= RIGHT for x in layout.zoom[:2])


# -- the reference figure ----------------------------------------------------------------------------------------------


def near(a: Any, b: Any) -> bool:
    return bool(np.allclose(a, b, rtol=0, atol=5e-6))


def test_titles_columns_and_tiles() -> None:
    shapes = by_id(scene(attention(), 0))
    texts = {s.text: s for s in shapes.values() if isinstance(s, Text)}
    for title, y in (("HBM", 5), ("SRAM", 0.6)):
        assert (texts[title].x, texts[title].y, texts[title].size) == (0, y, 14)
    for name, x in COLUMNS.items():
        assert near((texts[name].x, texts[name].y, texts[name].size), (x, 1.5, 12))
        for tile, y in enumerate((3.625, 2.375)):
            edge, label = shapes[f"{name}{tile}.edge"], shapes[f"{name}{tile}.label"]
            w = 0.25 if name == "L" else 1.6
            assert near((edge.x, edge.y, edge.w, edge.h), (x - w / 2, y - 0.6, w, 1.2))
            assert near((label.x, label.y, label.size), (x, y, 10 if name == "L" else 14))
            assert label.text == f"{name}{tile}"


def test_grid_of_blocks() -> None:
    layout = layout_for(attention(), None)
    assert set(layout.squares) == {(x, y) for x in (-0.55, -0.15, 0.25) for y in (0.05, -0.35)}
    assert SQUARE == 0.3
    places = [layout.squares[layout.square[0, Block(tile=n)]] for n in (0, 1)]
    assert places == [(-0.15, -0.35), (0.25, -0.35)]
    assert layout.zoom is not None
    assert near(layout.zoom, (-4.5, 4.5, -2.4))


def test_slots_captions_and_cells() -> None:
    recording = attention()
    shapes = by_id(scene(recording, 6))
    assert {s.removesuffix(".box") for s in shapes if s.endswith(".box")} == set(SLOTS)
    for name, (x, w) in SLOTS.items():
        box, caption = shapes[f"{name}.box"], shapes[f"{name}.caption"]
        assert near((box.x, box.y, box.w, box.h), (x - w / 2, -3.6, w, 1.2))
        assert near((caption.x, caption.y, caption.size), (x, -3.9, 12))
        assert caption.text == name
    assert shapes["Qi.label"].size == 14
    recording_cells = by_id(scene(recording, 4))
    cells = [recording_cells[f"Sij.{r}.{c}"] for r in range(4) for c in range(4)]
    for n, cell in enumerate(cells):
        r, c = divmod(n, 4)
        assert near((cell.x, cell.y, cell.w, cell.h), (-1.0 + 0.3 * c, -2.7 - 0.3 * r, 0.3, 0.3))


def test_caption_of_the_canvas() -> None:
    caption = by_id(scene(attention(), 0))["caption"]
    assert (caption.x, caption.y, caption.size, caption.text) == (0, -5.6, 12, "Setup ready")


def test_the_whole_reference_picture_is_orderly() -> None:
    for step in range(19):
        check(attention(), step)


# -- any tile counts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", range(1, 9))
@pytest.mark.parametrize("keys", [1, 2, 3, 5, 8])
def test_one_to_eight_tiles(rows: int, keys: int) -> None:
    recording = attention((rows, keys))
    layout = layout_for(recording, None)
    for name, count in (("Q", rows), ("K", keys), ("V", keys), ("O", rows), ("L", rows)):
        boxes = [layout.boxes[f"{name}{n}"] for n in range(count)]
        assert not any(b.hidden for b in boxes)
        assert len({b.h for b in boxes}) == 1
        assert near(np.diff([b.y for b in boxes]) + boxes[0].h, np.full(count - 1, -0.05)), "gaps stay"
        assert boxes[0].h <= 1.2
        if name != "L":
            assert boxes[0].text >= 11, "labels stay legible"
    for step in (0, 3, len(recording.steps) - 1):
        check(recording, step)


@pytest.mark.parametrize("rows", [1, 8])
def test_all_columns_are_as_high_as_the_reference(rows: int) -> None:
    boxes = [
        b for name, b in layout_for(attention((rows, 8)), None).boxes.items() if name[0] in "KV" and name[1] != "j"
    ]
    assert near(max(b.y + b.h / 2 for b in boxes), 4.225)
    assert near(min(b.y - b.h / 2 for b in boxes), 1.775)


@pytest.mark.parametrize("tiles", [(9, 1), (1, 9), (12, 20), (40, 3)])
def test_more_than_eight_tiles_draw_the_first_an_ellipsis_and_the_last(tiles: tuple[int, int]) -> None:
    recording = attention(tiles)
    layout = layout_for(recording, None)
    for name, count in (("Q", tiles[0]), ("K", tiles[1]), ("L", tiles[0])):
        shown = [n for n in range(count) if not layout.boxes[f"{name}{n}"].hidden]
        assert shown == (list(range(count)) if count <= MOST_TILES else [*range(MOST_TILES - 2), count - 1])
    dots = [label for label in layout.labels if label.text == "⋮"]
    assert len(dots) == 3 * (tiles[0] > 8) + 2 * (tiles[1] > 8)
    for step in (0, 4, len(recording.steps) - 1):
        check(recording, step)


def test_labels_of_a_column_have_one_size() -> None:
    shapes = by_id(scene(attention((12, 20)), 0))
    for tensor, last in (("Q", 11), ("K", 19), ("L", 11)):
        assert shapes[f"{tensor}0.label"].size == shapes[f"{tensor}{last}.label"].size


def test_tiles_fly_out_of_the_ellipsis() -> None:
    recording = attention((1, 20))
    step = next(n for n, s in enumerate(recording.steps) if "j = 10 · load" in s.label)
    layout = layout_for(recording, None)
    dots = next(label for label in layout.labels if label.text == "⋮" and label.x < 0)
    fill = by_id(scene(recording, step, 0.0))["Kj.fill"]
    assert near((fill.x + fill.dx + fill.w / 2, fill.y + fill.dy + fill.h / 2), (dots.x, dots.y))
    assert not any(key.startswith("K10.") for key in by_id(scene(recording, step, 0.0)))


@pytest.mark.parametrize("ragged", [(1, 3), (3, 1)])
@pytest.mark.parametrize("tiles", [(1, 1), (3, 5), (8, 8), (12, 20)])
def test_ragged_tiles(tiles: tuple[int, int], ragged: tuple[int, int]) -> None:
    recording = attention(tiles, ragged)
    for step in (0, len(recording.steps) // 2, len(recording.steps) - 2, len(recording.steps) - 1):
        check(recording, step)


def test_a_last_tile_is_lower_in_proportion() -> None:
    boxes = layout_for(attention((2, 2), (1, 2)), None).boxes
    assert near([boxes["Q1"].h, boxes["K1"].h, boxes["K0"].h], [0.9, 0.6, 1.2])
    assert near([boxes[n].y + boxes[n].h / 2 for n in ("Q1", "K1")], 2.975), "its top stays"


@pytest.mark.parametrize("heads", [(2, 1), (4, 2)])
def test_heads(heads: tuple[int, int]) -> None:
    recording = attention((2, 2), heads=heads)
    for step in range(0, len(recording.steps), 7):
        check(recording, step)
        block = recording.steps[step].block or Block()
        layout = layout_for(recording, block)
        assert any(label.text == f"HBM · batch 0, head {block.head}" for label in layout.labels)
        kv = block.head // (heads[0] // heads[1])
        drawn = {name for name in layout.boxes if name[0] in "QKVOL" and name[1].isdigit()}
        assert drawn == {f"{t}{n}[0,{block.head if t in 'QOL' else kv}]" for t in "QKVOL" for n in (0, 1)}


# -- the grid of blocks ------------------------------------------------------------------------------------------------


def launches(count: int, grid: tuple[int, int, int] | None = None) -> Recording:
    r = Recorder("many blocks")
    x, xi = r.tensor("x", np.ones(4), tile=2), r.slot("xi", (2,), tensor="x")
    r.launch("k", grid or (count, 1, 1))
    for tile in range(count):
        r.block(tile)
        with r.step("load"):
            r.move(x[0], xi)
    return r.recording()


@pytest.mark.parametrize("count", [2, 3, 6, 22, 23, 44, 45, 300])
def test_grids_of_any_size(count: int) -> None:
    recording = launches(count)
    layout = layout_for(recording, None)
    places = [layout.square[0, Block(tile=n)] for n in range(count)]
    assert all(0 <= n < len(layout.squares) for n in places)
    assert places == sorted(places)
    if count <= 44:
        assert len(set(places)) == count, "every block has a square of its own"
        assert layout.rest is None
        assert len(layout.squares) == max(count, 6 if count == 2 else 0)
    else:
        assert layout.rest == 42
        assert places[:42] == list(range(42))
        assert set(places[42:-1]) == {42}
        assert places[-1] == 43
    for step in (0, 1, len(recording.steps) // 2, len(recording.steps) - 1):
        check(recording, step)


def test_the_square_of_the_rest_keeps_its_ellipsis_readable() -> None:
    recording = launches(50)
    for step, fill in ((1, "#ffffff"), (91, "#3f3f46")):
        shapes = by_id(scene(recording, step))
        assert shapes["square42"].fill == fill
        assert shapes["square42.rest"].fill != fill


def test_more_blocks_than_the_grid_says() -> None:
    check(launches(5, (1, 1, 1)), 9)


# -- the generic layout ------------------------------------------------------------------------------------------------

NAMES = st.one_of(
    st.text(min_size=1, max_size=3),
    st.sampled_from(["accumulator of the output", "W" * 30, "S", "x", "μ", "日本語のタイル", "a\nb", "<b>&amp;</b>"]),
)


@st.composite
def generic(draw: Any) -> Recording:
    r = Recorder("anything at all")
    names = draw(st.lists(NAMES, min_size=1, max_size=14, unique=True))
    tensors = draw(st.integers(0, min(6, len(names) - 1)))
    made: list[Any] = []
    for name in names[:tensors]:
        columns = draw(st.sampled_from([(), (3,)]))
        rows = draw(st.integers(1, 25))
        made.append(r.tensor(name, np.ones((rows, *columns)), tile=draw(st.integers(1, 4))))
    slots = []
    for name in names[tensors:]:
        shape = draw(st.sampled_from([(), (4,), (4, 3), (12, 16)]))
        memory = draw(st.sampled_from(["shared", "shared", "register", "tensor memory", "distributed shared memory"]))
        slots.append(r.slot(f"{name} ", shape, memory=memory, tensor=draw(st.sampled_from(["", "S", "x"]))))
    blocks = draw(st.integers(1, 30))
    r.launch("k", (blocks, 1, 1))
    for tile in range(min(blocks, 3)):
        r.block(tile)
        with r.step(draw(st.sampled_from(["fill", "W" * 400, "a caption of many words " * 20]))):
            for slot in slots:
                r.change(slot, np.ones(slot.shape), cells=draw(st.booleans()))
    return r.recording()


@settings(max_examples=40, deadline=None)
@given(generic())
def test_any_recording_is_orderly(recording: Recording) -> None:
    for step in (0, 1, len(recording.steps) - 1):
        check(recording, step)


@pytest.mark.parametrize("count", [1, 9, 20, 60])
def test_many_slots(count: int) -> None:
    r = Recorder("many slots")
    slots = [r.slot(f"s{n}", (2, 2)) for n in range(count)]
    r.launch("k")
    r.block()
    with r.step("fill"):
        for slot in slots:
            r.change(slot, np.ones((2, 2)))
    check(r.recording(), -1 % 3)


def test_registers_stand_under_shared_memory_whatever_the_order() -> None:
    r = Recorder("tensor cores")
    acc, tile = r.slot("acc", (4, 4), memory="register", scope="warp"), r.slot("tile", (4, 4))
    r.launch("k", (3, 1, 1))
    r.block()
    with r.step("fill"):
        r.change(tile, np.ones((4, 4)))
        r.change(acc, np.ones((4, 4)))
    recording = r.recording()
    layout = layout_for(recording, None)
    assert layout.boxes["acc"].y < layout.boxes["tile"].y
    assert [label.text for label in layout.labels] == ["HBM", "SRAM", "registers"]
    check(recording, 2)


# -- small parts -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 500))
def test_parts_are_equal_where_they_can_be(n: int) -> None:
    made = parts(n)
    assert 1 <= made <= 8
    assert made == n or n > 8
    assert n % made == 0 or not any(n % p == 0 for p in range(2, 9))


@given(st.lists(st.floats(0.1, 2), min_size=1, max_size=80), st.floats(0, 0.3))
def test_spread_keeps_order_and_room(widths: list[float], gap: float) -> None:
    placed = spread(widths, gap)
    edges = [(x - w / 2, x + w / 2) for x, w in placed]
    assert edges[0][0] >= -4.51
    assert edges[-1][1] <= 4.51
    assert all(a[1] <= b[0] + 1e-5 for a, b in itertools.pairwise(edges))
    assert abs(edges[0][0] + edges[-1][1]) < 1e-5, "in the middle"


def test_an_overlap_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    import flashviz.view.layout as module

    monkeypatch.setattr(module, "TILE_GAP", -0.1)
    with pytest.raises(AssertionError, match="overlaps"):
        check(attention((7, 6)), 0)


def test_a_text_that_does_not_fit_would_be_seen() -> None:
    layout = layout_for(attention((6, 7)), None)
    assert isinstance(layout, Layout)
    found = {"box": (0.0, 0.0, 0.2, 0.2), "text": extent(Text("t", x=0.1, y=0.1, text="too long", size=12))}
    assert not inside(found["text"], found["box"])
