"""The steps of a recording while they are open: they nest, and one may go on with the last."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field

from flashviz.events import Step
from flashviz.slots import Block


@dataclass
class OpenStep:
    """A step that events may still join: ``first`` and ``end`` count the recording's events."""

    label: str
    caption: str
    action: str
    first: int
    launch: int
    block: Block | None
    tiles: tuple[tuple[str, int], ...]
    join: bool = False
    end: int = -1
    parts: list[OpenStep] = field(default_factory=list)
    transfers: dict[tuple[str, str], int] = field(default_factory=dict)

    def close(self) -> Step:
        """The step as the recording has it, with its parts."""
        parts = tuple(p.close() for p in self.parts)
        return Step(
            self.label, self.caption, self.action, self.first, self.end, self.launch, self.block, self.tiles, parts
        )

    def goes_on(self, other: OpenStep) -> bool:
        """Whether ``other``, which begins now, is more of this step: both join, nothing lies between, all else is the same."""
        here, there = (
            (self.label, self.launch, self.block, self.tiles),
            (other.label, other.launch, other.block, other.tiles),
        )
        return self.join and other.join and self.end == other.first and here == there


class Steps:
    """All steps so far, and those that are open now, the outermost first."""

    def __init__(self) -> None:
        self.all: list[OpenStep] = []
        self.stack: list[OpenStep] = []
        self._transfer = 0

    @property
    def outermost(self) -> OpenStep | None:
        """The step that the picture shows; None between two steps."""
        return self.stack[0] if self.stack else None

    @contextmanager
    def open(self, step: OpenStep, events: Sized) -> Iterator[None]:
        """``step`` is open inside, or the last step again if it goes on; it ends with the last of ``events``."""
        places = self.stack[-1].parts if self.stack else self.all
        if places and places[-1].goes_on(step):
            step = places[-1]
        else:
            places.append(step)
        self.stack.append(step)
        try:
            yield
        finally:
            self.stack.pop()
            step.end = len(events)

    def transfer(self, way: tuple[str, str]) -> int:
        """The number of a transfer from one memory to another: a step that joins has one for each way."""
        top = self.outermost
        if top is not None and top.join and way in top.transfers:
            return top.transfers[way]
        self._transfer += 1
        if top is not None:
            top.transfers[way] = self._transfer
        return self._transfer
