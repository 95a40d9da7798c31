"""FlashAttention-1 (arXiv 2205.14135): K, V cross once; Q, and O, m, l both ways, once for every K, V tile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashviz.sight import Sight


def model(params: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Elements by tensor, of the loops. Causal row blocks meet only the key tiles that one of their rows sees.

    That O, m and l are set in HBM before the loops, Nq·(d + 2) writes a head, is counted apart.
    """
    Nq, d, Br, Bc = (int(params[name]) for name in ("Nq", "d", "Br", "Bc"))
    heads = int(params.get("B", 1)) * int(params.get("Hq", 1))
    sight = Sight.of(params)
    visited = sight.tiles(Br, Bc)
    rows = 0  # rows of Q that arrive: Tc · Nq where nothing is masked
    for i, tiles in enumerate(visited):
        rows += (min((i + 1) * Br, Nq) - i * Br) * len(tiles)
    loaded = max(sight.keys - visited[0].start * Bc, 0)
    kv, carry, output = heads * loaded * d, heads * rows, heads * rows * d
    return {
        "Q": (output, 0),
        "K": (kv, 0),
        "V": (kv, 0),
        "O": (output, output),
        "m": (carry, carry),
        "l": (carry, carry),
    }
