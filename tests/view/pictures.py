"""What the tests of the picture share: runs of given tile counts, and where matplotlib's letters really are."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from matplotlib.font_manager import FontProperties
from matplotlib.path import Path
from matplotlib.textpath import text_to_path

import flashviz as fv
from flashviz.recording import Recording
from flashviz.view.draw import FONT
from flashviz.view.shapes import Rect, Scene, Text
from flashviz.view.text import UNIT

PROP = FontProperties(family=FONT)


@lru_cache(maxsize=64)
def attention(
    tiles: tuple[int, int] = (2, 2),
    ragged: tuple[int, int] = (0, 0),
    heads: tuple[int, int] | None = None,
    size: int = 4,
    causal: bool = False,
    rung: int = 0,
) -> Recording:
    """FlashAttention-2 with ``tiles`` tiles of ``size`` rows, of which the last ones lack ``ragged`` rows."""
    rng = np.random.default_rng(7)
    n, m = tiles[0] * size - ragged[0], tiles[1] * size - ragged[1]
    q, kv = ((), ()) if heads is None else ((heads[0],), (heads[1],))
    Q, K, V = (rng.normal(size=shape).astype("float32") for shape in ((*q, n, 4), (*kv, m, 4), (*kv, m, 4)))
    run = fv.flash_attention_2(Q, K, V, Br=size, Bc=size, causal=causal, rung=rung, device="numpy")
    assert run.recording is not None
    return run.recording


def step_of(recording: Recording, text: str, nth: int = 0) -> int:
    """The number of the nth step whose label contains a text."""
    return [n for n, step in enumerate(recording.steps) if text in step.label][nth]


def by_id(scene: Scene) -> dict[str, Any]:
    """The shapes of a scene under their ids, each of which must be its own."""
    found = {shape.id: shape for shape in scene.shapes}
    assert len(found) == len(scene.shapes), "two shapes have one id"
    return found


Extent = tuple[float, float, float, float]


@lru_cache(maxsize=10_000)
def letters(text: str, size: float) -> tuple[float, float]:
    """Width and height in canvas units of what matplotlib draws for a text of one or more lines."""
    lines = text.split("\n")
    drawn = [text_to_path.get_text_path(PROP, line) for line in lines]
    scale = size / text_to_path.FONT_SCALE
    boxes = [Path(np.asarray(v) * scale, c).get_extents() for v, c in drawn if len(v)]
    if not boxes:
        return 0.0, 0.0
    return max(b.width for b in boxes) / UNIT, (boxes[0].height + 1.2 * size * (len(lines) - 1)) / UNIT


def extent(shape: Rect | Text) -> Extent:
    """Left, bottom, right and top of a shape where it is now; of a text, of its letters."""
    if isinstance(shape, Text):
        w, h = letters(shape.text, shape.size) if shape.text else (0.0, 0.0)
        x, y = shape.x + shape.dx - w / 2, shape.y + shape.dy - h / 2
    else:
        w, h, x, y = shape.w, shape.h, shape.x + shape.dx, shape.y + shape.dy
    return x, y, x + w, y + h


def overlap(a: Extent, b: Extent, slack: float = 1e-6) -> bool:
    return a[0] < b[2] - slack and b[0] < a[2] - slack and a[1] < b[3] - slack and b[1] < a[3] - slack


def inside(a: Extent, b: Extent, slack: float = 1e-6) -> bool:
    return a[0] >= b[0] - slack and a[1] >= b[1] - slack and a[2] <= b[2] + slack and a[3] <= b[3] + slack


def collisions(found: dict[str, Extent]) -> Iterator[str]:
    names = sorted(found)
    for n, a in enumerate(names):
        for b in names[n + 1 :]:
            if overlap(found[a], found[b]):
                yield f"{a} {found[a]} overlaps {b} {found[b]}"
