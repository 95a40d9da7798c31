"""Rotary position embedding (Su and others, arXiv 2104.09864, section 3.4.2), as a tile program.

Every row of x is cut in pairs of elements, and each pair is turned by an angle: position times the pair's frequency. The
two forms in use differ in who is paired with whom, and in nothing else: halves pair element p with element p + pairs,
interleaved pairs element 2p with element 2p + 1. A CUDA block owns a tile of rows of one head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashviz import tiles
from flashviz.programs.angles import Rotation
from flashviz.programs.base import Program, action
from flashviz.programs.device import choose_device, kernel_source
from flashviz.programs.replay import run_kernel
from flashviz.recorder import Recorder, Tensor
from flashviz.recording import Param, Recording
from flashviz.slots import Slot

FILE = "rope"
KERNELS = {"halves": "rope_rows", "pairs": "rope_pairs_rows"}
THREADS = 128  # of a recorded launch; the kernels take any number


def forward(ro: Rope) -> None:
    """The loops: all of them are the grid, its blocks independent of each other."""
    for batch, head in ro.heads:
        for i in range(ro.T):
            ro.begin(i, head, batch)
            ro.load_x()
            ro.load_angles()
            ro.rotate()
            ro.store_o()


@dataclass(frozen=True, eq=False)
class RopeRun:
    """What a run gave.

    Args:
        O: the rotated x, float32, shaped like x.
        recording: what was done, None with ``record=False``.
        device: where O was really computed: ``"numpy"``, ``"cpu"`` or ``"gpu"``.
        params: sizes and options.
    """

    O: np.ndarray
    recording: Recording | None
    device: str
    params: dict[str, Param] = field(default_factory=dict)
    algorithm = "rope"

    def __repr__(self) -> str:
        steps = "not recorded" if self.recording is None else f"{len(self.recording.steps)} steps"
        return f"RopeRun(O {self.O.shape}, device={self.device!r}, {steps})"


class Rope(Program):
    """The actions of both forms on real tiles. Each element of a tile's rows is a slot, so that a recording says who meets whom.

    Args:
        x: [N, d], [H, N, d] or [B, H, N, d], real numbers, computed in float32.
        positions: [N], the same for all heads; 0, 1, 2 … when not given.
        form: ``"halves"`` or ``"pairs"``.
        base: of the frequencies.
        rotary_dim: how many elements of a row are rotated, the first ones; all when not given.
        offset: added to the positions.
        tile: rows of a tile.
        record: True, False, or the blocks to keep.
        keep_values: tiles up to this many elements keep their numbers.

    Attributes:
        T: tiles of a head. partners: the two elements of each pair.
    """

    loop = ()

    def __init__(
        self,
        x: Any,
        positions: Any = None,
        *,
        form: str = "halves",
        base: float = 10000.0,
        rotary_dim: int | None = None,
        offset: float = 0,
        tile: int = 4,
        record: Any = True,
        keep_values: int = 256,
    ) -> None:
        self.rotation = g = Rotation.of(x, positions, form, base, rotary_dim, offset, tile)
        self.x, self.T, self.heads, self.pairs, self.partners = g.x, g.T, g.heads, g.pairs, g.partners
        self.output = np.full(g.x.shape, np.nan, dtype="float32")
        self.r = Recorder("rope", g.params, keep=record, keep_values=keep_values)
        self._declare(self.r)

    def _declare(self, r: Recorder) -> None:
        """Slots: an element of all rows of a tile each. In HBM tile t of x is ``x0[t]``, ``x1[t]`` … one slot an element."""
        g, at = self.rotation, (self.rotation.tile,)
        self.xi = [r.slot(f"xi{e}", at, tensor="x") for e in range(g.x.shape[3])]
        self.ci = [r.slot(f"ci{p}", at, tensor="cos") for p in range(self.pairs)]
        self.si = [r.slot(f"si{p}", at, tensor="sin") for p in range(self.pairs)]
        mine = {"memory": "register", "scope": "thread", "tensor": "x"}
        self.a = [r.slot(f"a{p}", at, **mine) for p in range(self.pairs)]
        self.b = [r.slot(f"b{p}", at, **mine) for p in range(self.pairs)]
        self.hbm: dict[tuple[str, tuple[int, int], int], Tensor] = {}
        self.tile_of: dict[str, int] = {}

        def tensor(name: str, head: tuple[int, int], t: int, data: np.ndarray | None, elements: int) -> None:
            first = t * g.tile
            several = f"{head[0]},{head[1]}," if len(self.heads) > 1 and name in "xO" else ""
            flat = None if data is None else data[first : first + g.tile].T.ravel()
            rows = min(g.tile, g.x.shape[2] - first)
            made = r.tensor(name, flat, tile=rows, shape=(elements * rows,), head=head, suffix=f"[{several}{t}]")
            self.hbm[name, head, t] = made
            self.tile_of |= {slot.name: t for slot in made}

        every = [(head, t) for head in self.heads for t in range(self.T)]
        for head, t in every:
            tensor("x", head, t, g.x[head], g.x.shape[3])
        for t in range(self.T):
            tensor("cos", (0, 0), t, g.cos, g.pairs)
            tensor("sin", (0, 0), t, g.sin, g.pairs)
        for head, t in every:
            tensor("O", head, t, None, g.x.shape[3])
        r.launch(KERNELS[g.form], (g.T, g.x.shape[1], g.x.shape[0]), (THREADS, 1, 1))

    def begin(self, i: int, head: int = 0, batch: int = 0) -> None:
        """A CUDA block of its own begins: it owns tile i of one head."""
        if (batch, head) not in self.heads or not 0 <= i < self.T:
            raise IndexError(f"block i={i}, head={head}, batch={batch}: i runs to {self.T - 1}, heads are {self.heads}")
        self.i, self.head = i, (batch, head)
        self.rows = min(self.rotation.tile, self.x.shape[2] - i * self.rotation.tile)
        self.r.block(i, head, batch)

    def rows_of(self, slots: list[Slot]) -> np.ndarray:
        """What slots hold for the rows of this block, side by side: [rows, slots]."""
        return np.stack([self.r.read(slot)[: self.rows] for slot in slots], axis=1)

    @action("load xi, cos, sin", part="load xi")
    def load_x(self) -> None:
        """The rows arrive."""
        self.r.move(list(self.hbm["x", self.head, self.i]), self.xi)

    @action("load xi, cos, sin", part="load cos, sin")
    def load_angles(self) -> None:
        """The rows' angles arrive in the same transfer: those of the positions, whatever the head."""
        r, i = self.r, self.i
        r.move([*self.hbm["cos", (0, 0), i], *self.hbm["sin", (0, 0), i]], [*self.ci, *self.si])
        r.barrier("block", "xi, ci and si are complete: a pair is rotated by another thread than those that loaded it")

    @action("rotate xi")
    def rotate(self) -> None:
        """Both elements of a pair are copied out before either is written: a cos - b sin and b cos + a sin."""
        r = self.r
        r.move([self.xi[e] for pair in self.partners for e in pair], self.in_registers)
        a, b, cos, sin = (self.rows_of(slots) for slots in (self.a, self.b, self.ci, self.si))
        if self.rotation.form == "halves":
            turned = tiles.rope(np.concatenate([a, b], axis=1), cos, sin)
            a, b = turned[:, : self.pairs], turned[:, self.pairs :]
            self.say(f"rotate: element p meets element p + {self.pairs}")
        else:
            a, b = tiles.rope_pairs(a, b, cos, sin)
            self.say("rotate: element 2p meets element 2p + 1")
        for p, pair in enumerate(self.partners):
            reads = (self.a[p], self.b[p], self.ci[p], self.si[p])
            for element, value in zip(pair, (a, b), strict=True):
                r.change(self.xi[element], value[:, p], reads=reads)
        r.barrier("block", "every pair is rotated before a thread writes elements that another one rotated")

    @property
    def in_registers(self) -> list[Slot]:
        """a and b of each pair, pair after pair."""
        return [slot for pair in zip(self.a, self.b, strict=True) for slot in pair]

    @action("write xi")
    def store_o(self) -> None:
        """The rotated rows go to HBM."""
        self.r.move(self.xi, list(self.hbm["O", self.head, self.i]))
        first = self.i * self.rotation.tile
        self.output[self.head][first : first + self.rows] = self.rows_of(self.xi)

    def elements(self, slot: Slot, array: np.ndarray, first: int) -> np.ndarray:
        """The part of a kernel's array that a slot names: one element of all rows of a tile."""
        first = self.tile_of[slot.name] * self.rotation.tile
        rows = array[slot.head] if slot.tensor in ("x", "O") else array
        part: np.ndarray = rows[first : first + self.rotation.tile, slot.index[0]]
        return part

    def bound(self) -> float:
        """Four roundings of 2^-24 of the longest pair that x can hold."""
        return 4 * 2**-24 * math.sqrt(2) * float(np.abs(self.x[np.isfinite(self.x)]).max(initial=0))

    def run(self) -> RopeRun:
        """O of the blocks that have run (NaN where none has), and the recording."""
        recording = None
        if not self.r.keeps_nothing:
            recording = self.r.recording((self.source(), kernel_source(FILE, KERNELS[self.rotation.form])))
        return RopeRun(self.output.reshape(self.rotation.given), recording, "numpy", self.rotation.params)


def launch_kernel(g: Rotation, device: str = "gpu") -> np.ndarray:
    """O from ``kernels/rope.cu``, launched on an output filled with NaN.

    Raises:
        LaunchError: the tile does not fit this GPU; says which would. KernelError: it failed while it ran.
    """
    from flashviz import cuda

    O = np.empty_like(g.x)
    template = {"R": g.tile, "D": g.x.shape[3], "Pairs": g.pairs}
    kernel = cuda.Kernel(FILE, template=template, block=THREADS, function=KERNELS[g.form])
    cuda.launch(kernel, (g.x, g.cos, g.sin, O, *g.x.shape[2:0:-1]), device=device, poison=True)
    return O


def run(form: str, x: Any, positions: Any, device: str, record: Any, keep_values: int, **options: Any) -> RopeRun:
    """What :func:`rope` and :func:`rope_pairs` do."""
    where = choose_device(device)
    if where != "numpy" and record is False:
        g = Rotation.of(x, positions, form, **options)
        return RopeRun(launch_kernel(g, where).reshape(g.given), None, where, g.params)
    ro = Rope(x, positions, form=form, **options, record=record, keep_values=keep_values)
    if where == "numpy":
        forward(ro)
        return ro.run()
    O, recording = run_kernel(ro, forward, lambda: launch_kernel(ro.rotation, where), where)
    return RopeRun(O.reshape(ro.rotation.given), recording, where, ro.rotation.params)


def rope(
    x: Any,
    positions: Any = None,
    *,
    base: float = 10000.0,
    rotary_dim: int | None = None,
    offset: float = 0,
    tile: int = 4,
    device: str = "auto",
    record: Any = True,
    keep_values: int = 256,
) -> RopeRun:
    """Rotary position embedding in the rotate-half form of GPT-NeoX and Hugging Face's LLaMA (arXiv 2104.09864).

    The first ``rotary_dim`` elements of a row are two halves a and b; pair p is turned by position · base^(-2p / rotary_dim):
    a becomes a cos - b sin, b becomes b cos + a sin. Rows are rotated by their position alone, in every head alike.

    Args:
        x: queries or keys [N, d], [H, N, d] or [B, H, N, d]; any real dtype, rotated in float32 by angles of float64.
        positions: [N] real numbers, the same for all heads and batches; 0, 1, 2 … when not given.
        base: of the frequencies.
        rotary_dim: how many elements of a row are rotated, even; the others pass. All when not given.
        offset: added to the positions: in decoding, how many tokens came before.
        tile: rows of a tile; any N, the last tile may be shorter.
        device: ``"numpy"``, ``"cpu"``, ``"gpu"``, or ``"auto"``: a GPU where one is usable, else NumPy.
        record: True, False, or the blocks to keep (tile numbers or (batch, head, tile) triples).
        keep_values: tiles up to this many elements keep their numbers in the recording.

    Returns:
        A :class:`RopeRun` with O (the rotated x, float32), the recording and the device.

    Raises:
        ValueError, TypeError: naming the argument, its value and what it must be.
        DeviceError: the device asked for is not usable here; says why and what to install.

    >>> rope([[1.0, 0, 0, 0]], [1], device="numpy").O.round(4).tolist()
    [[0.5403000116348267, 0.0, 0.8414999842643738, 0.0]]
    """
    options: dict[str, Any] = {"base": base, "rotary_dim": rotary_dim, "offset": offset, "tile": tile}
    return run("halves", x, positions, device, record, keep_values, **options)


def rope_pairs(
    x: Any,
    positions: Any = None,
    *,
    base: float = 10000.0,
    rotary_dim: int | None = None,
    offset: float = 0,
    tile: int = 4,
    device: str = "auto",
    record: Any = True,
    keep_values: int = 256,
) -> RopeRun:
    """Rotary position embedding in the interleaved form of GPT-J and, by default, llama.cpp (arXiv 2104.09864).

    Elements 2p and 2p + 1 of a row are pair p. Everything else is as in :func:`rope`: arguments, result and errors.

    >>> rope_pairs([[1.0, 0, 0, 0]], [1], device="numpy").O.round(4).tolist()
    [[0.5403000116348267, 0.8414999842643738, 0.0, 0.0]]
    """
    options: dict[str, Any] = {"base": base, "rotary_dim": rotary_dim, "offset": offset, "tile": tile}
    return run("pairs", x, positions, device, record, keep_values, **options)
