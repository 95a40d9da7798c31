"""Rotary embedding: x in and O out once; each row's cosines and sines once for every head and batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def model(params: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Elements by tensor. A table has half as many columns as elements of a row are rotated, ``rotary_dim`` (d when not given)."""
    N, d = int(params["N"]), int(params["d"])
    rows = int(params.get("B", 1)) * int(params.get("H", 1)) * N
    table = rows * (int(params.get("rotary_dim", d)) // 2)
    return {"x": (rows * d, 0), "cos": (table, 0), "sin": (table, 0), "O": (0, rows * d)}
