"""FlashAttention-2 with rotary position embedding fused into its loads, as a tile program.

The program of ``flash_attention_2.py`` (Dao, arXiv 2307.08691, Algorithm 1) with two actions changed: ``load_q`` and
``load_k`` rotate what they load (Su and others, arXiv 2104.09864). Rotated Q and K exist in shared memory alone: what
standard practice writes to HBM and reads back is never there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flashviz import tiles
from flashviz.events import Source
from flashviz.programs.angles import checked_dim, rope_tables
from flashviz.programs.attention import Attention
from flashviz.programs.base import Run, action
from flashviz.programs.device import choose_device, kernel_source
from flashviz.programs.flash_attention_2 import THREADS, FlashAttention2, forward
from flashviz.programs.replay import run_on
from flashviz.recorder import Recorder, Tensor
from flashviz.recording import Param
from flashviz.slots import Slot

KERNEL = "flash_attention_2_rope"


class FlashAttention2Rope(FlashAttention2):
    """The actions of FlashAttention-2 on rotated queries and keys.

    Args:
        Q, K, V: [N, d], [H, N, d] or [B, H, N, d], real numbers, computed in float32. Q and K are not rotated yet.
        Br, Bc: rows of a Q tile and of a K, V tile.
        scale: 1/√d when not given; 0 is honoured.
        causal: query i sees keys j ≤ i + Nk - Nq (aligned bottom-right).
        base, rotary_dim: as in :func:`flashviz.rope`, rotate-half form.
        record: True, False, or the blocks to keep.
        keep_values: tiles up to this many elements keep their numbers.
    """

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
        base: float = 10000.0,
        rotary_dim: int | None = None,
        record: Any = True,
        keep_values: int = 256,
    ) -> None:
        self.a = a = Attention.of(Q, K, V, Br, Bc, scale, causal)
        self.Tr, self.Tc, self.heads, self.key_tiles = a.Tr, a.Tc, a.heads, a.key_tiles
        dim = checked_dim(a.d, rotary_dim, "Q")
        self.pairs = dim // 2
        # Keys stand at 0 … Nk - 1 and queries at the last Nq of these positions, as the causal mask has it.
        self.tables = (*rope_tables(np.arange(a.Nq) + a.Nk - a.Nq, dim, base), *rope_tables(np.arange(a.Nk), dim, base))
        self.base = float(base)
        self.output = np.full(a.Q.shape, np.nan, dtype="float32")
        self.logsumexp = np.full(a.Q.shape[:3], np.nan, dtype="float32")
        self.r = r = Recorder(KERNEL, self.params, keep=record, keep_values=keep_values)
        self.on_chip(r)
        angles = (max(a.Br, a.Bc), self.pairs)
        self.c = r.slot("c", angles, memory="register", scope="thread", tensor="cos")
        self.s = r.slot("s", angles, memory="register", scope="thread", tensor="sin")
        self._tensors(r, a)
        r.launch(KERNEL, (a.Tr, a.Q.shape[1], a.Q.shape[0]), (THREADS, 1, 1))

    @property
    def params(self) -> dict[str, Param]:
        """Sizes and options that the recording carries."""
        return {**self.a.params, "rotary_dim": 2 * self.pairs, "base": self.base}

    def _tensors(self, r: Recorder, a: Attention) -> None:
        def suffix(head: tuple[int, ...]) -> str:
            return f"[{head[0]},{head[1]}]" if len(a.heads) > 1 else ""

        def tensor(name: str, tile: int, data: np.ndarray | None, shape: tuple[int, ...], heads: Any) -> Any:
            made: dict[tuple[int, ...], Tensor] = {}
            for head in heads:
                given = None if data is None else data[head]
                made[head] = r.tensor(name, given, tile=tile, shape=shape, head=head, suffix=suffix(head))
            return made

        rows, keys, kv = (a.Nq, a.d), (a.Nk, a.d), list(np.ndindex(a.K.shape[:2]))
        self.Q, self.K = tensor("Q", a.Br, a.Q, rows, a.heads), tensor("K", a.Bc, a.K, keys, kv)
        self.cq, self.sq = (r.tensor(n, t, tile=a.Br) for n, t in zip(("cq", "sq"), self.tables[:2], strict=True))
        self.ck, self.sk = (r.tensor(n, t, tile=a.Bc) for n, t in zip(("ck", "sk"), self.tables[2:], strict=True))
        self.V = tensor("V", a.Bc, a.V, keys, kv)
        self.O, self.L = tensor("O", a.Br, None, rows, a.heads), tensor("L", a.Br, None, rows[:1], a.heads)

    @action("load Qi and rotate it")
    def load_q(self) -> None:
        """Qi arrives rotated by the angles of its rows and stays; the carries start at O = 0, m = -inf, l = 0."""
        r, i = self.r, self.i
        Q, cos, sin = self.Q[self.head][i], self.cq[i], self.sq[i]
        turned = tiles.rope(r.read(Q), r.read(cos), r.read(sin))
        r.move([Q, cos, sin], [self.Qi, self.c, self.s], [turned, None, None], [(Q, cos, sin), (cos,), (sin,)])
        r.init(self.Oi, 0.0, rows=self.rows)
        r.init(self.mi, -np.inf, rows=self.rows)
        r.init(self.li, 0.0, rows=self.rows)
        r.barrier("block", "Qi and the carries are complete before any thread reads them")

    @action("load Kj and rotate it, load Vj", part="load Kj and rotate it")
    def load_k(self, j: int) -> None:
        """Kj arrives rotated, once for every row block; what was computed from the last key tile is stale now."""
        r = self.r
        r.stale(self.Sij, self.mi, self.li)
        K, cos, sin = self.K[self.kv][j], self.ck[j], self.sk[j]
        turned = tiles.rope(r.read(K), r.read(cos), r.read(sin))
        r.move([K, cos, sin], [self.Kj, self.c, self.s], [turned, None, None], [(K, cos, sin), (cos,), (sin,)])

    @action("load Kj and rotate it, load Vj", part="load Vj")
    def load_v(self, j: int) -> None:
        """Vj arrives as it is in the same transfer: values are not rotated."""
        self.r.move(self.V[self.kv][j], self.Vj)
        self.r.barrier("block", "Kj and Vj are complete before any thread reads them")

    # What follows is FlashAttention-2 and does not know of the rotation.
    scores = FlashAttention2.scores
    softmax = FlashAttention2.softmax
    accumulate = FlashAttention2.accumulate
    store_o = FlashAttention2.store_o

    @classmethod
    def source(cls) -> Source:
        """This program's source with the lines of the actions that it changes; the others are FlashAttention-2's."""
        made = super().source()
        own = [line for line in made.lines if getattr(cls, line[0]).__module__ == cls.__module__]
        return Source(made.language, made.name, made.text, tuple(own))

    def elements(self, slot: Slot, array: np.ndarray, first: int) -> np.ndarray:
        """The part of a kernel's array that a slot names; the tables have no heads."""
        tables = ("cq", "sq", "ck", "sk")
        return super().elements(slot, array[None, None] if slot.tensor in tables else array, first)

    def run(self) -> Run:
        """O and L of the blocks that have run (NaN where none has), and the recording."""
        O, L = self.output.reshape(self.a.given), self.logsumexp.reshape(self.a.given[:-1])
        recording = None if self.r.keeps_nothing else self.r.recording((self.source(), kernel_source(KERNEL)))
        return Run(O, L, recording, "numpy", self.params)


def launch_kernel(fa: FlashAttention2Rope, device: str = "gpu") -> tuple[np.ndarray, np.ndarray]:
    """O and L from ``kernels/flash_attention_2_rope.cu``, launched on outputs filled with NaN.

    Raises:
        LaunchError: the sizes do not fit this GPU; says which would. KernelError: it failed while it ran.
    """
    from flashviz import cuda

    a = fa.a
    O, L = np.empty(a.Q.shape, np.float32), np.empty(a.Q.shape[:3], np.float32)
    template = {"Br": a.Br, "Bc": a.Bc, "D": a.d, "Pairs": fa.pairs}
    kernel = cuda.Kernel(KERNEL, template=template, block=THREADS)
    numbers = (a.Nq, a.Nk, a.scale, a.causal, a.Q.shape[1], a.K.shape[1])
    cuda.launch(kernel, (a.Q, a.K, a.V, *fa.tables, O, L, *numbers), device=device, poison=True)
    return O.reshape(a.given), L.reshape(a.given[:-1])


def flash_attention_2_rope(
    Q: Any,
    K: Any,
    V: Any,
    *,
    Br: int = 4,
    Bc: int = 4,
    scale: float | None = None,
    causal: bool = False,
    base: float = 10000.0,
    rotary_dim: int | None = None,
    device: str = "auto",
    record: Any = True,
    keep_values: int = 256,
) -> Run:
    """Softmax(rope(Q) rope(K)ᵀ · scale) V in one pass, Q and K rotated while they are loaded (arXiv 2307.08691, 2104.09864).

    Keys stand at positions 0 … Nk - 1 and queries at the last Nq of these, so that one query decodes the last token.

    Args:
        Q: queries [N, d], [H, N, d] or [B, H, N, d], not rotated; any real dtype, computed in float32.
        K, V: keys (not rotated) and values, shaped like Q with their own N and, for grouped heads, H (a divisor of Q's).
        Br, Bc: rows of a Q tile and of a K, V tile; any N, the last tiles may be shorter.
        scale: factor of the scores, 1/√d when not given.
        causal: query i sees keys j ≤ i + Nk - Nq; a row that sees no key gets O = 0 and L = -inf.
        base, rotary_dim: as in :func:`flashviz.rope`: base of the frequencies, and how many elements of a row are rotated.
        device: ``"numpy"``, ``"cpu"``, ``"gpu"``, or ``"auto"``: a GPU where one is usable, else NumPy.
        record: True, False, or the blocks to keep (tile numbers or (batch, head, tile) triples).
        keep_values: tiles up to this many elements keep their numbers in the recording.

    Returns:
        A :class:`Run` with O (shaped like Q), L (without the last axis), the recording and the device.

    Raises:
        ValueError, TypeError: naming the argument, its value and what it must be.
        DeviceError: the device asked for is not usable here; says why and what to install.

    >>> import flashviz as fv
    >>> x = np.eye(4, dtype="float32")
    >>> turned = fv.rope(x, device="numpy").O
    >>> first = fv.flash_attention_2(turned, turned, x, Br=2, Bc=2, device="numpy")
    >>> bool((flash_attention_2_rope(x, x, x, Br=2, Bc=2, device="numpy").O == first.O).all())
    True
    """
    where = choose_device(device)
    options: dict[str, Any] = {"Br": Br, "Bc": Bc, "scale": scale, "causal": causal, "base": base}
    fa = FlashAttention2Rope(Q, K, V, **options, rotary_dim=rotary_dim, record=record, keep_values=keep_values)
    return run_on(where, fa, forward, lambda: launch_kernel(fa, where), record, fa.params)
