"""fv.compare: two recordings on one slider."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashviz as fv


def runs() -> tuple[Any, Any]:
    Q, K, V = np.random.default_rng(0).standard_normal((3, 8, 4)).astype("float32")
    first = fv.flash_attention_1(Q, K, V, Br=4, Bc=4, device="numpy")
    return first, fv.flash_attention_2(Q, K, V, Br=4, Bc=4, device="numpy")


def test_every_control_shows_the_same_step_of_both() -> None:
    a, b = runs()
    compared = fv.compare(a, b)
    assert len(compared) == max(len(r.recording.steps) for r in (a, b))
    for control in (compared.slider, compared.play):
        control.value = 5
        assert compared.index == compared.slider.value == compared.play.value == 5
        for side, run in enumerate((a, b)):
            assert run.recording.steps[5].caption in compared.pictures[side].value
            assert "step 5 of" in compared.texts[side].value
        control.value = 0


def test_the_shorter_one_waits_at_its_end_and_says_so() -> None:
    a, b = runs()
    compared = fv.compare(a, b, ["one", "two"])
    compared.go(10_000)
    last = len(b.recording.steps) - 1
    assert compared.index == len(a.recording.steps) - 1 > last
    assert f"step {last} of {last} · done" in compared.texts[1].value
    assert "done" not in compared.texts[0].value
    assert b.recording.steps[-1].caption in compared.pictures[1].value


def test_counts_are_those_of_the_step() -> None:
    a, b = runs()
    compared = fv.compare(a, b)
    compared.go(7)
    for side, run in enumerate((a, b)):
        counted = fv.traffic(run, upto_step=7)
        assert f"{counted.bytes_read:,} bytes" in compared.texts[side].value


def test_it_shows_a_picture_where_there_are_no_widgets_and_no_view_once_closed() -> None:
    compared = fv.compare(*runs())
    bundle = compared._repr_mimebundle_()
    assert bundle["image/png"].startswith(b"\x89PNG")
    assert "application/vnd.jupyter.widget-view+json" in bundle
    compared.close()
    compared.close()
    assert "application/vnd.jupyter.widget-view+json" not in compared._repr_mimebundle_()


def test_bad_input_is_named() -> None:
    a, b = runs()
    with pytest.raises(ValueError, match="1 names for two runs"):
        fv.compare(a, b, ["one"])
    with pytest.raises(ValueError, match="record=False"):
        fv.compare(a, fv.flash_attention_2(*np.zeros((3, 4, 4)), device="numpy", record=False))


def test_names_are_escaped() -> None:
    compared = fv.compare(*runs(), ["<script>alert(1)</script>", "b"])
    assert "<script>" not in compared.texts[0].value
