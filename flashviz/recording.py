"""Recording: what was performed, as plain data that can be asked for any slot at any step.

Requirements: frozen; content of any slot at any step in bounded time whatever the number of steps; 10,000 steps
indexed in well under a second; nothing here draws, and nothing here knows an algorithm.
"""

from __future__ import annotations

import contextlib
import gc
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from flashviz.events import Barrier, Begin, Change, Event, Finding, Launch, Move, Part, Source, Step
from flashviz.slots import Block, Slot, Values

Param = int | float | bool | str
Key = str | tuple[int, Block, str]
"""Whose content: a name for a slot of the whole grid, (launch, block, name) for a slot of one block."""

_STRIDE = 64


@dataclass(frozen=True, slots=True)
class Content:
    """What a slot holds after one event.

    Args:
        event: index of the event that put it there.
        label: what the tile is called, ``""`` for carries and scores.
        tensor: what it is a piece of; the picture takes the hue from it.
        level: how many updates it has had; 0 is drawn empty.
        stale: computed from a tile that has been replaced since.
        shape: its real size, at most the slot's.
        values: the numbers, None where they were too many to travel along.
    """

    event: int
    label: str
    tensor: str
    level: int
    stale: bool
    shape: tuple[int, ...]
    values: Values | None


class _History:
    """All contents of one slot in order, and where each run of events starts in them."""

    __slots__ = ("contents", "events", "origin", "starts")

    def __init__(self) -> None:
        self.events: list[int] = []
        self.contents: list[Content | None] = []
        self.origin = 0
        self.starts: list[int] = []

    def add(self, event: int, content: Content | None) -> None:
        if not self.events:
            self.origin = event // _STRIDE
        while len(self.starts) <= event // _STRIDE - self.origin:
            self.starts.append(len(self.events))
        self.events.append(event)
        self.contents.append(content)

    def before(self, end: int) -> Content | None:
        """The last content made by an event < end. Looks at no more than the events of one stride."""
        bucket = end // _STRIDE - self.origin
        if bucket < 0 or not self.events:
            return None
        if bucket >= len(self.starts):
            return self.contents[-1]
        low = self.starts[bucket]
        high = self.starts[bucket + 1] if bucket + 1 < len(self.starts) else len(self.events)
        n = bisect_left(self.events, end, low, high)
        return self.contents[n - 1] if n else None


@dataclass(frozen=True)
class Recording:
    """What an algorithm did, as plain data.

    Args:
        algorithm: its name; the picture looks its layout up by it and falls back to a generic one.
        source: ``"program"`` where the tile program was recorded, ``"kernel"`` where a traced CUDA kernel was.
        device: where it ran: ``"numpy"``, ``"cpu"`` or ``"gpu"``.
        params: sizes and options, such as ``Br``, ``Tc`` and ``causal``.
        slots: every place in memory that the events name.
        events: what happened, block by block, in each block as performed.
        steps: what a reader sees as frames, in order.
        findings: what cannot be right, such as reads of empty slots.
        code: the sources that name the actions.
    """

    algorithm: str
    source: str = "program"
    device: str = "numpy"
    params: dict[str, Param] = field(default_factory=dict)
    slots: tuple[Slot, ...] = ()
    events: tuple[Event, ...] = ()
    steps: tuple[Step, ...] = ()
    findings: tuple[Finding, ...] = ()
    code: tuple[Source, ...] = ()

    def __repr__(self) -> str:
        return (
            f"Recording({self.algorithm!r}, source={self.source!r}, device={self.device!r}, "
            f"{len(self.steps)} steps, {len(self.events)} events)"
        )

    def with_code(self, *code: Source) -> Recording:
        """The same recording with other source texts."""
        return replace(self, code=code)

    @cached_property
    def slot_by_name(self) -> dict[str, Slot]:
        """Every slot under its name."""
        return {s.name: s for s in self.slots}

    def slot(self, name: str) -> Slot:
        """The slot of that name.

        Raises:
            KeyError: no such slot; the message lists those there are.
        """
        try:
            return self.slot_by_name[name]
        except KeyError:
            known = ", ".join(sorted(self.slot_by_name)[:40])
            raise KeyError(f"no slot {name!r} in this recording of {self.algorithm}; it has {known}") from None

    def key(self, name: str, launch: int, block: Block | None) -> Key:
        """Whose content a slot's name means in a block of a launch."""
        return name if self.slot(name).shared_by_grid else (launch, block or Block(), name)

    @cached_property
    def _histories(self) -> dict[Key, _History]:
        with no_collector():
            return _replay(self)

    def touched(self, key: Key, first: int, end: int) -> bool:
        """Whether an event in ``[first, end)`` made content for ``key``."""
        history = self._histories.get(key)
        if history is None:
            return False
        content = history.before(end)
        return content is not None and content.event >= first

    def content_before(self, key: Key, event: int) -> Content | None:
        """What ``key`` held just before an event, or None while it was empty."""
        history = self._histories.get(key)
        return history.before(event) if history else None

    def check_step(self, step: int) -> Step:
        """The step of that number (negative ones count from the end).

        Raises:
            IndexError: there is no such step; the message gives the range.
        """
        if not -len(self.steps) <= step < len(self.steps):
            raise IndexError(f"step {step} of a recording with {len(self.steps)} steps (0 to {len(self.steps) - 1})")
        return self.steps[step]

    def content(self, step: int, slot: str, block: Block | tuple[int, int, int] | None = None) -> Content | None:
        """What a slot holds at the end of a step, None while it is empty.

        Args:
            step: number of the step.
            slot: its name.
            block: whose shared memory to look at; the block of the step when not given.
        """
        at = self.check_step(step)
        where = Block(*block) if block is not None else at.block
        return self.content_before(self.key(slot, at.launch, where), at.end)

    def values(self, step: int, slot: str, block: Block | tuple[int, int, int] | None = None) -> np.ndarray:
        """The numbers in a slot at the end of a step: its real shape, NaN everywhere while nothing was written.

        Raises:
            ValueError: the tile was too large for its numbers to travel along.
        """
        content = self.content(step, slot, block)
        output = content is not None and content.level == 0 and self.events[content.event].launch < 0
        if content is None or (output and content.values is None):  # an output starts empty, in HBM
            return np.full(self.slot(slot).shape, np.nan, dtype="float32")
        if content.values is None:
            raise ValueError(
                f"{slot} at step {step} holds {content.shape} elements, and only small tiles keep their numbers; "
                "record with smaller Br, Bc or d, or give keep_values= a larger limit"
            )
        return content.values.array

    @cached_property
    def launches(self) -> tuple[Launch, ...]:
        """Every kernel launch, in order."""
        return tuple(e for e in self.events if isinstance(e, Launch))

    def blocks(self, launch: int = 0) -> tuple[Block, ...]:
        """The blocks of a launch in the order in which they are recorded."""
        return tuple(e.block for e in self.events if isinstance(e, Begin) and e.launch == launch)

    def part(self, steps: range | slice) -> tuple[int, ...]:
        """The numbers of the steps that a range or slice names."""
        return tuple(range(len(self.steps)))[steps] if isinstance(steps, slice) else tuple(steps)


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """Half a million new objects and no garbage: looking for it would take longer than making them."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _replay(recording: Recording) -> dict[Key, _History]:
    histories: dict[Key, _History] = {}
    pending: dict[tuple[int, Block], dict[str, list[tuple[Move, Part, Content | None]]]] = {}
    filled: dict[tuple[int, Block], set[Key]] = {}

    def put(key: Key, event: int, content: Content | None) -> None:
        histories.setdefault(key, _History()).add(event, content)
        if not isinstance(key, str):
            filled.setdefault(key[:2], set()).add(key)

    def current(key: Key) -> Content | None:
        history = histories.get(key)
        return history.contents[-1] if history and history.contents else None

    def land(n: int, move: Move, part: Part, source: Content | None) -> None:
        key = recording.key(part.dst, move.launch, move.block)
        old = current(key)
        slot = recording.slot(part.dst)
        tensor = source.tensor if source and source.tensor else slot.tensor
        kept = (
            old.label if old and old.tensor == tensor else slot.label
        )  # of what is laid over another tensor, not that one's name
        label = (source.label if source else "") or kept
        level = source.level if source else 1
        put(key, n, Content(n, label, tensor, level, False, part.shape, part.values))

    for n, event in enumerate(recording.events):
        if isinstance(event, Move):
            # What is copied is what the sources hold when the move is issued, whatever becomes of them until it lands.
            held = [current(recording.key(part.src, event.launch, event.block)) for part in event.parts]
            for part, source in zip(event.parts, held, strict=True):
                if event.asynchronous:
                    groups = pending.setdefault((event.launch, event.block), {})
                    groups.setdefault(event.group, []).append((event, part, source))
                else:
                    land(n, event, part, source)
        elif isinstance(event, Change):
            key = recording.key(event.slot, event.launch, event.block)
            old, slot = current(key), recording.slot(event.slot)
            if event.role == "stale":
                if old is not None:
                    put(key, n, replace(old, event=n, stale=True))
            else:
                label = old.label if old else slot.label
                put(key, n, Content(n, label, slot.tensor, event.level, False, event.shape, event.values))
        elif isinstance(event, Barrier) and event.kind == "wait":
            for move, part, source in pending.get((event.launch, event.block), {}).pop(event.group, ()):
                land(n, move, part, source)
        elif isinstance(event, Begin):
            pending.pop((event.launch, event.block), None)
            for key in filled.pop((event.launch, event.block), set()):
                histories[key].add(n, None)
    return histories


def as_recording(run: Any) -> Recording:
    """The recording of a run, or the recording itself.

    Raises:
        TypeError: neither; ValueError: the run was made with ``record=False``.
    """
    if isinstance(run, Recording):
        return run
    if not hasattr(run, "recording"):
        raise TypeError(f"expected a run or a recording, got {type(run).__name__}")
    recording = run.recording
    if recording is None:
        raise ValueError("this run has no recording: it was made with record=False")
    if not isinstance(recording, Recording):
        raise TypeError(f"run.recording is a {type(recording).__name__}, not a Recording")
    return recording
