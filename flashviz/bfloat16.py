"""bfloat16 as bits: the upper half of a float32. NumPy has no such type, so an array of them is an array of uint16."""

from __future__ import annotations

from typing import Any

import numpy as np


def to_bfloat16(x: Any) -> np.ndarray:
    """Round to bfloat16, to nearest and in the middle to even.

    Args:
        x: numbers of any shape that float32 can hold.

    Returns:
        Their bits, an array of uint16 of the same shape; what is beyond the largest bfloat16 becomes infinite, NaN stays NaN.

    >>> to_bfloat16([1.0, 0.1, -np.inf])
    array([16256, 15821, 65408], dtype=uint16)
    >>> from_bfloat16(to_bfloat16(0.1)).item()
    0.10009765625
    """
    with np.errstate(over="ignore"):
        values = np.asarray(x, np.float32)
    bits = np.ascontiguousarray(values).view(np.uint32).reshape(values.shape)
    rounded = ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype(np.uint16)
    quiet = (bits >> 16 | 0x40).astype(np.uint16)  # rounding a NaN's bits could carry over into those of infinity
    return np.where(np.isnan(values), quiet, rounded)


def from_bfloat16(bits: Any) -> np.ndarray:
    """The float32 values of bfloat16 bits, exactly.

    Args:
        bits: an array of uint16, or one of a bfloat16 dtype.
    """
    array = np.asarray(bits)
    if array.dtype.name == "bfloat16":
        array = array.view(np.uint16)
    if array.dtype != np.uint16:
        raise TypeError(f"bfloat16 bits are uint16; got {array.dtype}")
    wide: np.ndarray = np.left_shift(array, 16, dtype=np.uint32).view(np.float32)
    return wide
