"""Small maps beside the grid of blocks: which tiles of scores are visited, and which head of Q reads which head of K and V.

Requirements: a map is part of the layout (where it stands, what there is) and asks the recording only for what has been
done by a step, in constant time. It is drawn where it says something: where tiles are left out, where heads are shared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from flashviz.events import Step
from flashviz.recording import Recording
from flashviz.sight import Sight
from flashviz.slots import Block
from flashviz.view.palette import GROUND, HATCH, HUES, OUTLINE, TEXT, text_on
from flashviz.view.shapes import LINE_WIDTH, Line, Rect, Shape, Text

X, TITLE_Y, MAP_TOP, MAP_BOTTOM, MAP_WIDTH = 3.5, 1.05, 0.85, -0.8, 2.0
MOST_CELLS, CELL, TITLE_SIZE = 12, 0.3, 10.0
MOST_HEADS, HEAD, HEAD_SIZE = 8, 0.23, 8.0
RING = 0.04


@dataclass(frozen=True)
class TileMap:
    """The tiles of scores of one head, row blocks down and key tiles across: visited ones filled as they are done, others hatched.

    Args:
        visited: the key tiles of every row block.
        columns: key tiles that there are.
    """

    visited: tuple[range, ...]
    columns: int

    @property
    def size(self) -> float:
        """Side of a cell."""
        return min(CELL, MAP_WIDTH / self.columns, (MAP_TOP - MAP_BOTTOM) / len(self.visited))

    def shapes(self, recording: Recording, number: int, step: Step) -> Iterator[Shape]:
        """What is drawn at a step, back to front."""
        rows, columns, a = len(self.visited), self.columns, self.size
        x, top = X - a * columns / 2, (MAP_TOP + MAP_BOTTOM + a * rows) / 2
        count = sum(len(row) for row in self.visited)
        yield Text("map.title", x=X, y=TITLE_Y, text=f"{count} of {rows * columns} tiles", size=TITLE_SIZE)
        for name, dx, dy in (("Qi", -a * columns / 2 - 0.16, 0.0), ("Kj", 0.0, -a * rows / 2 - 0.14)):
            yield Text(f"map.{name}", x=X + dx, y=(MAP_TOP + MAP_BOTTOM) / 2 + dy, text=name, size=HEAD_SIZE)
        whole: dict[str, Any] = {"x": x, "y": top - a * rows, "w": a * columns, "h": a * rows}
        yield Rect("map.skipped", **whole, fill=GROUND, hatched=True)
        done, hue, block = _first_done(_Of(recording)), HUES["S"], step.block or Block()
        for i, row in enumerate(self.visited):
            for j in row:
                first = done.get((block.batch, block.head, i, j))
                fill = hue.light if first is not None and first <= number else hue.dark
                yield Rect(f"map.{i}.{j}", x=x + a * j, y=top - a * (i + 1), w=a, h=a, fill=fill)
        yield Rect("map.edge", **whole, stroke=hue.outline, lines=(rows, columns), width=LINE_WIDTH)
        at: dict[str, int] = dict(step.tiles) if step.block is not None else {}
        if not {"i", "j"} & set(at):
            return
        left, right = (at["j"], at["j"] + 1) if "j" in at else (0, columns)
        upper, lower = (at["i"], at["i"] + 1) if "i" in at else (0, rows)
        if right <= columns and lower <= rows:
            w, h = a * (right - left) + 2 * RING, a * (lower - upper) + 2 * RING
            ring: dict[str, Any] = {"x": x + a * left - RING, "y": top - a * lower - RING, "w": w, "h": h}
            yield Rect("map.ring", **ring, stroke=TEXT, width=1.5)


@dataclass(frozen=True)
class HeadMap:
    """The heads of Q above those of K and V, a line from each to the one that it reads; the block's own is dark."""

    queries: int
    keys: int

    def shapes(self, recording: Recording, number: int, step: Step) -> Iterator[Shape]:
        """What is drawn at a step, back to front."""
        x0, group = -X, self.queries // self.keys
        shown = step.block.head if step.block is not None else -1
        yield Text("heads.title", x=x0, y=TITLE_Y, text="heads of Q, of K and V", size=TITLE_SIZE)
        pitch = min(1.5 * HEAD, MAP_WIDTH / self.queries)
        at = [x0 + (h - (self.queries - 1) / 2) * pitch for h in range(self.queries)]
        kv = [sum(at[h * group : (h + 1) * group]) / group for h in range(self.keys)]
        upper, lower = MAP_TOP - HEAD / 2 - 0.1, MAP_TOP - 1.0
        order = sorted(range(self.queries), key=lambda h: h == shown)
        for h in order:
            stroke, width = (TEXT, 1.5) if h == shown else (HATCH, LINE_WIDTH)
            ends: dict[str, Any] = {"x1": at[h], "y1": upper - HEAD / 2, "x2": kv[h // group], "y2": lower + HEAD / 2}
            yield Line(f"heads.line{h}", **ends, stroke=stroke, width=width)
        for name, places, y, own in (("Q", at, upper, shown), ("K", kv, lower, shown // group if shown >= 0 else -1)):
            hue = HUES[name]
            for h, x in enumerate(places):
                fill = OUTLINE if h == own else hue.light
                box: dict[str, Any] = {"x": x - HEAD / 2, "y": y - HEAD / 2, "w": HEAD, "h": HEAD}
                yield Rect(f"heads.{name}{h}", **box, fill=fill, stroke=hue.outline, width=LINE_WIDTH)
                yield Text(f"heads.{name}{h}.number", x=x, y=y, text=str(h), size=HEAD_SIZE, fill=text_on(fill))


def tile_map(recording: Recording) -> TileMap | None:
    """The map of a recording's tiles, where a causal mask leaves some out and they are few enough to be drawn."""
    sizes = recording.params
    if not sizes.get("causal") or not {"Nq", "Nk", "Br", "Bc"} <= set(sizes):
        return None
    visited = tuple(Sight.of(sizes).tiles(int(sizes["Br"]), int(sizes["Bc"])))
    columns = -(-int(sizes["Nk"]) // int(sizes["Bc"]))
    return TileMap(visited, columns) if max(len(visited), columns) <= MOST_CELLS else None


def head_map(recording: Recording) -> HeadMap | None:
    """The map of a recording's heads, where several heads of Q read one of K and V."""
    queries, keys = (int(recording.params.get(name, 1)) for name in ("Hq", "Hkv"))
    return HeadMap(queries, keys) if keys < queries <= MOST_HEADS else None


class _Of:
    """A recording as a cache key: recordings are frozen, so the same object has the same steps."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    def __hash__(self) -> int:
        return id(self.recording)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Of) and other.recording is self.recording


@lru_cache(maxsize=64)
def _first_done(key: _Of) -> dict[tuple[int, int, int, int], int]:
    """(batch, head, i, j) → the first step that works on that tile."""
    first: dict[tuple[int, int, int, int], int] = {}
    for number, step in enumerate(key.recording.steps):
        at = dict(step.tiles)
        if step.block is not None and "i" in at and "j" in at:
            first.setdefault((step.block.batch, step.block.head, at["i"], at["j"]), number)
    return first
