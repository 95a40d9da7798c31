"""Slots: the places in memory that a recording speaks of.

Requirements: NumPy only; plain frozen data, so that every machine can make a recording; the set of memories is
open (``hbm``, ``shared`` and ``register`` today), since the picture and the counts only compare the names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

SCOPES = ("grid", "block", "warp", "thread")
"""Who sees a slot: every block of the grid (HBM), one block (shared memory), one warp, or one thread (registers)."""


class Block(NamedTuple):
    """The coordinates of one CUDA block in terms of the algorithm, never taken from ``blockIdx``."""

    batch: int = 0
    head: int = 0
    tile: int = 0


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in memory that holds one tile, vector or value.

    Args:
        name: unique in its recording, for example ``"Qi"`` or ``"Q0"``.
        memory: ``"hbm"``, ``"shared"``, ``"register"`` or a name of your own.
        scope: one of :data:`SCOPES`. Content of a slot with scope ``"grid"`` exists once; of any other, once a block.
        shape: elements along each axis. The last tile of a tensor has its real, smaller shape.
        dtype: a NumPy dtype name, so that the slot's bytes are known.
        tensor: what the slot holds a piece of (``"Q"``, ``"m"``): the picture takes its hue from it.
        index: which tile of that tensor it is, empty for slots that hold any tile.
        head: (batch, head) of that tensor.
        label: what a tile is called on the picture; empty for slots whose content brings its own.
    """

    name: str
    memory: str
    scope: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    tensor: str = ""
    index: tuple[int, ...] = ()
    head: tuple[int, int] = (0, 0)
    label: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a slot needs a name")
        if self.scope not in SCOPES:
            raise ValueError(f"slot {self.name!r}: scope {self.scope!r} is none of {', '.join(SCOPES)}")
        if any(n < 0 for n in self.shape):
            raise ValueError(f"slot {self.name!r}: shape {shape_text(self.shape)} has a negative length")
        np.dtype(self.dtype)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return np.dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole slot."""
        return math.prod(self.shape) * self.itemsize

    @property
    def shared_by_grid(self) -> bool:
        """True where the content exists once for all blocks (HBM)."""
        return self.scope == "grid"


@dataclass(frozen=True, slots=True)
class Values:
    """The numbers of a small tile, immutable and comparable; ``data`` is in row-major order, low byte first.

    >>> Values.of(np.array([[1, 2]], dtype="float32")).array
    array([[1., 2.]], dtype=float32)
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes = field(repr=False)

    def __post_init__(self) -> None:
        want = math.prod(self.shape) * np.dtype(self.dtype).itemsize
        if len(self.data) != want:
            raise ValueError(f"{len(self.data)} bytes where {self.dtype} {shape_text(self.shape)} takes {want}")

    @classmethod
    def of(cls, array: np.ndarray) -> Values:
        """Copy an array's numbers."""
        return cls(array.dtype.name, tuple(array.shape), array.astype(array.dtype.newbyteorder("<")).tobytes())

    @property
    def array(self) -> np.ndarray:
        """The numbers as a read-only array (no copy)."""
        return np.frombuffer(self.data, np.dtype(self.dtype).newbyteorder("<")).reshape(self.shape)


def shape_text(shape: tuple[int, ...]) -> str:
    """``(4, 8)`` as ``"4 × 8"``; a single value is ``"1"``."""
    return " × ".join(map(str, shape)) if shape else "1"
