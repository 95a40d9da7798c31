"""The picture of rotary embedding: who meets whom is seen in hues, in labels, and in where the elements fly."""

from __future__ import annotations

import re

import numpy as np
import pytest
from view.pictures import by_id, step_of

import flashviz as fv
from flashviz.slots import Block
from flashviz.view.facts import layout_for, waits
from flashviz.view.layout import BOTTOM, LEFT, RIGHT, TOP
from flashviz.view.palette import GROUND
from flashviz.view.panel import legend_html
from flashviz.view.shapes import Rect

FORMS = {"halves": fv.rope, "pairs": fv.rope_pairs}


def recording(form="halves", N=2, d=8, tile=1, **options):
    x = np.tile(np.arange(1.0, d + 1), (N, 1))
    made = FORMS[form](x, tile=tile, device="numpy", **options).recording
    assert made is not None
    return made


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("d", "rotary_dim"), [(2, None), (8, None), (6, 4), (12, 4), (64, None), (128, 32), (18, 2)])
def test_everything_is_on_the_canvas_and_nothing_overlaps(form, d, rotary_dim):
    made = recording(form, 5, d, 4, rotary_dim=rotary_dim)
    boxes = {n: b for n, b in layout_for(made, None).boxes.items() if not b.hidden}
    for n, (name, a) in enumerate(boxes.items()):
        assert a.x - a.w / 2 >= LEFT
        assert a.x + a.w / 2 <= RIGHT
        assert a.y - a.h / 2 >= BOTTOM
        assert a.y + a.h / 2 <= TOP
        for other, b in list(boxes.items())[n + 1 :]:
            apart = abs(a.x - b.x) >= (a.w + b.w) / 2 - 1e-6 or abs(a.y - b.y) >= (a.h + b.h) / 2 - 1e-6
            assert apart, (name, other)
    for n in range(len(made.steps)):
        by_id(fv.scene(made, n, 0.4))
    fv.frame(made, -1)
    drawn = {int(n[2:]) for n in boxes if re.fullmatch(r"xi\d+", n)}
    partners = [(p, p + 1) if form == "pairs" else (p // 2, p // 2 + (rotary_dim or d) // 2) for p in range(0, d, 2)]
    partners = partners[: (rotary_dim or d) // 2]
    assert all((a in drawn) == (b in drawn) for a, b in partners), "who is drawn is drawn with whom it meets"
    if d <= 8:
        assert drawn == set(range(d))


@pytest.mark.parametrize(("form", "groups"), [("halves", "01230123"), ("pairs", "00112233")])
def test_elements_that_meet_have_one_hue_everywhere(form, groups):
    made = recording(form)
    shapes = by_id(fv.scene(made, step_of(made, "rotate")))
    edges = [shapes[f"xi{e}.edge"].stroke for e in range(8)]
    assert [edges.index(edge) for edge in edges] == [groups.index(g) for g in groups]
    assert [shapes[f"x{e}[0].edge"].stroke for e in range(8)] == edges
    for p in range(4):
        (a, b) = [e for e in range(8) if groups[e] == str(p)]
        for name in (f"a{p}", f"b{p}", f"ci{p}", f"si{p}", f"cos{p}[0]", f"sin{p}[0]"):
            assert shapes[f"{name}.edge"].stroke == edges[a] == edges[b]
        assert (shapes[f"a{p}.label"].text, shapes[f"b{p}.label"].text) == (f"x{a}", f"x{b}")


def test_a_rotated_element_is_darker_and_one_that_passes_is_not():
    made = recording(rotary_dim=4)
    before, after = (by_id(fv.scene(made, step_of(made, text))) for text in ("load", "rotate"))
    for e in range(8):
        assert (before[f"xi{e}.fill"].fill != after[f"xi{e}.fill"].fill) == (e < 4)
        assert (f"xi{e}.ring" in after) == (e < 4)
    stored = by_id(fv.scene(made, step_of(made, "write")))
    assert [stored[f"O{e}[0].fill"].fill for e in range(8)] == [after[f"xi{e}.fill"].fill for e in range(8)]


def test_elements_fly_to_registers_before_the_row_fills():
    made = recording("halves")
    n = step_of(made, "rotate")
    awaited, waiting = waits(made, made.steps[n])
    assert awaited == {f"{r}{p}" for r in "ab" for p in range(4)}
    assert waiting == {f"xi{e}" for e in range(8)}
    boxes = layout_for(made, made.steps[n].block).boxes
    start = by_id(fv.scene(made, n, 0.0))
    for register, element in (("a1", "xi1"), ("b1", "xi5")):
        edge = start[f"{register}.edge"]
        assert edge.x + edge.w / 2 + edge.dx == pytest.approx(boxes[element].x)
        assert edge.y + edge.h / 2 + edge.dy == pytest.approx(boxes[element].y)
    half = by_id(fv.scene(made, n, 0.5))
    assert (half["a1.edge"].dx, half["a1.edge"].dy) == (0, 0)
    assert half["xi1.fill"].grow == 0
    assert 0 < by_id(fv.scene(made, n, 0.75))["xi1.fill"].grow < 1
    load = by_id(fv.scene(made, step_of(made, "load"), 0.5))
    assert load["xi1.edge"].dy != 0, "what nothing waits for flies the whole step"


def test_numbers_of_a_single_row_and_not_of_several():
    made = recording("pairs")
    n = step_of(made, "rotate", 1)
    shapes = by_id(fv.scene(made, n))
    want = made.values(n, "xi0")[0]
    assert shapes["xi0.number0"].text == f"{want:.3g}"
    assert shapes["sin1[1].number0"].text == "0.0998"
    several = by_id(fv.scene(recording(tile=2), 3))
    assert not [s for s in several if ".number" in s]


def test_the_blocks_own_rows_are_shown():
    x = np.ones((1, 2, 5, 4))
    made = fv.rope(x, tile=2, device="numpy").recording
    for block, title in ((Block(0, 0, 0), "rows 0 to 1"), (Block(0, 1, 2), "row 4")):
        layout = layout_for(made, block)
        assert f"HBM · batch 0, head {block.head}, {title}" in [label.text for label in layout.labels]
        mine = {s.name for s in made.slots if s.tensor in ("x", "O") and s.shared_by_grid}
        mine = {n for n in mine if n in layout.boxes}
        assert mine == {f"{t}{e}[0,{block.head},{block.tile}]" for t in "xO" for e in range(4)}


def test_nothing_is_drawn_where_the_ellipsis_is():
    made = recording(d=64)
    shapes = by_id(fv.scene(made, step_of(made, "rotate")))
    assert not [name for name in shapes if re.match(r"(xi10|a10|ci10)\.(box|fill|edge|ring)", name)]
    assert isinstance(shapes["xi31.edge"], Rect)


def test_the_legend_names_each_pair_once():
    chips = re.findall(r"elements [^<]*|not rotated", legend_html(recording("pairs", d=6, rotary_dim=4)))
    assert chips == ["elements 0 and 1", "elements 2 and 3", "not rotated"]
    many = legend_html(recording(d=64))
    assert "elements 0 and 32, 4 and 36, …" in many


def test_the_fused_picture_has_the_angles_in_hbm_and_in_registers():
    made = fv.flash_attention_2_rope(*np.random.default_rng(0).normal(size=(3, 8, 4)), device="numpy").recording
    layout = layout_for(made, None)
    assert {"cq0", "sq1", "ck0", "sk1", "c", "s"} <= set(layout.boxes)
    assert "registers" in [label.text for label in layout.labels]
    shapes = by_id(fv.scene(made, step_of(made, "j = 1 · load Kj")))
    assert (shapes["c.label"].text, shapes["s.label"].text) == ("ck1", "sk1")
    assert shapes["c.fill"].fill == shapes["ck1.fill"].fill != GROUND
