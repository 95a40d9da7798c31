"""fv.traffic_plot: one row a run, reads to the right and writes to the left, in the picture's hues."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from matplotlib.colors import to_hex
from view.pictures import attention

import flashviz as fv
from flashviz.view.palette import HUES


def test_bars_are_the_counted_bytes() -> None:
    run = attention()
    counted = fv.traffic(run)
    axes = fv.traffic_plot(run).axes[0]
    widths = [bar.get_width() for bar in axes.patches]
    assert sum(w for w in widths if w > 0) == counted.bytes_read
    assert -sum(w for w in widths if w < 0) == counted.bytes_written
    ends = sorted((bar.get_x() + min(bar.get_width(), 0), abs(bar.get_width())) for bar in axes.patches)
    assert ends[0][0] == -counted.bytes_written
    assert all(left + size == right for (left, size), (right, _) in itertools.pairwise(ends))  # side by side
    fills = {to_hex(bar.get_facecolor()) for bar in axes.patches}
    assert fills == {HUES[name].light for name in "QKVOl"}


def test_rows_are_named_and_bad_names_refused() -> None:
    run = attention()
    axes = fv.traffic_plot(run, run, names=["a", "b"]).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    with pytest.raises(ValueError, match="1 names for 2 runs"):
        fv.traffic_plot(run, run, names=["a"])
    with pytest.raises(ValueError, match="at least one run"):
        fv.traffic_plot()
    assert np.isfinite(axes.get_xlim()).all()
