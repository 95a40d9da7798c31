"""What a warp's instructions do: which lane holds which element of a tensor core's operands, and which banks an access meets.

Requirements: NumPy only, plain arithmetic on lanes and addresses, as the PTX manual has it (`mma.m16n8k16`, `mma.m16n8k8`, `wgmma.m64nNk16`,
`ldmatrix`).
Tests hold the lanes against the product itself, and the pictures of ``view`` draw what is computed here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

LANES, BANKS, WORD = 32, 32, 4
"""Lanes of a warp; banks of shared memory, each of which gives one word of 4 bytes at a time."""
SHAPES = {"m16n8k16": 2, "m16n8k8": 1}
"""The products of the ladder, and how many elements of A and B a register holds: two 16-bit floats, or one TF32."""
WARPGROUP = re.compile(r"m64n(\d+)k16")
"""The products of Hopper's warpgroups, four warps one below the other: n is a multiple of 8 up to 256."""
LAYOUTS = ("plain", "padded", "swizzled")
CHUNK = 16
"""Bytes that a lane gives an address for in ldmatrix, and that one cp.async copies."""


@dataclass(frozen=True, eq=False)
class Fragment:
    """Where the elements of one operand are: for each of its elements the lane, the register and the place in the register.

    Args:
        name: ``"a"``, ``"b"`` or ``"d"``.
        lane, register, place: arrays of the operand's shape. ``place`` is 1 for the upper half of a register, else 0. Of a warpgroup,
            ``lane`` counts its 128 threads.
    """

    name: str
    lane: np.ndarray
    register: np.ndarray
    place: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the operand."""
        rows, columns = self.lane.shape
        return rows, columns

    @property
    def registers(self) -> int:
        """Registers that each lane needs for it."""
        return int(self.register.max()) + 1

    def of_lane(self, lane: int) -> list[tuple[int, int, int, int]]:
        """What a lane holds, as (register, place, row, column), in the order of its registers.

        >>> fragment("d").of_lane(5)
        [(0, 0, 1, 2), (1, 0, 1, 3), (2, 0, 9, 2), (3, 0, 9, 3)]
        """
        at = np.argwhere(self.lane == lane)
        return sorted((int(self.register[r, c]), int(self.place[r, c]), int(r), int(c)) for r, c in at)


def fragment(operand: str, shape: str = "m16n8k16") -> Fragment:
    """Which lane holds which element of an operand of ``mma.sync``: d [16, 8] += a [16, k] b [k, 8].

    With ``"m64nNk16"``, of ``wgmma``: d [64, N] += a [64, 16] b [16, N], where the lanes are the 128 threads of a warpgroup.

    Args:
        operand: ``"a"``, ``"b"`` or ``"d"`` (c is held like d). Of a warpgroup, b is in shared memory and no thread holds it; a may be.
        shape: ``"m16n8k16"`` (16-bit floats), ``"m16n8k8"`` (TF32), or ``"m64n16k16"`` and its like, N from 8 to 256.

    >>> fragment("a").lane[:2, :6]
    array([[0, 0, 1, 1, 2, 2],
           [4, 4, 5, 5, 6, 6]])
    >>> fragment("d", "m64n16k16").of_lane(37)[:3]
    [(0, 0, 17, 2), (1, 0, 17, 3), (2, 0, 25, 2)]
    """
    wide = columns_of(shape)
    if (shape not in SHAPES and not wide) or operand not in ("a", "b", "d"):
        raise ValueError(f"{operand!r} of {shape!r}: operands are a, b, d, shapes {', '.join(SHAPES)}, m64nNk16")
    if wide and operand == "b":
        raise ValueError(f"'b' of {shape!r}: a warpgroup's product reads it from shared memory, no thread holds it")
    lanes = np.arange(4 * LANES if wide else LANES)
    group, member = lanes % LANES // 4, lanes % 4  # a group of four lanes shares a row of a and d, and a column of b
    first = 16 * (lanes // LANES)  # row of a and d where the warp's own begin
    two = SHAPES.get(shape, 2) if operand != "d" else 1
    columns = wide or 8
    size = {"a": (64 if wide else 16, 8 * two), "b": (8 * two, 8), "d": (64 if wide else 16, columns)}[operand]
    found = [np.full(size, -1) for _ in range(3)]
    for register in range({"a": 4, "b": 2, "d": columns // 2}[operand]):
        for place in range(two):
            if operand == "d":
                row, column = first + group + 8 * (register // 2 % 2), 8 * (register // 4) + 2 * member + register % 2
            elif operand == "a":
                row, column = first + group + 8 * (register % 2), two * member + place + 4 * two * (register // 2)
            else:
                row, column = two * member + place + 4 * two * register, group
            for array, value in zip(found, (lanes, register, place), strict=True):
                array[row, column] = value
    return Fragment(operand, *found)


def columns_of(shape: str) -> int:
    """N of ``"m64nNk16"``, 0 for any other shape.

    >>> columns_of("m64n128k16"), columns_of("m64n12k16"), columns_of("m16n8k16")
    (128, 0, 0)
    """
    found = WARPGROUP.fullmatch(shape)
    n = int(found[1]) if found else 0
    return n if n % 8 == 0 and n <= 256 else 0


def bank_of(address: int) -> int:
    """The bank of the word at a byte address in shared memory."""
    return address // WORD % BANKS


def wavefronts(addresses: Sequence[int], size: int = WORD) -> int:
    """How many passes shared memory needs for one access of a warp: 1 for each phase without bank conflicts.

    A pass moves 128 bytes: lanes that take 4 bytes each go in one phase of 32 lanes, 8 bytes in phases of 16, 16 bytes (and the rows
    that ldmatrix is given) in phases of 8. In a phase, every bank gives one word a pass; lanes that want the same word share it.

    Args:
        addresses: the first byte of each lane's access.
        size: bytes that each lane takes, 4, 8 or 16.

    >>> wavefronts([4 * lane for lane in range(32)]), wavefronts([128 * lane for lane in range(32)])
    (1, 32)
    >>> wavefronts([128 * row for row in range(8)], 16), wavefronts([144 * row for row in range(8)], 16)
    (8, 1)
    """
    if size not in (4, 8, 16):
        raise ValueError(f"size={size}: a lane takes 4, 8 or 16 bytes")
    phase = LANES * WORD // size
    return sum(max(words_by_bank(addresses[n : n + phase], size)) for n in range(0, len(addresses), phase))


def words_by_bank(addresses: Iterable[int], size: int = WORD) -> list[int]:
    """Of each of the 32 banks, how many different words one phase wants."""
    words = {word for address in addresses for word in range(address // WORD, (address + size - 1) // WORD + 1)}
    counts = [0] * BANKS
    for word in words:
        counts[word % BANKS] += 1
    return counts


def chunk_address(row: int, chunk: int, d: int, layout: str) -> int:
    """Where 16 bytes of a tile of 16-bit floats are: chunk number ``chunk`` of row ``row`` of a tile with d columns.

    ``plain``: one row after the other. ``padded``: each row is 16 bytes longer than its numbers. ``swizzled``: chunk c of row r is in
    place c xor (r mod 8); where a row has fewer than eight chunks, the rows that fill 128 bytes together are swizzled alike.

    Raises:
        ValueError: no such layout, or a d that it cannot have.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is none of {', '.join(LAYOUTS)}")
    if d % 8 or (layout == "swizzled" and d % 64 and 64 % d):
        raise ValueError(
            f"d={d}: a {layout} row is a multiple of {'64 elements, or 8, 16 or 32' if layout == 'swizzled' else '8 elements'}"
        )
    chunks = min(d // 8, 8)
    place = chunk ^ row // (8 // chunks) % chunks if layout == "swizzled" else chunk
    return row * (2 * d + CHUNK * (layout == "padded")) + CHUNK * place
