"""Shapes → matplotlib artists. The only place that draws; ``Figure()`` without pyplot, artists with gids."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.text import Text as TextArtist

from flashviz.view.figure import Figure
from flashviz.view.layout import BOTTOM, LEFT, RIGHT, TOP
from flashviz.view.palette import GROUND, HATCH
from flashviz.view.shapes import Line, Rect, Scene, Shape, Text
from flashviz.view.text import UNIT as UNIT

WIDTH, HEIGHT = (RIGHT - LEFT) * UNIT, (TOP - BOTTOM) * UNIT
FONT = ["DejaVu Sans", "sans-serif"]


def blank(dpi: float = 72.0) -> tuple[Figure, Axes]:
    """An empty canvas in diagram units."""
    figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), dpi=dpi, facecolor=GROUND)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(LEFT, RIGHT)
    axes.set_ylim(BOTTOM, TOP)
    return figure, axes


Points = tuple[list[tuple[float, float]], list[Any]]


def rect_path(rect: Rect) -> Path:
    """Outline of a rectangle, with the lines between its cells."""
    return Path(*rect_points(rect))


def rect_points(rect: Rect) -> Points:
    """Vertices and codes of :func:`rect_path`."""
    x, y, w, h = rect.x + rect.dx, rect.y + rect.dy, rect.w, rect.h * rect.grow
    points = [(x, y), (x + w, y), (x + w, y + h), (x, y + h), (x, y)]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    rows, columns = rect.lines or (1, 1)
    for r in range(1, rows):
        points += [(x, y + h * r / rows), (x + w, y + h * r / rows)]
        codes += [Path.MOVETO, Path.LINETO]
    for c in range(1, columns):
        points += [(x + w * c / columns, y), (x + w * c / columns, y + h)]
        codes += [Path.MOVETO, Path.LINETO]
    return points, codes


def hatch_points(rect: Rect, spacing: float = 0.15) -> Points:
    """Diagonal lines inside a rectangle, clipped by arithmetic: the same in every renderer. They grow with it."""
    x, y = rect.x + rect.dx, rect.y + rect.dy
    points, codes = [], []
    for offset in np.arange(spacing, rect.w + rect.h, spacing):
        for a in (max(0.0, offset - rect.h), min(rect.w, offset)):
            points.append((x + a, y + (offset - a) * rect.grow))
        codes += [Path.MOVETO, Path.LINETO]
    return points or [(x, y)], codes or [Path.MOVETO]


def line_ends(line: Line) -> tuple[tuple[float, float], tuple[float, float]]:
    """Both ends of a line as it is now."""
    x1, y1 = line.x1 + line.dx, line.y1 + line.dy
    return (x1, y1), (x1 + (line.x2 - x1) * line.grow, y1 + (line.y2 - y1) * line.grow)


def artists(shape: Shape) -> list[Artist]:
    """The artists of one shape, back to front."""
    if isinstance(shape, Rect):
        return _rect(shape)
    if isinstance(shape, Line):
        (x1, y1), (x2, y2) = line_ends(shape)
        return [Line2D([x1, x2], [y1, y2], color=shape.stroke, linewidth=shape.width, solid_capstyle="butt")]
    if isinstance(shape, Text):
        x, y = shape.x + shape.dx, shape.y + shape.dy
        return [
            TextArtist(
                x, y, shape.text, color=shape.fill, fontsize=shape.size, family=FONT,
                horizontalalignment="center", verticalalignment="center", parse_math=False,
            )
        ]  # fmt: skip
    raise TypeError(f"cannot draw a {type(shape).__name__}")


def _rect(rect: Rect) -> list[Artist]:
    out: list[Artist] = []
    if rect.grow > 0 and (rect.fill or rect.stroke):
        face, edge = rect.fill or "none", rect.stroke or "none"
        width = rect.width if rect.stroke else 0.0
        out.append(PathPatch(rect_path(rect), facecolor=face, edgecolor=edge, linewidth=width, joinstyle="miter"))
    if rect.hatched and rect.grow > 0:
        out.append(PathPatch(Path(*hatch_points(rect)), facecolor="none", edgecolor=HATCH, linewidth=0.7))
    return out


def draw(axes: Axes, shapes: Iterable[Shape]) -> None:
    """Add all shapes to axes, back to front, each with its id as gid."""
    for z, shape in enumerate(shapes):
        for artist in artists(shape):
            artist.set_gid(shape.id)
            artist.set_zorder(z + 1)
            axes.add_artist(artist)


def frame_figure(scene: Scene, dpi: float = 90.0) -> Figure:
    """One frame as a matplotlib figure."""
    figure, axes = blank(dpi)
    draw(axes, scene.shapes)
    return figure
