"""FlashAttention-2 with rotated loads: as without, and each row's angles along with Q once and with K for each row block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashviz.checks.models import flash_attention_2


def model(params: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Elements by tensor. A table has half as many columns as elements of a row are rotated, ``rotary_dim`` (d when not given)."""
    elements = flash_attention_2.model(params)
    d = int(params["d"])
    pairs = int(params.get("rotary_dim", d)) // 2
    q, k = (elements[name][0] // d * pairs for name in ("Q", "K"))
    return {**elements, "cq": (q, 0), "sq": (q, 0), "ck": (k, 0), "sk": (k, 0)}
