"""`fv.autotune`: the block sizes, stages and warps with which a kernel is fastest on this GPU, found by trying them.

A kernel says in its header what is worth trying, `// @tune Br=64,128 Bc=32,64 Warps=4,8`. What cannot launch is skipped, with the
reason. Everything else is run from outputs full of NaN and held against float64, every run of it, and only times of right runs count.
The result is kept in the user's cache folder for this GPU, driver, source, shapes and candidates.
"""

from __future__ import annotations

import datetime
import hashlib
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flashviz.checks.attention import Attention
from flashviz.cuda import cpu, gpu
from flashviz.cuda.choices import arguments, candidates_of, fixed_values, planned, sizes_of
from flashviz.cuda.gpu import KernelError
from flashviz.cuda.kept import read, write
from flashviz.cuda.launching import LaunchError
from flashviz.cuda.signatures import ArgumentError
from flashviz.cuda.sources import KernelSource, find
from flashviz.cuda.timing import Timed, first_error, place
from flashviz.measurements import measured
from flashviz.programs.device import DeviceError, choose_device

FORMAT = 1
SLOWER = 1.6  # times the fastest so far: a candidate that is slower by more is run no further
Values = Mapping[str, "int | str"]
Check = Callable[[Mapping[str, Any]], str]


class AutotuneError(RuntimeError):
    """No candidate runs and is right; the message says what became of each."""


@dataclass(frozen=True)
class Candidate:
    """One choice of template values.

    Args:
        values: by name; those that every candidate shares are left out.
        milliseconds: the median of its runs, None where it was not timed.
        runs: how many runs it was timed in.
        reason: why it was skipped or rejected, empty where it is right.
        skipped: whether it cannot run at all.
    """

    values: Values
    milliseconds: float | None = None
    runs: int = 0
    reason: str = ""
    skipped: bool = False

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.values.items()) or "as it is"


@dataclass(frozen=True)
class Tuned:
    """What `autotune` found. Prints as a table.

    Args:
        kernel: the kernel's name.
        where: the machine and the day, in words.
        sizes: of the arguments' dimensions and scalars.
        fixed: template values that all candidates share.
        candidates: the fastest first, then those that were rejected or skipped.
        cached: whether it comes from the cache, and nothing was run.
    """

    kernel: str
    where: str
    sizes: Mapping[str, Any]
    fixed: Values
    candidates: tuple[Candidate, ...] = field(repr=False)
    cached: bool = False

    @property
    def best(self) -> dict[str, int | str]:
        """Template values of the fastest candidate, complete: ``cuda.Kernel(file, template=tuned.best)``."""
        return {**self.fixed, **self.candidates[0].values}

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The candidates as plain data, which `fv.autotune_plot` draws."""
        return [{**vars(c), "values": dict(c.values)} for c in self.candidates]

    def picture(self) -> Any:
        """A matplotlib figure: a bar for each candidate, the reason where there is no time."""
        from flashviz.view.tuning import autotune_plot

        return autotune_plot(self)

    def __str__(self) -> str:
        width = max(len(str(candidate)) for candidate in self.candidates)
        lines = [f"{self.kernel}, {', '.join(f'{n}={v}' for n, v in self.sizes.items())}, on {self.where}"]
        for one in self.candidates:
            said = one.reason if one.milliseconds is None or one.reason else f"{one.milliseconds:10.4f} ms"
            lines.append(
                f"  {one!s:<{width}}  {'' if not one.reason else 'skipped: ' if one.skipped else 'rejected: '}{said}"
            )
        return "\n".join(lines)


def autotune(
    kernel: str | Path,
    args: Mapping[str, Any],
    candidates: Mapping[str, Sequence[int]] | Sequence[Values] | None = None,
    *,
    function: str = "",
    device: str = "auto",
    check: Check | None = None,
    repeat: int = 7,
    progress: bool | Callable[[int, int, str], None] = True,
    refresh: bool = False,
) -> Tuned:
    """Try a kernel's template values and say which are fastest, among those whose results are right.

    Args:
        kernel: name of a kernel file, or a path to one; ``function`` says which kernel of it.
        args: its arguments by name, as for ``cuda.launch``: arrays of NumPy or CuPy. An O or L that is left out is made. A scalar
            ``causal`` is also what a template parameter Causal gets.
        candidates: values to try, ``{"Br": [64, 128], "Bc": [32, 64]}`` for all combinations, or a list of dictionaries. Left
            out, the kernel's own @tune lines, else its @instance lines. T and D come from the arrays; Aligned is set where rows
            and keys are whole tiles.
        device: ``"gpu"`` (``"auto"`` is the same), or ``"cpu"``, where a time is that of the processor and says nothing of a GPU.
        check: is given the outputs by name after every run and says what is wrong, or nothing. Left out, O and L are held
            against attention in float64.
        repeat: how many runs count; the candidates take turns.
        progress: whether to show a line of progress, or what to call with how many of how many steps are done, and which.
        refresh: measure, even if the cache holds a result.

    Raises:
        DeviceError: there is no GPU here; says what can be done instead.
        AutotuneError: no candidate is right. ValueError: nothing to try, or no way to check.

    >>> import numpy as np
    >>> q = np.ones((1, 1, 8, 8), "float32")
    >>> tuned = autotune("flash_attention_2", {"Q": q, "K": q, "V": q, "Nq": 8, "Nk": 8, "causal": 0, "Hq": 1, "Hkv": 1},
    ...                  {"Br": [4, 8], "Bc": [4]}, device="cpu", progress=False)
    >>> sorted(tuned.best), len(tuned.candidates)
    (['Bc', 'Br', 'D'], 2)
    """
    source = find(kernel, function)
    device = _device(device, source.name)
    given = place(args, device)
    fixed = fixed_values(source, given)
    tried = list(candidates_of(source, candidates, fixed))
    if not tried:
        raise ValueError(f"{source.name} has no @tune and no @instance lines for {fixed}: give candidates=.")
    full = arguments(source, given, fixed, device)
    key = _key(source, given, tried, device, check)
    if not refresh and (kept := read("autotune", key)) is not None:
        return Tuned(**{**kept, "candidates": tuple(Candidate(**one) for one in kept["candidates"])}, cached=True)
    judge = check or _judge(source.name, given)
    show = _shower(source.name, progress)
    limits = gpu.status().limits if device == "gpu" else cpu.LIMITS
    done: list[Candidate] = []
    running: list[_Running] = []
    steps = len(tried) + 1
    for number, values in enumerate(tried):
        show(number, steps, str(Candidate(values)))
        try:
            one = _Running(values, Timed(planned(kernel, source, {**fixed, **values}, full, limits), device))
        except (LaunchError, ArgumentError, KernelError, ValueError) as error:
            done.append(Candidate(values, reason=first_error(str(error)), skipped=True))
            continue
        if one.right(judge):
            one.times.clear()  # the first run is a warm-up
            running.append(one)
        else:
            done.append(one.candidate)
    fastest = float("inf")
    for turn in range(repeat):
        show(len(tried), steps, f"run {turn + 1} of {repeat}")
        for one in running[:: 1 if turn % 2 else -1]:
            one.right(judge)
        fastest = min([fastest, *(one.median for one in running if not one.wrong)])
        out = [one for one in running if one.wrong or one.median > SLOWER * fastest]
        done += [one.candidate for one in out]
        running = [one for one in running if one not in out]
    show(steps, steps, "")
    done += [one.candidate for one in running]
    done.sort(key=lambda one: (one.milliseconds is None, one.skipped, one.milliseconds or 0.0))
    sizes = {name: value for name, value in sizes_of(source, given).items() if name not in fixed}
    found = Tuned(source.name, _where(device), sizes, fixed, tuple(done))
    if found.candidates[0].milliseconds is None:
        raise AutotuneError(f"No candidate runs and is right. {found}")
    write("autotune", key, {**_plain(found), "candidates": found.rows})
    return found


@dataclass(eq=False)
class _Running:
    """A candidate while it is run."""

    values: Values
    timed: Timed
    times: list[float] = field(default_factory=list)
    wrong: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.values, None if self.wrong else self.median, len(self.times), self.wrong)

    def right(self, judge: Check) -> bool:
        """Run it once more; the time counts if what comes out is right."""
        try:
            taken = self.timed.run()
            self.wrong = judge(self.timed.outputs)
        except KernelError as error:
            self.wrong = first_error(str(error))
        if not self.wrong:
            self.times.append(taken)
        return not self.wrong


def _device(device: str, kernel: str) -> str:
    if device == "numpy":
        raise ValueError('device="numpy" runs no kernel; use "gpu" or "cpu"')
    try:
        return choose_device("gpu" if device == "auto" else device)
    except DeviceError as error:
        stored = measured(f"autotune_{kernel}")
        shown = (
            f" fv.autotune_plot(fv.measured({stored.name!r})) shows what was found on {stored.where}." if stored else ""
        )
        reason = str(error).replace(' device="numpy" runs the tile program anywhere.', "")
        raise DeviceError(f'{reason} device="cpu" tries and checks the candidates on the processor.{shown}') from None


def _judge(kernel: str, args: Mapping[str, Any]) -> Check:
    """Holds O and L against attention in float64."""
    if not {"Q", "K", "V"} <= set(args):
        raise ValueError(f"{kernel} is not called with Q, K and V: say with check= what its outputs must be.")
    Q, K, V = (args[name] for name in ("Q", "K", "V"))
    scale = args.get("scale", Q.shape[-1] ** -0.5)
    options = {name: int(args[name]) for name in ("kv_len", "window") if name in args}
    problem = Attention(Q, K, V, scale=float(scale), causal=bool(args.get("causal", False)), **options)
    return lambda outputs: problem.check(outputs["O"], outputs.get("L")).wrong


def _key(
    source: KernelSource, args: Mapping[str, Any], tried: Sequence[Values], device: str, check: Check | None
) -> dict[str, Any]:
    """What a result depends on."""
    found = gpu.status()
    machine = (
        [found.versions, found.multiprocessors] if device == "gpu" else [cpu.status().compiler, platform.machine()]
    )
    return {
        "format": FORMAT,
        "device": device,
        "machine": machine,
        "source": hashlib.sha256(source.assembled.encode()).hexdigest(),
        "kernel": source.header.kernel,
        "arguments": {n: [str(v.dtype), list(v.shape)] if np.ndim(v) else float(v) for n, v in args.items()},
        "candidates": [dict(values) for values in tried],
        "check": getattr(check, "__qualname__", repr(check)) if check else "",
    }


def _where(device: str) -> str:
    today = datetime.date.today().isoformat()
    if device == "cpu":
        return f"this machine's processor (no GPU), {today}"
    found = gpu.status()
    return f"one {found.device.removeprefix('NVIDIA ')} with {found.multiprocessors} multiprocessors, {today}"


def _plain(found: Tuned) -> dict[str, Any]:
    sizes = {name: float(v) if isinstance(v, (float, np.floating)) else int(v) for name, v in found.sizes.items()}
    return {"kernel": found.kernel, "where": found.where, "sizes": sizes, "fixed": dict(found.fixed)}


def _shower(kernel: str, progress: bool | Callable[[int, int, str], None]) -> Callable[[int, int, str], None]:
    """What shows progress: one line that is written over, on standard error, which a notebook shows too."""
    if not isinstance(progress, bool):
        return progress

    def show(done: int, of: int, what: str) -> None:
        filled = 24 * done // of
        line = f"{kernel} [{'#' * filled}{'.' * (24 - filled)}] {done}/{of}  {what}"
        print(f"\r{line:<100.100}", end="" if done < of else "\n", file=sys.stderr, flush=True)

    return show if progress else lambda done, of, what: None
