"""CUDA kernels: found, read, checked and launched. Importing this loads NumPy and the standard library; CuPy only at a launch on a GPU.

One call launches any kernel file. Sizes, grid, block and shared memory come from the file itself and every argument is held
against what the file declares:

    import numpy as np
    from flashviz import cuda

    B, Hq, Hkv, Nq, Nk, D = 2, 4, 2, 100, 130, 64
    rng = np.random.default_rng(0)
    Q = rng.standard_normal((B, Hq, Nq, D), dtype=np.float32)
    K = rng.standard_normal((B, Hkv, Nk, D), dtype=np.float32)
    V = rng.standard_normal((B, Hkv, Nk, D), dtype=np.float32)
    O, L = np.empty_like(Q), np.empty((B, Hq, Nq), np.float32)
    kernel = cuda.Kernel("flash_attention_2", template={"Br": 32, "Bc": 32, "D": D})
    causal, scale = False, 1 / np.sqrt(D)
    cuda.launch(kernel, (Q, K, V, O, L, Nq, Nk, scale, causal, Hq, Hkv))   # writes O and L

`status` says, in one line and without raising, whether that would run here; `find` gives a kernel's source, the lines of each of
its actions and the bytes of each part of its shared memory; `plan` makes every check of a launch without a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flashviz.cuda import cpu
from flashviz.cuda.banks import BankConflicts, bank_conflicts
from flashviz.cuda.cpu_build import CpuUnavailableError
from flashviz.cuda.gpu import GpuStatus, GpuUnavailableError, KernelError, Launched, Times, run, status
from flashviz.cuda.launching import Kernel, LaunchError, Limits, Plan, plan
from flashviz.cuda.observe import observed
from flashviz.cuda.signatures import ArgumentError
from flashviz.cuda.sources import KernelSource, SourceError, find
from flashviz.cuda.splits import choose_splits
from flashviz.cuda.trace import GUESS, KernelTrace, TraceError, TraceOverflowError, traced, tracing, watched

__all__ = [
    "ArgumentError",
    "BankConflicts",
    "CpuUnavailableError",
    "GpuStatus",
    "GpuUnavailableError",
    "Kernel",
    "KernelError",
    "KernelSource",
    "KernelTrace",
    "LaunchError",
    "Launched",
    "Limits",
    "Plan",
    "SourceError",
    "Times",
    "TraceError",
    "TraceOverflowError",
    "bank_conflicts",
    "choose_splits",
    "find",
    "launch",
    "plan",
    "status",
    "tracing",
]


def launch(
    kernel: Kernel,
    args: Sequence[object] | Mapping[str, object],
    *,
    device: str = "gpu",
    poison: bool = False,
    repeat: int = 0,
    trace: bool | int = False,
) -> Launched:
    """Launch a kernel and wait for it.

    Parameters
    ----------
    kernel
        The kernel file and its template values.
    args
        Arrays (NumPy or CuPy) and numbers, in the order that the kernel declares, or by name. Arrays that the kernel does not
        declare const are its outputs and are written in place, also where they are views.
    device
        "gpu", the current CUDA device, or "cpu", the same source compiled for the processor (see ``flashviz.cuda.cpu``).
    poison
        Fill the outputs with NaN first, so that an element the kernel does not write is seen.
    repeat
        Launch this many times more, after a warm-up, timed by CUDA events: see ``Launched.times``.
    trace
        Compile with tracing on and read what each block did: see ``Launched.trace``. A number is how many actions a block will
        perform at most; where one performs more, the launch is repeated with room for them all.

    Raises
    ------
    SourceError, ArgumentError, LaunchError
        Before anything is launched: no such kernel, wrong arguments, more than the device allows.
    GpuUnavailableError
        No GPU is usable here; the message says why and what to install.
    CpuUnavailableError
        device="cpu", and there is no C++ compiler; the message says what to install.
    KernelError
        The kernel does not compile or failed while it ran; the message names it.
    TraceError
        The kernel does not say what a trace must say.
    """
    if device not in ("gpu", "cpu"):
        raise LaunchError(f'device="{device}": kernels run on "gpu" and "cpu".')
    on = cpu.run if device == "cpu" else run
    found = status() if device == "gpu" else None
    limits = found.limits if found and found.usable else cpu.LIMITS if device == "cpu" else None
    ready = plan(kernel, args, limits)
    watch = watched()
    if trace is False and watch is None:
        return on(ready, poison=poison, repeat=repeat)
    room = next(watch.rooms, GUESS) if watch else GUESS
    room = room if isinstance(trace, bool) else trace
    if watch and watch.observe and device == "cpu":
        launched = observed(ready, room=room, poison=poison)
    else:
        launched = traced(ready, on, device, room=room, poison=poison, repeat=repeat)
    if watch and launched.trace:
        watch.traces.append(launched.trace)
    return launched
