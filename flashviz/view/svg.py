"""Steps as SVG: fragments that matplotlib drew once, assembled for each step, with the tween as CSS on their ids.

Requirements: matplotlib's SVG renderer is the only thing that draws; a shape is drawn once whatever the number of
steps that show it; the same recording gives the same text on every machine; ids are unique to the prefix given;
everything that comes from a recording is escaped.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from html import escape
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import RendererSVG

from flashviz.recording import as_recording
from flashviz.view.draw import HEIGHT, UNIT, WIDTH, artists, blank
from flashviz.view.layout import LEFT, TOP
from flashviz.view.palette import GROUND
from flashviz.view.scene import scene
from flashviz.view.shapes import Hover, Line, Rect, Scene, Shape
from flashviz.view.tween import FLY_CSS

STEP_MS = 900
"""A tween's length at speed 1."""
_RC: dict[str, Any] = {"svg.fonttype": "none", "svg.hashsalt": "flashviz", "path.simplify": False}
_TAG, _ID = re.compile(r"<[^>]*>"), re.compile(r' id="[^"]*"')
_SPACE, _FONT = re.compile(r"\n\s*"), re.compile(r" font-family: [^;]*;")
FAMILY = "'DejaVu Sans','Bitstream Vera Sans',Verdana,Geneva,sans-serif"
"""The font of a whole picture: matplotlib would name some ten families in every text."""


class _Pen:
    """A figure and an SVG renderer that draw one shape at a time."""

    def __init__(self) -> None:
        self.figure, self.axes = blank(72)
        self.axes.apply_aspect()

    def fragment(self, shape: Shape) -> str:
        out = io.StringIO()
        metadata = {"Date": None, "Creator": None}
        # rc_context would copy all 300 settings for each shape: a third of the time.
        settings: Any = matplotlib.rcParams
        before = {key: settings[key] for key in _RC}
        settings.update(_RC)
        try:
            renderer: Any = RendererSVG(WIDTH, HEIGHT, out, image_dpi=72, metadata=metadata)  # type: ignore[no-untyped-call]
            renderer.writer.flush()
            start = out.tell()
            for artist in artists(shape):
                self._draw(artist, renderer)
            renderer.writer.flush()
        finally:
            settings.update(before)
        text = out.getvalue()[start:]
        return _TAG.sub(lambda tag: _FONT.sub("", _ID.sub("", tag[0])), _SPACE.sub("", text)).strip()

    def _draw(self, artist: Any, renderer: Any) -> None:
        """Draw an artist in the canvas's units, without the cost of adding it to axes and removing it again."""
        artist.set_figure(self.figure)
        artist.axes = self.axes
        artist.set_transform(self.axes.transData)
        artist.draw(renderer)


@lru_cache(maxsize=1)
def _pen() -> _Pen:
    return _Pen()


@lru_cache(maxsize=20_000)
def _fragment(shape: Shape) -> str:
    return _pen().fragment(shape)


def fragment(shape: Shape) -> str:
    """The SVG of one shape at the end of its tween, drawn by matplotlib once and remembered."""
    still: dict[str, Any] = {"id": "", "dx": 0.0, "dy": 0.0, "start": 0.0, "end": 0.0, "under": False}
    if isinstance(shape, (Rect, Line)):
        still["grow"] = 1.0
    return _fragment(replace(shape, **still))


def tween_css(shape: Shape, at_start: Shape) -> tuple[str, str] | None:
    """How a shape gets from where it starts to where it ends: (declarations at the start, timing and origin).

    None where it does not move. Both come from the scene: ``at_start`` is the same shape at t = 0.
    """
    if isinstance(shape, Line) and isinstance(at_start, Line):
        if at_start.grow != shape.grow:
            return "transform:scale(0)", f"linear;transform-origin:{_x(shape.x1)}px {_y(shape.y1)}px"
        if (at_start.dx, at_start.dy) != (shape.dx, shape.dy):
            # Skewing and stretching about the end that stays brings the other end exactly to where it was.
            tall = shape.y2 - shape.y1
            skew = math.degrees(math.atan((at_start.dx - shape.dx) / (tall - at_start.dy + shape.dy)))
            stretch = 1 - (at_start.dy - shape.dy) / tall
            origin = f"transform-origin:{_x(shape.x2)}px {_y(shape.y2)}px"
            return f"transform:skewX({skew:.4f}deg) scaleY({stretch:.5f})", f"{FLY_CSS};{origin}"
        return None
    if isinstance(shape, Rect) and isinstance(at_start, Rect) and at_start.grow != shape.grow:
        return "transform:scaleY(0)", "linear;transform-box:fill-box;transform-origin:50% 100%"
    if (at_start.dx, at_start.dy) != (shape.dx, shape.dy):
        dx, dy = (at_start.dx - shape.dx) * UNIT, -(at_start.dy - shape.dy) * UNIT
        return f"transform:translate({dx:.1f}px,{dy:.1f}px)", FLY_CSS
    return None


def frame_svg(run: Any, step: int, prefix: str, *, tween: bool = True) -> str:
    """The end of one step as an SVG document that fills the width it is given, with its tween.

    Args:
        run: a run or a recording.
        step: number of the step.
        prefix: begins every id; unique in the page.
        tween: play the step's tween when shown; False shows its end at once.
    """
    recording = as_recording(run)
    end = scene(recording, step, 1.0)
    start = {s.id: s for s in scene(recording, step, 0.0).shapes} if tween else {}
    rules: dict[str, list[str]] = {}
    groups = []
    for shape in end.shapes:
        if shape.under and not tween:
            continue
        key = f"{prefix}-{css_id(shape.id)}"
        motion = tween_css(shape, start[shape.id]) if shape.id in start else None
        if motion:
            begin, length = shape.start, shape.end - shape.start
            rules.setdefault(motion[0], []).append(
                f"#{key}{{animation:@ calc(var(--fv-step,{STEP_MS}ms)*{length:.4f}) "
                f"calc(var(--fv-step,{STEP_MS}ms)*{begin:.4f}) both {motion[1]}}}"
            )
        groups.append(f'<g id="{key}">{fragment(shape)}</g>')
    return _document(prefix, end, groups, _style(prefix, rules))


def _style(prefix: str, rules: dict[str, list[str]]) -> str:
    if not rules:
        return ""
    css = []
    for n, (begin, uses) in enumerate(rules.items()):
        name = f"{prefix}-k{n}"
        css.append(f"@keyframes {name}{{from{{{begin}}}}}")
        css += [use.replace("@", name, 1) for use in uses]
    return f"<style>{''.join(css)}@media (prefers-reduced-motion:reduce){{.{prefix} g{{animation:none!important}}}}</style>"


def _document(prefix: str, end: Scene, groups: Iterable[str], style: str) -> str:
    caption = escape(end.caption)
    hovers = "".join(hover_rect(h) for h in end.hovers)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="flashviz {prefix}" role="img" '
        f'viewBox="0 0 {WIDTH:g} {HEIGHT:g}" width="100%" font-family="{FAMILY}" aria-labelledby="{prefix}-title">'
        f'<title id="{prefix}-title">{caption}</title>{style}'
        f'<rect width="100%" height="100%" rx="6" fill="{GROUND}"/>{"".join(groups)}{hovers}</svg>'
    )


def hover_rect(hover: Hover) -> str:
    """A place that shows its text when pointed at; it draws nothing."""
    x, y = _x(hover.x), _y(hover.y + hover.h)
    return (
        f'<rect x="{x}" y="{y}" width="{hover.w * UNIT:.1f}" height="{hover.h * UNIT:.1f}" fill="none" '
        f'pointer-events="all"><title>{escape(hover.text)}</title></rect>'
    )


@lru_cache(maxsize=8192)
def css_id(text: str) -> str:
    """A shape's id with nothing in it that could end a selector or an attribute.

    >>> css_id("Qi.fill"), css_id('"><script>')
    ('Qi_2e_fill', '_22__3e__3c_script_3e_')
    """
    return "".join(c if c.isascii() and c.isalnum() else f"_{ord(c):x}_" for c in text)


def _x(x: float) -> str:
    return f"{(x - LEFT) * UNIT:.1f}"


def _y(y: float) -> str:
    return f"{(TOP - y) * UNIT:.1f}"
