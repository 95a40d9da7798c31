"""Standard attention: three kernels that hold S and P in HBM (algorithms.md; arXiv 2205.14135, Algorithm 0)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def model(params: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Elements by tensor: S and P are written and read back whole, whatever the tiles.

    With ``Br``, K and V cross once for each row block, as in a recording; without, every matrix crosses once.
    """
    Nq, Nk, d = (int(params[name]) for name in ("Nq", "Nk", "d"))
    heads = int(params.get("B", 1)) * int(params.get("Hq", 1))
    scores = heads * Nq * Nk
    kv = heads * Nk * d * -(-Nq // int(params.get("Br", Nq)))
    return {
        "Q": (heads * Nq * d, 0),
        "K": (kv, 0),
        "V": (kv, 0),
        "S": (scores, scores),
        "P": (scores, scores),
        "O": (0, heads * Nq * d),
    }
