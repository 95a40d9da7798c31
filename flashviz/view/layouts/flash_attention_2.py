"""FlashAttention-2: Q, K, V, O and L in HBM; one block's Qi, Kj, Sij, Vj, mi, li and Oi in shared memory, and on the rungs of the
ladder Sij, mi, li and Oi in a band of their own, the registers."""

from __future__ import annotations

from flashviz.recording import Recording
from flashviz.slots import Block
from flashviz.view.layout import Layout, bands

ORDER = ("Q", "K", "S", "P", "V", "m", "l", "O")
"""Left to right, by what a slot holds; Kj and Vj may have several buffers."""


def layout(recording: Recording, block: Block, launch: int = 0) -> Layout:
    """Places from the tile counts; with 2 × 2 tiles exactly the reference figure."""
    slots = [s for s in recording.slots if not s.shared_by_grid and s.tensor in ORDER]
    return bands(
        recording,
        block,
        launch,
        columns=["Q", "K", "V", "O", "L"],
        slots=[s.name for s in sorted(slots, key=lambda s: ORDER.index(s.tensor))],
        widths={"L": 0.25, "mi": 0.25, "li": 0.25, "Sij": 1.2, "Pij": 1.2},
        cells=["Sij", *(s.name for s in slots if s.name == "Pij")],
        kv=("K", "V"),
        map_tiles=True,
    )
