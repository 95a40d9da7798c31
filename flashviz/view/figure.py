"""A matplotlib figure that a notebook shows by itself, whether or not pyplot or ``%matplotlib inline`` was ever loaded."""

from __future__ import annotations

import io

import matplotlib.figure


class Figure(matplotlib.figure.Figure):
    """matplotlib's own Figure, which also knows its PNG: a cell's last line is enough to see it."""

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self.savefig(out, format="png", dpi=self.dpi, metadata={"Software": None})
        return out.getvalue()
