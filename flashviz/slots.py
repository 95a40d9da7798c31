"""Slots: the places in memory that a recording speaks of.

Requirements: NumPy only; plain frozen data, so that every machine can make a recording; the set of memories is
open (``hbm``, ``shared`` and ``register`` today), since the picture and the counts only compare the names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from flashviz.bfloat16 import from_bfloat16, to_bfloat16

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
        dtype: a NumPy dtype name or ``"bfloat16"``, so that the slot's bytes are known.
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
        itemsize_of(self.dtype)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return itemsize_of(self.dtype)

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

    Of bfloat16, which NumPy lacks, ``data`` holds the bits and ``array`` the numbers as float32.

    >>> Values.of(np.array([[1, 2]], dtype="float32")).array
    array([[1., 2.]], dtype=float32)
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes = field(repr=False)

    def __post_init__(self) -> None:
        want = math.prod(self.shape) * itemsize_of(self.dtype)
        if len(self.data) != want:
            raise ValueError(f"{len(self.data)} bytes where {self.dtype} {shape_text(self.shape)} takes {want}")

    @classmethod
    def of(cls, array: np.ndarray, dtype: str = "") -> Values:
        """Copy an array's numbers, in its own dtype or in bfloat16."""
        if dtype == BFLOAT16:
            return cls(dtype, tuple(array.shape), to_bfloat16(array).astype("<u2").tobytes())
        return cls(array.dtype.name, tuple(array.shape), array.astype(array.dtype.newbyteorder("<")).tobytes())

    @property
    def array(self) -> np.ndarray:
        """The numbers as a read-only array (no copy, but of bfloat16)."""
        if self.dtype == BFLOAT16:
            found = from_bfloat16(np.frombuffer(self.data, "<u2").astype(np.uint16)).reshape(self.shape)
            found.flags.writeable = False
            return found
        return np.frombuffer(self.data, np.dtype(self.dtype).newbyteorder("<")).reshape(self.shape)


BFLOAT16 = "bfloat16"
"""The dtype's name. Tiles of it are float32 arrays whose numbers bfloat16 can hold."""


def itemsize_of(dtype: str) -> int:
    """Bytes of an element of that dtype, a NumPy name or ``"bfloat16"``. Raises TypeError for another.

    >>> itemsize_of("float32"), itemsize_of("bfloat16")
    (4, 2)
    """
    return 2 if dtype == BFLOAT16 else np.dtype(dtype).itemsize


def name_of(dtype: Any) -> str:
    """A dtype's name as slots have it."""
    return BFLOAT16 if isinstance(dtype, str) and dtype == BFLOAT16 else np.dtype(dtype).name


def as_dtype(values: Any, dtype: str) -> np.ndarray:
    """A copy of numbers as a slot of that dtype holds them: rounded to it; of bfloat16 as float32.

    >>> as_dtype([1 / 3, 1.0], "bfloat16")
    array([0.33398438, 1.        ], dtype=float32)
    """
    if dtype == BFLOAT16:
        return from_bfloat16(to_bfloat16(values))
    with np.errstate(invalid="ignore", over="ignore"):  # NaN of an empty slot into integers, inf in float16
        return np.array(values, dtype=dtype)


def shape_text(shape: tuple[int, ...]) -> str:
    """``(4, 8)`` as ``"4 × 8"``; a single value is ``"1"``."""
    return " × ".join(map(str, shape)) if shape else "1"
