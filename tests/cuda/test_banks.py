"""Bank conflicts counted on the processor, against the rule written the other way round in flashviz.warp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashviz import cuda
from flashviz.cuda import Kernel, KernelError, bank_conflicts, cpu
from flashviz.warp import wavefronts

if not cpu.status().usable:
    pytest.skip("no C++ compiler is here: pip install ziglang", allow_module_level=True)

ANY = """// @kernel any
// @grid 1
// @block 64
// @array at [64]
// @array y [64]
// @instance T=float Wide=1
#include "include/ptx.cuh"
#include "include/shared.cuh"
template <typename T> __device__ float first(const T* p) { return *reinterpret_cast<const float*>(p); }
template <typename T, int Wide>
__global__ void any(const int* at, float* y, int lanes) {
    SharedCarver carve;
    const auto words = carve.tile<64, 64>("words");
    for (int e = threadIdx.x; e < 4096; e += 64) words[0][e] = e;
    __syncthreads();
    const int t = threadIdx.x % 32;
    float sum = 0.f;
    if (t >= lanes) return;
    const float* p = words[0] + at[threadIdx.x] * Wide;
    if (Wide == 1) sum = *p;
    else if (Wide == 2) {
        const float2 two = *reinterpret_cast<const float2*>(p);
        sum = two.x + two.y;
    } else {
        const float4 four = *reinterpret_cast<const float4*>(p);
        sum = four.x + four.w;
    }
    y[threadIdx.x] = sum;
}
"""
READS = {1: "if (Wide == 1) sum", 2: "const float2 two", 4: "const float4 four"}


@pytest.fixture(scope="module")
def any_kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("banks") / "any.cu"
    path.write_text(ANY)
    return path


@settings(max_examples=25, deadline=None)
@given(data=st.data(), wide=st.sampled_from([1, 2, 4]), lanes=st.integers(1, 32), seed=st.integers(0, 1000))
def test_any_addresses(any_kernel: Path, data: Any, wide: int, lanes: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    spread = data.draw(st.sampled_from([1, 8, 32, 1024]))
    at = (rng.integers(0, spread, 64) * data.draw(st.sampled_from([1, 2, 8, 32])) % (4096 // wide)).astype(np.int32)
    counted = bank_conflicts(
        Kernel(any_kernel, {"T": "float", "Wide": wide}), {"at": at, "y": np.zeros(64, "f4"), "lanes": lanes}
    )
    line = ANY.count("\n", 0, ANY.index(READS[wide])) + 1
    (read,) = [use for use in counted.lines if not use.write]
    assert (read.line, read.part, read.accesses) == (line, "words", 2)
    want = [[int(4 * wide * a) for a in half[:lanes]] for half in (at[:32], at[32:])]
    assert read.wavefronts == sum(wavefronts(addresses, 4 * wide) for addresses in want)
    assert read.phases == 2 * -(-lanes // (32 // wide))
    (write,) = [use for use in counted.lines if use.write]
    assert (write.accesses, write.wavefronts, write.ways) == (128, 128, 1.0)


def ladder(file: str, dtype: str, **template: Any) -> cuda.BankConflicts:
    rng = np.random.default_rng(0)
    D = template["D"]
    Q, K, V = (rng.standard_normal((1, 1, n, D)).astype(dtype) for n in (64, 100, 100))
    arguments = {"Q": Q, "K": K, "V": V, "O": np.zeros_like(Q), "L": np.zeros((1, 1, 64), "f4"), "Nq": 64, "Nk": 100}
    return bank_conflicts(Kernel(file, template), {**arguments, "causal": 0, "Hq": 1, "Hkv": 1})


@pytest.mark.parametrize(("layout", "ways"), [(0, 8.0), (1, 1.0), (2, 1.0)])
def test_the_layouts_of_rung_4(layout: int, ways: float) -> None:
    """Question 13: plain rows of 64 halves meet in one bank eight times, padded and swizzled ones never."""
    counted = ladder("flash_attention_2_async", "f2", T="half", Br=64, Bc=64, D=64, Layout=layout)
    for part in ("Qi", "Kj", "Vj"):
        assert counted.part(part, write=False).ways == ways
        assert counted.part(part, write=True).ways == 1.0
    warps, tiles, operands = 4, 2, 4 * 4  # of 16 keys by 16 columns
    assert counted.part("Kj", write=False).accesses == warps * tiles * operands
    assert counted.part("Qi", write=False).phases == 4 * warps * tiles * 4
    (read,) = [use for use in counted.lines if use.part == "Vj" and not use.write]
    assert "ldmatrix_x4_trans(v" in counted.text[read.line - 1]
    assert f"{ways:.2f}  ldmatrix_x4_trans(v" in str(counted)
    assert all("copy_rows" in counted.text[use.line - 1] for use in counted.lines if use.write), "the line that calls"


def test_one_thread_a_row_is_the_worst() -> None:
    """Rung 0: a row of scores a thread, and neighbouring rows begin in the same bank."""
    counted = ladder("flash_attention_2", "f4", Br=32, Bc=32, D=64)
    softmax = [use for use in counted.lines if "m_new = fmaxf(m_new, Sij[r][c])" in counted.text[use.line - 1]]
    assert [(use.part, use.ways) for use in softmax] == [("Sij", 32.0)]
    assert counted.part("Vj").ways == 1.0
    assert 1 < counted.total.ways < 32
    assert counted.total.accesses == sum(use.accesses for use in counted.lines)


def test_blocks_add_up(tmp_path: Path) -> None:
    text = "// @kernel k\n// @grid N\n// @block 32\n// @array y [N, 32]\n__global__ void k(float* y, int N) {\n"
    text += "    __shared__ float s[64];\n    s[threadIdx.x * 2] = 1;\n    __syncwarp();\n"
    text += "    y[blockIdx.x * 32 + threadIdx.x] = s[62 - 2 * threadIdx.x];\n}\n"
    (tmp_path / "k.cu").write_text(text)
    for blocks in (1, 3):
        counted = bank_conflicts(Kernel(tmp_path / "k.cu"), {"y": np.zeros((blocks, 32), "f4"), "N": blocks})
        assert [(use.line, use.write, use.accesses, use.wavefronts) for use in counted.lines] == [
            (7, True, blocks, 2 * blocks),
            (9, False, blocks, 2 * blocks),
        ]
    with pytest.raises(KeyError, match="no part Kj; it has s"):
        counted.part("Kj")
    y = np.ones((1, 32), "f4")
    bank_conflicts(Kernel(tmp_path / "k.cu"), {"y": y, "N": 1})
    assert (y == 1).all(), "the arrays given are not written"


def test_a_kernel_that_is_wrong_is_not_counted(tmp_path: Path) -> None:
    text = "// @kernel k\n// @grid 1\n// @block 64\n// @array y [64]\n__global__ void k(float* y) {\n    __shared__ float s[64];\n"
    text += "    s[threadIdx.x] = 1;\n    y[threadIdx.x] = s[63 - threadIdx.x];\n}\n"
    (tmp_path / "k.cu").write_text(text)
    with pytest.raises(KernelError, match=r"k.cu: k, on the processor: s\[\d+\]: thread .* no barrier between"):
        bank_conflicts(Kernel(tmp_path / "k.cu"), {"y": np.zeros(64, "f4")})
    (tmp_path / "k.cu").write_text(text.replace("= 1;", "= one;"))
    with pytest.raises(KernelError, match="k does not compile for the processor"):
        bank_conflicts(Kernel(tmp_path / "k.cu"), {"y": np.zeros(64, "f4")})
