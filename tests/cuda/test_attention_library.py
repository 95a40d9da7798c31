"""kernels/include/attention.cuh: what is built from it costs what the kernel written out costs, and does the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs.oracle import attention, bound

import flashviz as fv
from flashviz import cuda, tiles
from flashviz.cuda import cpu
from flashviz.cuda.machine_code import instructions, sections
from flashviz.cuda.nvrtc import Nvrtc, NvrtcMissingError
from flashviz.cuda.sources import parse
from flashviz.programs import flash_attention_2 as fa2
from flashviz.programs.claims import observe
from flashviz.programs.replay import run_kernel

SIZES = [(4, 4, 8), (16, 16, 32), (32, 32, 64), (64, 64, 128), (64, 32, 64)]


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    try:
        return Nvrtc()
    except NvrtcMissingError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def processor() -> None:
    if not cpu.status().usable:
        pytest.skip(cpu.status().reason)


def cost(nvrtc: Nvrtc, code: str, kernel: str, sizes: tuple[int, ...], arch: int) -> tuple[Any, Any]:
    """Registers, spills and stack of a kernel, and its instructions of each kind."""
    compiled = nvrtc.compile(code, [f"{kernel}<{', '.join(map(str, sizes))}>"], arch)
    assert compiled.ok, compiled.problems
    (found,) = sections(compiled.cubin).values()
    (resources,) = compiled.resources.values()
    return resources, instructions(found)


@pytest.mark.parametrize("arch", [75, 80, 90])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_same_registers_and_instructions_of_each_kind(nvrtc: Nvrtc, sizes: tuple[int, ...], arch: int) -> None:
    by_hand = cost(nvrtc, cuda.find("flash_attention_2").assembled, "flash_attention_2", sizes, arch)
    built = cost(nvrtc, cuda.find("attention_library").assembled, "attention_library", sizes, arch)
    assert built == by_hand
    assert built[1]["FFMA"] > 0
    assert built[1]["BAR"] == 5


def test_the_comparison_can_fail(nvrtc: Nvrtc) -> None:
    code = cuda.find("attention_library").assembled
    line = "dot += q[r][x] * k[x][c];"
    assert line in code
    other = cost(nvrtc, code.replace(line, "dot += q[r][x] * k[x][c] + 1e-9f;"), "attention_library", (32, 32, 64), 80)
    by_hand = cost(nvrtc, cuda.find("flash_attention_2").assembled, "flash_attention_2", (32, 32, 64), 80)
    assert other[1] != by_hand[1]


def test_the_same_shared_memory_and_launch() -> None:
    by_hand = cuda.find("flash_attention_2")
    for name in ("attention_library", "attention_short"):
        built = cuda.find("attention_library", name)
        assert built.parts == by_hand.parts
        assert built.header.grid == by_hand.header.grid
        assert built.header.arrays == by_hand.header.arrays
        assert [p.name for p in built.signature.parameters] == [p.name for p in by_hand.signature.parameters]


def launch(a: Any, function: str) -> tuple[np.ndarray, np.ndarray]:
    O, L = np.empty(a.Q.shape, np.float32), np.empty(a.Q.shape[:3], np.float32)
    kernel = cuda.Kernel("attention_library", {"Br": a.Br, "Bc": a.Bc, "D": a.d}, function=function, block=96)
    numbers = (a.Nq, a.Nk, a.scale, a.causal, a.Q.shape[1], a.K.shape[1], *a.limits)
    cuda.launch(kernel, (a.Q, a.K, a.V, O, L, *numbers), device="cpu", poison=True)
    return O, L


PROBLEMS = [  # Hq, Hkv, Nq, Nk, Br, Bc, rules
    (1, 1, 9, 9, 4, 4, {}),
    (4, 2, 40, 70, 16, 16, {"causal": True, "kv_len": 61, "window": 9}),
    (2, 1, 9, 5, 4, 2, {"causal": True, "window": 2}),
    (1, 1, 4, 8, 4, 4, {"causal": True, "kv_len": 0}),
    (2, 2, 17, 3, 4, 4, {"causal": True}),
]


@pytest.mark.parametrize("function", ["attention_library", "attention_short"])
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_built_from_the_library_they_do_what_the_kernel_by_hand_does(
    processor: None, function: str, problem: tuple[Any, ...]
) -> None:
    Hq, Hkv, Nq, Nk, Br, Bc, rules = problem
    rng = np.random.default_rng(Nk)
    Q, K, V = (rng.standard_normal((h, n, 8), dtype="float32") for h, n in ((Hq, Nq), (Hkv, Nk), (Hkv, Nk)))
    used = rules.get("kv_len", Nk)
    K[:, used:] = V[:, used:] = np.nan
    options = {"Br": Br, "Bc": Bc, **rules}
    by_hand = fv.flash_attention_2(Q, K, V, device="cpu", record=False, **options)
    made = fa2.FlashAttention2(Q, K, V, **options)
    (O, L), recording = run_kernel(made, fa2.forward, lambda: launch(made.a, function), "cpu")
    assert np.array_equal(O[0], by_hand.O)
    assert np.array_equal(L[0], by_hand.L)
    assert fv.same(recording, fv.flash_attention_2(Q, K, V, device="numpy", **options)) == []
    want_O, _ = attention(Q, K, V, **rules)
    assert np.abs(O[0] - want_O).max() <= bound(Q, np.nan_to_num(K), np.nan_to_num(V))[0]


def test_what_the_library_names_is_what_it_touches(processor: None) -> None:
    Q, K, V = np.random.default_rng(3).standard_normal((3, 1, 10, 8), dtype="float32")
    made = fa2.FlashAttention2(Q, K, V, causal=True)
    _, _, false = observe(made, fa2.forward, lambda: launch(made.a, "attention_library"))
    assert false == []
    # The short one divides before it comes to its store: what its last action does is not what it names.
    made = fa2.FlashAttention2(Q, K, V, causal=True)
    _, _, false = observe(made, fa2.forward, lambda: launch(made.a, "attention_short"))
    assert {(claim.action, claim.array) for claim in false} == {("accumulate", "li")}


OWN = """// @kernel own
// @array s [Br, Bc]
// @array v [Bc, D]
// @array O [Br, D]
// @array P [Br, Bc]
#include "include/attention.cuh"
template <int Br, int Bc, int D>
__global__ void own(const float* s, const float* v, float* O, float* P, int cols, int row0, int col0, int window) {
    SharedCarver carve;
    const auto S = carve.tile<Br, Bc>("S");
    const auto Vj = carve.tile<Bc, D>("Vj");
    const auto acc = carve.tile<Br, D>("acc");
    const auto m = carve.vector<Br>("m");
    const auto l = carve.vector<Br>("l");
    load_rows<Br, Bc>(S, s, 0, Br);
    load_rows<Bc, D>(Vj, v, 0, Bc);
    for (int e = threadIdx.x; e < Br * D; e += blockDim.x) acc[e / D][e % D] = 0.f;
    for (int r = threadIdx.x; r < Br; r += blockDim.x) { m[r] = -INFINITY; l[r] = 0.f; }
    mask_cols<Br, Bc>(S, cols);
    causal_mask<Br, Bc>(S, row0, col0, window);
    __syncthreads();
    online_softmax<Br, Bc, D>(acc, m, l, S, Vj);
    __syncthreads();
    for (int e = threadIdx.x; e < Br * D; e += blockDim.x) O[e] = normalise(acc[e / D][e % D], l[e / D]);
    for (int e = threadIdx.x; e < Br * Bc; e += blockDim.x) P[e] = S[e / Bc][e % Bc];
}
"""


@pytest.mark.parametrize(
    ("cols", "row0", "col0", "window"), [(5, 9, 0, 0), (3, 0, 0, 0), (5, 4, 2, 2), (4, -3, 0, 0), (5, 6, 0, 3)]
)
def test_the_functions_are_those_of_tiles(
    processor: None, tmp_path: Path, cols: int, row0: int, col0: int, window: int
) -> None:
    path = tmp_path / "own.cu"
    path.write_text(OWN)
    rng = np.random.default_rng(cols)
    s, v = rng.standard_normal((4, 5), dtype="float32"), rng.standard_normal((5, 8), dtype="float32")
    O, P = np.empty((4, 8), "float32"), np.empty((4, 5), "float32")
    kernel = cuda.Kernel(path, {"Br": 4, "Bc": 5, "D": 8}, grid=(1,), block=7)
    cuda.launch(kernel, (s, v, O, P, cols, row0, col0, window), device="cpu", poison=True)
    masked = tiles.causal_mask(tiles.mask_cols(s, cols), row0, col0, window or None)
    zeros, none = np.zeros(4, "float32"), np.full(4, -np.inf, "float32")
    acc, m, l, p = tiles.online_softmax(np.zeros((4, 8), "float32"), none, zeros, masked, v)
    np.testing.assert_allclose(P, p, atol=1e-6)
    np.testing.assert_allclose(O, tiles.normalise(acc, m, l)[0], atol=1e-6)
    assert (P[np.isneginf(masked)] == 0).all()


def test_a_missing_barrier_of_the_library_is_found(processor: None, tmp_path: Path) -> None:
    """Beside the file, an edited copy of the header takes the place of the library's own."""
    header = (cuda.find("attention_library").path.parent / "include" / "attention.cuh").read_text()
    barrier = "    __syncthreads();  // s holds probabilities"
    assert header.count(barrier) == 1
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "attention.cuh").write_text(header.replace(barrier, "    // s holds probabilities"))
    path = tmp_path / "attention_library.cu"
    path.write_text(cuda.find("attention_library").text)
    report = fv.check(path, function="attention_library", seconds=20)
    assert any(finding.kind == "race" for finding in report.findings), report


def test_every_barrier_says_what_it_protects() -> None:
    folder = cuda.find("attention_library").path.parent
    for name in ("include/attention.cuh", "attention_library.cu"):
        lines = [line for line in (folder / name).read_text().splitlines() if "__syncthreads()" in line]
        assert lines
        assert all(len(line.partition("//")[2].split()) > 5 for line in lines)


def test_trace_names_are_the_programs() -> None:
    source = parse(cuda.find("attention_library").text, cuda.find("attention_library").path)
    assert set(source.trace_ids) == set(fa2.FlashAttention2.action_names())
