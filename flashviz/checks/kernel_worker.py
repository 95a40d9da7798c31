"""The process in which a kernel is checked: it may crash, loop or write wild without harm to the one that asked.

    python -m flashviz.checks.kernel_worker JOB RESULTS

JOB is a JSON file; RESULTS gets a line of JSON for each thing that happened, written out at once, so that a process that dies has said
what it was doing.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from flashviz.bfloat16 import from_bfloat16
from flashviz.checks.kernel_cases import CannotCheckError, Case, array_shape, make_plan
from flashviz.cuda import cpu
from flashviz.cuda.cpu_build import build
from flashviz.cuda.cpu_faults import element_name, sentence
from flashviz.cuda.cpu_library import load
from flashviz.cuda.cpu_results import Fault, Outcome
from flashviz.cuda.launching import LaunchError, Plan
from flashviz.cuda.scalars import BFLOAT16
from flashviz.cuda.signatures import ArgumentError
from flashviz.cuda.sources import SourceError, find, folders

Say = Callable[[dict[str, Any]], None]


def main(job_file: str, results_file: str) -> int:
    """Run the job; 0 also where it found something."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    with Path(results_file).open("a", encoding="utf-8") as results:

        def say(what: dict[str, Any]) -> None:
            results.write(json.dumps(what) + "\n")
            results.flush()

        try:
            run(job, say)
        except (CannotCheckError, SourceError, ArgumentError, LaunchError, cpu.CpuUnavailableError) as error:
            say({"problem": str(error)})
        except cpu.HostCompileError as error:
            say({"problem": f"it does not compile.\n{error}", "lines": [line for _, line, _ in error.problems]})
        say({"end": True})
    return 0


def run(job: dict[str, Any], say: Say) -> None:
    """Every case in every order from number job["first"] on."""
    path = Path(job["path"])
    cases = [Case(**case) for case in job["cases"]]
    plans = [make_plan(path, case, seed=job["seed"]) for case in cases]
    libraries: dict[str, int] = {}
    for planned in plans:
        libraries.setdefault(planned.instance, len(libraries))
    library = load(build(plans[0].source.assembled, list(libraries), check=True).path)
    for number, (case, planned) in enumerate(zip(cases, plans, strict=True)):
        if number < job["first"]:
            continue
        bits: dict[str, dict[str, np.ndarray]] = {}
        found = endless = False
        for order in job["orders"]:
            say({"start": number, "order": order})
            outcome, outputs = cpu.launch_once(
                library,
                planned,
                order=order,
                seed=job["seed"] + 1,
                index=libraries[planned.instance],
                check=True,
                poison=True,
                seconds=job["seconds"],
            )
            findings = of_outcome(outcome, case, planned)
            found = found or bool(findings)
            for finding in findings:
                say({"case": number, "order": order, **finding})
            if not findings:
                bits[order] = outputs
            if outcome.fault and outcome.fault.kind == "endless":
                endless = True
                break
        for finding in of_bits(bits, case, planned):
            say({"case": number, "order": list(bits)[-1], **finding})
        say({"done": number})
        if endless:  # other sizes would take the time limit each
            return
        if found and job["answers"]:
            for order, answer in answers(planned, job).items():
                say({"case": number, "order": order, "answer": answer})


def of_outcome(outcome: Outcome, case: Case, planned: Plan) -> list[dict[str, Any]]:
    """What a run found, as plain data."""
    source = find(planned.source.path, case.function)
    if outcome.fault is None:
        return [
            missing(name, count, first, source_shape(planned, name))
            for name, (count, first) in outcome.unwritten.items()
        ]
    fault = outcome.fault
    shape = array_shape(source, fault.array, case)
    file = planned.source.path.name
    lines = []
    for side in fault.sides:
        own = [line for name, line in side.places if name == file]
        lines += own[:1] if own else []
    return [
        {
            "kind": fault.kind,
            "array": fault.array,
            "element": element_name(fault, shape),
            "lines": lines,
            "sentence": sentence(fault, file, shape, planned),
            "sides": [asdict(side) for side in fault.sides],
        }
    ]


def source_shape(planned: Plan, name: str) -> tuple[int, ...]:
    """Extents of an argument."""
    return tuple(int(n) for n in planned.arguments[name].shape)


def missing(name: str, count: int, first: int, shape: tuple[int, ...]) -> dict[str, Any]:
    """An output with elements that nothing wrote."""
    size = int(np.prod(shape))
    element = element_name(Fault("missing", name, first, size, False, (), ""), shape)
    text = f"{count:,} of the {size:,} elements of {name} are never written; {element} is the first."
    return {"kind": "missing", "array": name, "element": element, "lines": [], "sentence": text, "sides": []}


def of_bits(bits: dict[str, dict[str, np.ndarray]], case: Case, planned: Plan) -> list[dict[str, Any]]:
    """Outputs that are not the same bits in all orders that ran to their end."""
    orders = list(bits)
    for order in orders[1:]:
        for name, first in bits[orders[0]].items():
            differ = np.flatnonzero(
                first.view(np.uint8).reshape(first.size, -1) != bits[order][name].view(np.uint8).reshape(first.size, -1)
            )
            if not len(differ):
                continue
            at = int(differ[0]) // first.itemsize
            element = element_name(Fault("order", name, at, first.size, False, (), ""), first.shape)
            values = [float(_numbers(a, name, planned).reshape(-1)[at]) for a in (first, bits[order][name])]
            text = f"{element} is {values[0]:.9g} with the threads in {orders[0]} order and {values[1]:.9g} in {order} order."
            return [{"kind": "order", "array": name, "element": element, "lines": [], "sentence": text, "sides": []}]
    return []


def answers(planned: Plan, job: dict[str, Any]) -> dict[str, str]:
    """What the kernel answers in each order where nothing stops it: right, wrong, or how it ends.

    Right is what the kernel of the same name that comes with flashviz gives; where there is none, what most orders agree on is not
    known to be right, and each answer is compared with that of the first order.
    """
    library = load(build(planned.source.assembled, [planned.instance]).path)
    reference = _reference(planned)
    said: dict[str, str] = {}
    first: dict[str, np.ndarray] | None = None
    for order in job["orders"]:
        outcome, outputs = cpu.launch_once(
            library, planned, order=order, seed=job["seed"] + 1, poison=True, seconds=job["seconds"]
        )
        if outcome.fault:
            said[order] = "stops"
        elif reference is not None:
            said[order] = "right" if _close(outputs, reference, planned) else "wrong"
        elif first is None:
            first, said[order] = outputs, "first"
        else:
            said[order] = "same" if _close(outputs, first, planned) else "different"
    return said


def _reference(planned: Plan) -> dict[str, np.ndarray] | None:
    """The outputs of the kernel of the same name and parameters that comes with flashviz, where there is one."""
    name = planned.source.header.kernel
    for path in sorted(path for folder in folders() for path in folder.glob("*.cu")):
        try:
            shipped = find(path, name)
        except SourceError:
            continue
        if shipped.signature != planned.source.signature:
            return None
        same = replace(planned, source=shipped)
        outcome, outputs = cpu.launch_once(load(build(shipped.assembled, [planned.instance]).path), same, poison=True)
        return None if outcome.fault else outputs
    return None


def _numbers(array: np.ndarray, name: str, planned: Plan) -> np.ndarray:
    """The values of an output: of bfloat16 there are the bits only."""
    return from_bfloat16(array) if planned.types[name] in BFLOAT16 else array


def _close(outputs: dict[str, np.ndarray], reference: dict[str, np.ndarray], planned: Plan) -> bool:
    """Equal up to the rounding of the outputs' own type."""
    for name in reference:
        got, want = (_numbers(arrays[name], name, planned).astype(np.float64) for arrays in (outputs, reference))
        short = 2e-2 if planned.types[name] in BFLOAT16 else 2e-3 if outputs[name].dtype == np.float16 else 1e-4
        if not np.allclose(got, want, rtol=short, atol=short / 10):
            return False
    return True


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
