"""Events: what an algorithm did, one frozen record each.

Requirements: every event says what it reads and what it writes, and carries the launch and the block that did it;
colours never appear here (a role and a level do); time is metadata, so that recordings made on different machines
are equal. Where a CUDA kernel was traced, an event also carries a :class:`Trace`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flashviz.slots import Block, Values, itemsize_of

ROLES = ("input", "init", "compute", "rescale", "stale")
"""What a change means. ``input``: given in HBM before the first launch. ``init``: set to its first value (level 0,
drawn empty). ``compute``: a new value (one level up). ``rescale``: scaled or overwritten in place (same level).
``stale``: nothing is written; what the slot holds was computed from a tile that is being replaced."""

BARRIERS = ("warp", "warpgroup", "block", "cluster", "grid", "launch", "arrive", "wait")
"""Who meets at a barrier. ``wait`` is a block, or one role of it, waiting for the block's own asynchronous moves or for
arrivals; ``arrive`` is a role that says it has come to ``group`` and goes on."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Where and when a traced kernel did it: times in nanoseconds of the device's global timer."""

    role: str = ""
    multiprocessor: int = -1
    start: int = -1
    end: int = -1


@dataclass(frozen=True, slots=True)
class Part:
    """One tile of a transfer: ``dst`` receives ``shape`` elements of ``dtype``, made from ``reads``.

    ``reads`` is ``(src,)`` for a plain copy; a store may change value and dtype on the way (L = m + ln l).
    """

    src: str
    dst: str
    shape: tuple[int, ...]
    dtype: str
    reads: tuple[str, ...]
    values: Values | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that cross: real elements, as they arrive."""
        return math.prod(self.shape) * itemsize_of(self.dtype)


@dataclass(frozen=True, slots=True)
class Move:
    """One transfer, or a part of one: moves with the same ``transfer`` number are a single transfer.

    An asynchronous move is issued here and complete at the next ``Barrier("wait")`` of its block that names ``group``.
    """

    parts: tuple[Part, ...]
    launch: int
    block: Block
    transfer: int
    asynchronous: bool = False
    stage: int = 0
    group: str = ""
    trace: Trace | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(p.nbytes for p in self.parts)


@dataclass(frozen=True, slots=True)
class Change:
    """What was computed into a slot, from which slots; ``level`` counts the slot's updates after it.

    ``cells`` says that the elements are made one by one, in row-major order.
    """

    slot: str
    reads: tuple[str, ...]
    role: str
    level: int
    shape: tuple[int, ...]
    launch: int
    block: Block
    cells: bool = False
    values: Values | None = None
    trace: Trace | None = None


@dataclass(frozen=True, slots=True)
class Barrier:
    """A meeting point: ``kind`` is one of :data:`BARRIERS`; ``protects`` says in words what must not be passed."""

    kind: str
    launch: int
    block: Block
    group: str = ""
    protects: str = ""
    trace: Trace | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel is launched: its grid in blocks and its block in threads, each (x, y, z)."""

    launch: int
    kernel: str
    grid: tuple[int, int, int]
    threads: tuple[int, int, int]
    trace: Trace | None = None


@dataclass(frozen=True, slots=True)
class Begin:
    """A block starts, with its shared memory and registers empty."""

    launch: int
    block: Block
    trace: Trace | None = None


Event = Move | Change | Barrier | Launch | Begin
"""Any event of a recording."""


@dataclass(frozen=True, slots=True)
class Step:
    """A group of events that a reader sees as one frame: ``recording.events[first:end]``.

    Steps nest: a composite step ("update mi, li and Oi") has ``parts``, one for each action, that can be opened.

    Args:
        label: unique enough for the step list.
        caption: the line under the picture.
        action: name of the action in program and kernel, ``""`` for ``start`` and composites.
        first, end: range of events.
        launch: number of the launch, -1 before the first.
        block: the block that acts, None where there is none.
        tiles: the loop variables, as (name, value) pairs.
        parts: nested steps.
    """

    label: str
    caption: str
    action: str
    first: int
    end: int
    launch: int = -1
    block: Block | None = None
    tiles: tuple[tuple[str, int], ...] = ()
    parts: tuple[Step, ...] = ()

    @property
    def actions(self) -> tuple[str, ...]:
        """The actions performed in this step, its parts included, in order."""
        own = (self.action,) if self.action else ()
        return own + tuple(a for p in self.parts for a in p.actions)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that cannot be right, such as reading a slot that nothing was written to."""

    kind: str
    slot: str
    launch: int
    block: Block
    step: int
    message: str


@dataclass(frozen=True, slots=True)
class Source:
    """Source text that a step can be looked up in: ``lines`` gives each action's first and last line, counted from 1.

    An action may stand in several places; the first is what ``span`` and ``lines_of`` mean.
    """

    language: str
    name: str
    text: str
    lines: tuple[tuple[str, int, int], ...] = ()

    def span(self, action: str) -> tuple[int, int] | None:
        """First and last line of an action, or None where this source does not name it."""
        return next(((a, b) for name, a, b in self.lines if name == action), None)

    def lines_of(self, action: str) -> str:
        """The text of an action's lines.

        Raises:
            KeyError: this source does not name it; lists what it names.
        """
        span = self.span(action)
        if span is None:
            raise KeyError(f"{self.name} names no action {action!r}; it has {', '.join(n for n, _, _ in self.lines)}")
        return "\n".join(self.text.split("\n")[span[0] - 1 : span[1]])
