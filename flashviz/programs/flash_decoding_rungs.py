"""Flash decoding as the rungs of its ladder run it: nothing in shared memory, and one launch instead of two.

The algorithm is that of ``flash_decoding.py``. A token that is decoded reads all of K and V once and computes next to nothing, so the
rungs keep what they read in registers and ask for the next bytes at once. Rung 1 has a block for every query, rung 2 one for all
queries that share a head of K and V. The block that is the last of its head to finish merges what the others left in HBM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flashviz import ladder
from flashviz.events import Source
from flashviz.programs.attention import Attention, as_tile_array, positive
from flashviz.programs.base import Run, action
from flashviz.programs.device import choose_device, kernel_source
from flashviz.programs.flash_attention_2_registers import bound, dtype_of
from flashviz.programs.flash_decoding import FlashDecoding
from flashviz.programs.replay import run_on
from flashviz.programs.rung_kernels import launch, loaded, stored, template_for
from flashviz.recorder import Recorder, Tensor
from flashviz.slots import Block, Slot, as_dtype
from flashviz.tiles import normalise, softmax_step

if TYPE_CHECKING:
    from flashviz.cuda.trace import TracedBlock

MOST_ROWS = 8
"""Queries that rung 2 takes in one block: the columns of a tensor core's product."""


def forward(fd: FlashDecodingRung) -> None:
    """The loops of the one launch. Any block may be the last of its head to finish; here it is that of the last split."""
    for batch, head in fd.heads:
        for s in range(fd.splits):
            fd.begin(s, head, batch)
            fd.load_q()
            tiles = fd.key_tiles(s)
            for j in tiles[:1]:
                fd.load_k(j)
            for j in tiles:
                fd.load_v(j)
                fd.scores(j)
                if j + 1 in tiles:
                    fd.load_k(j + 1)  # asked for before the softmax, there after it
                fd.softmax(j)
                fd.accumulate(j)
            if fd.splits > 1:
                fd.store_partial()
                if s < fd.splits - 1:
                    continue
                fd.load_partials()
            fd.store_o()


class FlashDecodingRung(FlashDecoding):
    """The actions of the decoding rungs.

    Args:
        q, K, V: as for :class:`flashviz.FlashDecoding`, rounded to ``dtype``.
        rung: 1, a block for every query, or 2, a block for the queries of a head of K and V, of which there are up to 8.
        dtype: ``"float16"``, which is the default, or ``"bfloat16"``.
        splits, Bc, scale, causal, kv_len, record, keep_values: as for :class:`flashviz.FlashDecoding`.
    """

    def __init__(
        self,
        q: Any,
        K: Any,
        V: Any,
        *,
        rung: int | str = 1,
        dtype: str | None = None,
        splits: int = 4,
        Bc: int = 4,
        scale: float | None = None,
        causal: bool = False,
        kv_len: int | None = None,
        record: Any = True,
        keep_values: int = 256,
    ) -> None:
        self.rung = ladder.rung(rung, ladder.DECODE)
        T = self.dtype = dtype_of(self.rung, dtype)
        Q, K, V = (as_dtype(as_tile_array(name, x), T) for name, x in zip("QKV", (q, K, V), strict=True))
        self.a = a = Attention.of(Q, K, V, 1, Bc, scale, causal, kv_len=kv_len)
        B, Hkv, queries = a.K.shape[0], a.K.shape[1], a.Q.shape[1] * a.Nq
        self.splits, self.Tc = positive("splits", splits), a.Tc
        self.columns = queries if self.rung.name == 1 else Hkv  # blocks of a batch and split
        self.rows = R = queries // self.columns
        if self.rung.name == 2 and R > MOST_ROWS:
            raise ValueError(f"{R} queries share a head of K and V: rung 2 takes up to {MOST_ROWS}, rung 1 any number")
        self.heads = tuple((b, h) for b in range(B) for h in range(self.columns))
        self.output = np.full((B, self.columns, R, a.d), np.nan, dtype="float32")
        self.logsumexp = np.full((B, self.columns, R), np.nan, dtype="float32")
        self.seen = self._seen()
        sizes = {k: v for k, v in a.params.items() if k not in ("Br", "Tr")}
        self.params = {**sizes, "splits": self.splits, "rung": self.rung.name, "dtype": T, "columns": self.columns}
        self.r = r = Recorder("flash_decoding", self.params, keep=record, keep_values=keep_values)
        self._on_chip(r)
        self._in_hbm(r)
        self.combining = False
        r.launch(self.rung.kernel, (self.splits, self.columns, B), (32, 1, 1))

    def _on_chip(self, r: Recorder) -> None:
        """All of it in registers, of which each warp has its own: the tiles in T, what is computed in float32."""
        a, R, T, own = self.a, self.rows, self.dtype, {"memory": "register", "scope": "warp"}
        self.q, self.o = r.slot("q", (R, a.d), T, tensor="Q", **own), r.slot("o", (R, a.d), tensor="O", **own)
        self.Kj = r.slot("Kj", (a.Bc, a.d), T, tensor="K", **own)
        self.Vj = r.slot("Vj", (a.Bc, a.d), T, tensor="V", **own)
        self.Sj = r.slot("Sj", (R, a.Bc), tensor="S", **own)
        self.m, self.l = r.slot("m", (R,), **own), r.slot("l", (R,), **own)
        several = range(self.splits if self.splits > 1 else 0)
        self.ls = [r.slot(f"ls{s}", (R,), tensor="L", **own) for s in several]
        self.parts = [r.slot(f"os{s}", (R, a.d), tensor="O", **own) for s in several]

    def _in_hbm(self, r: Recorder) -> None:
        """K and V of every head of theirs; the others by the blocks that use them."""
        a, R, S, T = self.a, self.rows, self.splits, self.dtype
        B, Hkv = a.K.shape[:2]
        queries = a.Q.reshape(B, self.columns, R, a.d)
        several = len(self.heads) > 1
        self.HBM: dict[tuple[int, int], dict[str, Tensor]] = {at: {} for at in self.heads}
        own = ("Os", (S * R, a.d), "float32"), ("Ls", (S * R,), "float32"), ("O", (R, a.d), T), ("L", (R,), "float32")

        def suffix(at: tuple[int, int]) -> str:
            return f"[{at[0]},{at[1]}]" if several else ""

        for at in self.heads:
            self.HBM[at]["Q"] = r.tensor("Q", queries[at], tile=R, head=at, suffix=suffix(at), dtype=T)
        for name, data in (("K", a.K), ("V", a.V)):
            for kv in np.ndindex(B, Hkv):
                made = r.tensor(name, data[kv], tile=a.Bc, head=kv, suffix=suffix(kv), used=a.keys, dtype=T)
                for at in self.heads:
                    if (at[0], at[1] * Hkv // self.columns) == kv:
                        self.HBM[at][name] = made
        for name, shape, dtype in own if S > 1 else own[2:]:
            for at in self.heads:
                self.HBM[at][name] = r.tensor(name, shape=shape, tile=R, head=at, suffix=suffix(at), dtype=dtype)

    def held(self, slot: Slot) -> np.ndarray:
        """What a slot holds, in float32."""
        return self.r.read(slot).astype("float32")

    @action("load q")
    def load_q(self) -> None:
        """The block's queries arrive in registers and stay; the carries start at o = 0, m = -inf, l = 0."""
        self.r.move(self.tile("Q"), self.q)
        self.r.init(self.o, 0.0)
        self.r.init(self.m, -np.inf)
        self.r.init(self.l, 0.0)

    @action("load Kj")
    def load_k(self, j: int) -> None:
        """Kj goes straight into registers: each lane asks for 16 bytes of several keys at once."""
        self.r.move(self.tile("K", j), self.Kj)

    @action("load Vj")
    def load_v(self, j: int) -> None:
        """Vj as well, before Kj is used."""
        self.r.move(self.tile("V", j), self.Vj)

    @action("fill Sj")
    def scores(self, j: int) -> None:
        """Sj = scale · q Kjᵀ, with -inf where a query does not see a key."""
        a = self.a
        keys = slice(j * a.Bc, min((j + 1) * a.Bc, a.keys))
        s = a.scale * (self.held(self.q) @ self.held(self.Kj)[: keys.stop - keys.start].T)
        if self.seen is not None:
            s = np.where(self.seen[self.head][:, keys], s, np.float32(-np.inf))
        self.r.stale(self.m, self.l)
        self.r.change(self.Sj, s, reads=(self.q, self.Kj), cells=True)

    @action("update m, l and o", part="softmax")
    def softmax(self, j: int) -> None:
        """The new maximum and denominator; Sj becomes probabilities, for the tensor cores of rung 2 rounded to T."""
        r = self.r
        m, l, p, correction = softmax_step(self.held(self.m), self.held(self.l), self.held(self.Sj))
        r.change(self.m, m, reads=(self.m, self.Sj))
        p = as_dtype(p, self.dtype) if self.rung.name == 2 else p
        r.change(self.Sj, p, reads=(self.Sj, self.m), role="rescale")
        r.change(self.l, l, reads=(self.l, self.m, self.Sj))
        r.change(self.o, self.held(self.o) * correction[:, None], reads=(self.o, self.m), role="rescale")

    @action("update m, l and o", part="accumulate")
    def accumulate(self, j: int) -> None:
        """Add Pj Vj to o, unnormalised."""
        v = self.held(self.Vj)[: self.a.keys - j * self.a.Bc]  # fewer than Bc rows in the last tile
        added = self.held(self.Sj)[:, : len(v)] @ v
        self.r.change(self.o, self.held(self.o) + added, reads=(self.o, self.Sj, self.Vj))

    store_partial = FlashDecoding.store_partial

    @action("the last block of the head: merge every Os, Ls")
    def load_partials(self) -> None:
        """All other blocks of the head have stored theirs; the last one to finish reads them in one transfer and merges them.

        The online softmax over splits: m = max Ls, ws = e^(Ls - m), l = Σ ws, o = Σ ws Os. Without keys ws = 0.
        """
        r = self.r
        tensors = [self.tile(name, s) for name in ("Os", "Ls") for s in range(self.splits)]
        r.move(tensors, [*self.parts, *self.ls])
        L, O = np.stack([r.read(x) for x in self.ls], axis=1), np.stack([r.read(x) for x in self.parts], axis=1)
        m, l, w, _ = softmax_step(np.full(self.rows, -np.inf, "float32"), np.zeros(self.rows, "float32"), L)
        r.change(self.m, m, reads=self.ls)
        r.change(self.l, l, reads=(self.m, *self.ls))
        r.change(self.o, (w[:, :, None] * O).sum(axis=1), reads=(self.m, *self.ls, *self.parts))

    @action("write O, L")
    def store_o(self) -> None:
        """The answer over all keys, in the inputs' type: O = o / l and L = m + ln l."""
        O, L = normalise(self.held(self.o), self.held(self.m), self.held(self.l))
        O = as_dtype(O, self.dtype)
        self.r.move(
            [self.o, self.l],
            [self.tile("O"), self.tile("L")],
            values=[O, L],
            reads=[(self.o, self.l), (self.m, self.l)],
        )
        self.output[self.head], self.logsumexp[self.head] = O, L

    @classmethod
    def source(cls) -> Source:
        """This program's source with the lines of the actions that it defines itself."""
        made = super().source()
        own = [line for line in made.lines if getattr(cls, line[0]).__module__ == cls.__module__]
        return Source(made.language, made.name, made.text, tuple(own))

    def enter(self, kernel: str, block: Block) -> None:
        """A block begins, as a trace names it."""
        self.begin(block.tile, block.head, block.batch)

    def in_order(self, blocks: Sequence[TracedBlock]) -> Sequence[TracedBlock]:
        """Those that merge come last: each was the last of its head to finish, whatever its number."""
        return sorted(blocks, key=lambda block: any(did.name == "load_partials" for did in block.actions))

    def elements(self, slot: Slot, array: np.ndarray, first: int) -> np.ndarray:
        """The part of a kernel's array that a slot names: the rows of one block lie side by side."""
        B = self.a.K.shape[0]
        part: np.ndarray
        if slot.tensor in ("Os", "Ls"):
            part = array.reshape(self.splits, B, self.columns, self.rows, -1)[slot.index[0]][slot.head]
        elif slot.tensor in ("Q", "O", "L"):
            part = array.reshape(B, self.columns, self.rows, -1)[slot.head]
        else:
            part = array[slot.head][first : min(first + slot.shape[0], self.a.keys)]
        return part

    def bound(self) -> float:
        """What rounding may change, as on the prefill ladder."""
        return bound(self.a, self.rung, self.dtype)

    def run(self) -> Run:
        """O and L of the blocks that have run (NaN where none has), and the recording."""
        O, L = self.output.reshape(self.a.given), self.logsumexp.reshape(self.a.given[:-1])
        code = () if self.r.keeps_nothing else (self.source(), kernel_source(self.rung.kernel))
        return Run(O, L, self.r.recording(code) if code else None, "numpy", self.params)


def warps_of(rung: int | str, Bc: int, d: int) -> int:
    """Warps of a block: on rung 2 each has 16 keys of a tile, on rung 1 they share them, as many as 8, each at least d / 8 lanes a key.

    Raises:
        ValueError: such a tile cannot be shared out.
    """
    if rung == 2 and not Bc % 16:
        return Bc // 16
    groups = Bc * d // 256  # keys of a tile for each key that a warp reads at once
    if rung == 1 and d in (8, 16, 32, 64, 128, 256) and groups and not Bc * d % 256:
        return max(warps for warps in (1, 2, 4, 8) if not groups % warps)
    wants = "a multiple of 16" if rung == 2 else "a multiple of 256 / d, with d a power of 2 up to 256"
    raise ValueError(f"Bc={Bc}, d={d}: the kernel of decoding rung {rung} takes Bc as {wants}")


def launch_kernel(fd: FlashDecodingRung, device: str = "gpu") -> tuple[np.ndarray, np.ndarray]:
    """O and L, as float32, from the kernel of the program's rung, launched on outputs filled with NaN.

    Raises:
        LaunchError: the sizes do not fit this GPU; says which would. KernelError: it failed while it ran.
    """
    a, T, S = fd.a, fd.dtype, fd.splits
    O, L = stored(np.zeros(a.Q.shape), T), np.empty(a.Q.shape[:3], np.float32)
    Os, Ls = np.empty((S, *a.Q.shape), np.float32), np.empty((S, *L.shape), np.float32)
    arrays = {"Q": stored(a.Q, T), "K": stored(a.K, T), "V": stored(a.V, T), "O": O, "L": L, "Os": Os, "Ls": Ls}
    heads = {"Hq": a.Q.shape[1], "Hkv": a.K.shape[1], "splits": S}
    numbers = {"Nq": a.Nq, "Nk": a.Nk, "scale": a.scale, "causal": a.causal, "kv_len": a.keys, **heads}
    template = template_for(fd.rung.kernel, {"Bc": a.Bc, "D": a.d}, T, Warps=warps_of(fd.rung.name, a.Bc, a.d))
    launch(fd.rung.kernel, template, arrays | numbers, device)
    return loaded(O, T).reshape(a.given), L.reshape(a.given[:-1])


def run_rung(q: Any, K: Any, V: Any, *, device: str = "auto", record: Any = True, **options: Any) -> Run:
    """What :func:`flashviz.flash_decoding` does with ``rung=``."""
    where = choose_device(device)
    fd = FlashDecodingRung(q, K, V, record=record, **options)
    return run_on(where, fd, forward, lambda: launch_kernel(fd, where), record, fd.params)
