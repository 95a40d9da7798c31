"""A compiled kernel in this process: its launch, its device globals, and what a launch found, through ctypes.

The structures are those of ``kernels/host/state.hpp``.
"""

from __future__ import annotations

import bisect
import ctypes
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flashviz.cuda.cpu_results import (
    ACCESS,
    KINDS,
    Accesses,
    BankUse,
    BankUseStruct,
    Fault,
    FindingStruct,
    Outcome,
    Side,
    SideStruct,
)

ORDERS = ("forward", "reverse", "random")
CONST, OUTPUT, KNOWN = 1, 2, 4
_GUARD = 4096
_MOST_GUARD = 1 << 24

_lock = threading.Lock()
_libraries: dict[Path, CpuLibrary] = {}


class _Kernel(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("invoke", ctypes.c_void_p), ("parameters", ctypes.c_int)]


class _Line(ctypes.Structure):
    _fields_ = [("address", ctypes.c_uint64), ("file", ctypes.c_uint32), ("line", ctypes.c_uint32)]


class CpuLibrary:
    """One compiled library. Loaded once a process; launches run one at a time, under a lock."""

    def __init__(self, path: Path) -> None:
        self._library = library = ctypes.CDLL(str(path))
        library.fv_buffer.restype = ctypes.c_void_p
        library.fv_finding.restype = ctypes.POINTER(FindingStruct)
        library.fv_anchor.restype = ctypes.c_void_p
        library.fv_unwritten.restype = ctypes.c_int64
        library.fv_shared_name.restype = ctypes.c_char_p
        library.fv_bank_uses.restype = ctypes.POINTER(BankUseStruct)
        sizes = (library.fv_finding_size, library.fv_access_size, library.fv_bank_use_size)
        for size in (*sizes, library.fv_logged):
            size.restype = ctypes.c_size_t
        here = (ctypes.sizeof(FindingStruct), ACCESS.itemsize, ctypes.sizeof(BankUseStruct))
        if tuple(size() for size in sizes) != here:
            raise RuntimeError("kernels/host does not belong to this flashviz; install flashviz again.")
        self._anchor = int(library.fv_anchor())
        self._lines: list[tuple[int, str, int]] | None = None
        self._kept: dict[str, Any] = {}

    def launch(
        self,
        index: int,
        grid: Sequence[int],
        block: Sequence[int],
        shared_bytes: int,
        arguments: Mapping[str, Any],
        outputs: Sequence[str],
        *,
        order: str = "forward",
        seed: int = 0,
        check: bool = False,
        initialised: Sequence[str] = (),
        seconds: int = 0,
        log: int = 0,
        banks: bool = False,
    ) -> Outcome:
        """Run kernel number ``index`` of the library once.

        ``arguments`` are by name in declared order: contiguous NumPy arrays and NumPy scalars of exactly the declared types. The
        kernel works on copies with guards around them; those in ``outputs`` are copied back into the arrays given.
        ``initialised`` are the outputs whose contents the kernel may read before it writes them. ``seconds`` is the time limit, 0 for
        none; ``log`` is how many memory accesses to keep at most; with ``banks`` the uses of shared memory's banks are counted.
        """
        library = self._library
        kernel = (_Kernel * (index + 1)).in_dll(library, "fv_kernels")[index]
        if kernel.parameters != len(arguments):
            raise RuntimeError(
                f"{kernel.name.decode()} takes {kernel.parameters} parameters, {len(arguments)} are given"
            )
        with _lock:
            try:
                for kept in self._kept.values():
                    if isinstance(kept, np.ndarray):
                        self._buffer("", kept.ctypes.data, kept, KNOWN)
                known = sum(isinstance(kept, np.ndarray) for kept in self._kept.values())
                addresses: dict[str, int] = {}
                numbers: dict[str, int] = {}
                cells: list[Any] = []
                for name, value in arguments.items():
                    if isinstance(value, np.ndarray):
                        flags = CONST if name not in outputs else 0 if name in initialised else OUTPUT
                        numbers[name] = known + len(addresses)
                        addresses[name] = self._buffer(name, None, value, flags)
                        ctypes.memmove(addresses[name], value.ctypes.data, value.nbytes)
                        cells.append(np.array(addresses[name], np.uint64))
                    else:
                        cells.append(np.array(value))
                pointers = (ctypes.c_void_p * max(1, len(cells)))(*(cell.ctypes.data for cell in cells))
                records = np.zeros(log, ACCESS) if log else None
                room = ctypes.c_void_p(None if records is None else records.ctypes.data)
                library.fv_log(room, ctypes.c_size_t(log))
                library.fv_count_banks(int(banks))
                status = library.fv_launch(
                    ctypes.byref(kernel),
                    (ctypes.c_uint * 3)(*grid),
                    (ctypes.c_uint * 3)(*block),
                    ctypes.c_size_t(shared_bytes),
                    pointers,
                    ORDERS.index(order),
                    ctypes.c_uint(seed),
                    int(check),
                    ctypes.c_uint(seconds),
                )
                if status < 0:
                    raise RuntimeError(f"a block of {tuple(block)} threads cannot run")
                for name in outputs:
                    ctypes.memmove(arguments[name].ctypes.data, addresses[name], arguments[name].nbytes)
                missing = {}
                for name in outputs if check and not status else ():
                    first = ctypes.c_int64()
                    count = library.fv_unwritten(numbers[name], ctypes.byref(first)) if name not in initialised else 0
                    if count:
                        missing[name] = (int(count), int(first.value))
                accesses = None if records is None else self._accesses(records, numbers)
                return Outcome(self._fault() if status else None, missing, accesses, self._banks() if banks else ())
            finally:
                library.fv_free()

    def _accesses(self, records: np.ndarray, numbers: Mapping[str, int]) -> Accesses:
        total = int(self._library.fv_logged())
        self._library.fv_log(None, ctypes.c_size_t(0))
        names = {number: name for name, number in numbers.items()}
        number = 0
        while name := self._library.fv_shared_name(number):
            number += 1
            names[-1 - number] = name.decode(errors="replace")
        names[-1] = "dynamic shared memory"
        return Accesses(records[: min(total, len(records))], names, total)

    def _banks(self) -> tuple[BankUse, ...]:
        table, uses = self._library.fv_bank_uses(), []
        for use in (table[n] for n in range(self._library.fv_bank_use_count())):
            places = [found for offset in (use.pc, *use.calls) if offset and (found := self.place(offset))]
            name = use.array.decode(errors="replace")
            counts = int(use.accesses), int(use.phases), int(use.wavefronts)
            uses.append(BankUse(name, bool(use.write), int(use.bytes), tuple(places), *counts))
        return tuple(uses)

    def _buffer(self, name: str, known: int | None, array: np.ndarray, flags: int) -> int:
        guard = max(_GUARD, min(array.nbytes, _MOST_GUARD))
        address = self._library.fv_buffer(
            name.encode(),
            ctypes.c_void_p(known),
            ctypes.c_size_t(array.nbytes),
            ctypes.c_size_t(array.itemsize),
            flags,
            ctypes.c_size_t(guard),
        )
        if not address:
            raise RuntimeError("a kernel takes at most 64 arrays")
        return int(address)

    def set_global(self, name: str, value: Any) -> None:
        """Set an ``extern "C"`` device global by name, before a launch.

        A NumPy scalar sets a variable of that type. A contiguous NumPy array sets a pointer: the kernel reads and writes the array itself,
        and such accesses are never reported. Raises KeyError where the kernel has no such global.
        """
        try:
            place = ctypes.c_char.in_dll(self._library, name)
        except ValueError:
            raise KeyError(f'the kernel has no extern "C" device global called {name}') from None
        if isinstance(value, np.ndarray):
            if not value.flags.c_contiguous:
                raise ValueError(f"{name}: the array must be contiguous")
            cell = np.array(value.ctypes.data, np.uint64)
        elif isinstance(value, np.generic):
            cell = np.array(value)
        else:
            raise TypeError(
                f"{name}: pass a NumPy scalar or array, not {type(value).__name__}; its dtype says how many bytes to set"
            )
        ctypes.memmove(ctypes.addressof(place), cell.ctypes.data, cell.nbytes)
        self._kept[name] = value

    def get_global(self, name: str, dtype: Any) -> Any:
        """The value of an ``extern "C"`` device global, as a NumPy scalar of ``dtype``. Raises KeyError."""
        try:
            place = ctypes.c_char.in_dll(self._library, name)
        except ValueError:
            raise KeyError(f'the kernel has no extern "C" device global called {name}') from None
        cell = np.zeros((), dtype)
        ctypes.memmove(cell.ctypes.data, ctypes.addressof(place), cell.nbytes)
        return cell[()]

    def place(self, offset: int) -> tuple[str, int] | None:
        """File and line of an offset from the anchor; None where it is not the kernel's code or lines were not kept."""
        if self._lines is None:
            self._lines = self._read_lines()
        at = bisect.bisect_left(self._lines, (self._anchor + offset,)) - 1  # a return address is behind its call
        if at < 0:
            return None
        address, file, line = self._lines[at]
        return (file, line) if line and self._anchor + offset - address < 4096 else None

    def _read_lines(self) -> list[tuple[int, str, int]]:
        try:
            first = _Line.in_dll(self._library, "fv_lines")
            files = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(self._library, "fv_files"))).decode(
                errors="replace"
            )
        except ValueError:
            return []
        names = files.split("\n")
        table = ctypes.cast(ctypes.pointer(first), ctypes.POINTER(_Line))
        lines, index = [], 0
        while table[index].address:
            lines.append((int(table[index].address), names[table[index].file], int(table[index].line)))
            index += 1
        return sorted(lines)

    def _side(self, side: SideStruct) -> Side:
        places = []
        waits = side.file and (side.file.decode(errors="replace").replace("\\", "/").rsplit("/", 1)[-1], int(side.line))
        found = (side.pc and self.place(side.pc)) or (side.last and self.place(side.last))
        if first := (found or waits) if side.pc else (waits or found):
            places.append(first)
        places += [found for offset in side.calls if offset and (found := self.place(offset))]
        return Side(bool(side.write), tuple(side.block), tuple(side.thread), tuple(places))

    def _fault(self) -> Fault:
        found = self._library.fv_finding().contents
        sides = tuple(self._side(side) for side in (found.first, found.second) if side.present)
        return Fault(
            KINDS[found.kind],
            found.array.decode(errors="replace"),
            int(found.element),
            int(found.count),
            bool(found.shared),
            sides,
            found.detail.decode(errors="replace"),
        )


def load(path: Path) -> CpuLibrary:
    """The library at ``path``, loaded once."""
    if path not in _libraries:
        _libraries[path] = CpuLibrary(path)
    return _libraries[path]
