"""A ring of slots between a producer and consumers, as a tile program with roles: the sum of each column of an array.

The program of ``hopper_ring`` in ``kernels/hopper_steps.cu``: the sums are only there so that somebody reads the tiles. The producer asks
for tile after tile, each into the next slot; consumers add up columns of their own. Two barriers a slot say when: *full*, its bytes are
there, and *empty*, every consumer has read them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashviz.events import Trace
from flashviz.programs.attention import positive
from flashviz.programs.base import Program, action
from flashviz.programs.device import kernel_source
from flashviz.programs.roles import Act, side_by_side
from flashviz.recorder import Recorder
from flashviz.recording import Recording

FILE = "hopper_steps"


def producer(r: Ring) -> Iterator[Act]:
    """Tile after tile; before each it waits for room."""
    for n in range(r.T):
        yield r.load, (n,)


def consumer(r: Ring, w: int) -> Iterator[Act]:
    """Tile after tile, as they arrive; then its sums are written."""
    for n in range(r.T):
        yield r.add, (w, n)
    yield r.store, (w,)


def perform(r: Ring) -> None:
    """The block's roles, side by side."""
    r.begin()
    side_by_side(r, {"producer": producer(r)} | {f"consumer {w}": consumer(r, w) for w in r.consumers})


@dataclass(frozen=True, eq=False)
class RingRun:
    """What a run gave: ``total``, the sum of each column, float32 [d], and the recording."""

    total: np.ndarray
    recording: Recording

    def __repr__(self) -> str:
        return f"RingRun(total {self.total.shape}, {len(self.recording.steps)} steps)"


class Ring(Program):
    """The actions of the ring on real tiles.

    Args:
        x: [N, d], real numbers, rounded to float16.
        rows: of a tile.
        stages: slots of the ring, at least 1.
        consumers: who share out the columns evenly.

    Attributes:
        T: tiles.
    """

    loop = ("consumer", "w", "tile", "n")

    def __init__(self, x: Any, *, rows: int = 4, stages: int = 2, consumers: int = 4) -> None:
        array = np.asarray(x, "float16")
        if array.ndim != 2 or not array.size:
            raise ValueError(f"x has the shape {array.shape}; it must be [N, d] with at least one element")
        self.rows, self.stages = positive("rows", rows), positive("stages", stages)
        N, d = array.shape
        if d % positive("consumers", consumers):
            raise ValueError(f"consumers={consumers}: they share out the {d} columns evenly")
        self.T = -(-N // self.rows)
        self.consumers = range(1, consumers + 1)
        each = d // consumers
        self.columns = {w: slice((w - 1) * each, w * each) for w in self.consumers}
        self.total = np.full(d, np.nan, "float32")
        self.arrived: Counter[str] = Counter()
        self.r = r = Recorder("hopper_ring", {"N": N, "d": d, "rows": self.rows, "stages": self.stages})
        self.X = [r.slot(f"X[{s}]", (self.rows, d), "float16", tensor="x") for s in range(self.stages)]
        own: dict[str, Any] = {"memory": "register", "scope": "warp", "tensor": "total"}
        self.sums = {w: r.slot(f"sum {w}", (each,), **own) for w in self.consumers}
        self.x = r.tensor("x", array, tile=self.rows)
        self.out = r.tensor("total", shape=(d,), tile=each)
        r.launch("hopper_ring", (1,), (32 * (consumers + 1),))

    def begin(self) -> None:
        """The one block begins: all slots are empty."""
        self.r.trace = None
        self.r.block()

    def waits(self, action: str, *tiles: int) -> list[str]:
        """What an action waits for before it begins."""
        phase, slot = divmod(tiles[-1], self.stages)
        if action == "load":
            return [f"X[{slot}] empty, phase {phase - 1}"] if phase else []
        return [f"X[{slot}] full, phase {phase}"] if action == "add" else []

    def missing(self, action: str, *tiles: int) -> list[str]:
        """What of that has not come yet: an empty slot needs every consumer's word."""
        names = self.waits(action, *tiles)
        return [n for n in names if self.arrived[n] < (len(self.consumers) if "empty" in n else 1)]

    def starts(self, role: str, action: str, *tiles: int) -> None:
        """An action of a role begins: what it waits for has come."""
        self.r.trace = Trace(role)
        for name in self.waits(action, *tiles):
            self.r.wait(name)

    @action("ask for the tile")
    def load(self, n: int) -> None:
        """The copy of tile n begins, into the next slot, once every consumer is done with what is there."""
        self.starts("producer", "load", n)
        phase, slot = divmod(n, self.stages)
        full = f"X[{slot}] full, phase {phase}"
        self.r.move(self.x[n], self.X[slot], group=full, stage=slot)
        self.arrived[full] += 1

    @action("add up its columns")
    def add(self, w: int, n: int) -> None:
        """A consumer adds its columns of the tile to its sums, and says that it is done with the slot."""
        self.starts(f"consumer {w}", "add", w, n)
        phase, slot = divmod(n, self.stages)
        mine, sums = self.columns[w], self.sums[w]
        if n == 0:
            self.r.init(sums, 0.0)
        tile = self.r.read(self.X[slot])[:, mine].astype("float32")
        self.r.change(sums, self.r.read(sums) + tile.sum(0), reads=(sums, self.X[slot]))
        empty = f"X[{slot}] empty, phase {phase}"
        self.r.arrive(empty, f"consumer {w} reads {self.X[slot].name} no more")
        self.arrived[empty] += 1

    @action("write its sums")
    def store(self, w: int) -> None:
        """A consumer's sums go to HBM."""
        self.starts(f"consumer {w}", "store", w)
        self.total[self.columns[w]] = self.r.read(self.sums[w])
        self.r.move(self.sums[w], self.out[w - 1])

    def run(self) -> RingRun:
        """The sums and the recording."""
        return RingRun(self.total, self.r.recording((self.source(), kernel_source(FILE))))


def ring(x: Any, *, rows: int = 4, stages: int = 2, consumers: int = 4) -> RingRun:
    """The sum of each column of x, by a producer and consumers at a ring of tiles: what ``hopper_ring`` does on Hopper GPUs.

    Args:
        x: [N, d], real numbers, rounded to float16.
        rows: of a tile; the last one may have fewer.
        stages: slots of the ring.
        consumers: each adds up d / consumers columns, a whole number.

    Returns:
        A :class:`RingRun` with the sums, float32 [d], and the recording, in which every event says its role.

    Raises:
        ValueError: naming the argument, its value and what it must be.

    >>> ring(np.ones((12, 4)), rows=4, consumers=2).total
    array([12., 12., 12., 12.], dtype=float32)
    """
    made = Ring(x, rows=rows, stages=stages, consumers=consumers)
    perform(made)
    return made.run()
