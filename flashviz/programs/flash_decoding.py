"""Flash decoding (Dao, Haziza, Massa and Sizov, 2023), as a tile program: few queries, many keys, two launches.

The keys are cut into splits. One CUDA block a split runs the online softmax over its own K, V tiles and writes the
answer over these keys alone, Os, with their logsumexp Ls. The blocks of the second launch merge them: with
m = max Ls, ws = e^(Ls - m) and l = Σ ws, the answer is O = Σ ws Os / l and L = m + ln l. Query heads that share a head
of K and V are rows of one block, so that each K, V tile is loaded once for all of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flashviz import ladder
from flashviz.programs.attention import Attention, positive
from flashviz.programs.base import Program, Run, action
from flashviz.programs.device import choose_device, kernel_source
from flashviz.programs.replay import run_on
from flashviz.recorder import Recorder, Tensor
from flashviz.recording import Param
from flashviz.slots import Block, Slot
from flashviz.tiles import normalise, softmax_step

KERNEL, SPLIT, COMBINE = "flash_decoding", "flash_decoding_split", "flash_decoding_combine"
THREADS = 256  # of the kernels' blocks


def forward(fd: FlashDecoding) -> None:
    """The loops of both launches. In each, the outer ones are the grid: its blocks are independent of each other."""
    for batch, head in fd.heads:
        for s in range(fd.splits):
            fd.begin(s, head, batch)
            fd.load_q()
            for j in fd.key_tiles(s):
                fd.load_k(j)
                fd.load_v(j)
                fd.scores(j)
                fd.softmax(j)
                fd.accumulate(j)
            fd.store_partial()
    for batch, head in fd.heads:
        fd.begin_combine(head, batch)
        fd.load_l()
        fd.weights()
        for s in range(fd.splits):
            fd.load_o(s)
            fd.combine(s)
        fd.store_o()


class FlashDecoding(Program):
    """The actions of flash decoding on real tiles; arguments as for :func:`flash_decoding`.

    Heads here are those of K and V, and ``heads`` lists every (batch, head); ``rows`` are the queries of one of them.
    """

    loop = ("KV loop", "j", "split loop", "s")

    def __init__(
        self,
        q: Any,
        K: Any,
        V: Any,
        *,
        splits: int = 4,
        Bc: int = 4,
        scale: float | None = None,
        causal: bool = False,
        mask: Any = None,
        window: int | None = None,
        kv_len: int | None = None,
        record: Any = True,
        keep_values: int = 256,
    ) -> None:
        self.a = a = Attention.of(q, K, V, 1, Bc, scale, causal, mask, window, kv_len)
        B, Hkv = a.K.shape[:2]
        self.splits = S = positive("splits", splits)
        self.Tc = a.Tc
        self.rows = R = a.Q.shape[1] // Hkv * a.Nq
        self.heads = tuple((b, h) for b in range(B) for h in range(Hkv))
        self.output = np.full((B, Hkv, R, a.d), np.nan, dtype="float32")
        self.logsumexp = np.full((B, Hkv, R), np.nan, dtype="float32")
        self.seen = self._seen()
        dropped = ("Br", "Tr")
        self.params: dict[str, Param] = {k: v for k, v in a.params.items() if k not in dropped} | {"splits": S}
        self.r = r = Recorder("flash_decoding", self.params, keep=record, keep_values=keep_values)
        self.q, self.o = r.slot("q", (R, a.d), tensor="Q"), r.slot("o", (R, a.d), tensor="O")
        self.Kj, self.Vj = r.slot("Kj", (a.Bc, a.d), tensor="K"), r.slot("Vj", (a.Bc, a.d), tensor="V")
        self.Sj = r.slot("Sj", (R, a.Bc), tensor="S")
        self.m, self.l = r.slot("m", (R,)), r.slot("l", (R,))
        self.ls = [r.slot(f"ls{s}", (R,), tensor="L") for s in range(S)]
        self.w, self.os = r.slot("w", (R, S), tensor="P"), r.slot("os", (R, a.d), tensor="O")
        queries = a.Q.reshape(B, Hkv, R, a.d)
        self.HBM: dict[tuple[int, int], dict[str, Tensor]] = {at: {} for at in self.heads}
        for name, data, shape, tile in (
            ("Q", queries, None, R),
            ("K", a.K, None, a.Bc),
            ("V", a.V, None, a.Bc),
            ("Os", None, (S * R, a.d), R),
            ("Ls", None, (S * R,), R),
            ("O", None, (R, a.d), R),
            ("L", None, (R,), R),
        ):
            for at in self.heads:
                suffix = f"[{at[0]},{at[1]}]" if len(self.heads) > 1 else ""
                given = None if data is None else data[at]
                used = a.keys if name in ("K", "V") else None
                self.HBM[at][name] = r.tensor(name, given, tile=tile, shape=shape, head=at, suffix=suffix, used=used)
        self.combining = False
        r.launch(SPLIT, (S, Hkv, B), (THREADS, 1, 1))

    def _seen(self) -> np.ndarray | None:
        """Which row of which block sees which key, [B, blocks of a batch, rows, Nk], or None where all do."""
        a = self.a
        if not a.causal and a.mask is None:
            return None
        seen = np.ones((*a.Q.shape[:3], a.Nk), dtype=bool) if a.mask is None else a.mask
        if a.causal:
            own = np.arange(a.Nq)[:, None] + a.keys - a.Nq
            seen = seen & (np.arange(a.Nk) <= own) & (np.arange(a.Nk) > own - (a.window or a.Nk + a.Nq))
        return np.reshape(seen, (a.K.shape[0], -1, self.rows, a.Nk))

    @property
    def place(self) -> dict[str, int]:
        """A block of the first launch is a split; one of the second goes through all of them."""
        return {} if self.combining else {"s": self.s}

    def key_tiles(self, s: int) -> range:
        """The K, V tiles of split s: ceil(tiles / splits) whole ones, fewer or none where the splits before took the rest.

        With a window, only the tiles from the first query's window on are there to be split.
        """
        begin = self.a.sight.keys_of(0).start // self.a.Bc
        each = -(-(self.Tc - begin) // self.splits)
        return range(min(begin + s * each, self.Tc), min(begin + (s + 1) * each, self.Tc))

    def begin(self, s: int, head: int = 0, batch: int = 0) -> None:
        """A CUDA block of the first launch begins: it owns split s of one head of K and V."""
        if self.combining:
            raise RuntimeError(f"split {s} after a combine block: the second launch waits for the whole first one")
        self._check(head, batch)
        if not 0 <= s < self.splits:
            raise IndexError(f"split s={s}: s runs to {self.splits - 1}")
        self.s, self.head = s, (batch, head)
        self.r.block(s, head, batch, name=f"split {s}")

    def begin_combine(self, head: int = 0, batch: int = 0) -> None:
        """A CUDA block of the second launch begins: it merges the partial answers of one head of K and V."""
        self._check(head, batch)
        if not self.combining:
            B, Hkv = self.a.K.shape[:2]
            self.r.launch(COMBINE, (1, Hkv, B), (THREADS, 1, 1))
        self.combining, self.head = True, (batch, head)
        self.r.block(0, head, batch, name="combine")

    def _check(self, head: int, batch: int) -> None:
        if (batch, head) not in self.heads:
            raise IndexError(f"head={head}, batch={batch}: the (batch, head) pairs of K and V are {self.heads}")

    def tile(self, name: str, n: int = 0) -> Slot:
        """Tile n of a tensor in HBM, for the head of this block."""
        return self.HBM[self.head][name][n]

    # -- the first launch ------------------------------------------------------------------------------------------

    @action("load q")
    def load_q(self) -> None:
        """The queries arrive and stay; the three carries start at o = 0, m = -inf, l = 0."""
        r = self.r
        r.move(self.tile("Q"), self.q)
        r.init(self.o, 0.0)
        r.init(self.m, -np.inf)
        r.init(self.l, 0.0)
        r.barrier("block", "q and the carries are complete before any thread reads them")

    @action("load Kj, Vj", part="load Kj")
    def load_k(self, j: int) -> None:
        """Kj replaces the last key tile: what was computed from that one is stale now."""
        r = self.r
        r.stale(self.Sj, self.m, self.l)
        r.move(self.tile("K", j), self.Kj)

    @action("load Kj, Vj", part="load Vj")
    def load_v(self, j: int) -> None:
        """Vj arrives in the same transfer."""
        self.r.move(self.tile("V", j), self.Vj)
        self.r.barrier("block", "Kj and Vj are complete before any thread reads them")

    @action("fill Sj")
    def scores(self, j: int) -> None:
        """Sj = scale · q Kjᵀ, with -inf where a query does not see a key."""
        r, a = self.r, self.a
        keys = slice(j * a.Bc, min((j + 1) * a.Bc, a.keys))
        s = a.scale * (r.read(self.q) @ r.read(self.Kj)[: keys.stop - keys.start].T)
        if self.seen is not None:
            s = np.where(self.seen[self.head][:, keys], s, np.float32(-np.inf))
        r.change(self.Sj, s, reads=(self.q, self.Kj), cells=True)
        r.barrier("block", "Sj is complete before one thread reads a whole row of it")

    @action("update m, l and o", part="softmax")
    def softmax(self, j: int) -> None:
        """The new maximum and denominator; Sj becomes probabilities, and o is scaled to the new maximum."""
        r = self.r
        m, l, p, correction = softmax_step(r.read(self.m), r.read(self.l), r.read(self.Sj))
        r.change(self.Sj, p, reads=(self.Sj, self.m), role="rescale")
        r.change(self.o, r.read(self.o) * correction[:, None], reads=(self.o, self.m, self.Sj), role="rescale")
        r.change(self.l, l, reads=(self.l, self.m, self.Sj))
        r.change(self.m, m, reads=(self.m, self.Sj))
        r.barrier("block", "probabilities and the scaled o are written before all threads use them")

    @action("update m, l and o", part="accumulate")
    def accumulate(self, j: int) -> None:
        """Add Pj Vj to o, unnormalised."""
        r = self.r
        keys = slice(self.a.keys - j * self.a.Bc)  # fewer than Bc in the last tile
        added = r.read(self.Sj)[:, keys] @ r.read(self.Vj)[keys]
        r.change(self.o, r.read(self.o) + added, reads=(self.o, self.Sj, self.Vj))
        r.barrier("block", "Kj, Vj and Sj have been read by every thread before the next tile overwrites them")

    @action("write Os, Ls")
    def store_partial(self) -> None:
        """What attention over these keys alone would give: Os = o / l and Ls = m + ln l; 0 and -inf without keys."""
        r = self.r
        r.move(
            [self.o, self.l],
            [self.tile("Os", self.s), self.tile("Ls", self.s)],
            values=normalise(r.read(self.o), r.read(self.m), r.read(self.l)),
            reads=[(self.o, self.l), (self.m, self.l)],
        )

    # -- the second launch -----------------------------------------------------------------------------------------

    @action("load every Ls")
    def load_l(self) -> None:
        """The logsumexps of all splits arrive in one transfer; o starts at 0."""
        r = self.r
        r.move([self.tile("Ls", s) for s in range(self.splits)], self.ls)
        r.init(self.o, 0.0)
        r.barrier("block", "the logsumexps of all splits are there before one thread reads those of a row")

    @action("fill w")
    def weights(self) -> None:
        """The online softmax's own weights, over splits: m = max Ls, ws = e^(Ls - m), l = Σ ws. Without keys ws = 0."""
        r = self.r
        L = np.stack([r.read(ls) for ls in self.ls], axis=1)
        m, l, w, _ = softmax_step(np.full(self.rows, -np.inf, "float32"), np.zeros(self.rows, "float32"), L)
        r.change(self.w, w, reads=self.ls, cells=True)
        r.change(self.m, m, reads=self.ls)
        r.change(self.l, l, reads=(self.w,))
        r.barrier("block", "the weights and their sum are complete before all threads use them")

    @action("load Os")
    def load_o(self, s: int) -> None:
        """One partial answer arrives."""
        self.r.move(self.tile("Os", s), self.os)

    @action("add ws · Os to o")
    def combine(self, s: int) -> None:
        """Add ws Os to o, unnormalised."""
        r = self.r
        added = r.read(self.w)[:, s, None] * r.read(self.os)
        r.change(self.o, r.read(self.o) + added, reads=(self.o, self.w, self.os))

    @action("write O, L")
    def store_o(self) -> None:
        """The answer over all keys: O = o / l and L = m + ln l."""
        r = self.r
        O, L = normalise(r.read(self.o), r.read(self.m), r.read(self.l))
        r.move(
            [self.o, self.l],
            [self.tile("O"), self.tile("L")],
            values=[O, L],
            reads=[(self.o, self.l), (self.m, self.l)],
        )
        self.output[self.head], self.logsumexp[self.head] = O, L

    def enter(self, kernel: str, block: Block) -> None:
        """A block of one of the two kernels begins, as a trace names it."""
        if kernel == COMBINE:
            self.begin_combine(block.head, block.batch)
        else:
            super().enter(kernel, block)

    def elements(self, slot: Slot, array: np.ndarray, first: int) -> np.ndarray:
        """The part of a kernel's array that a slot names: the rows of one head of K and V lie side by side."""
        B, Hkv = self.a.K.shape[:2]
        part: np.ndarray
        if slot.tensor in ("Os", "Ls"):
            part = array.reshape(self.splits, B, Hkv, self.rows, -1)[slot.index[0]][slot.head]
        elif slot.tensor in ("Q", "O", "L"):
            part = array.reshape(B, Hkv, self.rows, -1)[slot.head]
        else:
            part = super().elements(slot, array, first)
            part = part[: max(self.a.keys - first, 0)] if slot.tensor in ("K", "V") else part
        return part

    def bound(self) -> float:
        """What rounding may change: see :meth:`Attention.bound`."""
        return self.a.bound()

    def run(self) -> Run:
        """O and L of the blocks that have run (NaN where none has), and the recording."""
        O, L = self.output.reshape(self.a.given), self.logsumexp.reshape(self.a.given[:-1])
        recording = None if self.r.keeps_nothing else self.r.recording((self.source(), kernel_source(KERNEL)))
        return Run(O, L, recording, "numpy", self.params)


def enough_splits(q: Any, K: Any, Bc: int, kv_len: int | None, rung: int | str, device: str) -> int:
    """Splits that keep this machine's GPU busy, 4 where the run is not on a GPU."""
    from flashviz import cuda

    if device not in ("auto", "gpu") or not cuda.status().usable:
        return 4
    queries, keys = ((1, 1, *np.shape(x)) for x in (q, K))
    blocks = int(np.prod(queries[-4:-1] if rung == 1 else keys[-4:-2]))
    used = keys[-2] if kv_len is None else kv_len
    each = ladder.rung(rung, ladder.DECODE).each(keys[-1], Bc)
    return cuda.choose_splits(blocks, used, cuda.status().multiprocessors, Bc, each=each)


def launch_kernels(fd: FlashDecoding, device: str = "gpu") -> tuple[np.ndarray, np.ndarray]:
    """O and L from ``kernels/flash_decoding.cu``: both kernels, on outputs filled with NaN.

    Raises:
        LaunchError: the sizes do not fit this GPU; says which would. KernelError: it failed while it ran.
    """
    from flashviz import cuda

    a, S = fd.a, fd.splits
    Os, Ls = np.empty((S, *a.Q.shape), np.float32), np.empty((S, *a.Q.shape[:3]), np.float32)
    O, L = np.empty(a.Q.shape, np.float32), np.empty(a.Q.shape[:3], np.float32)
    heads = (a.Q.shape[1], a.K.shape[1])
    split = cuda.Kernel(KERNEL, {"Br": fd.rows, "Bc": a.Bc, "D": a.d}, block=THREADS, function=SPLIT)
    arguments = (a.Q, a.K, a.V, Os, Ls, a.Nq, a.Nk, a.scale, a.causal, *heads, S, *a.limits)
    cuda.launch(split, arguments, device=device, poison=True)
    combine = cuda.Kernel(KERNEL, {"Splits": S, "Br": fd.rows, "D": a.d}, block=THREADS, function=COMBINE)
    cuda.launch(combine, (Os, Ls, O, L, a.Nq, *heads), device=device, poison=True)
    return O.reshape(a.given), L.reshape(a.given[:-1])


def flash_decoding(
    q: Any,
    K: Any,
    V: Any,
    *,
    splits: int | None = 4,
    Bc: int = 4,
    scale: float | None = None,
    causal: bool = False,
    mask: Any = None,
    window: int | None = None,
    kv_len: int | None = None,
    rung: int | str = 0,
    dtype: str | None = None,
    device: str = "auto",
    record: Any = True,
    keep_values: int = 256,
) -> Run:
    """Softmax(q Kᵀ · scale) V for a few queries over many keys, cut into splits that run side by side and are merged.

    Source: Flash-Decoding for long-context inference (Dao, Haziza, Massa, Sizov, 2023); the online softmax is that of
    arXiv 2307.08691, Algorithm 1.

    Args:
        q: queries [Nq, d], [H, Nq, d] or [B, H, Nq, d]; any real dtype, computed in float32. One block holds the
            rows of all query heads that share a head of K and V.
        K, V: keys and values [Nk, d], [Hkv, Nk, d] or [B, Hkv, Nk, d]; Hkv divides H.
        splits: blocks that share the keys of one head. Each takes ceil(Tc / splits) whole tiles of the
            Tc = ceil(Nk / Bc); the last ones may get fewer, or none: they write O = 0 and L = -inf and weigh nothing.
            None: as many as keep this GPU busy (:func:`flashviz.cuda.choose_splits`), 4 where there is none.
        Bc: rows of a K, V tile; the last tile may be shorter.
        scale: factor of the scores, 1/√d when not given.
        causal: query i sees keys j ≤ i + Nk - Nq; a row that sees no key gets O = 0 and L = -inf.
        mask: boolean, broadcast to [B, H, Nq, Nk], True where a query sees a key; not on a GPU.
        window: with causal, query i sees only the last ``window`` of these keys, its own among them; the tiles that no
            query sees are not split.
        kv_len: how many rows of K and V are used, 0 to Nk, all when not given: the part of a cache that is filled. It
            stands for Nk in ``causal``, and what lies behind it (NaN, say) is never touched.
        rung: of the ladder of decoding kernels (:data:`flashviz.ladder.DECODE`): 0 is this one, 1 and 2 take 16-bit inputs and merge
            in the same launch. They take no mask and no window.
        dtype: what rungs 1 and 2 round q, K and V to: ``"float16"``, which is the default, or ``"bfloat16"``.
        device: ``"numpy"``, ``"cpu"``, ``"gpu"``, or ``"auto"``: a GPU where one is usable, else NumPy.
        record: True, False, or the blocks to keep (tile numbers or (batch, head, tile) triples; a block's tile is its
            split, 0 for a combine block; heads are those of K and V).
        keep_values: tiles up to this many elements keep their numbers in the recording.

    Returns:
        A :class:`Run` with O (shaped like q), L (without the last axis), the recording of both launches and the device.

    Raises:
        ValueError, TypeError: naming the argument (q as Q), its value and what it must be.
        DeviceError: the device asked for is not usable here; says why and what to install.

    >>> q, K = np.ones((1, 4), "float32"), np.ones((8, 4), "float32")
    >>> flash_decoding(q, K, K, splits=2, device="numpy")
    Run(O (1, 4), L (1,), device='numpy', 21 steps)
    """
    if splits is None:
        splits = enough_splits(q, K, positive("Bc", Bc), kv_len, rung, device)
    options: dict[str, Any] = {"splits": splits, "Bc": Bc, "scale": scale, "causal": causal, "kv_len": kv_len}
    limits = {"mask": mask, "window": window}
    if rung != 0 or dtype is not None:
        from flashviz import ladder
        from flashviz.programs import flash_attention_2_rungs, flash_decoding_rungs

        flash_attention_2_rungs.check_options(rung, dtype, limits, ladder.DECODE)
        if rung != 0:
            options |= {"rung": rung, "dtype": dtype, "keep_values": keep_values}
            return flash_decoding_rungs.run_rung(q, K, V, **options, device=device, record=record)
    options |= limits
    where = choose_device(device, "a mask is given, which the kernels do not take" if mask is not None else "")
    fd = FlashDecoding(q, K, V, **options, record=record, keep_values=keep_values)
    return run_on(where, fd, forward, lambda: launch_kernels(fd, where), record, fd.params)
