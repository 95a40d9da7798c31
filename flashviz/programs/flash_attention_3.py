"""FlashAttention-3, forward (Shah and others, arXiv 2407.08608), without its 8-bit part, as a tile program with roles.

A block has a *producer*, which only asks the copy engine for tiles, and *consumers*, warpgroups that compute, each for rows of its
own. They meet at barriers alone: each slot of the ring of K, V tiles is *full* when its copy has landed and *empty* when
every consumer is done with it. And a block stays: it walks from row block to row block, and the scores of the next are started
before the output of the last is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flashviz import ladder
from flashviz.programs.base import Run, action
from flashviz.programs.device import kernel_source
from flashviz.programs.flash_attention_2_registers import bound
from flashviz.programs.flash_attention_3_block import KERNEL, Flash3Block
from flashviz.programs.flash_attention_3_launch import launch_kernel, multiprocessors_here, where_to_run
from flashviz.programs.replay import run_kernel
from flashviz.programs.roles import Act, side_by_side
from flashviz.slots import Slot
from flashviz.tiles import causal_mask, normalise, softmax_step

if TYPE_CHECKING:
    from flashviz.cuda.trace import Action


def forward(fa: FlashAttention3, first: Sequence[str] = ()) -> None:
    """Block after block, its roles side by side; those named in ``first`` go before the others wherever both could go on."""
    for block in range(fa.grid):
        fa.begin(block)
        acts = roles(fa)
        side_by_side(fa, {name: acts[name] for name in dict.fromkeys([*first, *acts])})


def roles(fa: FlashAttention3) -> dict[str, Iterator[Act]]:
    """What each role of the block that has begun performs."""
    return {"producer": producer(fa)} | {f"consumer {w}": consumer(fa, w) for w in fa.consumers}


def one_by_one(fa: FlashAttention3) -> None:
    """The actions without their waits, a role after the other: to count them."""
    for block in range(fa.grid):
        fa.begin(block)
        for acts in roles(fa).values():
            for act, tiles in acts:
                act(*tiles)


def producer(fa: FlashAttention3) -> Iterator[Act]:
    """One thread asks for the tiles, in the order in which the consumers need them. Before each it waits for room."""
    for i, j in fa.walk:
        yield fa.load_k, (i, j)
        if j == 0:
            for w in fa.consumers:
                yield fa.load_q, (w, i)
        yield fa.load_v, (i, j)


def consumer(fa: FlashAttention3, w: int) -> Iterator[Act]:
    """The scores of a tile and the values of the tile before are under way together; its softmax comes between their ends."""
    before: tuple[int, int] | None = None
    owed = False
    for i, j in fa.walk:
        if fa.hidden(w, i, j):
            yield fa.skip, (w, i, j)
            continue
        if j == 0 and owed:
            yield fa.give_back, (w,)
            owed = False
        yield fa.scores, (w, i, j)
        if owed:
            yield fa.give_back, (w,)
            owed = False
        if j == 0 and before:
            yield fa.store_l, (w, before[0])
        yield fa.softmax, (w, i, j)
        if before:
            yield fa.accumulate, (w, *before)
            if j == 0:
                yield fa.store_o, (w, before[0])
                owed = True
        yield fa.probabilities, (w, i, j)
        before = i, j
    assert before is not None  # a block without work is not launched
    yield fa.accumulate, (w, *before)
    yield fa.store_l, (w, before[0])
    yield fa.store_o, (w, before[0])
    yield fa.give_back, (w,)


class FlashAttention3(Flash3Block):
    """The actions of FlashAttention-3 on real tiles.

    ``i`` counts the row blocks of all heads, (batch · Hq + head) · Tr + row block; ``w`` the consumers, from 1. One thing the kernel does
    otherwise is not shown: its mi lags behind the running maximum, as on rung 5 of the ladder; O and L are the same.

    Args:
        Q, K, V: [N, d], [H, N, d] or [B, H, N, d], real numbers, rounded to ``dtype``.
        Br, Bc: rows of a row block, shared out among the consumers, and of a K, V tile.
        stages: slots of the ring, for K and for V, at least 2.
        consumers: 2 or 3, a divisor of Br.
        multiprocessors: as many blocks stay, where there is work for them.
        dtype: ``"float16"`` or ``"bfloat16"``.
        scale: 1/√d when not given; 0 is honoured.
        causal: query i sees keys j ≤ i + Nk - Nq (aligned bottom-right).
        record: True, False, or the blocks to keep.
        keep_values: tiles up to this many elements keep their numbers.
    """

    # -- the producer ------------------------------------------------------------------------------------------------------

    @action("ask for Kj")
    def load_k(self, i: int, j: int) -> None:
        """The copy of Kj begins, into the ring's next slot, once every consumer is done with what is there."""
        self.starts("producer", "load_k", i, j)
        batch, head = self.a.heads[i // self.a.Tr]
        slot, _, full, _ = self.ring(i, j, "Kj")
        self.copy(full, self.K[batch, self.a.kv_head(head)][j], self.Kj[slot], slot)

    @action("ask for Qi")
    def load_q(self, w: int, i: int) -> None:
        """The copy of a consumer's rows of Q begins, into one of two buffers: the O that left by the other may still be there."""
        self.starts("producer", "load_q", w, i)
        head, first, rows = self.rows_of(w, i)
        slot, _, full, _ = self.part(w, i)
        if rows:
            self.copy(full, self.Q[head][first // self.share], slot, self.rows.index(i) % 2)
        else:
            self.arrive(full, "rows before the first query: the copy engine writes zeros")

    @action("ask for Vj")
    def load_v(self, i: int, j: int) -> None:
        """The copy of Vj begins: it is needed later than Kj, and its slot becomes empty later."""
        self.starts("producer", "load_v", i, j)
        batch, head = self.a.heads[i // self.a.Tr]
        slot, _, full, _ = self.ring(i, j, "Vj")
        self.copy(full, self.V[batch, self.a.kv_head(head)][j], self.Vj[slot], slot)

    # -- a consumer --------------------------------------------------------------------------------------------------------

    def held(self, slot: Slot, rows: int) -> np.ndarray:
        """The first rows of what a slot holds, in float32."""
        return self.r.read(slot)[:rows].astype("float32")

    @action("fill Sij")
    def scores(self, w: int, i: int, j: int) -> None:
        """Sij = scale · Qi Kjᵀ on tensor cores, started together with the values of the tile before; then Kj's slot is empty."""
        self.starts(f"consumer {w}", "scores", w, i, j)
        a, (_, first, rows) = self.a, self.rows_of(w, i)
        slot, _, _, empty = self.ring(i, j, "Kj")
        self.pass_turn(w, i, j)
        if rows:
            Qi = self.part(w, i)[0]
            keys = self.held(self.Kj[slot], a.Nk - j * a.Bc)
            s = a.scale * (
                self.held(Qi, rows) @ np.ascontiguousarray(keys.T)
            )  # so small: else BLAS starts threads for it
            s = causal_mask(s, first + a.Nk - a.Nq, j * a.Bc) if a.causal else s
            self.r.change(self.Sij[w], s, reads=(Qi, self.Kj[slot]), cells=True)
        self.arrive(empty, f"consumer {w} reads {self.Kj[slot].name} no more")

    @action("update mi, li")
    def softmax(self, w: int, i: int, j: int) -> None:
        """The new maximum and denominator, and ci, what Oi shrinks by; the product of values is still under way."""
        self.starts(f"consumer {w}", "softmax", w, i, j)
        r, rows = self.r, self.rows_of(w, i)[2]
        S, m, l, c = self.Sij[w], self.mi[w], self.li[w], self.ci[w]
        if not rows:
            return
        if j == 0:
            r.init(m, -np.inf, rows=rows)
            r.init(l, 0.0, rows=rows)
        new_m, new_l, p, correction = softmax_step(*(self.held(x, rows) for x in (m, l, S)))
        if j:
            r.change(c, correction, reads=(m, S))
        r.change(m, new_m, reads=(m, S))
        r.change(S, p, reads=(S, m), role="rescale")
        r.change(l, new_l, reads=(l, c, S) if j else (l, S))

    @action("Oi = ci Oi, round Pij")
    def probabilities(self, w: int, i: int, j: int) -> None:
        """Oi meets the new maximum; Sij rounded is Pij, in registers as the next product wants its left side. And Vj is there."""
        self.starts(f"consumer {w}", "probabilities", w, i, j)
        rows, O = self.rows_of(w, i)[2], self.Oi[w]
        if not rows:
            return
        if j == 0:
            self.r.init(O, 0.0, rows=rows)
        else:
            scaled = self.held(O, rows) * self.held(self.ci[w], rows)[:, None]
            self.r.change(O, scaled, reads=(O, self.ci[w]), role="rescale")
        self.r.change(self.Pij[w], self.held(self.Sij[w], rows), reads=(self.Sij[w],))

    @action("Oi = Oi + Pij Vj")
    def accumulate(self, w: int, i: int, j: int) -> None:
        """The values of a tile, started with the scores of the next one, are in Oi; Vj's slot is empty."""
        self.starts(f"consumer {w}", "accumulate", w, i, j)
        rows, O, P = self.rows_of(w, i)[2], self.Oi[w], self.Pij[w]
        slot, _, _, empty = self.ring(i, j, "Vj")
        if rows:
            v = self.held(self.Vj[slot], self.a.Nk - j * self.a.Bc)
            self.r.change(O, self.held(O, rows) + self.held(P, rows)[:, : len(v)] @ v, reads=(O, P, self.Vj[slot]))
        self.arrive(empty, f"consumer {w} reads {self.Vj[slot].name} no more")

    @action("pass over Kj, Vj")
    def skip(self, w: int, i: int, j: int) -> None:
        """None of this consumer's rows sees the tile: it takes its turn and says that it is done."""
        self.starts(f"consumer {w}", "skip", w, i, j)
        self.pass_turn(w, i, j)
        for name in ("Kj", "Vj"):
            self.arrive(self.ring(i, j, name)[3], f"consumer {w} does not need it")

    @action("write Li")
    def store_l(self, w: int, i: int) -> None:
        """All scores of these rows are in: L = mi + ln li, and ci is what Oi will be divided by."""
        self.starts(f"consumer {w}", "store_l", w, i)
        head, first, rows = self.rows_of(w, i)
        m, l = self.mi[w], self.li[w]
        if rows:
            c, L = normalise(np.ones((rows, 1), "float32"), self.held(m, rows), self.held(l, rows))
            self.r.move(l, self.L[head][first // self.share], values=L, reads=(m, l))
            self.r.change(self.ci[w], c[:, 0], reads=(l,))
            self.logsumexp[head][first : first + rows] = L

    @action("write Oi by way of Qi")
    def store_o(self, w: int, i: int) -> None:
        """Oi, divided and rounded, goes where these rows' Q was, and the copy engine takes it from there."""
        self.starts(f"consumer {w}", "store_o", w, i)
        head, first, rows = self.rows_of(w, i)
        slot, O, c = self.part(w, i)[0], self.Oi[w], self.ci[w]
        if rows:
            self.r.move(O, slot, values=self.held(O, rows) * self.held(c, rows)[:, None], reads=(O, c))
        self.r.barrier("warpgroup", "all threads' rows of O are there before one asks the copy engine to take them")
        leaving = f"O of i = {i}, consumer {w}"
        self.leaving[w].append(i)
        if rows:
            self.output[head][first : first + rows] = self.held(slot, rows)
            self.copy(leaving, slot, self.O[head][first // self.share])
        else:
            self.arrived[leaving] += 1

    @action("wait until O has left")
    def give_back(self, w: int) -> None:
        """The copy engine has read O out of Qi: Q of other rows may come."""
        self.starts(f"consumer {w}", "give_back", w)
        for i in self.leaving[w]:
            slot, _, _, empty = self.part(w, i)
            if i != self.rows[-1]:
                self.arrive(empty, f"O has left {slot.name}")
        self.leaving[w].clear()

    def arguments(self, action: Action) -> tuple[int, ...]:
        """What a traced action is given: which consumer it is, its role says."""
        number = action.role.removeprefix("consumer ")
        return (int(number), *action.tiles) if number.isdigit() and action.name != "give_back" else action.tiles

    def bound(self) -> float:
        """What rounding may change: P, O are rounded as on rung 3 of the ladder."""
        return bound(self.a, ladder.rung(3), self.dtype)

    def run(self) -> Run:
        """O and L of the blocks that have run (NaN where none has), and the recording."""
        O, L = self.output.reshape(self.a.given), self.logsumexp.reshape(self.a.given[:-1])
        recording = None if self.r.keeps_nothing else self.r.recording((self.source(), kernel_source(KERNEL)))
        return Run(O, L, recording, "numpy", self.params)


def flash_attention_3(
    Q: Any,
    K: Any,
    V: Any,
    *,
    Br: int = 4,
    Bc: int = 4,
    stages: int = 2,
    consumers: int | None = None,
    multiprocessors: int | None = None,
    dtype: str = "float16",
    scale: float | None = None,
    causal: bool = False,
    device: str = "auto",
    record: Any = True,
    keep_values: int = 256,
) -> Run:
    """Softmax(Q Kᵀ · scale) V by a producer and consumers at a ring of tiles (arXiv 2407.08608), in 16-bit floats.

    Args:
        Q: queries [N, d], [H, N, d] or [B, H, N, d]; any real dtype, rounded to ``dtype``.
        K, V: keys and values, shaped like Q with their own N and, for grouped heads, H (a divisor of Q's).
        Br, Bc: rows of a row block, shared out among the consumers, and of a K, V tile. The kernel takes Br = 128 or 192 and Bc = 64
            or 128.
        stages: slots of the ring, for K and for V, at least 2.
        consumers: 2 or 3; when not given 3 for Br = 192 (64 rows each, as in the kernel), else 2.
        multiprocessors: as many blocks stay and share out the row blocks; 1 when not given, and on a GPU always the GPU's own number.
        dtype: ``"float16"`` or ``"bfloat16"``.
        scale: factor of the scores, 1/√d when not given.
        causal: query i sees keys j ≤ i + Nk - Nq; a row that sees no key gets O = 0 and L = -inf.
        device: ``"numpy"``; ``"gpu"``, a Hopper GPU; or ``"auto"``, the GPU where it takes this call, else NumPy.
        record: True, False, or the blocks to keep, as numbers of the blocks that stay.
        keep_values: tiles up to this many elements keep their numbers in the recording.

    Returns:
        A :class:`Run` with O (shaped like Q), L (without the last axis), the recording and the device. Every event of the recording
        says which role did it: ``event.trace.role`` is ``"producer"``, ``"consumer 1"``, ``"consumer 2"`` …

    Raises:
        ValueError, TypeError: naming the argument, its value and what it must be.
        DeviceError: the device asked for is not usable here; says why and what runs instead.

    >>> x = np.eye(8, 4, dtype="float32")
    >>> run = flash_attention_3(x, x, x, device="numpy")
    >>> run
    Run(O (8, 4), L (8,), device='numpy', 58 steps)
    >>> [step.label for step in run.recording.steps[2:5]]
    ['block 0 · i = 0 · j = 0 · ask for Kj', 'block 0 · w = 1 · i = 0 · ask for Qi', 'block 0 · w = 2 · i = 0 · ask for Qi']
    """
    shares = consumers if consumers is not None else 3 if Br == 192 else 2
    options: dict[str, Any] = {"Br": Br, "Bc": Bc, "stages": stages, "consumers": shares, "dtype": dtype}
    options |= {"scale": scale, "causal": causal, "keep_values": keep_values}
    stay = 1 if multiprocessors is None else multiprocessors
    fa = FlashAttention3(Q, K, V, **options, multiprocessors=stay, record=record)
    where = where_to_run(fa, device)
    if where == "numpy":
        forward(fa)
        return fa.run()
    fa = FlashAttention3(Q, K, V, **options, multiprocessors=multiprocessors_here(), record=record)
    if record is False:
        return Run(*launch_kernel(fa), None, where, fa.params)
    (O, L), recording = run_kernel(fa, one_by_one, lambda: launch_kernel(fa), where)
    return Run(O, L, recording, where, fa.params)
