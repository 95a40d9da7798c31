"""`fv.check`: a learner's racecheck with no GPU. A kernel file runs on the processor, and every memory access is looked at.

Each case (instantiation and shape, from the file's header block) runs in three orders of threads and blocks, in a process of its own with
a time limit. The compiler puts a call before each memory access (its thread sanitizer's instrumentation, answered by
``kernels/host/checks.cpp``), which keeps for every byte of shared memory and of the outputs who last wrote and read it, since which
barrier. Reported are

* race: two threads of a block touch one element, at least one writes it, and no barrier lies between;
* unwritten: an element of shared memory or of an output is read that nothing wrote;
* bounds, wild, input: past the end of an array or part, memory of no array, a write to an array that is declared const;
* barrier, warp: threads of a block, or lanes of a warp, that do not arrive together;
* blocks: two blocks of one launch touch one element, at least one writes it;
* pending, aligned: an element that an asynchronous copy has not reached yet, an access at an address that is no multiple of its bytes;
* shared, crash, endless, trap: too much shared memory, what the processor stops, the time limit, ``__trap()`` and failed asserts;
* missing, order: elements of an output that are never written, outputs that are not the same bits in all orders.

The limits, each of which a test shows:

* only what the cases reach is seen: an error at a size that no @shape has stays unseen, as does a barrier that these sizes do not need;
* local arrays are not looked at: an index past the end of ``float acc[4]`` is seen only when it crashes;
* an index that misses its array by more than the array's own size (at least 4 KB) may land in another and count as that one's; an index
  past a row but inside the array is no error;
* two threads that write the same value to one element are reported all the same; ``volatile`` orders nothing here;
* within a block only __syncthreads and __syncwarp of a whole warp order accesses; shuffles and partial masks do not. Between blocks
  __threadfence and an atomic do, as in "the last block to finish reads what the others wrote"; a fence on the reading side is not asked for;
* with g++, what a function returns as a struct of the reader's own straight into an array counts as not written (CUDA's vectors and the
  16-bit floats are seen), and device globals are not looked at;
* a wrong result is no fault: hold outputs against a reference as well;
* spinning until another block does something never ends here, for blocks run one after the other;
* line numbers need a compiler that writes `.loc` directives (g++, clang, ziglang); on Windows a crash has no line, and on arm64 a
  division of whole numbers by zero is no crash, it gives 0.

The source is compiled and run on this machine: check only what you would run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashviz.checks.kernel_cases import CannotCheckError, Case, make_cases
from flashviz.checks.kernel_report import Finding, Report
from flashviz.cuda.cpu_build import CpuUnavailableError, require_compiler
from flashviz.cuda.cpu_faults import MEANING
from flashviz.cuda.cpu_library import ORDERS
from flashviz.cuda.sources import SourceError, find

__all__ = ["Finding", "Report", "check"]

_RESTARTS = 3


def check(
    kernel: str | Path,
    function: str | None = None,
    shapes: Sequence[Mapping[str, int]] | None = None,
    *,
    everything: bool = False,
    orders: Sequence[str] = ORDERS,
    seconds: int = 10,
    limit: float = 300,
    seed: int = 0,
    answers: bool = True,
) -> Report:
    """Run a kernel file on the processor and report what is wrong with it.

    Args:
        kernel: name of a kernel file (``"flash_attention_2"``), a path to a .cu file, or the source text itself. It needs a header
            block, lines ``// @kernel``, ``@grid``, ``@array``, ``@shape`` and, for a template, ``@instance``.
        function: which kernel of the file; all of them when not given.
        shapes: sizes by name, in place of the file's @shape lines: ``[{"B": 1, "Hq": 1, "Hkv": 1, "Nq": 33, "Nk": 33, "causal": 0}]``.
        everything: run every instantiation; otherwise the two of each kernel that need least shared memory, with all shapes.
        orders: thread orders to run each case in.
        seconds: time limit of one run, of the processor's time.
        limit: time limit of the whole check, in seconds; past it the report says that it did not end.
        seed: of the random arguments and of the random order.
        answers: where something is found, also run without looking at accesses and say in which orders the answer is right all the same.

    Returns:
        A :class:`Report`: print it, or look at ``.findings``, ``.lines`` and ``.ok``. Where the check could not run (no such file, it
        does not compile, no compiler), ``.problem`` says why.

    >>> source = '''
    ... // @kernel shift
    ... // @grid 1
    ... // @block 64
    ... // @array x [64]
    ... // @array y [64]
    ... __global__ void shift(const float* x, float* y) {
    ...     __shared__ float s[64];
    ...     s[threadIdx.x] = x[threadIdx.x];
    ...     y[threadIdx.x] = s[(threadIdx.x + 1) % 64];
    ... }
    ... '''
    >>> report = check(source)
    >>> report.findings[0].kind, report.findings[0].array, report.findings[0].lines
    ('race', 's', (10, 9))
    """
    for order in orders:
        if order not in ORDERS:
            raise ValueError(f"order {order!r} is none of {', '.join(ORDERS)}")
    with tempfile.TemporaryDirectory(prefix="flashviz-check-") as scratch:
        path, text = _source(kernel, Path(scratch))
        name = path.name
        try:
            require_compiler()
            path = find(path, function or "").path
            text = path.read_text(encoding="utf-8")
            cases, total = make_cases(path, function or "", shapes or (), everything)
        except (SourceError, CannotCheckError, CpuUnavailableError, OSError) as error:
            said = str(error).removeprefix(f"{name}: ")
            return Report(name, text, (), said, (), 0, tuple(orders))
        job = {
            "path": str(path.resolve()),
            "cases": [vars(case) for case in cases],
            "orders": list(orders),
            "seconds": seconds,
            "seed": seed,
            "answers": answers,
        }
        events, problem = _run(job, cases, Path(scratch), limit)
    return _report(path.name, text, cases, total, tuple(orders), events, problem)


def _source(kernel: str | Path, scratch: Path) -> tuple[Path, str]:
    """Where the kernel file is; source text becomes a file."""
    if isinstance(kernel, str) and ("\n" in kernel or "__global__" in kernel):
        path = scratch / "kernel.cu"
        path.write_text(kernel, encoding="utf-8")
        return path, kernel
    return Path(kernel), ""


def _run(job: dict[str, Any], cases: Sequence[Case], scratch: Path, limit: float) -> tuple[list[dict[str, Any]], str]:
    """What the worker reported, and why it did not end, if it did not. A worker that dies is replaced, from the next case on."""
    results, file = scratch / "results", scratch / "job"
    results.touch()
    end = time.monotonic() + limit
    job["first"] = 0
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [_root(), os.environ.get("PYTHONPATH", "")])),
    }
    for _ in range(_RESTARTS):
        file.write_text(json.dumps(job), encoding="utf-8")
        command = [sys.executable, "-m", "flashviz.checks.kernel_worker", str(file), str(results)]
        timed_out = False
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                timeout=max(0.1, end - time.monotonic()),
                env=environment,
                cwd=scratch,
                check=False,
            )
        except subprocess.TimeoutExpired:
            timed_out, done = True, None
        events = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
        if any(event.get("end") for event in events):
            return events, ""
        started = [event for event in events if "start" in event]
        if timed_out:
            return events, f"it was still running after {limit:g} s."
        if not started or done is None or (done.returncode >= 0 and os.name != "nt"):
            lines = (done.stderr.strip().splitlines() if done else []) or ["it ended without a word"]
            return events, f"the process that checks it failed: {lines[-1]}"
        last = started[-1]
        how = signal.Signals(-done.returncode).name if done.returncode < 0 else f"status {done.returncode}"
        text = f"The process was ended by {how}: memory was written or read that does not exist."
        died = {"kind": "crash", "array": "", "element": "", "lines": [], "sentence": text, "sides": []}
        with results.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"case": last["start"], "order": last["order"], **died}) + "\n")
            out.write(json.dumps({"done": last["start"]}) + "\n")
        job["first"] = last["start"] + 1
    events = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    return events, f"it crashed {_RESTARTS} times."


def _root() -> str:
    """The folder that holds the package, so that the worker imports this very one."""
    return str(Path(__file__).resolve().parents[2])


def _report(
    file: str,
    text: str,
    cases: Sequence[Case],
    total: int,
    orders: tuple[str, ...],
    events: Sequence[Mapping[str, Any]],
    problem: str,
) -> Report:
    """One finding for each fault: the same kind, array and lines in other cases, orders and elements are the same fault."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    answers: dict[str, str] = {}
    answered = -1
    problem_lines: tuple[int, ...] = ()
    for event in events:
        if "problem" in event:
            problem, problem_lines = event["problem"], tuple(event.get("lines", ()))
        elif "answer" in event and answered in (-1, event["case"]):
            answered = event["case"]
            answers[event["order"]] = event["answer"]
        elif "kind" in event:
            key = (event["kind"], event["array"], tuple(sorted(event["lines"])))
            one = found.setdefault(key, {**event, "orders": []})
            if one["case"] == event["case"] and event["order"] not in one["orders"]:
                one["orders"].append(event["order"])
    findings = tuple(
        Finding(
            kind=one["kind"],
            array=one["array"],
            element=one["element"],
            lines=tuple(one["lines"]),
            threads=tuple((tuple(side["block"]), tuple(side["thread"])) for side in one["sides"]),
            places=tuple(tuple((name, line) for name, line in side["places"]) for side in one["sides"]),
            sentence=one["sentence"],
            meaning=MEANING[one["kind"]],
            case=str(cases[one["case"]]),
            orders=tuple(one["orders"]),
        )
        for one in found.values()
    )
    ran = tuple(str(cases[event["done"]]) for event in events if "done" in event)
    return Report(file, text, findings, problem, ran, total, orders, answers, problem_lines)
