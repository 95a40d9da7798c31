"""FlashAttention-3 (arXiv 2407.08608): Q, O and L cross once, K and V once for each row block; a row block loads at least one tile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashviz.slots import itemsize_of


def model(params: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Elements by tensor. Row blocks end with the last consumer's share of rows; one that sees no key loads the first tile all the same."""
    Nq, Nk, d, Br, Bc = (int(params[name]) for name in ("Nq", "Nk", "d", "Br", "Bc"))
    share = Br // int(params["consumers"])
    heads = int(params.get("B", 1)) * int(params.get("Hq", 1))
    visited = 0
    for row in range(-(-Nq // share) * share, 0, -Br):
        seen = min(Nk, row + Nk - Nq) if params.get("causal") else Nk
        visited += min(max(1, -(-seen // Bc)) * Bc, Nk)
    kv = heads * visited * d
    return {"Q": (heads * Nq * d, 0), "K": (kv, 0), "V": (kv, 0), "O": (0, heads * Nq * d), "L": (0, heads * Nq)}


def itemsizes(params: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of an element: two of Q, K, V and O. L is float32."""
    return dict.fromkeys("QKVO", itemsize_of(str(params.get("dtype", "float16"))))
