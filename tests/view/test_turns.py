"""Roles in turns: no action before what it waits for, no role in two places, slots held as long as they are read; artists, not pixels."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

import flashviz as fv
from flashviz.events import Barrier, Move
from flashviz.view.palette import HUES
from flashviz.view.timeline import colours_of
from flashviz.view.turns import Stay, Wait, turns

RING = fv.ring(np.ones((12, 4)), rows=4, stages=2, consumers=2)


def attention(**options: Any) -> Any:
    rng = np.random.default_rng(3)
    return fv.flash_attention_3(*(rng.standard_normal((12, 4), "f4") for _ in range(3)), device="numpy", **options)


def test_a_ring_by_hand() -> None:
    made = turns(RING, copy=2)
    assert repr(made) == "Turns(9: producer waits 2, consumer 1 waits 5, consumer 2 waits 5)"
    loads = [(act.tile, act.start) for act in made.acts if act.role == "producer"]
    assert loads == [("0", 0), ("1", 1), ("2", 4)]  # X[0] is read in turn 3
    adds = [(act.action, act.start, act.end) for act in made.acts if act.role == "consumer 2"]
    assert adds == [("add", 3, 4), ("add", 4, 5), ("add", 7, 8), ("store", 8, 9)]
    assert made.stays == (
        Stay("X[0]", "x0", "x", 0, 3, 4),
        Stay("X[1]", "x1", "x", 1, 4, 5),
        Stay("X[0]", "x2", "x", 4, 7, 8),
    )
    assert [wait for wait in made.waits if wait.role != "consumer 2"] == [
        Wait("consumer 1", 0, 3, "X[0] full, phase 0"),
        Wait("producer", 2, 4, "X[0] empty, phase 0"),
        Wait("consumer 1", 5, 7, "X[0] full, phase 1"),
    ]
    assert turns(RING, copy=0).length == 5


@pytest.mark.parametrize("options", [{}, {"stages": 3}, {"Br": 6, "consumers": 3}, {"causal": True, "stages": 3}])
@pytest.mark.parametrize("copy", [0, 5])
def test_nothing_begins_before_what_it_waits_for(options: dict[str, Any], copy: int) -> None:
    recording = attention(**options).recording
    made = turns(recording, copy=copy)
    came: dict[str, int] = {}
    ends: dict[str, int] = {}
    for act in made.acts:
        assert act.end == act.start + 1
        step = recording.steps[act.step]
        waits = [
            e.group for e in recording.events[step.first : step.end] if isinstance(e, Barrier) and e.kind == "wait"
        ]
        assert act.start == max([ends.get(act.role, 0), *(came.get(group, 0) for group in waits)])
        ends[act.role] = act.end
        for event in recording.events[step.first : step.end]:
            if isinstance(event, Barrier) and event.kind == "arrive":
                came[event.group] = max(act.end, came.get(event.group, 0))
            elif isinstance(event, Move) and event.asynchronous:
                came[event.group] = max(act.end + copy, came.get(event.group, 0))
    assert made.length == max(ends.values())
    for role, end in ends.items():
        assert made.waited(role) + sum(act.role == role for act in made.acts) == end
    for slot in {stay.slot for stay in made.stays}:
        own = [stay for stay in made.stays if stay.slot == slot]
        assert all(a.done <= b.asked for a, b in pairwise(own))
    assert {stay.slot[:2] for stay in made.stays} == {"Kj", "Vj"}  # Qi has one reader: it is not shared


def test_slower_copies_and_fewer_slots_never_help() -> None:
    lengths = [[turns(attention(stages=stages), copy=copy).length for copy in range(6)] for stages in (2, 3, 4)]
    for row in lengths:
        assert row == sorted(row)
    for column in zip(*lengths, strict=True):
        assert list(column) == sorted(column, reverse=True)


def test_lanes_bars_and_slots_are_drawn_where_they_are() -> None:
    run = attention(stages=2)
    made = turns(run)
    (axes,) = made.figure().axes
    labels = [tick.get_text() for tick in axes.get_yticklabels()]
    assert labels == ["producer", "consumer 1", "consumer 2", "Kj[0]", "Kj[1]", "Vj[0]", "Vj[1]"]
    place = dict(zip(labels, axes.get_yticks(), strict=True))
    boxes = [p for p in axes.patches if isinstance(p, Rectangle)]
    colours = colours_of(run.recording)
    for act in made.acts:
        mine = [
            p
            for p in boxes
            if p.get_gid() == f"act.{act.action}"
            and p.get_x() == act.start
            and abs(p.get_y() + p.get_height() / 2 - place[act.role]) < 1e-6
        ]
        assert len(mine) == 1
        assert to_hex(mine[0].get_facecolor()) == colours[act.action]
    there = [p for p in boxes if p.get_gid() == "there"]
    assert len(there) == sum(stay.done > stay.there for stay in made.stays)
    assert {to_hex(p.get_facecolor()) for p in there} == {HUES["K"].light, HUES["V"].light}
    assert sum(p.get_gid() == "wait" for p in boxes) == len(made.waits)
    assert axes.get_xlim() == (0, made.length)
    written = {text.get_text() for text in axes.texts}
    assert {"0.1", "1.2", "K0", "V2"} <= written
    assert made._repr_png_().startswith(b"\x89PNG")


def test_each_block_has_its_own_turns() -> None:
    run = attention(multiprocessors=2)
    first, second = (turns(run, block=n) for n in (0, 1))
    assert (first.length, second.length) == (turns(attention(multiprocessors=2, record=[0])).length, second.length)
    assert {act.step for act in first.acts}.isdisjoint({act.step for act in second.acts})


def test_turns_refuse() -> None:
    with pytest.raises(ValueError, match="flash_attention_2 has no roles: its threads do one thing after another"):
        turns(fv.flash_attention_2(*np.ones((3, 4, 4), "f4"), device="numpy"))
    with pytest.raises(ValueError, match="copy=-1: a copy takes 0 turns or more"):
        turns(RING, copy=-1)
    with pytest.raises(IndexError, match="block=1: 1 were recorded"):
        turns(RING, block=1)
    with pytest.raises(KeyError, match="no role 'reader'; there are producer, consumer 1, consumer 2"):
        turns(RING).waited("reader")
