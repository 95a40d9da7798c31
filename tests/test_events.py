"""Events: plain frozen data, with the bytes they move, the actions they belong to and the lines of their source."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest

from flashviz import Block, events
from flashviz.events import Barrier, Begin, Change, Event, Launch, Move, Part, Source, Step, Trace

BLOCK = Block(0, 1, 2)


def test_bytes_of_a_move_are_those_that_arrive():
    parts = (Part("Oi", "O0", (3, 4), "float16", ("Oi", "li")), Part("li", "L0", (3,), "float32", ("mi", "li")))
    move = Move(parts, 0, BLOCK, 7)
    assert [p.nbytes for p in parts] == [24, 12]
    assert move.nbytes == 36


def test_actions_of_a_composite_step_in_order():
    load = Step("load", "load", "", 0, 2, parts=(Step("K", "K", "load_k", 0, 1), Step("V", "V", "load_v", 1, 2)))
    assert load.actions == ("load_k", "load_v")
    assert Step("start", "Setup ready", "", 0, 0).actions == ()
    assert Step("all", "all", "outer", 0, 2, parts=(load,)).actions == ("outer", "load_k", "load_v")


def test_span_of_an_action():
    source = Source("python", "x.py", "a\nb\nc\n", (("load", 1, 2), ("store", 3, 3)))
    assert source.span("store") == (3, 3)
    assert source.span("fold") is None


def test_every_event_is_frozen_comparable_data_with_a_trace():
    made = (
        Move((), 0, BLOCK, 1),
        Change("x", (), "init", 0, (), 0, BLOCK),
        Barrier("block", 0, BLOCK),
        Launch(0, "k", (1, 1, 1), (1, 1, 1)),
        Begin(0, BLOCK),
    )
    assert {type(e) for e in made} == set(get_args(Event))
    for event in made:
        assert event == dataclasses.replace(event)
        assert hash(event) == hash(dataclasses.replace(event))
        assert event != dataclasses.replace(event, trace=Trace("producer", 3, 10, 20))
        with pytest.raises(dataclasses.FrozenInstanceError):
            event.launch = 1


def test_no_colour_in_any_event():
    names = {f.name for e in (*get_args(Event), Part, Step) for f in dataclasses.fields(e)}
    assert not [n for n in names if "colo" in n or "fill" in n]
    assert set(events.ROLES) == {"input", "init", "compute", "rescale", "stale"}
