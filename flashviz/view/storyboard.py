"""Every step on one sheet: a matplotlib figure for paper, slides and places where nothing moves."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D

from flashviz.recording import as_recording
from flashviz.view.draw import FONT, UNIT, frame_figure, hatch_path, rect_path
from flashviz.view.layout import BOTTOM, LEFT, NARROW, RIGHT, TOP
from flashviz.view.palette import GROUND, HATCH, OUTLINE, TEXT
from flashviz.view.scene import scene
from flashviz.view.shapes import Line, Rect, Shape, Text

FRAME_WIDTH = 2.3
"""Inches of one frame."""
GAP = 0.35
CAPTION_SIZE, CAPTION_LETTERS, LARGER = 25.0, 34, 1.55
"""A frame is a quarter of its size on the screen: texts are drawn larger, labels of narrow boxes not at all."""
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
    if isinstance(steps, slice):
        numbers: list[int] = list(range(len(recording.steps))[steps])
    else:
        numbers = list(range(len(recording.steps))) if steps is None else list(steps)
    if not numbers:
        raise ValueError("a storyboard needs at least one step")
    total = len(numbers)
    if total > MOST_FRAMES:
        numbers = [numbers[round(k * (total - 1) / (MOST_FRAMES - 1))] for k in range(MOST_FRAMES)]
    across = columns or max(1, min(len(numbers), math.ceil(math.sqrt(len(numbers) * 1.15))))
    if across < 1:
        raise ValueError(f"columns={columns}: at least 1")
    down = math.ceil(len(numbers) / across)
    width, height = RIGHT - LEFT + GAP, TOP - BOTTOM + GAP
    scale = FRAME_WIDTH / width
    figure = Figure(figsize=(across * FRAME_WIDTH, down * height * scale), dpi=100, facecolor=GROUND)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, across * width)
    axes.set_ylim(-down * height, 0)
    sheet = _Sheet(axes, scale * 72 / UNIT)
    for place, number in enumerate(numbers):
        x = (place % across) * width - LEFT + GAP / 2
        y = -(place // across) * height - TOP - GAP / 2
        sheet.frame(scene(recording, number, 1.0).shapes, x, y, number)
    if total > MOST_FRAMES:
        last = ((across - 0.5) * width, -(down - 0.5) * height)
        where = last if len(numbers) < across * down else (across * width / 2, -0.12)
        sheet.text(*where, f"{MOST_FRAMES} of {total} steps", 12)
    sheet.finish()
    return figure


class _Sheet:
    """Collects the paths of many frames, so that thousands of boxes are one artist."""

    def __init__(self, axes: Axes, scale: float) -> None:
        self.axes, self.scale = axes, scale
        self.paths: list[Path] = []
        self.faces: list[str] = []
        self.edges: list[str] = []
        self.widths: list[float] = []
        self.letters: list[Path] = []
        self.colors: list[str] = []

    def frame(self, shapes: Sequence[Shape], x: float, y: float, number: int) -> None:
        move = Affine2D().translate(x, y)
        border = Rect("", x=LEFT, y=BOTTOM, w=RIGHT - LEFT, h=TOP - BOTTOM)
        self.path(move.transform_path(rect_path(border)), GROUND, "#e4e4e7", 0.8)
        for shape in shapes:
            if shape.under:
                continue
            if isinstance(shape, Rect):
                if shape.fill or shape.stroke:
                    width = shape.width if shape.stroke else 0
                    self.path(move.transform_path(rect_path(shape)), shape.fill, shape.stroke, width)
                if shape.hatched:
                    self.path(move.transform_path(hatch_path(shape)), None, HATCH, 0.7)
            elif isinstance(shape, Line):
                path = Path([(shape.x1 + shape.dx, shape.y1), (shape.x2, shape.y2)])
                self.path(move.transform_path(path), None, shape.stroke, shape.width)
            elif isinstance(shape, Text) and shape.id == "caption":
                caption = textwrap.fill(shape.text.replace("\n", " "), CAPTION_LETTERS)
                self.text(x, BOTTOM + y + 0.95, caption, CAPTION_SIZE)
            elif isinstance(shape, Text) and not (shape.size <= NARROW and shape.id.endswith(".label")):
                self.text(shape.x + x, shape.y + y, shape.text, shape.size * LARGER)
        self.text(LEFT + x + 0.5, TOP + y - 0.4, str(number), CAPTION_SIZE, OUTLINE)

    def path(self, path: Path, face: str | None, edge: str | None, width: float) -> None:
        self.paths.append(path)
        self.faces.append(face or "none")
        self.edges.append(edge or "none")
        self.widths.append(width * max(self.scale, 0.4))

    def text(self, x: float, y: float, text: str, size: float, color: str = TEXT) -> None:
        for n, line in enumerate(lines := text.split("\n")):
            path, middle = text_path(line)
            down = (n - (len(lines) - 1) / 2) * size * 1.3 / UNIT
            place = Affine2D().translate(-middle, -0.36).scale(size / UNIT).translate(x, y - down)
            self.letters.append(place.transform_path(path))
            self.colors.append(color)

    def finish(self) -> None:
        boxes = PathCollection(self.paths, facecolors=self.faces, edgecolors=self.edges, linewidths=self.widths)
        letters = PathCollection(self.letters, facecolors=self.colors, edgecolors="none", linewidths=0)
        letters.set_snap(False)
        for collection in (boxes, letters):
            collection.set_transform(self.axes.transData)
            self.axes.add_artist(collection)


@lru_cache(maxsize=4096)
def text_path(text: str) -> tuple[Path, float]:
    """A line of text as one path of height 1, and its middle: drawn once however many frames show it."""
    path = TextPath((0, 0), text or " ", size=1, prop=FontProperties(family=FONT))
    return Path(path.vertices, path.codes), float(path.get_extents().x1) / 2 if text.strip() else 0.0


def png(figure: Figure, dpi: float | None = None) -> bytes:
    """A figure as PNG bytes that depend on nothing but the figure."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=dpi or figure.dpi, metadata={"Software": None})
    return out.getvalue()
