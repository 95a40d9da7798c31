"""The types that a kernel's parameters, shared tiles and template parameters may have: NumPy's dtype of each, and its bytes.

NumPy has no bfloat16. Where a kernel takes one, an array of their bits (uint16) is meant, or one whose dtype calls itself bfloat16, as
the package ml_dtypes has it: its bits are looked at, so that package is never imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

TemplateValues = Mapping[str, "int | str"]
"""Template values by name: numbers, and for `typename T` the name of a type."""

BFLOAT16 = ("bfloat16", "__nv_bfloat16")
DTYPES: Mapping[str, Any] = {
    "float": np.float32,
    "double": np.float64,
    "half": np.float16,
    "__half": np.float16,
    "fp16": np.float16,
    **dict.fromkeys(BFLOAT16, np.uint16),
    "bool": np.bool_,
    "signed char": np.int8,
    "unsigned char": np.uint8,
    "short": np.int16,
    "unsigned short": np.uint16,
    "int": np.int32,
    "unsigned": np.uint32,
    "unsigned int": np.uint32,
    "long long": np.int64,
    "unsigned long long": np.uint64,
    "size_t": np.uint64,
}


def dtype_of(type: str) -> np.dtype[Any]:
    """NumPy's dtype of a CUDA type; uint16, the bits, for bfloat16. Raises ValueError for one that is not known."""
    if type not in DTYPES:
        raise ValueError(f"{type} is no type that the launcher knows ({', '.join(DTYPES)})")
    known: np.dtype[Any] = np.dtype(DTYPES[type])
    return known


BARRIER = "Barrier"
"""A barrier in shared memory (kernels/include/hopper.cuh): a part may be of them, a parameter may not."""


def size_of(type: str) -> int:
    """Bytes of one element.

    >>> size_of("bfloat16"), size_of("Barrier")
    (2, 8)
    """
    return 8 if type == BARRIER else dtype_of(type).itemsize


def is_bfloat16(array: Any) -> bool:
    """Whether the array's own dtype is bfloat16, without knowing the package that it comes from."""
    return str(getattr(array.dtype, "name", "")) == "bfloat16"
