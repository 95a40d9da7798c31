"""The layout of every algorithm that has none of its own: tensors as columns, slots in the order of their declaration."""

from __future__ import annotations

from flashviz.recording import Recording
from flashviz.slots import Block, Slot
from flashviz.view.layout import Layout, bands

WIDTHS = {0: 0.6, 1: 0.9}
"""Width by number of axes: a single value, a vector; 1.6 for a matrix."""


def layout(recording: Recording, block: Block, launch: int = 0) -> Layout:
    """Places from what the recording declares."""
    tensors: dict[str, Slot] = {s.tensor: s for s in recording.slots if s.shared_by_grid}
    slots = [s for s in recording.slots if not s.shared_by_grid]
    widths = {name: WIDTHS.get(len(s.shape), 1.6) for name, s in tensors.items()}
    widths |= {s.name: WIDTHS.get(len(s.shape), 1.6) for s in slots}
    blocks = sum(len(recording.blocks(launch.launch)) for launch in recording.launches)
    return bands(
        recording,
        block,
        launch,
        columns=list(tensors),
        slots=[s.name for s in slots],
        widths=widths,
        cells=[s.name for s in slots if s.tensor == "S"],
        grid=blocks > 1,
    )
