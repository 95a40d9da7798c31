"""The softmax of one row, in all three forms: strips of tiles in HBM, the tile and the carries with their numbers below.

There is no grid of blocks: a block owns a row, and one row is shown.
"""

from __future__ import annotations

from collections.abc import Mapping

from flashviz.recording import Recording
from flashviz.slots import Block, Slot
from flashviz.view.layout import CAPTION, MOST_TILES, TILE, TITLE, WIDEST, Box, Label, Layout, spread
from flashviz.view.palette import HUES, Hue

BY_TILE = True
"""The row shown is the block's tile."""
HUES_HERE: Mapping[str, Hue] = {
    "x": Hue("#ddd6fe", "#ddd6fe", "#7c3aed", "scores x"),
    "y": Hue("#a78bfa", "#a78bfa", "#7c3aed", "terms e^(x - m), and y"),
    "p": Hue("#a78bfa", "#a78bfa", "#7c3aed", "terms e^(x - m), and y"),
    "m": HUES["m"],
    "c": Hue("#fbcfe8", "#fbcfe8", "#be185d", "factors: what the old is multiplied by"),
    "d": Hue("#a7f3d0", "#34d399", "#047857", "denominator d, darker with every update"),
    "o": HUES["O"],
}
NUMBERS, GAP, BETWEEN, MARGIN = 8, 0.12, 0.3, 0.25
"""Most numbers in a box; between two tiles, between two slots, and at the left for the strips' names."""
STRIPS = (3.65, 2.35)
"""Middles of the strips of tiles in HBM."""
HEIGHT, SRAM_Y, TILES_Y, CARRIES_Y = 1.05, 0.6, -0.55, -2.8
WIDTHS = {"xi": 2.6, "Vi": 1.6, "pi": 2.6, "m": 1.35, "c": 1.35, "d": 1.5, "w": 1.35, "o": 2.6}
CAPTIONS = {
    "xi": "scores xi",
    "Vi": "values Vi",
    "pi": "terms pi",
    "m": "maximum m",
    "c": "factor c",
    "d": "denominator d",
    "w": "factor w",
    "o": "output o",
}


def layout(recording: Recording, block: Block, launch: int = 0) -> Layout:
    """Places from the tile counts; of several rows, the block's."""
    several = int(recording.params.get("R", 1)) > 1
    boxes: dict[str, Box] = {}
    title = f"HBM · row {block.tile}" if several else "HBM"
    labels = [Label(0, 5, title, TITLE), Label(0, SRAM_Y, "SRAM", TITLE)]
    hbm = [s for s in recording.slots if s.shared_by_grid]
    strips = [name for name in ("x", "V", "y") if any(s.tensor == name for s in hbm)]

    def of(name: str) -> list[Slot]:
        mine = [s for s in hbm if s.tensor == name]
        return mine if name == "V" or not several else [s for s in mine if s.name.endswith(f"[{block.tile}]")]

    o, places = of("o"), min(len(of("x")), MOST_TILES)
    beside = WIDTHS["o"] + BETWEEN if o else 0.0
    width = min(WIDTHS["xi"], (WIDEST - MARGIN - beside - GAP * (places - 1)) / places)
    wide = places * (width + GAP) - GAP
    left = -(wide + beside + MARGIN) / 2 + MARGIN
    for name, y in zip(strips, STRIPS, strict=True):
        more, extra = strip(of(name), width, left, y)
        boxes |= more
        labels += [Label(round(left - MARGIN, 6), y, name, CAPTION), *extra]
    for slot in o:
        x = round(left + wide + BETWEEN + WIDTHS["o"] / 2, 6)
        boxes[slot.name] = Box(x, sum(STRIPS) / 2, WIDTHS["o"], HEIGHT, text=TILE, numbers=NUMBERS, across=True)
    for names, y in ((("xi", "Vi", "pi"), TILES_Y), (("m", "c", "d", "w", "o"), CARRIES_Y)):
        there = [n for n in names if n in recording.slot_by_name]
        for name, (x, w) in zip(there, spread([WIDTHS[n] for n in there], BETWEEN), strict=True):
            across = name != "Vi"
            boxes[name] = Box(x, y, w, HEIGHT, CAPTIONS[name], TILE, numbers=NUMBERS * across, across=across)
    return Layout(boxes, tuple(labels), hues=HUES_HERE)


def strip(tiles: list[Slot], width: float, left: float, y: float) -> tuple[dict[str, Box], list[Label]]:
    """One tensor's tiles side by side, wide as their elements, and the ellipsis where there are too many."""
    n = len(tiles)
    shown = list(range(n)) if n <= MOST_TILES else [*range(MOST_TILES - 2), n - 1]
    boxes, labels = {}, []
    for place, index in enumerate(shown):
        at = MOST_TILES - 1 if n > MOST_TILES and index == n - 1 else place
        w = width * tiles[index].shape[0] / tiles[0].shape[0]
        x = left + at * (width + GAP) + w / 2
        boxes[tiles[index].name] = Box(round(x, 6), y, w, HEIGHT, text=TILE, numbers=NUMBERS, across=True)
    if n > MOST_TILES:
        x = round(left + (MOST_TILES - 2) * (width + GAP) + width / 2, 6)
        labels.append(Label(x, y, "…", TILE))
        for tile in tiles[MOST_TILES - 2 : n - 1]:
            boxes[tile.name] = Box(x, y, width, HEIGHT, hidden=True)
    return boxes, labels
