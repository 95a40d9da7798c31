"""FlashAttention-2 on rungs 1, 2, "tf32" and 3 of the ladder: scores and carries in registers.

The algorithm is that of ``flash_attention_2.py`` (Dao, arXiv 2307.08691, Algorithm 1). What the rungs change is where things are:
from rung 1 on, Sij, mi, li and Oi are spread over the registers of the warps that own their rows. No other warp sees them, so no
barrier stands between scores, softmax and product. From rung 3 on, Q, K, V and O are 16-bit floats, and the probabilities are
rounded to them before they meet Vj.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flashviz import ladder
from flashviz.programs.attention import Attention, as_tile_array
from flashviz.programs.base import action
from flashviz.programs.flash_attention_2 import FlashAttention2
from flashviz.programs.rung_kernels import grid_of
from flashviz.recorder import Recorder
from flashviz.recording import Param
from flashviz.slots import Slot, as_dtype
from flashviz.tiles import causal_mask, normalise, softmax_step

DTYPES = ("float16", "bfloat16")
EPSILON = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Half the distance between 1 and the next larger number: what rounding to the type changes at most, relative to the number."""


class FlashAttention2Registers(FlashAttention2):
    """The actions of rungs 1, "tf32" and 3, which the others vary: scores and carries in registers.

    Args:
        Q, K, V: [N, d], [H, N, d] or [B, H, N, d], real numbers, rounded to what the rung takes.
        rung: 1, "tf32" or 3 (2: :class:`FlashAttention2Tiled`, 4: :class:`FlashAttention2Ahead`, 5: :class:`FlashAttention2Tuned`).
        dtype: ``"float16"`` or ``"bfloat16"`` for rung 3 and above, float16 when not given; the others take float32.
        Br, Bc: rows of a Q tile and of a K, V tile.
        scale: 1/√d when not given; 0 is honoured.
        causal: query i sees keys j ≤ i + Nk - Nq (aligned bottom-right).
        record: True, False, or the blocks to keep.
        keep_values: tiles up to this many elements keep their numbers.
    """

    stages = 1

    def __init__(
        self,
        Q: Any,
        K: Any,
        V: Any,
        *,
        rung: int | str = 1,
        dtype: str | None = None,
        Br: int = 4,
        Bc: int = 4,
        scale: float | None = None,
        causal: bool = False,
        record: Any = True,
        keep_values: int = 256,
    ) -> None:
        self.rung = ladder.rung_to_run(rung)
        self.kernel, self.dtype = self.rung.kernel, dtype_of(self.rung, dtype)
        given = [as_dtype(as_tile_array(name, x), self.dtype) for name, x in zip("QKV", (Q, K, V), strict=True)]
        options: dict[str, Any] = {"Br": Br, "Bc": Bc, "scale": scale, "causal": causal}
        super().__init__(*given, **options, record=record, keep_values=keep_values)

    @property
    def grid(self) -> tuple[int, ...]:
        """Blocks in x, y and z, as the kernel numbers them."""
        a = self.a
        tiles = {"Nq": a.Nq, "Nk": a.Nk, "Br": a.Br, "Bc": a.Bc, "D": a.d, "Causal": int(a.causal)}
        sizes = {**tiles, "B": a.Q.shape[0], "Hq": a.Q.shape[1], "Hkv": a.K.shape[1]}
        return grid_of(self.kernel, sizes)

    @property
    def params(self) -> dict[str, Param]:
        """Sizes and options that the recording carries."""
        return {**self.a.params, "rung": self.rung.name, "dtype": self.dtype, "stages": self.stages}

    def on_chip(self, r: Recorder) -> None:
        """Tiles of Q, K and V in shared memory, in the inputs' type; what is computed from them in registers, in float32."""
        a, T = self.a, self.dtype
        self.Qi = r.slot("Qi", (a.Br, a.d), T, tensor="Q")
        numbers = [f"[{n}]" for n in range(self.stages)] if self.stages > 1 else [""]
        self.Ks = [r.slot(f"Kj{n}", (a.Bc, a.d), T, tensor="K") for n in numbers]
        self.Vs = [r.slot(f"Vj{n}", (a.Bc, a.d), T, tensor="V") for n in numbers]
        own: dict[str, Any] = {"memory": "register", "scope": "warp"}
        self.Sij = r.slot("Sij", (a.Br, a.Bc), tensor="S", **own)
        self.mi, self.li = r.slot("mi", (a.Br,), tensor="m", **own), r.slot("li", (a.Br,), tensor="l", **own)
        self.Oi = r.slot("Oi", (a.Br, a.d), tensor="O", **own)

    def rows_of(self, slot: Slot) -> np.ndarray:
        """What a slot holds for the rows of this block, in float32: fewer than Br in the last one."""
        return super().rows_of(slot).astype("float32")

    def keys_of(self, slot: Slot, j: int) -> np.ndarray:
        """What a slot holds of key tile j, in float32: fewer rows than Bc in the last one."""
        return self.r.read(slot)[: self.a.keys - j * self.a.Bc].astype("float32")

    @action("load Qi")
    def load_q(self) -> None:
        """Qi arrives and stays; the carries start in registers, at O = 0, m = -inf, l = 0."""
        self.r.move(self.Q[self.head][self.i], self.Qi)
        self.start()
        self.r.barrier("block", "Qi is complete before any warp reads it")

    def start(self) -> None:
        """The carries' first values."""
        self.r.init(self.Oi, 0.0, rows=self.rows)
        self.r.init(self.mi, -np.inf, rows=self.rows)
        self.r.init(self.li, 0.0, rows=self.rows)

    @action("load Kj, Vj", part="load Kj")
    def load_k(self, j: int) -> None:
        """Kj replaces the last key tile: what was computed from that one is stale now."""
        self.r.stale(self.Sij, self.mi, self.li)
        self.r.move(self.K[self.kv][j], self.Ks[0])

    @action("load Kj, Vj", part="load Vj")
    def load_v(self, j: int) -> None:
        """Vj arrives in the same transfer."""
        self.r.move(self.V[self.kv][j], self.Vs[0])
        self.r.barrier("block", "Kj and Vj are complete before any warp reads them")

    @action("fill Sij")
    def scores(self, j: int) -> None:
        """Sij = scale · Qi Kjᵀ, with -inf where a query does not see a key: each warp its rows, in its registers."""
        self.fill(j, self.Ks[0])

    def fill(self, j: int, Kj: Slot) -> None:
        """The scores of tile j, whose keys are in Kj."""
        a = self.a
        s = a.scale * (self.rows_of(self.Qi) @ self.keys_of(Kj, j).T)
        if a.causal:
            s = causal_mask(s, self.i * a.Br + a.keys - a.Nq, j * a.Bc)
        self.r.change(self.Sij, s, reads=(self.Qi, Kj), cells=True)

    @action("update mi, li and Oi", part="softmax")
    def softmax(self, j: int) -> None:
        """The new maximum and denominator; Sij becomes probabilities, rounded to the inputs' type, and Oi shrinks with m.

        Nothing leaves the registers: a row's numbers are in a few lanes of one warp, which exchange them by shuffles.
        """
        self.update()

    def update(self) -> None:
        """One step of the online softmax on what the registers hold."""
        r = self.r
        m, l, p, correction = softmax_step(self.rows_of(self.mi), self.rows_of(self.li), self.rows_of(self.Sij))
        r.change(self.mi, m, reads=(self.mi, self.Sij))
        r.change(self.Sij, as_dtype(p, self.dtype), reads=(self.Sij, self.mi), role="rescale")
        r.change(self.li, l, reads=(self.li, self.mi, self.Sij))
        r.change(self.Oi, self.rows_of(self.Oi) * correction[:, None], reads=(self.Oi, self.mi), role="rescale")

    @action("update mi, li and Oi", part="accumulate")
    def accumulate(self, j: int) -> None:
        """Oi = Oi + Pij Vj, unnormalised."""
        self.add(j, self.Sij, self.Vs[0])
        self.r.barrier("block", "Kj and Vj have been read by every warp before the next tile overwrites them")

    def add(self, j: int, P: Slot, Vj: Slot) -> None:
        """The product of the probabilities with tile j, whose values are in Vj."""
        v = self.keys_of(Vj, j)
        added = self.rows_of(P)[:, : len(v)] @ v
        self.r.change(self.Oi, self.rows_of(self.Oi) + added, reads=(self.Oi, P, Vj))

    @action("write Oi, Li")
    def store_o(self) -> None:
        """The one division, and the only writes to HBM: O = Oi / li in the inputs' type, and L = mi + ln li."""
        self.store()

    def store(self) -> None:
        """O and L leave the registers."""
        O, L = self.divided()
        self.r.move(
            [self.Oi, self.li],
            [self.O[self.head][self.i], self.L[self.head][self.i]],
            values=[O, L],
            reads=[(self.Oi, self.li), (self.mi, self.li)],
        )
        self.keep(O, L)

    def divided(self) -> tuple[np.ndarray, np.ndarray]:
        """O of the block's rows in the inputs' type, and L."""
        O, L = normalise(self.rows_of(self.Oi), self.rows_of(self.mi), self.rows_of(self.li))
        return as_dtype(O, self.dtype), L

    def keep(self, O: np.ndarray, L: np.ndarray) -> None:
        """The block's part of the result."""
        rows = slice(self.i * self.a.Br, self.i * self.a.Br + self.rows)
        self.output[self.head][rows], self.logsumexp[self.head][rows] = O, L

    def bound(self) -> float:
        """What rounding may change: see :func:`bound`."""
        return bound(self.a, self.rung, self.dtype)


class FlashAttention2Tiled(FlashAttention2Registers):
    """The actions of rung 2: a lane computes a rectangle of S and one of O, so it needs probabilities that other lanes have."""

    def on_chip(self, r: Recorder) -> None:
        """As on the other rungs, and one tile more in shared memory: the probabilities."""
        super().on_chip(r)
        self.Pij = r.slot("Pij", (self.a.Br, self.a.Bc), tensor="P")

    load_q = FlashAttention2Registers.load_q

    @action("load Kj, Vj", part="load Kj")
    def load_k(self, j: int) -> None:
        """Kj replaces the last key tile: what was computed from that one is stale now."""
        self.r.stale(self.Sij, self.Pij, self.mi, self.li)
        self.r.move(self.K[self.kv][j], self.Ks[0])

    load_v = FlashAttention2Registers.load_v
    scores = FlashAttention2Registers.scores

    @action("update mi, li and Oi", part="softmax")
    def softmax(self, j: int) -> None:
        """As on the other rungs; then each warp lays the probabilities of its rows into shared memory, for its own lanes."""
        self.update()
        self.r.move(self.Sij, self.Pij)
        self.r.barrier("warp", "the warp's rows of Pij are complete before its lanes read them; no other warp does")

    @action("update mi, li and Oi", part="accumulate")
    def accumulate(self, j: int) -> None:
        """Oi = Oi + Pij Vj, unnormalised."""
        self.add(j, self.Pij, self.Vs[0])
        self.r.barrier("block", "Kj, Vj and Pij have been read by every warp before the next tile overwrites them")

    store_o = FlashAttention2Registers.store_o


def dtype_of(rung: ladder.Rung, dtype: str | None) -> str:
    """The type of Q, K, V and O on a rung.

    Raises:
        ValueError: the rung does not take that one.
    """
    takes = DTYPES if rung.dtype in DTYPES else (rung.dtype,)
    if dtype is not None and dtype not in takes:
        raise ValueError(f"dtype={dtype!r}: {rung.label} ({rung.kernel}) takes {' or '.join(takes)}")
    return dtype or rung.dtype


def bound(a: Attention, rung: ladder.Rung, dtype: str) -> float:
    """How far a rung's O and L may be from the program's, where both round, but not at the same places.

    In float32 see :meth:`Attention.bound`. Three TF32 products leave out what is 2^-22 of a product: eight times that bound. In
    16 bits each side rounds every probability and the output to T, by at most ε of it (2^-11 for float16, 2^-8 for bfloat16):
    4 ε in all, times max |V|; and float16 has no probabilities below 2^-25, of which a row has at most Nk.
    """
    if dtype not in EPSILON:
        return a.bound() * (8 if rung.name == "tf32" else 1)
    most = max(1.0, float(np.abs(a.V).max(initial=0)))
    return a.bound() + (4 * EPSILON[dtype] + a.Nk * 2.0**-25) * most
