"""Which lane holds which element of a tensor core's operands, as a matplotlib figure in the picture's hues."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from flashviz.view.figure import Figure
from flashviz.view.palette import GROUND, TEXT, Hue, hue_of, text_on
from flashviz.warp import LANES, SHAPES, Fragment, fragment

CELL, GAP, MARGIN, TOP = 0.29, 0.75, 0.45, 0.55
"""In inches: a cell, between the operands, at the sides, above each operand."""
WARPGROUPS, SMALL, LINE = ("m64n8k16", "m64n16k16"), 0.165, 0.165
"""The shapes of a warpgroup that are drawn; in inches: a cell of theirs, a line of text."""


def fragments(lane: int | None = 5, *, shape: str = "m16n8k16", names: Sequence[str] = ("Q", "Kᵀ", "S")) -> Figure:
    """The three operands of one product of a warp, d += a b: in each cell the number of the lane that holds the element.

    a is on the left, b above d on the right, as in a product on paper. Heavy lines part what different registers hold; what stands
    beside a block is the register.

    Args:
        lane: its elements are dark; None for no lane.
        shape: ``"m16n8k16"``, for 16-bit floats, or ``"m16n8k8"``, for TF32. With ``"m64n8k16"`` or ``"m64n16k16"``, the product of a
            warpgroup's 128 threads, of which ``lane`` is one: its b is in shared memory and not drawn, and two neighbours of a row, which
            one thread holds, share a box. Wider ones go on the same way.
        names: what a, b and d are here; hues go by their first letters.

    Raises:
        ValueError: no such shape or lane, or not three names.

    >>> fragments(5)
    <Figure size 861x1083 with 3 Axes>
    """
    wide = shape in WARPGROUPS
    if shape not in SHAPES and not wide:
        raise ValueError(f"shape={shape!r} is none of {', '.join((*SHAPES, *WARPGROUPS))}")
    if lane is not None and lane not in range(128 if wide else 32):
        raise ValueError(f"lane={lane!r}: a {'warpgroup has threads 0 to 127' if wide else 'warp has lanes 0 to 31'}")
    if len(names) != 3:
        raise ValueError(f"{len(names)} names: give one for each of a, b and d")
    if wide:
        return _warpgroup(lane, shape, names)
    a, b, d = (fragment(operand, shape) for operand in "abd")
    width = 2 * MARGIN + GAP + CELL * (a.shape[1] + d.shape[1])
    height = MARGIN + 2 * TOP + CELL * (b.shape[0] + d.shape[0])
    figure = Figure(figsize=(width, height), dpi=100, facecolor=GROUND)
    right, below = MARGIN + CELL * a.shape[1] + GAP, MARGIN
    above = below + CELL * d.shape[0] + TOP
    for found, name, x, y in ((a, names[0], MARGIN, below), (b, names[1], right, above), (d, names[2], right, below)):
        rows, columns = found.shape
        axes = figure.add_axes((x / width, y / height, CELL * columns / width, CELL * rows / height))
        _draw(axes, found, hue_of(name[0]), lane)
        axes.set_title(
            f"{name}   {rows} × {columns}, {found.registers} registers a lane", fontsize=10, color=TEXT, pad=14
        )
    if lane is not None:
        lines = [f"lane {lane} = 4 · {lane // 4} + {lane % 4} holds", ""]
        for found, name in zip((a, b, d), names, strict=True):
            lines += [*held(found, name, lane), ""]
        figure.text(
            MARGIN / width, 1 - MARGIN / height, "\n".join(lines), ha="left", va="top", fontsize=9.5, color=TEXT
        )
    return figure


def _warpgroup(lane: int | None, shape: str, names: Sequence[str]) -> Figure:
    """a and d of a warpgroup's product side by side, and what a thread holds above them."""
    a, d = fragment("a", shape), fragment("d", shape)
    both = ((a, names[0]), (d, names[2]))
    lists = [[] if lane is None else held(found, name, lane) for found, name in both]
    said = [] if lane is None else [f"thread {lane} = 32 · {lane // 32} + 4 · {lane % 32 // 4} + {lane % 4} holds"]
    said.append(f"{names[1]} (b) is read from shared memory")
    below = LINE * (max(map(len, lists)) + 1) + TOP
    head = LINE * len(said) + below
    right = MARGIN + 1.5 * GAP + SMALL * a.shape[1]
    width = right + GAP / 2 + MARGIN + SMALL * d.shape[1]
    height = MARGIN + SMALL * a.shape[0] + 0.3 + head
    figure = Figure(figsize=(width, height), dpi=100, facecolor=GROUND)
    for (found, name), lines, x in zip(both, lists, (MARGIN, right), strict=True):
        rows, columns = found.shape
        axes = figure.add_axes((x / width, MARGIN / height, SMALL * columns / width, SMALL * rows / height))
        _draw(axes, found, hue_of(name[0]), lane, 7.0, across=2)
        axes.set_title(f"{name}   {rows} × {columns}, {found.registers} registers", fontsize=9.5, color=TEXT, pad=8)
        _write(figure, x, height - 0.3 - LINE * (len(said) + 1), lines)
    _write(figure, MARGIN, height - 0.3, said)
    return figure


def _write(figure: Figure, x: float, y: float, lines: Sequence[str]) -> None:
    """Lines of text from a place on, in inches from the left and from below."""
    width, height = figure.get_size_inches()
    if lines:
        figure.text(x / width, y / height, "\n".join(lines), ha="left", va="top", fontsize=9.5, color=TEXT)


def held(found: Fragment, name: str, lane: int) -> list[str]:
    """A line for each register of a lane: which elements of the operand it holds.

    >>> held(fragment("b"), "K", 5)
    ['b[0] = K[2, 1], K[3, 1]', 'b[1] = K[10, 1], K[11, 1]']
    """
    by_register: dict[int, list[str]] = {}
    for register, _, row, column in found.of_lane(lane):
        by_register.setdefault(register, []).append(f"{name}[{row}, {column}]")
    return [f"{found.name}[{register}] = {', '.join(elements)}" for register, elements in by_register.items()]


def _draw(axes: Axes, found: Fragment, hue: Hue, lane: int | None, size: float = 8.5, across: int = 1) -> None:
    """The operand's cells, ``across`` neighbours of one lane in a box."""
    rows, columns = found.shape
    light = hue.dark if hue.alternates else hue.light
    for r in range(rows):
        for c in range(0, columns, across):
            own = found.lane[r, c] == lane
            fill = hue.outline if own else light if found.lane[r, c] // 4 % 2 == 0 else GROUND
            box = Rectangle((c, r), across, 1, facecolor=fill, edgecolor=hue.outline, linewidth=0.4, clip_on=False)
            axes.add_patch(box)
            ink = text_on(fill)
            text = f"{found.lane[r, c]}"
            axes.text(
                c + across / 2,
                r + 0.53,
                text,
                ha="center",
                va="center",
                fontsize=size,
                color=ink,
                fontweight="bold" if own else None,
            )
    for top, left, tall, wide, label in blocks(found):
        axes.add_patch(
            Rectangle((left, top), wide, tall, fill=False, edgecolor=hue.outline, linewidth=2, clip_on=False)
        )
        x, side = (-0.2, "right") if left == 0 else (columns + 0.2, "left")
        axes.text(x, top + tall / 2, label, ha=side, va="center", fontsize=9, color=TEXT)
    axes.set_xlim(0, columns)
    axes.set_ylim(rows, 0)
    axes.set_axis_off()


def blocks(found: Fragment) -> list[tuple[int, int, int, int, str]]:
    """The rectangles (top, left, height, width) that one register of a warp's lanes holds, or two of d, and their names."""
    each = 2 if found.name == "d" else 1  # d[0] and d[1] are neighbours in a row
    out = []
    for warp in range(int(found.lane.max()) // LANES + 1):
        for n in range(0, found.registers, each):
            mine = (found.register == n) | (found.register == n + each - 1)
            at = np.argwhere(mine & (found.lane // LANES == warp))
            (top, left), (bottom, right) = at.min(0), at.max(0)
            label = "\n".join(f"{found.name}[{n + k}]" for k in range(each))
            out.append((int(top), int(left), int(bottom - top) + 1, int(right - left) + 1, label))
    return out
