"""What a traced kernel wrote down: the buffer it fills, as ``kernels/include/trace.cuh`` lays it out, and what that says.

Compiled with FLASHVIZ_TRACE, a kernel appends a record for each action that a block begins: its number, tile coordinates, role and
nanoseconds. The numbers are those that the assembled source gives the names in its ``TRACE(...)`` lines, so `decode` needs nothing but
that source. A record holds the lower 32 bits of the time, and the block's region its begin and end in 64: that is enough to put
every record in its place, and to notice an action of more than 4.29 s, for which it is not.

    launched = cuda.launch(kernel, args, device="cpu", trace=True)
    for block in launched.trace.blocks:
        print(block.block, [(action.name, *action.tiles) for action in block.actions])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flashviz.cuda.launching import Plan
from flashviz.slots import Block

if TYPE_CHECKING:
    from flashviz.cuda.cpu_results import Accesses
    from flashviz.cuda.gpu import Launched

DEFINE = "FLASHVIZ_TRACE"
RECORDS, REGIONS, CAPACITY = "flashviz_trace_records", "flashviz_trace_regions", "flashviz_trace_capacity"
ROLES = "flashviz_trace_roles"
"""The kernel's device globals: two pointers and two 64-bit numbers."""
RECORD = np.dtype(
    [
        ("action", "<u2"),
        ("role", "u1"),
        ("tiles", "u1"),
        ("first", "<i4"),
        ("second", "<i4"),
        ("nanoseconds", "<u4"),
    ]
)
REGION = np.dtype(
    [
        ("count", "<u4"),
        ("batch", "<i4"),
        ("head", "<i4"),
        ("tile", "<i4"),
        ("multiprocessor", "<u4"),
        ("called", "<u4"),
        ("begin", "<u8"),
        ("end", "<u8"),
    ]
)
WRAP = 1 << 32
"""Nanoseconds after which a record's time begins anew."""
GUESS = 256
"""Records a block has room for where nobody says how many there will be."""


class TraceError(RuntimeError):
    """A trace that cannot be read: a block without a place, an action without a name."""


class TraceOverflowError(TraceError):
    """More actions than the buffer has room for. ``needed`` is how many records a block needs."""

    def __init__(self, message: str, needed: int) -> None:
        super().__init__(message)
        self.needed = needed


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a block, or of a ``role`` of it. Times are nanoseconds of the device's timer; it ends where its role's next begins."""

    name: str
    tiles: tuple[int, ...]
    multiprocessor: int
    start: int
    end: int
    role: str = ""


@dataclass(frozen=True, slots=True)
class TracedBlock:
    """What one block did, in order; where it has roles, one role after the other, each in its order.

    ``index`` counts the blocks of the launch in the order of blockIdx, x fastest.
    """

    block: Block
    index: int
    begin: int
    end: int
    actions: tuple[Action, ...]


@dataclass(frozen=True)
class Observed:
    """The memory accesses of a launch, in order, each with the action in which its thread was; see ``flashviz.cuda.cpu_library``."""

    plan: Plan
    accesses: Accesses


@dataclass(frozen=True)
class KernelTrace:
    """What every block of one launch did, sorted by batch, head and tile.

    ``capacity`` is how many records a block had room for, ``device`` where the kernel ran, ``grid`` and ``threads`` how it was launched.
    ``observed`` is every memory access of the launch, where they were observed.
    """

    kernel: str
    device: str
    grid: tuple[int, int, int]
    threads: tuple[int, int, int]
    blocks: tuple[TracedBlock, ...] = field(repr=False)
    capacity: int = 0
    observed: Observed | None = field(default=None, repr=False)

    @property
    def most(self) -> int:
        """The most actions of one block."""
        return max((len(block.actions) for block in self.blocks), default=0)

    @property
    def begin(self) -> int:
        """When the first block began."""
        return min((block.begin for block in self.blocks), default=-1)

    @property
    def end(self) -> int:
        """When the last block ended."""
        return max((block.end for block in self.blocks), default=-1)


@dataclass
class _Watch:
    """The launches to come are traced: how much room each gets, whether memory accesses are observed, and what they did."""

    rooms: Iterator[int]
    observe: bool = False
    traces: list[KernelTrace] = field(default_factory=list)


_watch: ContextVar[_Watch | None] = ContextVar("flashviz_watch", default=None)


@contextmanager
def tracing(rooms: Sequence[int] = (), *, observe: bool = False) -> Iterator[list[KernelTrace]]:
    """Every launch inside is traced; the list holds what each did, in order.

    ``rooms`` says, for each launch, how many actions a block performs at most; more are found out by a second launch. With
    ``observe`` launches on "cpu" run in checking mode and every memory access is kept: for small shapes, 32 bytes an access.

        with cuda.tracing() as traces:
            cuda.launch(kernel, args, device="cpu")
    """
    watch = _Watch(iter(rooms), observe)
    token = _watch.set(watch)
    try:
        yield watch.traces
    finally:
        _watch.reset(token)


def watched() -> _Watch | None:
    """What `tracing` is open here, if any."""
    return _watch.get()


def buffers(plan: Plan, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Records [blocks, capacity] and regions [blocks] for a launch, none of them written; as many for each role, where blocks have roles."""
    blocks = math.prod(plan.grid) * max(1, len(plan.source.header.roles))
    return np.zeros((blocks, max(1, capacity)), RECORD), np.zeros(blocks, REGION)


def decode(plan: Plan, records: np.ndarray, regions: np.ndarray, device: str) -> KernelTrace:
    """What the kernel of ``plan`` wrote into ``records`` [blocks, capacity] and ``regions`` [blocks].

    Raises
    ------
    TraceOverflowError
        A block performed more actions than it had room for: says how large the buffer must be.
    TraceError
        A block without TRACE_BLOCK, two that say the same place, an action that the source does not name, actions of a called
        function that the kernel does not announce, or one that took too long for its time to be known.
    """
    name = f"{plan.source.path.name}: {plan.instance}"
    capacity = records.shape[1]
    counts, roles = regions["count"], plan.source.header.roles
    each = max(1, len(roles))
    absent = np.flatnonzero((regions["begin"].reshape(-1, each) == 0).all(axis=1))
    if len(absent):
        says = "TRACE_ROLE(role, first, batch, head, tile)" if roles else "TRACE_BLOCK(batch, head, tile)"
        raise TraceError(
            f"{name}: {len(absent)} of {len(regions) // each} blocks wrote no trace, first blockIdx "
            f"{_index(plan, int(absent[0]))}: a traced kernel says {says} before anything else."
        )
    calling = np.flatnonzero(regions["called"])
    if len(calling):
        raise TraceError(
            f"{name}: {int(regions['called'][calling[0]]):,} actions of blockIdx {_index(plan, int(calling[0]) // each)} are named in functions "
            "that the kernel calls: it must say TRACE_BLOCK_AND_CALLS(batch, head, tile) instead of TRACE_BLOCK."
        )
    most = int(counts.max(initial=0))
    if most > capacity:
        size = most * len(regions) * RECORD.itemsize
        raise TraceOverflowError(
            f"{name}: a block performed {most:,} actions and the trace has room for {capacity:,}; it must have "
            f"room for {most:,} a block, {size:,} bytes for {len(regions):,} blocks: launch with trace={most}.",
            most,
        )
    names = {number: action for action, number in plan.source.trace_ids.items()}
    blocks: list[TracedBlock] = []
    seen: dict[Block, int] = {}
    for index in range(len(regions) // each):
        own = [
            n for n in range(index * each, (index + 1) * each) if regions["begin"][n]
        ]  # some roles may have no warps
        places = {Block(*map(int, regions[n][["batch", "head", "tile"]])) for n in own}
        block = places.pop()
        if places:
            raise TraceError(
                f"{name}: the roles of blockIdx {_index(plan, index)} say {tuple(block)} and {tuple(places.pop())}."
            )
        if block in seen:
            raise TraceError(
                f"{name}: blockIdx {_index(plan, seen[block])} and {_index(plan, index)} both say TRACE_BLOCK{tuple(block)}."
            )
        seen[block] = index
        actions: list[Action] = []
        for n in own:
            number, role = (n % each + 1, roles[n % each]) if roles else (0, "")
            kept = records[n, : int(counts[n])]
            if (kept["role"] != number).any():
                wrong = sorted({int(x) for x in kept["role"]} - {number})
                raise TraceError(
                    f"{name}: a record in the place of role {number} has role {wrong[0]}: not a TRACE line. A kernel says TRACE_ROLE where "
                    "its header has a line @roles, and TRACE_BLOCK where it has none."
                )
            actions += _actions(name, names, kept, regions[n], role)
        begin, end = (int(f(int(regions[x][n]) for n in own)) for x, f in (("begin", min), ("end", max)))
        blocks.append(TracedBlock(block, index, begin, end, tuple(actions)))
    blocks.sort(key=lambda b: b.block)
    return KernelTrace(plan.source.signature.function, device, plan.grid, plan.block, tuple(blocks), capacity)


def _actions(name: str, names: dict[int, str], records: np.ndarray, region: np.void, role: str) -> list[Action]:
    rows = records.tolist()
    times = [int(region["begin"])]
    for time in [*(row[5] for row in rows), int(region["end"])]:
        times.append(times[-1] + (time - times[-1]) % WRAP)
    if times[-1] != region["end"]:
        raise TraceError(
            f"{name}: an action of block {tuple(region[['batch', 'head', 'tile']].tolist())} took longer than {WRAP / 1e9:.2f} s, "
            "which a trace's times cannot tell: trace a smaller launch."
        )
    where = int(region["multiprocessor"])
    actions = []
    for (number, _, tiles, first, second, _), start, until in zip(rows, times[1:], times[2:], strict=False):
        if number not in names or not 1 <= tiles <= 2:
            raise TraceError(f"{name}: the trace holds action {number}, {tiles} tiles: not a TRACE line.")
        actions.append(Action(names[number], (first, second)[:tiles], where, start, until, role))
    return actions


def _index(plan: Plan, number: int) -> tuple[int, int, int]:
    x, y, _ = plan.grid
    return number % x, number // x % y, number // (x * y)


def traced(plan: Plan, run: Callable[..., Launched], device: str, *, room: int, **options: Any) -> Launched:
    """Launch ``plan`` by ``run`` (of ``gpu`` or ``cpu``) with tracing on, as often as it takes to have room for all it writes.

    ``room`` is how many records a block has room for at first. A second launch finds the arrays as the first found them.
    """
    before = {name: plan.arguments[name].copy() for name in plan.outputs}
    while True:
        records, regions = buffers(plan, room)
        roles = np.uint64(max(1, len(plan.source.header.roles)))
        values = {RECORDS: records, REGIONS: regions, CAPACITY: np.uint64(records.shape[1]), ROLES: roles}
        launched = run(plan, defines=(DEFINE,), device_globals=values, **options)
        try:
            return replace(launched, trace=decode(plan, records, regions, device))
        except TraceOverflowError as error:
            room = error.needed
            for name, value in before.items():
                plan.arguments[name][...] = value
