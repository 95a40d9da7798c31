"""What a launch on the processor gives back, as Python sees it and as ``kernels/host/state.hpp`` lays it out."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

KINDS = (
    "",
    "race",
    "unwritten",
    "bounds",
    "barrier",
    "blocks",
    "warp",
    "wild",
    "input",
    "shared",
    "crash",
    "endless",
    "trap",
    "pending",
    "aligned",
)
# One logged memory access: `block` in the order of blockIdx (x fastest); the action that its thread was in (65535 before the first
# TRACE), the how-manieth of the thread's that was, and its tile coordinates; `array` as in Accesses.names; `element` counts from 0.
ACCESS = np.dtype(
    [
        ("block", "u4"),
        ("ordinal", "u4"),
        ("thread", "u2"),
        ("action", "u2"),
        ("first", "i4"),
        ("second", "i4"),
        ("array", "i2"),
        ("tiles", "u1"),
        ("write", "u1"),
        ("element", "i8"),
    ],
    align=True,
)


class SideStruct(ctypes.Structure):
    """struct Side."""

    _fields_ = [
        ("present", ctypes.c_int),
        ("write", ctypes.c_int),
        ("block", ctypes.c_uint * 3),
        ("thread", ctypes.c_uint * 3),
        ("pc", ctypes.c_int64),
        ("last", ctypes.c_int64),
        ("calls", ctypes.c_int64 * 6),
        ("file", ctypes.c_char_p),
        ("line", ctypes.c_int),
    ]


class FindingStruct(ctypes.Structure):
    """struct Finding."""

    _fields_ = [
        ("kind", ctypes.c_int),
        ("array", ctypes.c_char * 64),
        ("element", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("shared", ctypes.c_int),
        ("first", SideStruct),
        ("second", SideStruct),
        ("detail", ctypes.c_char * 160),
    ]


@dataclass(frozen=True)
class Side:
    """One side of a fault: which thread of which block, and where: (file, line), then where the functions it is in were called."""

    write: bool
    block: tuple[int, int, int]
    thread: tuple[int, int, int]
    places: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Fault:
    """The first thing that went wrong in a launch; ``kind`` is one of KINDS.

    ``element`` counts from the start of ``array`` in elements and may lie outside of 0 .. ``count`` - 1.
    """

    kind: str
    array: str
    element: int
    count: int
    shared: bool
    sides: tuple[Side, ...]
    detail: str


@dataclass(frozen=True)
class Accesses:
    """The memory accesses of a launch in the order in which they happened, as an array of dtype ACCESS.

    ``names`` gives the array of each number: arguments from 0 on, shared arrays and parts from -1 downwards. ``total`` is how many
    there were, which may be more than there was room for.
    """

    records: np.ndarray
    names: Mapping[int, str]
    total: int


@dataclass(frozen=True)
class BankUse:
    """What the warps of a launch did at one place to one array of shared memory.

    ``places`` is where: (file, line), then where the functions it is in were called. Each of the ``accesses`` of a warp is one to four
    ``phases`` (``bytes`` a lane: 32 lanes of 4, 16 of 8, 8 of 16), and these took ``wavefronts`` passes, one each without conflicts.
    """

    array: str
    write: bool
    bytes: int
    places: tuple[tuple[str, int], ...]
    accesses: int
    phases: int
    wavefronts: int


@dataclass(frozen=True)
class Outcome:
    """What a launch gave.

    ``fault`` is None where it ran to its end. When memory accesses are observed, ``unwritten`` names the outputs with elements that
    nothing wrote, each with their number and the first of them, ``accesses`` is the log and ``banks`` the uses of the banks, where these were asked for.
    """

    fault: Fault | None
    unwritten: Mapping[str, tuple[int, int]]
    accesses: Accesses | None = None
    banks: tuple[BankUse, ...] = ()


class BankUseStruct(ctypes.Structure):
    """struct BankUse."""

    _fields_ = [
        ("array", ctypes.c_char * 64),
        ("pc", ctypes.c_int64),
        ("calls", ctypes.c_int64 * 6),
        ("chain", ctypes.c_uint32),
        ("write", ctypes.c_int),
        ("bytes", ctypes.c_int),
        ("accesses", ctypes.c_uint64),
        ("phases", ctypes.c_uint64),
        ("wavefronts", ctypes.c_uint64),
    ]
