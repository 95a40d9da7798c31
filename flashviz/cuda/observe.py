"""A traced launch on the processor with every memory access observed, each with the action in which its thread was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flashviz.cuda import cpu
from flashviz.cuda.cpu_faults import sentence
from flashviz.cuda.cpu_results import Outcome
from flashviz.cuda.gpu import KernelError, Launched
from flashviz.cuda.launching import Plan
from flashviz.cuda.trace import Observed, traced

ROOM = 1 << 20
"""Accesses there is room for at first, 32 bytes each."""


def observed(plan: Plan, *, room: int, poison: bool = False) -> Launched:
    """Run ``plan`` traced and in checking mode; ``Launched.trace.observed`` holds its memory accesses.

    ``room`` is how many actions a block has room for at first. Takes about a microsecond an access.

    Raises
    ------
    KernelError
        What the checks found: a race, an access out of bounds.
    """
    kept: list[Outcome] = []

    def run(plan: Plan, *, defines: Any, device_globals: Any) -> Launched:
        try:
            library = cpu.compile_plan(plan, check=True, defines=defines)
        except cpu.HostCompileError as error:
            raise KernelError(f"{plan.instance} does not compile for the processor.\n{error}") from error
        for name, value in device_globals.items():
            library.set_global(name, value)
        log = ROOM
        while True:
            outcome, outputs = cpu.launch_once(library, plan, check=True, poison=poison, log=log)
            if outcome.fault:
                said = sentence(outcome.fault, plan.source.path.name, plan=plan)
                raise KernelError(f"{plan.source.path.name}: {plan.instance}, on the processor: {said}")
            if outcome.accesses is None or outcome.accesses.total <= log:
                break
            log = outcome.accesses.total
        kept[:] = [outcome]
        for name, value in outputs.items():
            plan.arguments[name][...] = value
        return Launched(plan, {name: plan.arguments[name] for name in plan.outputs})

    launched = traced(plan, run, "cpu", room=room)
    assert launched.trace is not None
    assert kept[0].accesses is not None
    return replace(launched, trace=replace(launched.trace, observed=Observed(plan, kept[0].accesses)))
