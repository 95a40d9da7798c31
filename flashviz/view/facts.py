"""What a recording says about the whole picture, found once: its layouts, how many updates carries get, and hues."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from flashviz.events import Barrier, Change, Move, Part, Step
from flashviz.recording import Content, Key, Recording
from flashviz.slots import Block
from flashviz.view.layout import Layout
from flashviz.view.layouts import by_tile, layout_of
from flashviz.view.palette import HUES, Hue, hue_of


class _ByIdentity:
    """A recording as a cache key: recordings are frozen, so the same object has the same layout."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    def __hash__(self) -> int:
        return id(self.recording)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and other.recording is self.recording


@lru_cache(maxsize=64)
def _layout(key: _ByIdentity, block: Block, launch: int) -> Layout:
    return layout_of(key.recording, block, launch)


@lru_cache(maxsize=64)
def _by_tile(key: _ByIdentity) -> bool:
    return by_tile(key.recording)


def layout_for(recording: Recording, block: Block | None, launch: int = 0) -> Layout:
    """The layout in which a block of a launch is shown (None: the first), computed once for each head and launch.

    Layouts that say so are computed for each block.
    """
    at, key = block or first_block(recording) or Block(), _ByIdentity(recording)
    return _layout(key, at if _by_tile(key) else at._replace(tile=0), max(launch, 0))


def first_block(recording: Recording) -> Block | None:
    """The block that is shown first."""
    return next((s.block for s in recording.steps if s.block is not None), None)


@lru_cache(maxsize=64)
def _levels(key: _ByIdentity) -> dict[str, int]:
    most: dict[str, int] = {}
    for event in key.recording.events:
        level = getattr(event, "level", None)
        if level is not None:
            tensor = key.recording.slot(event.slot).tensor  # type: ignore[union-attr]
            most[tensor] = max(most.get(tensor, 1), level)
    return most


def levels_of(recording: Recording) -> dict[str, int]:
    """How many updates each tensor's carry gets at most: its shades run over them."""
    return _levels(_ByIdentity(recording))


@dataclass(frozen=True, slots=True)
class Flight:
    """An asynchronous copy of one tile: issued by one event and there at another, the wait (past the last event: never)."""

    part: Part
    issued: int
    landed: int
    content: Content


@lru_cache(maxsize=64)
def _flights(key: _ByIdentity) -> dict[Key, tuple[Flight, ...]]:
    recording = key.recording
    found: dict[Key, list[Flight]] = {}
    pending: dict[tuple[int, Block], dict[str, list[tuple[int, Part]]]] = {}

    def land(at: tuple[int, Block], group: str, n: int) -> None:
        for issued, part in pending.get(at, {}).pop(group, ()):
            src, dst = recording.slot(part.src), recording.slot(part.dst)
            content = Content(n, src.label, src.tensor or dst.tensor, 1, False, part.shape, None)
            found.setdefault(recording.key(part.dst, *at), []).append(Flight(part, issued, n, content))

    for n, event in enumerate(recording.events):
        if isinstance(event, Move) and event.asynchronous:
            groups = pending.setdefault((event.launch, event.block), {})
            groups.setdefault(event.group, []).extend((n, part) for part in event.parts)
        elif isinstance(event, Barrier) and event.kind == "wait":
            land((event.launch, event.block), event.group, n)
    for at, groups in pending.items():
        for group in list(groups):
            land(at, group, len(recording.events))
    return {slot: tuple(flights) for slot, flights in found.items()}


def flights_of(recording: Recording) -> dict[Key, tuple[Flight, ...]]:
    """By slot and block the asynchronous copies into it, in the order in which they landed."""
    return _flights(_ByIdentity(recording))


@lru_cache(maxsize=64)
def _landing(key: _ByIdentity) -> dict[int, tuple[Flight, ...]]:
    by_wait: dict[int, list[Flight]] = {}
    for flights in _flights(key).values():
        for flight in flights:
            by_wait.setdefault(flight.landed, []).append(flight)
    return {n: tuple(flights) for n, flights in by_wait.items()}


@lru_cache(maxsize=256)
def _waits(key: _ByIdentity, first: int, end: int) -> tuple[frozenset[str], frozenset[str]]:
    arrived, awaited, waiting = set[str](), set[str](), set[str]()
    for n, event in enumerate(key.recording.events[first:end], first):
        if isinstance(event, Move):
            arrived.update(part.dst for part in event.parts)
        elif isinstance(event, Barrier) and event.kind == "wait":
            arrived.update(flight.part.dst for flight in _landing(key).get(n, ()))
        elif isinstance(event, Change) and (read := arrived.intersection(event.reads)):
            awaited |= read
            waiting.add(event.slot)
    return frozenset(awaited), frozenset(waiting)


def waits(recording: Recording, step: Step) -> tuple[frozenset[str], frozenset[str]]:
    """Slots that arrive in a step (or were waited for in it) and are read by what it computes afterwards, and the slots that this
    is written to."""
    return _waits(_ByIdentity(recording), step.first, step.end)


@lru_cache(maxsize=64)
def _others(key: _ByIdentity) -> tuple[str, ...]:
    names = dict.fromkeys(s.tensor for s in key.recording.slots)
    return tuple(n for n in names if hue_of(n) is hue_of("") and n not in HUES)


def others_of(recording: Recording) -> tuple[str, ...]:
    """The tensors that are not attention's: they take hues in the order in which they appear."""
    return _others(_ByIdentity(recording))


def own_hues(recording: Recording) -> dict[str, Hue]:
    """The hues that the layouts give tensors and single slots."""
    own: dict[str, Hue] = {}
    for launch in range(max(len(recording.launches), 1)):
        own = {**layout_for(recording, None, launch).hues, **own}
    return own


def hues_of(recording: Recording) -> dict[str, Hue]:
    """The hue of every tensor: its layouts' own, or that of its name."""
    own, others = own_hues(recording), others_of(recording)
    return {s.tensor: own.get(s.tensor) or hue_of(s.tensor, others) for s in recording.slots}
