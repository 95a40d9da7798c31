"""FlashAttention-2, forward (Dao, arXiv 2307.08691, Algorithm 1), as a tile program.

One CUDA block owns the rows of one tile Qi from start to finish: it streams every K, V tile past them, keeps the
running maximum mi, the denominator li and the unnormalised output Oi in shared memory, divides once at the end, and
writes Oi and Li = mi + ln li. Nothing is read back from HBM.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flashviz.programs.attention import Attention
from flashviz.programs.base import Program, Run, action
from flashviz.programs.device import choose_device, kernel_source
from flashviz.programs.replay import run_on
from flashviz.recorder import Recorder, Tensor
from flashviz.recording import Param
from flashviz.slots import Slot
from flashviz.tiles import causal_mask, normalise, softmax_step

KERNEL = "flash_attention_2"
THREADS = 256  # of the kernel's blocks


def forward(fa: FlashAttention2) -> None:
    """The loops. The two outer ones are the grid: its blocks are independent of each other."""
    for batch, head in fa.heads:
        for i in range(fa.Tr):
            fa.begin(i, head, batch)
            fa.load_q()
            for j in fa.key_tiles(i):
                fa.load_k(j)
                fa.load_v(j)
                fa.scores(j)
                fa.softmax(j)
                fa.accumulate(j)
            fa.store_o()


class FlashAttention2(Program):
    """The actions of FlashAttention-2 on real tiles.

    Args:
        Q, K, V: [N, d], [H, N, d] or [B, H, N, d], real numbers, computed in float32.
        Br, Bc: rows of a Q tile and of a K, V tile.
        scale: 1/√d when not given; 0 is honoured.
        causal: query i sees keys j ≤ i + Nk - Nq (aligned bottom-right).
        mask: boolean, broadcast to [B, H, Nq, Nk], True where a query sees a key.
        window: with causal, query i sees only the last ``window`` keys up to its own.
        kv_len: how many rows of K and V are used, all when not given; those behind are never touched.
        record: True, False, or the blocks to keep.
        keep_values: tiles up to this many elements keep their numbers.
    """

    loop = ("KV loop", "j")
    kernel = KERNEL
    dtype = "float32"

    def __init__(
        self,
        Q: Any,
        K: Any,
        V: Any,
        *,
        Br: int = 4,
        Bc: int = 4,
        scale: float | None = None,
        causal: bool = False,
        mask: Any = None,
        window: int | None = None,
        kv_len: int | None = None,
        record: Any = True,
        keep_values: int = 256,
    ) -> None:
        self.a = a = Attention.of(Q, K, V, Br, Bc, scale, causal, mask, window, kv_len)
        self.Tr, self.Tc, self.heads, self.key_tiles = a.Tr, a.Tc, a.heads, a.key_tiles
        self.output = np.full(a.Q.shape, np.nan, dtype="float32")
        self.logsumexp = np.full(a.Q.shape[:3], np.nan, dtype="float32")
        self.r = r = Recorder("flash_attention_2", self.params, keep=record, keep_values=keep_values)
        self.on_chip(r)
        self.in_hbm(r)
        r.launch(self.kernel, self.grid, (THREADS, 1, 1))

    @property
    def grid(self) -> tuple[int, ...]:
        """Blocks in x, y and z."""
        return self.Tr, self.a.Q.shape[1], self.a.Q.shape[0]

    @property
    def params(self) -> dict[str, Param]:
        """Sizes and options that the recording carries."""
        return self.a.params

    def on_chip(self, r: Recorder) -> None:
        """What each block has for itself: everything in shared memory, where any thread may touch any element."""
        a = self.a
        self.Qi, self.Oi = r.slot("Qi", (a.Br, a.d), tensor="Q"), r.slot("Oi", (a.Br, a.d), tensor="O")
        self.Kj, self.Vj = r.slot("Kj", (a.Bc, a.d), tensor="K"), r.slot("Vj", (a.Bc, a.d), tensor="V")
        self.Sij = r.slot("Sij", (a.Br, a.Bc), tensor="S")
        self.mi, self.li = r.slot("mi", (a.Br,), tensor="m"), r.slot("li", (a.Br,), tensor="l")

    def in_hbm(self, r: Recorder) -> None:
        """The tensors of every head, cut in tiles."""
        a = self.a

        def suffix(head: tuple[int, ...]) -> str:
            return f"[{head[0]},{head[1]}]" if len(a.heads) > 1 else ""

        self.Q: dict[tuple[int, ...], Tensor] = {}
        self.K, self.V, self.O, self.L = dict(self.Q), dict(self.Q), dict(self.Q), dict(self.Q)
        T: dict[str, Any] = {"dtype": self.dtype}
        for head in a.heads:
            self.Q[head] = r.tensor("Q", a.Q[head], tile=a.Br, head=head, suffix=suffix(head), **T)
        for head in np.ndindex(a.K.shape[:2]):
            self.K[head] = r.tensor("K", a.K[head], tile=a.Bc, head=head, suffix=suffix(head), used=a.keys, **T)
            self.V[head] = r.tensor("V", a.V[head], tile=a.Bc, head=head, suffix=suffix(head), used=a.keys, **T)
        for head in a.heads:
            self.O[head] = r.tensor("O", shape=(a.Nq, a.d), tile=a.Br, head=head, suffix=suffix(head), **T)
            self.L[head] = r.tensor("L", shape=(a.Nq,), tile=a.Br, head=head, suffix=suffix(head))

    def begin(self, i: int, head: int = 0, batch: int = 0) -> None:
        """A CUDA block of its own begins: it owns row block i of one head."""
        if (batch, head) not in self.heads or not 0 <= i < self.Tr:
            raise IndexError(
                f"block i={i}, head={head}, batch={batch}: i runs to {self.Tr - 1}, heads are {self.heads}"
            )
        self.i, self.head, self.kv = i, (batch, head), (batch, self.a.kv_head(head))
        self.rows = min(self.a.Br, self.a.Nq - i * self.a.Br)
        self.r.block(i, head, batch)

    def rows_of(self, slot: Slot) -> np.ndarray:
        """What a slot holds for the rows of this block: fewer than Br in the last one."""
        return self.r.read(slot)[: self.rows]

    @action("load Qi")
    def load_q(self) -> None:
        """Qi arrives and stays; the three carries start at O = 0, m = -inf, l = 0."""
        r = self.r
        r.move(self.Q[self.head][self.i], self.Qi)
        r.init(self.Oi, 0.0, rows=self.rows)
        r.init(self.mi, -np.inf, rows=self.rows)
        r.init(self.li, 0.0, rows=self.rows)
        r.barrier("block", "Qi and the carries are complete before any thread reads them")

    @action("load Kj, Vj", part="load Kj")
    def load_k(self, j: int) -> None:
        """Kj replaces the last key tile: what was computed from that one is stale now."""
        r = self.r
        r.stale(self.Sij, self.mi, self.li)
        r.move(self.K[self.kv][j], self.Kj)

    @action("load Kj, Vj", part="load Vj")
    def load_v(self, j: int) -> None:
        """Vj arrives in the same transfer."""
        self.r.move(self.V[self.kv][j], self.Vj)
        self.r.barrier("block", "Kj and Vj are complete before any thread reads them")

    @action("fill Sij")
    def scores(self, j: int) -> None:
        """Sij = scale · Qi Kjᵀ, with -inf where a query does not see a key."""
        r, a = self.r, self.a
        row0, col0 = self.i * a.Br, j * a.Bc
        keys = slice(a.keys - col0)  # fewer than Bc in the last tile
        s = a.scale * (self.rows_of(self.Qi) @ r.read(self.Kj)[keys].T)
        if a.causal:
            s = causal_mask(s, row0 + a.keys - a.Nq, col0, a.window)
        if a.mask is not None:
            seen = a.mask[self.head][row0 : row0 + s.shape[0], col0 : col0 + s.shape[1]]
            s = np.where(seen, s, np.float32(-np.inf))
        r.change(self.Sij, s, reads=(self.Qi, self.Kj), cells=True)
        r.barrier("block", "Sij is complete before one thread reads a whole row of it")

    @action("update mi, li and Oi", part="softmax")
    def softmax(self, j: int) -> None:
        """The new maximum and denominator; Sij becomes probabilities, and Oi is scaled to the new maximum."""
        r = self.r
        m, l, p, correction = softmax_step(self.rows_of(self.mi), self.rows_of(self.li), self.rows_of(self.Sij))
        r.change(self.mi, m, reads=(self.mi, self.Sij))
        r.change(self.Sij, p, reads=(self.Sij, self.mi), role="rescale")
        r.change(self.li, l, reads=(self.li, self.mi, self.Sij))
        r.change(self.Oi, self.rows_of(self.Oi) * correction[:, None], reads=(self.Oi, self.mi), role="rescale")
        r.barrier("block", "probabilities and the scaled Oi are written before all threads use them")

    @action("update mi, li and Oi", part="accumulate")
    def accumulate(self, j: int) -> None:
        """Oi = Oi + Pij Vj, unnormalised."""
        r = self.r
        keys = slice(self.a.keys - j * self.a.Bc)  # fewer than Bc in the last tile
        added = self.rows_of(self.Sij)[:, keys] @ r.read(self.Vj)[keys]
        r.change(self.Oi, self.rows_of(self.Oi) + added, reads=(self.Oi, self.Sij, self.Vj))
        r.barrier("block", "Sij and Vj have been read by every thread before the next tile overwrites them")

    @action("write Oi, Li")
    def store_o(self) -> None:
        """The one division, and the only writes to HBM: O = Oi / li and L = mi + ln li."""
        r, i = self.r, self.i
        O, L = normalise(self.rows_of(self.Oi), self.rows_of(self.mi), self.rows_of(self.li))
        r.move(
            [self.Oi, self.li],
            [self.O[self.head][i], self.L[self.head][i]],
            values=[O, L],
            reads=[(self.Oi, self.li), (self.mi, self.li)],
        )
        rows = slice(i * self.a.Br, i * self.a.Br + self.rows)
        self.output[self.head][rows], self.logsumexp[self.head][rows] = O, L

    def elements(self, slot: Slot, array: np.ndarray, first: int) -> np.ndarray:
        """The part of a kernel's array that a slot names: of K and V the rows that are used."""
        part = super().elements(slot, array, first)
        return part[: max(self.a.keys - first, 0)] if slot.tensor in ("K", "V") else part

    def bound(self) -> float:
        """What rounding may change: see :meth:`Attention.bound`."""
        return self.a.bound()

    def run(self) -> Run:
        """O and L of the blocks that have run (NaN where none has), and the recording."""
        O, L = self.output.reshape(self.a.given), self.logsumexp.reshape(self.a.given[:-1])
        recording = None if self.r.keeps_nothing else self.r.recording((self.source(), kernel_source(self.kernel)))
        return Run(O, L, recording, "numpy", self.params)


def launch_kernel(a: Attention, device: str = "gpu") -> tuple[np.ndarray, np.ndarray]:
    """O and L from ``kernels/flash_attention_2.cu``, launched on outputs filled with NaN.

    Raises:
        LaunchError: the sizes do not fit this GPU; says which would. KernelError: it failed while it ran.
    """
    from flashviz import cuda

    O, L = np.empty(a.Q.shape, np.float32), np.empty(a.Q.shape[:3], np.float32)
    kernel = cuda.Kernel(KERNEL, template={"Br": a.Br, "Bc": a.Bc, "D": a.d}, block=THREADS)
    heads = (a.Q.shape[1], a.K.shape[1])
    arguments = (a.Q, a.K, a.V, O, L, a.Nq, a.Nk, a.scale, a.causal, *heads, *a.limits)
    cuda.launch(kernel, arguments, device=device, poison=True)
    return O.reshape(a.given), L.reshape(a.given[:-1])


def flash_attention_2(
    Q: Any,
    K: Any,
    V: Any,
    *,
    Br: int = 4,
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
    """Softmax(Q Kᵀ · scale) V in one pass over K and V for each row block (arXiv 2307.08691, Algorithm 1).

    Args:
        Q: queries [N, d], [H, N, d] or [B, H, N, d]; any real dtype, computed in float32.
        K, V: keys and values, shaped like Q with their own N and, for grouped heads, H (a divisor of Q's).
        Br, Bc: rows of a Q tile and of a K, V tile; any N, the last tiles may be shorter.
        scale: factor of the scores, 1/√d when not given.
        causal: query i sees keys j ≤ i + Nk - Nq; a row that sees no key gets O = 0 and L = -inf.
        mask: boolean, broadcast to [B, H, Nq, Nk], True where a query sees a key; not on a GPU.
        window: with causal, query i sees only the last ``window`` of these keys, its own among them.
        kv_len: how many rows of K and V are used, 0 to Nk, all when not given; it stands for Nk in ``causal``, and
            what lies behind it (NaN, say) is never touched.
        rung: of the ladder of kernels (:data:`flashviz.ladder.PREFILL`): 0 is this one; 1, 2, ``"tf32"``, 3, 4 and 5 keep scores and
            carries in registers, and from 3 on take 16-bit inputs. They take no mask, window or kv_len. Rung 6 is
            :func:`flash_attention_3`.
        dtype: what the rungs from 3 on round Q, K and V to: ``"float16"``, which is the default, or ``"bfloat16"``.
        device: ``"numpy"``, ``"cpu"``, ``"gpu"``, or ``"auto"``: a GPU where one is usable, else NumPy.
        record: True, False, or the blocks to keep (tile numbers or (batch, head, tile) triples).
        keep_values: tiles up to this many elements keep their numbers in the recording.

    Returns:
        A :class:`Run` with O (shaped like Q), L (without the last axis), the recording and the device.

    Raises:
        ValueError, TypeError: naming the argument, its value and what it must be.
        DeviceError: the device asked for is not usable here; says why and what to install.

    >>> x = np.eye(4, dtype="float32")
    >>> flash_attention_2(x, x, x, Br=2, Bc=2, device="numpy")
    Run(O (4, 4), L (4,), device='numpy', 19 steps)
    """
    options: dict[str, Any] = {"Br": Br, "Bc": Bc, "scale": scale, "causal": causal}
    limits = {"mask": mask, "window": window, "kv_len": kv_len}
    if rung != 0 or dtype is not None:
        from flashviz.programs import flash_attention_2_rungs as rungs

        rungs.check_options(rung, dtype, limits)
        if rung != 0:
            options |= {"rung": rung, "dtype": dtype, "keep_values": keep_values}
            return rungs.run_rung(Q, K, V, **options, device=device, record=record)
    options |= limits
    where = choose_device(device, "a mask is given, which the kernel does not take" if mask is not None else "")
    fa = FlashAttention2(Q, K, V, **options, record=record, keep_values=keep_values)
    return run_on(where, fa, forward, lambda: launch_kernel(fa.a, where), record, fa.a.params)
