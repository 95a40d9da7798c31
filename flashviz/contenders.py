"""What `fv.bench` times: the ladder's kernels on one problem, PyTorch's beside them, and what the machine can do at most."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from flashviz import ladder
from flashviz.bfloat16 import to_bfloat16
from flashviz.checks.attention import Attention
from flashviz.cuda import cpu, gpu
from flashviz.cuda.choices import arguments, fixed_values, planned
from flashviz.cuda.gpu import KernelError
from flashviz.cuda.launching import Kernel, LaunchError, plan
from flashviz.cuda.signatures import ArgumentError
from flashviz.cuda.sources import SourceError, find
from flashviz.cuda.splits import choose_splits
from flashviz.cuda.timing import Timed, first_error, milliseconds, poison

PEERS = {
    "float32": {"PyTorch memory-efficient": "EFFICIENT_ATTENTION"},
    "float16": {"PyTorch flash": "FLASH_ATTENTION", "PyTorch cuDNN": "CUDNN_ATTENTION"},
}
ROTATED = 2**28  # bytes of K and V that a decoding kernel is given in turns: more than any L2 holds


@dataclass(frozen=True)
class Case:
    """One problem. ``ladder`` is "prefill" (Nq = N) or "decode" (one query a head, which is asked again and again)."""

    ladder: str
    B: int
    Hq: int
    Hkv: int
    N: int
    d: int
    causal: bool = False

    @property
    def Nq(self) -> int:
        """Queries of a head."""
        return self.N if self.ladder == "prefill" else 1

    @property
    def flop(self) -> float:
        """Floating-point operations: two products, of the pairs that are seen."""
        pairs = self.N * (self.N + 1) / 2 if self.causal else self.N * self.Nq
        return 4.0 * self.B * self.Hq * pairs * self.d

    def bytes(self, size: int) -> float:
        """Bytes that cross HBM at least, Q, K, V and O once, with ``size`` bytes an element."""
        return float(size * self.d * self.B * 2 * (self.Hq * self.Nq + self.Hkv * self.N))


@dataclass
class Contender:
    """One that is timed: ``launches`` do the work once each, on data of their own; ``check`` says what is wrong with the last result."""

    name: str
    row: dict[str, Any]
    launches: Sequence[Callable[[], Any]] = ()
    check: Callable[[], Any] | None = None
    clear: Callable[[], None] = lambda: None
    times: list[float] = field(default_factory=list)


def inputs(case: Case, dtype: str, device: str, sets: int = 1) -> list[tuple[Any, Any, Any]]:
    """Q, K and V of a case, standard normal, on ``device``: one Q, and ``sets`` of K and V."""
    shapes = [(case.B, case.Hq, case.Nq, case.d), *[(case.B, case.Hkv, case.N, case.d)] * 2 * sets]
    if device == "gpu":
        random = gpu.library().random
        random.seed(0)
        made = [random.standard_normal(shape, dtype=np.float32).astype(dtype) for shape in shapes]
    else:
        rng = np.random.default_rng(0)
        numbers = [rng.standard_normal(shape, np.float32) for shape in shapes]
        made = [to_bfloat16(x) if dtype == "bfloat16" else x.astype(dtype) for x in numbers]
    return [(made[0], made[n], made[n + 1]) for n in range(1, len(made), 2)]


def template_of(rung: ladder.Rung, d: int) -> dict[str, Any]:
    """The template values that are measured for a head dimension; where none are, those of the last @instance of that dimension.

    Raises LaunchError: the kernel has none for that dimension.
    """
    if d in rung.measured:
        return dict(rung.measured[d])
    for values in reversed(find(rung.kernel).header.instances):
        if values.get("D") == d:
            return {n: v for n, v in values.items() if n not in ("D", "T", "Causal", "Aligned")}
    raise LaunchError(f"{rung.kernel} has no @instance for d={d}")


def of_rung(rung: ladder.Rung, case: Case, data: Sequence[Any], problem: Attention, device: str) -> Contender:
    """A rung on a case; raises what planning and compiling raise."""
    multiprocessors = gpu.status().multiprocessors if device == "gpu" else 2
    limits = gpu.status().limits if device == "gpu" else cpu.LIMITS
    values = template_of(rung, case.d)
    row: dict[str, Any] = {"rung": rung.name, "kernel": rung.kernel, "idea": rung.idea, "values": values}
    if rung.kernel == "flash_decoding":
        timed, launches = _two_kernels(case, data, values, row, device, multiprocessors, limits)
    else:
        source = find(rung.kernel)
        timed, launches = [], []
        for Q, K, V in data:
            args: dict[str, Any] = {"Q": Q, "K": K, "V": V, "causal": int(case.causal)}
            if case.ladder == "decode":
                heads = case.B * (case.Hq if "Hq" in source.header.grid[1] else case.Hkv)
                Bc, each = int(values["Bc"]), rung.each(case.d, int(values["Bc"]))
                args["splits"] = row["splits"] = choose_splits(heads, case.N, multiprocessors, Bc, each=each)
            fixed = fixed_values(source, args)
            full = arguments(source, args | (timed[0].outputs if timed else {}), fixed, device)
            one = Timed(planned(rung.kernel, source, {**fixed, **values}, full, limits), device)
            timed.append(one)
            launches.append(one.launch)
    outputs = timed[-1].outputs

    def clear() -> None:
        poison(outputs["O"])
        poison(outputs["L"])

    return Contender(rung.label, row, launches, lambda: problem.check(outputs["O"], outputs["L"]), clear)


def _two_kernels(
    case: Case,
    data: Sequence[Any],
    values: dict[str, Any],
    row: dict[str, Any],
    device: str,
    multiprocessors: int,
    limits: Any,
) -> tuple[list[Timed], list[Callable[[], Any]]]:
    """The chapter's decoding: one kernel for the splits, one that combines them."""
    splits = row["splits"] = choose_splits(case.B * case.Hkv, case.N, multiprocessors, int(values["Bc"]))
    rows = case.Hq // case.Hkv * case.Nq
    template = {**values, "Br": max(int(values["Br"]), rows), "D": case.d}
    first, second = find("flash_decoding"), find("flash_decoding", "flash_decoding_combine")
    timed: list[Timed] = []
    launches: list[Callable[[], Any]] = []
    for Q, K, V in data:
        args = {"Q": Q, "K": K, "V": V, "causal": int(case.causal), "splits": splits}
        full = arguments(first, args, template, device)
        one = Timed(planned("flash_decoding", first, template, full, limits), device)
        shared = {"Os": full["Os"], "Ls": full["Ls"], "Hq": case.Hq, "Hkv": case.Hkv, "Nq": case.Nq}
        merge = {"Splits": splits, "Br": template["Br"], "D": case.d}
        end = arguments(second, shared, merge, device)
        two = Timed(plan(Kernel("flash_decoding", merge, function=second.header.kernel), end, limits), device)
        timed.append(two)

        def launch(one: Timed = one, two: Timed = two) -> None:
            one.launch()
            two.launch()

        launches.append(launch)
    return timed, launches


def contenders(case: Case, rungs: Sequence[ladder.Rung], device: str, torch: Any = None) -> Iterator[Contender]:
    """Everything that is timed on a case; one that cannot run has a reason in its row, and no launches."""
    for dtype in dict.fromkeys(rung.dtype for rung in rungs):
        size = np.dtype(dtype).itemsize
        kv = 2 * case.B * case.Hkv * case.N * case.d * size
        sets = 1 if case.ladder == "prefill" or device == "cpu" else max(2, min(16, -(-ROTATED // kv)))
        data = inputs(case, dtype, device, sets)
        problem = Attention(*data[-1], scale=case.d**-0.5, causal=case.causal)
        common = {**vars(case), "dtype": dtype, "flop": case.flop, "bytes": case.bytes(size)}
        for rung in rungs:
            if rung.dtype != dtype:
                continue
            try:
                one = of_rung(rung, case, data, problem, device)
            except (LaunchError, ArgumentError, KernelError, SourceError, ValueError) as error:
                one = Contender(
                    rung.label, {"rung": rung.name, "kernel": rung.kernel, "reason": first_error(str(error))}
                )
            one.row = {**common, **one.row}
            yield one
        for name, backend in PEERS[dtype].items() if torch is not None else ():
            yield of_torch(torch, name, backend, case, data, problem, common)


def of_torch(
    torch: Any, name: str, backend: str, case: Case, data: Sequence[Any], problem: Attention, common: dict[str, Any]
) -> Contender:
    """PyTorch's attention with one backend."""
    attention = import_module("torch.nn.attention")
    attend = torch.nn.functional.scaled_dot_product_attention
    last: list[Any] = []

    def launch(given: Sequence[Any]) -> None:
        with attention.sdpa_kernel([getattr(attention.SDPBackend, backend)]):
            last[:] = [attend(*given, is_causal=case.causal, enable_gqa=case.Hq != case.Hkv)]

    given = [[torch.from_dlpack(x) for x in one] for one in data]
    launches = [lambda one=one: launch(one) for one in given]
    return Contender(
        name, {**common, "rung": None}, launches, lambda: problem.check(problem.xp.from_dlpack(last[0].contiguous()))
    )


def time_all(found: Sequence[Contender], repeat: int, rest: float, device: str, queued: bool) -> list[dict[str, Any]]:
    """Time contenders in turns, every one checked before and after; their rows, with median, extremes, or the reason why not."""
    running = []
    for one in found:
        if "reason" in one.row:
            continue
        if not _wrong(one, device):
            running.append(one)
    for turn in range(repeat):
        for one in running[:: 1 if turn % 2 else -1]:
            try:
                one.times.append(_time(one, rest, device, queued))
            except Exception as error:  # it was right once: whatever this is, the others go on
                one.row["reason"] = first_error(str(error)) or type(error).__name__
                running = [other for other in running if other is not one]
    for one in running:
        if _wrong(one, device):
            continue
        ms = statistics.median(one.times)
        one.row |= {"ms": ms, "ms min": min(one.times), "ms max": max(one.times), "TFLOP/s": one.row["flop"] / ms / 1e9}
        one.row["TB/s"] = one.row["bytes"] / ms / 1e9
    return [{"name": one.name, **one.row} for one in found]


def _time(one: Contender, rest: float, device: str, queued: bool) -> float:
    """Milliseconds of one launch; queued, the mean of sixteen or more, on each set of data in turn."""
    if device == "cpu":
        start = time.perf_counter()
        one.launches[0]()
        return 1000 * (time.perf_counter() - start)
    time.sleep(rest)  # nobody runs in another's heat
    work = list(one.launches) * (-(-16 // len(one.launches)) if queued else 1)
    one.launches[0]()
    return milliseconds(work, queued) / len(work)


def _wrong(one: Contender, device: str) -> bool:
    """Launch on every set of data, the last one's result from NaN; whether it is wrong. Then the row says why."""
    try:
        one.clear()
        for launch in one.launches:
            launch()
        if device == "gpu":
            gpu.library().cuda.get_current_stream().synchronize()
    except Exception as error:  # PyTorch's and CuPy's have no common type
        one.row["reason"] = first_error(str(error)) or type(error).__name__
        return True
    if one.check:
        verdict = one.check()
        one.row["error"] = verdict.error
        if verdict.wrong:
            one.row |= {"reason": f"wrong: {verdict.wrong}", "wrong": True}
            return True
    return False


def copy_rate(gigabytes: float = 2.0) -> float:
    """TB/s of a copy on the GPU, bytes read plus bytes written."""
    cupy = gpu.library()
    a = cupy.ones(int(gigabytes * 2**27), np.float32)
    b = cupy.empty_like(a)

    def launch() -> None:
        b.data.copy_from_device_async(a.data, a.nbytes, cupy.cuda.get_current_stream())

    launch()
    return float(2 * a.nbytes / statistics.median(milliseconds([launch]) for _ in range(7)) / 1e9)


def product_rate(dtype: str, n: int = 8192) -> float | None:
    """TFLOP/s of one large matrix product by the machine's library, sums in float32; None where there is no such library."""
    cupy = gpu.library()
    with contextlib.suppress(Exception):  # cuBLAS is a package of its own
        a, b = (cupy.random.standard_normal((n, n), dtype=np.float32).astype(dtype) for _ in range(2))
        out = cupy.empty((n, n), dtype)

        def launch() -> None:
            cupy.matmul(a, b, out=out)

        launch()
        return float(2 * n**3 / statistics.median(milliseconds([launch]) for _ in range(7)) / 1e9)
    return None
