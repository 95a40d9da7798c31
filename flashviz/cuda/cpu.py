"""The processor as a CUDA device: the same source, launch and checks as on a GPU, run by fibers.

    cuda.launch(kernel, args, device="cpu")

Each CUDA thread is a fiber; `__syncthreads` and warp intrinsics are where one waits for others. Blocks run one after the other. A launch
is bit for bit the same every time, and a kernel without races gives the same bits in each of three thread orders: "forward", "reverse",
"random" (with a seed). Shared memory starts as NaN and has fences; so have the arrays, which the kernel gets as copies.

What differs from a GPU: expf and its like are the C library's, and products and sums are not fused, so the last bits differ; of inline PTX
there are the functions of include/half.cuh and ptx.cuh, and no textures; what needs several blocks at once never ends. Written for Linux,
macOS and Windows on x86-64 and arm64; run by the tests on Linux x86-64 only.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashviz.cuda.cpu_build import INSTALL, CpuUnavailableError, build, find_compiler
from flashviz.cuda.cpu_faults import MEANING, sentence
from flashviz.cuda.cpu_library import ORDERS, CpuLibrary, load
from flashviz.cuda.cpu_results import Outcome
from flashviz.cuda.cpu_source import HostCompileError
from flashviz.cuda.gpu import KernelError, Launched, Times
from flashviz.cuda.launching import Limits, Plan
from flashviz.cuda.signatures import is_array

__all__ = [
    "ORDERS",
    "CpuStatus",
    "CpuUnavailableError",
    "HostCompileError",
    "compile_plan",
    "launch_once",
    "run",
    "status",
]

LIMITS = Limits(name="an H100", processor=True)  # as much as any GPU that the kernels are written for


@dataclass(frozen=True)
class CpuStatus:
    """Whether CUDA source runs on the processor here; if not, ``reason`` and the one command, ``fix``, that adds it."""

    usable: bool
    reason: str
    fix: str = ""
    compiler: str = ""


def status() -> CpuStatus:
    """Whether there is a C++ compiler; never raises, compiles nothing."""
    found = find_compiler()
    if found is None:
        return CpuStatus(False, "There is no C++ compiler here.", INSTALL)
    return CpuStatus(True, f"{found.name} compiles CUDA source for the processor.", compiler=" ".join(found.command))


def compile_plan(plan: Plan, *, check: bool = False, defines: Sequence[str] = ()) -> CpuLibrary:
    """The library of a plan's instantiation, compiled or from the cache; kernel number 0 of it.

    ``defines`` are macros ("NAME" or "NAME=VALUE") for the source. Raises CpuUnavailableError, or HostCompileError naming file and line.
    """
    return load(build(plan.source.assembled, [plan.instance], check=check, defines=defines).path)


def launch_once(
    library: CpuLibrary,
    plan: Plan,
    *,
    order: str = "forward",
    seed: int = 0,
    index: int = 0,
    check: bool = False,
    poison: bool = False,
    seconds: int = 0,
    log: int = 0,
    banks: bool = False,
) -> tuple[Outcome, dict[str, np.ndarray]]:
    """One run of a compiled plan on copies: what it gave, and its outputs by name, new contiguous arrays.

    ``index`` is the number of the plan's instantiation in the library. ``poison`` fills the outputs (but those that the header says
    are read first, @inout) with NaN, or all bits set, first. ``seconds`` is the time limit (0: none). With ``log`` up to that many
    memory accesses are in the outcome, with ``banks`` the uses of shared memory's banks; these and ``check`` need a library compiled for
    checking.
    """
    initialised = plan.source.header.inout
    passed = {name: _host(value) if is_array(value) else value for name, value in plan.arguments.items()}
    for name in plan.outputs:
        passed[name] = passed[name].copy()
        if poison and name not in initialised:
            passed[name].view(np.uint8)[...] = 255  # NaN in every floating type
    outcome = library.launch(
        index,
        plan.grid,
        plan.block,
        plan.shared_bytes,
        passed,
        plan.outputs,
        order=order,
        seed=seed,
        check=check,
        initialised=initialised,
        seconds=seconds,
        log=log,
        banks=banks,
    )
    return outcome, {name: passed[name] for name in plan.outputs}


def run(
    plan: Plan,
    *,
    poison: bool = False,
    repeat: int = 0,
    warm_up: int = 0,
    order: str = "forward",
    seed: int = 0,
    defines: Sequence[str] = (),
    device_globals: Mapping[str, Any] | None = None,
) -> Launched:
    """Run ``plan`` on the processor. Outputs are written in place, whatever their strides; CuPy arrays are copied here and back.

    Parameters
    ----------
    poison, repeat
        As for ``cuda.launch``; times are of the whole run, by the processor's clock.
    order, seed
        The order of threads and blocks: "forward", "reverse" or "random" with a seed.
    defines, device_globals
        Macros to compile with, and ``extern "C"`` device globals to set before the launch, by name: a NumPy scalar sets a variable,
        a contiguous NumPy array sets a pointer to itself, and what the kernel writes there is in the array afterwards.

    Raises CpuUnavailableError, or KernelError naming the kernel.
    """
    if order not in ORDERS:
        raise ValueError(f"order={order!r} is none of {', '.join(ORDERS)}")
    label = f"{plan.source.path.name}: {plan.instance}"
    try:
        library = compile_plan(plan, defines=defines)
    except HostCompileError as error:
        raise KernelError(f"{label} does not compile for the processor.\n{error}") from error
    for name, value in (device_globals or {}).items():
        library.set_global(name, value)
    taken = []
    outputs: dict[str, np.ndarray] = {}
    for turn in range(warm_up + repeat + 1):
        start = time.perf_counter()
        outcome, outputs = launch_once(library, plan, order=order, seed=seed, poison=poison)
        if turn > warm_up:
            taken.append(1000 * (time.perf_counter() - start))
        if outcome.fault:
            said = sentence(outcome.fault, plan.source.path.name, plan=plan)
            raise KernelError(f"{label}, on the processor: {said} {MEANING[outcome.fault.kind]} fv.check says where.")
    for name, value in outputs.items():
        given = plan.arguments[name]
        if isinstance(given, np.ndarray):
            given[...] = value
        else:
            given.set(value)
    return Launched(
        plan, {name: plan.arguments[name] for name in plan.outputs}, Times(tuple(taken)) if repeat else None
    )


def _host(value: Any) -> np.ndarray:
    return np.ascontiguousarray(value.get() if hasattr(value, "get") and not isinstance(value, np.ndarray) else value)
