"""Attention in float64, and a kernel's outputs held against it: every element for NaN, some of the rows for their values.

Works on NumPy's arrays and on CuPy's alike, where they are: nothing is copied but what is compared. What is timed is checked with
this first, so it must be cheap beside a launch: `spots` picks the rows, spread over the batches, heads and the whole length.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TOLERANCES = {"float64": 1e-12, "float32": 3e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
"""How far a row of O may be off relative to its length, by the type of O: four roundings of 16 bits, or what 16,384 sums in float32 gather.
L, which is float32 in either case, may be off by as much relative to max(1, |L|), but by 2e-4 at most."""


@dataclass(frozen=True)
class Verdict:
    """Whether outputs are right: ``wrong`` is empty or says what is not. ``error`` is the largest seen, as a part of what is allowed."""

    wrong: str
    error: float = math.nan

    def __bool__(self) -> bool:
        return not self.wrong


class Attention:
    """What O and L of one problem must be.

    Args:
        Q, K, V: [B, Hq, Nq, D] and [B, Hkv, Nk, D], of float16, float32 or float64; uint16 for the bits of bfloat16.
        scale, causal: as the kernel gets them; causal is aligned bottom-right.
        kv_len: how many keys are used, all when not given.
        window: with causal, how many of the keys that it sees a query looks back at; 0 for all.
        heads, rows: how many heads, and rows of each, are looked at, at most.

    >>> import numpy as np
    >>> x = np.eye(4, dtype="float32")[None, None]
    >>> problem = Attention(x, x, x, scale=1.0)
    >>> O, L = (problem.expected[name][None] for name in ("O", "L"))
    >>> bool(problem.check(O, L)), problem.check(2 * O, L).wrong[:36]
    (True, 'O is off by 1e+00 (relative to its r')
    """

    def __init__(
        self,
        Q: Any,
        K: Any,
        V: Any,
        *,
        scale: float,
        causal: bool = False,
        kv_len: int | None = None,
        window: int = 0,
        heads: int = 8,
        rows: int = 48,
    ) -> None:
        xp = self.xp = importlib.import_module(type(Q).__module__.partition(".")[0])
        B, Hq, Nq, _ = Q.shape
        Hkv, Nk = K.shape[1], K.shape[2] if kv_len is None else kv_len
        self.at = xp.asarray(spots(B * Hq, heads))
        self.rows = xp.asarray(spots(Nq, rows))
        outs, logs = [], []
        for at in map(int, self.at):
            b, h = divmod(at, Hq)
            q = numbers(xp, Q[b, h][self.rows])
            k, v = (numbers(xp, x[b, h // (Hq // Hkv), :Nk]) for x in (K, V))
            s = q @ k.T * float(scale)
            if causal:
                ago = self.rows[:, None] + (Nk - Nq) - xp.arange(Nk)[None, :]
                s[(ago < 0) | (ago >= (window or Nq + Nk))] = -xp.inf
            m = s.max(axis=-1, keepdims=True) if Nk else xp.full((len(q), 1), -xp.inf)
            base = xp.where(xp.isinf(m), 0.0, m)
            p = xp.exp(s - base)
            total = p.sum(axis=-1, keepdims=True)
            seen = total > 0
            outs.append(p @ v / xp.where(seen, total, 1.0))
            logs.append(xp.where(seen, base + xp.log(xp.where(seen, total, 1.0)), -xp.inf)[:, 0])
        self.expected: Mapping[str, Any] = {"O": xp.stack(outs), "L": xp.stack(logs)}

    def check(self, O: Any, L: Any | None = None) -> Verdict:
        """Hold O [B, Hq, Nq, D], and L [B, Hq, Nq] where the kernel gives one, against float64."""
        xp = self.xp
        kind = "bfloat16" if O.dtype == "uint16" else str(O.dtype)
        allowed = TOLERANCES[kind]
        for name, output in (("O", O), ("L", L)):
            if output is not None and (missing := int(xp.isnan(numbers(xp, output, None)).sum())):
                return Verdict(
                    f"{missing:,} of the {output.size:,} elements of {name} are NaN: never written, or wrong"
                )
        found = numbers(xp, O.reshape(-1, *O.shape[2:])[self.at][:, self.rows])
        length = xp.linalg.norm(self.expected["O"], axis=-1)
        off = xp.linalg.norm(found - self.expected["O"], axis=-1) / xp.where(length == 0, 1.0, length)
        error = float(off.max()) / allowed
        if not error <= 1:
            return Verdict(
                f"O is off by {error * allowed:.0e} (relative to its rows' length; {allowed:.0e} is allowed)", error
            )
        if L is not None:
            least = min(allowed, 2e-4)
            found, wanted = numbers(xp, L.reshape(-1, L.shape[2])[self.at][:, self.rows]), self.expected["L"]
            none = xp.isneginf(wanted)
            if bool((xp.isneginf(found) != none).any()):
                return Verdict("L is not -inf exactly where a row sees no key", error)
            off = xp.abs(xp.where(none, 0.0, found) - xp.where(none, 0.0, wanted))
            most = float((off / xp.maximum(1.0, xp.abs(xp.where(none, 0.0, wanted)))).max()) / least
            if not most <= 1:
                return Verdict(f"L is off by {most * least:.0e}", max(error, most))
            error = max(error, most)
        return Verdict("", error)


def numbers(xp: Any, array: Any, dtype: str | None = "float64") -> Any:
    """The values of an array: of uint16, which are the bits of bfloat16, those that they stand for. ``dtype`` None: no wider than need be."""
    if array.dtype == "uint16":
        array = (array.astype("uint32") << 16).view("float32")
    return array if dtype is None else array.astype(dtype)


def spots(count: int, most: int) -> list[int]:
    """At most ``most`` of 0 .. count - 1, in order: the first, the last, and between them in uneven steps, so in no step with a tile.

    >>> spots(3, 8), spots(1000, 5)
    ([0, 1, 2], [0, 250, 503, 751, 999])
    """
    if count <= most:
        return list(range(count))
    inner = [n * (count - 1) // (most - 1) + n * n % 7 for n in range(1, most - 1)]
    return sorted({0, count - 1, *(min(count - 1, n) for n in inner)})
