"""The hues of the picture. Contrast of text on every fill is at least 4.5; outlines and labels repeat what hue says."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

TEXT = "#27272a"
OUTLINE = "#3f3f46"
GROUND = "#ffffff"
STALE = "#71717a"
HATCH = "#c4c4cc"


@dataclass(frozen=True, slots=True)
class Hue:
    """Colours of one tensor: first and last fill of its updates, and its outline."""

    light: str
    dark: str
    outline: str
    meaning: str
    alternates: bool = False


HUES = {
    "Q": Hue("#99f6e4", "#99f6e4", "#115e59", "Q tile"),
    "K": Hue("#fecaca", "#fecaca", "#b91c1c", "K tile"),
    "V": Hue("#f4f4f5", "#f4f4f5", "#3f3f46", "V tile"),
    "S": Hue("#a78bfa", "#ddd6fe", "#7c3aed", "scores S, each new tile in the other shade", alternates=True),
    "m": Hue("#bfdbfe", "#60a5fa", "#1d4ed8", "running max m, darker with every update"),
    "l": Hue("#a7f3d0", "#34d399", "#047857", "denominator l, and L"),
    "O": Hue("#fde68a", "#f59e0b", "#b45309", "output O, darker with every update"),
}
"""The tensors of attention. ``L`` has the hue of ``l``: it arrives from there."""

OTHERS = (
    Hue("#bae6fd", "#38bdf8", "#0369a1", ""),
    Hue("#fbcfe8", "#f472b6", "#be185d", ""),
    Hue("#d9f99d", "#a3e635", "#4d7c0f", ""),
    Hue("#fed7aa", "#fb923c", "#c2410c", ""),
    Hue("#e9d5ff", "#c084fc", "#7e22ce", ""),
    Hue("#e7e5e4", "#a8a29e", "#57534e", ""),
)
"""For tensors with names of a reader's own, in the order in which they appear."""

ALIASES = {"L": "l", "Ls": "l", "Os": "O", "d": "l", "o": "O", "P": "S", "q": "Q", "k": "K", "v": "V"}


def hue_of(tensor: str, others: tuple[str, ...] = ()) -> Hue:
    """The hue of a tensor; ``others`` lists the tensors that are not attention's, in order."""
    known = HUES.get(tensor) or HUES.get(ALIASES.get(tensor, ""))
    if known is not None:
        return known
    return OTHERS[others.index(tensor) % len(OTHERS)] if tensor in others else OTHERS[-1]


@lru_cache(maxsize=1024)
def fill_of(hue: Hue, level: int, levels: int) -> str:
    """Fill after ``level`` of ``levels`` updates: equal steps from light to dark, dark where there is one update.

    >>> fill_of(HUES["O"], 1, 2), fill_of(HUES["O"], 2, 2), fill_of(HUES["O"], 1, 1)
    ('#fde68a', '#f59e0b', '#f59e0b')
    """
    if hue.alternates:
        return hue.light if level % 2 else hue.dark
    part = 1.0 if levels <= 1 else (min(level, levels) - 1) / (levels - 1)
    a, b = (tuple(int(c[i : i + 2], 16) for i in (1, 3, 5)) for c in (hue.light, hue.dark))
    return "#" + "".join(f"{round(x + (y - x) * part):02x}" for x, y in zip(a, b, strict=True))


def contrast(a: str, b: str) -> float:
    """Contrast of two colours as WCAG 2 defines it, 1 to 21.

    >>> round(contrast("#ffffff", "#000000"))
    21
    """

    def luminance(color: str) -> float:
        parts = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@lru_cache(maxsize=1024)
def text_on(fill: str) -> str:
    """The colour of text on a fill: dark, or light where dark has a contrast below 4.5."""
    return TEXT if contrast(TEXT, fill) >= 4.5 else GROUND
