"""The difference of two kernels: every line of both is there, in order, and HTML shows it as text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashviz as fv
from flashviz.events import Source
from flashviz.view.diff import _compare


def run(rung: int) -> fv.Run:
    x = np.eye(4, dtype="float32")
    return fv.flash_attention_2(x, x, x, rung=rung, device="numpy")


def test_the_softmax_of_the_first_rung() -> None:
    found = fv.code_diff(run(0), run(1), "softmax")
    assert (found.old, found.new) == ("flash_attention_2.cu", "flash_attention_2_warps.cu")
    lines = dict.fromkeys(str(found).splitlines())
    assert "@ softmax" in lines
    assert "-     li[r] = li[r] * corr + sum;" in lines
    assert "+     l[r] = l[r] * corr + warp_sum(sum);" in lines
    assert found.gone > 5 < found.added
    html = found._repr_html_()
    assert "n &lt; Keys; ++n" in html
    assert "<script" not in html
    assert html.count("<div") == html.count("</div>")


@given(st.lists(st.sampled_from("abcde"), max_size=6), st.lists(st.sampled_from("abcde"), max_size=6))
def test_both_sides_can_be_read_off(a: list[str], b: list[str]) -> None:
    """With few lines all are near a change, unless both sides are the same."""
    lines = _compare(["x", *a, "y"], ["z", *b, "y"])
    assert [line for mark, line in lines if mark in "- "] == ["x", *a, "y"][: len([1 for m, _ in lines if m in "- "])]
    assert [line for mark, line in lines if mark in "+ "] == ["z", *b, "y"][: len([1 for m, _ in lines if m in "+ "])]
    assert ("-", "x") in lines
    assert _compare(a, a) == []


def test_far_lines_are_left_out_and_the_place_is_named() -> None:
    a, b = [f"line {n}" for n in range(40)], [f"line {n}" for n in range(40)]
    b[30] = "other"
    assert _compare(a, b) == [
        ("@", "… line 28, now 28"),
        *[(" ", f"line {n}") for n in (27, 28, 29)],
        ("-", "line 30"),
        ("+", "other"),
        *[(" ", f"line {n}") for n in (31, 32, 33)],
    ]


def test_a_directive_at_the_margin_does_not_keep_the_others_indented() -> None:
    sources = [
        Source("cuda", name, f"        TRACE(scores, j);\n#pragma unroll\n        {work};", (("scores", 1, 3),))
        for name, work in (("a.cu", "one"), ("b.cu", "two"))
    ]
    assert str(fv.code_diff(*sources, "scores")).splitlines()[1:] == [
        *["  TRACE(scores, j);", "  #pragma unroll", "- one;", "+ two;"]
    ]


def test_what_is_refused() -> None:
    with pytest.raises(KeyError, match="names no action 'nothing'"):
        fv.code_diff(run(0), run(1), "nothing")
    with pytest.raises(ValueError, match="brings no kernel's text"):
        fv.code_diff(fv.Recorder("mine").recording(), run(1))
    with pytest.raises(TypeError, match="expected a run or a recording"):
        fv.code_diff("text", Source("cuda", "b.cu", ""))
