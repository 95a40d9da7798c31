"""The numbers in a slot, as text: a few digits, a few rows, and what the slot is."""

from __future__ import annotations

import math

import numpy as np

from flashviz.recording import Content
from flashviz.slots import Slot, shape_text

MOST = 8


def number(x: float) -> str:
    """Three decimals, so that columns line up; -inf and NaN by name.

    >>> number(0.5), number(-np.inf), number(12345.678)
    ('0.500', '-inf', '1.23e+04')
    """
    if not np.isfinite(x):
        return str(float(x))
    return f"{x:.3f}" if abs(x) < 1000 else f"{x:.2e}"


def short(x: float, digits: int = 4) -> str:
    """So many significant digits and no more than needed: for numbers that stand alone.

    >>> short(3.5), short(0.22313), short(-np.inf), short(1.0)
    ('3.5', '0.2231', '-inf', '1')
    """
    return f"{float(x):.{digits}g}"


def rows_of(array: np.ndarray) -> list[list[str]]:
    """Up to 8 × 8 numbers as text, with an ellipsis where rows or columns are left out; vectors are one column."""
    table = array.reshape(1, 1) if array.ndim == 0 else array.reshape(array.shape[0], math.prod(array.shape[1:]))
    rows = [[number(float(x)) for x in row[:MOST]] + ["…"] * (len(row) > MOST) for row in table[:MOST]]
    return [*rows, ["…"]] if len(table) > MOST else rows


def hover_text(slot: Slot, content: Content | None) -> str:
    """What a slot is and holds: shown when it is pointed at, and read by screen readers."""
    head = f"{slot.name}: {shape_text(slot.shape)} {slot.dtype}, {slot.nbytes:,} bytes of {slot.memory}"
    if content is None:
        return f"{head}\nempty"
    more = [f"holds {content.label}"] if content.label and content.label != slot.name else []
    more += ["computed from an earlier tile"] if content.stale else []
    if content.values is not None:
        more += ["  ".join(row) for row in rows_of(content.values.array)]
    return "\n".join([head, *more])
