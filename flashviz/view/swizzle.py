"""A swizzle as a permutation, row by row: where the 16-byte pieces of a tile go in shared memory, as a matplotlib figure."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from flashviz.view.figure import Figure
from flashviz.view.palette import GROUND, TEXT, Hue, hue_of, text_on
from flashviz.warp import BANKS, CHUNK, WORD, chunk_address, wavefronts

ROWS = 8
"""The pattern of 128 bytes repeats after eight rows; of narrower rows, after the rows that fill 1024 bytes."""
LINE_BYTES = BANKS * WORD
PANEL, CELL, SIDE, GAP, HEAD, FOOT, WAYS = 3.4, 0.3, 0.45, 0.6, 0.75, 1.0, 1.3
"""In inches: width of a panel, height of a line, room at the sides, between the panels, above and below; height of a row's ways."""


def swizzle(row: int | None = None, *, chunk: int = 2, d: int = 64, name: str = "K") -> Figure:
    """A tile of 16-bit floats as it is in HBM, left, and as the copy engine lays it into shared memory, right: 16 bytes a box.

    Every piece keeps its line of 128 bytes and changes its place in it: piece c of row r goes to place c xor (r mod 8). Rows of 64 or 32
    bytes share a line, and their numbers count by twos or fours. Step through the rows with
    ``row``: its pieces are dark on both sides, and below lines lead them to their places. Without one, the
    pieces ``chunk`` of all rows are dark: one below the other on the left, in different banks on the right.

    Args:
        row: whose pieces are followed, 0 to the last of the pattern; None for a column.
        chunk: the column that is dark where there is no row, 0 to d / 8 - 1.
        d: columns, 64, 32 or 16: the swizzles of 128, 64 and 32 bytes.
        name: what the tile is of; its hue.

    Raises:
        ValueError: another d, or a row or chunk that is not there.

    >>> swizzle(5)
    <Figure size 830x565 with 3 Axes>
    """
    if d not in (16, 32, 64):
        raise ValueError(f"d={d!r}: a row of 64, 32 or 16 elements is swizzled in 128, 64 or 32 bytes")
    chunks = d // 8
    rows = ROWS * 8 // chunks
    if row is not None and row not in range(rows):
        raise ValueError(f"row={row!r}: the pattern has rows 0 to {rows - 1}")
    if chunk not in range(chunks):
        raise ValueError(f"chunk={chunk!r}: rows of {d} have chunks 0 to {chunks - 1}")
    foot = FOOT + (WAYS + 0.2 if row is not None else 0)
    width, height = 2 * SIDE + 2 * PANEL + GAP, HEAD + foot + CELL * ROWS
    figure = Figure(figsize=(width, height), dpi=100, facecolor=GROUND)
    for n, (layout, title) in enumerate((("plain", f"{name} as in HBM"), ("swizzled", "in shared memory"))):
        box = ((SIDE + n * (PANEL + GAP)) / width, foot / height, PANEL / width, CELL * ROWS / height)
        axes = figure.add_axes(box)
        _draw(axes, layout, row, chunk, d, hue_of(name))
        addresses = [chunk_address(r, chunk, d, layout) for r in range(ROWS)]
        passes = wavefronts(addresses, CHUNK)
        said = f"{title}" if row is not None else f"{title}: {passes} {'pass' if passes == 1 else 'passes'}"
        axes.set_title(said, fontsize=11, color=TEXT, pad=20)
    if row is not None:
        band = figure.add_axes((0.25, 0.75 / height, 0.5, WAYS / height))
        _ways(band, row, d, hue_of(name))
    said = said_of(row, d) if row is not None else f"piece {chunk} of every row, as one ldmatrix or wgmma reads it"
    figure.text(0.5, 0.45 / height, said, ha="center", va="center", fontsize=10, color=TEXT, family="monospace")
    return figure


def said_of(row: int, d: int = 64) -> str:
    """The permutation of a row's pieces in words: which piece is at each place, and the number that turns one into the other.

    >>> said_of(5)
    'row 5: piece c goes to place c xor 101, so 0 1 2 3 4 5 6 7 lie at 5 4 7 6 1 0 3 2'
    """
    chunks = d // 8
    places = [chunk_address(row, c, d, "swizzled") % (2 * d) // CHUNK for c in range(chunks)]
    digits = (chunks - 1).bit_length()
    pieces = " ".join(map(str, range(chunks)))
    return f"row {row}: piece c goes to place c xor {places[0]:0{digits}b}, so {pieces} lie at {' '.join(map(str, places))}"


def _ways(axes: Axes, row: int, d: int, hue: Hue) -> None:
    """The pieces of a row above, their places below, and a line from each to its own."""
    chunks = d // 8
    for c in range(chunks):
        to = chunk_address(row, c, d, "swizzled") % (2 * d) // CHUNK
        axes.plot([c + 0.5, to + 0.5], [1, 3], color=hue.outline, linewidth=1.2, gid=f"way.{c}")
        for x, y in ((c, 0), (to, 3)):
            axes.add_patch(
                Rectangle((x, y), 1, 1, facecolor=hue.outline, edgecolor=GROUND, linewidth=0.8, clip_on=False)
            )
            place = (x + 0.5, y + 0.53)
            axes.text(*place, f"{row}.{c}", ha="center", va="center", fontsize=8, color=text_on(hue.outline))
    axes.set_xlim(0, chunks)
    axes.set_ylim(4, 0)
    axes.set_axis_off()


def _place(row: int, chunk: int, d: int, layout: str) -> tuple[int, int]:
    """Column and line of a piece, in pieces of 16 bytes and lines of 128."""
    at = chunk_address(row, chunk, d, layout)
    return at % LINE_BYTES // CHUNK, at // LINE_BYTES


def _draw(axes: Axes, layout: str, row: int | None, chunk: int, d: int, hue: Hue) -> None:
    for r in range(ROWS * 64 // d):
        for c in range(d // 8):
            dark = r == row if row is not None else c == chunk and r < ROWS
            fill = hue.outline if dark else hue.light
            x, y = _place(r, c, d, layout)
            axes.add_patch(Rectangle((x, y), 1, 1, facecolor=fill, edgecolor=hue.outline, linewidth=0.8, clip_on=False))
            axes.text(x + 0.5, y + 0.53, f"{r}.{c}", ha="center", va="center", fontsize=8, color=text_on(fill))
    axes.set_xlim(0, LINE_BYTES // CHUNK)
    axes.set_ylim(ROWS, 0)
    axes.set_yticks([])
    axes.xaxis.tick_top()
    axes.set_xticks(
        [n + 0.5 for n in range(8)], [f"{4 * n}–{4 * n + 3}" if layout == "swizzled" else str(n) for n in range(8)]
    )
    axes.set_xlabel("banks" if layout == "swizzled" else "piece of 128 bytes", fontsize=9, color=TEXT, labelpad=3)
    axes.tick_params(length=0, labelsize=8, colors=TEXT)
    for side in axes.spines.values():
        side.set_visible(False)
