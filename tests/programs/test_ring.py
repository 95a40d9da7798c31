"""The ring of a producer and consumers: the sums, in every order of the roles; who waits for what; what a missing wait or arrival does."""

from __future__ import annotations

import sys
import types
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashviz as fv
from flashviz.events import Barrier, Move
from flashviz.programs.ring import Ring, consumer, perform, producer
from flashviz.programs.roles import Deadlock, side_by_side

sizes = st.integers(1, 20)


@given(N=sizes, each=st.integers(1, 5), rows=st.integers(1, 6), stages=st.integers(1, 4), consumers=st.integers(1, 4))
def test_the_sums_of_the_columns(N: int, each: int, rows: int, stages: int, consumers: int) -> None:
    x = np.random.default_rng(N + 31 * each).integers(-8, 9, (N, each * consumers))
    run = fv.ring(x, rows=rows, stages=stages, consumers=consumers)
    assert np.array_equal(run.total, x.sum(axis=0))
    assert run.recording.findings == ()


def test_which_role_goes_first_does_not_matter() -> None:
    x = np.random.default_rng(1).integers(-8, 9, (22, 6))
    for order in permutations(("producer", "consumer 1", "consumer 2")):
        r = Ring(x, consumers=2)
        r.begin()
        acts = {"producer": producer(r), "consumer 1": consumer(r, 1), "consumer 2": consumer(r, 2)}
        side_by_side(r, {name: acts[name] for name in order})
        assert np.array_equal(r.run().total, x.sum(axis=0))


def test_every_event_says_its_role_and_waits_by_name() -> None:
    recording = fv.ring(np.ones((12, 4)), stages=2, consumers=2).recording
    own = [e for step in recording.steps if step.action for e in recording.events[step.first : step.end]]
    assert {e.trace.role for e in own if e.trace} == {"producer", "consumer 1", "consumer 2"}
    assert all(e.trace is not None for e in own)
    waits = [
        e.group for e in own if isinstance(e, Barrier) and e.kind == "wait" and e.trace and e.trace.role == "producer"
    ]
    assert waits == ["X[0] empty, phase 0"]
    copies = [(e.parts[0].src, e.parts[0].dst, e.group) for e in own if isinstance(e, Move) and e.asynchronous]
    assert copies == [
        ("x0", "X[0]", "X[0] full, phase 0"),
        ("x1", "X[1]", "X[1] full, phase 0"),
        ("x2", "X[0]", "X[0] full, phase 1"),
    ]


def test_without_the_wait_for_room_a_tile_is_lost() -> None:
    class Hasty(Ring):
        def waits(self, action: str, *tiles: int) -> list[str]:
            return [] if action == "load" else super().waits(action, *tiles)

    x = np.arange(48).reshape(12, 4)
    r = Hasty(x, consumers=2)
    perform(r)
    run = r.run()
    assert not np.array_equal(run.total, x.sum(axis=0))
    assert "X[0] was read while a copy into it was under way" in run.recording.findings[0].message


def test_without_an_arrival_nobody_goes_on() -> None:
    class Silent(Ring):
        def add(self, w: int, n: int) -> None:
            super().add(w, n)
            if (w, n) == (2, 0):
                self.arrived["X[0] empty, phase 0"] -= 1

    with pytest.raises(Deadlock, match=r"producer before load\(2,\) for X\[0\] empty, phase 0"):
        perform(Silent(np.ones((12, 4)), consumers=2))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"x": np.ones(4)}, r"x has the shape \(4,\); it must be \[N, d\]"),
        ({"consumers": 3}, "consumers=3: they share out the 4 columns evenly"),
        ({"stages": 0}, "stages=0"),
        ({"rows": 0}, "rows=0"),
    ],
)
def test_the_ring_refuses(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fv.ring(**{"x": np.ones((8, 4)), **options})


def test_a_program_made_in_a_notebook_shows_the_source_it_is_based_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook's module has no file, and inspect finds no source for its classes."""
    notebook = types.ModuleType("a_notebook")
    monkeypatch.setitem(sys.modules, "a_notebook", notebook)
    made = type("Mine", (Ring,), {"__module__": "a_notebook"})
    assert made.source() == Ring.source()
