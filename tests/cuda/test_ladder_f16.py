"""The 16-bit rungs of the ladder on the processor: right to what their types can hold, also where scores are steep, rise or are low."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from flashviz import cuda
from flashviz.cuda import cpu
from flashviz.cuda.nvrtc import Nvrtc, NvrtcMissingError
from flashviz.ladder import PREFILL

TUNED = "flash_attention_2_tuned"
SMALL: dict[str, dict[str, int | str]] = {
    "flash_attention_2_mma": {"Br": 32, "Bc": 16, "D": 32},
    "flash_attention_2_async": {"Br": 32, "Bc": 16, "D": 32, "Layout": 2},
    TUNED: {"Br": 64, "Bc": 32, "D": 32, "Warps": 2, "Stages": 2, "Aligned": 0},
}


@pytest.fixture(scope="module")
def checks() -> Iterator[ModuleType]:
    """benchmarks/ladder_checks.py, which holds the kernels to the same on a GPU."""
    if not cpu.status().usable:
        pytest.skip(cpu.status().reason)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
        import ladder_checks

        yield ladder_checks
        for name in ("ladder_checks", "gpu"):
            sys.modules.pop(name, None)


def errors(
    checks: ModuleType,
    file: str | Path,
    values: dict[str, int | str],
    kind: str,
    causal: bool,
    scale: float | None = None,
) -> tuple[float, float]:
    """Errors of O and L, of what is allowed."""
    rng = np.random.default_rng(5)
    arrays = checks.inputs_of_a_kind(rng, kind, values, 100)
    scale = int(values["D"]) ** -0.5 if scale is None else scale
    O, L = checks.on_processor(file, values, *arrays, causal, scale)
    found: tuple[float, float] = checks.compare(O, L, *arrays, scale, causal, values["T"])
    return found


@pytest.mark.parametrize("kind", ["", "steep scores", "rising scores", "low scores"])
@pytest.mark.parametrize("T", ["half", "bfloat16"])
@pytest.mark.parametrize("file", SMALL)
def test_as_good_as_the_type(checks: ModuleType, file: str, T: str, kind: str) -> None:
    for causal in (False, True):
        assert max(errors(checks, file, {"T": T, **SMALL[file]}, kind, causal)) < 1


@pytest.mark.parametrize("scale", [0.0, -0.3])
@pytest.mark.parametrize("file", SMALL)
def test_a_scale_of_zero_or_below_is_honoured(checks: ModuleType, file: str, scale: float) -> None:
    assert max(errors(checks, file, {"T": "half", **SMALL[file]}, "", True, scale)) < 1


@pytest.mark.parametrize("layout", [0, 1, 2])
@pytest.mark.parametrize("D", [16, 32, 64, 128])
def test_every_layout_holds_every_width(checks: ModuleType, layout: int, D: int) -> None:
    values = {"T": "half", "Br": 16, "Bc": 16, "D": D, "Layout": layout}
    assert max(errors(checks, "flash_attention_2_async", values, "", True)) < 1


@pytest.mark.parametrize(
    ("sizes", "nq", "nk"),
    [
        ({"Br": 16, "Bc": 16, "D": 16, "Warps": 1, "Stages": 2}, 64, 48),
        ({"Br": 32, "Bc": 32, "D": 32, "Warps": 1, "Stages": 3}, 64, 160),
        ({"Br": 64, "Bc": 32, "D": 64, "Warps": 4, "Stages": 4}, 128, 96),
    ],
)
def test_whole_tiles_give_the_same_bits_with_and_without_their_checks(
    checks: ModuleType, sizes: dict[str, int], nq: int, nk: int
) -> None:
    rng = np.random.default_rng(6)
    shapes = ((4, nq), (2, nk), (2, nk))
    Q, K, V = (rng.standard_normal((2, h, n, sizes["D"])).astype(np.float16) for h, n in shapes)
    for causal in (False, True):
        runs = [
            checks.on_processor(TUNED, {"T": "half", **sizes, "Aligned": aligned}, Q, K, V, causal, 0.2)
            for aligned in (0, 1)
        ]
        checks.compare(*runs[1], Q, K, V, 0.2, causal, "half")
        for a, b in zip(*runs, strict=True):
            assert (a == b).all()


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("j == 0 || signs >= 0", "j == 0", "rising scores"),  # m never moves: e^(s - m) overflows
        ("l[w][u] *= corr;", "", "rising scores"),  # the earlier tiles' terms count as before m moved
        ("start[w][2 * u] -= up, start[w][2 * u + 1] -= up;", "", "low scores"),  # m stays at 0: every term is 0
    ],
)
def test_moving_the_maximum_matters(checks: ModuleType, tmp_path: Path, old: str, new: str, kind: str) -> None:
    text = cuda.find(TUNED).text
    assert text.count(old) == 1
    path = tmp_path / "flash_attention_2_tuned.cu"
    path.write_text(text.replace(old, new))
    with pytest.raises(AssertionError):
        errors(checks, path, {"T": "half", **SMALL[TUNED]}, kind, False)


def test_the_measured_sizes_are_instantiations_without_spills() -> None:
    """What the ladder measures is what the files publish, so the budgets and the checks see it."""
    try:
        nvrtc = Nvrtc()
    except NvrtcMissingError as error:
        pytest.skip(str(error))
    for rung in PREFILL:
        if rung.kernel not in SMALL:
            continue
        source = cuda.find(rung.kernel)
        for D, values in rung.measured.items():
            published = [
                dict(t) for t in source.header.instances if {"D": D, "T": "half", **values}.items() <= t.items()
            ]
            assert len(published) == (4 if rung.kernel == TUNED else 1)
            names = [source.signature.instance(template) for template in published]
            compiled = nvrtc.compile(source.assembled, names, 90)
            assert compiled.ok, compiled.log
            assert all(used.spill_stores == used.stack == 0 for used in compiled.resources.values())
