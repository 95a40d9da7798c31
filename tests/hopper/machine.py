"""Runs the Hopper kernels' own source in the emulation beside this file, machine.hpp: for their order of waiting, not for speed."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flashviz import cuda
from flashviz.cuda import trace
from flashviz.cuda.cpu_build import require_compiler
from flashviz.cuda.launching import Limits
from flashviz.cuda.sources import find, folders
from flashviz.cuda.trace import CAPACITY, DEFINE, RECORDS, REGIONS, ROLES, KernelTrace, decode

HERE = Path(__file__).parent


class EmulationError(AssertionError):
    """What the emulation found: a block in which nothing goes on, a copy that nobody waited for."""


class Machine:
    """All instantiations of a kernel file, compiled once; ``launch`` runs one as ``cuda.launch`` would.

    ``edit`` changes the assembled source, to plant faults. Launches know so many ``multiprocessors``. With ``defines`` that
    turn tracing on, the last launch's trace is in ``traces``.
    """

    def __init__(
        self,
        file: str,
        folder: Path,
        edit: Callable[[str], str] = str,
        more: Sequence[Mapping[str, Any]] = (),
        defines: Sequence[str] = (),
    ) -> None:
        self.traces: list[KernelTrace] = []
        self.file, self.seed, self.late = file, 0, False
        sources = [find(file, function) for function in find(file).kernels]
        self.instances = [s.signature.instance(v) for s in sources for v in (*s.header.instances, *more)]
        names = ", ".join(f"invoke<{name}>" for name in self.instances)
        code = f'{edit(sources[0].assembled)}\n#include "machine.hpp"\nvoid (*const emulation::kernels[])(void**) = {{{names}}};\n'
        (folder / f"{file}.cpp").write_text(code, encoding="utf-8")
        host = next(place / "host" for place in folders() if (place / "host").is_dir())
        library = folder / f"{file}.so"
        command = [*require_compiler().command, "-std=c++17", "-O1", "-w", "-Wno-psabi", "-shared", "-fPIC"]
        command += [
            *(f"-D{name}" for name in defines),
            "-DFLASHVIZ_HOST",
            "-DHOPPER_EMULATED",
            f"-I{HERE}",
            f"-I{host}",
            "-include",
            str(HERE / "ptx.hpp"),
        ]
        subprocess.run([*command, str(folder / f"{file}.cpp"), "-o", str(library)], check=True)
        self._library = ctypes.CDLL(str(library))
        self._traced = DEFINE in defines
        self._emulate = self._library.emulate
        self._emulate.restype = ctypes.c_char_p

    def launch(self, kernel: cuda.Kernel, args: Any, multiprocessors: int = 3, **_: Any) -> None:
        """Launch on NumPy arrays, in place. Raises EmulationError."""
        plan = cuda.plan(kernel, args, Limits(arch=90, multiprocessors=multiprocessors))
        values = [
            tensor_map(plan.maps[name], value) if name in plan.maps else pointer(value) if value.shape else value
            for name, value in plan.arguments.items()
        ]
        held = [np.atleast_1d(value) for value in values]
        given = (ctypes.c_void_p * len(held))(*(value.ctypes.data for value in held))
        index = self.instances.index(plan.instance)
        buffers = self._buffers(plan) if self._traced else None
        said = self._emulate(index, plan.grid[0], plan.block[0], given, self.seed, int(self.late)).decode()
        if said:
            raise EmulationError(f"{plan.instance}, {plan.grid[0]} blocks, seed {self.seed}: {said}")
        if buffers:
            self.traces[:] = [decode(plan, *buffers, "gpu")]

    def _buffers(self, plan: cuda.Plan, room: int = 400) -> tuple[np.ndarray, np.ndarray]:
        """Where the launch to come writes its trace."""
        records, regions = made = trace.buffers(plan, room)
        for name, value in ((RECORDS, records.ctypes.data), (REGIONS, regions.ctypes.data)):
            ctypes.c_void_p.in_dll(self._library, name).value = value
        for name, number in ((CAPACITY, room), (ROLES, len(plan.source.header.roles))):
            ctypes.c_uint64.in_dll(self._library, name).value = number
        return made


def pointer(array: np.ndarray) -> np.ndarray:
    assert array.flags.c_contiguous
    return np.array([array.ctypes.data], np.uint64)


def tensor_map(layout: Any, array: np.ndarray) -> np.ndarray:
    """The 128 bytes of the emulation's own map: struct Map of machine.hpp."""
    said = np.concatenate(
        [
            np.array([array.ctypes.data, *layout.strides], np.int64).view(np.uint8),
            np.array([*layout.sizes, *layout.box, layout.swizzle], np.int32).view(np.uint8),
        ]
    )
    raw = np.zeros(256, np.uint8)
    raw = raw[-raw.ctypes.data % 64 :][:128]
    raw[: said.size] = said
    return raw
