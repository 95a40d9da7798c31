"""The timeline: geometry of bars, rows and marks, on traces made by hand; nothing is compared by pixels."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

import flashviz as fv
from flashviz import cuda
from flashviz.cuda.trace import Action, TracedBlock
from flashviz.programs import flash_attention_2 as fa2
from flashviz.programs.flash_attention_3 import roles
from flashviz.programs.replay import as_traced, most_actions, replay
from flashviz.slots import Block
from flashviz.view.palette import GROUND, HUES, contrast
from flashviz.view.timeline import bars_of, colours_of, timeline

TILE = ("load_k", "load_v", "scores", "softmax", "accumulate")


def traced(places: dict[tuple[int, int], tuple[int, int]], tiles: int = 2, multiprocessors: int = 0) -> fv.Recording:
    """FlashAttention-2 as traced: block (head, i) starts on a multiprocessor at a time, and each action takes 1 µs."""
    heads = 1 + max(head for head, _ in places)
    rows = 4 * (1 + max(i for _, i in places))
    Q, K = np.ones((heads, rows, 4), "f4"), np.ones((heads, 4 * tiles, 4), "f4")
    fa = fa2.FlashAttention2(Q, K, K, record=True, keep_values=0)
    blocks = []
    for index, ((head, i), (multiprocessor, start)) in enumerate(sorted(places.items())):
        names = [("load_q", i), *[(name, j) for j in range(tiles) for name in TILE], ("store_o", i)]
        actions = [
            Action(name, (tile,), multiprocessor, start + 1000 * n, start + 1000 * (n + 1))
            for n, (name, tile) in enumerate(names)
        ]
        blocks.append(TracedBlock(Block(0, head, i), index, start - 100, actions[-1].end, tuple(actions)))
    trace = cuda.KernelTrace("flash_attention_2", "gpu", (fa.Tr, heads, 1), (256, 1, 1), tuple(blocks))
    replay(fa, [trace])
    recording = as_traced(fa.run().recording, [trace], "gpu")
    if multiprocessors:
        recording.params["multiprocessors"] = multiprocessors
    return recording


ONE = traced({(0, 0): (3, 5000)})
# Two blocks at a time on multiprocessor 0, then a third in the place of the first; one on multiprocessor 2.
FEW = traced({(0, 0): (0, 0), (0, 1): (0, 3000), (1, 0): (0, 12_000), (1, 1): (2, 1000)})


def with_roles() -> fv.Recording:
    """FlashAttention-3 as traced: one block on each of two multiprocessors, each action 1 µs, each role from its own beginning."""
    x = np.ones((16, 4), "f4")
    fa = fv.FlashAttention3(x, x, x, multiprocessors=2)
    blocks = []
    for n in range(fa.grid):
        fa.begin(n)
        actions = []
        for late, (role, acts) in enumerate(roles(fa).items()):
            for at, (act, tiles) in enumerate(acts):
                start = 5000 + 100 * late + 1000 * at
                own = tiles[1:] if role != "producer" and act.__name__ != "give_back" else tiles
                actions.append(Action(act.__name__, own, 3 * n, start, start + 1000, role))
        ends = max(action.end for action in actions)
        blocks.append(TracedBlock(Block(0, 0, n), n, 4900, ends, tuple(actions)))
    trace = cuda.KernelTrace("flash_attention_3", "gpu", (2, 1, 1), (384, 1, 1), tuple(blocks))
    again = fv.FlashAttention3(x, x, x, multiprocessors=2)
    replay(again, [trace])
    return as_traced(again.run().recording, [trace], "gpu")


def test_roles_are_lanes_of_their_multiprocessor() -> None:
    recording = with_roles()
    figure = timeline(recording)
    labels = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    empty = [[f"{n} · producer", "consumer 1", "consumer 2"] for n in range(4)]
    assert labels == [name for row in empty for name in row]
    places = [float(y) for y in figure.axes[0].get_yticks()]
    for bar in bars_of(recording):
        role = ("producer", "consumer 1", "consumer 2").index(bar.trace.role)
        middle = places[3 * bar.trace.multiprocessor + role]
        found = bars(figure)[bar.action]
        left = (bar.trace.start - 5000) / 1000
        mine = found[(abs(found[:, 0] - left) < 1e-6) & (found[:, 2] < middle) & (found[:, 3] > middle)]
        assert len(mine) == 1
        assert mine[0, 3] - mine[0, 2] == pytest.approx(0.88 / 3)
    (begins,) = [c for c in figure.axes[0].collections if c.get_gid() == "begins"]
    assert isinstance(begins, LineCollection)
    assert [float(s[1][1] - s[0][1]) for s in begins.get_segments()] == pytest.approx([0.88, 0.88])
    few = timeline(recording, multiprocessors=[3])
    assert [tick.get_text() for tick in few.axes[0].get_yticklabels()] == ["3 · producer", "consumer 1", "consumer 2"]
    assert {"give_back", "scores"} <= set(colours_of(recording))
    assert colours_of(recording)["store_o"] == HUES["O"].dark  # by way of Qi, but to O


def bars(figure: Figure) -> dict[str, np.ndarray]:
    """Left, right, top and bottom of each bar by action."""
    found = {}
    for collection in figure.axes[0].collections:
        name = str(collection.get_gid())
        if isinstance(collection, PolyCollection) and name.startswith("action."):
            corners = np.array([path.vertices[:4] for path in collection.get_paths()])
            found[name[7:]] = np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1)[:, [0, 2, 1, 3]]
    return found


def test_one_bar_for_each_action_at_its_time() -> None:
    found = bars(timeline(ONE))
    assert list(found) == ["load_q", *TILE, "store_o"]
    assert found["load_q"][:, :2].tolist() == [[0, 1]]
    assert found["scores"][:, :2].tolist() == [[3, 4], [8, 9]]
    assert found["store_o"][:, :2].tolist() == [[11, 12]]
    for edges in found.values():
        assert (edges[:, 2] > 3).all()  # the row of multiprocessor 3, whole but for a gap
        assert (edges[:, 3] < 4).all()
        assert np.allclose(edges[:, 3] - edges[:, 2], 0.88)


def test_blocks_that_share_a_multiprocessor_lie_below_each_other() -> None:
    figure = timeline(FEW)
    tops = {tuple(row[[0, 2]].round(2)): row for row in bars(figure)["load_q"]}
    assert sorted(tops) == [(0.0, 0.06), (1.0, 2.06), (3.0, 0.5), (12.0, 0.06)]
    assert all(np.isclose(row[3] - row[2], 0.44) for row in tops.values())
    everything = np.concatenate(list(bars(figure).values()))
    for a in everything:  # no bar covers another
        others = everything[(everything[:, 0] < a[1]) & (everything[:, 1] > a[0])]
        assert ((others[:, 2] < a[3]) & (others[:, 3] > a[2])).sum() == 1


def test_idle_multiprocessors_are_rows_too() -> None:
    assert timeline(FEW).axes[0].get_ylim() == (3, 0)
    recording = traced({(0, 0): (5, 0)}, multiprocessors=132)
    axes = timeline(recording).axes[0]
    assert axes.get_ylim() == (132, 0)
    assert [text.get_text() for text in axes.get_yticklabels()][:3] == ["0", "9", "18"]
    assert axes.get_ylabel() == "multiprocessor"
    assert axes.get_xlabel() == "microseconds"


def test_some_multiprocessors_and_a_part_of_the_time() -> None:
    figure = timeline(FEW, multiprocessors=[2, 0], between=(2, 6))
    axes = figure.axes[0]
    assert axes.get_xlim() == (2, 6)
    assert [text.get_text() for text in axes.get_yticklabels()] == ["2", "0"]
    assert (bars(figure)["load_q"][:, 2] < 1).sum() == 1
    assert bars(timeline(FEW, multiprocessors=range(1, 2))) == {}
    for wrong in ([3], [], [-1]):
        with pytest.raises(ValueError, match="this GPU has 0 to 2, and at least one must be shown"):
            timeline(FEW, multiprocessors=wrong)


@pytest.mark.parametrize("step", [2, 3, 5, -1])
def test_a_step_is_marked_where_and_when_it_is(step: int) -> None:
    axes = timeline(FEW, step).axes[0]
    (box,) = [patch for patch in axes.patches if patch.get_gid() == "step"]
    inside = [bar for bar in bars_of(FEW) if bar.step == step % len(FEW.steps)]
    assert inside
    left, right = min(bar.trace.start for bar in inside) / 1000, max(bar.trace.end for bar in inside) / 1000
    assert (box.get_x(), box.get_x() + box.get_width()) == (left, right)
    assert int(box.get_y()) == inside[0].trace.multiprocessor
    (span,) = [patch for patch in axes.patches if patch.get_gid() == "step.time"]
    assert (span.get_x(), span.get_width()) == (left, right - left)


def test_a_step_without_actions_marks_nothing_and_a_wrong_one_is_refused() -> None:
    assert not [patch for patch in timeline(FEW, 0).axes[0].patches if patch.get_gid()]
    with pytest.raises(IndexError, match="step 99 of a recording with"):
        timeline(FEW, 99)


def test_the_colours_are_those_of_the_picture() -> None:
    colours = colours_of(FEW)
    assert list(colours) == ["load_q", *TILE, "store_o"]
    assert colours["load_q"] == HUES["Q"].light
    assert colours["load_k"] == HUES["K"].light
    assert colours["scores"] == HUES["S"].light
    assert (colours["accumulate"], colours["store_o"]) == (HUES["O"].light, HUES["O"].dark)
    assert len(set(colours.values())) == 7
    assert all(contrast(colour, GROUND) >= 1.15 for colour in colours.values())  # none looks idle
    drawn = {str(c.get_gid())[7:]: to_hex(c.get_facecolor()[0]) for c in timeline(FEW).axes[0].collections[:7]}
    assert drawn == colours


@pytest.mark.parametrize(
    ("run", "actions"),
    [
        (lambda x: fv.flash_attention_1(x, x, x, device="numpy"), 9),
        (lambda x: fv.standard_attention(x, x, x, device="numpy"), 12),
        (lambda x: fv.flash_decoding(x[:1], x, x, device="numpy"), 12),
        (lambda x: fv.online_softmax(x, device="numpy"), 7),
        (lambda x: fv.rope(x, device="numpy"), 4),
    ],
)
def test_every_algorithms_actions_have_colours(run: Any, actions: int) -> None:
    recording = run(np.eye(8, 4, dtype="f4")).recording
    colours = colours_of(recording)
    names = {action for step in recording.steps for action in step.actions}
    assert set(colours) == names
    assert len(names) >= actions - 2


def test_the_legend_names_every_action() -> None:
    (legend,) = timeline(FEW).legends
    assert [text.get_text() for text in legend.get_texts()] == [name.replace("_", " ") for name in colours_of(FEW)]


def test_wide_bars_bear_their_names_and_narrow_ones_do_not() -> None:
    assert "load q" in [text.get_text() for text in timeline(ONE, multiprocessors=[3]).axes[0].texts]
    crowd = traced({(0, i): (i % 4, 13_000 * (i // 4)) for i in range(32)}, tiles=4)
    assert list(timeline(crowd).axes[0].texts) == []
    assert timeline(crowd, between=(0, 6), multiprocessors=[0]).axes[0].texts


def test_where_blocks_begin() -> None:
    (lines,) = [
        c for c in timeline(FEW).axes[0].collections if isinstance(c, LineCollection) and c.get_gid() == "begins"
    ]
    assert sorted(segment[0][0] for segment in lines.get_segments()) == [0, 0.9, 2.9, 11.9]


def test_the_title_names_the_kernel_and_a_stored_trace_says_so() -> None:
    assert timeline(ONE).axes[0].get_title(loc="left") == "flash attention 2"
    recording = traced({(0, 0): (0, 0)})
    recording.params["stored"] = "NVIDIA H200, driver 580.1, 2026-01-01"
    title = timeline(recording).axes[0].get_title(loc="left")
    assert title == "flash attention 2   (stored trace: NVIDIA H200, driver 580.1, 2026-01-01)"


def test_only_times_of_a_gpu_are_drawn() -> None:
    x = np.eye(4, dtype="f4")
    run = fv.flash_attention_2(x, x, x, device="numpy")
    with pytest.raises(ValueError, match=r'made on "numpy", where nothing is timed; fv.timeline\(fv.stored\('):
        timeline(run)
    from dataclasses import replace

    with pytest.raises(ValueError, match='made on "cpu", whose times say nothing about a GPU'):
        timeline(replace(ONE, device="cpu"))
    with pytest.raises(ValueError, match="this recording's events have no times"):
        timeline(replace(run.recording, device="gpu"))
    with pytest.raises(ValueError, match="record=False"):
        timeline(fv.flash_attention_2(x, x, x, device="numpy", record=False))


def test_many_blocks_are_few_artists_and_no_open_figures() -> None:
    many = traced(
        {(h, i): ((8 * h + i) % 132, 30_000 * ((8 * h + i) // 132)) for h in range(24) for i in range(8)}, tiles=8
    )
    assert len(bars_of(many)) == 24 * 8 * 42
    start = time.perf_counter()
    figure = timeline(many, 100)
    figure.canvas.draw()
    assert time.perf_counter() - start < 10
    assert len(figure.axes[0].collections) == 8
    if "matplotlib.pyplot" in sys.modules:
        assert sys.modules["matplotlib.pyplot"].get_fignums() == []


def test_how_large_a_buffer_the_loops_of_a_hand_made_trace_need() -> None:
    x = np.ones((8, 4), "f4")
    assert most_actions(fa2.FlashAttention2(x, x, x), fa2.forward) == [len(bars_of(ONE))]


def test_waiting_for_the_host_between_two_launches_is_cut_and_said() -> None:
    run = fv.stored("flash_decoding_32")
    bars = bars_of(run)
    ends = [max(b.trace.end for b in bars if b.launch == n) for n in (0, 1)]
    starts = [min(b.trace.start for b in bars if b.launch == n) for n in (0, 1)]
    busy = sum(ends) - sum(starts)
    assert starts[1] - ends[0] > 100 * busy  # milliseconds on the host, microseconds on the GPU
    axes = fv.timeline(run).axes[0]
    assert axes.get_xlim()[1] * 1000 < 1.2 * busy
    assert [line.get_gid() for line in axes.lines if line.get_gid() == "cut"] == ["cut"]
    assert any("ms on the host left out" in text.get_text() for text in axes.texts)
    assert not [line for line in fv.timeline(fv.stored("flash_attention_2")).axes[0].lines if line.get_gid() == "cut"]
