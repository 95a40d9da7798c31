"""The softmax's tile program in its three forms: numbers against float64, steps, captions, events and passes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashviz as fv
from flashviz.events import Barrier, Begin, Change, Launch, Move
from flashviz.programs.online_softmax import LOOPS

FORMS = ("safe", "online", "fused")
EPS = 2.0**-23


def softmax(x):
    """Softmax of each row in float64; 0 where a row holds nothing but -inf."""
    s = np.asarray(np.asarray(x, "float32"), float)
    m = s.max(axis=-1, keepdims=True)
    e = np.exp(s - np.where(np.isneginf(m), 0, m))
    total = e.sum(axis=-1, keepdims=True)
    return e / np.where(total == 0, 1, total)


def run(x, V=None, **options):
    return fv.online_softmax(x, V, device="numpy", **{"record": False, **options})


def assert_right(x, V=None, **options):
    """y in both forms, and o with V, within a few roundings of float64."""
    want, N = softmax(x), np.shape(x)[-1]
    most = EPS * (N + 32)
    for form in ("safe", "online"):
        got = run(x, form=form, **options)
        assert got.o is None
        assert got.y.dtype == np.float32
        assert got.y.shape == np.shape(x)
        assert np.abs(got.y - want).max() <= most
    if V is not None:
        got = run(x, V, **options)
        v = np.asarray(np.asarray(V, "float32"), float)
        assert got.y is None
        assert got.o.shape == (*np.shape(x)[:-1], v.shape[1])
        assert np.abs(got.o - want @ v).max() <= 4 * most * max(np.abs(v).max(), 1e-30)


@st.composite
def problems(draw):
    """A row or rows of any real dtype, some of the scores -inf, and V."""
    R, N, D = draw(st.integers(0, 3)), draw(st.integers(1, 30)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = draw(st.sampled_from([0.1, 1.0, 30.0, 1e4]))
    dtype = draw(st.sampled_from(["float16", "float32", "float64", "int32"]))
    x = np.round(rng.normal(size=(R, N) if R else (N,)) * size, 2).astype(dtype)
    if dtype != "int32":
        x[rng.random(x.shape) < draw(st.sampled_from([0.0, 0.3, 0.9]))] = -np.inf
    return x, rng.normal(size=(N, D)), draw(st.integers(1, 33))


@given(problems())
def test_random_rows_against_float64(problem):
    x, V, tile = problem
    assert_right(x, V, tile=tile)


@pytest.mark.parametrize("tile", [1, 3, 4, 50])
def test_huge_scores_do_not_overflow(tile):
    V = np.arange(24.0).reshape(12, 2)
    for top in (88.8, 1e4, 3e38):  # e^88.8 is past float32; 3e38 - -3e38 is past it even before the exponential
        assert_right(np.linspace(-top, top, 12), V, tile=tile)
        assert_right(np.linspace(top, -top, 12), V, tile=tile)
        assert_right(np.full(12, top), V, tile=tile)


@pytest.mark.parametrize("tile", [1, 2, 4])
def test_scores_of_minus_infinity_count_for_nothing(tile):
    inf = -np.inf
    V = np.arange(1.0, 5)[:, None]
    for x in ([inf, inf, 0, 0], [0, 0, inf, inf], [inf, 1, inf, 2], [inf, inf, inf, 5]):
        assert_right(x, V, tile=tile)
    assert run([inf] * 4, tile=tile).y.tolist() == [0, 0, 0, 0]
    assert run([inf] * 4, V, tile=tile).o.tolist() == [0]


def test_a05_rows_and_first_tiles_that_are_masked():
    x = np.where(np.array([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]]) == 1, 0, -np.inf)
    got = run(x, np.arange(1.0, 5)[:, None], tile=2, record=True)
    assert got.o[:, 0] == pytest.approx([3.5, 2.5, 0])
    for r, want in enumerate([math.log(2), math.log(4), -np.inf]):
        last = max(n for n, s in enumerate(got.recording.steps) if s.block == (0, 0, r))
        m, d = (got.recording.values(last, name)[0] for name in "md")
        with np.errstate(divide="ignore"):
            assert m + np.log(d) == pytest.approx(want)
    numbers = [e.values.array for e in got.recording.events if isinstance(e, Change) and e.values is not None]
    assert not any(np.isnan(n).any() for n in numbers), "no -inf - -inf at any step"


@pytest.mark.parametrize("score", [-10.0, 0.0])
def test_a01_the_last_tile_is_not_padded_with_zeros(score):
    assert run([score] * 5, np.ones((5, 1)), tile=4).o.tolist() == [1.0]
    assert run([score] * 5, tile=4).y.tolist() == pytest.approx([0.2] * 5)


def test_one_score():
    V = np.array([[0.3, -7.0, 1e-20]], "float32")
    for x in ([0.0], [-3e38], [3e38]):
        assert run(x).y.tolist() == run(x, form="safe").y.tolist() == [1.0]
        assert np.array_equal(run(x, V).o, V[0])


def test_views_give_the_bits_of_copies():
    rng = np.random.default_rng(14)
    x, V = rng.normal(size=(9, 6)).astype("float32").T[:, ::-1], rng.normal(size=(4, 18)).astype("float32").T[::2]
    assert np.array_equal(run(x).y, run(x.copy()).y)
    assert np.array_equal(run(x, V).o, run(x.copy(), V.copy()).o)


def test_a_nan_makes_its_own_row_nan_and_no_other():
    y = run([[0, np.nan, 1], [0, 1, 2]], tile=2).y
    assert np.isnan(y[0]).all()
    assert np.isfinite(y[1]).all()


# -- the picture's steps ---------------------------------------------------------------------------------------------

X = np.array([1, -0.5, 0.5, 2, 0, 3.5, 1, -1, 2, 0.5, -2, 1.5], "float32")
V = np.arange(24.0).reshape(12, 2) / 10


def steps(form):
    made = fv.online_softmax(X, V if form == "fused" else None, form=form, device="numpy")
    return made.recording.steps


FIRST = [
    ("start", "Setup ready"),
    ("visualize row 0", "a block for row 0, with nothing in SRAM"),
    ("row 0 · set m = -inf, d = 0", "set m = -inf, d = 0"),
]


def test_the_steps_of_the_safe_softmax():
    tiles = [(p, i) for p in (1, 2, 3) for i in range(3)]
    texts = {1: "new maximum m", 2: "add to d", 3: "write yi"}
    want = [[f"row 0 · p = {p} · i = {i} · {t}" for t in ("load xi", texts[p])] for p, i in tiles]
    assert [s.label for s in steps("safe")] == [label for label, _ in FIRST] + [t for pair in want for t in pair]


def test_the_steps_of_the_online_softmax_say_the_numbers():
    made = [(s.label, s.caption) for s in steps("online")]
    assert made[:3] == FIRST
    assert made[3:11] == [
        ("row 0 · p = 1 · i = 0 · load xi", "[pass: 1, tile: 0] load xi"),
        ("row 0 · p = 1 · i = 0 · new maximum m", "[pass: 1, tile: 0] m = max(-inf, 2) = 2,  c = e^(-inf - 2) = 0"),
        ("row 0 · p = 1 · i = 0 · rescale d", "[pass: 1, tile: 0] rescale d:  0 · 0 = 0"),
        ("row 0 · p = 1 · i = 0 · add to d", "[pass: 1, tile: 0] add e^(xi - m):  d = 0 + 1.673 = 1.673"),
        ("row 0 · p = 1 · i = 1 · load xi", "[pass: 1, tile: 1] load xi"),
        (
            "row 0 · p = 1 · i = 1 · new maximum m",
            "[pass: 1, tile: 1] m = max(2, 3.5) = 3.5,  c = e^(2 - 3.5) = 0.2231",
        ),
        ("row 0 · p = 1 · i = 1 · rescale d", "[pass: 1, tile: 1] rescale d:  1.673 · 0.2231 = 0.3733"),
        ("row 0 · p = 1 · i = 1 · add to d", "[pass: 1, tile: 1] add e^(xi - m):  d = 0.3733 + 1.123 = 1.497"),
    ]
    assert made[-1] == ("row 0 · p = 2 · i = 2 · write yi", "[pass: 2, tile: 2] write y2 = e^(x2 - 3.5) / 1.909")
    assert len(made) == 21


def test_the_steps_of_the_fused_softmax():
    made = steps("fused")
    actions = ("load_x", "load_v", "running_max", "rescale", "running_sum", "accumulate")
    assert [a for s in made for a in s.actions] == ["start", *actions * 3, "store_o"]
    assert made[2].caption == "set m = -inf, d = 0, o = 0"
    assert (
        made[13].caption
        == "[pass: 1, tile: 1] add e^(xi - m):  d = 0.3733 + 1.123 = 1.497,  w = 0.3733 / 1.497 = 0.2494"
    )
    assert made[-1].label == "row 0 · write o"


def test_carries_at_every_step():
    recording = fv.online_softmax(X, V, device="numpy").recording
    after = [n for n, s in enumerate(recording.steps) if "accumulate" in s.actions]
    x, v = X.astype(float), V
    for n, end in zip(after, (4, 8, 12), strict=True):
        m, d, o = (recording.values(n, name) for name in ("m", "d", "o"))
        assert m[0] == x[:end].max()
        assert d[0] == pytest.approx(np.exp(x[:end] - m[0]).sum(), rel=1e-6)
        assert o == pytest.approx(softmax(x[:end]) @ v[:end], rel=1e-5), "normalised at every tile"


def test_stale_is_what_does_not_include_the_tile_that_arrives():
    def stale(form):
        made = fv.online_softmax(X, V if form == "fused" else None, form=form, device="numpy").recording
        names = [s.name for s in made.slots if not s.shared_by_grid]
        out = []
        for n, step in enumerate(made.steps):
            if step.actions == ("load_x",):
                held = {name: made.content(n, name) for name in names}
                out.append("".join(sorted(name for name, c in held.items() if c is not None and c.stale)))
        return out

    assert stale("safe") == ["", "m", "m", "", "dpi", "dpi", "pi", "pi", "pi"]
    assert stale("online") == ["", "cdmpi", "cdmpi", "pi", "pi", "pi"]
    assert stale("fused") == ["", "cdmpiw", "cdmpiw"]


# -- events, passes, traffic -----------------------------------------------------------------------------------------

DOES = {  # what each action moves and changes, in order, without what turns stale
    "start": ["m:init", "d:init"],
    "load_x": ["x>xi"],
    "load_v": ["V>Vi"],
    "running_max": ["c:compute", "m:compute", "|"],
    "rescale": ["d:rescale"],
    "running_sum": ["pi:compute", "w:compute", "d:compute", "|"],
    "accumulate": ["o:compute", "|"],
    "divide": ["pi:compute"],
    "store_y": ["pi>y"],
    "store_o": ["o>o"],
}


def said(event):
    if isinstance(event, Move):
        return " ".join("".join(c for c in f"{p.src}>{p.dst}" if c.isalpha() or c == ">") for p in event.parts)
    return f"{event.slot}:{event.role}" if isinstance(event, Change) else "|"


@given(st.integers(1, 3), st.integers(1, 12), st.integers(1, 6), st.sampled_from(FORMS), st.integers(1, 4))
@settings(max_examples=60)
def test_events_and_passes(R, N, tile, form, D):
    rng = np.random.default_rng(N)
    x, v = rng.normal(size=(R, N)), rng.normal(size=(N, D)) if form == "fused" else None
    made = fv.online_softmax(x, v, form=form, tile=tile, device="numpy")
    recording = made.recording
    assert recording.algorithm == made.algorithm == f"{form}_softmax"
    assert recording.findings == ()
    assert [e.grid for e in recording.events if isinstance(e, Launch)] == [(R, 1, 1)]
    assert recording.blocks() == tuple((0, 0, r) for r in range(R))
    there = {s.name for s in recording.slots}
    for step in recording.steps:
        for leaf in [p for p in step.parts or (step,) if p.action]:
            events = recording.events[leaf.first : leaf.end]
            made_ = [said(e) for e in events if not isinstance(e, Begin) and getattr(e, "role", "") != "stale"]
            want = DOES[leaf.action] + (["o:init"] if leaf.action == "start" and form == "fused" else [])
            assert made_ == [w for w in want if w == "|" or w.split(":")[0] in there or ">" in w]
    counted = fv.traffic(made)
    assert counted.trips["x"] == {"safe": 3, "online": 2, "fused": 1}[form]
    assert fv.check_traffic(made) == []
    assert fv.traffic_model(f"{form}_softmax", R=R, N=N, D=D).bytes_read == counted.bytes_read
    passes = {s.tiles[-2:][0] for s in recording.steps if s.actions == ("load_x",)}
    assert passes == {("p", p) for p in range(1, 1 + int(counted.trips["x"]))}


def test_a_formula_that_does_not_fit_is_seen():
    safe = fv.online_softmax(X, form="safe", device="numpy")
    assert fv.traffic_model("online_softmax", N=12).differences(fv.traffic(safe)) == [
        "x: 144 bytes read, the formula says 96"
    ]


def test_barriers_say_what_they_protect():
    recording = fv.online_softmax(X, V, device="numpy").recording
    assert all(len(e.protects.split()) > 5 for e in recording.events if isinstance(e, Barrier))


def test_shared_memory_of_a_recording_is_the_kernels():
    from flashviz.cuda import find

    for form in FORMS:
        recording = fv.online_softmax(X, V if form == "fused" else None, form=form, device="numpy").recording
        values = {"Tile": 4, "D": 2} if form == "fused" else {"Tile": 4}
        parts = find("online_softmax", f"{form}_softmax").shared_parts(values)
        scratch = parts.pop("part")
        assert scratch == 16
        assert parts == {s.name: s.nbytes for s in recording.slots if not s.shared_by_grid}


# -- a reader's own loops --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_a_readers_own_loop_gives_an_equal_recording(form):
    v = V if form == "fused" else None
    mine = fv.OnlineSoftmax(X, v, form=form)
    LOOPS[form](mine)
    assert mine.run().recording == fv.online_softmax(X, v, form=form, device="numpy").recording


def test_tiles_in_any_order_give_the_same_softmax():
    s = fv.OnlineSoftmax(X, V)
    s.begin()
    s.start()
    for i in (2, 0, 1):
        for act in (s.load_x, s.load_v, s.running_max, s.rescale, s.running_sum, s.accumulate):
            act(i)
    s.store_o()
    assert np.abs(s.run().o - softmax(X) @ V).max() < 1e-6


def test_without_rescale_the_sum_is_wrong_and_with_a_falling_row_nobody_notices():
    def forgot(x):
        s = fv.OnlineSoftmax(x)
        s.begin()
        s.start()
        for i in range(s.T):
            s.load_x(i)
            s.running_max(i)
            s.running_sum(i)
        for i in range(s.T):
            s.load_x(i)
            s.divide(i)
            s.store_y(i)
        return s.run().y.sum()

    assert forgot(X) < 0.6
    assert forgot(np.sort(X)[::-1]) == pytest.approx(1, abs=1e-6)


SKIPPABLE = ("start", "load_x", "load_v", "running_max", "rescale", "running_sum", "accumulate")


@given(st.sets(st.sampled_from(SKIPPABLE)), st.integers(1, 13))
@settings(max_examples=40)
def test_an_action_left_out_is_seen_and_never_crashes(left_out, tile):
    s = fv.OnlineSoftmax(X, V, tile=tile)
    s.begin()
    for name in SKIPPABLE[:1]:
        if name not in left_out:
            s.start()
    for i in range(s.T):
        for name in SKIPPABLE[1:]:
            if name not in left_out:
                getattr(s, name)(i)
    s.store_o()
    recording = s.run().recording
    found = {f.slot for f in recording.findings}
    if "start" in left_out:
        assert "o" in found
    if "load_x" in left_out and not {"running_max", "running_sum"} <= left_out:
        assert "xi" in found
    if "load_v" in left_out and "accumulate" not in left_out:
        assert "Vi" in found


# -- rows, recordings, errors ----------------------------------------------------------------------------------------


def test_several_rows_are_blocks_of_their_own():
    x = np.stack([X, X[::-1], np.full(12, -np.inf, "float32")])
    whole = fv.online_softmax(x, V, device="numpy")
    assert np.abs(whole.o - softmax(x) @ V).max() < 1e-6
    labels = [s.label for s in whole.recording.steps]
    assert len(set(labels)) == len(labels)
    assert "row 2 · p = 1 · i = 0 · rescale d" in labels
    some = fv.online_softmax(x, V, device="numpy", record=[1])
    assert some.recording.blocks() == ((0, 0, 1),)
    assert np.array_equal(some.o, whole.o)
    assert np.array_equal(some.recording.values(-1, "o0[1]"), whole.o[1])
    none = fv.online_softmax(x, V, device="numpy", record=False)
    assert none.recording is None
    assert "not recorded" in repr(none)
    assert fv.traffic_model(none).bytes_read == fv.traffic(whole).bytes_read


def test_ragged_tiles_have_their_real_size():
    recording = fv.online_softmax(X[:6], V[:6], device="numpy").recording
    assert (recording.slot("x1").shape, recording.slot("V1").shape) == ((2,), (2, 2))
    last = max(n for n, s in enumerate(recording.steps) if "running_sum" in s.actions)
    assert recording.values(last, "pi").shape == (2,)


def test_the_recording_carries_both_sources_with_every_action():
    recording = fv.online_softmax(X, device="numpy").recording
    assert recording.source == "program"
    python, cuda = recording.code
    assert [name for name, _, _ in python.lines] == [name for name, _, _ in cuda.lines]
    assert [name for name, _, _ in python.lines] == list(fv.OnlineSoftmax.action_names())
    assert "d[0] *= c[0]" in cuda.lines_of("rescale")
    assert "def rescale(" in python.lines_of("rescale")


M = np.ones((4, 3))
WRONG = {
    "three axes": ((np.ones((2, 2, 2)),), {}, ValueError, r"x has shape \(2, 2, 2\): it must be \[N\] or \[R, N\]"),
    "empty": (([],), {}, ValueError, r"x has shape \(0,\).*at least one element"),
    "text": ((["a"],), {}, TypeError, "x has dtype <U1"),
    "complex V": ((M[:, 0], M * 1j), {}, TypeError, "V has dtype complex128"),
    "V rows": ((M[0], M), {}, ValueError, r"V has shape \(4, 3\): it must be \[N, D\].*N=3"),
    "V axes": ((M[:, 0], M[:, 0]), {}, ValueError, r"V has shape \(4,\)"),
    "tile 0": ((M[0],), {"tile": 0}, ValueError, "tile=0: .*at least 1"),
    "form": ((M[0],), {"form": "naive"}, ValueError, "form='naive' is none of"),
    "fused without V": ((M[0],), {"form": "fused"}, ValueError, "form='fused' needs V"),
    "safe with V": ((M[:, 0], M), {"form": "safe"}, ValueError, "form='safe' takes no V"),
    "device": ((M[0],), {"device": "tpu"}, ValueError, "device='tpu' is none of"),
    "record": ((M[0],), {"record": [3]}, ValueError, r"blocks to keep: \{3\}: none of them began"),
}


@pytest.mark.parametrize(("arrays", "options", "kind", "message"), WRONG.values(), ids=WRONG)
def test_errors_name_the_value_and_what_it_must_be(arrays, options, kind, message):
    with pytest.raises(kind, match=message):
        fv.online_softmax(*arrays, **{"device": "numpy", **options})


def test_errors_of_a_readers_loop():
    s = fv.OnlineSoftmax(X)
    with pytest.raises(RuntimeError, match="load_x before a block has begun"):
        s.load_x(0)
    with pytest.raises(IndexError, match="row 1: rows run from 0 to 0"):
        s.begin(1)
    s.begin()
    with pytest.raises(IndexError, match="x has tiles 0 to 2, not 3"):
        s.load_x(3)
