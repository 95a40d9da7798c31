"""Whether two recordings did the same: compared, block by block, by what depends on what.

A block's events are a graph: each reads what earlier ones left in slots and leaves something itself. Two blocks are the
same when every operation of one has an equal one in the other: the same kind, into the same slot, from the same contents,
with the same contents before it in that slot. So it makes no difference when a tile is loaded early, or two actions that do
not touch each other's slots change places; a tile that is loaded twice, never, or after another one does.

Not compared: numbers, barriers, what is said of a step, times, and how moves are counted as transfers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from flashviz.events import Barrier, Begin, Change, Launch, Move
from flashviz.recording import Recording, as_recording
from flashviz.slots import Block


@dataclass(frozen=True)
class Difference:
    """The first thing that one block does otherwise.

    Args:
        launch, block: where.
        kernel: name of the launched kernel.
        step: number of the step in the first recording, -1 where that recording has nothing there.
        action, tiles: what the first recording does there, ``""`` where it does nothing.
        other_step, other_action, other_tiles: the same for the second.
        message: all of it in a sentence.
    """

    launch: int
    block: Block | None
    kernel: str
    step: int
    action: str
    tiles: tuple[tuple[str, int], ...]
    other_step: int
    other_action: str
    other_tiles: tuple[tuple[str, int], ...]
    message: str = field(default="", repr=False)

    def __str__(self) -> str:
        return self.message


def same(a: Any, b: Any) -> list[Difference]:
    """Where two recordings differ in what depends on what: the first difference of each block, none where they are the same.

    Args:
        a, b: runs or recordings of one algorithm on equal sizes, for example a traced kernel's and the tile program's.

    Returns:
        An empty list where both did the same; else a :class:`Difference` for each launch or block that is missing on one
        side or goes another way. What follows from a difference is not reported again in its block.

    Raises:
        TypeError: neither a run nor a recording. ValueError: a run without a recording.

    >>> import numpy as np, flashviz as fv
    >>> x = np.eye(4, dtype="float32")
    >>> run = fv.flash_attention_2(x, x, x, Br=2, Bc=2, device="numpy")
    >>> mine = fv.FlashAttention2(x, x, x, Br=2, Bc=2)
    >>> for i in range(2):
    ...     mine.begin(i)
    ...     mine.load_q()
    ...     for j in (0, 1) if i == 0 else (1, 0):
    ...         for action in (mine.load_v, mine.load_k, mine.scores, mine.softmax, mine.accumulate):
    ...             action(j)
    ...     mine.store_o()
    >>> print(*same(mine.run(), run))
    flash_attention_2, block 1: step 12 does load_v (i = 1, j = 1) where the other's step 12 does load_k (i = 1, j = 0)
    """
    first, second = _Graphs(as_recording(a)), _Graphs(as_recording(b))
    known: dict[Hashable, int] = {}
    found = []
    for launch in range(max(len(first.launches), len(second.launches))):
        one, two = first.launch(launch), second.launch(launch)
        if one is None or two is None or (one.kernel, one.grid) != (two.kernel, two.grid):
            said = [f"launches {e.kernel} on {e.grid}" if e else "launches nothing" for e in (one, two)]
            kernel = one.kernel if one else two.kernel if two else ""
            message = f"launch {launch}: one {said[0]}, the other {said[1]}"
            found.append(Difference(launch, None, kernel, -1, "", (), -1, "", (), message))
    first.number(known)
    second.number(known)
    for at in sorted(first.blocks | second.blocks):
        difference = _first_difference(first, second, at)
        if difference:
            found.append(difference)
    return found


@dataclass(frozen=True, slots=True)
class _Operation:
    """One tile moved or one slot changed: its step, its event, and which operation it is, alike in both recordings."""

    step: int
    event: int
    key: int


class _Graphs:
    """The operations of each block of a recording."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.launches = recording.launches
        self.blocks = {(e.launch, e.block) for e in recording.events if isinstance(e, Begin)}
        self.operations: dict[tuple[int, Block], list[_Operation]] = {at: [] for at in self.blocks}

    def launch(self, n: int) -> Launch | None:
        return self.launches[n] if n < len(self.launches) else None

    def number(self, known: dict[Hashable, int]) -> None:
        """Give every operation a number: equal ones, in whichever recording, get the same."""
        held: dict[Hashable, int] = {}  # by slot: the operation that left its content
        last: dict[Hashable, int] = {}  # by slot without the number of a buffer: the operation before
        waiting: dict[Hashable, list[tuple[str, Hashable, int, int]]] = {}

        def write(name: str, what: Hashable, at: tuple[int, Block], step: int, event: int) -> None:
            label, place = self.label(name), self.place(name, at)
            before = last.get((at, label), -1) if place != name else held.get(place, -1)
            key = known.setdefault((label, what, before), len(known))
            held[place] = last[at, label] = key
            if at in self.operations:
                self.operations[at].append(_Operation(step, event, key))

        def read(names: tuple[str, ...], at: tuple[int, Block]) -> Hashable:
            return tuple(sorted((self.label(name), held.get(self.place(name, at), -1)) for name in names))

        for step, n in _numbered(self.recording):
            event = self.recording.events[n]
            at = (event.launch, event.block) if not isinstance(event, Launch) else (event.launch, Block())
            if isinstance(event, Move):
                for part in event.parts:
                    what = ("move", self.label(part.src), part.shape, part.dtype, read(part.reads or (part.src,), at))
                    if event.asynchronous:  # it is there when it is waited for
                        waiting.setdefault((at, event.group), []).append((part.dst, what, step, n))
                    else:
                        write(part.dst, what, at, step, n)
            elif isinstance(event, Change) and event.role != "stale":
                write(event.slot, (event.role, event.shape, read(event.reads, at)), at, step, n)
            elif isinstance(event, Barrier) and event.kind == "wait":
                for name, moved, issued, move in waiting.pop((at, event.group), []):
                    write(name, moved, at, issued, move)

    def label(self, name: str) -> str:
        """What a slot is called on both sides: a stage of several buffers, ``Kj[1]``, without its number."""
        return name if self.recording.slot(name).shared_by_grid else re.sub(r"\[\d+\]$", "", name)

    def place(self, name: str, at: tuple[int, Block]) -> Hashable:
        """Whose content a slot's name means."""
        return name if self.recording.slot(name).shared_by_grid else (at, name)


def _numbered(recording: Recording) -> Iterator[tuple[int, int]]:
    """The number of each event with that of its step before it."""
    for number, step in enumerate(recording.steps):
        for event in range(step.first, step.end):
            yield number, event


def _first_difference(a: _Graphs, b: _Graphs, at: tuple[int, Block]) -> Difference | None:
    launch, block = at
    kernel = next((e.kernel for e in (a.launch(launch), b.launch(launch)) if e), "")
    where = f"{kernel}, {_block_text(a, b, block)}"
    if at not in a.blocks or at not in b.blocks:
        message = f"{where}: only the {'second' if at in b.blocks else 'first'} recording has this block"
        return Difference(launch, block, kernel, -1, "", (), -1, "", (), message)
    mine, other = a.operations[at], b.operations[at]
    if [o.key for o in mine] == [o.key for o in other]:
        return None
    one, two = _unmatched(mine, other), _unmatched(other, mine)
    if one is None and two is None:
        return None
    step, action, tiles, said = _describe(a.recording, one)
    other_step, other_action, other_tiles, other_said = _describe(b.recording, two)
    if one is None:
        message = f"{where}: nothing does what step {other_step} of the other does: {other_said}"
    elif two is None:
        message = f"{where}: step {step} does {said}, which nothing in the other does"
    else:
        message = f"{where}: step {step} does {said} where the other's step {other_step} does {other_said}"
    return Difference(launch, block, kernel, step, action, tiles, other_step, other_action, other_tiles, message)


def _block_text(a: _Graphs, b: _Graphs, block: Block) -> str:
    """``block 1``, with batch and head where there are several."""
    several = {n for graph in (a, b) for _, other in graph.blocks for n in range(2) if other[n]}
    more = f"batch {block.batch} · " if 0 in several else ""
    more += f"head {block.head} · " if 1 in several else ""
    return f"{more}block {block.tile}"


def _unmatched(mine: list[_Operation], other: list[_Operation]) -> _Operation | None:
    """The first operation that has no equal on the other side."""
    left = Counter(operation.key for operation in other)
    for operation in mine:
        if not left[operation.key]:
            return operation
        left[operation.key] -= 1
    return None


def _describe(recording: Recording, operation: _Operation | None) -> tuple[int, str, tuple[tuple[str, int], ...], str]:
    if operation is None:
        return -1, "", (), ""
    step = recording.steps[operation.step]
    inner = next((part for part in step.parts if part.first <= operation.event < part.end), step)
    loop = ", ".join(f"{name} = {value}" for name, value in inner.tiles)
    said = inner.action or inner.label
    return operation.step, inner.action, inner.tiles, f"{said} ({loop})" if loop else said
