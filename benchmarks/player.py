"""What it costs to open a player and to go on by a step, beside a plain matplotlib ``savefig`` of the same frames.

    python benchmarks/player.py

Opening is ``fv.play(run)`` up to the widgets: first in a fresh process after its imports, then again in the same one. A
further step is all that the kernel does when a reader presses Next: the picture, the marks, the counts, and the next
frame made ahead. Plain savefig writes the same scene as one SVG figure. Targets on the 2 × 2 picture: open within
0.5 s, a further step within 10 ms.
"""

from __future__ import annotations

import io
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import flashviz as fv  # noqa: E402
from flashviz.player import Player  # noqa: E402
from flashviz.view.page import Page  # noqa: E402
from flashviz.view.storyboard import frame  # noqa: E402

FRESH = """
import sys, time
sys.path.insert(0, {root!r})
import benchmarks.player as b
run = b.run(2, 2)
start = time.perf_counter()
b.fv.play(run)
print(time.perf_counter() - start)
"""


def run(rows: int, keys: int) -> fv.Run:
    """FlashAttention-2 with that many tiles of 4 rows, d = 4."""
    rng = np.random.default_rng(0)
    Q, K, V = (rng.normal(size=(n, 4)).astype("float32") for n in (4 * rows, 4 * keys, 4 * keys))
    return fv.flash_attention_2(Q, K, V, Br=4, Bc=4, device="numpy")


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def fresh() -> float:
    """Seconds to open the first player of a process."""
    code = FRESH.format(root=str(ROOT))
    made = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return float(made.stdout)


def steps_of(player: Player) -> list[float]:
    return [seconds(lambda n=n: player.go(n)) for n in range(1, len(player))]


def savefig(recording: fv.Recording, number: int) -> None:
    frame(recording, number, 1.0).savefig(io.BytesIO(), format="svg")


def ms(times: list[float]) -> str:
    return f"median {statistics.median(times) * 1e3:7.2f} ms   worst {max(times) * 1e3:7.2f} ms"


def line(name: str, text: str) -> None:
    print(f"  {name:<44}{text}")


def report(name: str, recording: fv.Recording, shown: list[int]) -> None:
    count = len(recording.steps)
    print(f"{name}: {count} steps")
    opened = [seconds(lambda: fv.play(recording)) for _ in range(5)]
    line("open, again", ms(opened))
    player = fv.play(recording)
    steps = steps_of(player)
    line("a further step", ms(steps))
    line("  the same steps once more", ms(steps_of(player)))
    plain = [seconds(lambda n=n: savefig(recording, n)) for n in shown]
    line("plain savefig(svg) of a frame", ms(plain))
    line("  savefig : a further step", f"{statistics.median(plain) / statistics.median(steps):.1f} : 1 (medians)")
    line("  savefig of all steps : opening", f"{statistics.median(plain) * count / statistics.median(opened):.1f} : 1")
    line("_repr_mimebundle_ (a PNG of the storyboard)", ms([seconds(player._repr_mimebundle_) for _ in range(3)]))
    pages: list[str] = []
    line("a page", f"{seconds(lambda: pages.append(Page(recording).document())):.2f} s to write")
    size = len(pages[0].encode())
    line("  its bytes", f"{size:,}, {size / count:,.0f} a step (code, style and script included)")


def main() -> None:
    first = [fresh() for _ in range(3)]
    print("the first player of a process, after its imports, three processes")
    line("open, first", f"{', '.join(f'{t:.3f}' for t in first)} s")
    small, large = run(2, 2).recording, run(10, 13).recording
    assert small is not None
    assert large is not None
    report("2 × 2 tiles", small, list(range(len(small.steps))))
    report("10 × 13 tiles", large, list(range(0, len(large.steps), 20)))


if __name__ == "__main__":
    main()
