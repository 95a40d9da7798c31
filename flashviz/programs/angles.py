"""The inputs of rotary embedding: rows, positions, frequencies and which elements are a pair, checked before anything runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashviz.programs.attention import FloatArray, as_tile_array, four_axes, positive
from flashviz.recording import Param

FORMS = ("halves", "pairs")


def rope_tables(positions: Any, dim: int, base: float = 10000.0) -> tuple[FloatArray, FloatArray]:
    """Cosines and sines of the angles position · base^(-2p / dim), p = 0 … dim/2 - 1 (arXiv 2104.09864, section 3.2.2).

    Args:
        positions: [n], any real numbers.
        dim: how many elements of a row are rotated; even.
        base: of the frequencies.

    Returns:
        cos and sin, float32 [n, dim/2]. The angles themselves are float64, whatever the dtype of the data: at position
        1857 a float16 angle can be half a radian off.

    Raises:
        ValueError, TypeError: naming the argument, its value and what it must be.

    >>> cos, sin = rope_tables([0, 1], 4)
    >>> print(cos.round(4), sin.round(4), sep="\\n")
    [[1.     1.    ]
     [0.5403 1.    ]]
    [[0.     0.    ]
     [0.8415 0.01  ]]
    """
    at, even = _positions(positions), _even("dim", dim)
    if isinstance(base, bool) or not isinstance(base, (int, float, np.number)) or not 0 < base < math.inf:
        raise ValueError(f"base={base!r}: it must be a finite number above 0")
    angles = at[:, None] * float(base) ** (-np.arange(0, even, 2) / even)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


@dataclass(frozen=True, eq=False)
class Rotation:
    """Rows to rotate, cut in tiles: x [B, H, N, d], cos and sin [N, pairs], all float32 and contiguous."""

    x: FloatArray
    cos: FloatArray
    sin: FloatArray
    form: str
    base: float
    tile: int
    given: tuple[int, ...]

    @classmethod
    def of(
        cls,
        x: Any,
        positions: Any = None,
        form: str = "halves",
        base: float = 10000.0,
        rotary_dim: Any = None,
        offset: Any = 0,
        tile: Any = 4,
    ) -> Rotation:
        """Check the inputs of a rotation.

        Raises:
            ValueError, TypeError: naming the argument, what it is and what it must be.
        """
        if form not in FORMS:
            raise ValueError(f'form={form!r} is none of "halves", "pairs"')
        rows = as_tile_array("x", x)
        given: tuple[int, ...] = rows.shape
        if rows.ndim not in (2, 3, 4) or 0 in given:
            raise ValueError(f"x has shape {given}: it must be [N, d], [H, N, d] or [B, H, N, d], none of them 0")
        four, size = four_axes(rows), positive("tile", tile)
        dim = checked_dim(four.shape[3], rotary_dim)
        cos, sin = rope_tables(checked_positions(positions, four.shape[2], offset), dim, base)
        return cls(four, cos, sin, form, float(base), size, given)

    @property
    def pairs(self) -> int:
        """How many pairs of a row are rotated."""
        return int(self.cos.shape[1])

    @property
    def T(self) -> int:
        """Tiles of a head: ceil(N / tile)."""
        return -(-int(self.x.shape[2]) // self.tile)

    @property
    def heads(self) -> tuple[tuple[int, int], ...]:
        """Every (batch, head)."""
        return tuple((b, h) for b in range(self.x.shape[0]) for h in range(self.x.shape[1]))

    @property
    def partners(self) -> tuple[tuple[int, int], ...]:
        """The two elements of each pair: p and p + pairs in halves, 2p and 2p + 1 in pairs."""
        halves = self.form == "halves"
        return tuple((p, p + self.pairs) if halves else (2 * p, 2 * p + 1) for p in range(self.pairs))

    @property
    def params(self) -> dict[str, Param]:
        """The sizes and options as a recording carries them."""
        B, H, N, d = self.x.shape
        sizes: dict[str, Param] = {"B": B, "H": H, "N": N, "d": d, "tile": self.tile, "T": self.T}
        return {**sizes, "rotary_dim": 2 * self.pairs, "base": self.base, "form": self.form}


def checked_dim(d: int, rotary_dim: Any, what: str = "x") -> int:
    """How many elements of a row of d are rotated.

    Raises:
        ValueError: naming the dimension that is odd, or past d.
    """
    if rotary_dim is None:
        if d % 2:
            raise ValueError(
                f"{what} has rows of d={d} elements: they are rotated in pairs, so d must be even, or rotary_dim= an even "
                f"number of at most {d - 1}"
            )
        return d
    even = _even("rotary_dim", rotary_dim)
    if even > d:
        raise ValueError(f"rotary_dim={even} is more than the d={d} elements of a row of {what}")
    return even


def checked_positions(positions: Any, N: int, offset: Any = 0) -> np.ndarray:
    """The positions of N rows, float64: 0 … N - 1 when not given, plus the offset.

    Raises:
        ValueError, TypeError: naming what is given and what it must be.
    """
    if isinstance(offset, bool) or not isinstance(offset, (int, float, np.number)) or not math.isfinite(offset):
        raise ValueError(f"offset={offset!r}: it must be a finite number")
    at = _positions(np.arange(N) if positions is None else positions)
    if len(at) != N:
        raise ValueError(f"positions has {len(at)} entries for N={N} rows: one for each row, the same for all heads")
    return at + float(offset)


def _positions(positions: Any) -> np.ndarray:
    at = np.asarray(positions)
    if at.ndim != 1 or not at.size:
        raise ValueError(f"positions has shape {at.shape}: it must be [n], with at least one")
    if at.dtype.kind not in "fiu" or not np.isfinite(at).all():
        raise TypeError(f"positions of dtype {at.dtype}: they must be finite real numbers")
    return at.astype("float64")


def _even(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 2 or value % 2:
        raise ValueError(f"{name}={value!r}: elements are rotated in pairs, so it must be an even number of at least 2")
    return int(value)
