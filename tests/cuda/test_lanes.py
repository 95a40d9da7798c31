"""The lanes that `fv.fragments` draws are those that the product uses: registers filled by that map go in, and the product comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashviz as fv
from flashviz.cuda import Kernel, cpu, gpu, launch
from flashviz.warp import SHAPES

KERNEL = """// @arch 80
// @kernel f16
// @grid 1
// @block 32
// @array a [L, A]
// @array b [L, B]
// @array d [L, D]
// @kernel tf32
// @grid 1
// @block 32
// @array a [L, A]
// @array b [L, B]
// @array d [L, D]
// @kernel rows
// @grid 1
// @block 32
// @array tile [R, C]
// @array a [L, A]
#include "include/ptx.cuh"
#include "include/shared.cuh"

__global__ void f16(const unsigned* a, const unsigned* b, float* d) {
    const int lane = threadIdx.x;
    const unsigned x[4] = {a[4 * lane], a[4 * lane + 1], a[4 * lane + 2], a[4 * lane + 3]};
    float sum[4] = {};
    mma_m16n8k16<half>(sum, x, b[2 * lane], b[2 * lane + 1]);
    for (int n = 0; n < 4; ++n) d[4 * lane + n] = sum[n];
}

__global__ void tf32(const unsigned* a, const unsigned* b, float* d) {
    const int lane = threadIdx.x;
    const unsigned x[4] = {a[4 * lane], a[4 * lane + 1], a[4 * lane + 2], a[4 * lane + 3]};
    float sum[4] = {};
    mma_m16n8k8_tf32(sum, x, b[2 * lane], b[2 * lane + 1]);
    for (int n = 0; n < 4; ++n) d[4 * lane + n] = sum[n];
}

__global__ void rows(const half* tile, unsigned* a) {
    const int lane = threadIdx.x;
    SharedCarver carve;
    const auto t = carve.tile<half, 16, 16>("t");
    for (int e = lane; e < 256; e += 32) t[e / 16][e % 16] = tile[e];
    __syncthreads();
    unsigned x[4];
    ldmatrix_x4(x, shared_address(&t[lane % 16][lane / 16 * 8]));
    for (int n = 0; n < 4; ++n) a[4 * lane + n] = x[n];
}
"""
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not cpu.status().usable, reason="no C++ compiler is here")),
    pytest.param("gpu", marks=pytest.mark.skipif(not gpu.status().usable, reason=gpu.status().reason or "no GPU")),
]


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    path = tmp_path / "lanes.cu"
    path.write_text(KERNEL, encoding="utf-8")
    return path


def registers(matrix: np.ndarray, found: Any, shape: str) -> np.ndarray:
    """The registers of 32 lanes that hold a matrix, as the map has it: [lane, register], their bits."""
    dtype = np.float16 if shape == "m16n8k16" else np.float32
    held = np.zeros((32, found.registers, int(found.place.max()) + 1), dtype)
    held[found.lane, found.register, found.place] = matrix
    return held.view(np.uint32).reshape(32, found.registers)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_map_is_the_products_own(kernel: Path, shape: str, device: str) -> None:
    a, b, d = (fv.fragment(operand, shape) for operand in "abd")
    rng = np.random.default_rng(1)
    for trial in range(5):
        A, B = (rng.integers(-8, 9, f.shape).astype("f4") for f in (a, b))
        if (
            trial
        ):  # one number of a, and the row of b that it meets: a wrong place would show as a row or a column of its own
            row, inner = (int(rng.integers(n)) for n in a.shape)
            A, B = np.zeros_like(A), np.zeros_like(B)
            A[row, inner], B[inner] = 3, np.arange(1, 9)
        out = np.empty((32, 4), np.float32)
        function = "f16" if shape == "m16n8k16" else "tf32"
        launch(Kernel(kernel, function=function), (registers(A, a, shape), registers(B, b, shape), out), device=device)
        assert np.array_equal(out[d.lane, d.register], (A @ B).astype("f4"))


@pytest.mark.parametrize("device", DEVICES)
def test_ldmatrix_fills_the_operands_registers(kernel: Path, device: str) -> None:
    """With the addresses that the rungs give, four 8 × 8 matrices are an operand a of m16n8k16."""
    tile = np.arange(256, dtype=np.float16).reshape(16, 16)
    out = np.empty((32, 4), np.uint32)
    launch(Kernel(kernel, function="rows"), (tile, out), device=device)
    assert np.array_equal(out, registers(tile, fv.fragment("a"), "m16n8k16"))
