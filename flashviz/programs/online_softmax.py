"""The softmax of a row that is met in tiles (Milakov and Gimelshein, arXiv 1805.02867), as a tile program.

One set of actions and three loops over them. The safe softmax (Algorithm 2) goes over x three times: for the maximum
m, for the denominator d, for the division. The online softmax (Algorithm 3) goes twice: one action more, ``rescale``,
lets d run along with m. The fused form takes V along, keeps o = softmax(x) V normalised, and goes once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashviz.programs.attention import as_tile_array, positive
from flashviz.programs.base import Program, action
from flashviz.programs.device import choose_device, kernel_source
from flashviz.programs.replay import run_kernel
from flashviz.recorder import Recorder, Tensor
from flashviz.recording import Param, Recording
from flashviz.slots import Slot

FILE = "online_softmax"
FORMS = ("safe", "online", "fused")
THREADS = 128  # of a recorded launch; the kernels take any number


def safe(s: OnlineSoftmax) -> None:
    """Three passes over x. Rows are the grid: each is a block of its own."""
    for r in range(s.R):
        s.begin(r)
        s.start()
        for i in range(s.T):
            s.load_x(i)
            s.running_max(i)
        for i in range(s.T):
            s.load_x(i)
            s.running_sum(i)
        for i in range(s.T):
            s.load_x(i)
            s.divide(i)
            s.store_y(i)


def online(s: OnlineSoftmax) -> None:
    """Two passes: the sum runs along with the maximum, and is rescaled whenever that grows."""
    for r in range(s.R):
        s.begin(r)
        s.start()
        for i in range(s.T):
            s.load_x(i)
            s.running_max(i)
            s.rescale(i)
            s.running_sum(i)
        for i in range(s.T):
            s.load_x(i)
            s.divide(i)
            s.store_y(i)


def fused(s: OnlineSoftmax) -> None:
    """One pass: V comes along, and y is never held."""
    for r in range(s.R):
        s.begin(r)
        s.start()
        for i in range(s.T):
            s.load_x(i)
            s.load_v(i)
            s.running_max(i)
            s.rescale(i)
            s.running_sum(i)
            s.accumulate(i)
        s.store_o()


LOOPS = {"safe": safe, "online": online, "fused": fused}


@dataclass(frozen=True, eq=False)
class SoftmaxRun:
    """What a run gave.

    Args:
        y: softmax of x, float32, shaped like x; None in the fused form, which never holds it.
        o: softmax(x) V, float32, [D] or [R, D]; None in the other forms.
        recording: what was done, None with ``record=False``. m and d of each step are in it:
            ``recording.values(step, "m")``.
        device: where y or o was really computed: ``"numpy"``, ``"cpu"`` or ``"gpu"``.
        params: sizes and options.
    """

    y: np.ndarray | None
    o: np.ndarray | None
    recording: Recording | None
    device: str
    params: dict[str, Param] = field(default_factory=dict)

    @property
    def algorithm(self) -> str:
        """``"safe_softmax"``, ``"online_softmax"`` or ``"fused_softmax"``."""
        return f"{self.params['form']}_softmax"

    def __repr__(self) -> str:
        steps = "not recorded" if self.recording is None else f"{len(self.recording.steps)} steps"
        made = f"y {self.y.shape}" if self.y is not None else "" if self.o is None else f"o {self.o.shape}"
        return f"SoftmaxRun({made}, device={self.device!r}, {steps})"


class OnlineSoftmax(Program):
    """The actions of the softmax on real tiles, for all three forms.

    Args:
        x: a row [N] or rows [R, N] of scores, real numbers or -inf, computed in float32.
        V: [N, D], for the fused form.
        tile: elements of a tile of x, and rows of a tile of V.
        form: ``"safe"``, ``"online"`` or ``"fused"``; ``"fused"`` with V and ``"online"`` without when not given.
        record: True, False, or the rows to keep.
        keep_values: tiles up to this many elements keep their numbers.

    Attributes:
        R, T: rows, and tiles of a row.
    """

    loop = ("pass", "p", "tile", "i")

    def __init__(
        self,
        x: Any,
        V: Any = None,
        *,
        tile: int = 4,
        form: str | None = None,
        record: Any = True,
        keep_values: int = 256,
    ) -> None:
        self.x, self.V, self.tile, self.form, self.given = _checked(x, V, tile, form)
        self.R, self.N = self.x.shape
        self.T = -(-self.N // self.tile)
        self.row = 0
        self.output = np.full(self.x.shape if self.V is None else (self.R, self.V.shape[1]), np.nan, "float32")
        algorithm = f"{self.form}_softmax"
        self.r = r = Recorder(algorithm, self.params, keep=record, keep_values=keep_values)
        self.xi, self.pi = r.slot("xi", (self.tile,), tensor="x"), r.slot("pi", (self.tile,), tensor="p")
        self.m, self.d = r.slot("m", (1,)), r.slot("d", (1,))
        suffixes = [f"[{row}]" if self.R > 1 else "" for row in range(self.R)]
        self.xs = [r.tensor("x", row, tile=self.tile, suffix=s) for row, s in zip(self.x, suffixes, strict=True)]
        self.ys: list[Tensor] = []
        self.os: list[Tensor] = []
        if self.form != "safe":
            self.c = r.slot("c", (1,))
        if self.V is None:
            self.ys = [r.tensor("y", shape=(self.N,), tile=self.tile, suffix=s) for s in suffixes]
        else:
            D = self.V.shape[1]
            self.w, self.o = r.slot("w", (1,), tensor="c"), r.slot("o", (D,))
            self.Vi = r.slot("Vi", (self.tile, D), tensor="V")
            self.Vs = r.tensor("V", self.V, tile=self.tile)
            self.os = [r.tensor("o", shape=(D,), tile=D, suffix=s) for s in suffixes]
        r.launch(algorithm, (self.R, 1, 1), (THREADS, 1, 1))

    @property
    def params(self) -> dict[str, Param]:
        """The sizes and the form as a recording carries them."""
        D = 0 if self.V is None else self.V.shape[1]
        return {"R": self.R, "N": self.N, "D": D, "tile": self.tile, "T": self.T, "form": self.form}

    def begin(self, row: int = 0) -> None:
        """A CUDA block of its own begins: it owns one row."""
        if not 0 <= row < self.R:
            raise IndexError(f"row {row}: rows run from 0 to {self.R - 1}")
        self.row, self.passes, self.last = row, 1, -1
        self.in_m = self.in_d = 0  # tiles that m and d include
        self.r.block(row, name=f"row {row}", caption=f"a block for row {row}, with nothing in SRAM")

    def counted(self, action: str, given: dict[str, int]) -> dict[str, int]:
        """A pass ends where x is loaded from an earlier tile again."""
        if action == "load_x":
            self.passes += given["i"] <= self.last
            self.last = given["i"]
        return {"p": self.passes, **given} if given else given

    @property
    def place(self) -> dict[str, int]:
        """The row, where there are several."""
        return {"r": self.row} if self.R > 1 else {}

    @action("set m = -inf, d = 0")
    def start(self) -> None:
        """The carries before the first tile."""
        r = self.r
        r.init(self.m, -np.inf)
        r.init(self.d, 0.0)
        if self.form == "fused":
            r.init(self.o, 0.0)
            self.say("set m = -inf, d = 0, o = 0")

    @action("load xi")
    def load_x(self, i: int) -> None:
        """xi replaces the last tile: what was computed from that one alone, or does not include this one yet, is stale."""
        r = self.r
        r.stale(self.pi)
        if self.in_m < self.T:
            r.stale(self.m)
        if self.in_d < self.T:
            r.stale(self.d, *([] if self.form == "safe" else [self.c]), *([self.w] if self.form == "fused" else []))
        r.move(self.xs[self.row][i], self.xi)

    @action("new maximum m")
    def running_max(self, i: int) -> None:
        """m = max(m, xi), and c, what all that was summed relative to the old m shrinks by."""
        r = self.r
        x, m = r.read(self.xi), r.read(self.m)
        m_new = np.maximum(m, x.max(keepdims=True))
        said = f"m = max({_n(m)}, {_n(x.max())}) = {_n(m_new)}"
        if self.form != "safe":
            c = np.exp(m - _base(m_new))  # first tile: e^(-inf - m) = 0, and there is nothing to keep
            r.change(self.c, c, reads=(self.m, self.xi))
            said += f",  c = e^({_n(m)} - {_n(_base(m_new))}) = {_n(c)}"
        r.change(self.m, m_new, reads=(self.m, self.xi))
        self.in_m += 1
        self.say(said)
        r.barrier("block", "m is complete before all threads subtract it")

    @action("rescale d")
    def rescale(self, i: int) -> None:
        """d = d · c, as if the new maximum had been known all along."""
        r = self.r
        d, c = r.read(self.d), r.read(self.c)
        r.change(self.d, d * c, reads=(self.d, self.c), role="rescale")
        self.say(f"rescale d:  {_n(d)} · {_n(c)} = {_n(d * c)}")

    @action("add to d")
    def running_sum(self, i: int) -> None:
        """d gains the tile's terms pi = e^(xi - m); w is the share of the old terms in the new d."""
        r = self.r
        d = r.read(self.d)
        p = np.exp(r.read(self.xi) - _base(r.read(self.m)))
        total = p.sum(dtype="float32")
        r.change(self.pi, p, reads=(self.xi, self.m))
        said = f"add e^(xi - m):  d = {_n(d)} + {_n(total)} = {_n(d + total)}"
        if self.form == "fused":
            w = d / _divisor(d + total)
            r.change(self.w, w, reads=(self.d, self.pi))
            said += f",  w = {_n(d)} / {_n(d + total)} = {_n(w)}"
        r.change(self.d, d + total, reads=(self.d, self.pi))
        self.in_d += 1
        self.say(said)
        r.barrier("block", "d and pi are complete before all threads use them")

    @action("write yi", part="divide")
    def divide(self, i: int) -> None:
        """pi = e^(xi - m) / d."""
        r = self.r
        m, d = r.read(self.m), r.read(self.d)
        y = np.exp(r.read(self.xi) - _base(m)) / _divisor(d)
        r.change(self.pi, y, reads=(self.xi, self.m, self.d))
        self.say(f"write y{i} = e^(x{i} - {_n(_base(m))}) / {_n(d)}")

    @action("write yi", part="store yi")
    def store_y(self, i: int) -> None:
        """The tile of probabilities goes to HBM."""
        self.r.move(self.pi, self.ys[self.row][i])
        first = i * self.tile
        self.output[self.row, first : first + self.tile] = self.r.read(self.pi)[: self.N - first]

    @action("load Vi")
    def load_v(self, i: int) -> None:
        """Vi, the rows of V that belong to xi."""
        self.r.move(self.Vs[i], self.Vi)

    @action("update o")
    def accumulate(self, i: int) -> None:
        """o = o · w + pi Vi / d: after every tile, softmax(x) V over what has been seen."""
        r = self.r
        o, w, d = r.read(self.o), r.read(self.w), r.read(self.d)
        p, V = r.read(self.pi), r.read(self.Vi)
        keys = slice(self.N - i * self.tile)  # fewer than a tile in the last one
        r.change(self.o, o * w + p[keys] @ V[keys] / _divisor(d), reads=(self.o, self.w, self.pi, self.Vi, self.d))
        self.say(f"o = {_n(w)} · o + pi Vi / {_n(d)}")
        r.barrier("block", "pi, Vi, d and w have been read before the next tile overwrites them")

    @action("write o")
    def store_o(self) -> None:
        """The only write to HBM."""
        self.r.move(self.o, self.os[self.row][0])
        self.output[self.row] = self.r.read(self.o)

    def elements(self, slot: Slot, array: np.ndarray, first: int) -> np.ndarray:
        """The part of a kernel's array that a slot names: part of a row of x or y, a row of o, or rows of V."""
        rows = {"x": self.xs, "y": self.ys, "o": self.os}.get(slot.tensor)
        part: np.ndarray = array if rows is None else array[next(r for r, row in enumerate(rows) if slot in row.tiles)]
        return part[first : first + slot.shape[0]]

    def bound(self) -> float:
        """Eight roundings of 2^-24 for each of twice the largest score, √N for the sums, T and 16, times max |V|, at least 1."""
        score = float(np.abs(self.x[np.isfinite(self.x)]).max(initial=0))
        largest = 1.0 if self.V is None else max(1.0, float(np.abs(self.V).max()))
        return float(8 * 2**-24 * (2 * score + self.N**0.5 + self.T + 16) * largest)

    def run(self) -> SoftmaxRun:
        """y or o of the rows that have run (NaN where none has), and the recording."""
        recording = None
        if not self.r.keeps_nothing:
            recording = self.r.recording((self.source(), kernel_source(FILE, f"{self.form}_softmax")))
        return self.result(self.output, recording, "numpy")

    def result(self, output: np.ndarray, recording: Recording | None, device: str) -> SoftmaxRun:
        """A run with this output, shaped as x was given."""
        made = output.reshape((*self.given[:-1], output.shape[-1]))
        y, o = (None, made) if self.form == "fused" else (made, None)
        return SoftmaxRun(y, o, recording, device, self.params)


def _checked(x: Any, V: Any, tile: Any, form: Any) -> tuple[Any, Any, int, str, tuple[int, ...]]:
    rows, length = as_tile_array("x", x), positive("tile", tile)
    given: tuple[int, ...] = rows.shape
    if rows.ndim not in (1, 2) or 0 in given:
        raise ValueError(f"x has shape {given}: it must be [N] or [R, N], with at least one element")
    if form is None:
        form = "online" if V is None else "fused"
    if form not in FORMS:
        raise ValueError(f'form={form!r} is none of "safe", "online", "fused"')
    if (form == "fused") != (V is not None):
        raise ValueError(f'form={form!r} {"needs V" if V is None else "takes no V"}: only "fused" multiplies by V')
    values = None if V is None else as_tile_array("V", V)
    if values is not None and (values.ndim != 2 or values.shape[0] != given[-1] or not values.shape[1]):
        raise ValueError(f"V has shape {values.shape}: it must be [N, D], a row for each of the N={given[-1]} scores")
    return rows.reshape(-1, given[-1]), values, length, form, given


def _base(m: np.ndarray) -> np.ndarray:
    """What is subtracted before exponentiating: m, or 0 while nothing but -inf was seen (-inf - -inf is NaN)."""
    return np.where(np.isneginf(m), np.float32(0), m)


def _divisor(d: np.ndarray) -> np.ndarray:
    """d, or 1 where d is 0: a row of nothing but -inf gets y = 0."""
    return np.where(d == 0, np.float32(1), d)


def _n(x: Any) -> str:
    return f"{float(np.asarray(x).ravel()[0]):.4g}"


def launch_kernel(s: OnlineSoftmax, device: str = "gpu") -> np.ndarray:
    """y [R, N] or o [R, D] from ``kernels/online_softmax.cu``, launched on outputs filled with NaN.

    Raises:
        LaunchError: the tile does not fit this GPU; says which would. KernelError: it failed while it ran.
    """
    from flashviz import cuda

    out = np.empty_like(s.output)
    template = {"Tile": s.tile} if s.V is None else {"Tile": s.tile, "D": s.V.shape[1]}
    kernel = cuda.Kernel(FILE, template=template, function=f"{s.form}_softmax")
    cuda.launch(kernel, (s.x, out, s.N) if s.V is None else (s.x, s.V, out, s.N), device=device, poison=True)
    return out


def online_softmax(
    x: Any,
    V: Any = None,
    *,
    tile: int = 4,
    form: str | None = None,
    device: str = "auto",
    record: Any = True,
    keep_values: int = 256,
) -> SoftmaxRun:
    """Softmax of each row of x, met in tiles; with V, softmax(x) V in the same pass (arXiv 1805.02867).

    Args:
        x: scores [N] or [R, N]; any real dtype, computed in float32. -inf is a score that counts for nothing; a row of
            nothing else gets y = 0, o = 0. A NaN or +inf makes its row NaN, as in any softmax.
        V: values [N, D], for the fused form.
        tile: elements of a tile; any N, the last tile may be shorter.
        form: ``"safe"`` (three passes over x, Algorithm 2), ``"online"`` (two, Algorithm 3) or ``"fused"`` (one, needs V).
            When not given, ``"fused"`` with V and ``"online"`` without.
        device: ``"numpy"``, ``"cpu"``, ``"gpu"``, or ``"auto"``: a GPU where one is usable, else NumPy.
        record: True, False, or the rows to keep.
        keep_values: tiles up to this many elements keep their numbers in the recording.

    Returns:
        A :class:`SoftmaxRun` with y (shaped like x) or o ([D] or [R, D]), the recording and the device.

    Raises:
        ValueError, TypeError: naming the argument, its value and what it must be.
        DeviceError: the device asked for is not usable here; says why and what to install.

    >>> run = online_softmax([0.0, 1.0, 2.0], tile=2, device="numpy")
    >>> run
    SoftmaxRun(y (3,), device='numpy', 15 steps)
    >>> run.y.round(3)
    array([0.09 , 0.245, 0.665], dtype=float32)
    """
    where = choose_device(device)
    s = OnlineSoftmax(x, V, tile=tile, form=form, record=record, keep_values=keep_values)
    if where == "numpy":
        LOOPS[s.form](s)
        return s.run()
    if record is False:
        return s.result(launch_kernel(s, where), None, where)
    output, recording = run_kernel(s, LOOPS[s.form], lambda: launch_kernel(s, where), where)
    return s.result(output, recording, where)
