"""The kernels of hopper_steps.cu on whole numbers: every element must be exact. Part 1 of `benchmarks/gpu_hopper.py`, and what it shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpu
import numpy as np

from flashviz import cuda
from flashviz.bfloat16 import from_bfloat16, to_bfloat16


def rounded(x: Any, type: str) -> tuple[Any, Any]:
    """``x`` as a kernel takes it (float16, or the bits of bfloat16), and the numbers that it then has."""
    if type == "bfloat16":
        bits = to_bfloat16(np.asarray(x, np.float32))
        return bits, from_bfloat16(bits)
    half = np.asarray(x, np.float16)
    return half, half.astype(np.float32)


def numbers(x: Any, type: str) -> Any:
    """The float32 numbers of an array from a kernel."""
    return from_bfloat16(x) if type == "bfloat16" else np.asarray(x, np.float32)


def blank(shape: tuple[int, ...], type: str) -> Any:
    """An output full of NaN."""
    return np.full(shape, 0x7FFF, np.uint16) if type == "bfloat16" else np.full(shape, np.nan, np.float16)


def as_it_lies(tile: Any, swizzle: int) -> Any:
    """A tile of rows of 2-byte elements as it lies in shared memory: panel after panel of ``swizzle`` bytes a row, chunks of 16 bytes swizzled.

    The copy engine exchanges bits of the *address*: with 128 bytes bits 4-6 are combined with bits 7-9, with 64 two of them, with 32 one.
    """
    rows, columns = tile.shape
    panel = swizzle // 2 if swizzle else columns
    flat = np.concatenate([tile[:, c : c + panel].reshape(-1) for c in range(0, columns, panel)])
    place = np.arange(flat.size)  # of 8 elements, 16 bytes
    chunk = place // 8
    mask = {0: 0, 32: 1, 64: 3, 128: 7}[swizzle]
    lies = np.empty_like(flat)
    lies[(chunk ^ (chunk >> 3 & mask)) * 8 + place % 8] = flat
    return lies.reshape(rows, columns)


def whole(rng: Any, shape: tuple[int, ...], most: int, type: str) -> tuple[Any, Any]:
    return rounded(rng.integers(-most, most + 1, shape), type)


def step_scores(rng: Any, template: dict[str, Any]) -> None:
    T, Bc, D = template["T"], template["Bc"], template["D"]
    (q, Q), (k, K) = whole(rng, (64, D), 8, T), whole(rng, (Bc, D), 8, T)
    S = np.full((64, Bc), np.nan, np.float32)
    cuda.launch(cuda.Kernel("hopper_steps", template, function="hopper_scores"), (q, k, S))
    assert (Q @ K.T == S).all(), f"{np.count_nonzero(Q @ K.T != S)} of {S.size} scores are wrong"


def step_values(rng: Any, template: dict[str, Any]) -> None:
    T, Bc, D = template["T"], template["Bc"], template["D"]
    (p, P), (v, V) = whole(rng, (64, Bc), 8, T), whole(rng, (Bc, D), 8, T)
    O = np.full((64, D), np.nan, np.float32)
    cuda.launch(cuda.Kernel("hopper_steps", template, function="hopper_values"), (p, v, O))
    assert (P @ V == O).all(), f"{np.count_nonzero(P @ V != O)} of {O.size} values are wrong"


def step_copy(rng: Any, template: dict[str, Any]) -> None:
    T, Rows, D = template["T"], template["Rows"], template["D"]
    for H, N, row, head in ((3, 100, 70, 1), (3, 100, 99, 2), (1, 64, 0, 0), (2, 5, 0, 1)):
        x, _ = whole(rng, (H, N, D), 100, T)
        tile, y = blank((Rows, D), T), blank((H, N, D), T)
        untouched = y.copy()
        cuda.launch(cuda.Kernel("hopper_steps", template, function="hopper_copy"), (x, tile, y, row, head))
        there = min(Rows, N - row)
        want = np.zeros((Rows, D), x.dtype)
        want[:there] = x[head, row : row + there]
        assert (as_it_lies(want, template["Swizzle"]) == tile).all(), "the tile does not lie as it should"
        untouched[head, row : row + there] = x[head, row : row + there]
        assert untouched.tobytes() == y.tobytes(), "what was stored is not what was loaded, or more than that"


def step_ring(rng: Any, template: dict[str, Any]) -> None:
    for H, N in ((2, 1000), (1, 5), (3, 16), (1, 4000)):
        x, X = whole(rng, (H, N, 64), 8, "half")
        total = np.full((H, 64), np.nan, np.float32)
        cuda.launch(cuda.Kernel("hopper_steps", template, function="hopper_ring"), (x, total, H, N))
        assert (X.sum(1) == total).all(), (
            f"H={H} N={N}: {np.count_nonzero(X.sum(1) != total)} of {total.size} sums are wrong"
        )


STEPS: dict[str, Callable[[Any, Any], None]] = {
    "hopper_scores": step_scores,
    "hopper_values": step_values,
    "hopper_copy": step_copy,
    "hopper_ring": step_ring,
}


def part_steps(say: Any) -> dict[str, Any]:
    check = gpu.Checks(say)
    rng = np.random.default_rng(0)
    for function, step in STEPS.items():
        for template in cuda.find("hopper_steps", function).header.instances:
            check(f"{function} {dict(template)}", lambda step=step, template=template: step(rng, template))
    return {"cases": check.count, "failures": check.failures}
