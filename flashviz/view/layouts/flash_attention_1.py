"""FlashAttention-1: Q, K, V, O and the carries m and l in HBM; one block's Qi, Kj, Sij, Vj, mi, li and Oi on the chip."""

from __future__ import annotations

from flashviz.recording import Recording
from flashviz.slots import Block
from flashviz.view.layout import Layout, bands


def layout(recording: Recording, block: Block, launch: int = 0) -> Layout:
    """Places from the tile counts; FlashAttention-2's, with m and l in HBM beside O in place of L."""
    return bands(
        recording,
        block,
        launch,
        columns=["Q", "K", "V", "O", "m", "l"],
        slots=["Qi", "Kj", "Sij", "Vj", "mi", "li", "Oi"],
        widths={"m": 0.25, "l": 0.25, "mi": 0.25, "li": 0.25, "Sij": 1.2},
        cells=["Sij"],
        kv=("K", "V"),
        map_tiles=True,
    )
