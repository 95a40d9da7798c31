"""FlashAttention-2: Q, K, V, O and L in HBM; one block's Qi, Kj, Sij, Vj, mi, li and Oi in shared memory."""

from __future__ import annotations

from flashviz.recording import Recording
from flashviz.slots import Block
from flashviz.view.layout import Layout, bands


def layout(recording: Recording, block: Block, launch: int = 0) -> Layout:
    """Places from the tile counts; with 2 × 2 tiles exactly the reference figure."""
    return bands(
        recording,
        block,
        launch,
        columns=["Q", "K", "V", "O", "L"],
        slots=["Qi", "Kj", "Sij", "Vj", "mi", "li", "Oi"],
        widths={"L": 0.25, "mi": 0.25, "li": 0.25, "Sij": 1.2},
        cells=["Sij"],
        kv=("K", "V"),
        map_tiles=True,
    )
