"""scene(recording, step, t): plain shapes, the only source of what the picture shows.

``t`` runs from 0, the step's start, to 1, its end. Shapes come back to front, with ids that are the same at every t;
what differs between t = 0 and t = 1 (an offset, a fill that has grown) is the tween.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from flashviz.events import Step
from flashviz.recording import Content, Recording, as_recording
from flashviz.slots import Slot
from flashviz.view.facts import layout_for as layout_for
from flashviz.view.facts import levels_of as levels_of
from flashviz.view.facts import others_of as others_of
from flashviz.view.layers import Layer, layers_of, masked_cells
from flashviz.view.layout import SQUARE, Box
from flashviz.view.numbers import hover_text, short
from flashviz.view.palette import GROUND, HATCH, OUTLINE, STALE, TEXT, Hue, fill_of, hue_of, text_on
from flashviz.view.shapes import LINE_WIDTH, Hover, Line, Rect, Scene, Shape, Text
from flashviz.view.text import UNIT, clean, fit, printable, shorten, wrap
from flashviz.view.tween import smoothstep, window

CAPTION_Y, CAPTION_SIZE, CAPTION_WIDTH = -5.6, 12.0, 8.0
RING, RING_WIDTH = 0.06, 1.5
LEAST_NUMBER = 8.0
"""Numbers in a box are at least this many points high, or left out."""


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


class _Painter:
    def __init__(self, recording: Recording, number: int, step: Step, t: float) -> None:
        self.recording, self.number, self.step, self.t = recording, number, step, t
        self.layout = layout_for(recording, step.block, step.launch)
        self.levels = levels_of(recording)
        self.others = others_of(recording)
        self.shapes: list[Shape] = []
        self.hovers: list[Hover] = []

    def paint(self) -> Scene:
        step = self.step
        self.grid()
        for drawn_map in self.layout.maps:
            self.shapes += drawn_map.shapes(self.recording, self.number, step)
        drawn = [s for s in self.recording.slots if s.name in self.layout.boxes]
        hbm = [s for s in drawn if s.shared_by_grid]
        chip = [s for s in drawn if not s.shared_by_grid] if step.block is not None else []
        slots = [(s, layers_of(self.recording, self.layout, s, step)) for s in (*hbm, *chip)]
        for slot in chip:
            self.outline(slot)
        for slot, layers in slots:
            for n, layer in enumerate(layers[:-1]):
                self.content(slot, layer, f"{slot.name}.{n}", under=True, written=not layers[n + 1].fills)
        for slot, layers in slots:
            if layers:
                self.content(slot, layers[-1], slot.name)
        for slot, layers in slots:
            if any(layer.fills and not layer.lands for layer in layers):
                self.ring(slot)
        for label in self.layout.labels:
            self.shapes.append(
                Text(f"label.{label.text}.{label.x}.{label.y}", x=label.x, y=label.y, text=label.text, size=label.size)
            )
        for slot in chip:
            box = self.layout.boxes[slot.name]
            y = box.y - box.h / 2 - box.drop
            self.shapes.append(Text(f"{slot.name}.caption", x=box.x, y=y, text=box.caption, size=box.caption_size))
        caption = wrap(printable(step.caption), CAPTION_SIZE, CAPTION_WIDTH)
        self.shapes.append(Text("caption", x=0, y=CAPTION_Y, text=caption, size=CAPTION_SIZE))
        for slot, layers in slots:
            self.hover(slot, layers)
        return Scene(tuple(self.shapes), tuple(self.hovers), clean(step.caption))

    # -- the grid of blocks and the zoom lines -----------------------------------------------------------------

    def grid(self) -> None:
        layout, step = self.layout, self.step
        shown = self.square(self.number)
        for n, (x, y) in enumerate(layout.squares):
            fill = OUTLINE if n == shown else GROUND
            square = Rect(f"square{n}", x=x, y=y, w=SQUARE, h=SQUARE, fill=fill, stroke=OUTLINE, width=LINE_WIDTH)
            self.shapes.append(square)
            if n == layout.rest:
                dots = Text(
                    f"square{n}.rest", x=x + SQUARE / 2, y=y + SQUARE / 2, text="…", size=10, fill=text_on(fill)
                )
                self.shapes.append(dots)
        if layout.zoom is None or shown is None or step.block is None:
            return
        before = self.square(self.number - 1) if self.number else None
        x, y = layout.squares[shown]
        from_x, from_y = layout.squares[shown if before is None else before]
        left, right, top = layout.zoom
        part = window(self.t, 0, 1)
        rest = 1 - smoothstep(part)
        moving: dict[str, Any] = {"dx": (from_x - x) * rest, "dy": (from_y - y) * rest}
        moving |= {"end": 0.0 if before == shown else 1.0, "grow": part if before is None else 1.0}
        for name, x1, x2 in (("left", x, left), ("right", x + SQUARE, right)):
            self.shapes.append(Line(f"zoom.{name}", x1=x1, y1=y, x2=x2, y2=top, **moving))

    def square(self, number: int) -> int | None:
        step = self.recording.steps[number]
        return None if step.block is None else self.layout.square.get((step.launch, step.block))

    # -- slots -------------------------------------------------------------------------------------------------

    def outline(self, slot: Slot) -> None:
        box = self.layout.boxes[slot.name]
        if box.hidden:
            return
        x, y = box.x - box.w / 2, box.y - box.h / 2
        self.shapes.append(
            Rect(f"{slot.name}.box", x=x, y=y, w=box.w, h=box.h, fill=GROUND, stroke=OUTLINE, width=LINE_WIDTH)
        )

    def hue(self, tensor: str) -> Hue:
        """The hue of a tensor: the layout's own, or that of its name."""
        return self.layout.hues.get(tensor) or hue_of(tensor, self.others)

    def content(self, slot: Slot, layer: Layer, name: str, under: bool = False, written: bool = True) -> None:
        box, content = self.layout.boxes[slot.name], layer.content
        if box.hidden:
            return
        tensor = content.tensor or slot.tensor
        hue = self.layout.hues.get(slot.name) or self.hue(tensor)
        fill = STALE if content.stale else fill_of(hue, content.level, self.levels.get(tensor, 1))
        if layer.arriving or (content.level == 0 and not content.stale):
            fill = GROUND
        if box.cells is not None:
            self.cells(slot, box, layer, fill, hue, name, under)
            return
        x, top = box.x - box.w / 2, box.y + box.h / 2
        part = _fraction(content.shape, slot.shape, 0)
        width, height = (box.w * part, box.h) if box.across else (box.w, box.h * part)
        y = top - height
        moves = self.flight(layer, x + width / 2, y + height / 2, under)
        at: dict[str, Any] = {"x": x, "y": y, "w": width, "h": height}
        grows = self.growth(layer, under) if layer.fills else moves
        self.shapes.append(Rect(f"{name}.fill", **grows, **at, fill=fill, hatched=layer.arriving))
        if part < 1:
            rest: dict[str, Any] = {"x": x, "y": top - box.h, "w": box.w, "h": box.h - height}
            if box.across:
                rest = {"x": x + width, "y": y, "w": box.w - width, "h": height}
            self.shapes.append(Rect(f"{name}.rest", **grows, **rest, fill=GROUND, stroke=HATCH, hatched=True))
        self.shapes.append(Rect(f"{name}.edge", **moves, **at, stroke=hue.outline))
        numbers = numbers_in(box, slot, content)
        label = clean(content.label)
        if label:
            inside = height * UNIT * 0.72 >= min(box.text, 8.0)
            size = fit(label, box.text, width, height if inside else box.h)
            middle = y + height * (0.7 if numbers else 0.5) if inside else box.y
            where: dict[str, Any] = {"x": x + width / 2, "y": middle}
            ink = text_on(fill if inside else GROUND)
            self.shapes.append(
                Text(f"{name}.label", **moves, **where, text=shorten(label, size, width), size=size, fill=ink)
            )
        for n, (text, place, size) in enumerate(numbers if written else ()):
            where = {"x": place, "y": y + height * (0.3 if label else 0.5)}
            self.shapes.append(Text(f"{name}.number{n}", **moves, **where, text=text, size=size, fill=text_on(fill)))

    def flight(self, layer: Layer, x: float, y: float, under: bool) -> dict[str, Any]:
        """Where content whose centre lands at (x, y) is now: a copy starts at its source's centre."""
        if layer.source is None:
            return {"under": under}
        left = 1 - smoothstep(window(self.t, layer.start, layer.end))
        dx, dy = (layer.source.x - x) * left, (layer.source.y - y) * left
        return {"dx": dx, "dy": dy, "start": layer.start, "end": layer.end, "under": under}

    def growth(self, layer: Layer, under: bool) -> dict[str, Any]:
        """How much of a content that is computed in place is there now."""
        grow = window(self.t, layer.start, layer.end)
        return {"grow": grow, "start": layer.start, "end": layer.end, "under": under}

    def cells(self, slot: Slot, box: Box, layer: Layer, fill: str, hue: Hue, name: str, under: bool) -> None:
        """Scores: one rectangle a cell where they fill one by one, else one for all; masked cells are hatched."""
        rows, columns = box.cells or (1, 1)
        x, y, w, h = box.x - box.w / 2, box.y - box.h / 2, box.w / columns, box.h / rows
        real_rows = math.ceil(rows * _fraction(layer.content.shape, slot.shape, 0))
        real_columns = math.ceil(columns * _fraction(layer.content.shape, slot.shape, 1))
        top = box.y + box.h / 2
        moves = self.flight(layer, box.x, box.y, under)
        grows = self.growth(layer, under) if layer.fills else moves
        masked = masked_cells(
            self.recording,
            self.recording.key(slot.name, self.step.launch, self.step.block),
            layer.content,
            (rows, columns),
            slot.shape,
        )
        if layer.cells:
            count, n, length = real_rows * real_columns, 0, layer.end - layer.start
            for r in range(real_rows):
                for c in range(real_columns):
                    start, end = layer.start + length * n / count, layer.start + length * (n + 1) / count
                    n += 1
                    at: dict[str, Any] = {"x": x + c * w, "y": top - (r + 1) * h, "w": w, "h": h, "under": under}
                    grow = window(self.t, start, end)
                    hidden = (r, c) in masked
                    look: dict[str, Any] = {"fill": GROUND if hidden else fill, "hatched": hidden}
                    self.shapes.append(Rect(f"{name}.{r}.{c}", start=start, end=end, **at, **look, grow=grow))
        else:
            at = {"x": x, "y": top - real_rows * h, "w": real_columns * w, "h": real_rows * h}
            self.shapes.append(Rect(f"{name}.fill", **grows, **at, fill=fill))
            for r, c in sorted(masked):
                at = {"x": x + c * w, "y": top - (r + 1) * h, "w": w, "h": h}
                self.shapes.append(Rect(f"{name}.masked.{r}.{c}", **grows, **at, fill=GROUND, hatched=True))
        if real_columns < columns:
            rest: dict[str, Any] = {"x": x + real_columns * w, "y": y, "w": (columns - real_columns) * w, "h": box.h}
            self.shapes.append(Rect(f"{name}.masked", **grows, **rest, fill=GROUND, hatched=True))
        if real_rows < rows:
            rest = {"x": x, "y": y, "w": real_columns * w, "h": (rows - real_rows) * h}
            self.shapes.append(Rect(f"{name}.past", **grows, **rest, fill=GROUND, hatched=True))
        edges: dict[str, Any] = {"x": x, "y": y, "w": box.w, "h": box.h}
        self.shapes.append(Rect(f"{name}.edge", **moves, **edges, stroke=hue.outline, lines=(rows, columns)))

    def ring(self, slot: Slot) -> None:
        box = self.layout.boxes[slot.name]
        if box.hidden:
            return
        x, y = box.x - box.w / 2 - RING, box.y - box.h / 2 - RING
        w, h = box.w + 2 * RING, box.h + 2 * RING
        self.shapes.append(Rect(f"{slot.name}.ring", x=x, y=y, w=w, h=h, stroke=TEXT, width=RING_WIDTH))

    def hover(self, slot: Slot, layers: list[Layer]) -> None:
        box = self.layout.boxes[slot.name]
        if not box.hidden:
            x, y = box.x - box.w / 2, box.y - box.h / 2
            there = [layer.content for layer in layers if not layer.arriving]
            text = _hover_text(slot, there[-1] if there else None)
            if layers and layers[-1].arriving:
                text += f"\n{printable(clean(layers[-1].content.label))} is on its way, and not waited for yet"
            self.hovers.append(Hover(f"{slot.name}.hover", x, y, box.w, box.h, text))


def numbers_in(box: Box, slot: Slot, content: Content) -> list[tuple[str, float, float]]:
    """The numbers that are written in a box, each with its x and size: none where they are too many or do not fit."""
    if content.values is None or len(content.shape) > 1 or not 0 < math.prod(content.shape) <= box.numbers:
        return []
    places = max(math.prod(slot.shape), 1)
    width = box.w / places
    for digits in (4, 3, 2) if places == 1 else (3, 2):
        if digits > box.digits:
            continue
        texts = [short(x, digits) for x in content.values.array.ravel()]
        size = min(fit(text, box.text, width, box.h) for text in texts)
        if size >= LEAST_NUMBER:
            return [(text, box.x - box.w / 2 + width * (n + 0.5), size) for n, text in enumerate(texts)]
    return []


def _fraction(shape: tuple[int, ...], of: tuple[int, ...], axis: int) -> float:
    """Which part of a slot a tile covers along an axis."""
    return min(shape[axis] / of[axis], 1.0) if len(shape) > axis < len(of) and of[axis] else 1.0


@lru_cache(maxsize=4096)
def _hover_text(slot: Slot, content: Content | None) -> str:
    return printable(hover_text(slot, content))
