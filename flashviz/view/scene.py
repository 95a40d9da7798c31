"""scene(recording, step, t): plain shapes, the only source of what the picture shows.

``t`` runs from 0, the step's start, to 1, its end. Shapes come back to front, with ids that are the same at every t;
what differs between t = 0 and t = 1 (an offset, a fill that has grown) is the tween.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from flashviz.events import Move, Step
from flashviz.recording import Content, Key, Recording, as_recording
from flashviz.slots import Block, Slot
from flashviz.view.layout import SQUARE, Box, Layout
from flashviz.view.layouts import layout_of
from flashviz.view.numbers import hover_text
from flashviz.view.palette import GROUND, HATCH, HUES, OUTLINE, STALE, TEXT, Hue, fill_of, hue_of
from flashviz.view.shapes import LINE_WIDTH, Hover, Line, Rect, Scene, Shape, Text
from flashviz.view.tween import smoothstep, window

CAPTION_Y, CAPTION_SIZE, CAPTION_LETTERS = -5.6, 12.0, 76
RING, RING_WIDTH = 0.06, 1.5


@dataclass(frozen=True, slots=True)
class _Layer:
    """One content of a slot within a step: from where it flies, how it fills, and when."""

    content: Content
    source: Box | None
    start: float
    end: float
    fills: bool
    cells: bool


def scene(run: Any, step: int, t: float = 1.0) -> Scene:
    """What the picture shows at time ``t`` (0 … 1) of a step of a run or recording.

    Raises:
        IndexError: there is no such step; ValueError: t is outside 0 … 1.
    """
    recording = as_recording(run)
    at = recording.check_step(step)
    if not 0 <= t <= 1:
        raise ValueError(f"t={t}: a step runs from 0 to 1")
    number = step % len(recording.steps)
    return _Painter(recording, number, at, float(t)).paint()


@lru_cache(maxsize=64)
def _layout(key: _ByIdentity, batch: int, head: int, launch: int) -> Layout:
    return layout_of(key.recording, Block(batch, head, 0), launch)


class _ByIdentity:
    """A recording as a cache key: recordings are frozen, so the same object has the same layout."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    def __hash__(self) -> int:
        return id(self.recording)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and other.recording is self.recording


def layout_for(recording: Recording, block: Block | None, launch: int = 0) -> Layout:
    """The layout in which a block of a launch is shown, computed once for each head and launch."""
    at = block or Block()
    return _layout(_ByIdentity(recording), at.batch, at.head, max(launch, 0))


class _Painter:
    def __init__(self, recording: Recording, number: int, step: Step, t: float) -> None:
        self.recording, self.number, self.step, self.t = recording, number, step, t
        self.layout = layout_for(recording, step.block or _first_block(recording), step.launch)
        self.levels = levels_of(recording)
        self.others = others_of(recording)
        self.shapes: list[Shape] = []
        self.hovers: list[Hover] = []

    def paint(self) -> Scene:
        step = self.step
        self.grid()
        drawn = [s for s in self.recording.slots if s.name in self.layout.boxes]
        hbm = [s for s in drawn if s.shared_by_grid]
        chip = [s for s in drawn if not s.shared_by_grid] if step.block is not None else []
        slots = [(s, self.layers(s)) for s in (*hbm, *chip)]
        for slot in chip:
            self.outline(slot)
        for slot, layers in slots:
            for n, layer in enumerate(layers[:-1]):
                self.content(slot, layer, f"{slot.name}.{n}", under=True)
        for slot, layers in slots:
            if layers:
                self.content(slot, layers[-1], slot.name)
        for slot, layers in slots:
            if any(layer.fills for layer in layers):
                self.ring(slot)
        for label in self.layout.labels:
            self.shapes.append(
                Text(f"label.{label.text}.{label.x}", x=label.x, y=label.y, text=label.text, size=label.size)
            )
        for slot in chip:
            box = self.layout.boxes[slot.name]
            y = box.y - box.h / 2 - 0.3
            size = 12.0 if box.w >= 0.2 else 10.0
            self.shapes.append(Text(f"{slot.name}.caption", x=box.x, y=y, text=box.caption, size=size))
        caption = textwrap.fill(step.caption, CAPTION_LETTERS)
        self.shapes.append(Text("caption", x=0, y=CAPTION_Y, text=caption, size=CAPTION_SIZE))
        for slot, layers in slots:
            self.hover(slot, layers[-1].content if layers else None)
        return Scene(tuple(self.shapes), tuple(self.hovers), step.caption)

    # -- the grid of blocks and the zoom lines -----------------------------------------------------------------

    def grid(self) -> None:
        layout, step = self.layout, self.step
        shown = self.square(self.number)
        for n, (x, y) in enumerate(layout.squares):
            fill = OUTLINE if n == shown else GROUND
            square = Rect(f"square{n}", x=x, y=y, w=SQUARE, h=SQUARE, fill=fill, stroke=OUTLINE, width=LINE_WIDTH)
            self.shapes.append(square)
        if layout.zoom is None or shown is None or step.block is None:
            return
        before = self.square(self.number - 1) if self.number else None
        slide = layout.squares[before][0] - layout.squares[shown][0] if before is not None else 0.0
        x, y = layout.squares[shown]
        left, right, top = layout.zoom
        part = window(self.t, 0, 1)
        grow = part if before is None else 1.0
        for name, x1, x2 in (("left", x, left), ("right", x + SQUARE, right)):
            dx = slide * (1 - smoothstep(part))
            end = 1.0 if before != shown else 0.0
            self.shapes.append(Line(f"zoom.{name}", dx=dx, end=end, x1=x1, y1=y, x2=x2, y2=top, grow=grow))

    def square(self, number: int) -> int | None:
        step = self.recording.steps[number]
        return None if step.block is None else self.layout.square.get((step.launch, step.block))

    # -- slots -------------------------------------------------------------------------------------------------

    def layers(self, slot: Slot) -> list[_Layer]:
        """What a slot held before the step, then each content that the step gave it and that looks different."""
        step, recording = self.step, self.recording
        key = recording.key(slot.name, step.launch, step.block)
        before = recording.content_before(key, step.first)
        out = [_Layer(before, None, 0, 0, False, False)] if before else []
        moved: tuple[Content, Box | None] | None = None
        changed: Content | None = None
        cells = False
        for n, content in contents_within(recording, key, step):
            event = recording.events[n]
            if isinstance(event, Move):
                source = next(p.src for p in event.parts if p.dst == slot.name)
                moved, changed = (content, self.layout.boxes.get(source)), None
            elif getattr(event, "role", "") == "input":
                out = [_Layer(content, None, 0, 0, False, False)]
            else:
                cells = cells or bool(getattr(event, "cells", False))
                changed = content
        if changed is not None and not self.looks_new(slot, before, moved, changed):
            if moved is None and out:
                out = [_Layer(changed, None, 0, 0, False, False)]
            changed = None
        half = 0.5 if moved and changed else 1.0
        if moved:
            out.append(_Layer(moved[0], moved[1], 0, half, False, False))
        if changed:
            start = 0.5 if moved else 0.0
            hbm_init = slot.shared_by_grid and changed.level == 0
            out.append(_Layer(changed, None, start, 1.0, not hbm_init, cells and not changed.stale))
        return out

    def looks_new(self, slot: Slot, before: Content | None, moved: Any, changed: Content) -> bool:
        old = moved[0] if moved else before
        return old is None or (old.level, old.stale) != (changed.level, changed.stale) or old.shape != changed.shape

    def outline(self, slot: Slot) -> None:
        box = self.layout.boxes[slot.name]
        x, y = box.x - box.w / 2, box.y - box.h / 2
        self.shapes.append(
            Rect(f"{slot.name}.box", x=x, y=y, w=box.w, h=box.h, fill=GROUND, stroke=OUTLINE, width=LINE_WIDTH)
        )

    def content(self, slot: Slot, layer: _Layer, name: str, under: bool = False) -> None:
        box, content = self.layout.boxes[slot.name], layer.content
        if box.hidden:
            return
        hue = hue_of(content.tensor or slot.tensor, self.others)
        fill = STALE if content.stale else fill_of(hue, content.level, self.levels.get(hue_key(content, slot), 1))
        if content.level == 0 and not content.stale:
            fill = GROUND
        part = window(self.t, layer.start, layer.end)
        source = layer.source
        dx = (source.x - box.x) * (1 - smoothstep(part)) if source else 0.0
        dy = (source.y - box.y) * (1 - smoothstep(part)) if source else 0.0
        common: dict[str, Any] = {"dx": dx, "dy": dy, "start": layer.start, "end": layer.end, "under": under}
        if box.cells is not None:
            self.cells(slot, box, layer, fill, hue, name, under)
            return
        rows = _fraction(content.shape, slot.shape, 0)
        x, top = box.x - box.w / 2, box.y + box.h / 2
        height = box.h * rows
        y = top - height
        grow = part if layer.fills else 1.0
        self.shapes.append(Rect(f"{name}.fill", **common, x=x, y=y, w=box.w, h=height, fill=fill, grow=grow))
        still = {**common, "start": 0.0, "end": 0.0} if layer.fills else common
        if rows < 1:
            rest = Rect(
                f"{name}.rest", **still, x=x, y=top - box.h, w=box.w, h=box.h - height, hatched=True, stroke=HATCH
            )
            self.shapes.append(rest)
        self.shapes.append(Rect(f"{name}.edge", **still, x=x, y=y, w=box.w, h=height, stroke=hue.outline))
        if content.label:
            size = min(box.text, 14.0)
            self.shapes.append(Text(f"{name}.label", **still, x=box.x, y=y + height / 2, text=content.label, size=size))

    def cells(self, slot: Slot, box: Box, layer: _Layer, fill: str, hue: Hue, name: str, under: bool) -> None:
        """Scores: one rectangle a cell where they fill one by one, else one for all; masked cells are hatched."""
        rows, columns = box.cells or (1, 1)
        x, y, w, h = box.x - box.w / 2, box.y - box.h / 2, box.w / columns, box.h / rows
        real_rows = -(-layer.content.shape[0] * rows // slot.shape[0])
        real_columns = -(-layer.content.shape[1] * columns // slot.shape[1])
        top = box.y + box.h / 2
        if layer.cells:
            count, n = real_rows * real_columns, 0
            for r in range(real_rows):
                for c in range(real_columns):
                    start, end = n / count, (n + 1) / count
                    n += 1
                    grow = window(self.t, start, end)
                    at: dict[str, Any] = {"x": x + c * w, "y": top - (r + 1) * h, "w": w, "h": h}
                    cell = Rect(f"{name}.{r}.{c}", start=start, end=end, under=under, **at, fill=fill, grow=grow)
                    self.shapes.append(cell)
        else:
            whole: dict[str, Any] = {"x": x, "y": top - real_rows * h, "w": real_columns * w, "h": real_rows * h}
            grow = window(self.t, layer.start, layer.end) if layer.fills else 1.0
            window_: dict[str, Any] = {"start": layer.start, "end": layer.end} if layer.fills else {}
            self.shapes.append(Rect(f"{name}.fill", under=under, **whole, **window_, fill=fill, grow=grow))
        if real_columns < columns:
            rest: dict[str, Any] = {"x": x + real_columns * w, "y": y, "w": (columns - real_columns) * w, "h": box.h}
            self.shapes.append(Rect(f"{name}.masked", under=under, **rest, fill=GROUND, hatched=True))
        if real_rows < rows:
            rest = {"x": x, "y": y, "w": real_columns * w, "h": (rows - real_rows) * h}
            self.shapes.append(Rect(f"{name}.past", under=under, **rest, fill=GROUND, hatched=True))
        edges: dict[str, Any] = {"x": x, "y": y, "w": box.w, "h": box.h}
        self.shapes.append(Rect(f"{name}.edge", under=under, **edges, stroke=hue.outline, lines=(rows, columns)))

    def ring(self, slot: Slot) -> None:
        box = self.layout.boxes[slot.name]
        if box.hidden:
            return
        x, y = box.x - box.w / 2 - RING, box.y - box.h / 2 - RING
        w, h = box.w + 2 * RING, box.h + 2 * RING
        self.shapes.append(Rect(f"{slot.name}.ring", x=x, y=y, w=w, h=h, stroke=TEXT, width=RING_WIDTH))

    def hover(self, slot: Slot, content: Content | None) -> None:
        box = self.layout.boxes[slot.name]
        if not box.hidden:
            x, y = box.x - box.w / 2, box.y - box.h / 2
            self.hovers.append(Hover(f"{slot.name}.hover", x, y, box.w, box.h, hover_text(slot, content)))


def contents_within(recording: Recording, key: Key, step: Step) -> Iterator[tuple[int, Content]]:
    """(event, content) for every content that a step gave a slot, in order."""
    end = step.end
    found = []
    while True:
        content = recording.content_before(key, end)
        if content is None or content.event < step.first:
            break
        found.append((content.event, content))
        end = content.event
    yield from reversed(found)


def hue_key(content: Content, slot: Slot) -> str:
    """The name under which the levels of a content are counted."""
    return content.tensor or slot.tensor


@lru_cache(maxsize=64)
def _levels(key: _ByIdentity) -> dict[str, int]:
    most: dict[str, int] = {}
    for event in key.recording.events:
        level = getattr(event, "level", None)
        if level is not None:
            tensor = key.recording.slot(event.slot).tensor  # type: ignore[union-attr]
            most[tensor] = max(most.get(tensor, 1), level)
    return most


def levels_of(recording: Recording) -> dict[str, int]:
    """How many updates each tensor's carry gets at most: its shades run over them."""
    return _levels(_ByIdentity(recording))


@lru_cache(maxsize=64)
def _others(key: _ByIdentity) -> tuple[str, ...]:
    names = dict.fromkeys(s.tensor for s in key.recording.slots)
    return tuple(n for n in names if hue_of(n) is hue_of("") and n not in HUES)


def others_of(recording: Recording) -> tuple[str, ...]:
    """The tensors that are not attention's: they take hues in the order in which they appear."""
    return _others(_ByIdentity(recording))


def _first_block(recording: Recording) -> Block | None:
    return next((s.block for s in recording.steps if s.block is not None), None)


def _fraction(shape: tuple[int, ...], of: tuple[int, ...], axis: int) -> float:
    return shape[axis] / of[axis] if len(shape) > axis and of[axis] else 1.0
