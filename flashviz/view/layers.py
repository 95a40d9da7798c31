"""What a slot shows within one step: what it held before, and each content that the step gave it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from flashviz.events import Barrier, Change, Move, Step
from flashviz.recording import Content, Key, Recording
from flashviz.slots import Slot
from flashviz.view.facts import Flight, flights_of, waits
from flashviz.view.layout import Box, Layout


@dataclass(frozen=True, slots=True)
class Layer:
    """One content of a slot within a step: from where it flies, how it fills, and in which part of the step.

    ``arriving``: an asynchronous copy that is on its way; ``lands``: it was, and is there now.
    """

    content: Content
    source: Box | None = None
    start: float = 0.0
    end: float = 0.0
    fills: bool = False
    cells: bool = False
    arriving: bool = False
    lands: bool = False


def layers_of(recording: Recording, layout: Layout, slot: Slot, step: Step) -> list[Layer]:
    """What a slot held before the step, then each content that the step gave it and that looks different.

    A slot that is moved into and then changed flies in the first half of the step and fills in the second. So does what is
    computed from slots that arrive in the same step: they fly in the first half, it fills in the second. An asynchronous copy
    flies when it is issued and is on its way until it is waited for: then it fills.
    """
    key = recording.key(slot.name, step.launch, step.block)
    before = recording.content_before(key, step.first)
    out = [Layer(before)] if before else []
    moved: tuple[Content, Box | None] | None = None
    changed: Content | None = None
    cells = given = landed = False
    flights = flights_of(recording).get(key, ())
    for n, content in contents_within(recording, key, step):
        event = recording.events[n]
        if isinstance(event, Move):
            source = next(p.src for p in event.parts if p.dst == slot.name)
            moved, changed = (content, layout.boxes.get(source)), None
        elif getattr(event, "role", "") == "input":
            out = [Layer(content)]
        else:
            cells = cells or bool(getattr(event, "cells", False))
            given = getattr(event, "role", "") == "init" and event.launch >= 0
            landed = isinstance(event, Barrier)
            changed = content
    box = layout.boxes.get(slot.name)
    written = box.numbers if box is not None else 0
    if changed is not None and not _looks_new(moved[0] if moved else before, changed, written):
        if moved is None:  # a kernel that gives an output its first value leaves it drawn empty: the ring says it
            out = [Layer(changed, None, 0, 1.0, fills=True)] if given else [Layer(changed)]
        changed = None
    awaited, waiting = waits(recording, step)
    if landed and changed is not None and changed is not before:
        return landing(layout, slot, step, flights, out, changed, 0.5 if awaited else 1.0)
    half = 0.5 if moved and (changed or slot.name in awaited) else 1.0
    if moved:
        out.append(Layer(moved[0], moved[1], 0, half))
    if changed:
        start = 0.5 if moved or slot.name in waiting else 0.0
        fills = not (slot.shared_by_grid and changed.level == 0)
        out.append(Layer(changed, None, start, 1.0, fills, cells and not changed.stale))
    return out + [
        Layer(f.content, layout.boxes.get(f.part.src) if f.issued >= step.first else None, 0, 1.0, arriving=True)
        for f in flights
        if f.issued < step.end <= f.landed
    ]


def landing(
    layout: Layout, slot: Slot, step: Step, flights: tuple[Flight, ...], out: list[Layer], content: Content, end: float
) -> list[Layer]:
    """A slot whose asynchronous copy is waited for in this step: on its way since it was issued, it fills until ``end``."""
    flight = next(f for f in flights if f.landed == content.event)
    if flight.issued >= step.first:  # issued and waited for in one step: a copy like any other
        return [*out, Layer(content, layout.boxes.get(flight.part.src), 0, end)]
    return [*out, Layer(flight.content, arriving=True), Layer(content, None, 0, end, fills=True, lands=True)]


def _looks_new(old: Content | None, new: Content, written: int) -> bool:
    if old is None or (old.level, old.stale, old.shape) != (new.level, new.stale, new.shape):
        return True
    return math.prod(new.shape) <= written and old.values != new.values


def contents_within(recording: Recording, key: Key, step: Step) -> Iterator[tuple[int, Content]]:
    """(event, content) for every content that a step gave a slot, in order."""
    end = step.end
    found = []
    while True:
        content = recording.content_before(key, end)
        if content is None or content.event < step.first:
            break
        found.append((content.event, content))
        end = content.event
    yield from reversed(found)


def masked_cells(
    recording: Recording, key: Key, content: Content, cells: tuple[int, int], shape: tuple[int, ...]
) -> set[tuple[int, int]]:
    """The cells (row, column) of scores that are masked, -inf, as they were computed: probabilities overwrite them in place.

    None are where the numbers did not travel along. A cell that stands for several elements is masked where all of them are.
    """
    found: Content | None = content
    while found is not None and isinstance(event := recording.events[found.event], Change) and event.role != "compute":
        found = recording.content_before(key, found.event)
    if found is None or found.values is None or len(found.shape) != 2:
        return set()
    hidden = np.isneginf(found.values.array)
    if not hidden.any():
        return set()
    out = set()
    for r in range(cells[0]):
        for c in range(cells[1]):
            rows, columns = (
                slice(n * size // count, max((n + 1) * size // count, n * size // count + 1))
                for n, size, count in zip((r, c), shape, cells, strict=True)
            )
            part = hidden[rows, columns]
            if part.size and part.all():
                out.add((r, c))
    return out
