"""What crossed HBM, as a matplotlib figure in the picture's hues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.ticker import EngFormatter

from flashviz.checks.traffic import traffic
from flashviz.recording import as_recording
from flashviz.view.facts import hues_of
from flashviz.view.figure import Figure
from flashviz.view.palette import GROUND, TEXT


def traffic_plot(*runs: Any, names: Sequence[str] | None = None) -> Figure:
    """Bytes that crossed HBM, one row a run, one piece a tensor: reads to the right of the axis, writes to the left.

    Args:
        runs: runs or recordings.
        names: what to call them; their algorithms when not given.

    >>> import numpy as np, flashviz as fv
    >>> x = np.eye(4, dtype="float32")
    >>> traffic_plot(fv.flash_attention_2(x, x, x, Br=2, Bc=2, device="numpy"))
    <Figure size 800x180 with 1 Axes>
    """
    recordings = [as_recording(run) for run in runs]
    if not recordings:
        raise ValueError("traffic_plot needs at least one run")
    labels = list(names) if names is not None else [r.algorithm.replace("_", " ") for r in recordings]
    if len(labels) != len(recordings):
        raise ValueError(f"{len(labels)} names for {len(recordings)} runs: give one each")
    figure = Figure(figsize=(8, 1.2 + 0.6 * len(recordings)), dpi=100, facecolor=GROUND, layout="constrained")
    axes = figure.add_subplot()
    for row, recording in enumerate(recordings):
        counted = traffic(recording)
        hues = hues_of(recording)
        for way in (1, -1):
            left = 0.0
            for tensor, count in counted.tensors.items():
                size = count.bytes_read if way > 0 else count.bytes_written
                if not size:
                    continue
                hue = hues[tensor]
                bar: dict[str, Any] = {"height": 0.62, "color": hue.light, "edgecolor": hue.outline, "linewidth": 1.1}
                axes.barh(row, way * size, left=left, **bar)
                middle = left + way * size / 2
                axes.text(middle, row, tensor, ha="center", va="center", fontsize=10, color=TEXT, clip_on=True)
                left += way * size
    axes.axvline(0, color=TEXT, linewidth=1)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("bytes written to HBM  ←  →  bytes read from HBM")
    unit = EngFormatter(unit="B")
    axes.xaxis.set_major_formatter(lambda x, _: unit(abs(x)))
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(left=False)
    return figure
