"""Write the moving picture of the README: FlashAttention-2 on 2 x 2 tiles, as flashviz itself saves it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import flashviz as fv

TARGET = Path(__file__).resolve().parent.parent / "docs" / "flash_attention_2.svg"

if __name__ == "__main__":
    rng = np.random.default_rng(26)
    Q, K, V = (rng.standard_normal((8, 4), dtype=np.float32) for _ in range(3))
    print(fv.save(fv.flash_attention_2(Q, K, V, Br=4, Bc=4, device="numpy"), TARGET).name)
