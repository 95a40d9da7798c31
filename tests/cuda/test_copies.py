"""Asynchronous copies, tensor-core loads, alignment and the order between blocks in checking mode: right code is silent, each planted fault is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import flashviz as fv
from flashviz.checks.kernel_report import Finding
from flashviz.cuda import Kernel, cpu, launch, plan

if not cpu.status().usable:
    pytest.skip("no C++ compiler is here: pip install ziglang", allow_module_level=True)

TILES = """// @kernel tiles
// @grid 2
// @block 64
// @array x [N, 32, 8]
// @array y [B, 64]
// @shape N=3 B=2
#include "include/ptx.cuh"
#include "include/shared.cuh"

__device__ void issue(SharedAddress to, const float* from, bool exists) {
    cp_async_16(to + threadIdx.x * 16, from + threadIdx.x * 4, exists);
}

__global__ void tiles(const float* x, float* y, int N, int B) {
    SharedCarver carve;
    const auto odd = carve.vector<4>("odd");
    const auto tile = carve.tile<64, 8>("tile");          // two stages of 32 rows
    const SharedAddress at = shared_address(tile[0]);
    const int t = threadIdx.x;
    float sum = 0.f;
    issue(at, x, true);
    cp_async_commit();
    for (int j = 0; j < N; ++j) {
        const int now = j % 2 * 32;
        cp_async_wait<0>();                               // mine
        __syncthreads();                                  // everyone's
        issue(at + (32 - now) * 32, x + (j + 1) * 256, j + 1 < N);
        cp_async_commit();
        for (int r = 0; r < 32; ++r) sum += tile[now + r][t % 8];
        if (t < 4) odd[t] = sum;
    }
    y[blockIdx.x * 64 + t] = sum;
}
"""
CHUNKS = """// @kernel chunks
// @grid 1
// @block 32
// @array x [32, 8]
// @array y [32, 4]
// @array z [32, 4]
// @instance T=half
#include "include/ptx.cuh"
#include "include/shared.cuh"

template <typename T>
__global__ void chunks(const T* x, float* y, float* z) {
    SharedCarver carve;
    const auto tile = carve.tile<T, 32, 8>("tile");
    const auto words = carve.tile<float, 33, 4>("words");
    const int lane = threadIdx.x;
    *(uint4*)tile[lane] = *(const uint4*)(x + lane * 8);
    *(float4*)words[lane] = make_float4(1, 2, 3, 4);
    __syncwarp();                                          // the tile is complete
    unsigned a[4] = {};
    float d[4] = {};
    ldmatrix_x4(a, shared_address(tile[lane]));
    mma_m16n8k16<T>(d, a, a[0], a[1]);
    for (int i = 0; i < 4; ++i) y[lane * 4 + i] = d[i] + transpose_8x8(a[i]) * 0.f;
    *(float4*)(z + lane * 4) = *(const float4*)words[lane ^ 1];
}
"""
LAST = """// @kernel last
// @grid 4
// @block 64
// @array parts [4, 64]
// @array sums [64]
#include "include/ptx.cuh"
__device__ unsigned done;
__global__ void last(float* parts, float* sums) {
    const int t = threadIdx.x;
    parts[blockIdx.x * 64 + t] = blockIdx.x + t;
    __shared__ bool mine;
    __threadfence();                                       // my part before the count
    __syncthreads();                                       // every part
    if (t == 0) mine = atomicInc(&done, 3u) == 3u;
    __syncthreads();                                       // all know
    if (!mine) return;
    float sum = 0.f;
    for (int n = 0; n < 4; ++n) sum += parts[n * 64 + 63 - t];
    sums[t] = sum;
}
"""


def line_of(text: str, words: str) -> int:
    return text.count("\n", 0, text.index(words)) + 1


def found(text: str, old: str = "", new: str = "") -> list[Finding]:
    assert old in text
    report = fv.check(text.replace(old, new, 1) if old else text, answers=False)
    assert report.problem == "", report
    return list(report.findings)


@pytest.mark.parametrize("text", [TILES, CHUNKS, LAST], ids=["tiles", "chunks", "last"])
def test_right_code_has_nothing_to_report(text: str) -> None:
    assert found(text) == []


def test_copies_bring_the_numbers_and_zeros_where_nothing_exists(tmp_path: Path) -> None:
    (tmp_path / "tiles.cu").write_text(TILES.replace("j < N; ++j", "j <= N; ++j"))
    x = np.random.default_rng(0).standard_normal((3, 32, 8), dtype=np.float32)
    y = np.zeros((2, 64), np.float32)
    launch(Kernel(tmp_path / "tiles.cu"), {"x": x, "y": y, "N": 3, "B": 2}, device="cpu")
    want = np.tile(x.astype(np.float64).sum((0, 1)), (2, 8))
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)


def test_what_was_not_waited_for_is_nan(tmp_path: Path) -> None:
    """Also where nothing is checked, so that an answer held against a reference shows it."""
    (tmp_path / "tiles.cu").write_text(TILES.replace("cp_async_wait<0>", "cp_async_wait<1>"))
    y = np.zeros((2, 64), np.float32)
    launch(Kernel(tmp_path / "tiles.cu"), {"x": np.ones((3, 32, 8), "f4"), "y": y, "N": 3, "B": 2}, device="cpu")
    assert np.isnan(y).all()


READ, COPY = "sum += tile[now + r]", "cp_async_16(to"


@pytest.mark.parametrize(
    ("old", "new", "kinds", "lines"),
    [
        ("cp_async_wait<0>();", ";", {"pending"}, (READ, COPY)),
        ("cp_async_wait<0>();", "cp_async_wait<1>();", {"pending"}, (READ, COPY)),
        ("    cp_async_commit();\n    for", "    for", {"pending"}, (READ, COPY)),
        ("        cp_async_commit();\n        for", "        for", {"pending"}, (READ, COPY)),
        ("__syncthreads();                                  // everyone's", ";", {"race", "pending"}, (READ, COPY)),
        ("at + (32 - now) * 32", "at + now * 32", {"race", "pending"}, (READ, COPY)),
        ("if (t < 4) odd[t] = sum;", "tile[32 - now + t / 2][t % 2 * 4] = 0;", {"pending"}, ("tile[32 - now + t / 2]", COPY)),
        ("at + (32 - now) * 32", "at + (64 - now) * 32", {"bounds"}, (COPY,)),
        ("at + (32 - now) * 32", "at + (32 - now) * 32 + 4", {"aligned"}, (COPY,)),
        ("x + (j + 1) * 256", "x + (j + 1) * 256 + 1", {"aligned"}, (COPY,)),
        ("j + 1 < N);", "true);", {"bounds"}, (COPY,)),
        ("shared_address(tile[0])", "shared_address(x)", {"wild"}, ("shared_address(x)",)),
        ("to + threadIdx.x * 16", "to + threadIdx.x * 16 + 0x40000000u", {"wild"}, (COPY,)),
        ("from + threadIdx.x * 4", "(const float*)(fv::arena + 4096) + threadIdx.x * 4", {"wild"}, (COPY,)),
    ],
)  # fmt: skip
def test_faults_of_copies(old: str, new: str, kinds: set[str], lines: tuple[str, ...]) -> None:
    text = TILES.replace(old, new, 1)
    findings = found(TILES, old, new)
    assert {finding.kind for finding in findings} <= kinds
    wanted = {line_of(text, words) for words in lines}
    for finding in findings:
        assert wanted <= set(finding.lines), finding
    assert findings


def test_the_sentence_says_whose_copy(tmp_path: Path) -> None:
    finding = found(TILES, "cp_async_wait<0>();", ";")[0]
    assert finding.kind == "pending"
    assert finding.element.startswith("tile[")
    assert "while the copy that " in finding.sentence
    assert f"started at line {line_of(TILES, COPY)} (called at line " in finding.sentence
    assert "cp_async_wait that covers it" in finding.meaning
    zero = found(TILES, "j + 1 < N);", "true);")[0]
    assert "x[3, 0, 0]" in zero.sentence or zero.element == "x[768]"


WHOLE = "ldmatrix_x4(a, shared_address(tile[lane]));"


@pytest.mark.parametrize(
    ("old", "new", "kind", "words"),
    [
        (WHOLE, "ldmatrix_x4(a, shared_address(tile[lane + 1]));", "bounds", "ldmatrix_x4(a"),
        (WHOLE, "ldmatrix_x4(a, shared_address(tile[lane]) + 2);", "aligned", "ldmatrix_x4(a"),
        (WHOLE, "if (lane < 31) ldmatrix_x4(a, shared_address(tile[lane]));", "warp", "ldmatrix_x4(a"),
        (WHOLE, "ldmatrix_x4(a, 0x80000000u + lane * 16);", "wild", "ldmatrix_x4(a"),
        ("    __syncwarp();  ", "    ;  ", "race", "*(float4*)(z"),
        (WHOLE, "*(uint4*)tile[lane] = *(const uint4*)(x + lane * 8);\n    ldmatrix_x4(a, shared_address(tile[lane ^ 1]));", "race", "ldmatrix_x4(a"),
        ("mma_m16n8k16<T>(d, a, a[0], a[1]);", "if (lane != 5) mma_m16n8k16<T>(d, a, a[0], a[1]);", "warp", "mma_m16n8k16<T>"),
        ("mma_m16n8k16<T>(d, a,", "if (lane == 9) return;\n    mma_m16n8k16<T>(d, a,", "warp", "mma_m16n8k16<T>"),
        ("mma_m16n8k16<T>(d, a, a[0], a[1]);", "if (lane & 1) mma_m16n8k16<T>(d, a, 0, 0);\n    else mma_m16n8k16<T>(d, a, 1, 1);", "warp", "mma_m16n8k16<T>(d, a, "),
        ("words[lane ^ 1]", "(words[lane ^ 1] + 1)", "aligned", "*(float4*)(z"),
        ("(x + lane * 8)", "(x + lane * 8 + 1)", "aligned", "*(uint4*)tile"),
        ("words[lane ^ 1]", "words[lane + 1]", "unwritten", "*(float4*)(z"),
    ],
)  # fmt: skip
def test_faults_of_warps(old: str, new: str, kind: str, words: str) -> None:
    text = CHUNKS.replace(old, new, 1)
    findings = found(CHUNKS, old, new)
    assert [finding.kind for finding in findings] == [kind] * len(findings)
    first = line_of(text, words)
    for finding in findings:
        assert {first, first + 1} & {line for places in finding.places for name, line in places if name == "kernel.cu"}
    assert findings


def test_what_a_warp_has_read_together_any_of_its_lanes_may_overwrite() -> None:
    """But not another warp's, and not what a lane reads alone."""
    store = "unsigned short* const next = &tile[lane ^ 1][0].bits;\n    *next = 0;"
    assert found(CHUNKS, WHOLE, f"{WHOLE}\n    {store}") == []
    two = CHUNKS.replace("// @block 32", "// @block 64").replace(
        "const int lane = threadIdx.x;", "const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;"
    )
    two = two.replace("    *(uint4*)tile[lane] =", "    if (!warp) *(uint4*)tile[lane] =").replace(
        "    *(float4*)words[lane] =", "    if (!warp) *(float4*)words[lane] ="
    )
    two = (
        two.replace("    __syncwarp(); ", "    __syncthreads(); ")
        .replace("    for (int i = 0", "    if (!warp) for (int i = 0")
        .replace("    *(float4*)(z", "    if (!warp) *(float4*)(z")
    )
    assert found(two) == []
    late = found(two, WHOLE, f"{WHOLE}\n    if (warp) *(unsigned*)&tile[lane][0] = 0;")
    assert {(finding.kind, finding.array) for finding in late} == {("race", "tile")}


def test_the_lane_that_gave_the_address_is_named() -> None:
    finding = found(CHUNKS, WHOLE, "ldmatrix_x4(a, shared_address(tile[lane == 17 ? 40 : lane]));")[0]
    assert (finding.kind, finding.threads[0][1]) == ("bounds", (17, 0, 0))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("__threadfence();", ";"),
        ("__syncthreads();                                       // every", ";  //"),
        ("mine = atomicInc(&done, 3u) == 3u", "mine = blockIdx.x == 3"),
        ("atomicInc(&done, 3u)", "atomicInc(&done + 0 * blockIdx.x, 3u), parts[1] = 0, 3u"),
    ],
)
def test_blocks_that_wait_for_each_other_wrongly(old: str, new: str) -> None:
    findings = found(LAST, old, new)
    assert {finding.kind for finding in findings} <= {"blocks", "race"}
    assert any(finding.array == "parts" for finding in findings)


def test_a_fence_of_the_thread_that_counts_is_enough() -> None:
    text = LAST.replace("    __threadfence();                                       // my part before the count\n", "")
    assert found(text, "if (t == 0) mine", "if (t == 0) __threadfence(), mine") == []


def test_device_globals_are_as_before_after_a_launch_that_was_stopped() -> None:
    """Otherwise the next order would begin with a count that is not zero, and report what is no fault of the kernel's."""
    text = LAST.replace(
        "    __threadfence();", "    if (blockIdx.x == 2 && done == 2) parts[256 + t] = 1;\n    __threadfence();"
    )
    report = fv.check(text, answers=False, orders=("forward", "reverse"))
    assert [(finding.kind, finding.orders) for finding in report.findings] == [("bounds", ("forward",))], report


def test_the_log_has_every_element_once_and_copies_where_they_were_issued(tmp_path: Path) -> None:
    (tmp_path / "tiles.cu").write_text(TILES.replace("int N, int B) {", "int N, int B) {\n    N = 1;"))
    ready = plan(
        Kernel(tmp_path / "tiles.cu"), {"x": np.ones((3, 32, 8), "f4"), "y": np.zeros((2, 64), "f4"), "N": 3, "B": 2}
    )
    outcome, _ = cpu.launch_once(cpu.compile_plan(ready, check=True), ready, check=True, log=1 << 16)
    assert outcome.fault is None
    assert outcome.accesses is not None
    records, number = outcome.accesses.records, {name: n for n, name in outcome.accesses.names.items()}
    block = records[records["block"] == 0]
    reads = block[block["array"] == number["x"]]
    assert sorted(reads["element"]) == list(range(256)), "16 bytes are four elements; where nothing exists none is read"
    assert not reads["write"].any()
    writes = block[(block["array"] == number["tile"]) & (block["write"] == 1)]
    assert sorted(writes["element"]) == list(range(512))
    chunk = writes[writes["thread"] == 5]
    assert chunk["element"].tolist() == [20, 21, 22, 23, 276, 277, 278, 279]


STRUCTS = """// @kernel structs
// @grid 1
// @block 32
// @array y [32]
#include "include/half.cuh"
struct Pair { float a, b; };
__device__ Pair pair(float x) { return {x, x}; }
__device__ float2 two(float x) { return make_float2(x, x); }
__device__ half round_to_half(float x) { return {(unsigned short)pack<half>(x, x)}; }
__device__ float counted;
__global__ void structs(float* y) {
    __shared__ Pair p[32];
    __shared__ float2 v[32];
    __shared__ half h[32];
    const int t = threadIdx.x;
    p[t] = pair(t);
    v[t] = two(t);
    h[t] = round_to_half(t);
    counted += 1;
    __syncthreads();
    float a, b;
    unpack<half>(a, b, h[31 - t].bits);
    y[t] = a + v[31 - t].x + p[31 - t].a;
}
"""


def test_what_functions_return_into_arrays() -> None:
    """CUDA's vectors and the 16-bit floats are seen; a struct of the reader's own is not, with g++; nor are device globals."""
    mine = STRUCTS.replace(" + p[31 - t].a", "")
    assert found(mine) == []
    for only in ("v", "h"):
        text = (
            mine.replace("    __syncthreads();\n", "").replace("31 - t", "t").replace(f"{only}[t].", f"{only}[31 - t].")
        )
        assert {(finding.kind, finding.array) for finding in found(text)} == {("race", only)}
    assert {(finding.kind, finding.array) for finding in found(STRUCTS)} <= {("unwritten", "p")}
