"""Standard attention's tile program: three launches, S and P whole in HBM. Its numbers: test_flash_attention_1.py."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import flashviz as fv
from flashviz.programs.standard_attention import KERNELS
from flashviz.view.layouts import layout_of


@pytest.fixture(scope="module")
def two_by_two():
    rng = np.random.default_rng(2)
    return fv.standard_attention(*rng.normal(size=(3, 8, 8)), Br=4, Bc=4, device="numpy")


def test_the_frames_of_one_block_of_each_launch(two_by_two):
    steps = two_by_two.recording.steps
    assert len(steps) == 39
    assert [s.label for s in steps if "block 1" in s.label] == [
        "visualize scores block 1",
        "scores block 1 · load Qi",
        *(f"scores block 1 · j = {j} · {t}" for j in range(2) for t in ("load Kj", "fill Sij", "write Sij")),
        "visualize softmax block 1",
        *(f"softmax block 1 · {t}" for t in ("load Si", "Si = softmax(Si)", "write Pi")),
        "visualize values block 1",
        "values block 1 · set Oi = 0",
        *(f"values block 1 · j = {j} · {t}" for j in range(2) for t in ("load Pij, Vj", "update Oi")),
        "values block 1 · write Oi",
    ]
    assert len({s.label for s in steps}) == len(steps)


def test_three_launches_of_a_block_for_each_row_block(two_by_two):
    launches = two_by_two.recording.launches
    assert [launch.kernel for launch in launches] == list(KERNELS)
    assert {launch.grid for launch in launches} == {(2, 1, 1)}
    assert [len(two_by_two.recording.blocks(n)) for n in range(3)] == [2, 2, 2]


def test_s_and_p_stand_in_hbm(two_by_two):
    recording = two_by_two.recording
    rng = np.random.default_rng(2)
    q, k, _ = (x.astype("float32") for x in rng.normal(size=(3, 8, 8)))
    s = q @ k.T / math.sqrt(8)
    p = np.exp(s - s.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    for i in range(2):
        for j in range(2):
            at = slice(4 * i, 4 * i + 4), slice(4 * j, 4 * j + 4)
            assert recording.values(-1, f"S{i},{j}") == pytest.approx(s[at], abs=1e-5)
            assert recording.values(-1, f"P{i},{j}") == pytest.approx(p[at], abs=1e-6)
    assert np.isnan(recording.values(0, "S0,0")).all()
    assert recording.findings == ()


@settings(max_examples=60)
@given(
    *(st.integers(1, 2), st.integers(1, 2), st.integers(1, 2)),
    *(st.integers(1, 12), st.integers(1, 12), st.integers(1, 4)),
    *(st.integers(1, 13), st.integers(1, 13), st.booleans()),
)
def test_bytes_are_those_of_the_formula(B, Hkv, group, Nq, Nk, d, Br, Bc, causal):
    q, k = np.ones((B, Hkv * group, Nq, d)), np.ones((B, Hkv, Nk, d))
    run = fv.standard_attention(q, k, k, Br=Br, Bc=Bc, causal=causal, device="numpy", keep_values=0)
    assert fv.check_traffic(run) == []
    t, heads, Tr = fv.traffic(run), B * Hkv * group, math.ceil(Nq / Br)
    assert t.bytes_read == 4 * heads * (2 * Nq * Nk + (Nq + Tr * 2 * Nk) * d)
    assert t.bytes_written == 4 * heads * (2 * Nq * Nk + Nq * d)
    if Tr == 1:  # algorithms.md: every matrix crosses once
        sizes = {n: v for n, v in run.recording.params.items() if n not in ("Br", "Bc")}
        assert fv.traffic_model("standard_attention", **sizes).differences(t) == []


def test_the_recording_carries_both_sources_with_every_action(two_by_two):
    python, cuda = two_by_two.recording.code
    names = fv.StandardAttention.action_names()
    assert [name for name, _, _ in cuda.lines] == list(names)
    for name in names:
        first, last = python.span(name)
        assert f"def {name}(" in "\n".join(python.text.split("\n")[first - 1 : last])


@pytest.mark.parametrize(("Nq", "Nk", "heads"), [(8, 8, 1), (5, 7, 1), (38, 8, 2), (8, 38, 1), (70, 70, 1)])
def test_tiles_of_s_and_p_stand_in_rows_of_q_and_do_not_overlap(Nq, Nk, heads):
    q, k = np.ones((heads, Nq, 2)), np.ones((heads, Nk, 2))
    recording = fv.standard_attention(q, k, k, Br=4, Bc=4, device="numpy", keep_values=0).recording
    for launch in range(3):
        block = recording.blocks(launch)[-1]
        made = layout_of(recording, block, launch)
        suffix = f"[0,{heads - 1}]" if heads > 1 else ""
        tiles = {s.name for s in recording.slots if s.tensor in "SP" and s.shared_by_grid and s.name.endswith(suffix)}
        drawn = {n: made.boxes[n] for n in tiles if not made.boxes[n].hidden}
        assert tiles <= set(made.boxes)
        for name, box in drawn.items():
            row = made.boxes[f"Q{name[1:].split(',')[0]}{suffix}"]
            assert (box.y, box.h) == (row.y, row.h)
        spans = sorted({(round(b.x - b.w / 2, 6), round(b.x + b.w / 2, 6)) for b in drawn.values()})
        assert len(spans) == 2 * min(8, -(-Nk // 4)) - 2 * (Nk > 32)
        assert all(a[1] < b[0] for a, b in pairwise(spans))
        others = [b for n, b in made.boxes.items() if n.startswith(("K", "V")) and not b.hidden and n[1:2].isdigit()]
        assert not any(a < o.x < b for a, b in spans for o in others)


def test_errors_of_a_readers_loop():
    x = np.ones((4, 3))
    sa = fv.StandardAttention(x, x, x, Br=2, Bc=2)
    with pytest.raises(ValueError, match="kernel 'scores' is none of standard_scores, standard_softmax"):
        sa.launch("scores")
    sa.launch("standard_scores")
    with pytest.raises(IndexError, match="block i=2, head=0, batch=0: i runs to 1"):
        sa.begin(2)
    sa.begin(0)
    with pytest.raises(IndexError, match="K has tiles 0 to 1, not 2"):
        sa.load_k(2)


@given(st.sets(st.sampled_from(fv.StandardAttention.action_names())), st.integers(1, 7), st.integers(1, 7))
@example({"scores", "softmax", "init_o", "accumulate"}, 3, 4)
@example({"load_s"}, 2, 2)
@settings(max_examples=60)
def test_an_action_left_out_is_seen_and_never_crashes(left_out, Br, Bc):
    sa = fv.StandardAttention(*np.random.default_rng(0).normal(size=(3, 5, 3)), Br=Br, Bc=Bc)

    def perform(*names, j=()):
        for name in names:
            if name not in left_out:
                getattr(sa, name)(*j)

    for kernel, first, loop, last in (
        (KERNELS[0], ["load_q"], ["load_k", "scores", "store_s"], []),
        (KERNELS[1], ["load_s", "softmax", "store_p"], [], []),
        (KERNELS[2], ["init_o"], ["load_p", "load_v", "accumulate"], ["store_o"]),
    ):
        sa.launch(kernel)
        for i in range(sa.Tr):
            sa.begin(i)
            perform(*first)
            for j in range(sa.Tc):
                perform(*loop, j=(j,))
            perform(*last)
    findings = {f.slot for f in sa.run().recording.findings}
    for make, use, slot in (
        *(("load_q", "scores", "Qi"), ("load_k", "scores", "Kj"), ("scores", "store_s", "Sij")),
        *(("store_s", "load_s", "S0,0"), ("load_s", "softmax", "Si0"), ("store_p", "load_p", "P0,0")),
        *(("load_p", "accumulate", "Pij"), ("load_v", "accumulate", "Vj"), ("init_o", "accumulate", "Oi")),
    ):
        if make in left_out and use not in left_out:
            assert slot in findings
