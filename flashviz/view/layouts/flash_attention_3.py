"""FlashAttention-3: Q, K, V, O and L in HBM; in shared memory each consumer's two buffers of Q and the ring of K and V; in registers what
each consumer computes, a row for each."""

from __future__ import annotations

from flashviz.recording import Recording
from flashviz.slots import Block
from flashviz.view.layout import Layout, bands

SHARED = ("Q", "K", "V")
REGISTERS = ("S", "P", "m", "l", "c", "O")
NARROW = 0.3


def layout(recording: Recording, block: Block, launch: int = 0) -> Layout:
    """Places from the tile counts. Of several heads, HBM shows the first: a block walks over many."""
    on_chip = [s for s in recording.slots if not s.shared_by_grid]
    shared = sorted((s for s in on_chip if s.tensor in SHARED), key=lambda s: SHARED.index(s.tensor))
    consumers = sorted({s.name.rsplit(" ", 1)[1] for s in on_chip if s.tensor in REGISTERS})
    own = [
        s
        for consumer in consumers
        for tensor in REGISTERS
        for s in on_chip
        if s.tensor == tensor and s.name.endswith(f" {consumer}")
    ]
    widths = {s.name: NARROW for s in own if len(s.shape) == 1}
    return bands(
        recording,
        block,
        launch,
        columns=["Q", "K", "V", "O", "L"],
        slots=[s.name for s in (*shared, *own)],
        widths={
            "L": 0.25,
            **widths,
            **{s.name: 1.0 for s in shared},
            **{s.name: 1.0 for s in own if len(s.shape) == 2},
        },
        cells=[s.name for s in own if s.tensor == "S"],
        kv=("K", "V"),
    )
