"""Plain shapes: what a scene is made of. Compared as data in tests; matplotlib alone turns them into a picture."""

from __future__ import annotations

from dataclasses import dataclass

from flashviz.view.palette import OUTLINE, TEXT

EDGE_WIDTH, LINE_WIDTH = 1.1, 0.9


@dataclass(frozen=True, slots=True)
class Shape:
    """What all shapes have: an id, where they are now (an offset from their place), and the part of the step
    (``start`` … ``end``) in which they move or grow. ``under`` marks what the end of the step covers."""

    id: str
    dx: float = 0.0
    dy: float = 0.0
    start: float = 0.0
    end: float = 0.0
    under: bool = False


@dataclass(frozen=True, slots=True)
class Rect(Shape):
    """A rectangle from its lower-left corner; ``grow`` is the part of its height drawn, from the bottom."""

    x: float = 0.0
    y: float = 0.0
    w: float = 0.0
    h: float = 0.0
    fill: str | None = None
    stroke: str | None = None
    width: float = EDGE_WIDTH
    hatched: bool = False
    lines: tuple[int, int] | None = None
    grow: float = 1.0


@dataclass(frozen=True, slots=True)
class Line(Shape):
    """A line; ``grow`` is the part of it drawn, from (x1, y1), which ``dx``, ``dy`` slide while (x2, y2) stays."""

    x1: float = 0.0
    y1: float = 0.0
    x2: float = 0.0
    y2: float = 0.0
    stroke: str = OUTLINE
    width: float = LINE_WIDTH
    grow: float = 1.0


@dataclass(frozen=True, slots=True)
class Text(Shape):
    """A text centred at (x, y), ``size`` in points."""

    x: float = 0.0
    y: float = 0.0
    text: str = ""
    size: float = 12.0
    fill: str = TEXT


@dataclass(frozen=True, slots=True)
class Hover:
    """A place that tells more when pointed at: its slot's name, size and numbers."""

    id: str
    x: float
    y: float
    w: float
    h: float
    text: str


@dataclass(frozen=True)
class Scene:
    """The shapes of one moment, back to front, and the places that can be pointed at."""

    shapes: tuple[Shape, ...]
    hovers: tuple[Hover, ...]
    caption: str
