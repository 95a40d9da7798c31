"""The third memory in the picture, and asynchronous copies: on their way from where they are issued to where they are waited for."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from view.pictures import by_id, step_of
from view.test_layout import check

import flashviz as fv
from flashviz.recording import Recording
from flashviz.view.facts import flights_of, layout_for
from flashviz.view.layers import layers_of
from flashviz.view.layout import BOTTOM, TOP
from flashviz.view.palette import GROUND, HUES
from flashviz.view.panel import action_class, code_html, legend_html, targets_of
from flashviz.view.paths import Paths
from flashviz.view.scene import scene
from flashviz.view.shapes import Rect, Text
from flashviz.view.storyboard import storyboard
from flashviz.view.text import UNIT


@lru_cache(maxsize=16)
def recorded(rung: Any, tiles: tuple[int, int] = (2, 3), rows: int = 4) -> Recording:
    rng = np.random.default_rng(11)
    Q = rng.standard_normal((tiles[0] * rows - 1, 4), "f4")
    K, V = rng.standard_normal((2, tiles[1] * rows - 2, 4), "f4")
    run = fv.flash_attention_2(Q, K, V, Br=rows, Bc=rows, rung=rung, device="numpy")
    assert run.recording is not None
    return run.recording


@pytest.mark.parametrize("rung", [1, 4])
def test_registers_are_a_band_under_shared_memory(rung: Any) -> None:
    recording = recorded(rung)
    layout = layout_for(recording, None)
    title = next(label for label in layout.labels if label.text == "registers")
    below = {s.name for s in recording.slots if s.memory == "register"}
    above = {s.name for s in recording.slots if s.memory == "shared"}
    assert below == {"Sij", "mi", "li", "Oi"}
    lowest = min(layout.boxes[n].y - layout.boxes[n].h / 2 - layout.boxes[n].drop for n in above)
    assert max(layout.boxes[n].y + layout.boxes[n].h / 2 for n in below) < title.y < lowest
    assert layout.zoom is not None
    assert layout.zoom[2] == max(layout.boxes[n].y + layout.boxes[n].h / 2 for n in above)
    assert layout.boxes["Sij"].cells == (4, 4)


@pytest.mark.parametrize("rung", [1, 4])
@pytest.mark.parametrize("tiles", [(1, 1), (2, 3), (8, 8), (12, 10)])
def test_nothing_overlaps_and_all_is_inside(rung: Any, tiles: tuple[int, int]) -> None:
    recording = recorded(rung, tiles)
    for step in (*range(12), len(recording.steps) - 1):
        if step < len(recording.steps):
            check(recording, step)


def shown(recording: Recording, step: int, slot: str, t: float = 1.0) -> tuple[str, Rect]:
    """What stands in a slot's box, and its fill."""
    shapes = by_id(scene(recording, step, t))
    label = shapes.get(f"{slot}.label")
    assert label is None or isinstance(label, Text)
    fill = shapes[f"{slot}.fill"]
    assert isinstance(fill, Rect)
    return label.text if label else "", fill


def test_a_copy_is_hatched_until_it_is_waited_for_and_then_fills() -> None:
    recording = recorded(4)
    issue, wait = step_of(recording, "j = 1 · start loading"), step_of(recording, "j = 1 · wait for")
    for step in range(issue, wait):
        label, fill = shown(recording, step, "Kj[1]")
        assert (label, fill.fill, fill.hatched) == ("K1", GROUND, True)
    label, fill = shown(recording, wait, "Kj[1]")
    assert (label, fill.fill, fill.hatched, fill.grow) == ("K1", HUES["K"].light, False, 1.0)
    assert (
        shown(recording, wait, "Kj[1]", 0.25)[1].grow == 0.5
    )  # in the first half: the scores that read it fill in the second
    assert shown(recording, wait, "Kj[1]", 0.0)[1].grow == 0
    rings = {s for s in by_id(scene(recording, wait)) if s.endswith(".ring")}
    assert rings == {"Sij.ring", "mi.ring", "li.ring"}  # what is computed, or stale now; not what arrives


def test_a_copy_flies_when_it_is_issued() -> None:
    recording = recorded(4)
    issue = step_of(recording, "j = 1 · start loading")
    boxes = layout_for(recording, None).boxes
    start, end = (shown(recording, issue, "Kj[1]", t)[1] for t in (0.0, 1.0))
    x, y = (getattr(boxes["K1"], a) - getattr(boxes["Kj[1]"], a) for a in "xy")
    assert abs(start.dx - x) < 1e-9
    assert abs(start.dy - y) < 0.2  # centres, of a tile that is shorter
    assert (end.dx, end.dy) == (0, 0)


def test_what_is_on_its_way_covers_what_was_there() -> None:
    recording = recorded(4)
    again = step_of(recording, "j = 2 · start loading")
    shapes = by_id(scene(recording, again))
    assert shapes["Kj[0].label"].text == "K2"
    assert shapes["Kj[0].0.label"].text == "K0"
    slot = recording.slot("Kj[0]")
    layers = layers_of(recording, layout_for(recording, None), slot, recording.steps[again])
    assert [(layer.content.label, layer.arriving) for layer in layers] == [("K0", False), ("K2", True)]
    hover = next(h for h in scene(recording, again).hovers if h.id == "Kj[0].hover")
    assert "holds K0" in hover.text
    assert hover.text.endswith("K2 is on its way, and not waited for yet")


def test_every_step_begins_as_the_last_one_ended() -> None:
    recording = recorded(5)
    for step in range(3, len(recording.steps)):
        if recording.steps[step].block != recording.steps[step - 1].block:
            continue
        for slot in ("Kj[0]", "Kj[1]", "Vj[1]", "Qi"):
            before = top(recording, step - 1, slot, 1.0)
            after = top(recording, step, slot, 0.0)
            assert before == after, (step, slot)


def top(recording: Recording, step: int, slot: str, t: float) -> tuple[Any, ...] | None:
    """Fill and hatching of what covers a slot's box at a moment, None where nothing does."""
    boxes = layout_for(recording, recording.steps[step].block).boxes
    rects = [s for s in scene(recording, step, t).shapes if isinstance(s, Rect) and s.id.split(".")[0] == slot]
    there = [
        r
        for r in rects
        if r.id.endswith(".fill") and r.grow > 0 and abs(r.x + r.dx - boxes[slot].x + boxes[slot].w / 2) < 1e-9
    ]
    there = [r for r in there if abs(r.dy) < 1e-9]
    return (there[-1].fill, there[-1].hatched) if there else None


def test_a_copy_that_nobody_waits_for_never_arrives() -> None:
    r = fv.Recorder("mine")
    x, buffer = r.tensor("x", np.arange(4.0), tile=2), r.slot("b", (2,), tensor="x")
    with r.launch("mine"), r.block(tile=0):
        with r.step("start"):
            r.move(x[1], buffer, group="x")
        with r.step("later"):
            pass
    recording = r.recording()
    (flight,) = flights_of(recording)[recording.key("b", 0, recording.steps[-1].block)]
    assert flight.landed == len(recording.events)
    assert shown(recording, len(recording.steps) - 1, "b")[1].hatched


def test_the_legend_names_what_is_on_its_way() -> None:
    assert "on its way: asked for, not waited for yet" in legend_html(recorded(4))
    assert "on its way" not in legend_html(recorded(3))
    assert "scores S" in legend_html(recorded(4))


def test_each_block_has_a_square_of_its_own_however_the_kernel_numbers_them() -> None:
    rng = np.random.default_rng(2)
    Q, K, V = (rng.standard_normal((3, 8, 4), "f4") for _ in range(3))
    for rung in (3, 5):
        run = fv.flash_attention_2(Q, K, V, Br=4, Bc=4, rung=rung, causal=True, device="numpy")
        assert run.recording is not None
        squares = layout_for(run.recording, None).square
        assert sorted(squares.values()) == list(range(6))


def test_both_places_where_a_tile_is_asked_for_are_marked_in_the_kernel() -> None:
    recording = recorded(4)
    kernel = recording.code[1]
    before, inside = (kernel.text.split("\n")[first - 1] for name, first, _ in kernel.lines if name == "load_k")
    assert (before.strip(), inside.strip()) == ("TRACE(load_k, 0);", "TRACE(load_k, j + 1);")
    html = code_html(kernel, targets_of(recording, range(len(recording.steps))))
    assert html.count(f"fv-a {action_class('load_k')}") == 2
    assert html.count(f"fv-a {action_class('scores')}") == 1


@pytest.mark.parametrize("rung", [0, 2, 4])
def test_captions_on_the_sheet_stand_below_the_names_of_slots(rung: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, float, float]] = []
    monkeypatch.setattr(Paths, "text", lambda self, x, y, text, size, *rest: said.append((text, y, size)))
    step = step_of(recorded(rung), "update mi")
    storyboard(recorded(rung), [step])
    ((_, caption, size),) = [s for s in said if "update mi" in s[0]]
    names = [(y, height) for text, y, height in said if text in ("mi", "li", "Oi", "Sij", "Vj")]
    assert len(names) >= 4
    assert caption + size / UNIT / 2 < min(y - height / UNIT / 2 for y, height in names)
    assert caption - size / UNIT / 2 > -(TOP - BOTTOM)
