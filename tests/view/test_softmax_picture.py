"""The picture of the softmax: strips, carries with their numbers, hues of its own, and boxes that write numbers."""

from __future__ import annotations

import numpy as np
import pytest
from view.pictures import by_id, step_of

import flashviz as fv
from flashviz.slots import Block
from flashviz.view.facts import hues_of, layout_for
from flashviz.view.layout import BOTTOM, LEFT, RIGHT, TOP
from flashviz.view.palette import GROUND, HUES, STALE
from flashviz.view.panel import legend_html
from flashviz.view.shapes import Rect, Text

X = np.array([1, -0.5, 0.5, 2, 0, 3.5, 1, -1, 2, 0.5, -2, 1.5], "float32")
V = np.arange(48.0).reshape(12, 4) / 10


def recording(form="online", x=X, V=V, **options):
    made = fv.online_softmax(x, V if form == "fused" else None, form=form, device="numpy", **options).recording
    assert made is not None
    return made


def numbers(scene, name):
    """The numbers that are written in a slot's box, left to right."""
    found = [s for s in scene.shapes if isinstance(s, Text) and s.id.startswith(f"{name}.number") and not s.under]
    return [s.text for s in sorted(found, key=lambda s: s.x)]


@pytest.mark.parametrize("form", ["safe", "online", "fused"])
@pytest.mark.parametrize(("N", "tile"), [(1, 4), (12, 4), (10, 4), (8, 1), (40, 4), (300, 100)])
def test_everything_is_on_the_canvas_and_nothing_overlaps(form, N, tile):
    rng = np.random.default_rng(N)
    made = recording(form, rng.normal(size=N), rng.normal(size=(N, 4)), tile=tile)
    boxes = [b for b in layout_for(made, None).boxes.values() if not b.hidden]
    for n, a in enumerate(boxes):
        assert a.x - a.w / 2 >= LEFT
        assert a.x + a.w / 2 <= RIGHT
        assert a.y - a.h / 2 >= BOTTOM
        assert a.y + a.h / 2 <= TOP
        for b in boxes[n + 1 :]:
            apart = abs(a.x - b.x) >= (a.w + b.w) / 2 - 1e-6 or abs(a.y - b.y) >= (a.h + b.h) / 2 - 1e-6
            assert apart, (a, b)
    for n in range(0, len(made.steps), 5):
        fv.frame(made, n)
    shown = [s for s in made.slots if s.tensor == "x" and not layout_for(made, None).boxes[s.name].hidden]
    assert len(shown) == min(-(-N // tile), 7 if 8 * tile < N else 8) + ("xi" in made.slot_by_name)


def test_there_is_no_grid_and_no_zoom():
    layout = layout_for(recording(), None)
    assert layout.squares == ()
    assert layout.zoom is None


def test_the_carries_show_their_numbers_at_every_step():
    made = recording("fused")
    for n, step in enumerate(made.steps):
        scene = fv.scene(made, n)
        for name in ("m", "c", "d", "w", "o"):
            content = made.content(n, name) if step.block is not None else None
            want = [] if content is None else [float(v) for v in content.values.array]
            digits = 4 if name != "o" else 3
            assert numbers(scene, name) == [f"{v:.{digits}g}" for v in want]
    rescaled = fv.scene(made, step_of(made, "i = 1 · rescale d"))
    assert (numbers(rescaled, "m"), numbers(rescaled, "c"), numbers(rescaled, "d")) == (["3.5"], ["0.2231"], ["0.3733"])
    start = fv.scene(made, step_of(made, "set m"))
    assert (numbers(start, "m"), numbers(start, "d"), numbers(start, "c")) == (["-inf"], ["0"], [])


def test_tiles_show_name_and_numbers():
    made = recording()
    shapes = by_id(fv.scene(made, -1))
    assert numbers(fv.scene(made, -1), "x1") == ["0", "3.5", "1", "-1"]
    assert shapes["x1.label"].text == "x1"
    assert shapes["x1.label"].y > shapes["x1.number0"].y
    first, last = shapes["x1.number0"], shapes["x1.number3"]
    box = layout_for(made, None).boxes["x1"]
    assert box.x - box.w / 2 < first.x < last.x < box.x + box.w / 2


def test_a_change_of_numbers_alone_is_seen():
    s = fv.OnlineSoftmax(X)
    s.begin()
    s.start()
    for act in (s.load_x, s.running_max, s.running_sum, s.rescale, s.rescale):
        act(0)
    made = s.run().recording
    before, once, twice = (made.content(n, "d") for n in (-3, -2, -1))
    assert before.level == once.level == twice.level, "a rescale is no update"
    assert not before.stale
    assert "d.ring" in by_id(fv.scene(made, -2))
    assert numbers(fv.scene(made, -2), "d") == ["0"]
    assert "d.ring" not in by_id(fv.scene(made, -1)), "0 times 0 looks as before"


def test_while_a_new_number_fills_the_old_one_is_not_written_under_it():
    made = recording()
    n = step_of(made, "i = 1 · new maximum m")
    during = fv.scene(made, n, 0.5)
    written = [s for s in during.shapes if isinstance(s, Text) and s.id.startswith("m.")]
    assert [s.text for s in written if "number" in s.id] == ["3.5"]
    moving = fv.scene(made, step_of(made, "i = 1 · load xi"), 0.5)
    assert [s.text for s in moving.shapes if s.id.startswith("xi.0.number")] == ["1", "-0.5", "0.5", "2"]


def test_stale_numbers_are_light_on_grey():
    made = recording()
    shapes = by_id(fv.scene(made, step_of(made, "i = 1 · load xi")))
    assert shapes["d.fill"].fill == STALE
    assert shapes["d.number0"].fill == GROUND


def test_a_last_tile_with_fewer_elements_is_narrower():
    made = recording(x=X[:10])
    boxes = layout_for(made, None).boxes
    assert boxes["x2"].w == pytest.approx(boxes["x0"].w / 2)
    shapes = by_id(fv.scene(made, step_of(made, "i = 2 · load xi")))
    fill, rest = shapes["xi.fill"], shapes["xi.rest"]
    assert isinstance(fill, Rect)
    assert (fill.w, fill.h) == (pytest.approx(boxes["xi"].w / 2), boxes["xi"].h)
    assert rest.hatched
    assert rest.x == pytest.approx(fill.x + fill.w)
    assert numbers(fv.scene(made, step_of(made, "i = 2 · load xi")), "xi") == ["2", "0.5"]


def test_numbers_that_do_not_fit_are_left_out():
    made = recording(x=np.arange(300.0), tile=100)
    assert numbers(fv.scene(made, -1), "x0") == []
    assert numbers(fv.scene(made, -1), "m") == ["299"]


def test_of_several_rows_the_blocks_own_is_shown():
    made = recording(x=np.stack([X, -X]))
    blocks = [Block(0, 0, r) for r in range(2)]
    for block in blocks:
        layout = layout_for(made, block)
        assert any(f"row {block.tile}" in label.text for label in layout.labels)
        assert {n for n in layout.boxes if n.startswith("x") and n != "xi"} == {f"x{i}[{block.tile}]" for i in range(3)}
    n = step_of(made, "row 1 · p = 1 · i = 0 · new maximum")
    assert numbers(fv.scene(made, n), "m") == ["0.5"]


def test_hues_and_legend():
    made = recording("fused")
    hues = hues_of(made)
    assert hues["m"] is HUES["m"]
    assert hues["x"].meaning == "scores x"
    legend = legend_html(made)
    for words in ("scores x", "terms e^(x - m), and y", "factors: what the old is multiplied by", "denominator d"):
        assert words in legend
    assert set(fv.traffic(made).tensors) <= set(hues)
    fv.traffic_plot(made)
