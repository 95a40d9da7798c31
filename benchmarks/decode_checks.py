"""The checks of `benchmarks/gpu_decode_ladder.py`: the decoding rungs against float64.

    python benchmarks/decode_checks.py

runs them on the processor, on fewer sizes; no GPU is needed.
"""

from __future__ import annotations

import concurrent.futures
import sys
from typing import Any

import gpu
import numpy as np

import flashviz as fv
from flashviz import cuda
from flashviz.ladder import DECODE, Rung

VECTORS, HEADS = "flash_decoding_vectors", "flash_decoding_heads"
SMALL = (  # B, Hq, Hkv, Nq, Nk, causal, splits: a tail, grouped heads, rows and splits that see no key, one split
    (1, 8, 1, 1, 257, 0, 3),
    (2, 3, 1, 2, 70, 1, 2),
    (1, 2, 2, 4, 3, 1, 2),
    (1, 2, 2, 1, 40, 0, 1),
)
TINY = {VECTORS: {"T": "half", "Bc": 8, "D": 64, "Warps": 2}, HEADS: {"T": "half", "Bc": 32, "D": 64, "Warps": 2}}
UNIT = {"half": 2.0**-11, "bfloat16": 2.0**-8}  # a number rounded to T is off by at most so much of itself


def given(xp: Any, rng: Any, T: str, *shape: int, factor: float = 1.0) -> tuple[Any, Any]:
    """Random normal numbers as the kernel takes them, and the float64 values that they are."""
    x = rng.standard_normal(shape, dtype=np.float32) * np.float32(factor)
    if T == "half":
        return xp.asarray(x.astype(np.float16)), x.astype(np.float16).astype(np.float64)
    bits = fv.to_bfloat16(x)
    return xp.asarray(bits), fv.from_bfloat16(bits).astype(np.float64)


def values(x: Any, T: str) -> Any:
    x = x if isinstance(x, np.ndarray) else x.get()
    return (fv.from_bfloat16(x) if T == "bfloat16" and x.dtype == np.uint16 else x).astype(np.float64)


class Outputs:
    """O, L, Os and Ls, each filled with NaN between guard values."""

    def __init__(self, xp: Any, T: str, splits: int, shape: tuple[int, ...]) -> None:
        kinds = {"O": (shape, np.float16 if T == "half" else np.uint16), "L": (shape[:3], np.float32)}
        kinds |= {"Os": ((splits, *shape), np.float32), "Ls": ((splits, *shape[:3]), np.float32)}
        self.arrays, self.buffers = {}, {}
        for name, (size, dtype) in kinds.items():
            count, edge = int(np.prod(size)), gpu.GUARDS
            buffer = xp.full(count + 2 * edge, 12345, dtype)
            inside = buffer[edge : edge + count]
            inside.view(np.uint8).fill(255)  # a NaN of every kind
            self.arrays[name], self.buffers[name] = inside.reshape(size), buffer

    def check_guards(self) -> None:
        """AssertionError when a guard changed."""
        for name, buffer in self.buffers.items():
            edges = np.concatenate([values(x, "") for x in (buffer[: gpu.GUARDS], buffer[-gpu.GUARDS :])])
            assert (np.abs(edges - 12345) < 8).all(), f"a guard value beside {name} was overwritten"


class Decode:
    """A launch of a rung on its own random inputs, and what it must answer."""

    def __init__(self, xp: Any, on: str, rng: Any, kernel: str, template: Any, sizes: Any, **how: Any) -> None:
        self.xp, self.on, self.kernel, self.template = xp, on, kernel, template
        self.B, self.Hq, self.Hkv, self.Nq, self.Nk, self.causal, self.splits = sizes
        self.T, D = template["T"], template["D"]
        self.kv_len, self.scale = how.get("kv_len", self.Nk), how.get("scale", D**-0.5)
        self.Q, self.q = given(xp, rng, self.T, self.B, self.Hq, self.Nq, D, factor=how.get("steep", 1.0))
        self.K, self.k = given(xp, rng, self.T, self.B, self.Hkv, self.Nk, D)
        self.V, self.v = given(xp, rng, self.T, self.B, self.Hkv, self.Nk, D)
        if how.get("rising"):  # every tile has a larger score than the one before it
            grow = np.sort(rng.random(self.Nk)).astype(np.float32)[None, None, :, None] * 8
            one = np.ones((self.B, self.Hkv, 1, D), np.float32) * grow
            self.K = xp.asarray(one.astype(np.float16) if self.T == "half" else fv.to_bfloat16(one))
            self.k = values(self.K, self.T)
            self.Q[...] = abs(self.Q) if self.T == "half" else self.Q & 0x7FFF
            self.q = abs(self.q)
        if self.kv_len < self.Nk:  # what lies behind must not be touched, NaN or not
            for x in (self.K, self.V):
                x[:, :, self.kv_len :] = np.nan if self.T == "half" else 0x7FC0

    def run(self) -> dict[str, Any]:
        """One launch; every output in float64."""
        out = Outputs(self.xp, self.T, self.splits, self.q.shape)
        a = out.arrays
        numbers = (self.Nq, self.Nk, self.scale, self.causal, self.Hq, self.Hkv, self.splits, self.kv_len)
        arrays = (self.Q, self.K, self.V, a["O"], a["L"], a["Os"], a["Ls"])
        cuda.launch(cuda.Kernel(self.kernel, self.template), (*arrays, *numbers), device=self.on)
        out.check_guards()
        return {name: values(x, self.T) for name, x in a.items()}

    def check(self) -> tuple[float, float]:
        """Errors of O and L as fractions of what is allowed."""
        got = self.run()
        again = self.run()  # the counts of the blocks are zeros again, and the order of the blocks changes nothing
        for name in ("O", "L"):
            assert np.array_equal(got[name], again[name], equal_nan=True), f"two launches differ in {name}"
        errors = self.compare(got["O"], got["L"], slice(0, self.kv_len), UNIT[self.T])
        tiles, Bc = -(-self.kv_len // self.template["Bc"]), self.template["Bc"]
        each = -(-tiles // self.splits) * Bc
        if self.splits > 1 and not self.causal:
            for s in range(self.splits):
                keys = slice(min(s * each, self.kv_len), min((s + 1) * each, self.kv_len))
                self.compare(got["Os"][s], got["Ls"][s], keys, 0.0)
        return errors

    def compare(self, O: Any, L: Any, keys: slice, unit: float) -> tuple[float, float]:
        """Against float64 over some keys; ``unit`` is what O is rounded to.

        Allowed for O: its own rounding, and of max |V| the roundings of float32, and in the heads rung those of P, which
        is rounded to T before P V (and in float16 to no less than 2^-25). For L: those of float32.
        """
        k, v = self.k[:, :, keys], self.v[:, :, keys]
        want, want_L = gpu.oracle(self.q, k, v, float(np.float32(self.scale)), bool(self.causal))
        assert np.isfinite(O).all(), f"O holds {np.count_nonzero(~np.isfinite(O))} values that are not finite"
        none = np.isneginf(want_L)
        assert (np.isneginf(L) == none).all(), "L is not -inf exactly where a row sees no key"
        assert (O[none] == 0).all(), "O is not 0 where a row sees no key"
        size = max(1.0, float(np.abs(v).max(initial=0)))
        p = UNIT[self.T] + (k.shape[2] * 2.0**-25 if self.T == "half" else 0.0) if self.kernel == HEADS else 0.0
        single = gpu.BOUND * self.stretch()
        error_O = np.abs(O - want) / (unit * np.abs(want) + (single + p) * size + (2.0**-25 if unit else 0.0))
        L, want_L = L[~none], want_L[~none]
        error_L = np.abs(L - want_L) / (single * np.maximum(1.0, np.abs(want_L)))
        worst = float(error_O.max(initial=0)), float(error_L.max(initial=0))
        assert worst[0] <= 1, f"O is off by {worst[0]:.2f} times the bound"
        assert worst[1] <= 1, f"L is off by {worst[1]:.2f} times the bound"
        return worst

    def stretch(self) -> float:
        """A score is a sum of D products; what it loses grows with them, not with the score."""
        return max(1.0, float(np.abs(self.q).max() * np.abs(self.k).max(initial=0) * abs(self.scale)))


def part_checks(say: Any, on: str = "gpu") -> dict[str, Any]:
    """Both rungs, both types, at the measured template values and at tiny ones."""
    if on == "gpu":
        import cupy as xp
    else:
        xp = np
    rng = np.random.default_rng(2311)
    if on == "gpu":  # all instances compile at once
        with concurrent.futures.ThreadPoolExecutor() as pool:
            every = [
                (one.kernel, {"T": T, "D": d, **one.measured[d]}) for one in DECODE[1:] for T in UNIT for d in (64, 128)
            ]
            for kernel, template in [*every, *TINY.items()]:
                work = Decode(xp, on, rng, kernel, template, (1, 1, 1, 1, 1, 0, 1))
                pool.submit(work.run)
    check = gpu.Checks(say)
    long = (777, 2049) if on == "gpu" else (300,)
    for one in DECODE[1:]:
        templates = [{"T": T, "D": d, **one.measured[d]} for T in UNIT for d in one.measured]
        templates = [TINY[one.kernel], *(templates if on == "gpu" else templates[:1])]
        for template in templates:
            label = f"{one.kernel} {' '.join(f'{k}={v}' for k, v in template.items())}"

            def add(
                title: str,
                sizes: Any,
                *,
                label: str = label,
                template: Any = template,
                kernel: str = one.kernel,
                **how: Any,
            ) -> None:
                check(
                    f"{label}: {title} {sizes}",
                    lambda: Decode(xp, on, rng, kernel, template, sizes, **how).check(),
                )

            for n in (1, 5, 31, 33, 257, *long):
                for splits in (1, 2, 7):
                    add("sizes", (2, 6, 3, 1, n, 0, splits))
            for nq, nk in ((1, 70), (2, 70), (4, 3), (4, 257)):
                add("causal", (2, 4, 2, nq, nk, 1, 3))
            add("long", (1, 4, 2, 1, 5000 if on == "gpu" else 500, 0, 7))
            add("one query head", (3, 1, 1, 1, 300, 0, 2))
            add("eight query heads", (1, 8, 1, 1, 300, 0, 2))
            add("more splits than tiles", (1, 2, 2, 1, 40, 0, 40))
            add("no keys", (1, 2, 2, 1, 0, 0, 2))
            add("no keys used", (1, 2, 2, 1, 9, 0, 2), kv_len=0)
            add("a part of the keys", (2, 6, 3, 1, 300, 1, 3), kv_len=217)
            for scale in (0.0, 0.3, -0.2):
                add(f"scale {scale}", (1, 4, 2, 1, 130, 0, 2), scale=scale)
            add("steep", (1, 4, 2, 1, 300, 0, 3), steep=16.0)
            add("rising", (1, 4, 2, 1, 300, 0, 3), rising=True)
        if on == "gpu":
            check(f"{one.kernel} A15 offsets past 2^31", lambda one=one: far(one))
    return check.result()


def far(one: Rung) -> None:
    """Two heads of 2^24 + 5 keys: the last one's elements lie past 2^31. Its last key takes the whole weight."""
    import cupy

    n = (1 << 24) + 5
    K, V = (cupy.zeros((1, 2, n, 64), np.float16) for _ in range(2))
    K[0, 1, -1], V[0, 1, -1] = 10, cupy.arange(64)
    q = cupy.ones((1, 2, 1, 64), np.float16)
    out = Outputs(cupy, "half", 128, q.shape).arrays
    kernel = cuda.Kernel(one.kernel, {"T": "half", "D": 64, **one.measured[64]})
    cuda.launch(kernel, (q, K, V, out["O"], out["L"], out["Os"], out["Ls"], 1, n, 0.125, 0, 2, 2, 128))
    O = cupy.asnumpy(out["O"])
    del K, V, out
    cupy.get_default_memory_pool().free_all_blocks()
    assert (O[0, 0] == 0).all(), "the first head reads what is not its own"
    assert (O[0, 1, 0] == np.arange(64)).all(), "the last key of the second head was not found"


if __name__ == "__main__":
    sys.exit(gpu.main({"checks": lambda say: part_checks(say, "cpu")}, name="decode_checks", text=__doc__))
