"""The functions of half.cuh and ptx.cuh: on the processor against NumPy, bit for bit where the manual fixes the bits, and on a GPU against the processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashviz as fv
from flashviz.cuda import Kernel, KernelError, cpu, launch, status

PROBE = """// @arch 80
// @kernel conversions
// @grid ceil(N / 128)
// @block 128
// @array x [N]
// @array halves [N]
// @array bfloats [N]
// @array tf32 [N]
// @array two [N]
// @kernel back
// @grid ceil(N / 128)
// @block 128
// @array pairs [N]
// @array halves [N, P]
// @array bfloats [N, P]
// @kernel matrices
// @grid 1
// @block 32
// @array tile [R, C]
// @array rows [L]
// @array plain [L, F]
// @array turned [L, F]
// @array moved [L, F]
// @kernel product
// @grid 1
// @block 32
// @array A [M, K]
// @array B [K, N]
// @array D [M, N]
// @instance T=half
// @instance T=bfloat16
// @kernel product_tf32
// @grid 1
// @block 32
// @array A [M, K]
// @array B [K, N]
// @array D [M, N]
// @kernel odds
// @grid 3
// @block 64
// @array words [W, Q]
// @array perms [W]
// @array seen [W, Q]
// @array counts [C]
// @inout counts
#include "include/half.cuh"
#include "include/ptx.cuh"
#include "include/shared.cuh"

__global__ void conversions(const float* x, unsigned* halves, unsigned* bfloats, unsigned* tf32, float* two, int N) {
    const int n = blockIdx.x * 128 + threadIdx.x;
    if (n >= N) return;
    halves[n] = pack<half>(x[n], x[N - 1 - n]);
    bfloats[n] = pack<bfloat16>(x[n], x[N - 1 - n]);
    tf32[n] = to_tf32(x[n]) & 0xffffe000u;   // the lowest bits are whatever the GPU leaves there
    two[n] = exp2_approx(x[n]);
}

__global__ void back(const unsigned* pairs, float* halves, float* bfloats, int N, int P) {
    const int n = blockIdx.x * 128 + threadIdx.x;
    if (n >= N) return;
    unpack<half>(halves[2 * n], halves[2 * n + 1], pairs[n]);
    unpack<bfloat16>(bfloats[2 * n], bfloats[2 * n + 1], pairs[n]);
}

__global__ void matrices(const half* tile, const int* rows, unsigned* plain, unsigned* turned, unsigned* moved, int R, int C, int L, int F) {
    __shared__ __align__(16) half s[40 * 24];
    for (int e = threadIdx.x; e < R * C; e += 32) s[e] = tile[e];
    __syncthreads();
    unsigned r[4], t[4];
    ldmatrix_x4(r, shared_address(s) + rows[threadIdx.x] * 2);
    ldmatrix_x4_trans(t, shared_address(s + rows[threadIdx.x]));
    for (int i = 0; i < 4; ++i) {
        plain[threadIdx.x * 4 + i] = r[i];
        turned[threadIdx.x * 4 + i] = t[i];
        moved[threadIdx.x * 4 + i] = transpose_8x8(r[i]);
    }
}

__device__ unsigned two_of(const unsigned short* from, int step) { return from[0] | (unsigned)from[step] << 16; }

template <typename T>
__global__ void product(const T* A, const T* B, float* D, int M, int K, int N) {
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    const unsigned short *a = &A[0].bits, *b = &B[0].bits;
    const unsigned rows[4] = {two_of(a + g * 16 + 2 * t, 1), two_of(a + (g + 8) * 16 + 2 * t, 1),
                              two_of(a + g * 16 + 2 * t + 8, 1), two_of(a + (g + 8) * 16 + 2 * t + 8, 1)};
    float d[4];
    for (int i = 0; i < 4; ++i) d[i] = D[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
    mma_m16n8k16<T>(d, rows, two_of(b + 2 * t * 8 + g, 8), two_of(b + (2 * t + 8) * 8 + g, 8));
    for (int i = 0; i < 4; ++i) D[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];
}

__global__ void product_tf32(const float* A, const float* B, float* D, int M, int K, int N) {
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    unsigned a[4];
    for (int i = 0; i < 4; ++i) a[i] = __float_as_uint(A[(g + i % 2 * 8) * 8 + t + i / 2 * 4]);
    float d[4] = {};
    mma_m16n8k8_tf32(d, a, __float_as_uint(B[t * 8 + g]), __float_as_uint(B[(t + 4) * 8 + g]));
    for (int i = 0; i < 4; ++i) D[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];
}

__global__ void odds(const unsigned* words, const unsigned* perms, unsigned* seen, unsigned* counts, int W, int Q, int C) {
    const int n = threadIdx.x;
    if (blockIdx.x == 0) {
        const uint4 w = load_once(words + 4 * n);
        *(uint4*)(seen + 4 * n) = make_uint4(w.w, __byte_perm(w.x, w.y, perms[n]), __shfl_xor_sync(0xffffffffu, w.x, 5), w.z);
    }
    if (n < C) atomicInc(counts + n, 1u);     // 0, 1, 0, 1 ...
}
"""

HALF = {"half": np.float16, "bfloat16": np.uint16}
SPECIAL = [
    0.0,
    -0.0,
    np.inf,
    -np.inf,
    np.nan,
    65504,
    65519.99,
    65520,
    65536,
    1e38,
    3.4e38,
    1e-45,
    2**-24,
    2**-25,
    2**-25 * 1.001,
]
SPECIAL += [
    2**-14,
    2**-14 * 0.9999,
    2**-24 * 1.5,
    2**-24 * 2.5,
    1 + 2**-11,
    1 + 3 * 2**-11,
    1 + 2**-8,
    1 + 3 * 2**-8,
    1e-40,
    1 + 2**-11 + 2**-20,
]

needs_cpu = pytest.mark.skipif(not cpu.status().usable, reason="no C++ compiler is here: pip install ziglang")
DEVICES = [pytest.param("cpu", marks=needs_cpu), pytest.param("gpu", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ptx") / "probe.cu"
    path.write_text(PROBE)
    return path


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "gpu" and not status().usable:
        pytest.skip(f"no GPU: {status().reason}")
    return str(request.param)


def run(probe: Path, function: str, device: str, template: Any = None, **arguments: Any) -> None:
    launch(Kernel(probe, template or {}, function=function), arguments, device=device, poison=False)


def numbers() -> np.ndarray:
    rng = np.random.default_rng(0)
    spread = rng.standard_normal(2000) * 2.0 ** rng.integers(-40, 40, 2000)
    halfway = rng.integers(0, 1 << 11, 500) / 2048.0 + 1.0
    return np.array([*SPECIAL, *spread, *halfway, *-halfway, *(rng.standard_normal(500) * 2**-15)], np.float32)


def half_bits(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.where(np.isnan(x), 0x7FFF, x.astype(np.float16).view(np.uint16)).astype(np.uint32)


def bfloat_bits(x: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(x), 0x7FFF, fv.to_bfloat16(x)).astype(np.uint32)


def test_conversions(probe: Path, device: str) -> None:
    x = numbers()
    out = {name: np.zeros(len(x), np.uint32) for name in ("halves", "bfloats", "tf32")}
    two = np.zeros_like(x)
    run(probe, "conversions", device, x=x, **out, two=two, N=len(x))
    np.testing.assert_array_equal(out["halves"], half_bits(x) | half_bits(x[::-1]) << 16)
    np.testing.assert_array_equal(out["bfloats"], bfloat_bits(x) | bfloat_bits(x[::-1]) << 16)
    bits = x.view(np.uint32)
    np.testing.assert_array_equal(out["tf32"][~np.isnan(x)], ((bits + 0x1000) & 0xFFFFE000)[~np.isnan(x)])
    assert np.isnan(out["tf32"].view(np.float32)[np.isnan(x)]).all()
    with np.errstate(over="ignore", under="ignore"):
        want = np.exp2(x.astype(np.float64))
        tiny = want < np.finfo(np.float32).tiny
        want = np.where(tiny, 0, want.astype(np.float32))
    at_the_edge = np.isclose(x, -126, atol=1e-3)
    np.testing.assert_allclose(two[~at_the_edge], want[~at_the_edge], rtol=2**-21)
    assert two[3] == 0
    assert two[2] == np.inf


def test_every_pattern_of_sixteen_bits_comes_back(probe: Path, device: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    halves, bfloats = (np.zeros((1 << 15, 2), np.float32) for _ in range(2))
    run(probe, "back", device, pairs=bits.view(np.uint32), halves=halves, bfloats=bfloats, N=1 << 15, P=2)
    for got, want in ((halves, bits.view(np.float16).astype(np.float32)), (bfloats, fv.from_bfloat16(bits))):
        np.testing.assert_array_equal(np.isnan(got.ravel()), np.isnan(want))
        kept = ~np.isnan(want)
        np.testing.assert_array_equal(got.ravel()[kept].view(np.uint32), want[kept].view(np.uint32))


def test_matrices_from_shared_memory(probe: Path, device: str) -> None:
    rng = np.random.default_rng(1)
    tile = rng.permutation(1 << 10)[: 40 * 24].astype(np.float16).reshape(40, 24)
    rows = (rng.permutation(40)[:32] * 24 + 8 * rng.integers(0, 3, 32)).astype(np.int32)  # 16-byte pieces anywhere
    plain, turned, moved = (np.zeros((32, 4), np.uint32) for _ in range(3))
    run(probe, "matrices", device, tile=tile, rows=rows, plain=plain, turned=turned, moved=moved, R=40, C=24, L=32, F=4)
    matrix = np.stack([tile.ravel()[at : at + 8] for at in rows]).reshape(
        4, 8, 8
    )  # lane l gave row l % 8 of matrix l / 8
    for lane in range(32):
        g, t = divmod(lane, 4)
        for i in range(4):
            want = matrix[i, g, 2 * t : 2 * t + 2]
            want_turned = matrix[i].T[g, 2 * t : 2 * t + 2]
            assert plain[lane, i : i + 1].view(np.float16).tolist() == want.tolist()
            assert turned[lane, i : i + 1].view(np.float16).tolist() == want_turned.tolist()
    np.testing.assert_array_equal(moved, turned)


@pytest.mark.parametrize("T", ["half", "bfloat16"])
def test_products(probe: Path, device: str, T: str) -> None:
    rng = np.random.default_rng(2)
    for scale in (1.0, 2.0**-12):
        a, b = (rng.standard_normal(shape).astype(np.float32) * scale for shape in ((16, 16), (16, 8)))
        D = rng.standard_normal((16, 8)).astype(np.float32) * scale
        if T == "half":
            A, B = a.astype(np.float16), b.astype(np.float16)
            exact = A.astype(np.float64) @ B.astype(np.float64) + D
        else:
            A, B = fv.to_bfloat16(a), fv.to_bfloat16(b)
            exact = fv.from_bfloat16(A).astype(np.float64) @ fv.from_bfloat16(B).astype(np.float64) + D
        run(probe, "product", device, {"T": T}, A=A, B=B, D=D, M=16, K=16, N=8)
        np.testing.assert_allclose(D, exact, rtol=1e-5, atol=2e-6 * scale)
    whole = rng.integers(-8, 9, (16, 16)).astype(np.float32), rng.integers(-8, 9, (16, 8)).astype(np.float32)
    A, B = (x.astype(np.float16) if T == "half" else fv.to_bfloat16(x) for x in whole)
    D = np.ones((16, 8), np.float32)
    run(probe, "product", device, {"T": T}, A=A, B=B, D=D, M=16, K=16, N=8)
    np.testing.assert_array_equal(D, whole[0] @ whole[1] + 1)


def test_products_in_tf32(probe: Path, device: str) -> None:
    rng = np.random.default_rng(3)
    A, B = rng.standard_normal((16, 8)).astype(np.float32), rng.standard_normal((8, 8)).astype(np.float32)
    D = np.zeros((16, 8), np.float32)
    run(probe, "product_tf32", device, A=A, B=B, D=D, M=16, K=8, N=8)
    short = [(x.view(np.uint32) & 0xFFFFE000).view(np.float32).astype(np.float64) for x in (A, B)]
    np.testing.assert_allclose(D, short[0] @ short[1], rtol=1e-5, atol=2e-6)
    assert not np.allclose(D, A.astype(np.float64) @ B.astype(np.float64), rtol=1e-6, atol=1e-6), (
        "13 bits are not looked at"
    )


def test_the_rest(probe: Path, device: str) -> None:
    rng = np.random.default_rng(4)
    words = rng.integers(0, 1 << 32, (64, 4), dtype=np.uint64).astype(np.uint32)
    perms = rng.integers(0, 1 << 16, 64).astype(np.uint32)  # of each digit three bits count
    seen, counts = np.zeros_like(words), np.array([0, 1, 5], np.uint32)
    run(probe, "odds", device, words=words, perms=perms, seen=seen, counts=counts, W=64, Q=4, C=3)
    np.testing.assert_array_equal(seen[:, 0], words[:, 3])
    np.testing.assert_array_equal(seen[:, 3], words[:, 2])
    np.testing.assert_array_equal(seen[:, 2], words[np.arange(64) ^ 5, 0])
    for n in range(64):
        eight = words[n, :2].tobytes()
        want = [eight[int(perms[n]) >> 4 * digit & 7] for digit in range(4)]
        assert seen[n, 1:2].tobytes() == bytes(want)
    assert counts.tolist() == [1, 0, 0]


@needs_cpu
@given(st.lists(st.floats(width=32), min_size=64, max_size=64))
def test_conversions_of_any_number(probe: Path, values: list[float]) -> None:
    x = np.array(values, np.float32)
    out = {name: np.zeros(64, np.uint32) for name in ("halves", "bfloats", "tf32")}
    run(probe, "conversions", "cpu", x=x, **out, two=np.zeros_like(x), N=64)
    np.testing.assert_array_equal(out["halves"], half_bits(x) | half_bits(x[::-1]) << 16)
    np.testing.assert_array_equal(out["bfloats"], bfloat_bits(x) | bfloat_bits(x[::-1]) << 16)


@needs_cpu
def test_a_warp_that_is_not_whole_multiplies_nothing(probe: Path) -> None:
    A, B, D = np.zeros((16, 8), np.float32), np.zeros((8, 8), np.float32), np.zeros((16, 8), np.float32)
    kernel = Kernel(probe, function="product_tf32", block=31)
    with pytest.raises(
        KernelError, match=r"mma_m16n8k8_tf32: .*lane 31, which must take part, has ended or does not exist"
    ):
        launch(kernel, {"A": A, "B": B, "D": D, "M": 16, "K": 8, "N": 8}, device="cpu")
