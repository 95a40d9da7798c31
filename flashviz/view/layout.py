"""Where things stand on the canvas: a layout gives every slot a box, computed from the tile counts.

Diagram units: x to the right, y up, the origin in the middle; the canvas spans x in [-4.7, 4.7], y in [-6, 5.4].
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from flashviz.recording import Recording
from flashviz.slots import Block, Slot
from flashviz.view.maps import HeadMap, TileMap, head_map, tile_map
from flashviz.view.palette import Hue
from flashviz.view.text import LEAST, clean, fit, shorten

LEFT, RIGHT, BOTTOM, TOP = -4.7, 4.7, -6.0, 5.4
WIDEST = 9.0
MOST_TILES = 8
"""A column with more tiles draws the first ones, an ellipsis and the last."""
TITLE, TILE, CAPTION, NARROW = 14.0, 14.0, 12.0, 10.0
HBM_TOP, HBM_BOTTOM, TILE_GAP, TILE_HEIGHT = 4.225, 1.775, 0.05, 1.2
HBM_GAP, ON_CHIP_GAP = 0.2, 0.15
ON_CHIP_Y, ON_CHIP_TOP, ON_CHIP_BOTTOM = -3.0, -1.2, -5.1
"""One row of on-chip slots stands at ``ON_CHIP_Y``; several share the room from top to bottom."""
LIFT = 1.0
"""Without a grid of blocks there is nothing to zoom from: one row of on-chip slots stands higher."""
DROP, HEADING, MOST_ROWS, LONGEST_ROW = 0.3, 0.8, 4, 1.7
SQUARE, SQUARE_PITCH, SQUARE_ROWS, ONE_ROW, MOST_COLUMNS = 0.3, 0.4, (0.05, -0.35), -0.15, 22
MAP_COLUMNS = 6
"""With a map beside it the grid has fewer columns."""
LEAST_RAGGED = 0.14
MEMORIES = {"shared": "SRAM", "register": "registers"}
"""What the picture calls a memory; others have their own name."""


@dataclass(frozen=True, slots=True)
class Box:
    """A slot's place: centre, size, text size, and cells (rows, columns) where it is drawn in cells.

    ``caption`` is written ``drop`` below the box in ``caption_size``. ``hidden`` boxes stand where the ellipsis is: nothing
    is drawn there, but tiles fly from and to them. Up to ``numbers`` numbers of a vector or a single value are written
    in the box itself, where they fit, with at most ``digits`` significant digits. The elements of a vector run ``across``
    the box, and down where that is not set: a tile with fewer is narrower, or lower.
    """

    x: float
    y: float
    w: float
    h: float
    caption: str = ""
    text: float = TILE
    cells: tuple[int, int] | None = None
    hidden: bool = False
    drop: float = DROP
    caption_size: float = CAPTION
    numbers: int = 0
    across: bool = False
    digits: int = 4


@dataclass(frozen=True, slots=True)
class Label:
    """A text that never moves: titles, column names, ellipses."""

    x: float
    y: float
    text: str
    size: float


@dataclass(frozen=True)
class Layout:
    """Everything that the scene needs to know about places.

    Args:
        boxes: slot name → box; slots without one are not drawn.
        labels: titles and column names.
        squares: lower-left corners of the squares of the grid of CUDA blocks, side :data:`SQUARE`.
        square: (launch, block) → index of its square.
        rest: index of the square that stands for all blocks there is no room for, None where there is room.
        zoom: left and right x and the y of the top corners where the zoom lines end, None without zoom lines.
        hues: of tensors that are to look other than their names would have it, and of single slots, by their names.
        maps: small maps beside the grid of blocks.
    """

    boxes: Mapping[str, Box]
    labels: tuple[Label, ...] = ()
    squares: tuple[tuple[float, float], ...] = ()
    square: Mapping[tuple[int, Block], int] = field(default_factory=dict)
    rest: int | None = None
    zoom: tuple[float, float, float] | None = None
    hues: Mapping[str, Hue] = field(default_factory=dict)
    maps: tuple[TileMap | HeadMap, ...] = ()


def parts(n: int, most: int = 8) -> int:
    """How many cells n elements are drawn as: one each up to ``most``, else the most equal parts that divide n.

    >>> [parts(n) for n in (4, 8, 16, 12, 64, 13)]
    [4, 8, 8, 6, 8, 8]
    """
    if n <= most:
        return max(n, 1)
    even = max(p for p in range(1, most + 1) if n % p == 0)
    return even if even > 1 else most


def spread(widths: Iterable[float], gap: float) -> list[tuple[float, float]]:
    """Centres and widths of boxes side by side in the middle of the canvas; boxes shrink where they do not fit."""
    sizes = list(widths)
    gap = min(gap, WIDEST / (2 * max(len(sizes), 1)))
    gaps = gap * (len(sizes) - 1)
    scale = min(1.0, (WIDEST - gaps) / sum(sizes)) if sizes else 1.0
    left, out = -(sum(sizes) * scale + gaps) / 2, []
    for w in sizes:
        out.append((round(left + w * scale / 2, 6), w * scale))
        left += w * scale + gap
    return out


def column(x: float, w: float, tiles: list[Slot], size: float) -> tuple[dict[str, Box], list[Label]]:
    """The boxes of one tensor's tiles in HBM, top to bottom, and the ellipsis where there are too many.

    A last tile with fewer rows is drawn lower in proportion, as far as its label allows.
    """
    n = len(tiles)
    shown = list(range(n)) if n <= MOST_TILES else [*range(MOST_TILES - 2), n - 1]
    places = min(n, MOST_TILES)
    height = min(TILE_HEIGHT, (HBM_TOP - HBM_BOTTOM - TILE_GAP * (places - 1)) / places)
    top = (HBM_TOP + HBM_BOTTOM) / 2 + (places * height + TILE_GAP * (places - 1)) / 2
    rows = max((t.shape[0] for t in tiles if t.shape), default=1)
    boxes, labels = {}, []
    for place, index in enumerate(shown):
        if n > MOST_TILES and index == n - 1:
            place = MOST_TILES - 1
        part = tiles[index].shape[0] / max(rows, 1) if tiles[index].shape else 1.0
        h = max(height * part, min(height, LEAST_RAGGED))
        y = round(top - place * (height + TILE_GAP) - h / 2, 6)
        boxes[tiles[index].name] = Box(x, y, w, h, text=size)
    sizes = [fit(clean(tiles[k].label or tiles[k].name), size, w, boxes[tiles[k].name].h) for k in shown]
    full = [s for s, k in zip(sizes, shown, strict=True) if not tiles[k].shape or tiles[k].shape[0] == rows]
    for k, own in zip(shown, sizes, strict=True):
        box = boxes[tiles[k].name]
        boxes[tiles[k].name] = replace(box, text=min(own, min(full, default=own)))
    if n > MOST_TILES:
        y = round(top - height / 2 - (MOST_TILES - 2) * (height + TILE_GAP), 6)
        labels.append(Label(x, y, "⋮", size))
        for tile in tiles[MOST_TILES - 2 : n - 1]:
            boxes[tile.name] = Box(x, y, w, height, text=min(sizes), hidden=True)
    return boxes, labels


Squares = tuple[tuple[tuple[float, float], ...], dict[tuple[int, Block], int], int | None]


def grid_squares(recording: Recording, launch: int = 0, most: int = MOST_COLUMNS) -> Squares:
    """A launch's grid of CUDA blocks: squares under the title of the on-chip memory, each block's, and the rest's.

    One or two blocks sit in the six squares of the reference figure; more have a square each, in one row, then in
    two. Where there are more blocks than squares, the last square but one stands for those between.
    """
    place: dict[tuple[int, Block], int] = {}
    total = 0
    for made in recording.launches:
        if made.launch == launch:
            gx, gy, gz = made.grid
            total = gx * gy * gz
            blocks = recording.blocks(launch)
            index = {block: (block.batch * gy + block.head) * gx + block.tile for block in blocks}
            own = len(set(index.values())) == len(index) and all(n < total for n in index.values())
            for n, block in enumerate(blocks):  # a kernel may number its blocks in another way: then as they come
                place[launch, block] = index[block] if own else n
    total = max([total, *(n + 1 for n in place.values())])
    columns = 3 if total <= 2 else min(total, most)
    lines = SQUARE_ROWS if total <= 2 or total > most else (ONE_ROW,)
    left = -(columns * SQUARE_PITCH - (SQUARE_PITCH - SQUARE)) / 2
    squares = tuple((round(left + c * SQUARE_PITCH, 6), y) for y in lines for c in range(columns))
    if total <= 2:
        return squares, {block: 4 + n for block, n in place.items()}, None
    last = min(total, len(squares)) - 1
    if total <= len(squares):
        return squares[: last + 1], place, None
    short = {block: last if n == total - 1 else min(n, last - 1) for block, n in place.items()}
    return squares, short, last - 1


def rows_of(slots: list[Slot], widths: Mapping[str, float]) -> list[list[Slot]]:
    """On-chip slots in rows: one for each memory, more where one memory's slots would shrink too much."""
    memories = [[s for s in slots if s.memory == m] for m in dict.fromkeys(s.memory for s in slots)]
    out = []
    for row in memories:
        wide = sum(widths.get(s.name, 1.6) + ON_CHIP_GAP for s in row)
        count = max(1, min(MOST_ROWS - len(memories) + 1, math.ceil(wide / (WIDEST * LONGEST_ROW))))
        each = math.ceil(len(row) / count)
        out += [row[n : n + each] for n in range(0, len(row), each)]
    return out


def on_chip(
    slots: list[Slot], widths: Mapping[str, float], cells: frozenset[str], top: float, y: float
) -> tuple[dict[str, Box], list[Label]]:
    """Boxes of the on-chip slots in rows between ``top`` and the caption, one row at ``y``; a name over each new memory."""
    rows = rows_of(slots, widths)
    headings = len({s.memory for s in slots}) - 1
    shrink = min(1.0, 0.6 * (top - ON_CHIP_BOTTOM) / (len(rows) * (DROP + 0.15) + headings * HEADING))
    drop, heading = DROP * shrink, HEADING * shrink
    room = top - ON_CHIP_BOTTOM - len(rows) * (drop + 0.15 * shrink) - headings * heading
    height = min(TILE_HEIGHT, room / len(rows))
    boxes: dict[str, Box] = {}
    labels: list[Label] = []
    memory = slots[0].memory
    under = top if len(rows) > 1 else y + height / 2
    for row in rows:
        if row[0].memory != memory:
            memory = row[0].memory
            name = MEMORIES.get(memory, clean(memory))
            labels.append(Label(0, round(under - heading / 2, 6), name, max(LEAST, TITLE * shrink)))
            under -= heading
        centres = spread([widths.get(s.name, 1.6) for s in row], ON_CHIP_GAP)
        for slot, (x, w) in zip(row, centres, strict=True):
            drawn = None
            if slot.name in cells and len(slot.shape) == 2:
                drawn = (parts(slot.shape[0]), parts(slot.shape[1]))
            caption, text = clean(slot.name), NARROW if w < 0.5 else TILE
            size = fit(caption, CAPTION * shrink, w + ON_CHIP_GAP)
            box = Box(x, round(under - height / 2, 6), w, height, shorten(caption, size, w + ON_CHIP_GAP), text, drawn)
            boxes[slot.name] = replace(box, drop=drop, caption_size=size)
        under -= height + drop + 0.15 * shrink
    return boxes, labels


def bands(
    recording: Recording,
    block: Block,
    launch: int = 0,
    *,
    columns: list[str],
    slots: list[str],
    widths: Mapping[str, float],
    cells: Iterable[str] = (),
    kv: tuple[str, ...] = (),
    grid: bool = True,
    map_tiles: bool = False,
    heads: int | None = None,
) -> Layout:
    """HBM above as columns of tiles, on-chip memories below as rows of slots, the grid of blocks between them.

    Args:
        recording: whose slots.
        block: the block shown: of several heads, its head's tensors are drawn.
        launch: the launch it belongs to: its grid is drawn.
        columns: tensors in HBM, left to right.
        slots: on-chip slots, left to right within each memory.
        widths: width by tensor or slot name; 1.6 where not given.
        cells: slots drawn in cells.
        kv: tensors whose heads are K, V heads.
        grid: draw the grid of CUDA blocks and the zoom lines.
        map_tiles: draw the map of the tiles of scores, where a causal mask leaves some out.
        heads: blocks of a batch that share the heads of ``kv`` out, the query heads when not given.
    """
    hbm = [s for s in recording.slots if s.shared_by_grid]
    queries, keys = int(recording.params.get("Hq", 1)), int(recording.params.get("Hkv", 1))
    kv_head = block.head // max((heads or queries) // max(keys, 1), 1)
    boxes: dict[str, Box] = {}
    labels: list[Label] = []
    centres = spread([widths.get(c, 1.6) for c in columns], HBM_GAP)
    for name, (x, w) in zip(columns, centres, strict=True):
        head = (block.batch, kv_head if name in kv else block.head)
        mine = [s for s in hbm if s.tensor == name]
        tiles = [s for s in mine if s.head == head] or mine
        more, extra = column(x, w, tiles, NARROW if w < 0.5 else TILE)
        boxes |= more
        text = clean(name)
        size = fit(text, CAPTION, w + HBM_GAP)
        labels += [*extra, Label(x, 1.5, shorten(text, size, w + HBM_GAP), size)]
    several = len({s.head for s in hbm}) > 1
    labels.insert(0, Label(0, 5, f"HBM · batch {block.batch}, head {block.head}" if several else "HBM", TITLE))
    chip = sorted((recording.slot(name) for name in slots), key=lambda s: s.memory != "shared")
    if not chip:
        return Layout(boxes, tuple(labels))
    lift = 0.0 if grid else LIFT
    more, extra = on_chip(chip, widths, frozenset(cells), ON_CHIP_TOP + lift / 3, ON_CHIP_Y + lift)
    first = [more[s.name] for s in chip if s.memory == chip[0].memory]
    top = max(b.y + b.h / 2 for b in first)
    title = MEMORIES.get(chip[0].memory, clean(chip[0].memory))
    labels += [Label(0, 0.6 if grid else round(top + 0.7, 6), title, TITLE), *extra]
    if not grid:
        return Layout(boxes | more, tuple(labels))
    found = (tile_map(recording) if map_tiles else None, head_map(recording) if kv else None)
    maps = tuple(m for m in found if m is not None)
    squares, square, rest = grid_squares(recording, launch, MAP_COLUMNS if maps else MOST_COLUMNS)
    zoom = (min(b.x - b.w / 2 for b in first), max(b.x + b.w / 2 for b in first), top)
    return Layout(boxes | more, tuple(labels), squares, square, rest, zoom, maps=maps)
