"""FlashAttention-2 on rungs 4 and 5 of the ladder: copies that run ahead.

What rungs 1 to 3 keep in registers stays there. Here shared memory has room for two tiles of K and of V, and while one is used the
next is on its way: a load only *starts* the copies, and whoever needs the tile waits for it. Between
the two nobody may look.
"""

from __future__ import annotations

from flashviz.programs.base import action
from flashviz.programs.flash_attention_2_registers import FlashAttention2Registers

STAGES = 2
"""Tiles of K and of V that there is room for."""


def forward_ahead(fa: FlashAttention2Ahead) -> None:
    """The loops of rungs 4 and 5: while tile j is used, tile j + 1 is on its way."""
    for batch, head in fa.heads:
        for i in range(fa.Tr):
            fa.begin(i, head, batch)
            fa.load_q()
            tiles = fa.key_tiles(i)
            for j in tiles[:1]:
                fa.load_k(j)
                fa.load_v(j)
            for j in tiles:
                if j + 1 in tiles:
                    fa.load_k(j + 1)
                    fa.load_v(j + 1)
                fa.scores(j)
                fa.softmax(j)
                fa.accumulate(j)
            fa.store_o()


class FlashAttention2Ahead(FlashAttention2Registers):
    """The actions of rungs 4 and 5: a load only *starts* the copies; whoever needs the tile waits for it."""

    stages = STAGES

    @action("start loading Qi")
    def load_q(self) -> None:
        """Qi is on its way, with the first tiles of K and V; the carries start in registers."""
        self.r.move(self.Q[self.head][self.i], self.Qi, group="Qi")
        self.start()

    @action("start loading Kj, Vj", part="start loading Kj")
    def load_k(self, j: int) -> None:
        """The copy of Kj begins, into the buffer that the tile before the last one was in."""
        self.r.move(self.K[self.kv][j], self.Ks[j % STAGES], group=f"tile {j}", stage=j % STAGES)

    @action("start loading Kj, Vj", part="start loading Vj")
    def load_v(self, j: int) -> None:
        """The copy of Vj begins in the same transfer."""
        self.r.move(self.V[self.kv][j], self.Vs[j % STAGES], group=f"tile {j}", stage=j % STAGES)

    @action("wait for Kj, Vj and fill Sij")
    def scores(self, j: int) -> None:
        """Tile j has arrived, or is waited for; then the scores, while the next tile is on its way."""
        r = self.r
        r.wait("Qi")
        r.wait(f"tile {j}")
        r.barrier("block", "every thread's copies of tile j are there, and all warps are done with tile j - 1")
        r.stale(self.mi, self.li)
        self.fill(j, self.Ks[j % STAGES])

    @action("update mi, li and Oi", part="softmax")
    def softmax(self, j: int) -> None:
        """As on the rungs before."""
        self.update()

    @action("update mi, li and Oi", part="accumulate")
    def accumulate(self, j: int) -> None:
        """Oi = Oi + Pij Vj, unnormalised."""
        self.add(j, self.Sij, self.Vs[j % STAGES])

    @action("write Oi, Li")
    def store_o(self) -> None:
        """As on the rungs before."""
        self.store()


class FlashAttention2Tuned(FlashAttention2Ahead):
    """The actions of rung 5: those of rung 4, but that O leaves through shared memory.

    One thing the kernel does otherwise is not shown: its mi lags behind the running maximum, and moves only when a score is 2^8 above
    it. What is relative to it, li and Oi, then differs by the same factor from what is shown here; O and L do not.
    """

    load_q = FlashAttention2Ahead.load_q
    load_k = FlashAttention2Ahead.load_k
    load_v = FlashAttention2Ahead.load_v
    scores = FlashAttention2Ahead.scores
    softmax = FlashAttention2Ahead.softmax
    accumulate = FlashAttention2Ahead.accumulate

    @action("write Oi, Li, by way of Qi")
    def store_o(self) -> None:
        """The division, then each warp lays its rows of O over those of Qi, which it alone reads, and writes them in long pieces."""
        r = self.r
        r.wait("Qi")
        O, L = self.divided()
        r.move(self.Oi, self.Qi, values=O, reads=(self.Oi, self.li))
        r.barrier("warp", "the warp's rows of O are complete before its lanes read what others wrote")
        r.move(
            [self.Qi, self.li],
            [self.O[self.head][self.i], self.L[self.head][self.i]],
            [None, L],
            [(self.Qi,), (self.mi, self.li)],
        )
        self.keep(O, L)
