"""A TRACE line cannot lie: the memory accesses of a kernel on the processor, held against what its actions claim.

What an action claims is what the program recorded when it was performed: its moves and changes. Between one TRACE and the
next, each thread's accesses are the action's. They must be

* in HBM, exactly the elements of the tiles that the action moves or sets, all of them;
* in shared memory, in slots that the action names: it writes those that it moves into or changes, as many elements as it
  says or more (rows past the end are filled), and reads those that it reads.

Shared memory that the program has no slot for is the kernel's own affair; so is what each thread keeps in registers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from flashviz.events import Change, Move, Step
from flashviz.programs.base import Program
from flashviz.programs.replay import ReplayError, as_traced, check_outputs, most_actions, replay
from flashviz.recording import Recording
from flashviz.slots import Block, Slot

if TYPE_CHECKING:
    from flashviz.cuda.trace import Action, KernelTrace, TracedBlock

T = TypeVar("T")
P = TypeVar("P", bound=Program)


@dataclass(frozen=True)
class FalseClaim:
    """An action that does not do what its TRACE line says.

    Args:
        kernel, launch, block: where.
        step: number of the action in its block, from 0; -1 for what happens before the first.
        action, tiles: what the line says.
        array: the array or part of shared memory, as the kernel names it.
        message: what happens instead, in a sentence.
    """

    kernel: str
    launch: int
    block: Block
    step: int
    action: str
    tiles: tuple[int, ...]
    array: str
    message: str = field(repr=False)

    def __str__(self) -> str:
        return self.message


def observe(program: P, loops: Callable[[P], None], launch: Callable[[], T]) -> tuple[T, Recording, list[FalseClaim]]:
    """Launch kernels on the processor with every memory access observed, replay them, and hold accesses against claims.

    Args:
        program: nothing has been performed by it yet; it must keep every block.
        loops: the program's own loops.
        launch: launches the algorithm's kernels, in order, on ``"cpu"``; gives their output or a tuple of them.

    Returns:
        What ``launch`` gave, the replayed recording, and the claims that are false, of each action the first of each kind.

    Raises:
        ReplayError: the trace names what the program has not. KernelError: the kernel has a race or leaves its arrays.

    >>> from flashviz.programs import flash_attention_2 as fa2
    >>> fa = fa2.FlashAttention2(*np.ones((3, 6, 8), "float32"), Br=4, Bc=4)
    >>> _, recording, false = observe(fa, fa2.forward, lambda: fa2.launch_kernel(fa.a, "cpu"))
    >>> recording.source, false
    ('kernel', [])
    """
    from flashviz import cuda

    with cuda.tracing(most_actions(program, loops), observe=True) as traces:
        given = launch()
    failed: ReplayError | None = None
    try:
        replay(program, traces)
    except ReplayError as error:  # most often since a line names what is not there: say so, if it is
        failed, program.r.trace = error, None
    result = program.run()  # type: ignore[attr-defined]
    recording = as_traced(result.recording, traces, "cpu")
    done = _performed(recording, complete=failed is None)
    false = [claim for n, trace in enumerate(traces) for claim in _launch_claims(program, recording, done, n, trace)]
    if failed and not false:
        raise failed
    if not false:
        outputs: Any = given if isinstance(given, tuple) else (given,)
        check_outputs(program, outputs, result)
    return given, recording, false


@dataclass
class _Claim:
    """What an action says that it does: elements of arrays in HBM by name, and slots on chip with how many elements."""

    reads: dict[str, list[np.ndarray]] = field(default_factory=dict)
    writes: dict[str, list[np.ndarray]] = field(default_factory=dict)
    tiles: dict[str, list[str]] = field(default_factory=dict)
    chip_reads: set[str] = field(default_factory=set)
    chip_writes: dict[str, int] = field(default_factory=dict)


def _performed(recording: Recording, complete: bool) -> dict[tuple[int, Block], list[Step]]:
    """The actions that each block performed, in order; without the last one of all where that could not be completed."""
    steps = [step for step in _actions(recording.steps) if step.block is not None]
    done: dict[tuple[int, Block], list[Step]] = {}
    for step in steps if complete else steps[:-1]:
        done.setdefault((step.launch, step.block or Block()), []).append(step)
    return done


def _launch_claims(
    program: Program,
    recording: Recording,
    done: dict[tuple[int, Block], list[Step]],
    launch: int,
    trace: KernelTrace,
) -> Iterator[FalseClaim]:
    if trace.observed is None:
        return
    plan, accesses = trace.observed.plan, trace.observed.accesses
    numbers = {
        name: np.arange(value.size).reshape(value.shape)
        for name, value in plan.arguments.items()
        if getattr(value, "shape", ())
    }
    tile_rows = {(s.tensor, s.head): s.shape[0] for s in recording.slots if s.index == (0,)}
    slots = {_chip(slot, set(plan.source.parts)) for slot in recording.slots if not slot.shared_by_grid}
    records = accesses.records
    order = np.argsort(records["block"], kind="stable")
    starts = np.searchsorted(records["block"][order], np.arange(len(trace.blocks) + 1))
    for block in trace.blocks:
        own = records[order[starts[block.index] : starts[block.index + 1]]]
        look = _Look(trace, launch, block, plan.source.trace_ids, accesses.names, set(plan.source.parts), slots)
        yield from look.threads(own)
        by_action = own[np.argsort(own["ordinal"], kind="stable")]
        edges = np.searchsorted(by_action["ordinal"], np.arange(len(block.actions) + 2))
        yield from look.unnamed(by_action[: edges[1]])
        for n, (action, step) in enumerate(zip(block.actions, done.get((launch, block.block), ()), strict=False)):
            claim = _claim_of(program, recording, step, numbers, look.parts, tile_rows)
            yield from look.action(n, action, claim, by_action[edges[n + 1] : edges[n + 2]], numbers)


def _actions(steps: tuple[Step, ...]) -> Iterator[Step]:
    for step in steps:
        if step.action:
            yield step
        yield from _actions(step.parts)


def _chip(slot: Slot, parts: set[str]) -> str:
    """The kernel's name of a slot: its own, or without the number where one part of the kernel holds several slots."""
    return slot.name if slot.name in parts else slot.name.rstrip("0123456789")


def _claim_of(
    program: Program,
    recording: Recording,
    step: Step,
    numbers: dict[str, np.ndarray],
    parts: set[str],
    tile_rows: dict[tuple[str, tuple[int, int]], int],
) -> _Claim:
    claim = _Claim()

    def add(where: dict[str, list[np.ndarray]], slot: Slot) -> None:
        array = slot.tensor
        first = slot.index[0] * tile_rows[slot.tensor, slot.head] if slot.index else 0
        where.setdefault(array, []).append(program.elements(slot, numbers[array], first))
        claim.tiles.setdefault(array, []).append(slot.name)

    def note(names: tuple[str, ...]) -> None:
        for slot in map(recording.slot, names):
            if slot.shared_by_grid:
                add(claim.reads, slot)
            else:
                claim.chip_reads.add(_chip(slot, parts))

    def write(name: str, shape: tuple[int, ...]) -> None:
        slot = recording.slot(name)
        if slot.shared_by_grid:
            add(claim.writes, slot)
        else:
            part = _chip(slot, parts)
            claim.chip_writes[part] = claim.chip_writes.get(part, 0) + int(np.prod(shape))

    seen: set[str] = set()
    for event in recording.events[step.first : step.end]:
        if isinstance(event, Move):
            for part in event.parts:
                note(part.reads)
                write(part.dst, part.shape)
        elif isinstance(event, Change) and event.role != "stale":
            note(event.reads)
            if event.slot not in seen:
                write(event.slot, event.shape)
            seen.add(event.slot)
    return claim


@dataclass
class _Look:
    """One block of one launch, looked at."""

    trace: KernelTrace
    launch: int
    block: TracedBlock
    ids: Any
    names: Any
    parts: set[str]
    slots: set[str]

    def false(self, n: int, array: str, text: str) -> FalseClaim:
        action = self.block.actions[n] if n >= 0 else None
        name, tiles = (action.name, action.tiles) if action else ("", ())
        said = f"TRACE({', '.join([name, *map(str, tiles)])})" if action else "before the first TRACE line"
        message = f"{self.trace.kernel}, block {tuple(self.block.block)}, {said}: {text}"
        return FalseClaim(self.trace.kernel, self.launch, self.block.block, n, name, tiles, array, message)

    def threads(self, own: np.ndarray) -> Iterator[FalseClaim]:
        """Every thread passes the same TRACE lines as the first one, whose trace is kept."""
        ids = self.ids
        said = np.array([(ids[a.name], *(*a.tiles, 0)[:2]) for a in self.block.actions], "i8").reshape(-1, 3)
        named = own[own["ordinal"] > 0]
        ordinal = named["ordinal"].astype("i8") - 1
        beyond = ordinal >= len(said)
        found = np.stack([named[key].astype("i8") for key in ("action", "first", "second")], axis=-1)
        wrong = beyond | (found != said[np.where(beyond, 0, ordinal)]).any(axis=-1) if len(said) else beyond
        if wrong.any():
            record = named[wrong][0]
            n = min(int(record["ordinal"]) - 1, len(said) - 1)
            names = {number: name for name, number in ids.items()}
            other = f"{names.get(int(record['action']), '?')}, {record['first']}"
            yield self.false(n, "", f"thread {record['thread']} passes TRACE({other}) instead, as its action {n + 1}.")

    def unnamed(self, own: np.ndarray) -> Iterator[FalseClaim]:
        for number in np.unique(own["array"]):
            record = own[own["array"] == number][0]
            does = "writes" if record["write"] else "reads"
            name = self.names.get(int(number), "?")
            yield self.false(-1, name, f"thread {record['thread']} {does} {name}, which no action names.")

    def action(
        self, n: int, action: Action, claim: _Claim, own: np.ndarray, numbers: dict[str, np.ndarray]
    ) -> Iterator[FalseClaim]:
        for array, index in numbers.items():
            number = next(key for key, name in self.names.items() if name == array and key >= 0)
            at = own[own["array"] == number]
            for write, what, claimed in ((0, "reads", claim.reads), (1, "writes", claim.writes)):
                touched = np.unique(at["element"][at["write"] == write])
                named = claimed.get(array)
                wanted = np.unique(np.concatenate([x.ravel() for x in named])) if named else np.empty(0, "i8")
                tiles = ", ".join(dict.fromkeys(claim.tiles.get(array, ()))) if named else ""
                beyond, missing = np.setdiff1d(touched, wanted), np.setdiff1d(wanted, touched)
                if len(beyond):
                    place = list(map(int, np.unravel_index(int(beyond[0]), index.shape)))
                    more = f"not of {tiles}, which it names" if tiles else f"and names no tile of {array}"
                    yield self.false(n, array, f"{what} {array}{place}, {more}; {len(beyond):,} such elements.")
                if len(missing):
                    place = list(map(int, np.unravel_index(int(missing[0]), index.shape)))
                    yield self.false(
                        n,
                        array,
                        f"{what} {len(wanted) - len(missing):,} of the {len(wanted):,} elements of {tiles}; not {array}{place}.",
                    )
        yield from self.on_chip(n, claim, own)

    def on_chip(self, n: int, claim: _Claim, own: np.ndarray) -> Iterator[FalseClaim]:
        shared = {name: key for key, name in self.names.items() if key < 0 and name in self.parts}
        for name, number in shared.items():
            at = own[own["array"] == number]
            written = len(np.unique(at["element"][at["write"] == 1]))
            if written and name in self.slots and name not in claim.chip_writes:
                yield self.false(n, name, f"writes {name}, which it does not name.")
            if name in claim.chip_writes and written < claim.chip_writes[name]:
                wanted = claim.chip_writes[name]
                yield self.false(n, name, f"writes {written:,} of the {wanted:,} elements of {name} that it names.")
            reads = (at["write"] == 0).any()
            if reads and name in self.slots and name not in claim.chip_reads and name not in claim.chip_writes:
                yield self.false(n, name, f"reads {name}, which it does not name.")
