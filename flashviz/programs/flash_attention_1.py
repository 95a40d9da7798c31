"""FlashAttention, forward (Dao et al., arXiv 2205.14135, Algorithm 1), as a tile program.

One CUDA block owns one head and runs both loops: K, V tiles outside, Q tiles inside. Each K, V tile is loaded once and
visits every row block, so the rows' carries cannot stay: the *normalised* output Oi, the running maximum mi and the
denominator li come from HBM before a tile of scores and go back after it, once for every K, V tile.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flashviz.programs.attention import Attention
from flashviz.programs.base import Program, Run, action
from flashviz.programs.device import choose_device, kernel_source
from flashviz.programs.replay import run_on
from flashviz.recorder import Recorder, Tensor
from flashviz.slots import Slot
from flashviz.tiles import causal_mask, softmax_step

KERNEL = "flash_attention_1"
THREADS = 256  # of the kernel's blocks


def forward(fa: FlashAttention1) -> None:
    """The loops. Only the heads are the grid: a block that took some K, V tiles would race with the others on O."""
    for batch, head in fa.heads:
        fa.begin(head, batch)
        fa.init_o()
        for j in fa.key_tiles():
            fa.load_k(j)
            fa.load_v(j)
            for i in fa.row_blocks(j):
                fa.load_q(j, i)
                fa.load_o(j, i)
                fa.scores(j, i)
                fa.softmax(j, i)
                fa.accumulate(j, i)
                fa.store_o(j, i)


class FlashAttention1(Program):
    """The actions of FlashAttention-1 on real tiles.

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

    loop = ("KV loop", "j", "Q loop", "i")

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
        self.Tr, self.Tc, self.heads = a.Tr, a.Tc, a.heads
        self.output = np.full(a.Q.shape, np.nan, dtype="float32")
        self.maximum = np.full(a.Q.shape[:3], np.nan, dtype="float32")
        self.denominator = np.full(a.Q.shape[:3], np.nan, dtype="float32")
        self.r = r = Recorder(KERNEL, a.params, keep=record, keep_values=keep_values)
        self.Qi, self.Oi = r.slot("Qi", (a.Br, a.d), tensor="Q"), r.slot("Oi", (a.Br, a.d), tensor="O")
        self.Kj, self.Vj = r.slot("Kj", (a.Bc, a.d), tensor="K"), r.slot("Vj", (a.Bc, a.d), tensor="V")
        self.Sij = r.slot("Sij", (a.Br, a.Bc), tensor="S")
        self.mi, self.li = r.slot("mi", (a.Br,), tensor="m"), r.slot("li", (a.Br,), tensor="l")

        def suffix(head: tuple[int, ...]) -> str:
            return f"[{head[0]},{head[1]}]" if len(a.heads) > 1 else ""

        self.Q: dict[tuple[int, ...], Tensor] = {}
        self.K, self.V, self.O, self.m, self.l = (dict(self.Q) for _ in range(5))
        for head in a.heads:
            self.Q[head] = r.tensor("Q", a.Q[head], tile=a.Br, head=head, suffix=suffix(head))
        for head in np.ndindex(a.K.shape[:2]):
            self.K[head] = r.tensor("K", a.K[head], tile=a.Bc, head=head, suffix=suffix(head), used=a.keys)
            self.V[head] = r.tensor("V", a.V[head], tile=a.Bc, head=head, suffix=suffix(head), used=a.keys)
        for head in a.heads:
            self.O[head] = r.tensor("O", shape=(a.Nq, a.d), tile=a.Br, head=head, suffix=suffix(head))
            self.m[head] = r.tensor("m", shape=(a.Nq,), tile=a.Br, head=head, suffix=suffix(head))
            self.l[head] = r.tensor("l", shape=(a.Nq,), tile=a.Br, head=head, suffix=suffix(head))
        r.launch(KERNEL, (a.Q.shape[1], a.Q.shape[0]), (THREADS, 1, 1))

    def begin(self, head: int = 0, batch: int = 0) -> None:
        """A CUDA block of its own begins: it owns one head, all its rows and all its keys."""
        if (batch, head) not in self.heads:
            raise IndexError(f"block head={head}, batch={batch}: heads are {self.heads}")
        self.head, self.kv = (batch, head), (batch, self.a.kv_head(head))
        self.r.block(0, head, batch)

    def key_tiles(self) -> range:
        """The key tiles that some row block sees: all that are used, or those from the first row's window on."""
        return range(self.a.key_tiles(0).start, self.Tc)

    def row_blocks(self, j: int) -> range:
        """The row blocks that key tile j visits: all, or those with a row that sees one of its keys."""
        seeing = [i for i in range(self.Tr) if j in self.a.key_tiles(i)]
        return range(seeing[0], seeing[-1] + 1) if seeing else range(0)

    def rows_of(self, slot: Slot, i: int) -> np.ndarray:
        """What a slot holds for the rows of row block i, fewer than Br in the last one; NaN where an earlier tile ended."""
        held, rows = self.r.read(slot), min(self.a.Br, self.a.Nq - i * self.a.Br)
        missing = np.full((max(rows - len(held), 0), *held.shape[1:]), np.nan, held.dtype)
        return np.concatenate([held[:rows], missing])

    @action("set O = 0, m = -inf, l = 0 in HBM")
    def init_o(self) -> None:
        """Before the first tile O, m and l start in HBM, where the loop will look for them: Nq · (d + 2) writes."""
        r = self.r
        for i in range(self.Tr):
            r.init(self.O[self.head][i], 0.0)
            r.init(self.m[self.head][i], -np.inf)
            r.init(self.l[self.head][i], 0.0)
        self.output[self.head], self.maximum[self.head], self.denominator[self.head] = 0.0, -np.inf, 0.0

    @action("load Kj, Vj", part="load Kj")
    def load_k(self, j: int) -> None:
        """Kj replaces the last key tile: the scores that were computed from that one are stale now."""
        self.r.stale(self.Sij)
        self.r.move(self.K[self.kv][j], self.Kj)

    @action("load Kj, Vj", part="load Vj")
    def load_v(self, j: int) -> None:
        """Vj arrives in the same transfer."""
        self.r.move(self.V[self.kv][j], self.Vj)

    @action("load Qi, Oi, mi, li", part="load Qi")
    def load_q(self, j: int, i: int) -> None:
        """Qi replaces the last row block: its scores are stale now."""
        self.r.stale(self.Sij)
        self.r.move(self.Q[self.head][i], self.Qi)

    @action("load Qi, Oi, mi, li", part="load Oi, mi, li")
    def load_o(self, j: int, i: int) -> None:
        """What the earlier K, V tiles made of these rows comes back from HBM, in the same transfer."""
        r, head = self.r, self.head
        r.move([self.O[head][i], self.m[head][i], self.l[head][i]], [self.Oi, self.mi, self.li])
        r.barrier("block", "all tiles are complete before any thread reads them")

    @action("fill Sij")
    def scores(self, j: int, i: int) -> None:
        """Sij = scale · Qi Kjᵀ, with -inf where a query does not see a key."""
        r, a = self.r, self.a
        row0, col0 = i * a.Br, j * a.Bc
        keys = slice(a.keys - col0)  # fewer than Bc in the last tile
        s = a.scale * (self.rows_of(self.Qi, i) @ r.read(self.Kj)[keys].T)
        if a.causal:
            s = causal_mask(s, row0 + a.keys - a.Nq, col0, a.window)
        if a.mask is not None:
            seen = a.mask[self.head][row0 : row0 + s.shape[0], col0 : col0 + s.shape[1]]
            s = np.where(seen, s, np.float32(-np.inf))
        r.change(self.Sij, s, reads=(self.Qi, self.Kj), cells=True)
        r.barrier("block", "Sij is complete before one thread reads a whole row of it")

    @action("update mi, li and Oi", part="softmax")
    def softmax(self, j: int, i: int) -> None:
        """The new maximum and denominator; Sij becomes probabilities, and Oi is scaled from the old pair to the new."""
        r = self.r
        old = self.rows_of(self.li, i)
        m, l, p, correction = softmax_step(self.rows_of(self.mi, i), old, self.rows_of(self.Sij, i))
        kept = divided(old * correction, l)  # how much of the new output the earlier tiles make up, 0 … 1
        r.change(self.mi, m, reads=(self.mi, self.Sij))
        r.change(self.Sij, p, reads=(self.Sij, self.mi), role="rescale")
        scaled = self.rows_of(self.Oi, i) * kept[:, None]
        r.change(self.Oi, scaled, reads=(self.Oi, self.mi, self.li, self.Sij), role="rescale")
        r.change(self.li, l, reads=(self.li, self.mi, self.Sij))
        r.barrier("block", "probabilities, li and the scaled Oi are written before all threads use them")

    @action("update mi, li and Oi", part="accumulate")
    def accumulate(self, j: int, i: int) -> None:
        """Oi = Oi + Pij Vj / li: normalised, so what goes to HBM is attention over the keys seen so far."""
        r = self.r
        keys = slice(self.a.keys - j * self.a.Bc)  # fewer than Bc in the last tile
        added = self.rows_of(self.Sij, i)[:, keys] @ r.read(self.Vj)[keys]
        added = divided(added, self.rows_of(self.li, i)[:, None])
        r.change(self.Oi, self.rows_of(self.Oi, i) + added, reads=(self.Oi, self.Sij, self.Vj, self.li))
        r.barrier("block", "Sij, li and Vj have been read by every thread before the next tile overwrites them")

    @action("write Oi, mi, li")
    def store_o(self, j: int, i: int) -> None:
        """Back to HBM: the slots are needed for the next row block."""
        r, a, head = self.r, self.a, self.head
        held = [self.rows_of(slot, i) for slot in (self.Oi, self.mi, self.li)]
        r.move([self.Oi, self.mi, self.li], [self.O[head][i], self.m[head][i], self.l[head][i]], values=held)
        rows = slice(i * a.Br, min((i + 1) * a.Br, a.Nq))
        self.output[head][rows], self.maximum[head][rows], self.denominator[head][rows] = held

    def elements(self, slot: Slot, array: np.ndarray, first: int) -> np.ndarray:
        """The part of a kernel's array that a slot names: of K and V the rows that are used."""
        part = super().elements(slot, array, first)
        return part[: max(self.a.keys - first, 0)] if slot.tensor in ("K", "V") else part

    def bound(self) -> float:
        """What rounding may change: see :meth:`Attention.bound`."""
        return self.a.bound()

    def run(self) -> Run:
        """O and L = m + ln l, as HBM holds O, m and l (NaN where no block has run), and the recording."""
        O, L = self.output.reshape(self.a.given), logsumexp(self.maximum, self.denominator).reshape(self.a.given[:-1])
        recording = None if self.r.keeps_nothing else self.r.recording((self.source(), kernel_source(KERNEL)))
        return Run(O, L, recording, "numpy", self.a.params)


def divided(x: np.ndarray, l: np.ndarray) -> np.ndarray:
    """x / l; a row that has seen no key (l = 0) keeps its 0."""
    return x / np.where(l == 0, np.float32(1), l)


def logsumexp(m: np.ndarray, l: np.ndarray) -> np.ndarray:
    """L = m + ln l of each row; -inf where a row saw no key (m = -inf, l = 0)."""
    return m + np.log(np.where(l == 0, np.float32(1), l))


def launch_kernel(a: Attention, device: str = "gpu") -> tuple[np.ndarray, np.ndarray]:
    """O and L from ``kernels/flash_attention_1.cu``, launched on outputs filled with NaN.

    The kernel leaves O, m and l in HBM, as Algorithm 1 does; L = m + ln l is taken here, after the launch.

    Raises:
        LaunchError: the sizes do not fit this GPU; says which would. KernelError: it failed while it ran.
    """
    from flashviz import cuda

    O = np.empty(a.Q.shape, np.float32)
    m, l = np.empty(a.Q.shape[:3], np.float32), np.empty(a.Q.shape[:3], np.float32)
    kernel = cuda.Kernel(KERNEL, template={"Br": a.Br, "Bc": a.Bc, "D": a.d}, block=THREADS)
    heads = (a.Q.shape[1], a.K.shape[1])
    arguments = (a.Q, a.K, a.V, O, m, l, a.Nq, a.Nk, a.scale, a.causal, *heads, *a.limits)
    cuda.launch(kernel, arguments, device=device, poison=True)
    return O.reshape(a.given), logsumexp(m, l).reshape(a.given[:-1])


def flash_attention_1(
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
    device: str = "auto",
    record: Any = True,
    keep_values: int = 256,
) -> Run:
    """Softmax(Q Kᵀ · scale) V with K, V loaded once and O, m, l in HBM between tiles (arXiv 2205.14135, Algorithm 1).

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
        device: ``"numpy"``, ``"cpu"``, ``"gpu"``, or ``"auto"``: a GPU where one is usable, else NumPy.
        record: True, False, or the blocks to keep ((batch, head, 0) triples: a head is one block).
        keep_values: tiles up to this many elements keep their numbers in the recording.

    Returns:
        A :class:`Run` with O (shaped like Q), L = m + ln l (without the last axis), the recording and the device.

    Raises:
        ValueError, TypeError: naming the argument, its value and what it must be.
        DeviceError: the device asked for is not usable here; says why and what to install.

    >>> x = np.eye(4, dtype="float32")
    >>> flash_attention_1(x, x, x, Br=2, Bc=2, device="numpy")
    Run(O (4, 4), L (4,), device='numpy', 21 steps)
    """
    where = choose_device(device, "a mask is given, which the kernel does not take" if mask is not None else "")
    options: dict[str, Any] = {"Br": Br, "Bc": Bc, "scale": scale, "causal": causal, "mask": mask}
    options |= {"window": window, "kv_len": kv_len}
    fa = FlashAttention1(Q, K, V, **options, record=record, keep_values=keep_values)
    return run_on(where, fa, forward, lambda: launch_kernel(fa.a, where), record, fa.a.params)
