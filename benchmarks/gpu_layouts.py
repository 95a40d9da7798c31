"""Question 13, timed: rung 4 with plain, padded and swizzled tiles on this machine's GPU: `python benchmarks/gpu_layouts.py --out FOLDER`.

Needs CuPy and NumPy, a few seconds. The three are candidates of `fv.autotune`: each run starts from NaN, is held against float64,
and they take turns. Writes layouts.json, which is stored as flashviz/_measured/layouts.json; with a kernel's bytes of shared
memory a block and the passes that its reads of a tile of keys take, counted.

Where there is no usable GPU it says so and ends.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flashviz import cuda  # noqa: E402
from flashviz.tuning import autotune  # noqa: E402
from flashviz.warp import LAYOUTS, chunk_address, wavefronts  # noqa: E402

KERNEL = "flash_attention_2_async"
N, TOKENS, WIDTH, TILE = 4096, 16384, 2048, 64


def passes(d: int, layout: str) -> int:
    """Passes that ldmatrix takes for all of a tile of keys."""
    reads = [
        [chunk_address(row + n, c, d, layout) for n in range(8)] for row in range(0, TILE, 8) for c in range(d // 8)
    ]
    return sum(wavefronts(addresses, 16) for addresses in reads)


def timed(d: int) -> list[dict[str, object]]:
    """A row for each layout."""
    rng = np.random.default_rng(0)
    shape = (TOKENS // N, WIDTH // d, N, d)
    Q, K, V = (rng.standard_normal(shape, dtype=np.float32).astype(np.float16) for _ in range(3))
    tried = {"Br": [TILE], "Bc": [TILE], "Layout": list(range(len(LAYOUTS)))}
    found = autotune(
        KERNEL, {"Q": Q, "K": K, "V": V, "causal": 0}, tried, device="gpu", progress=False, refresh=True, repeat=9
    )
    rows: list[dict[str, object]] = []
    for one in sorted(found.candidates, key=lambda one: int(one.values["Layout"])):
        layout = LAYOUTS[int(one.values["Layout"])]
        shared = cuda.find(KERNEL).shared_bytes({**found.fixed, **one.values})
        rate = None if one.milliseconds is None else 4 * TOKENS * WIDTH * N / one.milliseconds / 1e9
        counted = {"passes": passes(d, layout), "shared bytes": shared}
        rows.append(
            {"d": d, "N": N, "layout": layout, "ms": one.milliseconds, "TFLOP/s": rate, **counted, "reason": one.reason}
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    options = parser.parse_args(argv)
    found = cuda.status()
    if not found.usable:
        print(f"Nothing is timed: {found.reason} {found.fix}".strip())
        return 0
    machine = {"gpu": found.device, "multiprocessors": found.multiprocessors, "date": datetime.date.today().isoformat()}
    rows = [row for d in (64, 128) for row in timed(d)]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "layouts.json").write_text(json.dumps({**machine, "kernel": KERNEL, "rows": rows}, indent=1) + "\n")
    for row in rows:
        print(*(f"{name} {value}" for name, value in row.items()), sep="  ")
    return int(any(row["reason"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
