"""Recorder: the verbs with which an algorithm is performed and, at the same time, recorded.

Requirements: the arithmetic is the caller's, on real NumPy tiles that live in the recorder's slots; every verb checks
its arguments before anything is written; reading a slot that holds nothing gives NaN and a finding, never a crash.

A reader's own algorithm, whole:

>>> r = Recorder("sum of squares")
>>> x = r.tensor("x", np.arange(6.0), tile=2)
>>> xi, s = r.slot("xi", shape=(2,), tensor="x"), r.slot("s", shape=(), memory="register", scope="thread")
>>> with r.launch("sum_of_squares"), r.block(tile=0):
...     with r.step("s = 0"):
...         r.init(s, 0.0)
...     for i in range(3):
...         with r.step(f"load x{i}"):
...             r.move(x[i], xi)
...         with r.step(f"add x{i}"):
...             r.change(s, r.read(s) + (r.read(xi) ** 2).sum(), reads=(s, xi))
>>> recording = r.recording()
>>> float(recording.values(-1, "s"))
55.0
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from operator import index
from typing import Any

import numpy as np

from flashviz.contents import Arrival, Contents
from flashviz.events import BARRIERS, Barrier, Begin, Change, Event, Finding, Launch, Move, Part, Source, Trace
from flashviz.recording import Key, Param, Recording
from flashviz.slots import Block, Slot, Values, as_dtype, name_of, shape_text
from flashviz.steps import OpenStep, Steps

KEEP_VALUES = 256
"""Tiles up to this many elements keep their numbers in the recording."""
MOST_ACTIONS = 100_000
"""More steps than this are not recorded unless ``keep`` names the blocks to keep."""

SlotLike = Slot | str


class Tensor:
    """A tensor in HBM, cut in tiles along its first axis: ``K[j]`` is the slot of tile j."""

    def __init__(self, name: str, tiles: tuple[Slot, ...]) -> None:
        self.name, self.tiles = name, tiles

    def __getitem__(self, index: int) -> Slot:
        if not 0 <= index < len(self.tiles):
            raise IndexError(f"{self.name} has tiles 0 to {len(self.tiles) - 1}, not {index}")
        return self.tiles[index]

    def __len__(self) -> int:
        return len(self.tiles)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.tiles)


class Recorder:
    """Performs moves and changes on real tiles and keeps what was performed.

    Args:
        algorithm: its name; a layout of that name draws it, else the generic one.
        params: sizes and options that the recording carries.
        keep: True, False, or the blocks to keep, as tile numbers or (batch, head, tile) triples.
        keep_values: tiles up to this many elements keep their numbers.

    Attributes:
        trace: where and when a traced kernel did what is performed from here on; None where nothing was traced.
    """

    trace: Trace | None = None

    def __init__(
        self,
        algorithm: str,
        params: dict[str, Param] | None = None,
        *,
        keep: bool | Iterable[int | tuple[int, int, int]] = True,
        keep_values: int = KEEP_VALUES,
    ) -> None:
        self.algorithm = algorithm
        self.params: dict[str, Param] = dict(params or {})
        self._keep = _kept(keep)
        self._keep_values = keep_values
        self._slots: dict[str, Slot] = {}
        self._held = Contents()
        self._events: list[Event] = []
        self._steps = Steps()
        self._findings: list[Finding] = []
        self._launch, self._block = -1, Block()
        self._in_block = self._begun = False
        self._name = ""
        self._several = [False, False]
        if self._keep is not False:
            self._steps.all.append(OpenStep("start", "Setup ready", "", 0, -1, None, (), end=0))

    # -- places in memory ------------------------------------------------------------------------------------------

    def slot(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: str = "float32",
        *,
        memory: str = "shared",
        scope: str = "block",
        tensor: str = "",
    ) -> Slot:
        """Declare a slot that every block has for itself, empty when the block begins."""
        return self._declare(Slot(name, memory, scope, tuple(shape), name_of(dtype), tensor or name))

    def tensor(
        self,
        name: str,
        data: Any = None,
        *,
        tile: int,
        shape: tuple[int, ...] | None = None,
        dtype: str = "float32",
        head: tuple[int, int] = (0, 0),
        suffix: str = "",
        used: int | None = None,
    ) -> Tensor:
        """Declare a tensor in HBM, cut in tiles of ``tile`` rows (the last one may be shorter).

        Args:
            name: the tensor's name; tile n is the slot ``name + str(n) + suffix``.
            data: its content, given before the first launch; None for an output that starts empty.
            tile: rows of a tile.
            shape: needed where there is no data.
            dtype: of the slots; data is converted.
            head: (batch, head) it belongs to.
            suffix: makes the slots' names unique where one name has several heads.
            used: how many rows of the data count, all when not given. The tiles have room for all of them; what lies
                behind the used ones is not there to be read or moved.
        """
        if tile < 1:
            raise ValueError(f"tile={tile} for {name}: a tile has at least one row")
        array = None if data is None else as_dtype(data, dtype)
        full = tuple(array.shape) if array is not None else shape
        if not full:
            raise ValueError(f"{name}: give data or a shape with at least one axis, got {full}")
        self._several = [was or now > 0 for was, now in zip(self._several, head, strict=True)]
        if self._launch >= 0:
            raise RuntimeError(f"{name}: declare tensors before the first launch")
        tiles = []
        for n, row in enumerate(range(0, full[0], tile)):
            if f"{name}{n}{suffix}" in self._slots:
                raise ValueError(f"tensor {name!r}: slot {name + str(n) + suffix!r} is declared already")
            part = (min(tile, full[0] - row), *full[1:])
            made = self._declare(
                Slot(f"{name}{n}{suffix}", "hbm", "grid", part, name_of(dtype), name, (n,), head, f"{name}{n}")
            )
            held = None if array is None else array[row : max(row, min(row + tile, full[0] if used is None else used))]
            role, level = ("init", 0) if held is None else ("input", 1)
            self._held.put(made.name, held if held is not None and len(held) else None, level)
            tiles.append(made)
            if self._keep is not False:
                values, shape_ = (None, part) if held is None else (self._values(held, dtype), held.shape)
                self._events.append(Change(made.name, (), role, level, shape_, self._launch, Block(), values=values))
                self._steps.all[0].end = len(self._events)
        return Tensor(name, tuple(tiles))

    def _declare(self, slot: Slot) -> Slot:
        known = self._slots.get(slot.name)
        if known is not None and known != slot:
            raise ValueError(f"slot {slot.name!r} is declared already, as {known.memory} {shape_text(known.shape)}")
        self._slots[slot.name] = slot
        return slot

    # -- where we are ----------------------------------------------------------------------------------------------

    def launch(
        self, kernel: str, grid: Sequence[int] = (1, 1, 1), threads: Sequence[int] = (1, 1, 1)
    ) -> AbstractContextManager[int]:
        """Launch a kernel: the blocks from here on belong to it. A plain call, or the head of a ``with``."""
        if open_ := self._steps.outermost:
            raise RuntimeError(f"launch of {kernel} inside step {open_.label!r}: close the step first")
        self._launch += 1
        self._enter(Block(), False)
        if self._keep is not False:
            self._events.append(Launch(self._launch, kernel, _triple(grid), _triple(threads)))
            self._steps.all[-1].end = len(self._events)
        return nullcontext(self._launch)

    def block(
        self,
        tile: int = 0,
        head: int = 0,
        batch: int = 0,
        name: str | None = None,
        *,
        caption: str | None = None,
    ) -> AbstractContextManager[Block]:
        """A block begins, its shared memory and registers empty: steps are its own until another block begins.

        A plain call, or the head of a ``with``. ``name`` is what the step list calls it, ``"block 1"`` when not given,
        and ``caption`` what the picture says.
        """
        if self._launch < 0:
            raise RuntimeError("a block begins inside a launch: call r.launch(kernel, grid, threads) first")
        if open_ := self._steps.outermost:
            raise RuntimeError(f"a block begins inside step {open_.label!r}: close the step first")
        self._enter(Block(batch, head, tile), True)
        self._name = name or f"block {tile}"
        again = any(s.block is not None for s in self._steps.all)
        text = "visualize another block" if again else "visualize a single block"
        with self.step(f"visualize {self.block_name}", caption or text):
            self._emit(Begin(self._launch, self._block))
        return nullcontext(self._block)

    def _enter(self, block: Block, inside: bool) -> None:
        self._block, self._in_block, self._begun = block, inside, self._begun or inside
        self._held.begin_block()

    @property
    def in_block(self) -> bool:
        """Whether a block of the last launch has begun."""
        return self._in_block

    @property
    def block_name(self) -> str:
        """What the step list calls the current block: ``"block 1"``, with head and batch where there are several."""
        batch, head, _ = self._block
        more = f"batch {batch} · " if self._several[0] else ""
        more += f"head {head} · " if self._several[1] else ""
        return f"{more}{self._name}"

    @property
    def keeps_nothing(self) -> bool:
        """True with ``keep=False``: there will be no recording."""
        return self._keep is False

    @property
    def recording_now(self) -> bool:
        """Whether what happens now is kept: some blocks may not be."""
        if isinstance(self._keep, bool):
            return self._keep
        return not self._in_block or self._block in self._keep or self._block.tile in self._keep

    @contextmanager
    def step(
        self,
        label: str,
        caption: str | None = None,
        *,
        action: str = "",
        join: bool = False,
        tiles: Mapping[str, int] | None = None,
    ) -> Iterator[None]:
        """Everything inside is one frame. Steps nest: the inner ones are parts of the outer one.

        Args:
            label: what the step list says.
            caption: what the picture says; the label when not given.
            action: the action's name in program and kernel.
            join: go on with the last step if it has this label, block and tiles, and count their moves in one
                direction as one transfer.
            tiles: the loop variables, for example ``{"j": 2}``.
        """
        if not self.recording_now:
            yield
            return
        if len(self._steps.all) > MOST_ACTIONS and self._keep is True:
            raise ValueError(
                f"more than {MOST_ACTIONS:,} steps: name the blocks to keep (record=[0] keeps the first row block) "
                "or give record=False"
            )
        block = self._block if self._in_block else None
        variables = tuple((tiles or {}).items())
        text, n = label if caption is None else caption, len(self._events)
        with self._steps.open(OpenStep(label, text, action, n, self._launch, block, variables, join), self._events):
            yield

    def caption(self, text: str) -> None:
        """What the picture says at the open step, known only now: it replaces the caption the step was opened with."""
        if open_ := self._steps.outermost:
            open_.caption = text

    # -- what is done ----------------------------------------------------------------------------------------------

    def read(self, slot: SlotLike) -> np.ndarray:
        """What a slot holds, as a read-only array: NaN, and a finding, where nothing was written or a copy is under way.

        Where a block has roles, each waits for itself: that another one has waited does not count.
        """
        s = self._slot(slot)
        key = self._key(s)
        held, arriving, unseen = self._held.get(key), self._held.arriving(key), self._held.unseen(key, self._role)
        if arriving is not None or unseen:
            what = f"{s.name} was read by {self._role}, who had not waited for {unseen!r}"
            if arriving is not None:
                what = f"{s.name} was read while a copy into it was under way: nobody had waited for {arriving!r}"
            self._find("read-arriving", s, what)
            return np.full(s.shape if held is None else held.shape, np.nan, dtype="float32")
        if held is None:
            self._find("read-empty", s, f"{s.name} was read before anything was written to it")
            return np.full(s.shape, np.nan, dtype="float32")
        view: np.ndarray = held.view()
        view.flags.writeable = False
        return view

    def move(
        self,
        src: SlotLike | Sequence[SlotLike],
        dst: SlotLike | Sequence[SlotLike],
        values: Any = None,
        reads: Sequence[SlotLike] | Sequence[Sequence[SlotLike]] | None = None,
        *,
        group: str | None = None,
        stage: int = 0,
    ) -> None:
        """One transfer: the content of ``src`` arrives in ``dst``. Lists of equal length move together.

        Args:
            src: where the copy starts.
            dst: where it lands.
            values: what arrives, where that is not a plain copy (a list for lists); converted to the dtype of ``dst``.
            reads: the slots that ``values`` was computed from (a list of them for lists); ``src`` when not given.
            group: asynchronous: it lands at the next ``wait(group)``.
            stage: which of several buffers an asynchronous move fills.
        """
        sources, targets = _list(src), _list(dst)
        if len(sources) != len(targets):
            raise ValueError(f"move of {len(sources)} slots into {len(targets)}: the lists must be equally long")
        several = not isinstance(src, (Slot, str))
        if not sources:
            raise ValueError("move of no slots: name at least one")
        given = list(values) if several and values is not None else [values] * len(sources)
        listed: list[Any] = list(reads) if several and reads is not None else [reads] * len(sources)
        for what, those in (("values", given), ("reads", listed)):
            if len(those) != len(sources):
                raise ValueError(f"move of {len(sources)} slots with {what} for {len(those)}: one for each is needed")
        parts, arrays = [], []
        for a, b, value, read in zip(sources, targets, given, listed, strict=True):
            s, d = self._slot(a), self._slot(b)
            array = _fit(f"move of {s.name} into", d, self.read(s) if value is None else value)
            of = (s.name,) if read is None else tuple(self._slot(x).name for x in read)
            parts.append(Part(s.name, d.name, array.shape, d.dtype, of, self._values(array, d.dtype)))
            arrays.append(Arrival(self._key(d), array, self._held.level(self._key(s), 1), self._key(s)))
            self._overwrite(d)
        self._emit(
            Move(tuple(parts), self._launch, self._block, self._number(parts), group is not None, stage, group or "")
        )
        if group is not None:
            self._held.send(group, arrays)
            return
        for arrival in arrays:
            self._held.put(arrival.to, arrival.array, arrival.level)

    def _overwrite(self, slot: Slot) -> None:
        """Something comes into a slot: a copy out of it must be over."""
        for group in self._held.leaving(self._key(slot)):
            what = f"{slot.name} was overwritten while a copy out of it was under way: nobody had waited for {group!r}"
            self._find("overwritten-leaving", slot, what)

    def _number(self, parts: list[Part]) -> int:
        return self._steps.transfer((self._slots[parts[0].src].memory, self._slots[parts[0].dst].memory))

    def change(
        self,
        slot: SlotLike,
        values: Any,
        reads: Sequence[SlotLike] = (),
        *,
        role: str = "compute",
        cells: bool = False,
    ) -> None:
        """Replace what a slot holds by what was computed from ``reads``.

        Args:
            slot: where it is written.
            values: the new content, at most of the slot's shape; converted to its dtype.
            reads: the slots it was computed from.
            role: ``"compute"`` counts as an update, ``"rescale"`` overwrites in place and does not.
            cells: the elements are made one by one.
        """
        s = self._slot(slot)
        if role not in ("init", "compute", "rescale"):
            raise ValueError(f"change of {s.name}: role {role!r} is none of init, compute, rescale")
        array = _fit("change of", s, values)
        key = self._key(s)
        level = 0 if role == "init" else self._held.level(key) + (role == "compute")
        names = tuple(self._slot(x).name for x in reads)
        values_ = self._values(array, s.dtype)
        self._overwrite(s)
        self._emit(Change(s.name, names, role, level, array.shape, self._launch, self._block, cells, values_))
        self._held.put(key, array, level)

    def init(self, slot: SlotLike, values: Any, rows: int | None = None) -> None:
        """Set a slot, or its first ``rows`` rows, to a first value. It is drawn empty until it is updated."""
        s = self._slot(slot)
        shape, first = s.shape if rows is None else (rows, *s.shape[1:]), np.asarray(values)
        try:
            full = np.broadcast_to(first, shape)
        except ValueError:
            raise ValueError(f"init of {s.name}: {shape_text(first.shape)} does not fill {shape_text(shape)}") from None
        self.change(s, full, role="init")

    def stale(self, *slots: SlotLike) -> None:
        """Say that what these slots hold was computed from a tile that is being replaced. Level 0 stays as it is."""
        for slot in slots:
            s = self._slot(slot)
            key = self._key(s)
            held, level = self._held.get(key), self._held.level(key)
            if held is not None and level > 0:
                self._emit(Change(s.name, (), "stale", level, held.shape, self._launch, self._block))

    def barrier(self, kind: str = "block", protects: str = "") -> None:
        """Threads meet: ``kind`` is one of ``warp``, ``warpgroup``, ``block``, ``cluster``, ``grid``, ``launch``."""
        if kind not in BARRIERS or kind in ("arrive", "wait"):
            raise ValueError(f"barrier kind {kind!r} is none of {', '.join(BARRIERS[:-2])}")
        self._emit(Barrier(kind, self._launch, self._block, protects=protects))

    def arrive(self, group: str, protects: str = "") -> None:
        """A role says that it has come to ``group``, for those that wait for it, and goes on."""
        self._emit(Barrier("arrive", self._launch, self._block, group, protects))

    def wait(self, group: str) -> None:
        """The block, or the role that acts, waits until the asynchronous moves of ``group`` have landed, or those it names have arrived."""
        self._emit(Barrier("wait", self._launch, self._block, group=group))
        self._held.wait(group, self._role)

    def recording(self, code: Sequence[Source] = (), *, source: str = "program", device: str = "numpy") -> Recording:
        """What was performed so far."""
        if self._keep is False:
            raise ValueError("this recorder keeps nothing (keep=False)")
        if open_ := self._steps.outermost:
            raise RuntimeError(f"step {open_.label!r} is still open")
        if self._begun and not any(isinstance(e, Begin) for e in self._events):
            raise ValueError(f"blocks to keep: {self._keep}: none of them began; the last that did is {self._block}")
        steps = tuple(s.close() for s in self._steps.all)
        return Recording(
            self.algorithm,
            source,
            device,
            dict(self.params),
            tuple(self._slots.values()),
            tuple(self._events),
            steps,
            tuple(self._findings),
            tuple(code),
        )

    # -- inside ----------------------------------------------------------------------------------------------------

    def _slot(self, slot: SlotLike) -> Slot:
        name = slot if isinstance(slot, str) else slot.name
        known = self._slots.get(name)
        if known is None:
            raise KeyError(f"no slot {name!r} is declared; there are {', '.join(sorted(self._slots)) or 'none'}")
        if not isinstance(slot, str) and known != slot:
            raise ValueError(f"slot {name!r} belongs to another recorder")
        return known

    @property
    def _role(self) -> str:
        return self.trace.role if self.trace is not None else ""

    def _key(self, slot: Slot) -> Key:
        return slot.name if slot.shared_by_grid else (self._launch, self._block, slot.name)

    def _values(self, array: np.ndarray, dtype: str) -> Values | None:
        return Values.of(array, dtype) if self._keep is not False and array.size <= self._keep_values else None

    def _find(self, kind: str, slot: Slot, message: str) -> None:
        if not self.recording_now:
            return
        step = max(len(self._steps.all) - 1, 0)
        self._findings.append(Finding(kind, slot.name, self._launch, self._block, step, message))

    def _emit(self, event: Event) -> None:
        if not self.recording_now:
            return
        if not self._steps.stack and not isinstance(event, Barrier):
            raise RuntimeError("this happens in no step: write `with r.step(label):` around it")
        self._events.append(event if self.trace is None else replace(event, trace=self.trace))
        if not self._steps.stack:
            self._steps.all[-1].end = len(self._events)


def _list(slots: SlotLike | Sequence[SlotLike]) -> list[SlotLike]:
    return [slots] if isinstance(slots, (Slot, str)) else list(slots)


def _kept(keep: bool | Iterable[int | tuple[int, int, int]]) -> bool | set[int | Block]:
    if isinstance(keep, bool):
        return keep
    try:
        blocks = [Block(*map(index, k)) if isinstance(k, Iterable) else index(k) for k in keep]
    except TypeError:
        raise TypeError(
            f"blocks to keep: {keep!r}; give True, False, or a list of tile numbers or (batch, head, tile) triples"
        ) from None
    return set(blocks)


def _fit(what: str, slot: Slot, values: Any) -> np.ndarray:
    """``values`` in the slot's dtype, at most of its shape."""
    array = as_dtype(values, slot.dtype)
    if array.ndim != len(slot.shape) or any(x > y for x, y in zip(array.shape, slot.shape, strict=True)):
        raise ValueError(f"{what} {slot.name}: {shape_text(array.shape)} does not fit in {shape_text(slot.shape)}")
    return array


def _triple(sizes: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*sizes, 1, 1, 1)[:3]
    return int(x), int(y), int(z)
