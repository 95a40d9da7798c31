"""The inputs of the attention algorithms: shapes, heads, block sizes and masks, checked before anything runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashviz.recording import Param
from flashviz.sight import Sight

FloatArray = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def as_tile_array(name: str, array: Any) -> FloatArray:
    """An input as a contiguous float32 array, whatever its strides; a copy only where needed.

    Raises:
        TypeError: it does not hold real numbers.
    """
    if hasattr(array, "get") and hasattr(array, "device"):
        array = array.get()
    a = np.asarray(array)
    if a.dtype.kind not in "fiu":
        raise TypeError(f"{name} has dtype {a.dtype}; attention takes real numbers (float16, float32, float64)")
    return np.ascontiguousarray(a, dtype=np.float32)


def four_axes(a: FloatArray) -> FloatArray:
    """[N, d] and [H, N, d] as [B, H, N, d]."""
    shape: tuple[int, ...] = (*(1,) * (4 - a.ndim), *a.shape)
    return a.reshape(shape)


def positive(name: str, value: Any) -> int:
    """A block size as an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name}={value!r}: {name} counts rows of a tile and must be an integer of at least 1")
    return int(value)


@dataclass(frozen=True, eq=False)
class Attention:
    """One attention problem cut in tiles: Q [B, Hq, Nq, d], K and V [B, Hkv, Nk, d], all float32 and contiguous."""

    Q: FloatArray
    K: FloatArray
    V: FloatArray
    Br: int
    Bc: int
    scale: np.float32
    causal: bool
    mask: np.ndarray | None
    given: tuple[int, ...]
    window: int | None = None
    kv_len: int | None = None

    @classmethod
    def of(
        cls,
        Q: Any,
        K: Any,
        V: Any,
        Br: Any,
        Bc: Any,
        scale: float | None = None,
        causal: bool = False,
        mask: Any = None,
        window: Any = None,
        kv_len: Any = None,
    ) -> Attention:
        """Check the inputs of an attention function.

        ``window`` limits each query to the last keys up to its own, with ``causal`` only; ``kv_len`` is how many rows
        of K and V are used.

        Raises:
            ValueError, TypeError: naming the argument, what it is and what it must be.
        """
        q, k, v = as_tile_array("Q", Q), as_tile_array("K", K), as_tile_array("V", V)
        br, bc = positive("Br", Br), positive("Bc", Bc)
        if q.ndim not in (2, 3, 4):
            raise ValueError(f"Q has shape {q.shape}: it must be [N, d], [H, N, d] or [B, H, N, d]")
        if not q.ndim == k.ndim == v.ndim:
            raise ValueError(f"Q, K and V need the same number of axes; got {q.shape}, {k.shape}, {v.shape}")
        if k.shape != v.shape:
            raise ValueError(f"K {k.shape} and V {v.shape} must have the same shape")
        if q.shape[-1] != k.shape[-1]:
            raise ValueError(f"Q {q.shape} and K {k.shape} must have the same head dimension (the last axis)")
        given: tuple[int, ...] = q.shape
        q, k, v = four_axes(q), four_axes(k), four_axes(v)
        if 0 in q.shape or 0 in k.shape:
            raise ValueError(f"Q {given} and K {k.shape}: every axis needs at least one element")
        if q.shape[0] != k.shape[0]:
            raise ValueError(f"Q has batch {q.shape[0]} and K has batch {k.shape[0]}: they must be equal")
        if q.shape[1] % k.shape[1]:
            raise ValueError(
                f"{q.shape[1]} query heads over {k.shape[1]} K, V heads: the first must be a multiple of the second"
            )
        if scale is None:
            scale = 1 / math.sqrt(q.shape[-1])
        if not isinstance(scale, (int, float, np.number)) or not math.isfinite(scale):
            raise ValueError(f"scale={scale!r}: it must be a finite number")
        seen = None
        if mask is not None:
            seen = np.asarray(mask)
            if seen.dtype != bool:
                raise TypeError(f"mask has dtype {seen.dtype}; it must be boolean, True where a query sees a key")
            full = (*q.shape[:3], k.shape[2])
            try:
                seen = np.broadcast_to(seen, full)
            except ValueError:
                raise ValueError(f"mask {seen.shape} does not broadcast to [B, H, Nq, Nk] = {full}") from None
        if window is not None:
            if isinstance(window, bool) or not isinstance(window, (int, np.integer)) or window < 1:
                raise ValueError(f"window={window!r}: it counts the keys that a query sees, an integer of at least 1")
            if not causal:
                raise ValueError(f"window={window} without causal=True: a window ends at the query's own key")
            window = int(window)
        if kv_len is not None:
            rows = k.shape[2]
            if isinstance(kv_len, bool) or not isinstance(kv_len, (int, np.integer)) or not 0 <= kv_len <= rows:
                raise ValueError(f"kv_len={kv_len!r}: it counts the used rows of K and V, an integer from 0 to {rows}")
            kv_len = int(kv_len)
        return cls(q, k, v, br, bc, np.float32(scale), bool(causal), seen, given, window, kv_len)

    @property
    def Nq(self) -> int:
        """Rows of Q."""
        return int(self.Q.shape[2])

    @property
    def Nk(self) -> int:
        """Rows of K and V, used or not."""
        return int(self.K.shape[2])

    @property
    def keys(self) -> int:
        """Rows of K and V that are used: all, or the first ``kv_len``."""
        return self.Nk if self.kv_len is None else self.kv_len

    @property
    def sight(self) -> Sight:
        """Which query sees which key, but for a mask given as an array."""
        return Sight(self.Nq, self.keys, self.causal, self.window)

    @property
    def limits(self) -> tuple[int, int]:
        """kv_len and window as the kernels take them: 0 where there is no window, and no more than there are places."""
        return self.keys, min(self.window or 0, self.Nq + self.Nk)

    @property
    def d(self) -> int:
        """Head dimension."""
        return int(self.Q.shape[3])

    @property
    def Tr(self) -> int:
        """Row blocks: ceil(Nq / Br)."""
        return -(-self.Nq // self.Br)

    @property
    def Tc(self) -> int:
        """Key blocks that are used: ceil(Nk / Bc), or ceil(kv_len / Bc)."""
        return -(-self.keys // self.Bc)

    @property
    def heads(self) -> tuple[tuple[int, int], ...]:
        """Every (batch, query head)."""
        return tuple((b, h) for b in range(self.Q.shape[0]) for h in range(self.Q.shape[1]))

    def bound(self) -> float:
        """How far O and L of two float32 evaluations may be apart, when their sums run in different orders.

        Eight roundings of 2^-24 for each of √d times the largest score that the rows' lengths allow, √Nk for the sums
        over keys, the Tc times that O is rescaled and 16 for the rest; times max |V|, at least 1.
        """
        K, V = self.K[:, :, : self.keys], self.V[:, :, : self.keys]
        longest = [float(np.sqrt((x.astype("float64") ** 2).sum(-1).max(initial=0))) for x in (self.Q, K)]
        score = abs(float(self.scale)) * longest[0] * longest[1]
        roundings = math.sqrt(self.d) * score + math.sqrt(self.Nk) + self.Tc + 16
        return 8 * 2**-24 * roundings * max(1.0, float(np.abs(V).max(initial=0)))

    def kv_head(self, head: int) -> int:
        """The K, V head that a query head reads: h // (Hq / Hkv)."""
        return head // (self.Q.shape[1] // self.K.shape[1])

    def key_tiles(self, i: int) -> range:
        """The key tiles that row block i visits: none that lies wholly above the diagonal, before the window, or behind the used keys."""
        return self.sight.tiles_of(i, self.Br, self.Bc)

    @property
    def params(self) -> dict[str, Param]:
        """The sizes and options as a recording carries them."""
        b, hq, hkv = self.Q.shape[0], self.Q.shape[1], self.K.shape[1]
        sizes = {"B": b, "Hq": hq, "Hkv": hkv, "Nq": self.Nq, "Nk": self.Nk, "d": self.d}
        tiles = {"Br": self.Br, "Bc": self.Bc, "Tr": self.Tr, "Tc": self.Tc}
        limits = {"window": self.window, "kv_len": self.kv_len}
        given: dict[str, Param] = {name: value for name, value in limits.items() if value is not None}
        masks = {"causal": self.causal, "masked": self.mask is not None}
        return {**sizes, **tiles, "scale": float(self.scale), **masks, **given}
