"""Every step on one sheet: a matplotlib figure for paper, slides and places where nothing moves."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

from flashviz.recording import as_recording
from flashviz.view.draw import frame_figure
from flashviz.view.figure import Figure
from flashviz.view.layout import BOTTOM, LEFT, NARROW, RIGHT, TOP
from flashviz.view.palette import GROUND, OUTLINE
from flashviz.view.paths import Paths
from flashviz.view.scene import scene
from flashviz.view.shapes import Rect, Shape, Text
from flashviz.view.text import UNIT, fit, wrap

FRAME_WIDTH = 2.3
"""Inches of one frame."""
GAP = 0.35
CAPTION_SIZES, CAPTION_WIDTH, LARGER = (25.0, 22.0, 20.0, 18.0, 16.0), 9.0, 1.55
"""A frame is a quarter of its size on the screen: texts are drawn larger where there is room for it, labels of narrow
boxes not at all."""
BORDER, NOTE_SIZE, NOTE_HEIGHT = "#e4e4e7", 40.0, 1.0
MOST_FRAMES = 60
"""More steps are thinned out: the sheet says so."""


def frame(run: Any, step: int, t: float = 1.0, *, dpi: float = 90.0) -> Figure:
    """One moment of one step as a matplotlib figure (no pyplot: nothing stays open).

    Args:
        run: a run or a recording.
        step: number of the step; negative ones count from the end.
        t: 0 at the start of its tween, 1 at the end.
        dpi: dots per inch of the figure.
    """
    return frame_figure(scene(run, step, t), dpi)


def storyboard(run: Any, steps: Sequence[int] | range | slice | None = None, *, columns: int | None = None) -> Figure:
    """The end of every step, in reading order, as a matplotlib figure.

    Args:
        run: a run or a recording.
        steps: which steps; all when not given. Past 60 frames, evenly spaced ones are drawn and the sheet says so.
        columns: frames side by side; chosen so that the sheet is a little wider than high when not given.

    >>> import numpy as np, flashviz as fv
    >>> x = np.eye(4, dtype="float32")
    >>> storyboard(fv.flash_attention_2(x, x, x, Br=2, Bc=2, device="numpy"))
    <Figure size 1150x1108.72 with 1 Axes>
    """
    recording = as_recording(run)
    if columns is not None and columns < 1:
        raise ValueError(f"columns={columns}: at least 1")
    everything = range(len(recording.steps))
    chosen = everything if steps is None else everything[steps] if isinstance(steps, slice) else steps
    for number in chosen:
        recording.check_step(number)
    numbers = [number % len(everything) for number in chosen]
    if not numbers:
        raise ValueError("a storyboard needs at least one step")
    total = len(numbers)
    if total > MOST_FRAMES:
        numbers = [numbers[round(k * (total - 1) / (MOST_FRAMES - 1))] for k in range(MOST_FRAMES)]
    across = columns or max(1, min(len(numbers), math.ceil(math.sqrt(len(numbers) * 1.15))))
    down = math.ceil(len(numbers) / across)
    width, height = RIGHT - LEFT + GAP, TOP - BOTTOM + GAP
    scale = FRAME_WIDTH / width
    full = len(numbers) == across * down
    bottom = -down * height - (NOTE_HEIGHT if total > MOST_FRAMES and full else 0)
    figure = Figure(figsize=(across * FRAME_WIDTH, -bottom * scale), dpi=100, facecolor=GROUND)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, across * width)
    axes.set_ylim(bottom, 0)
    sheet = Paths(max(scale * 72 / UNIT, 0.4))
    for place, number in enumerate(numbers):
        x = (place % across) * width - LEFT + GAP / 2
        y = -(place // across) * height - TOP - GAP / 2
        _frame(sheet, scene(recording, number, 1.0).shapes, x, y, number)
    if total > MOST_FRAMES:
        size = min(NOTE_SIZE, NOTE_SIZE * across / 2)
        where = (
            (across * width / 2, bottom + NOTE_HEIGHT / 2) if full else ((across - 0.5) * width, bottom + height / 2)
        )
        sheet.text(*where, f"{MOST_FRAMES} of {total} steps", size)
    sheet.draw(axes)
    return figure


def _frame(sheet: Paths, shapes: Sequence[Shape], x: float, y: float, number: int) -> None:
    border = Rect("", x=LEFT, y=BOTTOM, w=RIGHT - LEFT, h=TOP - BOTTOM, fill=GROUND, stroke=BORDER, width=0.8)
    sheet.shape(border, x, y)
    edges = {s.id.removesuffix(".edge"): s for s in shapes if isinstance(s, Rect) and s.id.endswith(".edge")}
    beside: dict[float, list[float]] = {}
    for shape in shapes:
        if isinstance(shape, Text):
            beside.setdefault(shape.y, []).append(shape.x)
    lowest = min((s.y for s in shapes if isinstance(s, Text) and s.id != "caption"), default=0.0)
    for shape in shapes:
        if shape.under:
            continue
        if not isinstance(shape, Text):
            sheet.shape(shape, x, y)
        elif shape.id == "caption":
            for (
                size
            ) in CAPTION_SIZES:  # below the names of the lowest row of slots, smaller where that leaves little room
                text = wrap(shape.text, size, CAPTION_WIDTH)
                half = 0.6 * size / UNIT * (text.count("\n") + 1)
                above = lowest - 0.3 - half
                if above >= BOTTOM + 0.1 + half:
                    break
            sheet.text(x, y + max(BOTTOM + 0.1 + half, min(BOTTOM + 0.95, above)), text, size)
        elif shape.size <= NARROW and ".number" in shape.id:
            continue
        elif not shape.id.endswith(".label"):
            room = min((abs(shape.x - other) for other in beside[shape.y] if other != shape.x), default=RIGHT - LEFT)
            size = max(shape.size, fit(shape.text, shape.size * LARGER, room))
            sheet.text(shape.x + x, shape.y + y, shape.text, size, shape.fill)
        elif shape.size > NARROW:
            edge = edges[shape.id.removesuffix(".label")]
            size = max(shape.size, fit(shape.text, shape.size * LARGER, edge.w, edge.h))
            sheet.text(shape.x + x, shape.y + y, shape.text, size, shape.fill)
    sheet.text(LEFT + x + 0.5, TOP + y - 0.4, str(number), CAPTION_SIZES[0], OUTLINE)


def png(figure: Figure, dpi: float | None = None) -> bytes:
    """A figure as PNG bytes that depend on nothing but the figure."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=dpi or figure.dpi, metadata={"Software": None})
    return out.getvalue()
