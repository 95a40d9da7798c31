"""What an autotuner tried, as a matplotlib figure: a bar for each candidate, the fastest on top, and why the others have none."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from flashviz.view.figure import Figure
from flashviz.view.palette import GROUND, HUES, STALE, TEXT

MOST = 24


def autotune_plot(found: Any, most: int = MOST) -> Figure:
    """The candidates of an autotuner's run.

    Args:
        found: what `autotune` gave, or `measured` figures of one.
        most: how many candidates are drawn at most, the slowest are left out first.

    >>> from flashviz.measurements import Measured
    >>> rows = [{"values": {"Br": 64}, "milliseconds": 1.5, "reason": ""},
    ...         {"values": {"Br": 128}, "milliseconds": None, "reason": "too much shared memory", "skipped": True}]
    >>> autotune_plot(Measured("autotune", "no machine", {"rows": rows, "kernel": "k"}))
    <Figure size 800x230 with 1 Axes>
    """
    rows = list(found.rows)
    timed = [row for row in rows if row["milliseconds"] is not None]
    without = [row for row in rows if row["milliseconds"] is None]
    shown = timed[: max(1, most - min(len(without), most // 3))]
    shown += without[: most - len(shown)]
    figure = Figure(
        figsize=(8, 1.3 + 0.5 * min(2, len(shown)) + 0.3 * max(0, len(shown) - 2)),
        dpi=100,
        facecolor=GROUND,
        layout="constrained",
    )
    axes = figure.add_subplot()
    best, other = HUES["O"], HUES["K"]
    for at, row in enumerate(shown):
        taken = row["milliseconds"]
        if taken is None:
            said = ("skipped: " if row.get("skipped") else "rejected: ") + row["reason"]
            axes.text(0, at, " " + textwrap.shorten(said, 95, placeholder=" …"), va="center", fontsize=8, color=STALE)
            continue
        hue = other if at else best
        axes.barh(at, taken, height=0.7, color=hue.light, edgecolor=hue.outline, linewidth=1.1)
        axes.text(taken, at, f" {taken:.4g} ms", va="center", fontsize=9, color=TEXT)
    axes.set_yticks(range(len(shown)), [_label(row["values"]) for row in shown], fontsize=9)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, 1.2 * max((row["milliseconds"] for row in timed), default=1.0))
    axes.set_xlabel(
        "milliseconds" + (f"; {len(rows) - len(shown)} more are not drawn" if len(rows) > len(shown) else "")
    )
    kernel = getattr(found, "kernel", None) or found.data["kernel"]
    axes.set_title(f"{kernel}, on {found.where}", fontsize=10, color=TEXT, loc="left")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(left=False)
    return figure


def _label(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items()) or "as it is"
