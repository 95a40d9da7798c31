"""Easing: pure functions of time, 0 to 1 in and out, and the CSS that means exactly the same."""

from __future__ import annotations

FLY_CSS = "cubic-bezier(.3333,0,.6667,1)"
"""Its control points lie at thirds, so x is time itself and y is smoothstep."""


def smoothstep(t: float) -> float:
    """Slow, fast, slow: 3t² - 2t³."""
    return t * t * (3 - 2 * t)


def window(t: float, start: float, end: float) -> float:
    """Time inside a part of a step, clipped to 0 … 1.

    >>> window(0.75, 0.5, 1.0)
    0.5
    """
    return min(max((t - start) / (end - start), 0.0), 1.0) if end > start else float(t >= end)
