"""The float32 rungs of the ladder on the processor: right to float32's digits, also where scores are steep and values large."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs.oracle import attention

from flashviz import cuda
from flashviz.cuda import cpu
from flashviz.cuda.nvrtc import Nvrtc, NvrtcMissingError
from flashviz.ladder import PREFILL

EPS = 2.0**-23
RUNGS = {
    "flash_attention_2_warps": {"Br": 16, "Bc": 16, "D": 32, "Rows": 4},
    "flash_attention_2_registers": {"Br": 32, "Bc": 16, "D": 32, "Rows": 4},
    "flash_attention_2_tf32": {"Br": 64, "Bc": 16, "D": 32, "Rows": 32},
}
TF32 = "flash_attention_2_tf32"


@pytest.fixture(scope="module", autouse=True)
def processor() -> None:
    if not cpu.status().usable:
        pytest.skip(cpu.status().reason)


def inputs(kind: str, Nq: int = 70, Nk: int = 83, D: int = 32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    Q, K, V = (rng.standard_normal((2, h, n, D), dtype=np.float32) for h, n in ((4, Nq), (2, Nk), (2, Nk)))
    if kind == "steep scores":
        K *= 8
    if kind == "rising scores":  # the maximum moves in every tile
        K = 4 * K[:, :, np.argsort((Q[0, 0, :1] * K[0, 0]).sum(-1))]
    if kind == "values around 1":
        V = 1 + V / 10
    if kind == "large values":
        V = 1000 * V
    return Q, np.ascontiguousarray(K), V.astype(np.float32)


def off_by(file: Any, template: dict[str, int], kind: str, causal: bool, scale: float | None = None) -> float:
    """The largest error of O and L, in units of what float32 may be off by: 32 roundings of the values and of the scores."""
    Q, K, V = inputs(kind, D=template["D"])
    O, L = np.full_like(Q, np.nan), np.full(Q.shape[:3], np.nan, np.float32)
    scale = template["D"] ** -0.5 if scale is None else scale
    args = (Q, K, V, O, L, Q.shape[2], K.shape[2], scale, causal, 4, 2)
    cuda.launch(cuda.Kernel(file, template), args, device="cpu")
    want_O, want_L = attention(Q, K, V, scale=scale, causal=causal)
    assert np.isfinite(O).all()
    steep = max(1, np.abs(want_L).max() / 8)
    error_O = np.abs(O - want_O).max() / np.abs(V).max()
    error_L = (np.abs(L - want_L) / np.maximum(1, np.abs(want_L))).max()
    return float(max(error_O, error_L) / (32 * EPS * steep))


@pytest.mark.parametrize("kind", ["", "steep scores", "rising scores", "values around 1", "large values"])
@pytest.mark.parametrize("file", RUNGS)
def test_as_good_as_float32(file: str, kind: str) -> None:
    assert off_by(file, RUNGS[file], kind, causal=False) < 1
    assert off_by(file, RUNGS[file], kind, causal=True) < 1


@pytest.mark.parametrize("scale", [0.0, -0.3])
@pytest.mark.parametrize("file", RUNGS)
def test_a_scale_of_zero_or_below_is_honoured(file: str, scale: float) -> None:
    assert off_by(file, RUNGS[file], "", causal=True, scale=scale) < 1


@pytest.mark.parametrize("left_out", ["A[a].small, B[n].big", "A[a].big, B[n].small"])
def test_each_small_product_counts(tmp_path: Path, left_out: str) -> None:
    """Without one of the three products the error is TF32's: the bound above tells them apart."""
    text = cuda.find(TF32).text
    at = f"mma_m16n8k8_tf32(d[a][first + n], {left_out}[0], {left_out.split(', ')[1]}[1]);"
    assert text.count(at) == 1
    path = tmp_path / "two_products.cu"
    path.write_text(text.replace(at, ";"))
    assert off_by(path, RUNGS[TF32], "", causal=False) > 10


def test_the_measured_sizes_are_instantiations_without_spills() -> None:
    """What the ladder measures is what the file publishes, so the budgets and the checks see it."""
    try:
        nvrtc = Nvrtc()
    except NvrtcMissingError as error:
        pytest.skip(str(error))
    for rung in PREFILL:
        if rung.kernel not in RUNGS:
            continue
        source = cuda.find(rung.kernel)
        for D, values in rung.measured.items():
            template = {"D": D, **values}
            assert template in [dict(t) for t in source.header.instances]
            name = source.signature.instance(template)
            compiled = nvrtc.compile(source.assembled, [name], 90)
            assert compiled.ok, compiled.log
            assert compiled.resources[name].spill_stores == compiled.resources[name].stack == 0
