"""FlashAttention-2 (arXiv 2307.08691): Q, O and L cross once, K and V once for each row block; nothing is read back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def model(params: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Elements by tensor. Causal row blocks stop at the last key tile that one of their rows sees."""
    Nq, Nk, d, Br, Bc = (int(params[name]) for name in ("Nq", "Nk", "d", "Br", "Bc"))
    heads = int(params.get("B", 1)) * int(params.get("Hq", 1))
    keys = 0
    for i in range(-(-Nq // Br)):
        last = min((i + 1) * Br, Nq) + Nk - Nq if params.get("causal") else Nk
        keys += min(-(-min(max(last, 0), Nk) // Bc) * Bc, Nk)
    kv = heads * keys * d
    return {"Q": (heads * Nq * d, 0), "K": (kv, 0), "V": (kv, 0), "O": (0, heads * Nq * d), "L": (0, heads * Nq)}
