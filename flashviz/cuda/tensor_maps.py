"""Tensor maps: how Hopper's copy engine (TMA) sees an array in HBM, and the box that one copy takes.

A kernel that asks the copy engine for tiles has a parameter `const __grid_constant__ TensorMap Q`, and a line in its header that says
what lies behind it:

    // @map Q const T [64, D] swizzle 128

Q is an array of T that the kernel only reads; a box is 64 rows and all D columns of one head, and lies in shared memory in panels of 128
bytes a row with their 16-byte chunks swizzled. Whoever launches gives an array as for any other parameter; the map is made by the
driver, for this array's address and shape, right before the launch.
"""

from __future__ import annotations

import ctypes
import functools
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashviz.cuda.expressions import evaluate
from flashviz.cuda.scalars import TemplateValues, size_of
from flashviz.cuda.signatures import ArgumentError

_BYTES = 128
_ALIGNED = 64  # bytes, of the structure on the host
_MOST = 256  # elements of a box in any dimension
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # bytes: CUtensorMapSwizzle
_TYPES = {
    "half": 6,
    "__half": 6,
    "float": 7,
    "double": 8,
    "bfloat16": 9,
    "__nv_bfloat16": 9,
    "int": 3,
}  # CUtensorMapDataType
_L2_256_BYTES = 3  # what a copy fetches into L2 at once


class TensorMapError(RuntimeError):
    """The driver made no tensor map; the message says of which array and why."""


@dataclass(frozen=True)
class MapLine:
    """A `@map` line as written: sizes are expressions of the template values."""

    name: str
    type: str
    const: bool
    rows: str
    columns: str
    swizzle: str


@dataclass(frozen=True)
class Layout:
    """What a tensor map says, four dimensions from the innermost: columns of a panel, rows, panels, heads.

    ``sizes`` and ``box`` are elements, ``strides`` the bytes from one to the next in all dimensions but the innermost.
    """

    type: str
    sizes: tuple[int, int, int, int]
    strides: tuple[int, int, int]
    box: tuple[int, int, int, int]
    swizzle: int

    @property
    def box_bytes(self) -> int:
        """What one copy brings, zeros for rows that do not exist included."""
        return math.prod(self.box) * size_of(self.type)


def parse_map(text: str) -> MapLine:
    """`Q const T [64, D] swizzle 128` as written. Raises ValueError."""
    found = re.fullmatch(r"(\w+)\s+(const\s+)?(\w+)\s*\[([^\[\],]+),([^\[\],]+)\]\s*swizzle\s+(.+)", text)
    if not found:
        raise ValueError(
            f"@map {text}: expected a parameter, its type, the box and the swizzle, like `Q const T [64, D] swizzle 128`"
        )
    name, const, type, rows, columns, swizzle = found.groups()
    return MapLine(name, type, bool(const), rows.strip(), columns.strip(), swizzle.strip())


def layout(function: str, line: MapLine, type: str, template: TemplateValues, shape: Sequence[int]) -> Layout:
    """The tensor map of an array of ``shape`` [..., rows, columns] with elements of ``type``.

    Raises ArgumentError for an array that the copy engine cannot take, in words.
    """
    where = f"{function}: argument {line.name}, shape {tuple(shape)}, for the copy engine"
    if type not in _TYPES:
        raise ArgumentError(f"{where}: it has no type {type}; there are {', '.join(_TYPES)}.")
    box_rows, box_columns, swizzle = (int(evaluate(e, template)) for e in (line.rows, line.columns, line.swizzle))
    if swizzle not in _SWIZZLES:
        raise ArgumentError(f"{where}: swizzle {swizzle} is none of {', '.join(map(str, _SWIZZLES))} bytes.")
    if len(shape) < 2 or min(shape) < 1:
        raise ArgumentError(f"{where}: at least one row of at least one element is needed.")
    size, (rows, columns) = size_of(type), (int(n) for n in shape[-2:])
    if columns != box_columns:
        raise ArgumentError(f"{where}: a box takes whole rows, of {box_columns} elements; these have {columns}.")
    panel = swizzle // size if swizzle else columns
    if columns % panel or panel * size % 16:
        unit = f"{swizzle} bytes, the swizzle" if swizzle else "16 bytes"
        raise ArgumentError(f"{where}: a row of {columns * size} bytes is no multiple of {unit}.")
    box = (panel, box_rows, columns // panel, 1)
    if max(box) > _MOST:
        raise ArgumentError(
            f"{where}: a box of {' × '.join(map(str, box))} elements; {_MOST} is the most in each dimension."
        )
    sizes = (panel, rows, columns // panel, math.prod(int(n) for n in shape[:-2]))
    return Layout(type, sizes, (columns * size, panel * size, rows * columns * size), box, swizzle)


def encode(name: str, layout: Layout, pointer: int) -> Any:
    """The map itself, by the driver, for an array at ``pointer`` on the GPU: 128 bytes to pass by value, a NumPy scalar.

    Raises ArgumentError for an address that is no multiple of 16, TensorMapError where the driver refuses or has no tensor maps.
    """
    if pointer % 16:
        raise ArgumentError(
            f"argument {name} starts at an address that is no multiple of 16 bytes: the copy engine cannot take it. Pass a copy."
        )
    raw = np.zeros(_BYTES + _ALIGNED, np.uint8)
    raw = raw[-raw.ctypes.data % _ALIGNED :][:_BYTES]
    u64, u32 = ctypes.c_uint64, ctypes.c_uint32
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(raw.ctypes.data),
        _TYPES[layout.type],
        4,
        ctypes.c_void_p(pointer),
        (u64 * 4)(*layout.sizes),
        (u64 * 3)(*layout.strides),
        (u32 * 4)(*layout.box),
        (u32 * 4)(1, 1, 1, 1),  # every element, none left out
        0,  # not interleaved
        _SWIZZLES[layout.swizzle],
        _L2_256_BYTES,
        0,  # zeros for what lies outside of the array
    )
    if status:
        raise TensorMapError(f"argument {name}: the driver makes no tensor map of it, CUDA error {status} ({layout}).")
    return raw.view(f"V{_BYTES}")[0]


@functools.cache
def _driver() -> Any:
    """The CUDA driver's library."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        library = ctypes.CDLL(name)
        library.cuTensorMapEncodeTiled.restype = ctypes.c_int
    except (OSError, AttributeError) as error:
        raise TensorMapError(
            f"{name} is not here or too old for tensor maps, which came with CUDA 12.0: {error}"
        ) from None
    return library
