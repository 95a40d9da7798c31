"""`fv.bench` and `flashviz bench`: the ladder on this machine's GPU, beside PyTorch and the roofline; stored figures where there is no GPU.

Every kernel's output is held against float64 before and after it is timed. Contenders take turns, with a rest before each, since a warm
chip is slower; a time is a median of CUDA events. A decoding kernel is launched in a queue, on K and V in turns, so that neither the
host nor L2 is measured.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from flashviz import ladder
from flashviz.contenders import Case, contenders, copy_rate, product_rate, time_all
from flashviz.cuda import gpu
from flashviz.measurements import measured
from flashviz.programs.device import DeviceError

NAME = "ladder"
FILES = (".json", ".png", ".svg", ".pdf")


def prefill(d: int, N: int, causal: bool = False) -> Case:
    """B · N = 16384 tokens and H · d = 2048, whatever N and d are."""
    return Case("prefill", max(1, 16384 // N), 2048 // d, 2048 // d, N, d, causal)


def decode(d: int, B: int, N: int, group: int = 1) -> Case:
    """Heads of K and V with H · d = 2048, each read by ``group`` query heads."""
    return Case("decode", B, 2048 // d * group, 2048 // d, N, d)


QUICK = (prefill(64, 4096), prefill(128, 4096, True), decode(128, 1, 131072), decode(128, 16, 8192, 8))
CASES = (
    *(
        prefill(d, N, causal)
        for d in (64, 128)
        for N, causal in ((1024, False), (4096, False), (4096, True), (16384, False))
    ),
    *(decode(d, B, N) for d in (64, 128) for B, N in ((1, 4096), (1, 131072), (16, 8192))),
    *(decode(128, B, N, 8) for B, N in ((1, 131072), (16, 8192))),
)


@dataclass(frozen=True)
class Bench:
    """What was timed. Prints as a table for each problem.

    Args:
        where: the machine and the day, in words.
        data: the machine's properties, what it does at most, and ``rows``, a dictionary for each contender and problem: what
            ``flashviz bench -o FILE.json`` writes.
        stored: why these are stored figures of another machine; empty where they were measured now.
    """

    where: str
    data: dict[str, Any] = field(repr=False)
    stored: str = ""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The contenders, one dictionary for each and problem."""
        return list(self.data["rows"])

    @property
    def wrong(self) -> list[dict[str, Any]]:
        """Those that ran and gave a wrong result."""
        return [row for row in self.rows if row.get("wrong")]

    def picture(self, **options: Any) -> Any:
        """`fv.ladder_plot` of it, a matplotlib figure."""
        from flashviz.view.ladder import ladder_plot

        return ladder_plot(self, **options)

    def __str__(self) -> str:
        roofs = [f"copy {self.data['copy TB/s']:.2f} TB/s (read plus written)"]
        roofs += [f"matrix product {dtype} {rate:.0f} TFLOP/s" for dtype, rate in self.data["rates"].items() if rate]
        lines = [f"Measured on {self.where}: {', '.join(roofs)}."]
        lines += filter(None, [self.data.get("note", "")])
        if self.stored:
            lines.insert(0, f"{self.stored} These are stored figures.")
        for problem, rows in problems(self.rows).items():
            lines += ["", problem, *table(rows)]
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        """Write the figures (``.json``) or the picture (one of FILES). Raises ValueError for another suffix."""
        path = Path(path)
        if path.suffix == ".json":
            rows = ",\n".join(json.dumps(row) for row in self.rows)
            head = json.dumps({name: value for name, value in self.data.items() if name != "rows"})
            path.write_text(f'{head[:-1]}, "rows": [\n{rows}\n]}}\n', encoding="utf-8")
        elif path.suffix in FILES:
            self.picture().savefig(path, dpi=150)
        else:
            raise ValueError(f"{path.name}: a name ends in one of {', '.join(FILES)}")


def bench(quick: bool = False, *, cases: Sequence[Case] | None = None, progress: bool = True) -> Bench:
    """Time every rung of the ladder that this machine's GPU runs, and PyTorch's attention where it is installed.

    Args:
        quick: a few problems only, under a minute.
        cases: other problems.
        progress: whether to say on standard error what is being timed.

    Returns:
        The figures; without a usable GPU those that are stored with flashviz, which then say where they were measured.

    Raises:
        DeviceError: no GPU is usable and nothing is stored.
    """
    found = gpu.status()
    if not found.usable:
        kept = measured(NAME)
        reason = " ".join(filter(None, [found.reason, found.fix and f"To add it: {found.fix}."]))
        if kept is None:
            raise DeviceError(f"{reason} And no figures are stored with this version.")
        return Bench(kept.where, kept.data, reason)
    torch = _torch()
    cupy = gpu.library()
    data: dict[str, Any] = {
        "gpu": found.device,
        "multiprocessors": found.multiprocessors,
        "date": datetime.date.today().isoformat(),
        "versions": found.versions + (f", PyTorch {torch.__version__}" if torch else ""),
        "copy TB/s": copy_rate(),
        "rates": {dtype: product_rate(dtype) for dtype in ("float32", "float16")},
    }
    rows: list[dict[str, Any]] = []
    chosen = cases or (QUICK if quick else CASES)
    for number, case in enumerate(chosen, 1):
        if progress:
            print(f"{number}/{len(chosen)}  {title(vars(case))}", file=sys.stderr, flush=True)
        rows += measure(case, torch=torch)
        cupy.get_default_memory_pool().free_all_blocks()
        if torch is not None:
            torch.cuda.empty_cache()
    gpu_name = found.device.removeprefix("NVIDIA ")
    where = f"one {gpu_name} with {found.multiprocessors} multiprocessors, {data['date']}"
    return Bench(where, {**data, "rows": rows})


def measure(
    case: Case, device: str = "gpu", torch: Any = None, repeat: int = 5, rest: float = 0.05
) -> list[dict[str, Any]]:
    """The rows of one problem."""
    rungs = ladder.PREFILL if case.ladder == "prefill" else ladder.DECODE
    return time_all(list(contenders(case, rungs, device, torch)), repeat, rest, device, case.ladder == "decode")


def title(row: Any) -> str:
    """A problem in a few words."""
    heads = f"{row['Hq']} heads" if row["Hq"] == row["Hkv"] else f"{row['Hq']} heads on {row['Hkv']} of K and V"
    return (
        f"{row['ladder']}: B = {row['B']}, {heads}, N = {row['N']}, d = {row['d']}{', causal' if row['causal'] else ''}"
    )


def problems(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each problem, by its title, in order."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(title(row), []).append(row)
    return found


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The lines of one problem."""
    decoding = rows[0]["ladder"] == "decode"
    lines = [f"  {'':<26}{'':<9}{'ms':>10}{'TB/s' if decoding else 'TFLOP/s':>10}"]
    for row in rows:
        start = f"  {row['name']:<26}{row['dtype']:<9}"
        if "ms" not in row:
            lines.append(f"{start}{'–':>10}{'':>12}{row.get('reason', '')}")
            continue
        rate = row["TB/s"] if decoding else row["TFLOP/s"]
        lines.append(f"{start}{row['ms']:>10.4f}{rate:>10.{2 if decoding else 1}f}  {row.get('idea', '')}".rstrip())
    return lines


def _torch() -> Any:
    """PyTorch, where it is installed and sees the GPU."""
    try:
        torch = import_module("torch")
        return torch if torch.cuda.is_available() else None
    except Exception:  # half-installed ones raise all kinds
        return None
