"""fv.traffic_model: the formulas, held against recordings, and what a mismatch says."""

from __future__ import annotations

import pkgutil
from dataclasses import replace

import numpy as np
import pytest

import flashviz as fv
from flashviz.checks import models


def inputs(N: int = 10, d: int = 4) -> list[np.ndarray]:
    return list(np.random.default_rng(1).standard_normal((3, N, d)).astype("float32"))


def test_a_mismatch_says_which_tensor_and_by_how_much() -> None:
    run = fv.flash_attention_2(*inputs(), Br=4, Bc=4, device="numpy")
    assert fv.check_traffic(run) == []
    wrong = fv.traffic_model(run, Nk=14)
    assert wrong.differences(fv.traffic(run)) == [
        "K: 480 bytes read, the formula says 672",
        "V: 480 bytes read, the formula says 672",
    ]


def test_a_load_left_out_is_a_mismatch() -> None:
    fa = fv.FlashAttention2(*inputs(8), Br=4, Bc=4)
    for i in range(fa.Tr):
        fa.begin(i)
        fa.load_q()
        for j in range(fa.Tc):
            fa.load_k(j)
            if (i, j) != (1, 1):
                fa.load_v(j)
            fa.scores(j)
            fa.softmax(j)
            fa.accumulate(j)
        fa.store_o()
    assert fv.check_traffic(fa.run()) == ["V: 192 bytes read, the formula says 256"]


def test_unknown_names_and_missing_sizes_are_named() -> None:
    with pytest.raises(ValueError, match=r"no formula for 'flash_attention_9'; there are .*flash_attention_2"):
        fv.traffic_model("flash_attention_9", Nq=1)
    with pytest.raises(ValueError, match=r"needs \w+="):
        fv.traffic_model("flash_attention_2", Nq=8)


def test_every_formula_has_a_program_that_it_is_held_against() -> None:
    for module in pkgutil.iter_modules(models.__path__):
        found = fv.flash_attention_2(*inputs(), device="numpy").recording
        assert found is not None
        with pytest.raises(ValueError, match="needs"):
            fv.traffic_model(replace(found, algorithm=module.name, params={}))


def test_it_prints_bytes() -> None:
    text = str(fv.traffic_model("standard_attention", Nq=8, Nk=8, d=4))
    assert "S              256            256" in text
