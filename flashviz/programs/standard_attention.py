"""Standard attention (arXiv 2205.14135, Algorithm 0), as a tile program of three kernels: S and P live in HBM.

The first kernel writes the scores S = scale · Q Kᵀ, the second reads them and writes P = softmax(S), the third reads P
and writes O = P V. Each has one CUDA block for every row block. It is the measure for the algorithms that keep no S.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flashviz.programs.attention import Attention
from flashviz.programs.base import Program, Run, action
from flashviz.programs.device import choose_device, kernel_source
from flashviz.programs.replay import run_kernel
from flashviz.recorder import Recorder, Tensor
from flashviz.slots import Block, Slot
from flashviz.tiles import causal_mask

KERNEL = "standard_attention"
KERNELS = ("standard_scores", "standard_softmax", "standard_values")
THREADS = {"standard_scores": 256, "standard_softmax": 128, "standard_values": 256}
SOFTMAX_BYTES = 65_536
"""Shared memory that a block of the softmax kernel asks for at most: where Br whole rows of S take more, it has fewer."""


def forward(sa: StandardAttention) -> None:
    """The loops of the three kernels. A launch ends before the next one starts, and S and P wait in HBM between them."""
    sa.launch("standard_scores")
    for batch, head in sa.heads:
        for i in range(sa.Tr):
            sa.begin(i, head, batch)
            sa.load_q()
            for j in range(sa.Tc):
                sa.load_k(j)
                sa.scores(j)
                sa.store_s(j)
    sa.launch("standard_softmax")
    for batch, head in sa.heads:
        for i in range(sa.Tr):
            sa.begin(i, head, batch)
            sa.load_s()
            sa.softmax()
            sa.store_p()
    sa.launch("standard_values")
    for batch, head in sa.heads:
        for i in range(sa.Tr):
            sa.begin(i, head, batch)
            sa.init_o()
            for j in range(sa.Tc):
                sa.load_p(j)
                sa.load_v(j)
                sa.accumulate(j)
            sa.store_o()


class StandardAttention(Program):
    """The actions of standard attention on real tiles.

    Args:
        Q, K, V: [N, d], [H, N, d] or [B, H, N, d], real numbers, computed in float32.
        Br, Bc: rows of a Q tile and of a K, V tile.
        scale: 1/√d when not given; 0 is honoured.
        causal: query i sees keys j ≤ i + Nk - Nq (aligned bottom-right).
        mask: boolean, broadcast to [B, H, Nq, Nk], True where a query sees a key.
        record: True, False, or the blocks to keep.
        keep_values: tiles up to this many elements keep their numbers.
    """

    loop = ("KV loop", "j")

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
        record: Any = True,
        keep_values: int = 256,
    ) -> None:
        self.a = a = Attention.of(Q, K, V, Br, Bc, scale, causal, mask)
        self.Tr, self.Tc, self.heads = a.Tr, a.Tc, a.heads
        self.output = np.full(a.Q.shape, np.nan, dtype="float32")
        self.logsumexp = np.full(a.Q.shape[:3], np.nan, dtype="float32")
        self.kernel = ""
        self.r = r = Recorder(KERNEL, a.params, keep=record, keep_values=keep_values)
        self.Qi, self.Kj = r.slot("Qi", (a.Br, a.d), tensor="Q"), r.slot("Kj", (a.Bc, a.d), tensor="K")
        self.Sij = r.slot("Sij", (a.Br, a.Bc), tensor="S")
        columns = [min(a.Bc, a.Nk - j * a.Bc) for j in range(a.Tc)]
        self.Si = [r.slot(f"Si{j}", (a.Br, n), tensor="S") for j, n in enumerate(columns)]
        self.Pij, self.Vj = r.slot("Pij", (a.Br, a.Bc), tensor="P"), r.slot("Vj", (a.Bc, a.d), tensor="V")
        self.Oi = r.slot("Oi", (a.Br, a.d), tensor="O")

        def suffix(head: tuple[int, ...]) -> str:
            return f"[{head[0]},{head[1]}]" if len(a.heads) > 1 else ""

        self.Q: dict[tuple[int, ...], Tensor] = {}
        self.K, self.V, self.O = dict(self.Q), dict(self.Q), dict(self.Q)
        self.S: dict[tuple[int, ...], list[list[Slot]]] = {}
        self.P = dict(self.S)
        for head in a.heads:
            self.Q[head] = r.tensor("Q", a.Q[head], tile=a.Br, head=head, suffix=suffix(head))
        for head in np.ndindex(a.K.shape[:2]):
            self.K[head] = r.tensor("K", a.K[head], tile=a.Bc, head=head, suffix=suffix(head))
        rows = [min(a.Br, a.Nq - i * a.Br) for i in range(a.Tr)]
        for head in a.heads:  # S and P are cut both ways: tile (i, j) is the slot "Si,j"
            for name, cut in (("S", self.S), ("P", self.P)):
                cut[head] = [
                    [
                        r.slot(f"{name}{i},{j}{suffix(head)}", (m, n), memory="hbm", scope="grid", tensor=name)
                        for j, n in enumerate(columns)
                    ]
                    for i, m in enumerate(rows)
                ]
        for head in np.ndindex(a.K.shape[:2]):
            self.V[head] = r.tensor("V", a.V[head], tile=a.Bc, head=head, suffix=suffix(head))
        for head in a.heads:
            self.O[head] = r.tensor("O", shape=(a.Nq, a.d), tile=a.Br, head=head, suffix=suffix(head))

    def launch(self, kernel: str) -> None:
        """Launch one of the three kernels: a grid of one block for every row block, head and batch."""
        if kernel not in KERNELS:
            raise ValueError(f"kernel {kernel!r} is none of {', '.join(KERNELS)}")
        self.kernel = kernel
        self.r.launch(kernel, (self.a.Tr, self.a.Q.shape[1], self.a.Q.shape[0]), (THREADS[kernel], 1, 1))

    def begin(self, i: int, head: int = 0, batch: int = 0) -> None:
        """A CUDA block of the kernel that was launched begins: it owns row block i of one head."""
        if (batch, head) not in self.heads or not 0 <= i < self.Tr:
            raise IndexError(
                f"block i={i}, head={head}, batch={batch}: i runs to {self.Tr - 1}, heads are {self.heads}"
            )
        self.i, self.head, self.kv = i, (batch, head), (batch, self.a.kv_head(head))
        self.rows = min(self.a.Br, self.a.Nq - i * self.a.Br)
        self.r.block(i, head, batch, name=f"{self.kernel.removeprefix('standard_')} block {i}")

    def rows_of(self, slot: Slot) -> np.ndarray:
        """What a slot holds for the rows of this block: fewer than Br in the last one."""
        return self.r.read(slot)[: self.rows]

    # -- S = scale · Q Kᵀ

    @action("load Qi")
    def load_q(self) -> None:
        """Qi arrives and stays."""
        self.r.move(self.Q[self.head][self.i], self.Qi)

    @action("load Kj")
    def load_k(self, j: int) -> None:
        """Kj replaces the last key tile: its scores are stale now."""
        self.r.stale(self.Sij)
        self.r.move(self.K[self.kv][j], self.Kj)
        self.r.barrier("block", "Qi and Kj are complete before any thread reads them")

    @action("fill Sij")
    def scores(self, j: int) -> None:
        """Sij = scale · Qi Kjᵀ, with -inf where a query does not see a key."""
        r, a = self.r, self.a
        row0, col0 = self.i * a.Br, j * a.Bc
        keys = slice(a.Nk - col0)  # fewer than Bc in the last tile
        s = a.scale * (self.rows_of(self.Qi) @ r.read(self.Kj)[keys].T)
        if a.causal:
            s = causal_mask(s, row0 + a.Nk - a.Nq, col0)
        if a.mask is not None:
            seen = a.mask[self.head][row0 : row0 + s.shape[0], col0 : col0 + s.shape[1]]
            s = np.where(seen, s, np.float32(-np.inf))
        r.change(self.Sij, s, reads=(self.Qi, self.Kj), cells=True)
        r.barrier("block", "Kj has been read by every thread before the next tile overwrites it")

    @action("write Sij")
    def store_s(self, j: int) -> None:
        """Every score goes to HBM."""
        tile = self.S[self.head][self.i][j]
        self.r.move(self.Sij, tile, values=self.rows_of(self.Sij)[:, : tile.shape[1]])

    # -- P = softmax(S)

    @action("load Si")
    def load_s(self) -> None:
        """Whole rows of scores come back: a softmax needs the row's maximum and its sum."""
        self.r.move(self.S[self.head][self.i], self.Si)

    @action("Si = softmax(Si)")
    def softmax(self) -> None:
        """Scores become probabilities, in place; a row that sees no key gets 0."""
        r = self.r
        s = np.concatenate([self.rows_of(slot) for slot in self.Si], axis=1)
        m = s.max(axis=1)
        p = np.exp(s - np.where(np.isneginf(m), np.float32(0), m)[:, None])
        l = p.sum(axis=1)
        safe = np.where(l == 0, np.float32(1), l)
        for j, slot in enumerate(self.Si):
            tile = p[:, j * self.a.Bc : (j + 1) * self.a.Bc] / safe[:, None]
            r.change(slot, tile, reads=self.Si, cells=True)
        self.logsumexp[self.head][self.i * self.a.Br :][: self.rows] = m + np.log(safe)  # for L; no kernel needs it

    @action("write Pi")
    def store_p(self) -> None:
        """The probabilities go to HBM."""
        self.r.move(self.Si, self.P[self.head][self.i], values=[self.rows_of(slot) for slot in self.Si])

    # -- O = P V

    @action("set Oi = 0")
    def init_o(self) -> None:
        """The sum over the key tiles starts."""
        self.r.init(self.Oi, 0.0, rows=self.rows)

    @action("load Pij, Vj", part="load Pij")
    def load_p(self, j: int) -> None:
        """The probabilities of one tile come back."""
        self.r.move(self.P[self.head][self.i][j], self.Pij)

    @action("load Pij, Vj", part="load Vj")
    def load_v(self, j: int) -> None:
        """Vj arrives in the same transfer."""
        self.r.move(self.V[self.kv][j], self.Vj)
        self.r.barrier("block", "Pij and Vj are complete before any thread reads them")

    @action("update Oi")
    def accumulate(self, j: int) -> None:
        """Oi = Oi + Pij Vj: no maximum, no denominator, the rows are done already."""
        r = self.r
        keys = slice(self.a.Nk - j * self.a.Bc)  # fewer than Bc in the last tile
        added = self.rows_of(self.Pij)[:, keys] @ r.read(self.Vj)[keys]
        r.change(self.Oi, self.rows_of(self.Oi) + added, reads=(self.Oi, self.Pij, self.Vj))
        r.barrier("block", "Pij and Vj have been read by every thread before the next tiles overwrite them")

    @action("write Oi")
    def store_o(self) -> None:
        """The output, once."""
        self.r.move(self.Oi, self.O[self.head][self.i], values=self.rows_of(self.Oi))
        self.output[self.head][self.i * self.a.Br :][: self.rows] = self.rows_of(self.Oi)

    def enter(self, kernel: str, block: Block) -> None:
        """A block of one of the three kernels begins, as a trace names it."""
        if kernel != self.kernel:
            self.launch(kernel)
        super().enter(kernel, block)

    def elements(self, slot: Slot, array: np.ndarray, first: int) -> np.ndarray:
        """The part of a kernel's array that a slot names: S and P are cut both ways."""
        cut = {"S": self.S, "P": self.P}.get(slot.tensor)
        if cut is None:
            return super().elements(slot, array, first)
        head, i, j = next((h, i, r.index(slot)) for h in cut for i, r in enumerate(cut[h]) if slot in r)
        (m, n), Br, Bc = slot.shape, self.a.Br, self.a.Bc
        part: np.ndarray = array[head][i * Br : i * Br + m, j * Bc : j * Bc + n]
        return part

    def bound(self) -> float:
        """What rounding may change: see :meth:`Attention.bound`."""
        return self.a.bound()

    def run(self) -> Run:
        """O and L of the blocks that have run (NaN where none has), and the recording."""
        O, L = self.output.reshape(self.a.given), self.logsumexp.reshape(self.a.given[:-1])
        recording = None if self.r.keeps_nothing else self.r.recording((self.source(), kernel_source(KERNEL)))
        return Run(O, L, recording, "numpy", self.a.params)


def softmax_template(Br: int, Nk: int) -> dict[str, int]:
    """The softmax kernel's template values: keys that a row has room for, and Br rows, or as many as fit.

    >>> softmax_template(32, 200), softmax_template(32, 4096)
    ({'Br': 32, 'Keys': 256}, {'Br': 4, 'Keys': 4096})
    """
    keys = 1 << (Nk - 1).bit_length()
    return {"Br": min(Br, max(SOFTMAX_BYTES // (4 * keys), 1)), "Keys": keys}


def launch_kernels(a: Attention, device: str = "gpu") -> tuple[np.ndarray, np.ndarray]:
    """O and L from ``kernels/standard_attention.cu``, three launches on outputs filled with NaN.

    Raises:
        LaunchError: the sizes do not fit this GPU; says which would. KernelError: one failed while it ran.
    """
    from flashviz import cuda

    (B, Hq, Nq, _), Hkv, Nk = a.Q.shape, a.K.shape[1], a.Nk
    S, P = np.empty((B, Hq, Nq, Nk), np.float32), np.empty((B, Hq, Nq, Nk), np.float32)
    O = np.empty(a.Q.shape, np.float32)
    tiles = {"Br": a.Br, "Bc": a.Bc, "D": a.d}
    arguments: dict[str, tuple[Any, ...]] = {
        "standard_scores": (a.Q, a.K, S, Nq, Nk, a.scale, a.causal, Hq, Hkv),
        "standard_softmax": (S, P, Nq, Nk, Hq),
        "standard_values": (P, a.V, O, Nq, Nk, Hq, Hkv),
    }
    for name in KERNELS:
        template = softmax_template(a.Br, Nk) if name == "standard_softmax" else tiles
        kernel = cuda.Kernel(KERNEL, template=template, function=name, block=THREADS[name])
        cuda.launch(kernel, arguments[name], device=device, poison=True)
    m = S.max(axis=-1)
    base = np.where(np.isneginf(m), np.float32(0), m)
    l = np.exp(S - base[..., None]).sum(axis=-1)
    L = m + np.log(np.where(l == 0, np.float32(1), l))
    return O.reshape(a.given), L.reshape(a.given[:-1])


def standard_attention(
    Q: Any,
    K: Any,
    V: Any,
    *,
    Br: int = 4,
    Bc: int = 4,
    scale: float | None = None,
    causal: bool = False,
    mask: Any = None,
    device: str = "auto",
    record: Any = True,
    keep_values: int = 256,
) -> Run:
    """Softmax(Q Kᵀ · scale) V in three kernels, with S and P in HBM between them (arXiv 2205.14135, Algorithm 0).

    Args:
        Q: queries [N, d], [H, N, d] or [B, H, N, d]; any real dtype, computed in float32.
        K, V: keys and values, shaped like Q with their own N and, for grouped heads, H (a divisor of Q's).
        Br, Bc: rows of a Q tile and of a K, V tile; any N, the last tiles may be shorter.
        scale: factor of the scores, 1/√d when not given.
        causal: query i sees keys j ≤ i + Nk - Nq; a row that sees no key gets O = 0 and L = -inf. No tile is skipped.
        mask: boolean, broadcast to [B, H, Nq, Nk], True where a query sees a key; not on a GPU.
        device: ``"numpy"``, ``"cpu"``, ``"gpu"``, or ``"auto"``: a GPU where one is usable, else NumPy.
        record: True, False, or the blocks to keep (tile numbers or (batch, head, tile) triples).
        keep_values: tiles up to this many elements keep their numbers in the recording.

    Returns:
        A :class:`Run` with O (shaped like Q), L (without the last axis, taken from S on the way out), the recording
        and the device.

    Raises:
        ValueError, TypeError: naming the argument, its value and what it must be; also where a kernel is to be recorded
            and a block of its softmax cannot hold Br whole rows of S.
        DeviceError: the device asked for is not usable here; says why and what to install.

    >>> x = np.eye(4, dtype="float32")
    >>> standard_attention(x, x, x, Br=2, Bc=2, device="numpy")
    Run(O (4, 4), L (4,), device='numpy', 39 steps)
    """
    where = choose_device(device, "a mask is given, which the kernels do not take" if mask is not None else "")
    options: dict[str, Any] = {"Br": Br, "Bc": Bc, "scale": scale, "causal": causal, "mask": mask}
    sa = StandardAttention(Q, K, V, **options, record=record, keep_values=keep_values)
    if where == "numpy":
        forward(sa)
        return sa.run()
    rows = softmax_template(sa.a.Br, sa.a.Nk)["Br"]
    if record is not False and rows < sa.a.Br:
        raise ValueError(
            f"Br={sa.a.Br}: with Nk={sa.a.Nk} a block of the softmax kernel holds {rows} whole rows of S, so its trace tells of "
            f"other blocks than the program's; Br={rows} can be recorded, or give record=False"
        )
    if record is False:
        return Run(*launch_kernels(sa.a, where), None, where, sa.a.params)
    (O, L), recording = run_kernel(sa, forward, lambda: launch_kernels(sa.a, where), where)
    return Run(O, L, recording, where, sa.a.params)
