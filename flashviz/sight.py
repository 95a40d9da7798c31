"""Which keys a query sees, by number: causal masks, sliding windows, a used length; and so which tiles must be loaded.

Programs, traffic formulas and pictures ask here, so that they cannot disagree. Masks given as arrays are not part of it:
no tile is left out because of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sight:
    """What Nq queries see of the first ``keys`` keys.

    Query q stands at key q + keys - Nq (causal masks are aligned bottom-right: the last query stands at the last key).

    Args:
        Nq: queries.
        keys: keys that are used, which may be fewer than K has rows.
        causal: a query sees its own key and those before it.
        window: with ``causal``, only the last ``window`` of these: its own and window - 1 before it.

    >>> s = Sight(Nq=5, keys=8, causal=True, window=3)
    >>> [list(s.keys_of(q)) for q in (0, 4)]
    [[1, 2, 3], [5, 6, 7]]
    >>> [list(s.tiles_of(i, Br=2, Bc=2)) for i in range(3)]
    [[0, 1, 2], [1, 2, 3], [2, 3]]
    """

    Nq: int
    keys: int
    causal: bool = False
    window: int | None = None

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Sight:
        """From the params of a run or a recording."""
        keys, window = params.get("kv_len", params["Nk"]), params.get("window")
        limit = None if window is None else int(window)
        return cls(int(params["Nq"]), int(keys), bool(params.get("causal", False)), limit)

    @property
    def limited(self) -> bool:
        """Whether some query may see less than all used keys."""
        return self.causal

    def keys_of(self, q: int) -> range:
        """The keys that query q sees, perhaps none."""
        if not self.causal:
            return range(self.keys)
        end = min(max(q + 1 + self.keys - self.Nq, 0), self.keys)
        return range(0 if self.window is None else max(q + 1 + self.keys - self.Nq - self.window, 0), end)

    def tiles_of(self, i: int, Br: int, Bc: int) -> range:
        """The key tiles that row block i visits: from the first that its first row sees to the last that its last row sees."""
        first, last = self.keys_of(i * Br), self.keys_of(min((i + 1) * Br, self.Nq) - 1)
        end = -(-last.stop // Bc)
        return range(min(first.start // Bc, end), end)

    def tiles(self, Br: int, Bc: int) -> list[range]:
        """The key tiles of every row block."""
        return [self.tiles_of(i, Br, Bc) for i in range(-(-self.Nq // Br))]

    def whole(self, i: int, j: int, Br: int, Bc: int) -> bool:
        """Whether every row of row block i sees every used key of key tile j: nothing of that tile of scores is masked."""
        first, last = self.keys_of(i * Br), self.keys_of(min((i + 1) * Br, self.Nq) - 1)
        return last.start <= j * Bc and min((j + 1) * Bc, self.keys) <= first.stop
