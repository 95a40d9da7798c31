"""What crosses HBM, counted from a recording.

Requirements: counts only what the recording says moved, so they are the same on every machine; works for any set of
memories, since a way is (memory of the source → memory of the destination); HBM is whatever the whole grid shares.

*Transfers* are calls: loading Kj and Vj together is one. *Trips* are passes over a tensor: the tiles that moved over
the tiles it has, so FlashAttention-2 reads K and V once for each row block. Bytes count real elements, at the size
they have in HBM. An asynchronous move counts where it is issued.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flashviz.events import Move
from flashviz.recording import Recording, as_recording
from flashviz.slots import Block, Slot


class Running(NamedTuple):
    """What has crossed HBM up to the end of a step."""

    fetches: int = 0
    stores: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


@dataclass
class Count:
    """What moved one way, or through one slot, block or tensor: tiles and bytes out of HBM and into it.

    Args:
        tiles: how many tiles there are, for a tensor; 0 otherwise.
        read, written: tiles that moved out of HBM and into it.
        bytes_read, bytes_written: their bytes.
    """

    tiles: int = 0
    read: int = 0
    written: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    @property
    def trips(self) -> float:
        """Passes over the tensor, in the direction that has more of them: FlashAttention-1's O returns each time."""
        return max(self.read, self.written) / self.tiles if self.tiles else math.nan

    def _add(self, read: bool, nbytes: int) -> None:
        if read:
            self.read += 1
            self.bytes_read += nbytes
        else:
            self.written += 1
            self.bytes_written += nbytes


@dataclass
class Way:
    """Everything that moved from one memory to another."""

    transfers: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class Traffic:
    """What moved in a recording, up to a step. Prints as a table.

    Args:
        algorithm: the recording's.
        steps: how many steps were counted.
        transfers: distinct transfers, whatever the memories.
        fetches: transfers out of HBM.
        stores: transfers into HBM.
        bytes_read: bytes out of HBM.
        bytes_written: bytes into HBM.
        tensors: by tensor in HBM.
        slots: by slot, on both sides of HBM.
        blocks: by (launch, block).
        ways: by (memory of the source, memory of the destination), registers and all.
    """

    algorithm: str
    steps: int
    transfers: int = 0
    fetches: int = 0
    stores: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    tensors: dict[str, Count] = field(default_factory=dict)
    slots: dict[str, Count] = field(default_factory=dict)
    blocks: dict[tuple[int, Block], Count] = field(default_factory=dict)
    ways: dict[tuple[str, str], Way] = field(default_factory=dict)

    @property
    def trips(self) -> dict[str, float]:
        """Passes over each tensor in HBM: tiles moved / tiles it has, in the direction that has more of them."""
        return {name: count.trips for name, count in self.tensors.items()}

    def rows(self) -> list[tuple[str, ...]]:
        """The table: a heading, a row for each tensor in HBM, and the sum."""
        head = ("tensor", "tiles", "read", "written", "bytes read", "bytes written", "trips")
        body = []
        for name, c in self.tensors.items():
            numbers = (c.tiles, c.read, c.written, c.bytes_read, c.bytes_written)
            body.append((name, *(f"{n:,}" for n in numbers), f"{c.trips:.4g}"))
        read, written = (sum(getattr(c, way) for c in self.tensors.values()) for way in ("read", "written"))
        total = ("all", "", f"{read:,}", f"{written:,}", f"{self.bytes_read:,}", f"{self.bytes_written:,}", "")
        return [head, *body, total]

    def _summary(self) -> str:
        fetches, stores = _count(self.fetches, "fetch", "fetches"), _count(self.stores, "store", "stores")
        return f"{self.algorithm}, {_count(self.steps, 'step', 'steps')}: {fetches} from HBM, {stores} to HBM"

    def __str__(self) -> str:
        rows = self.rows()
        widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
        lines = [
            "  ".join(c.rjust(w) if n else c.ljust(w) for n, (c, w) in enumerate(zip(row, widths, strict=True)))
            for row in rows
        ]
        return "\n".join([self._summary(), *(line.rstrip() for line in lines)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *body = ([html.escape(cell) for cell in row] for row in self.rows())
        top = "<tr>" + "".join(f'<th scope="col">{cell}</th>' for cell in head) + "</tr>"
        rest = "".join(
            f'<tr><th scope="row">{row[0]}</th>' + "".join(f"<td>{cell}</td>" for cell in row[1:]) + "</tr>"
            for row in body
        )
        return f"<table><caption>{html.escape(self._summary())}</caption>{top}{rest}</table>"


def traffic(run: Any, upto_step: int | None = None) -> Traffic:
    """What moved in a run, or a recording: transfers, bytes and trips across HBM.

    Args:
        run: a run or a recording.
        upto_step: count up to the end of this step (negative ones count from the end); all steps when not given.

    >>> import numpy as np, flashviz as fv
    >>> x = np.eye(8, dtype="float32")
    >>> fv.traffic(fv.flash_attention_2(x, x, x, Br=4, Bc=4, device="numpy"))
    flash_attention_2, 19 steps: 6 fetches from HBM, 2 stores to HBM
    tensor  tiles  read  written  bytes read  bytes written  trips
    Q           2     2        0         256              0      1
    K           2     4        0         512              0      2
    V           2     4        0         512              0      2
    O           2     0        2           0            256      1
    L           2     0        2           0             32      1
    all              10        4       1,280            288
    """
    recording = as_recording(run)
    step = None if upto_step is None else recording.check_step(upto_step)
    end = len(recording.events) if step is None else step.end
    steps = len(recording.steps) if upto_step is None else upto_step % len(recording.steps) + 1
    tensors: dict[str, Count] = {}
    for slot in recording.slots:
        if slot.shared_by_grid:
            tensors.setdefault(_tensor(slot), Count()).tiles += 1
    slots: dict[str, Count] = {}
    blocks: dict[tuple[int, Block], Count] = {}
    ways: dict[tuple[str, str], Way] = {}
    numbers: dict[tuple[str, str], set[int]] = {}
    fetches, stores, every = set[int](), set[int](), set[int]()
    for event, src, dst, nbytes in _parts(recording, 0, end):
        every.add(event.transfer)
        way = (src.memory, dst.memory)
        ways.setdefault(way, Way()).nbytes += nbytes
        numbers.setdefault(way, set()).add(event.transfer)
        if src.shared_by_grid == dst.shared_by_grid:
            continue
        read = src.shared_by_grid
        (fetches if read else stores).add(event.transfer)
        tensors[_tensor(src if read else dst)]._add(read, nbytes)
        for at in (src, dst):
            slots.setdefault(at.name, Count())._add(read, nbytes)
        blocks.setdefault((event.launch, event.block), Count())._add(read, nbytes)
    for way, found in numbers.items():
        ways[way].transfers = len(found)
    totals = (sum(c.bytes_read for c in tensors.values()), sum(c.bytes_written for c in tensors.values()))
    counts = (len(every), len(fetches), len(stores), *totals)
    return Traffic(recording.algorithm, steps, *counts, tensors, slots, blocks, ways)


def running(run: Any) -> tuple[Running, ...]:
    """What has crossed HBM by the end of each step of a run or a recording; counted once for a recording."""
    recording = as_recording(run)
    known: tuple[Running, ...] | None = vars(recording).get("_running_traffic")
    if known is not None:
        return known
    totals, at, now, seen = [], 0, Running(), set[tuple[int, bool]]()
    for step in recording.steps:
        fetches, stores, bytes_read, bytes_written = now
        for event, src, dst, nbytes in _parts(recording, at, step.end):
            read = src.shared_by_grid
            if read == dst.shared_by_grid:
                continue
            new = (event.transfer, read) not in seen
            seen.add((event.transfer, read))
            fetches += new and read
            stores += new and not read
            bytes_read += nbytes if read else 0
            bytes_written += 0 if read else nbytes
        now, at = Running(fetches, stores, bytes_read, bytes_written), max(at, step.end)
        totals.append(now)
    found = vars(recording)["_running_traffic"] = tuple(totals)
    return found


def _parts(recording: Recording, first: int, end: int) -> Iterator[tuple[Move, Slot, Slot, int]]:
    """Every tile that moved in ``events[first:end]``, with its bytes: in HBM's dtype where HBM is one side."""
    for event in recording.events[first:end]:
        if isinstance(event, Move):
            for part in event.parts:
                src, dst = recording.slot(part.src), recording.slot(part.dst)
                nbytes = math.prod(part.shape) * src.itemsize if src.shared_by_grid else part.nbytes
                yield event, src, dst, nbytes


def _tensor(slot: Slot) -> str:
    return slot.tensor or slot.name


def _count(n: int, one: str, more: str) -> str:
    return f"{n:,} {one if n == 1 else more}"
