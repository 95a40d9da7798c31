"""The picture of masks: hatched scores, the map of tiles, the map of heads, and who sees whom as a plot."""

from __future__ import annotations

import numpy as np
import pytest
from view.pictures import attention, by_id, collisions, extent, inside, step_of

import flashviz as fv
from flashviz.slots import Block
from flashviz.view.facts import layout_for
from flashviz.view.layout import BOTTOM, LEFT, RIGHT, TOP
from flashviz.view.maps import MOST_CELLS, HeadMap, TileMap
from flashviz.view.palette import HUES, OUTLINE
from flashviz.view.shapes import Line, Rect, Text

S = HUES["S"]


def recording(Nq=16, Nk=16, heads=(1, 1), **options):
    rng = np.random.default_rng(3)
    Q, K, V = (
        rng.standard_normal((h, n, 4), dtype="float32") for h, n in zip((*heads, heads[1]), (Nq, Nk, Nk), strict=True)
    )
    return fv.flash_attention_2(Q, K, V, device="numpy", **{"Br": 4, "Bc": 4, **options}).recording


def mapped(shapes):
    return {key: shape for key, shape in shapes.items() if key.startswith(("map.", "heads."))}


# -- masked scores ---------------------------------------------------------------------------------------------------


def hatched(scene, slot="Sij"):
    """The cells of a slot that are drawn hatched."""
    found = {s.id: s for s in scene.shapes if isinstance(s, Rect) and s.hatched and not s.under}
    return {tuple(map(int, key.split(".")[-2:])) for key in found if key.startswith(f"{slot}.") and key[-1].isdigit()}


ABOVE = {(r, c) for r in range(4) for c in range(4) if c > r}


def test_the_scores_above_the_diagonal_are_hatched_one_by_one_and_stay_so():
    made = recording(causal=True)
    for i in range(4):
        for text in ("fill Sij", "update mi, li and Oi"):
            for j in range(i + 1):
                n = step_of(made, f"block {i} · j = {j} · {text}")
                assert hatched(fv.scene(made, n)) == (ABOVE if i == j else set()), (i, j, text)
    stale = fv.scene(made, step_of(made, "block 1 · j = 1 · load Kj"))
    assert hatched(stale) == set()


def test_a_hidden_cell_fills_in_its_turn():
    made = recording(causal=True)
    n = step_of(made, "block 2 · j = 2 · fill Sij")
    cells = {
        s.id: s for s in fv.scene(made, n, 0.5).shapes if isinstance(s, Rect) and s.id.startswith("Sij.") and s.end
    }
    first, last = cells["Sij.0.1"], cells["Sij.2.3"]
    assert first.hatched
    assert last.hatched
    assert (first.grow, last.grow) == (1.0, 0.0)
    assert not cells["Sij.0.0"].hatched


def test_any_mask_is_hatched_and_large_tiles_where_all_of_a_cell_is_masked():
    mask = np.ones((4, 4), bool)
    mask[1, 2] = mask[3, 0] = False
    made = recording(4, 4, mask=mask)
    assert hatched(fv.scene(made, step_of(made, "fill Sij"))) == {(1, 2), (3, 0)}
    large = recording(16, 16, Br=16, Bc=16, causal=True)  # 8 x 8 cells of 2 x 2 scores
    assert hatched(fv.scene(large, step_of(large, "fill Sij"))) == {(r, c) for r in range(8) for c in range(8) if c > r}


def test_the_plain_picture_has_none_of_it():
    made = attention()
    for n in range(len(made.steps)):
        shapes = by_id(fv.scene(made, n))
        assert mapped(shapes) == {}
        assert not any(isinstance(s, Rect) and s.hatched for s in shapes.values())
    assert layout_for(made, None).maps == ()


# -- the map of tiles ------------------------------------------------------------------------------------------------


def fills(scene):
    """The cells of the map by their state: done, to come."""
    cells = {s.id: s.fill for s in scene.shapes if s.id.startswith("map.") and s.id[-1].isdigit()}
    where = {
        fill: {tuple(map(int, key.split(".")[1:])) for key, f in cells.items() if f == fill} for fill in cells.values()
    }
    return where.get(S.light, set()), where.get(S.dark, set())


def test_the_map_shows_what_is_done_what_comes_and_what_never_does():
    made = recording(causal=True)
    triangle = {(i, j) for i in range(4) for j in range(i + 1)}
    assert fills(fv.scene(made, 0)) == (set(), triangle)
    assert fills(fv.scene(made, -1)) == (triangle, set())
    n = step_of(made, "block 2 · j = 1 · fill Sij")
    done, to_come = fills(fv.scene(made, n))
    assert done == {(i, j) for i, j in triangle if (i, j) <= (2, 1)}
    assert to_come == triangle - done
    shapes = by_id(fv.scene(made, n))
    load = step_of(made, "block 2 · j = 1 · load Kj")
    assert [(2, 1) in fills(fv.scene(made, k))[0] for k in (load - 1, load)] == [False, True]
    assert shapes["map.title"].text == "10 of 16 tiles"
    ring, cell = shapes["map.ring"], shapes["map.2.1"]
    assert inside(extent(cell), extent(ring))
    assert ring.w < 1.5 * cell.w
    assert shapes["map.skipped"].hatched


def test_the_frame_is_a_row_or_a_column_where_only_one_is_known():
    made = recording(causal=True)
    cell = by_id(fv.scene(made, 0))["map.0.0"]
    row = by_id(fv.scene(made, step_of(made, "block 1 · load Qi")))["map.ring"]
    assert row.w > 3.9 * cell.w
    assert row.h < 1.5 * cell.h
    x = np.ones((16, 4), "float32")
    first = fv.flash_attention_1(x, x, x, causal=True, device="numpy").recording
    column = by_id(fv.scene(first, step_of(first, "j = 2 · load Kj")))["map.ring"]
    assert column.h > 3.9 * cell.h
    assert "map.ring" not in by_id(fv.scene(made, 0))


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({"causal": True, "window": 5}, {0: [0], 1: [0, 1], 2: [1, 2], 3: [2, 3]}),
        ({"causal": True, "kv_len": 9}, {0: [], 1: [0], 2: [0, 1], 3: [0, 1, 2]}),
    ],
)
def test_windows_and_used_lengths(options, want):
    made = recording(**options)
    done, _ = fills(fv.scene(made, -1))
    assert {i: [j for a, j in sorted(done) if a == i] for i in range(4)} == want
    (drawn,) = layout_for(made, None).maps
    assert drawn == TileMap(tuple(range(min(t), max(t) + 1) if t else range(0) for t in want.values()), 4)


def test_unused_rows_are_hatched_in_hbm_and_empty_in_the_numbers():
    made = recording(kv_len=10)
    shapes = by_id(fv.scene(made, 0))
    assert shapes["K2.rest"].hatched
    assert shapes["K2.rest"].h == pytest.approx(shapes["K2.fill"].h)
    assert shapes["K3.fill"].h == 0
    assert "K1.rest" not in shapes
    assert layout_for(made, None).maps == ()


def test_too_many_tiles_have_no_map():
    assert layout_for(recording(4 * MOST_CELLS, 4 * MOST_CELLS, causal=True), None).maps != ()
    assert layout_for(recording(4 * MOST_CELLS + 1, 16, causal=True), None).maps == ()


# -- the map of heads ------------------------------------------------------------------------------------------------


def test_each_query_head_has_a_line_to_the_head_that_it_reads():
    made = recording(8, 8, heads=(6, 2))
    (drawn,) = layout_for(made, None).maps
    assert drawn == HeadMap(6, 2)
    n = step_of(made, "head 4 · block 1 · load Qi")
    shapes = by_id(fv.scene(made, n))
    lines = {key: s for key, s in shapes.items() if isinstance(s, Line) and key.startswith("heads.")}
    centre = {key: s.x + s.w / 2 for key, s in shapes.items() if isinstance(s, Rect) and key.startswith("heads.")}
    for h in range(6):
        line = lines[f"heads.line{h}"]
        assert (line.x1, line.x2) == (pytest.approx(centre[f"heads.Q{h}"]), pytest.approx(centre[f"heads.K{h // 3}"]))
        assert (line.width > 1) == (h == 4)
    dark = {key for key, s in shapes.items() if key.startswith("heads.") and isinstance(s, Rect) and s.fill == OUTLINE}
    assert dark == {"heads.Q4", "heads.K1"}


def test_equal_heads_and_many_heads_have_no_map():
    assert layout_for(recording(4, 4, heads=(2, 2)), None).maps == ()
    assert layout_for(recording(4, 4, heads=(10, 1)), None).maps == ()


# -- places ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (8, 1)])
@pytest.mark.parametrize(
    ("Nq", "Nk", "tile"), [(16, 16, 4), (48, 48, 4), (2, 24, 2), (24, 2, 2), (5, 3, 1), (1, 1, 4), (12, 1, 1)]
)
def test_maps_are_on_the_canvas_and_touch_nothing(heads, Nq, Nk, tile):
    made = recording(Nq, Nk, heads=heads, Br=tile, Bc=tile, causal=True, record=True)
    for n in (0, 2, len(made.steps) // 2, -1):
        shapes = by_id(fv.scene(made, n))
        solid = {key: extent(s) for key, s in shapes.items() if key.startswith("square") and isinstance(s, Rect)}
        solid |= {key: extent(s) for key, s in shapes.items() if key.startswith("label.") and s.text}
        boxes = layout_for(made, made.steps[n].block).boxes.items()
        solid |= {
            f"box {k}": (b.x - b.w / 2, b.y - b.h / 2, b.x + b.w / 2, b.y + b.h / 2) for k, b in boxes if not b.hidden
        }
        for key, shape in mapped(shapes).items():
            if (
                (isinstance(shape, Text) and not key.endswith(".number"))
                or key == "map.edge"
                or (key.startswith(("heads.Q", "heads.K")) and isinstance(shape, Rect))
            ):
                solid[key] = extent(shape)
        assert list(collisions(solid)) == []
        assert [k for k, e in solid.items() if not inside(e, (LEFT, BOTTOM, RIGHT, TOP))] == []


def zoom_at(line, x):
    return line.y1 + (line.y2 - line.y1) * (x - line.x1) / (line.x2 - line.x1)


def test_the_zoom_lines_pass_below_the_maps():
    made = recording(24, 24, heads=(8, 2), causal=True)
    layout = layout_for(made, None)
    for number in range(0, len(made.steps), 20):
        shapes = by_id(fv.scene(made, number))
        if "zoom.right" not in shapes:
            continue
        edge = shapes["map.edge"]
        assert zoom_at(shapes["zoom.right"], edge.x) < edge.y
        lowest = min(s.y for k, s in shapes.items() if k.startswith("heads.K") and isinstance(s, Rect))
        assert zoom_at(shapes["zoom.left"], -3.5) < lowest
    assert layout.rest is not None


def test_frames_and_svg_are_made():
    made = recording(6, 14, heads=(4, 2), causal=True, window=5, kv_len=10)
    assert made.blocks()[0] == Block(0, 0, 0)
    for n in range(0, len(made.steps), 9):
        fv.frame(made, n, 0.5)
    from flashviz.view.svg import frame_svg

    text = frame_svg(made, 5, "x")
    assert "map_2e_edge" in text
    assert "heads_2e_line0" in text


# -- who sees whom ---------------------------------------------------------------------------------------------------


def patches(axes):
    """(filled cells, hatched cells) of a panel, as (query, key)."""
    cells = [p for p in axes.patches if p.get_fill() and p.get_width() == 1]
    at = lambda kind: {(int(p.get_y()), int(p.get_x())) for p in cells if bool(p.get_hatch()) == kind}  # noqa: E731
    return at(False), at(True)


def test_mask_plot_draws_the_corner():
    figure = fv.mask_plot(*({"Nq": q, "Nk": k, "causal": True} for q, k in ((2, 5), (5, 2), (1, 8))))
    for axes, (Nq, Nk) in zip(figure.axes, ((2, 5), (5, 2), (1, 8)), strict=True):
        seen, hidden = patches(axes)
        assert seen == {(q, k) for q in range(Nq) for k in range(Nk) if k <= q + Nk - Nq}
        assert seen | hidden == {(q, k) for q in range(Nq) for k in range(Nk)}
        frame = [p for p in axes.patches if not p.get_fill() and p.get_linewidth() > 2]
        assert [(p.get_y(), p.get_x()) for p in frame] == [(Nq - 1, Nk - 1)]


def test_tiles_that_are_not_loaded_stay_empty():
    made = recording(causal=True)
    seen, hidden = patches(fv.mask_plot(made).axes[0])
    assert len(seen) == 16 * 17 // 2
    assert hidden == {(4 * b + r, 4 * b + c) for b in range(4) for r, c in ABOVE}


def test_mask_plot_takes_arrays_and_names_what_it_cannot_draw():
    seen, hidden = patches(fv.mask_plot(np.tri(2, 5, dtype=bool), names=["top left"]).axes[0])
    assert seen == {(0, 0), (1, 0), (1, 1)}
    assert len(hidden) == 7
    with pytest.raises(ValueError, match="at least one mask"):
        fv.mask_plot()
    with pytest.raises(ValueError, match="2 names for 1 masks"):
        fv.mask_plot({"Nq": 2, "Nk": 2}, names=["a", "b"])
    with pytest.raises(ValueError, match="41 queries or keys: mask_plot draws up to 40"):
        fv.mask_plot({"Nq": 41, "Nk": 2})
    assert fv.mask_plot({"Nq": 2, "Nk": 2})._repr_png_()[:4] == b"\x89PNG"
