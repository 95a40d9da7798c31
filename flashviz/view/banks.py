"""A tile's rows on the 32 banks of shared memory, as a matplotlib figure: which rows of an ldmatrix collide."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from flashviz.view.figure import Figure
from flashviz.view.palette import GROUND, HATCH, TEXT, Hue, hue_of, text_on
from flashviz.warp import BANKS, CHUNK, LAYOUTS, WORD, chunk_address, wavefronts, words_by_bank

ROWS = 8
"""Rows of one of the matrices that ldmatrix reads: eight lanes give their addresses, and one phase serves them."""
PANEL, LINE, BAR, SIDE, HEAD = 2.9, 0.24, 0.75, 0.35, 0.65
"""In inches: width of a panel, height of a line of memory and of the count below it, room at the sides and for titles."""


def banks(chunk: int = 2, *, d: int = 64, layouts: Sequence[str] = LAYOUTS, name: str = "K") -> Figure:
    """Eight rows of a tile of 16-bit floats as they lie in shared memory, a line of 128 bytes (32 banks) below the other.

    Each box is 16 bytes, named by its row and its place in the row. Dark are those that one ldmatrix reads: the same columns of
    eight rows. Below stands how many different words it wants of each bank; the largest is how many passes the read takes.

    Args:
        chunk: which 16 bytes of every row are read, 0 to d / 8 - 1.
        d: columns of the tile.
        layouts: a panel each, of ``"plain"``, ``"padded"`` and ``"swizzled"``.
        name: what the tile is of; its hue.

    Raises:
        ValueError: no such layout or chunk, or a d that the layout cannot have.

    >>> banks()
    <Figure size 1010x431 with 6 Axes>
    """
    if not 0 <= chunk < d // 8:
        raise ValueError(f"chunk={chunk}: rows of {d} have chunks 0 to {d // 8 - 1}")
    if not layouts:
        raise ValueError("banks needs at least one layout")
    lines = (
        max(chunk_address(ROWS - 1, c, d, layout) // (BANKS * WORD) for layout in layouts for c in range(d // 8)) + 1
    )
    width = SIDE + (PANEL + SIDE) * len(layouts)
    height = HEAD + LINE * lines + BAR + 0.75
    figure = Figure(figsize=(width, height), dpi=100, facecolor=GROUND)
    for n, layout in enumerate(layouts):
        x, w = (SIDE + n * (PANEL + SIDE)) / width, PANEL / width
        memory = figure.add_axes((x, 1 - (HEAD + LINE * lines) / height, w, LINE * lines / height))
        wanted = figure.add_axes((x, 0.45 / height, w, BAR / height))
        _draw(memory, wanted, lines, chunk, d, layout, hue_of(name))
    return figure


def _draw(memory: Axes, wanted: Axes, lines: int, chunk: int, d: int, layout: str, hue: Hue) -> None:
    line = BANKS * WORD
    read = [chunk_address(row, chunk, d, layout) for row in range(ROWS)]
    for row in range(ROWS):
        for c in range(d // 8):
            at = chunk_address(row, c, d, layout)
            fill = hue.outline if c == chunk else hue.light
            x, y = at % line // WORD, at // line
            memory.add_patch(Rectangle((x, y), CHUNK // WORD, 1, facecolor=fill, edgecolor=hue.outline, linewidth=0.8))
            memory.text(x + 2, y + 0.53, f"{row}.{c}", ha="center", va="center", fontsize=7.5, color=text_on(fill))
    if layout == "padded":
        for row in range(ROWS):
            at = chunk_address(row, d // 8 - 1, d, layout) + CHUNK
            if at // line < lines:
                place = (at % line // WORD, at // line)
                memory.add_patch(
                    Rectangle(place, CHUNK // WORD, 1, facecolor=GROUND, edgecolor=HATCH, hatch="////", linewidth=0.6)
                )
    passes = wavefronts(read, CHUNK)
    memory.set_title(f"{layout}: {passes} {'pass' if passes == 1 else 'passes'}", fontsize=11, color=TEXT, pad=20)
    memory.set_xlim(0, BANKS)
    memory.set_ylim(lines, 0)
    memory.set_yticks([])
    memory.xaxis.tick_top()
    counts = words_by_bank(read, CHUNK)
    wanted.bar(
        [b + 0.5 for b in range(BANKS)], counts, width=0.9, color=hue.light, edgecolor=hue.outline, linewidth=0.8
    )
    wanted.set_xlim(0, BANKS)
    wanted.set_ylim(0, ROWS)
    wanted.set_yticks([0, 4, 8])
    wanted.set_title("words wanted of each bank", fontsize=8.5, color=TEXT, pad=3)
    wanted.set_xlabel("bank", fontsize=9, color=TEXT, labelpad=1)
    for axes in (memory, wanted):
        axes.set_xticks([b + 0.5 for b in range(0, BANKS, 4)], [str(b) for b in range(0, BANKS, 4)])
        axes.tick_params(length=0, labelsize=8, colors=TEXT)
        for side in axes.spines.values():
            side.set_edgecolor(hue.outline)
