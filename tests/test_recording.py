"""Recordings: what a slot holds at a step, whatever happened before, and what is said about steps and slots there are not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from performances import performances

from flashviz import Block, Recorder, Recording
from flashviz.events import Barrier, Begin, Change, Launch, Move
from flashviz.recording import _STRIDE, Content, as_recording


def replay(recording, end):
    """Every slot's content after ``events[:end]``, the plain way: one dictionary, from the beginning."""
    held, waiting = {}, []

    def key(name, e):
        return name if recording.slot(name).scope == "grid" else (e.launch, e.block, name)

    def land(n, move, copies):
        for part, (label, tensor, level) in copies:
            old = held.get(key(part.dst, move))
            slot = recording.slot(part.dst)
            tensor = tensor or slot.tensor
            label = label or (old.label if old and old.tensor == tensor else slot.label)
            held[key(part.dst, move)] = Content(n, label, tensor, level, False, part.shape, part.values)

    for n, e in enumerate(recording.events[:end]):
        if isinstance(e, Move):
            sources = [held.get(key(p.src, e)) for p in e.parts]
            copies = [
                (p, (s.label, s.tensor, s.level) if s else ("", "", 1)) for p, s in zip(e.parts, sources, strict=True)
            ]
            if e.asynchronous:
                waiting.append((e, copies))
            else:
                land(n, e, copies)
        elif isinstance(e, Barrier) and e.kind == "wait":
            due = [w for w in waiting if (w[0].launch, w[0].block, w[0].group) == (e.launch, e.block, e.group)]
            waiting = [w for w in waiting if w not in due]
            for move, copies in due:
                land(n, move, copies)
        elif isinstance(e, Begin):
            waiting = [w for w in waiting if (w[0].launch, w[0].block) != (e.launch, e.block)]
            held = {k: v for k, v in held.items() if isinstance(k, str) or k[:2] != (e.launch, e.block)}
        elif isinstance(e, Change):
            old, slot = held.get(key(e.slot, e)), recording.slot(e.slot)
            if e.role != "stale":
                label = old.label if old else slot.label
                held[key(e.slot, e)] = Content(n, label, slot.tensor, e.level, False, e.shape, e.values)
            elif old:
                held[key(e.slot, e)] = Content(n, old.label, old.tensor, old.level, True, old.shape, old.values)
    return held


@given(performances())
def test_content_of_any_slot_at_any_step_is_that_of_a_replay(performance):
    recording = performance.recording
    blocks = {e.block for e in recording.events if isinstance(e, Begin)} | {Block()}
    for n, step in enumerate(recording.steps):
        held = replay(recording, step.end)
        for slot in recording.slots:
            for block in blocks:
                key = slot.name if slot.scope == "grid" else (step.launch, block, slot.name)
                assert recording.content(n, slot.name, block) == held.get(key)
            assert recording.content(n, slot.name) == recording.content(n, slot.name, step.block or Block())


@given(performances())
def test_values_at_the_end_of_a_step_are_what_the_recorder_held(performance):
    recording = performance.recording
    assert len(performance.held) == len(recording.steps)
    for n, (step, held) in enumerate(zip(recording.steps, performance.held, strict=True)):
        for (_, block, name), numbers in held.items():
            if recording.slot(name).scope != "grid" and (step.block or Block()) != block:
                continue
            content = recording.content(n, name)
            assert content is not None
            assert content.shape == numbers.shape
            if numbers.size <= 4:
                assert np.array_equal(recording.values(n, name), numbers, equal_nan=True)
                assert recording.values(n, name).dtype == recording.slot(name).dtype


@given(performances())
def test_content_before_an_event_and_touched(performance):
    recording = performance.recording
    ends = range(len(recording.events) + 1)
    states = [replay(recording, end) for end in ends]
    for key in {k for s in states for k in s}:
        for end in ends:
            assert recording.content_before(key, end) == states[end].get(key)
            now = states[end].get(key)
            assert recording.touched(key, end - 1, end) == (now is not None and now.event == end - 1)


def counter(updates, every=1):
    """A carry that is updated, with idle steps in between: histories over many strides."""
    r = Recorder("counter")
    c, other = r.slot("c", ()), r.slot("other", ())
    r.launch("count")
    r.block()
    for n in range(updates * every):
        with r.step(f"step {n}"):
            r.change(c if n % every == 0 else other, n)
    return r.recording()


@pytest.mark.parametrize("every", [1, 7, _STRIDE - 1, _STRIDE, _STRIDE + 1, 3 * _STRIDE])
def test_long_histories_find_the_last_update(every):
    recording = counter(20, every)
    for n in range(20 * every):
        assert recording.values(n + 2, "c") == n // every * every
        assert recording.content(n + 2, "c").level == n // every + 1


def test_asynchronous_moves_land_at_their_wait_with_what_was_copied():
    r = Recorder("prefetch")
    K = r.tensor("K", np.arange(4.0), tile=2)
    a, b = r.slot("a", (2,), tensor="K"), r.slot("b", (2,), tensor="K")
    r.launch("prefetch")
    r.block()
    with r.step("issue"):
        r.move(K[0], a, group="0", stage=0)
        r.move(K[1], b, group="1", stage=1)
        assert np.isnan(r.read(a)).all()
    with r.step("overwrite the source"):
        r.change(K[0], [9, 9])
    with r.step("wait for 1"):
        r.wait("1")
    with r.step("wait for 0"):
        r.wait("0")
        assert r.read(a).tolist() == [0, 1]
    recording = r.recording()
    issue = next(n for n, s in enumerate(recording.steps) if s.label == "issue")
    assert [recording.content(n, "a") is None for n in range(issue, issue + 4)] == [True, True, True, False]
    assert [recording.content(n, "b") is None for n in range(issue, issue + 4)] == [True, True, False, False]
    assert recording.values(-1, "a").tolist() == [0, 1]
    assert (recording.content(-1, "a").label, recording.content(-1, "a").level) == ("K0", 1)
    assert recording.values(-1, "K0").tolist() == [9, 9]
    assert [(f.kind, f.slot) for f in recording.findings] == [("read-arriving", "a"), ("overwritten-leaving", "K0")]


def test_moves_that_a_block_never_waited_for_do_not_land_in_its_next_life():
    r = Recorder("prefetch")
    x, s = r.tensor("x", [1.0], tile=1), r.slot("s", (1,))
    r.launch("k")
    for tile in (0, 1, 0):
        r.block(tile)
        with r.step("wait"):
            r.wait("g")
            assert np.isnan(r.read(s)).all()
        with r.step("issue"):
            r.move(x[0], s, group="g")
    recording = r.recording()
    assert [recording.content(n, "s") for n in range(len(recording.steps))] == [None] * 10


def test_blocks_have_their_own_shared_memory_and_one_that_begins_again_is_empty():
    r = Recorder("blocks")
    s = r.slot("s", ())
    r.launch("k")
    for tile in (0, 1, 0):
        r.block(tile)
        if tile == 0:
            with r.step("look"):
                assert np.isnan(r.read(s))
        with r.step("set"):
            r.change(s, tile + 5)
    recording = r.recording()
    labels = [st.label for st in recording.steps]
    assert labels == [
        "start",
        "visualize block 0",
        "look",
        "set",
        "visualize block 1",
        "set",
        "visualize block 0",
        "look",
        "set",
    ]
    assert [None if (c := recording.content(n, "s")) is None else float(c.values.array) for n in range(1, 9)] == [
        None,
        None,
        5,
        None,
        6,
        None,
        None,
        5,
    ]
    assert float(recording.values(5, "s", block=(0, 0, 0))) == 5
    assert float(recording.values(5, "s", block=Block(tile=1))) == 6
    assert recording.content(8, "s").level == 1
    assert recording.blocks() == (Block(tile=0), Block(tile=1), Block(tile=0))


def test_launches_are_kept_apart():
    r = Recorder("two kernels")
    s, x = r.slot("s", ()), r.tensor("x", [1.0], tile=1)
    for n, kernel in enumerate(("first", "second")):
        with r.launch(kernel, (4,), (32, 2)), r.block():
            with r.step(f"{kernel} looks"):
                assert np.isnan(r.read(s))
            with r.step(f"{kernel} sets"):
                r.change(s, n)
                r.change(x[0], [n])
    recording = r.recording()
    assert recording.launches == (Launch(0, "first", (4, 1, 1), (32, 2, 1)), Launch(1, "second", (4, 1, 1), (32, 2, 1)))
    assert [recording.content(n, "s") is None for n in range(1, 7)] == [True, True, False, True, True, False]
    assert [float(recording.values(n, "x0")[0]) for n in (0, 3, 5, 6)] == [1, 0, 0, 1]


def test_negative_steps_count_from_the_end():
    recording = counter(3)
    assert len(recording.steps) == 5
    assert recording.values(-1, "c") == recording.values(4, "c") == 2
    assert recording.content(-5, "c") is None
    assert recording.check_step(-1) is recording.steps[4]
    assert recording.part(slice(1, 3)) == (1, 2)
    assert recording.part(range(3)) == (0, 1, 2)


@pytest.mark.parametrize("step", [5, -6, 99])
def test_steps_there_are_not(step):
    with pytest.raises(IndexError, match=rf"step {step} of a recording with 5 steps \(0 to 4\)"):
        counter(3).values(step, "c")


def test_slots_there_are_not():
    with pytest.raises(KeyError, match=r"no slot 'd' in this recording of counter; it has c, other"):
        counter(3).values(0, "d")
    with pytest.raises(KeyError, match="no slot 'd'"):
        counter(3).content(1, "d")


def test_empty_slots_are_nan_and_large_tiles_say_why_they_have_no_numbers():
    r = Recorder("large", keep_values=3)
    s = r.slot("s", (2, 2))
    r.launch("k")
    r.block()
    with r.step("fill"):
        r.change(s, np.ones((2, 2)))
    recording = r.recording()
    assert recording.values(1, "s").shape == (2, 2)
    assert np.isnan(recording.values(1, "s")).all()
    with pytest.raises(ValueError, match=r"s at step 2 holds \(2, 2\) elements.*keep_values="):
        recording.values(2, "s")


def test_values_are_read_only():
    with pytest.raises(ValueError, match="read-only"):
        counter(1).values(-1, "c")[...] = 0


def test_a_recording_says_what_it_is_and_is_equal_to_its_equal():
    recording = counter(2)
    assert repr(recording) == "Recording('counter', source='program', device='numpy', 4 steps, 4 events)"
    assert recording == counter(2) != counter(3)
    recording.values(-1, "c")
    assert recording == counter(2)
    assert recording.with_code().code == ()


def test_as_recording():
    recording = counter(1)

    class Run:
        def __init__(self, recording):
            self.recording = recording

    assert as_recording(recording) is recording
    assert as_recording(Run(recording)) is recording
    with pytest.raises(ValueError, match="made with record=False"):
        as_recording(Run(None))
    with pytest.raises(TypeError, match="expected a run or a recording, got int"):
        as_recording(3)
    with pytest.raises(TypeError, match=r"run\.recording is a list"):
        as_recording(Run([]))


def test_an_empty_recording():
    assert Recording("nothing").blocks() == ()
    with pytest.raises(IndexError, match="0 steps"):
        Recording("nothing").check_step(0)
