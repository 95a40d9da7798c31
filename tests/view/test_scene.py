"""The scene as data: what is shown when, in which order, and how each step gets from its start to its end."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from performances import Performance, performances
from view.pictures import attention, by_id, step_of

from flashviz import Recorder
from flashviz.recording import Recording
from flashviz.view.draw import line_ends
from flashviz.view.facts import layout_for
from flashviz.view.palette import HUES, OUTLINE, STALE, TEXT, contrast, fill_of
from flashviz.view.scene import scene
from flashviz.view.shapes import Line, Rect, Text
from flashviz.view.storyboard import frame, png
from flashviz.view.tween import smoothstep

CHIP = ("Qi", "Kj", "Sij", "Vj", "mi", "li", "Oi")
LIGHT_S, DARK_S = "#ddd6fe", "#a78bfa"


def frames() -> list[tuple[str, str]]:
    """Label and caption of all 19 frames, as figure.md gives them."""
    out = [("start", "Setup ready")]
    for i in range(2):
        out.append((f"visualize block {i}", f"visualize {'another' if i else 'a single'} block"))
        out.append((f"block {i} · load Qi", "load Qi"))
        for j in range(2):
            for what in ("load Kj, Vj", "fill Sij", "update mi, li and Oi"):
                out.append((f"block {i} · j = {j} · {what}", f"[KV loop: {j}] {what}"))
        out.append((f"block {i} · write Oi, Li", "write Oi, Li"))
    return out


def fill(recording: Recording, step: int, slot: str, t: float = 1.0) -> str | None:
    """The fill seen in a slot: of its last shape that has grown at all and lies on it."""
    seen = None
    for shape in scene(recording, step, t).shapes:
        mine = shape.id == f"{slot}.box" or (shape.id.startswith(f"{slot}.") and ".caption" not in shape.id)
        if isinstance(shape, Rect) and mine and shape.fill and shape.grow > 0 and shape.dx == shape.dy == 0:
            seen = shape.fill if not shape.hatched else seen
    return seen


def rings(recording: Recording, step: int, t: float = 1.0) -> set[str]:
    return {s.id.removesuffix(".ring") for s in scene(recording, step, t).shapes if s.id.endswith(".ring")}


# -- the frames --------------------------------------------------------------------------------------------------------


def test_labels_and_captions_of_all_frames() -> None:
    recording = attention()
    assert [(s.label, s.caption) for s in recording.steps] == frames()
    for n, (_, caption) in enumerate(frames()):
        assert by_id(scene(recording, n))["caption"].text == caption
        assert scene(recording, n).caption == caption


def test_what_the_slots_show_in_every_frame_of_a_block() -> None:
    recording = attention()
    q, k, v = (HUES[x].light for x in "QKV")
    o, m, l = HUES["O"], HUES["m"], HUES["l"]
    white = "#ffffff"
    want = [
        (white, white, white, white, white, white, white),
        (q, white, white, white, white, white, white),
        (q, k, white, v, white, white, white),
        (q, k, DARK_S, v, white, white, white),
        (q, k, DARK_S, v, m.light, l.light, o.light),
        (q, k, STALE, v, STALE, STALE, o.light),
        (q, k, LIGHT_S, v, STALE, STALE, o.light),
        (q, k, LIGHT_S, v, m.dark, l.dark, o.dark),
        (q, k, LIGHT_S, v, m.dark, l.dark, o.dark),
    ]
    for block in range(2):
        for n, row in enumerate(want):
            got = tuple(fill(recording, 1 + 9 * block + n, slot) for slot in CHIP)
            assert got == row, (block, n)


def test_labels_in_the_slots() -> None:
    recording = attention()
    for step in range(1, 19):
        shapes = by_id(scene(recording, step))
        held = {s: shapes[f"{s}.label"].text for s in CHIP if f"{s}.label" in shapes}
        block, n = divmod(step - 1, 9)
        j = None if n < 2 else min((n - 2) // 3, 1)
        want = {} if n == 0 else {"Qi": f"Q{block}"} | ({} if j is None else {"Kj": f"K{j}", "Vj": f"V{j}"})
        assert held == want, step


def test_hbm_at_the_start_and_the_end() -> None:
    recording = attention()
    for step, o, l in ((0, "#ffffff", "#ffffff"), (18, HUES["O"].dark, HUES["l"].dark)):
        shapes = by_id(scene(recording, step))
        for n in (0, 1):
            for name, color, hue in ((f"O{n}", o, HUES["O"]), (f"L{n}", l, HUES["l"])):
                assert shapes[f"{name}.fill"].fill == color
                assert shapes[f"{name}.edge"].stroke == hue.outline
                assert shapes[f"{name}.label"].text == name, "written-back content keeps the label of its place"


def test_sram_is_shown_only_with_a_block() -> None:
    recording = attention()
    ids = by_id(scene(recording, 0))
    assert not any(key.split(".")[0] in CHIP for key in ids)
    assert not any(key.startswith("zoom") for key in ids)
    assert all(s.fill == "#ffffff" for key, s in ids.items() if key.startswith("square"))
    for step in range(1, 19):
        ids = by_id(scene(recording, step))
        assert {f"{slot}.box" for slot in CHIP} <= set(ids)
        dark = [key for key, s in ids.items() if key.startswith("square") and s.fill == OUTLINE]
        assert dark == [f"square{4 if step < 10 else 5}"]


def test_another_block_starts_empty() -> None:
    shapes = by_id(scene(attention(), 10, 0.0))
    assert not any(f"{slot}.fill" in shapes for slot in CHIP)
    assert all(f"{slot}.box" in shapes for slot in CHIP)


# -- order, time, purity -----------------------------------------------------------------------------------------------


def rank(key: str, shape: Any, hbm: set[str]) -> int:
    """Where figure.md draws a shape: squares, zoom lines, empty outlines, under, top (HBM first), rings, captions."""
    slot = key.split(".")[0]
    if key.startswith("square"):
        return 0
    if key.startswith("zoom"):
        return 1
    if key.endswith(".box"):
        return 2
    if key.endswith(".ring"):
        return 7
    if key.startswith("label.") or key.endswith(".caption"):
        return 8
    if key == "caption":
        return 9
    return (3 if shape.under else 5) + (slot not in hbm)


@pytest.mark.parametrize("ragged", [(0, 0), (1, 2)])
def test_drawing_order(ragged: tuple[int, int]) -> None:
    recording = attention((2, 2), ragged)
    hbm = {s.name for s in recording.slots if s.shared_by_grid}
    seen = set()
    for step in range(19):
        for t in (0.0, 0.5, 1.0):
            ranks = [rank(s.id, s, hbm) for s in scene(recording, step, t).shapes]
            assert ranks == sorted(ranks), step
            seen |= set(ranks)
    assert seen == set(range(10))


@pytest.mark.parametrize("recording", [attention(), attention((3, 3), (1, 2)), attention((2, 2), causal=True)])
def test_a_step_begins_with_what_the_last_one_ended_with(recording: Recording) -> None:
    for step in range(1, len(recording.steps)):
        slots = [s.name for s in recording.slots if s.shared_by_grid]
        if recording.steps[step].block == recording.steps[step - 1].block:
            slots += CHIP
        for slot in slots:
            assert fill(recording, step, slot, 0.0) == fill(recording, step - 1, slot), (step, slot)


@pytest.mark.parametrize("recording", [attention(), attention((3, 5), (3, 2)), attention((2, 4), (1, 2), rung=4)])
def test_the_end_covers_what_was_there(recording: Recording) -> None:
    """Players leave out what lies under: nothing of it may show."""
    for step in range(len(recording.steps)):
        shapes = scene(recording, step).shapes
        for n, shape in enumerate(shapes):
            if shape.under and isinstance(shape, Rect):
                over = [s for s in shapes[n:] if isinstance(s, Rect) and s.fill and not s.under and s.grow == 1]
                left, bottom, right, top = shape.x, shape.y, shape.x + shape.w, shape.y + shape.h
                xs, ys = np.linspace(left + 1e-3, right - 1e-3, 9), np.linspace(bottom + 1e-3, top - 1e-3, 9)
                for x in xs:
                    for y in ys:
                        assert any(s.x <= x <= s.x + s.w and s.y <= y <= s.y + s.h for s in over), (step, shape)


def test_the_ids_are_the_same_at_every_t() -> None:
    recording = attention((2, 2), (1, 1))
    for step in range(19):
        ids = [s.id for s in scene(recording, step, 0.0).shapes]
        assert all([s.id for s in scene(recording, step, t).shapes] == ids for t in (0.3, 1.0))


def test_a_scene_is_a_function_of_step_and_t_only() -> None:
    one, two = attention(), attention((2, 2), heads=(1, 1))
    first = [scene(one, step, t) for step in range(19) for t in (0.0, 0.4, 1.0)]
    scene(two, 5)
    again = [scene(one, step, t) for step in reversed(range(19)) for t in (1.0, 0.4, 0.0)]
    assert first == again[::-1], "jumping anywhere gives the same picture"


def test_step_0_drawn_again_is_pixel_equal() -> None:
    recording = attention()
    first = hashlib.sha256(png(frame(recording, 0))).hexdigest()
    for step in (3, 18, 7):
        png(frame(recording, step, 0.5))
    assert hashlib.sha256(png(frame(recording, 0))).hexdigest() == first
    assert hashlib.sha256(png(frame(recording, 1))).hexdigest() != first


@pytest.mark.parametrize(("step", "t", "error"), [(19, 1.0, IndexError), (0, 1.01, ValueError), (0, -0.1, ValueError)])
def test_outside(step: int, t: float, error: type[Exception]) -> None:
    with pytest.raises(error):
        scene(attention(), step, t)


def test_negative_steps_count_from_the_end() -> None:
    assert scene(attention(), -1) == scene(attention(), 18)


# -- moves -------------------------------------------------------------------------------------------------------------


def centre(shape: Any) -> tuple[float, float]:
    return shape.x + shape.dx + shape.w / 2, shape.y + shape.dy + shape.h / 2


@pytest.mark.parametrize(
    ("step", "moves"),
    [(2, [("Q0", "Qi")]), (6, [("K1", "Kj"), ("V1", "Vj")]), (9, [("Oi", "O0"), ("li", "L0")])],
)
def test_a_move_flies_from_its_source_at_the_size_of_its_destination(step: int, moves: list[tuple[str, str]]) -> None:
    recording = attention()
    boxes = layout_for(recording, None).boxes
    for src, dst in moves:
        places = []
        for t in (0.0, 0.25, 0.5, 1.0):
            shapes = by_id(scene(recording, step, t))
            parts = [shapes[f"{dst}.fill"], shapes[f"{dst}.edge"], shapes[f"{dst}.label"]]
            assert len({(p.dx, p.dy) for p in parts}) == 1, "a copy flies whole"
            assert (parts[0].w, parts[0].h) == (boxes[dst].w, boxes[dst].h)
            assert parts[0].grow == 1
            places.append(centre(parts[0]))
        start, end = (boxes[src].x, boxes[src].y), (boxes[dst].x, boxes[dst].y)
        assert np.allclose(places[0], start)
        assert np.allclose(places[-1], end)
        for t, place in ((0.25, places[1]), (0.5, places[2])):
            assert np.allclose(place, np.array(start) + smoothstep(t) * (np.array(end) - start))


def test_what_flies_passes_over_hbm_and_lands_on_what_was_there() -> None:
    shapes = scene(attention(), 6, 0.5).shapes
    ids = [s.id for s in shapes]
    assert ids.index("Kj.fill") > max(n for n, key in enumerate(ids) if key.startswith(("K0.", "V1.", "L1.")))
    under = by_id(scene(attention(), 6, 0.5))["Kj.0.fill"]
    assert under.under
    assert under.dx == 0


def test_moved_and_changed_in_one_step_flies_then_fills() -> None:
    r = Recorder("both")
    x, xi = r.tensor("x", np.ones((2, 2)), tile=2), r.slot("xi", (2, 2), tensor="x")
    r.launch("k")
    r.block()
    with r.step("load and double"):
        r.move(x[0], xi)
        r.change(xi, np.ones((2, 2)) * 2, reads=(xi,))
    recording = r.recording()
    for t, flown, grown in ((0.25, smoothstep(0.5), 0.0), (0.5, 1.0, 0.0), (0.75, 1.0, 0.5), (1.0, 1.0, 1.0)):
        shapes = by_id(scene(recording, 2, t))
        box, source = layout_for(recording, None).boxes["xi"], layout_for(recording, None).boxes["x0"]
        assert shapes["xi.0.fill"].dy == pytest.approx((1 - flown) * (source.y - box.y))
        assert shapes["xi.fill"].grow == pytest.approx(grown)


# -- changes in place --------------------------------------------------------------------------------------------------


def test_a_fill_grows_from_the_bottom() -> None:
    for t in (0.0, 0.25, 1.0):
        shape = by_id(scene(attention(), 8, t))["Oi.fill"]
        assert (shape.grow, shape.y, shape.h) == pytest.approx((t, -3.6, 1.2))
    assert by_id(scene(attention(), 8, 0.0))["Oi.0.fill"].fill == HUES["O"].light


@pytest.mark.parametrize("ragged", [(0, 0), (1, 2)])
def test_cells_start_one_after_another(ragged: tuple[int, int]) -> None:
    recording = attention((1, 1), ragged)
    step = step_of(recording, "fill Sij")
    rows, columns = 4 - ragged[0], 4 - ragged[1]
    count = rows * columns
    for k in range(2 * count + 1):
        t = k / (2 * count)
        shapes = by_id(scene(recording, step, t))
        cells = [shapes[f"Sij.{r}.{c}"] for r in range(rows) for c in range(columns)]
        for n, cell in enumerate(cells):
            assert (cell.grow > 0) == (t > n / count), (n, t)
            assert (cell.start, cell.end) == pytest.approx((n / count, (n + 1) / count))
        assert sum(c.grow for c in cells) == pytest.approx(t * count)


def test_large_scores_are_drawn_in_equal_parts() -> None:
    recording = attention((1, 1), size=16)
    shapes = by_id(scene(recording, step_of(recording, "fill Sij")))
    assert sum(1 for key in shapes if key.startswith("Sij.") and key.count(".") == 2) == 64
    assert shapes["Sij.0.0"].w == pytest.approx(1.2 / 8)


def test_rings_surround_what_changed_until_the_next_step() -> None:
    recording = attention()
    carries = {"mi", "li", "Oi"}
    want = [set(), set(), carries, set(), {"Sij"}, carries, {"Sij", "mi", "li"}, {"Sij"}, carries, set()]
    assert [rings(recording, n) for n in range(10)] == want
    assert [rings(recording, n, 0.0) for n in range(10)] == want
    ring, box = by_id(scene(recording, 4))["Sij.ring"], by_id(scene(recording, 4))["Sij.box"]
    outside = (ring.x + 0.06, ring.y + 0.06, ring.w - 0.12, ring.h - 0.12)
    assert outside == pytest.approx((box.x, box.y, box.w, box.h))
    assert (ring.stroke, ring.fill) == (TEXT, None)


def test_probabilities_keep_the_colour_of_the_scores() -> None:
    recording = attention()
    step = step_of(recording, "update")
    assert recording.content(step, "Sij") != recording.content(step - 1, "Sij"), "the write is recorded"
    for t in (0.0, 0.5, 1.0):
        assert fill(recording, step, "Sij", t) == DARK_S
        assert "Sij" not in rings(recording, step, t)


def test_stale_is_grey_with_its_outline_and_never_oi() -> None:
    recording = attention((2, 4))
    for n, step in enumerate(recording.steps):
        shapes = by_id(scene(recording, n))
        grey = {key.split(".")[0] for key, s in shapes.items() if getattr(s, "fill", "") == STALE and not s.under}
        first = "j = 0" in step.label
        want: set[str] = set()
        if "load Kj" in step.label and not first:
            want = {"Sij", "mi", "li"}
        elif "fill" in step.label and not first:
            want = {"mi", "li"}
        assert grey == want, step.label
        for slot in grey:
            tensor = {"Sij": "S", "mi": "m", "li": "l"}[slot]
            assert shapes[f"{slot}.edge"].stroke == HUES[tensor].outline


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_shades_run_in_equal_steps_from_light_to_dark(count: int) -> None:
    recording = attention((2, count))
    for block in range(2):
        for slot, tensor in (("Oi", "O"), ("mi", "m"), ("li", "l")):
            steps = [step_of(recording, f"block {block} · j = {j} · update") for j in range(count)]
            fills = [fill(recording, n, slot) for n in steps]
            assert fills[-1] == HUES[tensor].dark
            assert count == 1 or fills[0] == HUES[tensor].light
            rgb = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in fills if c])
            assert count < 3 or np.abs(np.diff(rgb, 2, axis=0)).max() <= 1, "equal steps, but for rounding"


def test_scores_alternate_and_begin_anew_with_a_block() -> None:
    recording = attention((2, 3))
    for block in range(2):
        fills = [fill(recording, step_of(recording, f"block {block} · j = {j} · fill"), "Sij") for j in range(3)]
        assert fills == [DARK_S, LIGHT_S, DARK_S]


def test_initialised_is_drawn_empty_whatever_the_values() -> None:
    r = Recorder("init")
    a, b = r.slot("a", (2,), tensor="O"), r.slot("b", (2,), tensor="m")
    r.launch("k")
    r.block()
    with r.step("init"):
        r.init(a, 7.0)
        r.init(b, -np.inf)
    recording = r.recording()
    for slot, hue in (("a", HUES["O"]), ("b", HUES["m"])):
        assert fill(recording, 2, slot) == "#ffffff"
        assert by_id(scene(recording, 2))[f"{slot}.edge"].stroke == hue.outline


def test_labels_are_readable_on_every_fill() -> None:
    r = Recorder("labels")
    x, xi = r.tensor("x", np.ones((2, 2)), tile=2), r.slot("xi", (2, 2), tensor="x")
    r.launch("k")
    r.block()
    with r.step("load"):
        r.move(x[0], xi)
    with r.step("stale"):
        r.stale(xi)
    shapes = by_id(scene(r.recording(), 3))
    assert shapes["xi.fill"].fill == STALE
    assert shapes["xi.label"].text == "x0"
    assert contrast(shapes["xi.label"].fill, STALE) >= 4.5


# -- ragged tiles ------------------------------------------------------------------------------------------------------


def test_ragged_tiles_are_as_high_as_their_rows_and_hatched_below() -> None:
    recording = attention((2, 2), (1, 2))
    shapes = by_id(scene(recording, len(recording.steps) - 1))
    for slot, part in (("Qi", 0.75), ("Kj", 0.5), ("Vj", 0.5), ("mi", 0.75), ("Oi", 0.75)):
        solid, rest = shapes[f"{slot}.fill"], shapes[f"{slot}.rest"]
        assert solid.h == pytest.approx(1.2 * part)
        assert solid.y + solid.h == pytest.approx(-2.4), "rows fill a slot from the top"
        assert (rest.y, rest.y + rest.h) == pytest.approx((-3.6, solid.y))
        assert rest.hatched
    masked, past = shapes["Sij.masked"], shapes["Sij.past"]
    assert (masked.x, masked.w, masked.h) == pytest.approx((-0.4, 0.6, 1.2))
    assert (past.y, past.h, past.w) == pytest.approx((-3.6, 0.3, 0.6))
    assert masked.hatched
    assert past.hatched


def test_a_ragged_tile_starts_on_its_source() -> None:
    recording = attention((1, 2), (0, 2))
    shapes = by_id(scene(recording, step_of(recording, "load Kj", 1), 0.0))
    source, copy = shapes["K1.fill"], shapes["Kj.fill"]
    assert centre(copy) == pytest.approx(centre(source))
    assert (copy.w, copy.h) == pytest.approx((source.w, source.h))


def test_full_tiles_hatch_nothing() -> None:
    for step in range(19):
        assert not any(getattr(s, "hatched", False) for s in scene(attention(), step).shapes)


# -- zoom lines --------------------------------------------------------------------------------------------------------


def ends(recording: Recording, step: int, t: float) -> dict[str, tuple[float, ...]]:
    return {s.id: sum(line_ends(s), ()) for s in scene(recording, step, t).shapes if isinstance(s, Line)}


def test_zoom_lines_grow_out_of_the_square_then_slide() -> None:
    recording = attention()
    corners = {"zoom.left": (-0.15, -0.35), "zoom.right": (0.15, -0.35)}
    tops = {"zoom.left": (-4.5, -2.4), "zoom.right": (4.5, -2.4)}
    for key, (x, y) in corners.items():
        assert ends(recording, 1, 0.0)[key] == (x, y, x, y), "they start with no length"
        assert ends(recording, 1, 1.0)[key] == pytest.approx((x, y, *tops[key]))
        half = ends(recording, 1, 0.5)[key]
        assert half[2:] == pytest.approx(((x + tops[key][0]) / 2, (y - 2.4) / 2))
        assert ends(recording, 10, 0.0)[key] == pytest.approx(ends(recording, 9, 1.0)[key])
        assert ends(recording, 10, 1.0)[key] == pytest.approx((x + 0.4, y, *tops[key]))
        for step in (2, 7, 12):
            assert ends(recording, step, 0.0) == ends(recording, step, 1.0)


def test_zoom_lines_slide_to_another_row_of_squares() -> None:
    recording = attention((30, 1))
    for step in range(2, len(recording.steps)):
        now, before = ends(recording, step, 0.0), ends(recording, step - 1, 1.0)
        assert all(np.allclose(now[key], before[key]) for key in now), recording.steps[step].label


# -- any recording -----------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(performances(12), st.floats(0, 1))
def test_any_performance_can_be_drawn(performance: Performance, t: float) -> None:
    recording = performance.recording
    for step in range(len(recording.steps)):
        shapes = by_id(scene(recording, step, t))
        assert list(shapes) == [s.id for s in scene(recording, step, 1.0).shapes]
        assert scene(recording, step, t) == scene(recording, step, t)
        texts = [s.text for s in shapes.values() if isinstance(s, Text)]
        assert all(c.isprintable() or c == "\n" or ord(c) > 126 for text in texts for c in text)


def test_fills_of_the_palette() -> None:
    assert [fill_of(HUES["S"], level, 9) for level in (1, 2, 3)] == [DARK_S, LIGHT_S, DARK_S]
    assert fill_of(HUES["O"], 7, 3) == HUES["O"].dark, "more updates than counted stay dark"
