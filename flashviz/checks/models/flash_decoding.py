"""Flash decoding: q once for each split, K and V once for all query heads that share them, the partials out and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashviz.sight import Sight
from flashviz.slots import itemsize_of


def model(params: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Elements by tensor. A split that gets no tile still reads its q and writes O = 0 and L = -inf."""
    Nq, d, splits = (int(params[name]) for name in ("Nq", "d", "splits"))
    B, Hq, Hkv = (int(params.get(name, 1)) for name in ("B", "Hq", "Hkv"))
    rows = B * Hq * Nq
    sight = Sight.of(params)
    first = sight.keys_of(0).start
    Bc = int(params["Bc"]) if first else 1  # only a window leaves tiles out at the front
    loaded = max(sight.keys - first // Bc * Bc, 0)
    kv = B * Hkv * loaded * d
    partial = splits * rows
    if int(params.get("rung", 0)):  # its ladder: with one split no partials; rung 1 reads K and V for every query
        kv = B * int(params["columns"]) * loaded * d
        partial = 0 if splits == 1 else partial
    return {
        "Q": (splits * rows * d, 0),
        "K": (kv, 0),
        "V": (kv, 0),
        "Os": (partial * d, partial * d),
        "Ls": (partial, partial),
        "O": (0, rows * d),
        "L": (0, rows),
    }


def itemsizes(params: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of an element: on the rungs of 16 bits Q, K, V and O have two. Partials and L are float32 everywhere."""
    return dict.fromkeys("QKVO", itemsize_of(str(params.get("dtype", "float32"))))
