"""Where things stand on the canvas: a layout gives every slot a box, computed from the tile counts.

Diagram units: x to the right, y up, the origin in the middle; the canvas spans x in [-4.7, 4.7], y in [-6, 5.4].
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flashviz.recording import Recording
from flashviz.slots import Block, Slot

LEFT, RIGHT, BOTTOM, TOP = -4.7, 4.7, -6.0, 5.4
WIDEST = 9.0
MOST_TILES = 8
"""A column with more tiles draws the first ones, an ellipsis and the last."""
TITLE, TILE, CAPTION, NARROW = 14.0, 14.0, 12.0, 10.0
HBM_TOP, HBM_BOTTOM, TILE_GAP, TILE_HEIGHT = 4.225, 1.775, 0.05, 1.2
HBM_GAP, ON_CHIP_GAP = 0.2, 0.15
BANDS = {"shared": -3.0, "register": -4.85}
LIFT = 1.0
"""Without a grid of blocks there is nothing to zoom from: the on-chip slots stand higher."""
SQUARE, SQUARE_PITCH, SQUARE_ROWS, MOST_COLUMNS = 0.3, 0.4, (0.05, -0.35), 22


@dataclass(frozen=True, slots=True)
class Box:
    """A slot's place: centre, size, caption below it, text size, and cells (rows, columns) where it is drawn in cells.

    ``hidden`` boxes stand where the ellipsis is: nothing is drawn there, but tiles fly from and to them.
    """

    x: float
    y: float
    w: float
    h: float
    caption: str = ""
    text: float = TILE
    cells: tuple[int, int] | None = None
    hidden: bool = False


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
        zoom: left and right x and the y of the top corners where the zoom lines end, None without zoom lines.
    """

    boxes: Mapping[str, Box]
    labels: tuple[Label, ...] = ()
    squares: tuple[tuple[float, float], ...] = ()
    square: Mapping[tuple[int, Block], int] = field(default_factory=dict)
    zoom: tuple[float, float, float] | None = None


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
    """Centres and widths of boxes side by side in the middle of the canvas; they shrink where they do not fit."""
    sizes = list(widths)
    total = sum(sizes) + gap * (len(sizes) - 1)
    scale = min(1.0, WIDEST / total) if sizes else 1.0
    left, out = -total * scale / 2, []
    for w in sizes:
        out.append((round(left + w * scale / 2, 6), w * scale))
        left += (w + gap) * scale
    return out


def column(x: float, w: float, tiles: list[Slot], size: float) -> tuple[dict[str, Box], list[Label]]:
    """The boxes of one tensor's tiles in HBM, top to bottom, and the ellipsis where there are too many."""
    n = len(tiles)
    shown = list(range(n)) if n <= MOST_TILES else [*range(MOST_TILES - 2), n - 1]
    places = min(n, MOST_TILES)
    height = min(TILE_HEIGHT, (HBM_TOP - HBM_BOTTOM - TILE_GAP * (places - 1)) / places)
    top = (HBM_TOP + HBM_BOTTOM) / 2 + (places * height + TILE_GAP * (places - 1)) / 2
    text = fit_text(size, w, height, max(len(t.label or t.name) for t in tiles))

    def centre(place: int) -> float:
        return round(top - height / 2 - place * (height + TILE_GAP), 6)

    boxes, labels = {}, []
    for place, index in enumerate(shown):
        if n > MOST_TILES and index == n - 1:
            place = MOST_TILES - 1
        boxes[tiles[index].name] = Box(x, centre(place), w, height, text=text)
    if n > MOST_TILES:
        y = centre(MOST_TILES - 2)
        labels.append(Label(x, y, "⋮", size))
        for tile in tiles[MOST_TILES - 2 : n - 1]:
            boxes[tile.name] = Box(x, y, w, height, text=text, hidden=True)
    return boxes, labels


def fit_text(size: float, w: float, h: float, letters: int) -> float:
    """A text size at which ``letters`` letters fit a box: a unit of the canvas is 64 points of text."""
    return round(max(5.0, min(size, h * 64 * 0.72, w * 64 / (0.62 * max(letters, 1)))), 2)


def grid_squares(
    recording: Recording, launch: int = 0
) -> tuple[tuple[tuple[float, float], ...], dict[tuple[int, Block], int]]:
    """The grid of CUDA blocks: two rows of squares, in the middle under the title of the on-chip memory.

    One or two blocks sit in the six squares of the reference figure; more have a square each, as far as there is room.
    """
    place: dict[tuple[int, Block], int] = {}
    total = 0
    for made in recording.launches:
        if made.launch == launch:
            gx, gy, gz = made.grid
            total = gx * gy * gz
            for n, block in enumerate(recording.blocks(launch)):
                index = (block.batch * gy + block.head) * gx + block.tile
                place[launch, block] = index if index < total else n
    columns = 3 if total <= 2 else min(-(-total // 2), MOST_COLUMNS)
    left = -(columns * SQUARE_PITCH - (SQUARE_PITCH - SQUARE)) / 2
    squares = tuple((round(left + c * SQUARE_PITCH, 6), y) for y in SQUARE_ROWS for c in range(columns))
    if total <= 2:
        return squares, {block: 4 + n for block, n in place.items()}
    last = min(total, len(squares)) - 1
    return squares[: last + 1], {block: min(n, last) for block, n in place.items()}


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
    """
    hbm = [s for s in recording.slots if s.shared_by_grid]
    queries, keys = int(recording.params.get("Hq", 1)), int(recording.params.get("Hkv", 1))
    kv_head = block.head // max(queries // max(keys, 1), 1)
    boxes: dict[str, Box] = {}
    labels: list[Label] = []
    centres = spread([widths.get(c, 1.6) for c in columns], HBM_GAP)
    for name, (x, w) in zip(columns, centres, strict=True):
        head = (block.batch, kv_head if name in kv else block.head)
        mine = [s for s in hbm if s.tensor == name]
        tiles = [s for s in mine if s.head == head] or mine
        more, extra = column(x, w, tiles, NARROW if w < 0.5 else TILE)
        boxes |= more
        labels += [*extra, Label(x, 1.5, name, CAPTION)]
    several = len({s.head for s in hbm}) > 1
    labels.insert(0, Label(0, 5, f"HBM · batch {block.batch}, head {block.head}" if several else "HBM", TITLE))
    on_chip = [recording.slot(name) for name in slots]
    for memory in dict.fromkeys(s.memory for s in on_chip):
        row = [s for s in on_chip if s.memory == memory]
        y = BANDS.get(memory, BANDS["shared"]) + (0.0 if grid else LIFT)
        centres = spread([widths.get(s.name, 1.6) for s in row], ON_CHIP_GAP)
        for slot, (x, w) in zip(row, centres, strict=True):
            drawn = None
            if slot.name in cells and len(slot.shape) == 2:
                drawn = (parts(slot.shape[0]), parts(slot.shape[1]))
            text = NARROW if w < 0.5 else fit_text(TILE, w, TILE_HEIGHT, 4)
            boxes[slot.name] = Box(x, y, w, TILE_HEIGHT if memory == "shared" else 0.7, slot.name, text, drawn)
        if memory != "shared":
            labels.append(Label(0, y + 0.62, "registers" if memory == "register" else memory, CAPTION))
    shared = [boxes[s.name] for s in on_chip if s.memory == "shared"] or [boxes[s.name] for s in on_chip]
    if shared:
        labels.append(Label(0, 0.6 if grid else -3.0 + LIFT + 1.3, "SRAM", TITLE))
    if not grid or not shared:
        return Layout(boxes, tuple(labels))
    squares, square = grid_squares(recording, launch)
    zoom = (min(b.x - b.w / 2 for b in shared), max(b.x + b.w / 2 for b in shared), max(b.y + b.h / 2 for b in shared))
    return Layout(boxes, tuple(labels), squares, square, zoom)
