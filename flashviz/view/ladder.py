"""The ladder as a matplotlib figure: every rung under the roofline, and its rate beside the others'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flashviz.view.figure import Figure
from flashviz.view.palette import GROUND, HUES, OTHERS, STALE, TEXT

PREFILL, DECODE, PEER = HUES["O"], HUES["K"], OTHERS[5]
POINTS = 380  # of the roofline's height, about
OVER = {"facecolor": GROUND, "edgecolor": "none", "pad": 0.2}  # under a label that a line may cross


def ladder_plot(found: Any, *, d: int = 128, N: int | None = None, causal: bool = False) -> Figure:
    """Rates of the ladder's rungs, and of PyTorch's attention, against what the machine can do at most.

    Left, the roofline: the rate of computing over operations a byte, both axes logarithmic. Under the slope, a device copy, the bytes
    decide, as in decoding; under a flat roof, the library's matrix product, the units that compute. Right, the same rates as bars.

    Args:
        found: what `bench` gave, or ``fv.measured("ladder")``.
        d, N, causal: which problem of prefill is drawn; of decoding the longest with this d. N is 4096 where that was measured.
    """
    rows = list(found.rows)
    prefill = _problem([r for r in rows if r["ladder"] == "prefill" and r["causal"] == causal], d, N or 4096)
    decode = _problem([r for r in rows if r["ladder"] == "decode" and r["Hq"] == r["Hkv"]], d, N=None)
    figure = Figure(figsize=(11, 6.2), dpi=100, facecolor=GROUND, layout="constrained")
    spaces = figure.add_gridspec(2, 2, width_ratios=(1, 1), height_ratios=(max(1, len(prefill)), max(1, len(decode))))
    _roofline(figure.add_subplot(spaces[:, 0]), found.data, prefill, decode)
    for place, chosen, unit, hue in ((0, prefill, "TFLOP/s", PREFILL), (1, decode, "TB/s", DECODE)):
        axes = figure.add_subplot(spaces[place, 1])
        _bars(axes, chosen, unit, hue)
    figure.suptitle(f"Measured on {found.where}", fontsize=10, color=TEXT, x=0.01, ha="left")
    return figure


def _problem(rows: Sequence[dict[str, Any]], d: int, N: int | None) -> list[dict[str, Any]]:
    """The rows of one problem: of the wanted d and N where there are any, else of the longest that was measured."""
    timed = [row for row in rows if "ms" in row]
    for name, wanted in (("d", d), ("N", N)):
        if any(row[name] == wanted for row in timed):
            timed = [row for row in timed if row[name] == wanted]
    if not timed:
        return []
    last = max(timed, key=lambda row: (row["N"], row["d"], -row["B"]))
    return [row for row in timed if all(row[name] == last[name] for name in ("N", "d", "B"))]


def _roofline(
    axes: Any, data: dict[str, Any], prefill: Sequence[dict[str, Any]], decode: Sequence[dict[str, Any]]
) -> None:
    copy = data["copy TB/s"]
    rates = {dtype: rate for dtype, rate in data["rates"].items() if rate}
    points = [*prefill, *decode]
    reach = [row["flop"] / row["bytes"] for row in points] or [1.0, 1000.0]
    x = np.geomspace(min(reach) / 500, max(reach) * 3000, 200)
    top = max(rates.values(), default=copy * float(x[-1]))
    axes.plot(x, np.minimum(copy * x, top), color=TEXT, linewidth=1.6, gid="roof")
    along = x[0] ** 0.25 * (top / copy) ** 0.75
    axes.text(along, copy * along * 1.5, f"copy {copy:.2f} TB/s ", fontsize=8, color=TEXT, ha="right")
    for dtype, rate in rates.items():
        axes.plot(
            x[copy * x > rate], np.full((copy * x > rate).sum(), rate), color=TEXT, linewidth=1.6, gid=f"roof-{dtype}"
        )
        axes.text(x[-1], rate * 1.08, f"{dtype} {rate:.0f} TFLOP/s", fontsize=8, color=TEXT, ha="right")
    lowest = min((row["TFLOP/s"] for row in points), default=top / 1000) / 2
    decades = np.log10(2 * top / lowest)
    for rows, hue in ((prefill, PREFILL), (decode, DECODE)):
        for peer, own in ((True, PEER), (False, hue)):
            those = sorted(
                (row for row in rows if (row["rung"] is None) == peer), key=lambda row: float(row["TFLOP/s"])
            )
            heights = [POINTS / decades * np.log10(row["TFLOP/s"]) for row in those]
            for row, shift in zip(those, spread(heights, 11), strict=True):
                at = row["flop"] / row["bytes"], row["TFLOP/s"]
                marker = "s" if peer else "o"
                axes.plot(*at, marker=marker, markersize=7, color=own.dark, markeredgecolor=own.outline, linestyle="")
                axes.annotate(
                    row["name"].removeprefix("PyTorch "),
                    at,
                    xytext=(-8 if peer else 8, shift),
                    textcoords="offset points",
                    ha="right" if peer else "left",
                    va="center",
                    fontsize=8,
                    color=own.outline,
                    bbox=OVER,
                )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(x[0], x[-1])
    axes.set_ylim(lowest, top * 2)
    axes.set_xlabel("operations a byte that crosses HBM (FLOP / B)")
    axes.set_ylabel("TFLOP/s")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """How far labels at these heights, in order, are shifted so that none is nearer than ``gap`` to the next, half of it down.

    >>> spread([0, 2, 50], 10)
    [-4.0, 4.0, 0.0]
    """
    groups: list[list[float]] = []  # labels that touch; each group is centred where its labels were
    for height in heights:
        groups.append([float(height)])
        while len(groups) > 1 and _edges(groups[-2], gap)[1] > _edges(groups[-1], gap)[0]:
            groups[-2:] = [groups[-2] + groups[-1]]
    placed = [_edges(group, gap)[0] + gap * (n + 0.5) for group in groups for n in range(len(group))]
    return [place - height for place, height in zip(placed, heights, strict=True)]


def _edges(group: Sequence[float], gap: float) -> tuple[float, float]:
    middle = sum(group) / len(group)
    return middle - gap * len(group) / 2, middle + gap * len(group) / 2


def _bars(axes: Any, rows: Sequence[dict[str, Any]], unit: str, hue: Any) -> None:
    ordered = sorted(rows, key=lambda row: row[unit])
    for at, row in enumerate(ordered):
        own = PEER if row["rung"] is None else hue
        axes.barh(at, row[unit], height=0.7, color=own.light, edgecolor=own.outline, linewidth=1.1)
        axes.text(row[unit], at, f" {row[unit]:.3g}", va="center", fontsize=8, color=TEXT)
    axes.set_yticks(range(len(ordered)), [f"{row['name']}, {row['dtype']}" for row in ordered], fontsize=8)
    axes.set_xlim(0, 1.15 * max((row[unit] for row in rows), default=1.0))
    axes.set_xlabel(unit, fontsize=9)
    if rows:
        one = rows[0]
        said = f"{one['ladder']}: B = {one['B']}, {one['Hq']} heads, N = {one['N']:,}, d = {one['d']}"
        axes.set_title(said + (", causal" if one["causal"] else ""), fontsize=9, color=TEXT, loc="left")
    else:
        axes.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axes.transAxes, color=STALE)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(left=False)
