"""What of a launch follows from the header and the arrays: template values, sizes, outputs, and what an autotuner tries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashviz.cuda.choices import arguments, candidates_of, fixed_values, planned, sizes_of
from flashviz.cuda.sources import SourceError, find

KERNEL = """// @kernel k
// @grid ceil(Nq / Br), 1, B
// @block 32 * Warps
// @array Q [B, Nq, D]
// @array K [B, Nk, D]
// @array O [splits, B, Nq, D]
// @array L [B, Nq]
// @default scale = 1 / sqrt(D)
// @instance T=half Br=16 Bc=32 D=64 Warps=1 Causal=0 Aligned=0
// @instance T=half Br=16 Bc=32 D=64 Warps=1 Causal=1 Aligned=1
// @instance T=half Br=32 Bc=32 D=64 Warps=2 Causal=1 Aligned=1
// @instance T=half Br=32 Bc=32 D=128 Warps=2 Causal=1 Aligned=1
template <typename T, int Br, int Bc, int D, int Warps, bool Causal, bool Aligned>
__global__ void k(const T* Q, const T* K, T* O, float* L, int Nq, int Nk, float scale, int splits) {}
"""


@pytest.fixture
def source(tmp_path: Path) -> Any:
    def write(*tunes: str) -> Any:
        lines = "".join(f"// @tune {line}\n" for line in tunes)
        path = tmp_path / "k.cu"
        path.write_text(KERNEL.replace("template <", f"{lines}template <"))
        return find(path)

    return write


def args(Nq: int = 33, dtype: str = "f2", **more: Any) -> dict[str, Any]:
    return {"Q": np.ones((2, Nq, 64), dtype), "K": np.ones((2, 64, 64), dtype), "splits": 3, **more}


def test_the_arrays_decide_types_and_dimensions(source: Any) -> None:
    k = source()
    assert fixed_values(k, args()) == {"D": 64, "Causal": 0, "T": "half"}
    assert fixed_values(k, args(causal=True)) == {"D": 64, "Causal": 1, "T": "half"}
    assert fixed_values(k, args(dtype="u2"))["T"] == "bfloat16"
    assert fixed_values(k, args(dtype="f4"))["T"] == "float"
    assert sizes_of(k, args()) == {"B": 2, "Nq": 33, "Nk": 64, "D": 64, "splits": 3}
    assert sizes_of(k, {"Q": np.ones((5, 8))})["B"] == 1


def test_outputs_and_sizes_that_are_left_out_are_made(source: Any) -> None:
    k = source()
    given = args(causal=1)
    full = arguments(k, given, fixed_values(k, given), "cpu")
    assert list(full) == ["Q", "K", "O", "L", "Nq", "Nk", "splits"]  # scale is the header's; causal is no parameter
    assert (full["O"].shape, full["O"].dtype, full["L"].shape, full["L"].dtype) == ((3, 2, 33, 64), "f2", (2, 33), "f4")
    assert (full["Nq"], full["Nk"], full["Q"] is given["Q"]) == (33, 64, True)
    out = np.empty((3, 2, 33, 64), "f2")
    assert arguments(k, {**given, "O": out, "Nk": 60}, {"T": "half", "D": 64}, "cpu")["O"] is out


def test_candidates(source: Any) -> None:
    k = source()
    fixed = fixed_values(k, args())
    assert list(candidates_of(k, None, fixed)) == [{"Br": 16, "Bc": 32, "Warps": 1}, {"Br": 32, "Bc": 32, "Warps": 2}]
    grid = {"Br": [16, 32], "Warps": [1, 2]}
    assert list(candidates_of(k, grid, fixed)) == [{"Br": r, "Warps": w} for r in (16, 32) for w in (1, 2)]
    assert list(candidates_of(k, [{"Br": 16}, {"Br": 8, "D": 64}, {"Br": 16, "T": "half"}], fixed)) == [
        {"Br": 16},
        {"Br": 8},
    ]
    tuned = source("Br=64,128 Bc=32 Warps=4", "Br=64 Bc=32,64 Warps=4")
    found = [tuple(values.values()) for values in candidates_of(tuned, None, fixed)]
    assert found == [(64, 32, 4), (128, 32, 4), (64, 64, 4)]
    with pytest.raises(SourceError, match=r"@tune Br=64;128: expected NAME=NUMBER,NUMBER"):
        source("Br=64;128")


@pytest.mark.parametrize(("Nq", "aligned"), [(32, True), (33, False), (48, False)])
def test_whole_tiles_are_said_to_be(source: Any, Nq: int, aligned: bool) -> None:
    k = source()
    given = args(Nq)
    fixed = fixed_values(k, given)
    full = arguments(k, given, fixed, "cpu")
    values = {**fixed, "Br": 32, "Bc": 32, "Warps": 2}
    plan = planned(k.path, k, values, full, None)
    assert plan.instance == f"k<half, 32, 32, 64, 2, 0, {int(aligned)}>"
    assert (plan.grid, plan.block) == ((-(-Nq // 32), 1, 2), (64, 1, 1))
    assert ", 0>" in planned(k.path, k, {**values, "Aligned": 0}, full, None).instance
