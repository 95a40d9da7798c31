"""What the processor back end costs: compiling, running and checking, and the same source against its tile program in NumPy.

    .venv/bin/python benchmarks/cpu.py

Targets: the first compile of a kernel at most 3 s (with the runtime, which is compiled once), a run at N = 512, d = 64 at most 0.5 s, and
a second run compiles nothing. Nothing here is a test: times depend on the machine.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np

import flashviz as fv
from flashviz import cuda
from flashviz.cuda import cpu

N, D, BLOCK = 512, 64, 32


def seconds(work: Callable[[], object], repeat: int = 1) -> float:
    """Median of ``repeat`` turns."""
    taken = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def main() -> int:
    status = cpu.status()
    if not status.usable:
        print(f"{status.reason} Fix: {status.fix}")
        return 0
    rng = np.random.default_rng(0)
    Q, K, V = (rng.standard_normal((1, 1, N, D), dtype=np.float32) for _ in range(3))
    O, L = np.empty_like(Q), np.empty((1, 1, N), np.float32)
    rows: list[tuple[str, float, str]] = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["FLASHVIZ_CACHE"] = cache
        kernel = cuda.Kernel("flash_attention_2", {"Br": BLOCK, "Bc": BLOCK, "D": D})
        other = cuda.Kernel("flash_attention_2", {"Br": BLOCK, "Bc": BLOCK // 2, "D": D})
        sizes = {"Nq": N, "Nk": N, "scale": 0.125, "causal": 0, "Hq": 1, "Hkv": 1}
        arguments = {"Q": Q, "K": K, "V": V, "O": O, "L": L, **sizes}
        plan, second = cuda.plan(kernel, arguments), cuda.plan(other, arguments)
        rows.append(("first compile, with the runtime", seconds(lambda: cpu.compile_plan(plan)), "at most 3"))
        rows.append(("another instantiation", seconds(lambda: cpu.compile_plan(second)), ""))
        rows.append(("compile again: from the cache", seconds(lambda: cpu.compile_plan(plan), 5), "nothing compiled"))
        rows.append((f"run, N={N}, d={D}", seconds(lambda: cpu.run(plan), 5), "at most 0.5"))
        for order in ("reverse", "random"):
            turn = seconds(lambda order=order: cpu.run(plan, order=order), 5)  # type: ignore[misc]
            rows.append((f"run, {order} order", turn, ""))
        rows.append(("compile for checking", seconds(lambda: cpu.compile_plan(plan, check=True)), ""))
        library = cpu.compile_plan(plan, check=True)
        rows.append(("run, every access looked at", seconds(lambda: cpu.launch_once(library, plan, check=True), 3), ""))
        rows.append(("fv.check, the whole file, first time", seconds(lambda: fv.check("flash_attention_2")), ""))
        rows.append(("fv.check, again", seconds(lambda: fv.check("flash_attention_2")), ""))
    numpy = seconds(lambda: fv.flash_attention_2(Q, K, V, Br=BLOCK, Bc=BLOCK, device="numpy", record=False), 3)
    rows.append(("the tile program in NumPy, same sizes", numpy, ""))
    print(f"flash_attention_2, compiler {status.compiler.rsplit('/', 1)[-1]}, {os.cpu_count()} processors")
    for what, taken, target in rows:
        print(f"{what:<40}{taken:>8.3f} s  {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
