"""Traffic: what the recording says crosses HBM, against the counts that algorithms.md gives in closed form."""

from __future__ import annotations

import math
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from performances import performances

import flashviz as fv
from flashviz.checks.traffic import Running, Way, running, traffic
from flashviz.events import Move


@st.composite
def runs(draw):
    """A recorded FlashAttention-2 and its sizes."""
    B, Hkv, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    Nq, Nk, d = draw(st.integers(1, 12)), draw(st.integers(1, 12)), draw(st.integers(1, 4))
    Br, Bc, causal = draw(st.integers(1, 13)), draw(st.integers(1, 13)), draw(st.booleans())
    q, k = np.ones((B, Hkv * group, Nq, d)), np.ones((B, Hkv, Nk, d))
    run = fv.flash_attention_2(q, k, k, Br=Br, Bc=Bc, causal=causal, device="numpy", keep_values=0)
    return run, B * Hkv * group, group, Nq, Nk, d, Br, Bc, causal


@settings(max_examples=60)
@given(runs())
def test_flash_attention_2_costs_what_algorithms_md_says(case):
    run, heads, group, Nq, Nk, d, Br, Bc, causal = case
    Tr, Tc = math.ceil(Nq / Br), math.ceil(Nk / Bc)
    visible = [min(max(min((i + 1) * Br, Nq) + Nk - Nq, 0), Nk) if causal else Nk for i in range(Tr)]
    tiles = [math.ceil(n / Bc) for n in visible]
    keys = sum(min(t * Bc, Nk) for t in tiles)  # rows of K that arrive, real ones only
    t = traffic(run)
    assert t.bytes_read == heads * 4 * (Nq * d + 2 * keys * d)
    assert t.bytes_written == heads * 4 * (Nq * d + Nq)
    if not causal:
        assert t.bytes_read == heads * 4 * (Nq * d + Tr * 2 * Nk * d)
        assert t.trips == {"Q": 1, "O": 1, "L": 1, "K": Tr * group, "V": Tr * group}
    assert t.trips["K"] == t.trips["V"] == pytest.approx(group * sum(tiles) / Tc)
    assert (t.fetches, t.stores, t.transfers) == (
        heads * (Tr + sum(tiles)),
        heads * Tr,
        heads * (2 * Tr + sum(tiles)),
    )
    assert t.ways == {
        ("hbm", "shared"): Way(t.fetches, t.bytes_read),
        ("shared", "hbm"): Way(t.stores, t.bytes_written),
    }
    assert sum(c.bytes_read for c in t.blocks.values()) == t.bytes_read
    assert sum(c.bytes_written for c in t.blocks.values()) == t.bytes_written
    for (_, block), count in t.blocks.items():
        n = tiles[block.tile]
        assert (count.read, count.written) == (1 + 2 * n, 2)
    assert t.slots["Kj"].bytes_read == t.tensors["K"].bytes_read
    assert t.slots["Qi"].read == heads * Tr


def test_causal_with_equal_blocks_loads_a_triangle_of_tiles():
    x = np.ones((16, 2))
    t = traffic(fv.flash_attention_2(x, x, x, Br=2, Bc=2, causal=True, device="numpy"))
    assert t.tensors["K"].read == 8 * 9 / 2
    assert t.tensors["K"].tiles == 8


@given(performances())
def test_running_totals_are_the_traffic_up_to_each_step(performance):
    recording = performance.recording
    totals = running(recording)
    assert len(totals) == len(recording.steps)
    for n, total in enumerate(totals):
        t = traffic(recording, n)
        assert total == Running(t.fetches, t.stores, t.bytes_read, t.bytes_written)
        assert traffic(recording, n - len(totals)) == t
        assert t.steps == n + 1
    assert running(recording) is totals
    assert traffic(recording) == traffic(recording, -1)


@given(performances())
def test_counts_against_a_plain_sum(performance):
    recording = performance.recording
    hbm = {s.name for s in recording.slots if s.scope == "grid"}
    moves = [e for e in recording.events if isinstance(e, Move)]
    read = [(e, p) for e in moves for p in e.parts if p.src in hbm and p.dst not in hbm]
    written = [(e, p) for e in moves for p in e.parts if p.src not in hbm and p.dst in hbm]
    t = traffic(recording)
    assert t.transfers == len({e.transfer for e in moves})
    assert t.fetches == len({e.transfer for e, _ in read})
    assert t.stores == len({e.transfer for e, _ in written})
    assert t.bytes_read == sum(math.prod(p.shape) * recording.slot(p.src).itemsize for _, p in read)
    assert t.bytes_written == sum(math.prod(p.shape) * recording.slot(p.dst).itemsize for _, p in written)
    assert sum(w.transfers for w in t.ways.values()) >= t.transfers


def test_registers_shared_memory_and_a_dtype_that_changes_on_the_way():
    r = fv.Recorder("mma")
    Q = r.tensor("Q", np.ones((4, 2)), tile=2, dtype="float16")
    O = r.tensor("O", tile=4, shape=(4, 2), dtype="float16")
    s, f = r.slot("Qi", (2, 2), "float16"), r.slot("Qf", (2, 2), "float32", memory="register", scope="warp")
    acc = r.slot("acc", (4, 2), memory="register", scope="thread")
    r.launch("mma")
    r.block()
    for i in range(2):
        with r.step("load"):
            r.move(Q[i], s)
            r.move(s, f)
    with r.step("straight to registers"):
        r.move(Q[0], f, group="g")
    with r.step("store"):
        r.wait("g")
        r.change(acc, np.ones((4, 2)))
        r.move(acc, O[0])
    t = traffic(r.recording())
    assert t.ways == {
        ("hbm", "shared"): Way(2, 16),
        ("shared", "register"): Way(2, 32),
        ("hbm", "register"): Way(1, 8),
        ("register", "hbm"): Way(1, 16),
    }
    assert (t.transfers, t.fetches, t.stores, t.bytes_read, t.bytes_written) == (6, 3, 1, 24, 16)
    assert t.trips == {"Q": 1.5, "O": 1}


def test_several_tiles_in_one_move_are_one_transfer():
    r = fv.Recorder("pair")
    x, y = r.tensor("x", np.ones(2), tile=1), r.tensor("y", np.ones(1), tile=1)
    a, b = r.slot("a", (1,)), r.slot("b", (1,))
    r.launch("pair")
    r.block()
    with r.step("both"):
        r.move([x[0], y[0]], [a, b])
    with r.step("one and one"):
        r.move(x[1], a)
        r.move(y[0], b)
    t = traffic(r.recording())
    assert (t.fetches, t.transfers) == (3, 3)
    assert traffic(r.recording(), 2).fetches == 1
    assert t.trips == {"x": 1, "y": 2}


def test_the_table():
    x = np.ones((8, 4))
    t = traffic(fv.flash_attention_2(x, x, x, Br=4, Bc=4, device="numpy"))
    assert str(t) == repr(t)
    lines = str(t).split("\n")
    assert lines[0] == "flash_attention_2, 19 steps: 6 fetches from HBM, 2 stores to HBM"
    row = next(line for line in lines if line.startswith("K "))
    assert re.split(r"  +", row) == ["K", "2", "4", "0", "256", "0", "2"]
    assert len({len(line) for line in lines[1:-1]}) == 1
    one = str(traffic(fv.flash_attention_2(x[:1], x[:1], x[:1], device="numpy"), 0)).split("\n")[0]
    assert one == "flash_attention_2, 1 step: 0 fetches from HBM, 0 stores to HBM"
    assert t._repr_html_().count("<tr>") == 7


def test_names_are_escaped_in_html():
    evil = '"><script>alert(1)</script>'
    r = fv.Recorder(evil)
    r.tensor(evil, np.ones(1), tile=1)
    shown = traffic(r.recording())._repr_html_()
    assert "<script" not in shown
    assert shown.count("&lt;script&gt;") == 2


def test_errors():
    x = np.ones((2, 1))
    run = fv.flash_attention_2(x, x, x, device="numpy")
    with pytest.raises(IndexError, match=r"step 99 of a recording with 7 steps \(0 to 6\)"):
        traffic(run, 99)
    with pytest.raises(ValueError, match="made with record=False"):
        traffic(fv.flash_attention_2(x, x, x, device="numpy", record=False))
    with pytest.raises(TypeError, match="expected a run or a recording, got list"):
        traffic([])


def test_counting_loads_neither_the_picture_nor_files(root):
    code = (
        "import sys, numpy as np, flashviz as fv; x = np.ones((2, 1));"
        "print(fv.traffic(fv.flash_attention_2(x, x, x, device='numpy')));"
        "bad = [m for m in ('matplotlib', 'ipywidgets', 'cupy', 'msgspec', 'flashviz.view') if m in sys.modules];"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True)
