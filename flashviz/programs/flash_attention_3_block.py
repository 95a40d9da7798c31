"""A thread block of FlashAttention-3: its slots, the row blocks that it walks over, and the barriers where its roles meet.

Requirements: nothing here computes; ``flash_attention_3.py`` has the actions. The walk is that of ``kernels/include/walk.cuh``, the
barriers are those of ``kernels/flash_attention_3.cu``, each phase of each by a name of its own.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from flashviz.events import Trace
from flashviz.programs.attention import Attention, as_tile_array, positive
from flashviz.programs.base import Program
from flashviz.programs.flash_attention_2_registers import DTYPES
from flashviz.recorder import Recorder, Tensor
from flashviz.recording import Param
from flashviz.slots import Slot, as_dtype

KERNEL = "flash_attention_3"


class Flash3Block(Program):
    """What a block of FlashAttention-3 has and has to do. The arguments are those of :class:`FlashAttention3`, which adds the actions."""

    loop = ("consumer", "w", "row loop", "i", "KV loop", "j")

    def __init__(
        self,
        Q: Any,
        K: Any,
        V: Any,
        *,
        Br: int = 4,
        Bc: int = 4,
        stages: int = 2,
        consumers: int = 2,
        multiprocessors: int = 1,
        dtype: str = "float16",
        scale: float | None = None,
        causal: bool = False,
        record: Any = True,
        keep_values: int = 256,
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"dtype={dtype!r} is none of {', '.join(DTYPES)}")
        q, k, v = (as_dtype(as_tile_array(name, x), dtype) for name, x in zip("QKV", (Q, K, V), strict=True))
        self.a = a = Attention.of(q, k, v, Br, Bc, scale, causal)
        if consumers not in (2, 3) or Br % consumers:
            raise ValueError(
                f"consumers={consumers!r} for Br={Br}: 2 or 3 warpgroups share the rows of a row block out evenly"
            )
        if positive("stages", stages) < 2:
            raise ValueError(
                "stages=1: a tile of V is used until the next one is there, so the ring has at least 2 slots"
            )
        self.stages, self.dtype, self.share = int(stages), dtype, Br // consumers
        self.consumers = range(1, consumers + 1)
        row_blocks = len(a.heads) * a.Tr
        self.grid = min(positive("multiprocessors", multiprocessors), -(-row_blocks // 2) if a.causal else row_blocks)
        sizes: dict[str, Param] = {"stages": self.stages, "consumers": consumers, "blocks": self.grid}
        self.params: dict[str, Param] = {**a.params, "dtype": dtype, **sizes}
        self.output = np.full(a.Q.shape, np.nan, dtype="float32")
        self.logsumexp = np.full(a.Q.shape[:3], np.nan, dtype="float32")
        self.r = r = Recorder(KERNEL, self.params, keep=record, keep_values=keep_values)
        self.on_chip(r)
        self.in_hbm(r)
        r.launch(KERNEL, (self.grid,), (128 * (consumers + 1),))

    def on_chip(self, r: Recorder) -> None:
        """The ring and two buffers of Q for each consumer in shared memory; what a consumer computes in its registers."""
        a, T, rows = self.a, self.dtype, self.share
        self.Qi = {(w, n): r.slot(f"Qi {w}[{n}]", (rows, a.d), T, tensor="Q") for w in self.consumers for n in (0, 1)}
        self.Kj = [r.slot(f"Kj[{n}]", (a.Bc, a.d), T, tensor="K") for n in range(self.stages)]
        self.Vj = [r.slot(f"Vj[{n}]", (a.Bc, a.d), T, tensor="V") for n in range(self.stages)]

        def own(name: str, tensor: str, shape: tuple[int, ...], dtype: str = "float32") -> dict[int, Slot]:
            at: dict[str, Any] = {"memory": "register", "scope": "warp", "tensor": tensor}
            return {w: r.slot(f"{name} {w}", shape, dtype, **at) for w in self.consumers}

        self.Sij, self.Pij = own("Sij", "S", (rows, a.Bc)), own("Pij", "P", (rows, a.Bc), T)
        self.mi, self.li, self.ci = (own(f"{x}i", x, (rows,)) for x in "mlc")
        self.Oi = own("Oi", "O", (rows, a.d))

    def in_hbm(self, r: Recorder) -> None:
        """The tensors of every head; those of rows cut as the consumers share them out."""
        a = self.a

        def cut(
            name: str, data: np.ndarray | None, heads: tuple[int, int], tile: int, *, dtype: str = ""
        ) -> dict[Any, Tensor]:
            def suffix(at: tuple[int, ...]) -> str:
                return f"[{at[0]},{at[1]}]" if len(a.heads) > 1 else ""

            shape = (a.Nq, a.d) if name == "O" else (a.Nq,)
            kind: dict[str, Any] = {"tile": tile, "dtype": dtype or self.dtype}
            return {
                at: r.tensor(name, None if data is None else data[at], shape=shape, head=at, suffix=suffix(at), **kind)
                for at in np.ndindex(heads)
            }

        queries, keys = (a.Q.shape[0], a.Q.shape[1]), (a.K.shape[0], a.K.shape[1])
        self.Q, self.K, self.V = (
            cut("Q", a.Q, queries, self.share),
            cut("K", a.K, keys, a.Bc),
            cut("V", a.V, keys, a.Bc),
        )
        self.O, self.L = cut("O", None, queries, self.share), cut("L", None, queries, self.share, dtype="float32")

    # -- what a block has to do --------------------------------------------------------------------------------------------

    def begin(self, block: int) -> None:
        """A CUDA block begins, with the row blocks that it will walk over: causal ones in pairs of equal work, the longer first."""
        if not 0 <= block < self.grid:
            raise IndexError(f"block {block}: there are {self.grid}")
        turns = self.pairs() if self.a.causal else [(i,) for i in range(len(self.a.heads) * self.a.Tr)]
        self.rows = [i for turn in turns[block :: self.grid] for i in turn]
        self.walk = [(i, j) for i in self.rows for j in range(self.tiles(i))]
        self.number = {at: n for n, at in enumerate(self.walk)}
        self.arrived: Counter[str] = Counter()
        self.leaving: dict[int, list[int]] = {w: [] for w in self.consumers}
        if self.r.trace is not None and self.r.trace.start < 0:  # the last block's last role
            self.r.trace = None
        self.r.block(block)

    def pairs(self) -> list[tuple[int, ...]]:
        """A head's last row block with its first, and so on; the one in the middle, of an odd number, with that of the next head."""
        Tr, heads, found = self.a.Tr, len(self.a.heads), []
        for two in range(0, heads, 2):
            both = [head * Tr for head in (two, two + 1) if head < heads]
            found += [tuple(first + Tr // 2 for first in both)] if Tr % 2 else []
            found += [(first + Tr - 1 - i, first + i) for first in both for i in range(Tr // 2)]
        return found

    def first_row(self, i: int) -> int:
        """Row blocks end with the last consumer's share of rows: the first one, with the fewest causal tiles, may begin before row 0."""
        shares = -(-self.a.Nq // self.share)
        return (shares - (self.a.Tr - i % self.a.Tr) * len(self.consumers)) * self.share

    def seen_before(self, row: int) -> int:
        """How many keys the rows before ``row`` of a head see."""
        return min(self.a.Nk, row + self.a.Nk - self.a.Nq) if self.a.causal else self.a.Nk

    def tiles(self, i: int) -> int:
        """Tiles of row block i: at least one, all masked if need be, so that rows that see no key are written like any others."""
        return max(1, -(-self.seen_before(self.first_row(i) + self.a.Br) // self.a.Bc))

    def hidden(self, w: int, i: int, j: int) -> bool:
        """Whether a consumer skips a tile that none of its rows sees: only where the ring has room for it between those in use."""
        a = self.a
        room = a.causal and -(-(a.Br - self.share) // a.Bc) + 2 <= self.stages
        return room and j > 0 and j * a.Bc >= self.seen_before(self.first_row(i) + self.share * w)

    def rows_of(self, w: int, i: int) -> tuple[tuple[int, int], int, int]:
        """Head, first row and number of rows of consumer w in row block i; none before the first query."""
        first = self.first_row(i) + (w - 1) * self.share
        return self.a.heads[i // self.a.Tr], first, min(self.a.Nq - first, self.share) if first >= 0 else 0

    # -- barriers ----------------------------------------------------------------------------------------------------------

    def ring(self, i: int, j: int, name: str = "") -> tuple[int, int, str, str]:
        """Slot of a tile in the ring, the phase that its barriers are in, and what full and empty are called."""
        if (i, j) not in self.number:
            raise IndexError(f"tile j={j} of row block i={i}: this block walks over {self.walk}")
        phase, slot = divmod(self.number[i, j], self.stages)
        return slot, phase, f"{name}[{slot}] full, phase {phase}", f"{name}[{slot}] empty, phase {phase}"

    def part(self, w: int, i: int) -> tuple[Slot, int, str, str]:
        """Consumer w's part of Q of row block i, in one of two buffers: its slot, phase, full and empty."""
        if i not in self.rows:
            raise IndexError(f"row block i={i}: this block walks over {self.rows}")
        phase, buffer = divmod(self.rows.index(i), 2)
        slot = self.Qi[w, buffer]
        return slot, phase, f"{slot.name} full, phase {phase}", f"{slot.name} empty, phase {phase}"

    def last(self, w: int, end: int | None = None) -> tuple[int, int] | None:
        """The last tile that consumer w does not skip, of the whole walk or of its first ``end`` tiles."""
        back = range((len(self.walk) if end is None else end) - 1, -1, -1)
        return next((self.walk[n] for n in back if not self.hidden(w, *self.walk[n])), None)

    def turn(self, w: int, i: int, j: int) -> str:
        """The consumers take turns at starting products, tile by tile."""
        return f"turn {self.number[i, j]} of consumer {w}"

    def waits(self, action: str, *tiles: int) -> list[str]:
        """What an action waits for before it begins."""
        w, i, j = (*(0,) * (3 - len(tiles)), *tiles)
        if action in ("load_k", "load_v"):
            slot, phase, *_ = self.ring(i, j)
            return [f"{action[-1].upper()}j[{slot}] empty, phase {phase - 1}"] if phase else []
        if action == "load_q":
            slot_q, phase, *_ = self.part(i, j)
            return [f"{slot_q.name} empty, phase {phase - 1}"] if phase else []
        if action == "give_back":
            return [f"O of i = {left}, consumer {j}" for left in self.leaving[j]]
        if action == "accumulate":  # started with the next tile's scores; the last one by itself
            return [self.ring(i, j, "Vj")[2]] if (i, j) == self.last(w) else []
        if action not in ("scores", "skip"):
            return []
        asked = [self.part(w, i)[2]] if action == "scores" and j == 0 else []
        asked.append(self.ring(i, j, "Kj")[2])
        if action == "skip":
            asked.append(self.ring(i, j, "Vj")[2])
        if (w, self.number[i, j]) != (1, 0):
            asked.append(self.turn(w, i, j))
        before = self.last(w, self.number[i, j])
        return [*asked, self.ring(*before, "Vj")[2]] if action == "scores" and before else asked

    def missing(self, action: str, *tiles: int) -> list[str]:
        """What an action waits for that has not come yet: an empty slot of the ring needs every consumer's word."""
        need = {
            name: len(self.consumers) if name[0] in "KV" and "empty" in name else 1
            for name in self.waits(action, *tiles)
        }
        return [name for name, count in need.items() if self.arrived[name] < count]

    def starts(self, role: str, action: str, *tiles: int) -> None:
        """An action of a role begins: what it waits for has come."""
        if self.r.trace is None or self.r.trace.start < 0:
            self.r.trace = Trace(role)
        for name in self.waits(action, *tiles):
            self.r.wait(name)

    def arrive(self, name: str, protects: str = "") -> None:
        """A role has come to a barrier and goes on."""
        self.r.arrive(name, protects)
        self.arrived[name] += 1

    def copy(self, name: str, source: Slot, target: Slot, stage: int = 0) -> None:
        """The copy engine is asked for a tile; the barrier knows when its bytes are there."""
        self.r.move(source, target, group=name, stage=stage)
        self.arrived[name] += 1

    def pass_turn(self, w: int, i: int, j: int) -> None:
        """The next consumer may start its products."""
        last = w == self.consumers[-1]
        n = self.number[i, j] + last
        self.arrive(f"turn {n} of consumer {1 if last else w + 1}")
