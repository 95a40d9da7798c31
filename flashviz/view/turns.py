"""Who waits for whom in a block that has roles: lanes for the roles, lanes for the slots that they share, and turns instead of time.

Requirements: which action waits for which is read from the recording; how long one lasts is not known without a GPU, so every action
lasts one turn and every copy as many as one says. Times of a GPU are drawn by ``view.timeline``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from flashviz.events import Barrier, Begin, Change, Event, Move, Step
from flashviz.recording import Recording, as_recording
from flashviz.view.facts import hues_of
from flashviz.view.figure import Figure
from flashviz.view.palette import GROUND, HATCH, OUTLINE, TEXT, text_on
from flashviz.view.timeline import colours_of

LANE, GAP, TURN, LEFT, LEAST, MOST = 0.34, 0.14, 0.2, 1.3, 6.0, 13.0
"""In inches: a lane, the part of it above and below a bar, a turn, room for names, least and most width."""


@dataclass(frozen=True, slots=True)
class Act:
    """An action of a role: the turns in which it begins and ends, and the tile that it is about."""

    role: str
    action: str
    step: int
    start: int
    end: int
    tile: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Turns in which a role has nothing to do but wait, and what came last of all that it waited for."""

    role: str
    start: int
    end: int
    group: str


@dataclass(frozen=True, slots=True)
class Stay:
    """A tile in a slot: asked for, there, and read for the last time."""

    slot: str
    tile: str
    tensor: str
    asked: int
    there: int
    done: int


@dataclass(frozen=True, eq=False)
class Turns:
    """A block's roles side by side, in turns. A cell's last line shows it.

    Args:
        recording: what was done.
        acts, waits, stays: what is drawn.
        length: turns of all.
    """

    recording: Recording
    acts: tuple[Act, ...]
    waits: tuple[Wait, ...]
    stays: tuple[Stay, ...]
    length: int

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles, in the order in which they begin."""
        return tuple(dict.fromkeys(act.role for act in self.acts))

    def waited(self, role: str) -> int:
        """How many turns a role waits, from the block's beginning to its own end.

        Raises:
            KeyError: the block has no such role; names those it has.
        """
        if role not in self.roles:
            raise KeyError(f"no role {role!r}; there are {', '.join(self.roles)}")
        return sum(wait.end - wait.start for wait in self.waits if wait.role == role)

    def __repr__(self) -> str:
        waited = ", ".join(f"{role} waits {self.waited(role)}" for role in self.roles)
        return f"Turns({self.length}: {waited})"

    def figure(self) -> Figure:
        """The lanes as a matplotlib figure."""
        return _draw(self)

    def _repr_png_(self) -> bytes:
        return self.figure()._repr_png_()


def turns(run: Any, *, copy: int = 2, block: int = 0) -> Turns:
    """What the roles of a block do side by side, and where one waits for another.

    Every action lasts one turn, and a copy is there ``copy`` turns after the one in which it was asked for: these are no times. What is
    recorded is what each action waits for; a role begins its next one as soon as that has come.

    Args:
        run: a run or recording of a program with roles: :func:`fv.flash_attention_3`, :func:`fv.ring`.
        copy: turns that a copy takes, 0 or more.
        block: which of the blocks that were recorded, in the order in which they began.

    Raises:
        ValueError: the recording has no roles, or copy is negative. IndexError: no such block.

    >>> import numpy as np, flashviz as fv
    >>> turns(fv.ring(np.ones((12, 4)), rows=4, consumers=2))
    Turns(9: producer waits 2, consumer 1 waits 5, consumer 2 waits 5)
    """
    recording = as_recording(run)
    if copy < 0:
        raise ValueError(f"copy={copy}: a copy takes 0 turns or more")
    blocks = [(e.launch, e.block) for e in recording.events if isinstance(e, Begin)]
    if block not in range(len(blocks)):
        raise IndexError(f"block={block}: {len(blocks)} were recorded")
    steps = [
        (n, s)
        for n, s in enumerate(recording.steps)
        if s.action and (s.launch, s.block) == blocks[block] and s.end > s.first
    ]
    if len({role_of(recording, step) for _, step in steps}) < 2:
        raise ValueError(
            f"{recording.algorithm} has no roles: its threads do one thing after another; fv.flash_attention_3 and fv.ring have them"
        )
    clock = _Clock(recording, copy)
    for number, step in steps:
        clock.perform(number, step)
    return Turns(recording, tuple(clock.acts), tuple(clock.waits), clock.stays(), max(clock.over.values()))


def role_of(recording: Recording, step: Step) -> str:
    """The role that performs a step, "" where there are none."""
    return next((e.trace.role for e in recording.events[step.first : step.end] if e.trace is not None), "")


class _Clock:
    """Gives every action its turn: after the role's last one, and after all that it waits for."""

    def __init__(self, recording: Recording, copy: int) -> None:
        self.recording, self.copy = recording, copy
        self.over: dict[str, int] = {}  # by role: the turn in which its last action ends
        self.came: dict[str, int] = {}  # by group: when the last of its arrivals, or of its copies, has come
        self.acts: list[Act] = []
        self.waits: list[Wait] = []
        self.asked: list[tuple[str, str, str, int, str]] = []  # slot, tile, tensor, turn, group
        self.read: list[tuple[str, int, int]] = []  # slot, how many copies were asked for before, turn
        self.readers: dict[str, set[str]] = {}
        several = {value for step in recording.steps for name, value in step.tiles if name == "i"}
        self.several = len(several) > 1

    def perform(self, number: int, step: Step) -> None:
        events = self.recording.events[step.first : step.end]
        role = role_of(self.recording, step)
        free = self.over.get(role, 0)
        needs = {e.group: self.came.get(e.group, 0) for e in events if isinstance(e, Barrier) and e.kind == "wait"}
        start = max(free, *needs.values()) if needs else free
        if start > free:
            self.waits.append(Wait(role, free, start, max(needs, key=needs.__getitem__)))
        end = self.over[role] = start + 1
        self.acts.append(Act(role, step.action, number, start, end, self._tile(step)))
        for slot in _read(events):
            self.read.append((slot, len(self.asked), end))
            self.readers.setdefault(slot, set()).add(role)
        for event in events:
            if isinstance(event, Barrier) and event.kind == "arrive":
                self.came[event.group] = max(end, self.came.get(event.group, 0))
            elif isinstance(event, Move) and event.asynchronous:
                self.came[event.group] = max(end + self.copy, self.came.get(event.group, 0))
                for part in event.parts:
                    source = self.recording.slot(part.src)
                    self.asked.append((part.dst, source.label or source.name, source.tensor, start, event.group))

    def _tile(self, step: Step) -> str:
        tiles = dict(step.tiles)
        names = [name for name in ("i", "j", "n") if name in tiles and (name != "i" or self.several)]
        return ".".join(str(tiles[name]) for name in names)

    def stays(self) -> tuple[Stay, ...]:
        """The tiles in the slots that more than one role reads: the ring."""
        found = []
        for n, (slot, tile, tensor, asked, group) in enumerate(self.asked):
            if len(self.readers.get(slot, ())) < 2:
                continue
            later = next((m for m, other in enumerate(self.asked) if m > n and other[0] == slot), len(self.asked))
            there = self.came[group]
            last = [end for name, count, end in self.read if name == slot and n < count <= later]
            found.append(Stay(slot, tile, tensor, asked, there, max([there, *last])))
        return tuple(found)


def _read(events: Iterable[Event]) -> set[str]:
    """The slots that are read by what is computed."""
    found: set[str] = set()
    for event in events:
        if isinstance(event, Change):
            found |= set(event.reads)
    return found


def _draw(made: Turns) -> Figure:
    slots = sorted(dict.fromkeys(stay.slot for stay in made.stays))
    lanes = [*made.roles, *slots]
    colours, hues = colours_of(made.recording), hues_of(made.recording)
    width = min(MOST, max(LEAST, LEFT + 0.2 + TURN * made.length))
    names = [Patch(facecolor=c, edgecolor=OUTLINE, label=a.replace("_", " ")) for a, c in colours.items()]
    names.append(Patch(facecolor=GROUND, edgecolor=HATCH, hatch="////", label="waits, or is on its way"))
    columns = max(2, min(len(names), int(width / 1.5)))
    bottom = 0.7 + 0.2 * -(-len(names) // columns)
    height = 0.45 + LANE * (len(lanes) + 0.4) + bottom
    figure = Figure(figsize=(width, height), dpi=100, facecolor=GROUND)
    axes = figure.add_axes(
        (LEFT / width, bottom / height, 1 - (LEFT + 0.2) / width, LANE * (len(lanes) + 0.4) / height)
    )
    place = {name: n + (0.4 if name in slots else 0.0) for n, name in enumerate(lanes)}
    for wait in made.waits:
        _box(axes, wait.start, wait.end, place[wait.role], GROUND, HATCH, "wait", hatch="////")
    for act in made.acts:
        _box(axes, act.start, act.end, place[act.role], colours[act.action], OUTLINE, f"act.{act.action}", act.tile)
    for stay in made.stays:
        hue = hues[stay.tensor]
        _box(axes, stay.asked, stay.there, place[stay.slot], GROUND, hue.outline, "asked", hatch="////")
        if stay.done > stay.there:
            _box(axes, stay.there, stay.done, place[stay.slot], hue.light, hue.outline, "there", stay.tile)
    _dress(axes, made, place)
    figure.legend(handles=names, loc="lower center", ncols=columns, frameon=False, fontsize=9)
    return figure


def _box(
    axes: Axes, start: int, end: int, lane: float, fill: str, edge: str, gid: str, text: str = "", hatch: str = ""
) -> None:
    top, tall = lane + GAP / 2, 1 - GAP
    style: dict[str, Any] = {"facecolor": fill, "edgecolor": edge, "linewidth": 0.8, "gid": gid}
    if hatch:
        style |= {"hatch": hatch, "edgecolor": HATCH, "linewidth": 0.0}
    axes.add_patch(Rectangle((start, top), end - start, tall, **style))
    if hatch and edge != HATCH:  # the hatching is grey, the outline the slot's own
        axes.add_patch(
            Rectangle((start, top), end - start, tall, fill=False, edgecolor=edge, linewidth=0.8, gid=f"{gid}.outline")
        )
    if text:
        size = 8.0 if len(text) <= 2 or end - start > 1 else 6.5
        axes.text(
            (start + end) / 2, top + tall / 2 + 0.03, text, ha="center", va="center", fontsize=size, color=text_on(fill)
        )


def _dress(axes: Axes, made: Turns, place: dict[str, float]) -> None:
    axes.set_xlim(0, made.length)
    axes.set_ylim(max(place.values()) + 1, 0)
    axes.set_yticks([y + 0.5 for y in place.values()], list(place))
    axes.set_xlabel("turns: every action lasts one; no times", fontsize=9, color=TEXT)
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    axes.set_axisbelow(True)
    axes.grid(axis="x", color="#e4e4e7", linewidth=0.6)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(left=False, labelsize=9, colors=TEXT)
    several = len({act.tile for act in made.acts if "." in act.tile}) > 0
    about = "in each bar: row block . tile" if several else "in each bar: the tile"
    axes.set_title(f"{made.recording.algorithm.replace('_', ' ')}   ({about})", fontsize=10, loc="left", color=TEXT)
