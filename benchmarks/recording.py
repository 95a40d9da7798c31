"""What it costs to open a recording and to ask it for a slot, at 100, 1,000 and 10,000 steps.

    python benchmarks/recording.py

Opening is reading the JSON and making the index. Seconds are the best of three; memory is what tracemalloc saw (peak
while opening, and what stays), measured in a run of its own, since tracing slows Python down. The targets at 10,000
steps: under a second, under 100 MB, and a look-up that costs the same as at 100 steps.
"""

from __future__ import annotations

import gc
import random
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flashviz.checks.traffic import running
from flashviz.files import dumps, loads
from flashviz.programs.flash_attention_2 import flash_attention_2

NAMES = ("Qi", "Kj", "Vj", "Sij", "mi", "li", "Oi", "O0", "K0")


def make(steps: int) -> bytes:
    """A recording of about that many steps: FlashAttention-2 with d = 8 and 4 × 4 tiles, numbers and all."""
    tiles = 1
    while 1 + tiles * (3 + 3 * tiles) < steps:
        tiles += 1
    x = np.random.default_rng(0).normal(size=(3, 4 * tiles, 8)).astype("float32")
    return dumps(flash_attention_2(*x, Br=4, Bc=4, device="numpy"))


def opened(data: bytes):
    """The recording with its index."""
    recording = loads(data)
    recording.content(-1, "O0")
    return recording


def best(call, times: int = 3) -> float:
    """Seconds of the fastest of some calls."""
    found = []
    for _ in range(times):
        gc.collect()
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


def measure(steps: int) -> dict[str, float]:
    data = make(steps)
    recording = opened(data)
    count = len(recording.steps)
    asked = [(random.randrange(count), random.choice(NAMES)) for _ in range(20_000)]
    lookup = best(lambda: [recording.content(step, name) for step, name in asked]) / len(asked)
    seconds = best(lambda: opened(data))
    totals = best(lambda: (vars(recording).pop("_running_traffic", None), running(recording)))
    recording = None
    gc.collect()
    tracemalloc.start()
    kept = opened(data)
    gc.collect()
    stays, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "steps": count,
        "events": len(kept.events),
        "file, MB": len(data) / 1e6,
        "open, s": seconds,
        "stays, MB": stays / 1e6,
        "peak, MB": peak / 1e6,
        "a look-up, µs": lookup * 1e6,
        "running totals, s": totals,
    }


def main() -> None:
    random.seed(0)
    columns = [measure(steps) for steps in (100, 1_000, 10_000)]
    for name in columns[0]:
        cells = [f"{c[name]:,.0f}" if isinstance(c[name], int) else f"{c[name]:,.3f}" for c in columns]
        print(f"{name:<18}" + "".join(cell.rjust(12) for cell in cells))


if __name__ == "__main__":
    main()
