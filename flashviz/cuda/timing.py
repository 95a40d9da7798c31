"""A planned launch, run again and again: each time from outputs full of NaN, each time timed, so that whatever is timed can be checked."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from flashviz.cuda import cpu, gpu
from flashviz.cuda.cpu_faults import MEANING, sentence
from flashviz.cuda.gpu import KernelError
from flashviz.cuda.launching import Plan
from flashviz.cuda.tensor_maps import TensorMapError


def place(values: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Arguments with their arrays on ``device``, contiguous: copies where they are elsewhere. Scalars stay as they are."""
    if device == "gpu":
        cupy = gpu.library()
        return {n: cupy.ascontiguousarray(cupy.asarray(v)) if np.ndim(v) else v for n, v in values.items()}
    return {
        n: np.ascontiguousarray(v.get() if hasattr(v, "get") else v) if np.ndim(v) else v for n, v in values.items()
    }


class Timed:
    """``plan`` compiled for ``device``, where its arrays are.

    Raises KernelError where it does not compile or the driver makes no tensor maps; GpuUnavailableError or CpuUnavailableError.
    """

    def __init__(self, plan: Plan, device: str) -> None:
        self.plan, self.device = plan, device
        self.outputs: dict[str, Any] = {name: plan.arguments[name] for name in plan.outputs}
        try:
            if device == "gpu":
                self._launch = gpu.launcher(plan)
            else:
                self._library = cpu.compile_plan(plan)
        except (gpu.GpuUnavailableError, cpu.CpuUnavailableError):
            raise
        except TensorMapError as error:
            raise KernelError(str(error)) from error
        except Exception as error:  # the compiler's: CuPy has several types of it
            raise KernelError(f"does not compile: {first_error(str(error))}") from error

    def run(self) -> float:
        """Fill the outputs with NaN, launch once and wait; milliseconds of the launch. Raises KernelError."""
        if self.device == "gpu":
            for output in self.outputs.values():
                poison(output)
            return milliseconds([self.launch])
        start = time.perf_counter()
        self.launch()
        return 1000 * (time.perf_counter() - start)

    def launch(self) -> None:
        """Launch once. On a GPU it does not wait, and outputs keep what they held; on the processor they start as NaN."""
        if self.device == "gpu":
            self._launch()
            return
        outcome, outputs = cpu.launch_once(self._library, self.plan, poison=True)
        if outcome.fault:
            said = sentence(outcome.fault, self.plan.source.path.name, plan=self.plan)
            raise KernelError(f"{self.plan.instance}, on the processor: {said} {MEANING[outcome.fault.kind]}")
        for name, value in outputs.items():
            self.outputs[name][...] = value


def poison(array: Any) -> None:
    """Fill an array with NaN; one of whole numbers, which may be the bits of bfloat16, with all bits set."""
    if array.dtype.kind == "f":
        array.fill(np.nan)
    else:
        array.view(np.uint8).fill(255)


HOLD = """extern "C" __global__ void hold(long long cycles) {
    for (const long long start = clock64(); clock64() - start < cycles;) {}
}"""


def milliseconds(launches: Sequence[Callable[[], Any]], queued: bool = False) -> float:
    """Milliseconds of launches on the GPU's default stream, one after the other, by CUDA events.

    With ``queued`` a kernel holds the GPU until all of them wait in line: so the time is the GPU's alone, also where launching takes
    the host longer than the kernel runs.
    """
    cupy = gpu.library()
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    try:
        if queued:
            cupy.RawKernel(HOLD, "hold")((1,), (1,), (np.int64(2_000_000),))
        start.record()
        for launch in launches:
            launch()
        end.record()
        end.synchronize()
    except Exception as error:
        raise KernelError(f"The launch failed on the GPU: {first_error(str(error))}") from error
    return float(cupy.cuda.get_elapsed_time(start, end))


def first_error(text: str) -> str:
    """The line of a compiler's or driver's message that says what is wrong."""
    if said := re.search(r'([^\s]+\(\d+\)): [^\n]*static assertion failed with "([^"]*)"', text):
        return f"{said[1]}: {said[2]}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next(
        (line for line in lines if "error" in line.lower() and not line.startswith("#")), lines[0] if lines else ""
    )
