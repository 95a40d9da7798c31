"""FlashAttention-2 (arXiv 2307.08691): Q, O and L cross once, K and V once for each row block; nothing is read back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashviz.sight import Sight
from flashviz.slots import itemsize_of


def model(params: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Elements by tensor. Row blocks visit only the key tiles that one of their rows sees; of the last one, the used rows."""
    Nq, d, Br, Bc = (int(params[name]) for name in ("Nq", "d", "Br", "Bc"))
    heads = int(params.get("B", 1)) * int(params.get("Hq", 1))
    sight = Sight.of(params)
    visited = sum(min(t.stop * Bc, sight.keys) - t.start * Bc for t in sight.tiles(Br, Bc) if t)
    kv = heads * visited * d
    return {"Q": (heads * Nq * d, 0), "K": (kv, 0), "V": (kv, 0), "O": (0, heads * Nq * d), "L": (0, heads * Nq)}


def itemsizes(params: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of an element: on the rungs of 16 bits Q, K, V and O have two. L is float32 everywhere."""
    return dict.fromkeys("QKVO", itemsize_of(str(params.get("dtype", "float32"))))
