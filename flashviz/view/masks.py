"""Who sees whom: the cells of scores, one for each query and key, as a matplotlib figure in the picture's hues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from flashviz.recording import as_recording
from flashviz.sight import Sight
from flashviz.view.figure import Figure
from flashviz.view.palette import GROUND, HATCH, HUES, TEXT

CELL, MARGIN, MOST = 0.3, 0.75, 40


def mask_plot(*masks: Any, names: Sequence[str] | None = None) -> Figure:
    """Queries down, keys across: a cell is filled where the query sees the key, hatched where the score is made and masked.

    Tiles are outlined; one that is never loaded stays empty. A dark frame marks the bottom right corner of the used
    scores, where a causal mask is anchored.

    Args:
        masks: for each panel a run or a recording, or sizes by name (Nq, Nk, Br, Bc, causal, window, kv_len; Br and Bc
            are all of them when not given), or a boolean array [Nq, Nk], True where the query sees the key.
        names: what to call the panels; their sizes when not given.

    Raises:
        ValueError: no panel, another number of names, or more than 40 queries or keys.

    >>> mask_plot({"Nq": 2, "Nk": 5, "causal": True}, {"Nq": 5, "Nk": 2, "causal": True})
    <Figure size 420x285 with 2 Axes>
    """
    panels = [_panel(mask) for mask in masks]
    if not panels:
        raise ValueError("mask_plot needs at least one mask")
    labels = list(names) if names is not None else [f"Nq = {p.shape[0]}, Nk = {p.shape[1]}" for p, _, _ in panels]
    if len(labels) != len(panels):
        raise ValueError(f"{len(labels)} names for {len(panels)} masks: give one each")
    sizes = [p.shape for p, _, _ in panels]
    if max(max(s) for s in sizes) > MOST:
        raise ValueError(f"{max(max(s) for s in sizes)} queries or keys: mask_plot draws up to {MOST}")
    widths = [CELL * max(columns, 4) + MARGIN for _, columns in sizes]
    height = CELL * max(rows for rows, _ in sizes) + 1.35
    figure = Figure(figsize=(sum(widths), height), dpi=100, facecolor=GROUND)
    left = 0.0
    for (seen, tiles, corner), label, width in zip(panels, labels, widths, strict=True):
        rows, columns = seen.shape
        at = (left + (width - CELL * columns) / 2) / sum(widths), 1 - (0.75 + CELL * rows) / height
        axes = figure.add_axes((*at, CELL * columns / sum(widths), CELL * rows / height))
        _draw(axes, seen, tiles, corner)
        axes.set_title(label, fontsize=10, color=TEXT, pad=18)
        left += width
    return figure


Tiles = tuple[int, int, list[range]]


def _panel(mask: Any) -> tuple[np.ndarray, Tiles, tuple[int, int] | None]:
    """Who sees whom, the tiles (Br, Bc and those visited), and the corner (row, column), None where there is none."""
    if isinstance(mask, (np.ndarray, list)):
        seen = np.asarray(mask, dtype=bool)
        rows, columns = seen.shape
        return seen, (rows, columns, [range(1)]), None
    params: Mapping[str, Any] = mask if isinstance(mask, Mapping) else as_recording(mask).params
    sight = Sight.of(params)
    rows, columns = sight.Nq, int(params["Nk"])
    Br, Bc = int(params.get("Br", rows)), int(params.get("Bc", columns))
    seen = np.array([[k in sight.keys_of(q) for k in range(columns)] for q in range(rows)])
    return seen, (Br, Bc, sight.tiles(Br, Bc)), (rows - 1, sight.keys - 1)


def _draw(axes: Axes, seen: np.ndarray, tiles: Tiles, corner: tuple[int, int] | None) -> None:
    hue, (Br, Bc, visited), (rows, columns) = HUES["S"], tiles, seen.shape
    for q in range(rows):
        for k in range(columns):
            if seen[q, k]:
                axes.add_patch(Rectangle((k, q), 1, 1, facecolor=hue.light, edgecolor=hue.outline, linewidth=0.6))
            elif k // Bc in visited[q // Br]:
                axes.add_patch(Rectangle((k, q), 1, 1, facecolor=GROUND, edgecolor=HATCH, hatch="////", linewidth=0.6))
    for i in range(len(visited)):
        for j in range(-(-columns // Bc)):
            w, h = min(Bc, columns - j * Bc), min(Br, rows - i * Br)
            axes.add_patch(Rectangle((j * Bc, i * Br), w, h, fill=False, edgecolor=hue.outline, linewidth=1.3))
    if corner is not None and corner[1] >= 0:
        axes.add_patch(Rectangle((corner[1], corner[0]), 1, 1, fill=False, edgecolor=TEXT, linewidth=2.2, zorder=3))
    axes.set_xlim(0, columns)
    axes.set_ylim(rows, 0)
    every = 1 if max(rows, columns) <= 20 else 4
    for axis, count in ((axes.xaxis, columns), (axes.yaxis, rows)):
        axis.set_ticks(np.arange(0, count, every) + 0.5, [str(n) for n in range(0, count, every)], fontsize=8)
    axes.xaxis.tick_top()
    axes.tick_params(length=0, colors=TEXT)
    axes.set_xlabel("keys", fontsize=9, color=TEXT)
    axes.set_ylabel("queries", fontsize=9, color=TEXT)
    for side in axes.spines.values():
        side.set_edgecolor(hue.outline)
