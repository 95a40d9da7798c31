"""The recorder: what each verb does and records, and what each says when it is called wrongly."""

from __future__ import annotations

import numpy as np
import pytest

import flashviz as fv
from flashviz import Block, Recorder, recorder
from flashviz.events import Barrier, Begin, Change, Launch, Move, Part, Trace
from flashviz.slots import Values


@pytest.fixture
def r():
    """A recorder in the middle of a block: two tiles of x in HBM, an output y, and slots a, b and c."""
    made = Recorder("test")
    made.tensor("x", np.arange(5.0), tile=3)
    made.tensor("y", shape=(5,), tile=3)
    for name in "ab":
        made.slot(name, (3,))
    made.slot("c", (), memory="register", scope="thread")
    made.launch("kernel", (2,), (32,))
    made.block(1)
    return made


def last(r, n=1):
    return r.recording().events[-n:]


# -- places ----------------------------------------------------------------------------------------------------------


def test_a_tensor_is_cut_in_tiles_and_the_last_has_its_real_size():
    r = Recorder("test")
    x = r.tensor("x", np.arange(10).reshape(5, 2), tile=2, head=(1, 2), suffix="[1,2]", dtype="float16")
    assert [s.name for s in x] == ["x0[1,2]", "x1[1,2]", "x2[1,2]"]
    assert [(s.shape, s.index, s.label, s.head) for s in x] == [
        ((2, 2), (0,), "x0", (1, 2)),
        ((2, 2), (1,), "x1", (1, 2)),
        ((1, 2), (2,), "x2", (1, 2)),
    ]
    assert len(x) == 3
    assert x[2].nbytes == 4
    assert r.read(x[1]).tolist() == [[4, 5], [6, 7]]
    assert r.read(x[1]).dtype == np.float16
    recording = r.recording()
    assert [(s.label, s.caption) for s in recording.steps] == [("start", "Setup ready")]
    assert [e.role for e in recording.events] == ["input"] * 3
    with pytest.raises(IndexError, match="x has tiles 0 to 2, not 3"):
        x[3]
    with pytest.raises(IndexError, match="not -1"):
        x[-1]


def test_an_output_starts_empty_and_unfilled():
    r = Recorder("test")
    r.tensor("y", shape=(2,), tile=2)
    assert r.recording().events == (Change("y0", (), "init", 0, (2,), -1, Block()),)
    assert np.isnan(r.read("y0")).all()
    assert [f.slot for f in r.recording().findings] == ["y0"]


def test_a_tensor_is_a_copy():
    data = np.zeros(2, "float32")
    r = Recorder("test")
    x = r.tensor("x", data, tile=2)
    data[:] = 1
    assert r.read(x[0]).tolist() == [0, 0]


def test_what_a_tensor_may_not_be(r):
    with pytest.raises(ValueError, match="tile=0 for z: a tile has at least one row"):
        Recorder("t").tensor("z", [1.0], tile=0)
    with pytest.raises(ValueError, match="z: give data or a shape with at least one axis, got None"):
        Recorder("t").tensor("z", tile=1)
    with pytest.raises(ValueError, match=r"z: give data or a shape with at least one axis, got \(\)"):
        Recorder("t").tensor("z", 1.0, tile=1)
    with pytest.raises(RuntimeError, match="z: declare tensors before the first launch"):
        r.tensor("z", [1.0], tile=1)
    twice = Recorder("t")
    twice.tensor("z", [1.0], tile=1)
    with pytest.raises(ValueError, match="tensor 'z': slot 'z0' is declared already"):
        twice.tensor("z", [2.0], tile=1)


def test_a_slot_may_be_declared_again_only_as_it_was(r):
    assert r.slot("a", (3,)) == r.slot("a", (3,))
    with pytest.raises(ValueError, match="slot 'a' is declared already, as shared 3"):
        r.slot("a", (4,))
    with pytest.raises(ValueError, match="scope 'all' is none of"):
        r.slot("d", (4,), scope="all")


def test_unknown_slots(r):
    with pytest.raises(KeyError, match="no slot 'z' is declared; there are a, b, c, x0, x1, y0, y1"):
        r.read("z")
    with pytest.raises(KeyError, match="there are none"):
        Recorder("t").read("z")
    with pytest.raises(ValueError, match="slot 'a' belongs to another recorder"):
        r.read(Recorder("other").slot("a", (9,)))


# -- verbs -----------------------------------------------------------------------------------------------------------


def test_move_records_a_transfer_and_copies(r):
    with r.step("load"):
        r.move("x1", "a")
    values = Values.of(np.array([3, 4], "float32"))
    assert last(r) == (Move((Part("x1", "a", (2,), "float32", ("x1",), values),), 0, Block(tile=1), 1),)
    assert r.read("a").tolist() == [3, 4]
    assert r.recording().content(-1, "a").label == "x1"


def test_move_of_lists_is_one_transfer(r):
    with r.step("load"):
        r.move(["x0", "x1"], ["a", "b"])
        r.move("x0", "b")
    first, second = last(r, 2)
    assert [(p.src, p.dst) for p in first.parts] == [("x0", "a"), ("x1", "b")]
    assert (first.transfer, second.transfer) == (1, 2)


def test_a_list_sees_what_was_there_before_the_move(r):
    with r.step("swap"):
        r.change("a", [1, 1, 1])
        r.change("b", [2, 2, 2])
        r.move(["a", "b"], ["b", "a"])
    assert (r.read("a").tolist(), r.read("b").tolist()) == ([2, 2, 2], [1, 1, 1])


def test_move_with_values_says_what_it_reads(r):
    with r.step("store"):
        r.change("a", [1, 2, 3])
        r.change("c", 2)
        r.move("a", "y0", values=r.read("a") / r.read("c"), reads=("a", "c"))
        r.move(["a", "c"], ["y0", "y1"], values=[[4, 4, 4], [5, 5]], reads=[("a", "c"), ("c",)])
    single, pair = last(r, 2)
    assert single.parts[0].reads == ("a", "c")
    assert [p.reads for p in pair.parts] == [("a", "c"), ("c",)]
    assert r.recording().values(-1, "y1").tolist() == [5, 5]


def test_the_label_of_the_destination_stays_where_the_content_has_none(r):
    with r.step("store"):
        r.change("c", 1)
        r.change("a", [1, 2, 3])
        r.move("a", "y0")
    content = r.recording().content(-1, "y0")
    assert (content.label, content.level) == ("y0", 1)


def test_what_a_move_may_not_be(r):
    with r.step("load"):
        with pytest.raises(ValueError, match="move of 2 slots into 1: the lists must be equally long"):
            r.move(["x0", "x1"], "a")
        with pytest.raises(ValueError, match="move of no slots"):
            r.move([], [])
        with pytest.raises(ValueError, match="move of 2 slots with values for 1"):
            r.move(["x0", "x1"], ["a", "b"], values=[[1, 2, 3]])
        with pytest.raises(ValueError, match="move of 2 slots with reads for 1"):
            r.move(["x0", "x1"], ["a", "b"], reads=[("x0",)])
        with pytest.raises(ValueError, match="move of x0 into y1: 3 does not fit in 2"):
            r.move("x0", "y1")
        with pytest.raises(ValueError, match="move of x0 into c: 3 does not fit in 1"):
            r.move("x0", "c")
        with pytest.raises(KeyError, match="no slot 'z'"):
            r.move(["x0", "z"], ["a", "b"])
    assert last(r) == (Begin(0, Block(tile=1)),)
    assert np.isnan(r.read("a")).all()


def test_change_counts_updates_and_rescale_does_not(r):
    with r.step("update"):
        r.init("a", 0)
        r.change("a", [1, 1, 1], reads=("x0",), cells=True)
        r.change("a", [2, 2, 2], reads=("a",), role="rescale")
        r.change("a", [3, 3], reads=("a", "b"))
    events = last(r, 4)
    assert [(e.role, e.level, e.reads, e.cells, e.shape) for e in events] == [
        ("init", 0, (), False, (3,)),
        ("compute", 1, ("x0",), True, (3,)),
        ("rescale", 1, ("a",), False, (3,)),
        ("compute", 2, ("a", "b"), False, (2,)),
    ]
    assert r.read("a").tolist() == [3, 3]


def test_init_fills_all_or_the_first_rows(r):
    with r.step("init"):
        r.init("a", -np.inf)
        r.init("b", 0, rows=2)
        r.init("c", 1)
    assert np.isneginf(r.read("a")).all()
    assert r.read("b").shape == (2,)
    assert r.read("c") == 1


def test_what_a_change_may_not_be(r):
    with r.step("update"):
        with pytest.raises(ValueError, match="change of a: 4 does not fit in 3"):
            r.change("a", np.zeros(4))
        with pytest.raises(ValueError, match="change of a: 1 × 3 does not fit in 3"):
            r.change("a", np.zeros((1, 3)))
        with pytest.raises(ValueError, match="change of a: role 'stale' is none of init, compute, rescale"):
            r.change("a", np.zeros(3), role="stale")
        with pytest.raises(ValueError, match="init of a: 2 does not fill 3"):
            r.init("a", [1, 2])
        with pytest.raises(ValueError, match="change of a: 9 does not fit in 3"):
            r.init("a", 0, rows=9)
    assert last(r) == (Begin(0, Block(tile=1)),)


def test_stale_needs_an_update_and_leaves_the_rest(r):
    with r.step("stale"):
        r.init("a", 0)
        r.stale("a", "b")
        assert not [e for e in r._events if isinstance(e, Change) and e.role == "stale"]
        r.change("a", [1, 2, 3])
        r.stale("a", "b")
    (event,) = last(r)
    assert (event.slot, event.role, event.level, event.values) == ("a", "stale", 1, None)
    content = r.recording().content(-1, "a")
    assert (content.stale, content.level, content.values.array.tolist()) == (True, 1, [1, 2, 3])


def test_an_empty_slot_reads_as_nan_and_is_a_finding(r):
    with r.step("use"):
        assert np.isnan(r.read("a")).all()
        assert r.read("a").shape == (3,)
    finding = r.recording().findings[0]
    assert (finding.kind, finding.slot, finding.block, finding.step) == ("read-empty", "a", Block(tile=1), 2)
    assert finding.message == "a was read before anything was written to it"


def test_an_empty_slot_moves_as_nan_even_into_integers():
    r = Recorder("t")
    r.slot("a", (2,))
    r.slot("n", (2,), "int32")
    r.launch("k")
    r.block()
    with r.step("use"):
        r.move("a", "n")
    assert [f.slot for f in r.recording().findings] == ["a"]


def test_what_is_read_cannot_be_written(r):
    with pytest.raises(ValueError, match="read-only"):
        r.read("x0")[0] = 9


def test_barriers_and_waits(r):
    with r.step("meet"):
        r.barrier(protects="a is whole")
        r.barrier("cluster")
        r.arrive("empty", "x is read")
        r.wait("tiles")
    block = Block(tile=1)
    assert last(r, 4) == (
        Barrier("block", 0, block, protects="a is whole"),
        Barrier("cluster", 0, block),
        Barrier("arrive", 0, block, "empty", "x is read"),
        Barrier("wait", 0, block, group="tiles"),
    )
    for kind in ("wait", "arrive", "galaxy"):
        with pytest.raises(
            ValueError, match=f"barrier kind '{kind}' is none of warp, warpgroup, block, cluster, grid, launch$"
        ):
            r.barrier(kind)


def test_a_barrier_between_steps_belongs_to_the_step_before(r):
    with r.step("one"):
        r.init("a", 0)
    r.barrier()
    with r.step("two"):
        r.init("b", 0)
    one, two = r.recording().steps[-2:]
    assert (one.end - one.first, two.first) == (2, one.end)


def test_asynchronous_moves_are_read_only_after_their_wait(r):
    """Until then nobody knows what lies there: what was there before may be half overwritten."""
    with r.step("issue"):
        r.init("a", 7)
        r.init("b", 7)
        r.move("x0", "a", group="g", stage=1)
        for group in ("other", "more"):
            assert np.isnan(r.read("a")).tolist() == [True] * 3
            r.wait(group)
        assert r.read("b").tolist() == [7, 7, 7]
        r.wait("g")
        assert r.read("a").tolist() == [0, 1, 2]
    found = r.recording().findings
    assert [(f.kind, f.slot, f.step) for f in found] == [("read-arriving", "a", 2)] * 2
    assert found[0].message == "a was read while a copy into it was under way: nobody had waited for 'g'"
    move = next(e for e in r.recording().events if isinstance(e, Move))
    assert (move.asynchronous, move.stage, move.group) == (True, 1, "g")


def test_a_role_waits_for_itself(r):
    """Another role's wait says nothing to this one: its own may be much later."""
    with r.step("issue"):
        r.trace = Trace("producer")
        r.move("x0", "a", group="g")
        r.trace = Trace("consumer 1")
        r.wait("g")
        assert r.read("a").tolist() == [0, 1, 2]
        r.trace = Trace("consumer 2")
        assert np.isnan(r.read("a")).all()
        r.wait("g")
        assert r.read("a").tolist() == [0, 1, 2]
        r.init("a", 7)  # no copy any more: whoever reads it
        r.trace = Trace("consumer 3")
        assert r.read("a").tolist() == [7, 7, 7]
    (found,) = r.recording().findings
    assert (found.kind, found.slot) == ("read-arriving", "a")
    assert found.message == "a was read by consumer 2, who had not waited for 'g'"
    assert [e.trace.role for e in last(r, 4)] == ["producer", "consumer 1", "consumer 2", "consumer 2"]


@pytest.mark.parametrize("how", ["change", "move", "asynchronous"])
def test_what_is_being_copied_away_is_not_overwritten(r, how):
    def overwrite():
        if how == "change":
            r.change("a", [3, 3, 3])
        else:
            r.move("x0", "a", group="in" if how == "asynchronous" else None)

    with r.step("out"):
        r.init("a", 1)
        r.move("a", "b", group="out")
        overwrite()
        r.wait("out")
        overwrite()
        assert r.read("b").tolist() == [1, 1, 1]
    (found,) = r.recording().findings
    assert (found.kind, found.slot) == ("overwritten-leaving", "a")
    assert found.message == "a was overwritten while a copy out of it was under way: nobody had waited for 'out'"


# -- steps, blocks and launches --------------------------------------------------------------------------------------


def test_events_need_a_step(r):
    for act in (lambda: r.move("x0", "a"), lambda: r.init("a", 0)):
        with pytest.raises(RuntimeError, match=r"in no step: write `with r\.step\(label\):` around it"):
            act()


def test_captions_are_the_label_unless_given(r):
    with r.step("a"):
        pass
    with r.step("b", "caption", action="load", tiles={"i": 1, "j": 2}):
        pass
    a, b = r.recording().steps[-2:]
    assert (a.label, a.caption, a.action, a.tiles) == ("a", "a", "", ())
    assert (b.label, b.caption, b.action, b.tiles) == ("b", "caption", "load", (("i", 1), ("j", 2)))
    assert (a.launch, a.block) == (0, Block(tile=1))


def test_steps_nest(r):
    with r.step("outer"):
        with r.step("one"):
            r.init("a", 0)
        with r.step("two"), r.step("deep"):
            r.init("b", 0)
        r.init("c", 0)
    outer = r.recording().steps[-1]
    one, two = outer.parts
    (deep,) = two.parts
    first = outer.first
    assert [(s.first - first, s.end - first) for s in (outer, one, two, deep)] == [(0, 3), (0, 1), (1, 2), (1, 2)]
    assert len(r.recording().steps) == 3


def test_joined_steps_are_one_step_and_one_transfer_each_way(r):
    for label, src, dst in (("load a", "x0", "a"), ("load b", "x1", "b")):
        with r.step("load", join=True, tiles={"j": 0}), r.step(label):
            r.move(src, dst)
    with r.step("load", join=True, tiles={"j": 1}), r.step("load b"):
        r.move("x1", "b")
    first, second = r.recording().steps[-2:]
    assert [p.label for p in first.parts] == ["load a", "load b"]
    assert [p.label for p in second.parts] == ["load b"]
    assert [e.transfer for e in r.recording().events if isinstance(e, Move)] == [1, 1, 2]
    with r.step("both", join=True):
        r.move("x0", "a")
        r.move("a", "y0")
        r.move("b", "y1")
        r.move("a", "b")
    assert [e.transfer for e in r.recording().events if isinstance(e, Move)][-4:] == [3, 4, 4, 5]


@pytest.mark.parametrize("between", ["step", "block", "label", "plain"])
def test_steps_are_not_joined_across(r, between):
    with r.step("load", join=True):
        r.move("x0", "a")
    if between == "step":
        with r.step("other"):
            pass
    if between == "block":
        r.block(1)
    with r.step("load!" if between == "label" else "load", join=between != "plain"):
        r.move("x1", "b")
    loads = [s for s in r.recording().steps if s.label.startswith("load")]
    assert len(loads) == 2
    assert [e.transfer for e in r.recording().events if isinstance(e, Move)] == [1, 2]


def test_a_step_that_raises_is_closed(r):
    def fail():
        with r.step("bad"):
            r.init("a", 0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    step = r.recording().steps[-1]
    assert (step.label, step.end - step.first) == ("bad", 1)


def test_blocks_and_launches():
    r = Recorder("t")
    with pytest.raises(RuntimeError, match=r"a block begins inside a launch: call r\.launch"):
        r.block()
    assert not r.in_block
    with r.launch("k", (3, 2), (64,)) as launch, r.block(2, head=1, batch=0) as block:
        assert (launch, block) == (0, Block(0, 1, 2))
        assert r.in_block
        with r.step("s"):
            for inside, what in ((lambda: r.block(0), "a block begins"), (lambda: r.launch("l"), "launch of l")):
                with pytest.raises(RuntimeError, match=f"{what} inside step 's': close the step first"):
                    inside()
            with pytest.raises(RuntimeError, match="step 's' is still open"):
                r.recording()
    r.launch("second")
    assert not r.in_block
    with r.step("between"):
        pass
    recording = r.recording()
    assert recording.launches == (Launch(0, "k", (3, 2, 1), (64, 1, 1)), Launch(1, "second", (1, 1, 1), (1, 1, 1)))
    assert recording.blocks(0) == (Block(0, 1, 2),)
    assert recording.steps[-1].block is None
    assert recording.steps[-1].launch == 1


def test_a_block_may_have_a_name_of_its_own(r):
    r.block(2, name="combine")
    assert r.recording().steps[-1].label == "visualize combine"
    assert r.block_name == "combine"
    r.block(3)
    assert r.block_name == "block 3"


def test_captions_of_blocks():
    r = Recorder("t")
    r.tensor("x", [1.0], tile=1, head=(1, 0))
    r.launch("k")
    for tile in range(3):
        r.block(tile)
    assert [(s.label, s.caption) for s in r.recording().steps[1:]] == [
        ("visualize batch 0 · block 0", "visualize a single block"),
        ("visualize batch 0 · block 1", "visualize another block"),
        ("visualize batch 0 · block 2", "visualize another block"),
    ]


def test_ranges_of_steps_follow_each_other_and_cover_the_events(r):
    with r.step("load"):
        r.move("x0", "a")
    r.barrier()
    r.launch("again")
    r.block()
    steps = r.recording().steps
    assert [s.first for s in steps[1:]] == [s.end for s in steps[:-1]]
    assert (steps[0].first, steps[-1].end) == (0, len(r.recording().events))


# -- what is kept ----------------------------------------------------------------------------------------------------


def perform(keep, tiles=3):
    r = Recorder("t", keep=keep)
    x = r.tensor("x", np.arange(float(tiles)), tile=1)
    y = r.tensor("y", shape=(tiles,), tile=1)
    a = r.slot("a", (1,))
    r.launch("k")
    for head in range(2):
        for i in range(tiles):
            r.block(i, head)
            with r.step(f"load {i}"):
                r.move(x[i], a)
            r.barrier()
            with r.step(f"store {i}"):
                r.change(a, r.read(a) + 1)
                r.move(a, y[i])
    assert [r.read(s).item() for s in y] == [i + 1 for i in range(tiles)]
    return r


def test_keep_true_and_false():
    whole = perform(True).recording()
    assert len(whole.steps) == 1 + 6 * 3
    nothing = perform(False)
    assert nothing.keeps_nothing
    assert not nothing.recording_now
    with pytest.raises(ValueError, match="keep=False"):
        nothing.recording()


@pytest.mark.parametrize(
    ("keep", "blocks"),
    [
        ([1], [(0, 0, 1), (0, 1, 1)]),
        ([(0, 1, 2)], [(0, 1, 2)]),
        ({0, (0, 1, 1)}, [(0, 0, 0), (0, 1, 0), (0, 1, 1)]),
        (range(2), [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]),
        (np.array([2]), [(0, 0, 2), (0, 1, 2)]),
    ],
    ids=["tile", "triple", "both", "range", "array"],
)
def test_keep_some_blocks(keep, blocks):
    recording = perform(keep).recording()
    whole = perform(True).recording()
    assert list(recording.blocks()) == blocks
    assert [s.label for s in recording.steps if s.block] == [s.label for s in whole.steps if s.block in blocks]
    assert {e.block for e in recording.events if isinstance(e, Move)} == set(blocks)
    assert recording.steps[-1].end == len(recording.events)


@pytest.mark.parametrize("keep", [3, "ab", [1.5], [(1, 2, 3, 4)], [None]])
def test_what_keep_may_not_be(keep):
    with pytest.raises(TypeError, match=r"blocks to keep: .*; give True, False, or a list of tile numbers"):
        Recorder("t", keep=keep)


def test_blocks_to_keep_that_never_began():
    with pytest.raises(ValueError, match=r"blocks to keep: \{9\}: none of them began"):
        perform([9]).recording()
    assert len(Recorder("t", keep=[9]).recording().steps) == 1


def test_findings_are_kept_with_their_block():
    r = Recorder("t", keep=[1])
    a = r.slot("a", (1,))
    r.launch("k")
    for i in range(2):
        r.block(i)
        r.read(a)
    assert [(f.block, f.step) for f in r.recording().findings] == [(Block(tile=1), 1)]


def test_very_many_steps_need_the_blocks_to_be_named(monkeypatch):
    assert recorder.MOST_ACTIONS == 100_000
    monkeypatch.setattr(recorder, "MOST_ACTIONS", 10)
    with pytest.raises(ValueError, match=r"more than 10 steps: name the blocks to keep \(record=\[0\].*record=False"):
        perform(True)
    assert len(perform([0]).recording().steps) == 1 + 2 * 3
    perform(False)


def test_only_small_tiles_keep_their_numbers():
    r = Recorder("t", keep_values=2)
    r.tensor("x", np.ones(5), tile=3)
    assert [e.values is None for e in r.recording().events] == [True, False]


def test_params_and_code_travel():
    params = {"N": 3}
    r = Recorder("t", params)
    params["N"] = 4
    recording = r.recording(source="kernel", device="gpu")
    assert (recording.params, recording.source, recording.device) == ({"N": 3}, "kernel", "gpu")
    recording.params["N"] = 5
    assert r.recording().params == {"N": 3}


def test_captions_that_are_known_only_now():
    r = Recorder("a")
    x, xi = r.tensor("x", np.arange(2.0), tile=1), r.slot("xi", (1,))
    r.launch("k")
    r.caption("no step is open: nothing happens")
    r.block(0, name="row 0", caption="a block for the row")
    with r.step("load x0", "load"):
        r.move(x[0], xi)
        r.caption(f"load {r.read(xi)[0]:g}")
    with r.step("whole"), r.step("part", "part's own"):
        r.move(x[1], xi)
        r.caption("whole, said from inside its part")
    made = [(s.label, s.caption) for s in r.recording().steps[1:]]
    assert made == [
        ("visualize row 0", "a block for the row"),
        ("load x0", "load 0"),
        ("whole", "whole, said from inside its part"),
    ]
    assert r.recording().steps[-1].parts[0].caption == "part's own"


def test_bfloat16_tiles_hold_rounded_numbers_and_count_two_bytes(tmp_path):
    r = Recorder("copies")
    x = r.tensor("x", np.array([1 / 3, 3.0]), tile=2, dtype="bfloat16")
    xi, y = r.slot("xi", (2,), "bfloat16", tensor="x"), r.tensor("y", shape=(2,), tile=2, dtype="bfloat16")
    with r.launch("copies"), r.block(tile=0):
        with r.step("load"):
            r.move(x[0], xi)
        with r.step("store"):
            r.move(xi, y[0], values=r.read(xi) / 3)
    assert np.array_equal(r.read(xi), np.array([0.333984375, 3.0], dtype="float32"))
    recording = r.recording()
    assert recording.values(-1, "y0").tolist() == [0.111328125, 1.0]
    counted = fv.traffic(recording)
    assert (counted.bytes_read, counted.bytes_written) == (4, 4)
    fv.save(recording, tmp_path / "copies.json")
    assert fv.load(tmp_path / "copies.json") == recording
