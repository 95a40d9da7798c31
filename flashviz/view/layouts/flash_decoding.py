"""Flash decoding: K, V in HBM and the partial Os, Ls beside them; first a split's shared memory, then the combine block's."""

from __future__ import annotations

from flashviz.recording import Recording
from flashviz.slots import Block
from flashviz.view.layout import Layout, bands


def layout(recording: Recording, block: Block, launch: int = 0) -> Layout:
    """Places from the tile counts; the second launch has slots of its own. Heads are those of K and V."""
    ls = [s.name for s in recording.slots if s.tensor == "L" and not s.shared_by_grid]
    narrow = dict.fromkeys(("Ls", "L", "m", "l", *ls), 0.25)
    return bands(
        recording,
        block,
        launch,
        columns=["Q", "K", "V", "Os", "Ls", "O", "L"],
        slots=[*ls, "w", "m", "l", "os", "o"] if launch == 1 else ["q", "Kj", "Sj", "Vj", "m", "l", "o"],
        widths={**narrow, "Sj": 1.2, "w": 1.2},
        cells=["Sj", "w"],
    )
