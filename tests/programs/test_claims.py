"""A TRACE line cannot lie: memory accesses of kernels on the processor, and kernels with a lie in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs.traced import BY_NAME, CASES, Case, an_attention, change, loop_of

import flashviz as fv
from flashviz import cuda
from flashviz.cuda import cpu
from flashviz.programs import flash_attention_1 as fa1
from flashviz.programs import flash_attention_2 as fa2
from flashviz.programs.claims import FalseClaim, observe

pytestmark = pytest.mark.skipif(not cpu.status().usable, reason="no C++ compiler is here")


@pytest.mark.parametrize("case", CASES, ids=str)
@settings(max_examples=5)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_kernels_do_what_they_name(case: Case, seed: int) -> None:
    program = case.make(np.random.default_rng(seed))
    _, recording, false = observe(program, case.loops, lambda: case.launch(program))
    assert false == []
    expected = case.make(np.random.default_rng(seed))
    case.loops(expected)
    assert fv.same(recording, expected.run().recording) == []  # type: ignore[attr-defined]


def lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *edits: tuple[str, str]) -> list[FalseClaim]:
    change(monkeypatch, tmp_path, "flash_attention_2", *edits)
    fa = an_attention()
    return observe(fa, fa2.forward, lambda: fa2.launch_kernel(fa.a, "cpu"))[2]


LOAD_K = "Kj[x][c] = k < Nk ? K[(long long)k * D + x] : 0.f;"
LOAD_V = "Vj[c][x] = k < Nk ? V[(long long)k * D + x] : 0.f;"
LIES: dict[str, tuple[list[tuple[str, str]], tuple[str, str, str]]] = {
    # name: (edits, (action, array, what the first report of it says))
    "a wrong index in the line": (
        [("TRACE(load_k, j)", "TRACE(load_k, tiles - 1 - j)")],
        ("load_k", "K", r"TRACE(load_k, 3): reads K[0, 0, 0, 0], not of K3[0,0], which it names; 32 such elements"),
    ),
    "a wrong index in the load": (
        [(LOAD_K, LOAD_K.replace("(long long)k", "(long long)((k ^ 4) % Nk)"))],
        ("load_k", "K", "reads K[0, 0, 4, 0], not of K0[0,0], which it names"),
    ),
    "the other head": (
        [("h_kv = h / (Hq / Hkv)", "h_kv = (h + 1) % Hkv")],
        ("load_k", "K", "reads K[0, 1, 0, 0], not of K0[0,0]"),
    ),
    "another block's coordinates": (
        [("TRACE_BLOCK(b, h, i)", "TRACE_BLOCK(b, Hq - 1 - h, i)")],
        ("load_q", "Q", "block (0, 0, 0), TRACE(load_q, 0): reads Q[0, 1, 0, 0], not of Q0[0,0]"),
    ),
    "a line that moved down": (
        [
            ("        TRACE(load_v, j);\n", ""),
            ("        TRACE(scores, j);\n", "        TRACE(load_v, j);\n        TRACE(scores, j);\n"),
        ],
        ("load_k", "V", "TRACE(load_k, 0): reads V[0, 0, 0, 0], and names no tile of V; 32 such elements"),
    ),
    "a line that moved up": (
        [
            ("        TRACE(softmax, j);\n", ""),
            ("        TRACE(scores, j);\n", "        TRACE(scores, j);\n        TRACE(softmax, j);\n"),
        ],
        ("scores", "Sij", "TRACE(scores, 0): writes 0 of the 16 elements of Sij that it names"),
    ),
    "two lines that changed places": (
        [
            ("TRACE(load_k, j)", "TRACE(swap, j)"),
            ("TRACE(load_v, j)", "TRACE(load_k, j)"),
            ("TRACE(swap, j)", "TRACE(load_v, j)"),
        ],
        ("load_v", "K", "reads K[0, 0, 0, 0], and names no tile of K"),
    ),
    "half a tile": (
        [(LOAD_V, LOAD_V.replace("k < Nk ?", "k < Nk && x < D / 2 ?"))],
        ("load_v", "V", "reads 16 of the 32 elements of V0[0,0]; not V[0, 0, 0, 4]"),
    ),
    "a load that is half stored": (
        [(LOAD_V, f"if (c < Bc / 2) {LOAD_V}"), ("* Vj[c][x];", "* (c < Bc / 2 ? Vj[c][x] : 0.f);")],
        ("load_v", "Vj", "writes 16 of the 32 elements of Vj that it names"),
    ),
    "a load into another slot": (
        [(LOAD_V, LOAD_V.replace("Vj[c][x]", "Oi[c][x] = Vj[c][x]"))],
        ("load_v", "Oi", "writes Oi, which it does not name"),
    ),
    "an unnamed access before the first line": (
        [
            (
                "    TRACE(load_q, i);\n",
                "    if (threadIdx.x == 1) Oi[0][0] = K[3];\n    __syncthreads();\n    TRACE(load_q, i);\n",
            )
        ],
        ("", "K", "before the first TRACE line: thread 1 reads K, which no action names"),
    ),
    "an unnamed read of HBM": (
        [("float s = 0.f;", "float s = K[0] * 0.f;")],
        ("scores", "K", "TRACE(scores, 0): reads K[0, 0, 0, 0], and names no tile of K; 1 such elements"),
    ),
    "scores straight from HBM": (
        [("s += Qi[r][x] * Kj[x][c];", "s += Qi[r][x] * (j * Bc + c < Nk ? K[(j * Bc + c) * D + x] : 0.f);")],
        ("scores", "K", "names no tile of K; 32 such elements"),
    ),
    "an unnamed write to HBM": (
        [("li[r] = li[r] * corr + sum;", "li[r] = li[r] * corr + sum; if (i * Br + r < Nq) L[i * Br + r] = sum;")],
        ("softmax", "L", "writes L[0, 0, 0], and names no tile of L; 4 such elements"),
    ),
    "a store that forgets L": (
        [("        if (q < Nq) L[q] = mi[r] + logf(li[r]);", "        if (q == 0) L[q] = mi[r] + logf(li[r]);")],
        ("store_o", "L", "writes 1 of the 4 elements of L0[0,0]; not L[0, 0, 1]"),
    ),
    "work that its line does not name": (
        [
            ("            mi[r] = m_new;\n", ""),
            (
                "            float o = Oi[r][x];\n",
                "            float o = Oi[r][x];\n            if (x == 0) mi[r] = 1.f;\n",
            ),
        ],
        ("softmax", "mi", "writes 0 of the 4 elements of mi that it names"),
    ),
    "a line that only some threads pass": (
        [("        TRACE(load_v, j);\n", "        if (threadIdx.x == 0)\n            TRACE(load_v, j);\n")],
        ("load_v", "", "passes TRACE(scores, 0) instead, as its action 3"),
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_reported(lie: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edits, (action, array, words) = LIES[lie]
    found = lies(monkeypatch, tmp_path, *edits)
    mine = [claim for claim in found if (claim.action, claim.array) == (action, array)]
    assert mine, [str(claim) for claim in found[:4]]
    assert words in str(mine[0])
    assert str(mine[0]).startswith("flash_attention_2, block (0, 0, 0), ")
    assert found[0] in mine or found[0].block == mine[0].block


def test_an_honest_change_is_no_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles from the last to the first, and said so: another algorithm, no lie."""
    backwards = "for (int n = 0; n < tiles; ++n) { const int j = tiles - 1 - n;\n"
    assert lies(monkeypatch, tmp_path, (loop_of("flash_attention_2", "j"), backwards)) == []


def test_lies_of_a_kernel_with_two_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, tmp_path, "flash_attention_1", ("TRACE(load_o, j, i)", "TRACE(load_o, j, Tr - 1 - i)"))
    fa = an_attention(fa1.FlashAttention1)
    _, _, false = observe(fa, fa1.forward, lambda: fa1.launch_kernel(fa.a, "cpu"))
    assert (false[0].action, false[0].tiles, false[0].array) == ("load_o", (0, 2), "O")


@pytest.mark.parametrize(
    ("name", "file", "edit", "words"),
    [
        ("flash_decoding", "flash_decoding", ("TRACE(load_o, s)", "TRACE(load_o, Splits - 1 - s)"), "which it names"),
        (
            "standard_attention",
            "standard_attention",
            ("Sij[r][c];\n", "Sij[r][c] + 0.f * Q[0];\n"),
            "names no tile of Q",
        ),
        ("safe_softmax", "online_softmax", ("    TRACE(store_y, i);\n", ""), "writes y"),
        ("fused_softmax", "online_softmax", ("TRACE(load_v, i)", "TRACE(load_v, 0)"), "which it names"),
    ],
)
def test_lies_of_the_other_kernels(
    name: str, file: str, edit: tuple[str, str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch, tmp_path, file, edit)
    case = BY_NAME[name]
    found: list[Any] = []
    for seed in range(3):  # with one split or tile there is nothing to lie about
        program = case.make(np.random.default_rng(seed))
        found += observe(program, case.loops, lambda program=program: case.launch(program))[2]  # type: ignore[misc]
    assert found
    assert any(words in str(claim) for claim in found)


def test_a_race_is_an_error_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = "        __syncthreads();  // Kj and Vj are complete before any thread reads them\n"
    with pytest.raises(cuda.KernelError, match=r"flash_attention_2.*on the processor: .*Kj"):
        lies(monkeypatch, tmp_path, (barrier, ""))
