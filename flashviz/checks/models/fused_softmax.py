"""Softmax(x) V in one pass: every row reads x and V once and writes o; nothing is read back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def model(params: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Elements by tensor. Each row has a block of its own, which reads the whole of V."""
    R, N, D = int(params.get("R", 1)), int(params["N"]), int(params["D"])
    return {"x": (R * N, 0), "V": (R * N * D, 0), "o": (0, R * D)}
