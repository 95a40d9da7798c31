"""Many shapes as one artist: the paths of boxes, lines and letters in order, drawn by one collection.

A sheet of 19 frames or a picture of a movie is some hundred shapes; as artists of their own they cost ten times more.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.font_manager import FontProperties
from matplotlib.path import Path
from matplotlib.textpath import text_to_path

from flashviz.view.draw import FONT, hatch_points, line_ends, rect_points
from flashviz.view.palette import HATCH, TEXT
from flashviz.view.shapes import Line, Rect, Shape, Text
from flashviz.view.text import UNIT


class Paths:
    """Collects paths and draws them, in the order in which they were added.

    Args:
        scale: factor of line widths and of text sizes (1 where a unit of the canvas is 64 points).
    """

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self.paths: list[Path] = []
        self.faces: list[str] = []
        self.edges: list[str] = []
        self.widths: list[float] = []

    def __len__(self) -> int:
        return len(self.paths)

    def shape(self, shape: Shape, x: float = 0.0, y: float = 0.0) -> None:
        """Add a shape as it is now, its origin at (x, y)."""
        if isinstance(shape, Rect):
            if shape.grow > 0 and (shape.fill or shape.stroke):
                self.path(*rect_points(shape), shape.fill, shape.stroke, shape.width if shape.stroke else 0, x, y)
            if shape.grow > 0 and shape.hatched:
                self.path(*hatch_points(shape), None, HATCH, 0.7, x, y)
        elif isinstance(shape, Line):
            self.path(list(line_ends(shape)), None, None, shape.stroke, shape.width, x, y)
        elif isinstance(shape, Text):
            self.text(shape.x + shape.dx + x, shape.y + shape.dy + y, shape.text, shape.size, shape.fill)
        else:
            raise TypeError(f"cannot draw a {type(shape).__name__}")

    def path(
        self,
        vertices: Any,
        codes: Any,
        face: str | None,
        edge: str | None,
        width: float,
        x: float = 0.0,
        y: float = 0.0,
    ) -> None:
        """Add a path, its origin at (x, y); ``width`` in points."""
        self.paths.append(Path(np.asarray(vertices) + np.array([x, y]), codes))
        self.faces.append(face or "none")
        self.edges.append(edge or "none")
        self.widths.append(width * self.scale)

    def text(self, x: float, y: float, text: str, size: float, color: str = TEXT) -> None:
        """Add a text of one or more lines centred at (x, y)."""
        lines = text.split("\n")
        for n, line in enumerate(lines):
            path, middle = text_path(line)
            if path is not None:
                down = (n - (len(lines) - 1) / 2) * size * 1.2 / UNIT
                vertices = (path.vertices - np.array([middle, 0.36])) * (size / UNIT)
                self.path(vertices, path.codes, color, None, 0, x, y - down)

    def draw(self, axes: Axes) -> PathCollection:
        """Add everything to axes as one collection."""
        made = PathCollection(self.paths, facecolors=self.faces, edgecolors=self.edges, linewidths=self.widths)
        made.set_transform(axes.transData)
        made.set_joinstyle("miter")
        axes.add_artist(made)
        return made


def add_all(paths: Paths, shapes: Iterable[Shape], x: float = 0.0, y: float = 0.0) -> None:
    """Add shapes back to front."""
    for shape in shapes:
        paths.shape(shape, x, y)


@lru_cache(maxsize=4096)
def text_path(text: str) -> tuple[Path | None, float]:
    """A line of text as one path of size 1, and its middle: made once however many frames show it.

    None where nothing of it is visible.
    """
    vertices, codes = text_to_path.get_text_path(FontProperties(family=FONT), text)
    if not len(vertices):
        return None, 0.0
    vertices = np.asarray(vertices) / text_to_path.FONT_SCALE
    middle = float(Path(vertices, codes).get_extents().x1) / 2
    # Agg snaps a path of right angles alone to whole pixels, which deforms an L: a slanted line of no area prevents it.
    slant = [(middle, 0.3), (middle + 0.01, 0.31)]
    codes = np.concatenate([codes, [Path.MOVETO, Path.LINETO]])
    return Path(np.concatenate([vertices, slant]), codes), middle
