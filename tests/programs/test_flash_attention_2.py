"""FlashAttention-2's tile program: its numbers against the oracle, its steps and events against the figure."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from programs.oracle import attention, bound

import flashviz as fv
from flashviz.events import Begin, Change, Launch, Move
from flashviz.programs.flash_attention_2 import forward


def run(Q, K, V, **options):
    return fv.flash_attention_2(Q, K, V, device="numpy", **{"record": False, **options})


def assert_right(Q, K, V, *, scale=None, causal=False, mask=None, **options):
    got = run(Q, K, V, scale=scale, causal=causal, mask=mask, **options)
    exact = [np.asarray(x, dtype="float32") for x in (Q, K, V)]
    used = None if scale is None else float(np.float32(scale))
    O, L = attention(*exact, scale=used, causal=causal, mask=mask)
    most_o, most_l = bound(*exact, scale=scale)
    assert got.O.shape == np.shape(Q)
    assert got.L.shape == np.shape(Q)[:-1]
    assert got.O.dtype == got.L.dtype == np.float32
    assert not np.isnan(got.O).any()
    assert np.array_equal(np.isneginf(got.L), np.isneginf(L))
    assert np.abs(got.O - O).max() <= most_o
    seen = ~np.isneginf(L)
    assert not seen.any() or np.abs(got.L[seen] - L[seen]).max() <= most_l
    return got


@st.composite
def problems(draw):
    """Q, K and V of any accepted shape, with grouped heads, and options."""
    axes = draw(st.integers(2, 4))
    nq, nk, d = draw(st.integers(1, 20)), draw(st.integers(1, 20)), draw(st.integers(1, 9))
    heads, group, batch = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    q_lead = [(), (heads * group,), (batch, heads * group)][axes - 2]
    k_lead = [(), (heads,), (batch, heads)][axes - 2]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = draw(st.sampled_from([0.1, 1.0, 8.0]))
    dtype = draw(st.sampled_from(["float16", "float32", "float64", "int8", "int64"]))

    def tensor(*shape):
        return np.round(rng.normal(size=shape) * size, 3 if dtype.startswith("float") else 0).astype(dtype)

    options = {
        "Br": draw(st.integers(1, 22)),
        "Bc": draw(st.integers(1, 22)),
        "causal": draw(st.booleans()),
        "scale": draw(st.sampled_from([None, 0, 0.5, -1.0])),
        "mask": rng.random((*q_lead, nq, nk)) < draw(st.sampled_from([0.2, 0.8])) if draw(st.booleans()) else None,
    }
    return (tensor(*q_lead, nq, d), tensor(*k_lead, nk, d), tensor(*k_lead, nk, d)), options


@given(problems())
def test_random_problems_against_the_oracle(problem):
    arrays, options = problem
    assert_right(*arrays, **options)


@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 9), st.booleans())
def test_scores_of_thirty_thousand(seed, Br, Bc, steep):
    rng = np.random.default_rng(seed)
    q = np.ones((5, 1)) * (173.0 if not steep else 1.0)
    k = rng.choice([-30000.0, 0.0, 29999.0, 30000.0], size=(9, 1)) / q[0, 0]
    assert_right(q, k, rng.normal(size=(9, 1)), scale=1.0, Br=Br, Bc=Bc)


def test_a_staircase_of_scores_updates_the_maximum_in_every_tile():
    k = np.linspace(-30000, 30000, 33)[:, None]
    up = assert_right(np.ones((1, 1)), k, k / 30000, scale=1.0, Bc=4)
    down = assert_right(np.ones((1, 1)), k[::-1], k[::-1] / 30000, scale=1.0, Bc=4)
    assert up.O[0, 0] == down.O[0, 0] == 1.0


# -- cases.md --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", [-10.0, 0.0])
def test_a01_tail_keys_are_not_padded_with_zeros(score):
    got = run(np.ones((1, 1)), np.full((5, 1), score), np.ones((5, 1)), scale=1.0, Bc=4)
    assert got.O.tolist() == [[1.0]]


@pytest.mark.parametrize("N", [1, 2, 31, 32, 33, 63, 65])
def test_a02_sizes_around_a_block(N):
    rng = np.random.default_rng(N)
    guarded = [np.full((2, 3, N + 2, 64), np.nan, dtype="float32") for _ in range(3)]
    for g in guarded:
        g[:, :, 1:-1] = rng.normal(size=(2, 3, N, 64))
    before = [g.copy() for g in guarded]
    q, k, v = (g[:, :, 1:-1] for g in guarded)
    got = assert_right(q, k, v, Br=32, Bc=32)
    for g, b in zip(guarded, before, strict=True):
        assert np.array_equal(g, b, equal_nan=True)
    if N == 1:
        assert np.array_equal(got.O, v)


@pytest.mark.parametrize(
    ("nq", "nk", "want"), [(2, 5, [2.5, 3]), (5, 2, [0, 0, 0, 1, 1.5]), (1, 8, [4.5])], ids=["2x5", "5x2", "1x8"]
)
@pytest.mark.parametrize("Bc", [1, 2, 3, 8])
def test_a04_causal_is_bottom_right(nq, nk, want, Bc):
    got = run(np.zeros((nq, 1)), np.zeros((nk, 1)), np.arange(1.0, nk + 1)[:, None], causal=True, Br=2, Bc=Bc)
    assert got.O[:, 0] == pytest.approx(want, abs=1e-6)
    blind = max(nq - nk, 0)
    assert np.isneginf(got.L).tolist() == [True] * blind + [False] * (nq - blind)


def test_a05_rows_and_first_blocks_that_see_no_key():
    mask = np.array([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=bool)
    got = run(np.zeros((3, 1)), np.zeros((4, 1)), np.arange(1.0, 5)[:, None], mask=mask, Bc=2)
    assert got.O[:, 0] == pytest.approx([3.5, 2.5, 0])
    assert pytest.approx([math.log(2), math.log(4), -math.inf]) == got.L


def test_a07_f16_does_not_overflow_before_the_scale():
    q, k, v = np.full((1, 128), 24), np.stack([np.full(128, 24), np.full(128, -24)]), np.eye(2, 128)
    got = run(*(x.astype("float16") for x in (q, k, v)))
    assert got.O[0, 0] == 1.0
    assert np.isfinite(got.L).all()


@pytest.mark.parametrize(
    ("scale", "want"),
    [(None, [[1, 2], [2.0495, 3.0495], [3.2066, 4.2066]]), (0, [[1, 2], [2, 3], [3, 4]])],
    ids=["default", "zero"],
)
def test_a09_scale(scale, want):
    q, k, v = ((np.arange(6.0).reshape(3, 2) + n) * f for n, f in ((1, 0.1), (7, 0.1), (1, 1)))
    got = run(q, k, v, scale=scale, causal=True)
    assert pytest.approx(np.array(want), abs=6e-5) == got.O


def test_a10_l_is_a_natural_logarithm():
    assert pytest.approx([math.log(8)]) == run(np.zeros((1, 2)), np.zeros((8, 2)), np.ones((8, 2)), Bc=3).L


def test_a14_views_give_the_bits_of_copies():
    rng = np.random.default_rng(14)
    packed = rng.normal(size=(2, 7, 3, 4, 6)).astype("float32")  # B, N, 3, H, D
    q, k, v = (packed[:, :, n].transpose(0, 2, 1, 3) for n in range(3))
    other = rng.normal(size=(2, 4, 6, 7)).astype("float32").swapaxes(-1, -2)
    for value in (v, other, v[..., ::-1], packed[:, ::-1, 2].transpose(0, 2, 1, 3)):
        assert not value.flags.c_contiguous
        views, copies = run(q, k, value), run(q.copy(), k.copy(), value.copy())
        assert np.array_equal(views.O, copies.O)
        assert np.array_equal(views.L, copies.L)
        assert np.abs(views.O - attention(q, k, value)[0]).max() < 1e-5


# -- the figure ------------------------------------------------------------------------------------------------------

BLOCK = [
    ("visualize block {i}", "visualize {a} block"),
    ("block {i} · load Qi", "load Qi"),
    *[
        (f"block {{i}} · j = {j} · {text}", f"[KV loop: {j}] {text}")
        for j in range(2)
        for text in ("load Kj, Vj", "fill Sij", "update mi, li and Oi")
    ],
    ("block {i} · write Oi, Li", "write Oi, Li"),
]


@pytest.fixture(scope="module")
def two_by_two():
    rng = np.random.default_rng(2)
    return fv.flash_attention_2(*rng.normal(size=(3, 8, 8)), Br=4, Bc=4, device="numpy")


def test_the_nineteen_frames(two_by_two):
    blocks = [[(a.format(i=i), b.format(a=("a single", "another")[i])) for a, b in BLOCK] for i in range(2)]
    frames = [("start", "Setup ready"), *blocks[0], *blocks[1]]
    assert len(frames) == 19
    assert [(s.label, s.caption) for s in two_by_two.recording.steps] == frames


def test_six_fetches_and_two_stores(two_by_two):
    counted = fv.traffic(two_by_two)
    assert (counted.fetches, counted.stores, counted.transfers) == (6, 2, 8)


def test_composite_steps_open_into_their_actions(two_by_two):
    steps = {s.label: s for s in two_by_two.recording.steps}
    load = steps["block 1 · j = 0 · load Kj, Vj"]
    assert [(p.label, p.action) for p in load.parts] == [("load Kj", "load_k"), ("load Vj", "load_v")]
    assert load.actions == ("load_k", "load_v")
    assert dict(load.tiles) == {"i": 1, "j": 0}
    update = steps["block 0 · j = 1 · update mi, li and Oi"]
    assert update.actions == ("softmax", "accumulate")
    assert (update.parts[0].first, update.parts[-1].end) == (update.first, update.end)
    assert update.parts[0].end == update.parts[1].first
    assert steps["block 0 · load Qi"].actions == ("load_q",)


def test_stale_marks_what_an_earlier_tile_made_and_never_oi(two_by_two):
    recording = two_by_two.recording
    at = {s.label: n for n, s in enumerate(recording.steps)}

    def stale(label):
        found = {n: recording.content(at[label], n) for n in ("Sij", "mi", "li", "Oi")}
        return {n for n, c in found.items() if c is not None and c.stale}

    for i in range(2):
        assert stale(f"block {i} · j = 0 · load Kj, Vj") == set()  # initialised or empty: stays as it is
        assert recording.content(at[f"block {i} · j = 0 · load Kj, Vj"], "Sij") is None
        assert stale(f"block {i} · j = 0 · update mi, li and Oi") == set()
        assert stale(f"block {i} · j = 1 · load Kj, Vj") == {"Sij", "mi", "li"}
        assert stale(f"block {i} · j = 1 · fill Sij") == {"mi", "li"}
        assert stale(f"block {i} · j = 1 · update mi, li and Oi") == set()


def test_levels_count_updates_from_the_initialised_state(two_by_two):
    recording = two_by_two.recording
    levels = {n: [] for n in ("Sij", "mi", "li", "Oi")}
    for n, step in enumerate(recording.steps[:10]):
        if "load Qi" in step.label or "update" in step.label:
            for slot, found in levels.items():
                content = recording.content(n, slot)
                found.append(None if content is None else content.level)
    assert levels == {"Sij": [None, 1, 2], "mi": [0, 1, 2], "li": [0, 1, 2], "Oi": [0, 1, 2]}


def test_labels_of_what_moves(two_by_two):
    recording = two_by_two.recording
    at = {s.label: n for n, s in enumerate(recording.steps)}
    step = at["block 1 · j = 1 · fill Sij"]
    assert [recording.content(step, n).label for n in ("Qi", "Kj", "Vj")] == ["Q1", "K1", "V1"]
    end = at["block 1 · write Oi, Li"]
    assert [recording.content(end, n).label for n in ("O0", "L0", "O1", "L1")] == ["O0", "L0", "O1", "L1"]
    assert [recording.content(at["start"], n).level for n in ("O1", "L1", "Q1")] == [0, 0, 1]


def test_values_in_the_recording_are_the_results(two_by_two):
    recording = two_by_two.recording
    for i in range(2):
        assert np.array_equal(recording.values(-1, f"O{i}"), two_by_two.O[4 * i : 4 * i + 4])
        assert np.array_equal(recording.values(-1, f"L{i}"), two_by_two.L[4 * i : 4 * i + 4])
    filled = next(n for n, s in enumerate(recording.steps) if s.label == "block 1 · j = 1 · fill Sij")
    q, k = (recording.values(filled, n) for n in ("Qi", "Kj"))
    assert recording.values(filled, "Sij") == pytest.approx(q @ k.T / math.sqrt(8), abs=1e-5)
    assert recording.values(0, "O0").shape == (4, 8)
    assert np.isnan(recording.values(0, "O0")).all()
    assert np.isnan(recording.values(0, "Sij")).all()


def test_store_says_what_it_reads(two_by_two):
    store = next(e for e in reversed(two_by_two.recording.events) if isinstance(e, Move))
    assert [(p.src, p.dst, p.reads) for p in store.parts] == [
        ("Oi", "O1", ("Oi", "li")),
        ("li", "L1", ("mi", "li")),
    ]


def test_ragged_tiles_have_their_real_size():
    rng = np.random.default_rng(3)
    recording = fv.flash_attention_2(*rng.normal(size=(3, 5, 2)), Br=4, Bc=3, device="numpy").recording
    assert recording.slot("Q1").shape == (1, 2)
    assert recording.slot("K1").shape == (2, 2)
    assert recording.values(-1, "Sij").shape == (1, 2)
    assert recording.values(-1, "mi").shape == (1,)


# -- events and recordings -------------------------------------------------------------------------------------------

LOOP = ("load_k", "load_v", "scores", "softmax", "accumulate")
DOES = {  # what each action moves and changes, in order
    "load_q": ["Q>Qi", "Oi:init", "mi:init", "li:init", "|"],
    "load_k": ["Sij:stale", "mi:stale", "li:stale", "K>Kj"],
    "load_v": ["V>Vj", "|"],
    "scores": ["Sij:compute", "|"],
    "softmax": ["mi:compute", "Sij:rescale", "li:compute", "Oi:rescale", "|"],
    "accumulate": ["Oi:compute", "|"],
    "store_o": ["Oi>O li>L"],
}


def said(event):
    if isinstance(event, Move):
        return " ".join("".join(c for c in f"{p.src}>{p.dst}" if not c.isdigit()) for p in event.parts)
    return f"{event.slot}:{event.role}" if isinstance(event, Change) else "|"


@given(
    Nq=st.integers(1, 9),
    Nk=st.integers(1, 9),
    Br=st.integers(1, 9),
    Bc=st.integers(1, 9),
    causal=st.booleans(),
    seed=st.integers(0, 99),
)
@example(Nq=8, Nk=8, Br=4, Bc=4, causal=False, seed=0)
@example(Nq=5, Nk=2, Br=2, Bc=1, causal=True, seed=0)
@settings(max_examples=40)
def test_events_are_those_of_the_actions_in_order(Nq, Nk, Br, Bc, causal, seed):
    rng = np.random.default_rng(seed)
    q, (k, v) = rng.normal(size=(Nq, 2)), rng.normal(size=(2, Nk, 2))
    recording = fv.flash_attention_2(q, k, v, Br=Br, Bc=Bc, causal=causal, device="numpy").recording
    assert recording.findings == ()
    assert [type(e) for e in recording.events if isinstance(e, Launch)] == [Launch]
    acted = [a for s in recording.steps for a in s.actions]
    visible = [min(max(min((i + 1) * Br, Nq) + Nk - Nq, 0), Nk) if causal else Nk for i in range(-(-Nq // Br))]
    tiles = [-(-n // Bc) for n in visible]
    assert acted == [a for t in tiles for a in ("load_q", *LOOP * t, "store_o")]
    leaves = [p for s in recording.steps for p in (s.parts or (s,)) if p.action]
    for leaf in leaves:
        first = leaf.action == "load_k" and dict(leaf.tiles)["j"] == 0
        want = DOES[leaf.action][3:] if first else DOES[leaf.action]
        assert [said(e) for e in recording.events[leaf.first : leaf.end]] == want
    between = [e for s in recording.steps[1:] if not s.actions for e in recording.events[s.first : s.end]]
    assert [type(e) for e in between] == [Begin] * len(tiles)


def test_a_readers_own_loop_gives_an_equal_recording(two_by_two):
    arrays = np.random.default_rng(2).normal(size=(3, 8, 8))
    fa = fv.FlashAttention2(*arrays, Br=4, Bc=4)
    for i in range(fa.Tr):
        fa.begin(i)
        fa.load_q()
        for j in range(fa.Tc):
            for act in (fa.load_k, fa.load_v, fa.scores, fa.softmax, fa.accumulate):
                act(j)
        fa.store_o()
    mine = fa.run()
    assert mine.recording == two_by_two.recording
    assert np.array_equal(mine.O, two_by_two.O)


def test_two_runs_give_equal_recordings_and_other_loops_do_not(two_by_two):
    arrays = np.random.default_rng(2).normal(size=(3, 8, 8))
    again = fv.flash_attention_2(*arrays, Br=4, Bc=4, device="numpy")
    assert again.recording == two_by_two.recording
    fa = fv.FlashAttention2(*arrays, Br=4, Bc=4)
    forward(fa)
    assert fa.run().recording == again.recording
    assert fv.flash_attention_2(*arrays, Br=4, Bc=8, device="numpy").recording != again.recording
    assert fv.flash_attention_2(*arrays[::-1], Br=4, Bc=4, device="numpy").recording != again.recording


def test_the_recording_carries_both_sources_with_every_action():
    recording = fv.flash_attention_2(*np.ones((3, 4, 2)), device="numpy").recording
    assert recording.source == "program"
    by_language = {c.language: c for c in recording.code}
    python = by_language["python"]
    for name in fv.FlashAttention2.action_names():
        first, last = python.span(name)
        assert f"def {name}(" in "\n".join(python.text.split("\n")[first - 1 : last])
    assert by_language["cuda"].text


SKIPPABLE = ("load_q", *LOOP)


@given(st.sets(st.sampled_from(SKIPPABLE)), st.integers(1, 7), st.integers(1, 7), st.booleans())
@example({"load_q"}, 3, 2, True)
@example({"scores"}, 3, 4, False)
@settings(max_examples=60)
def test_an_action_left_out_is_seen_and_never_crashes(left_out, Br, Bc, masked):
    rng = np.random.default_rng(0)
    mask = rng.random((5, 5)) < 0.5 if masked else None
    fa = fv.FlashAttention2(*rng.normal(size=(3, 5, 3)), Br=Br, Bc=Bc, mask=mask)
    for i in range(fa.Tr):
        fa.begin(i)
        if "load_q" not in left_out:
            fa.load_q()
        for j in range(fa.Tc):
            for name in LOOP:
                if name not in left_out:
                    getattr(fa, name)(j)
        fa.store_o()
    recording = fa.run().recording
    if "load_q" in left_out:
        assert {"Oi", "mi", "li"} <= {f.slot for f in recording.findings}
    for load, use, slot in (("load_k", "scores", "Kj"), ("load_v", "accumulate", "Vj"), ("scores", "softmax", "Sij")):
        if load in left_out and use not in left_out:
            assert slot in {f.slot for f in recording.findings}


def test_heads_and_batches_are_named_in_the_steps():
    labels = [s.label for s in fv.flash_attention_2(*np.ones((3, 2, 2, 4, 1)), device="numpy").recording.steps]
    assert "batch 1 · head 0 · block 0 · j = 0 · fill Sij" in labels
    assert len(set(labels)) == len(labels)
    labels = [s.label for s in fv.flash_attention_2(*np.ones((3, 1, 2, 4, 1)), device="numpy").recording.steps]
    assert "head 1 · block 0 · load Qi" in labels


# -- what is recorded ------------------------------------------------------------------------------------------------


def test_record_false_and_record_some():
    arrays = np.random.default_rng(5).normal(size=(3, 12, 2))
    whole = fv.flash_attention_2(*arrays, device="numpy")
    none = fv.flash_attention_2(*arrays, device="numpy", record=False)
    assert none.recording is None
    some = fv.flash_attention_2(*arrays, device="numpy", record=[1])
    for other in (none, some):
        assert np.array_equal(other.O, whole.O)
        assert np.array_equal(other.L, whole.L)
    assert [s.label for s in some.recording.steps[1:]] == [
        s.label for s in whole.recording.steps if "block 1" in s.label
    ]
    assert some.recording.steps[1].caption == "visualize a single block"
    assert some.recording.blocks() == ((0, 0, 1),)
    assert np.array_equal(some.recording.values(-1, "O1"), whole.O[4:8])
    assert np.isnan(some.recording.values(-1, "O0")).all()
    triple = fv.flash_attention_2(*np.ones((3, 2, 8, 1)), device="numpy", record=[(0, 1, 1)])
    assert triple.recording.blocks() == ((0, 1, 1),)


def test_keep_values_bounds_the_numbers_that_travel():
    arrays = np.ones((3, 8, 8))
    small = fv.flash_attention_2(*arrays, device="numpy", keep_values=16).recording
    assert small.values(-1, "Sij").shape == (4, 4)
    with pytest.raises(ValueError, match=r"Qi at step 18 .*only small tiles keep their numbers"):
        small.values(18, "Qi")


# -- errors ----------------------------------------------------------------------------------------------------------

X = np.ones((4, 3))
WRONG = {
    "one axis": ((X[0], X, X), {}, ValueError, r"Q has shape \(3,\).*\[N, d\]"),
    "axes": ((X, X[None], X[None]), {}, ValueError, r"same number of axes; got \(4, 3\), \(1, 4, 3\)"),
    "K and V": ((X, X, X[:3]), {}, ValueError, r"K \(4, 3\) and V \(3, 3\)"),
    "head dimension": ((X[:, :2], X, X), {}, ValueError, r"Q \(4, 2\) and K \(4, 3\).*head dimension"),
    "no rows": ((X[:0], X, X), {}, ValueError, r"Q \(0, 3\).*at least one element"),
    "batch": ((np.ones((2, 1, 4, 3)), *[np.ones((3, 1, 4, 3))] * 2), {}, ValueError, "batch 2 and K has batch 3"),
    "heads": ((np.ones((3, 4, 3)), *[np.ones((2, 4, 3))] * 2), {}, ValueError, "3 query heads over 2 K, V heads"),
    "complex": ((X * 1j, X, X), {}, TypeError, "Q has dtype complex128"),
    "text": ((X, X, X.astype(str)), {}, TypeError, "V has dtype <U"),
    "bool": ((X, X > 0, X), {}, TypeError, "K has dtype bool"),
    "Br 0": ((X, X, X), {"Br": 0}, ValueError, "Br=0: .*at least 1"),
    "Bc half": ((X, X, X), {"Bc": 1.5}, ValueError, "Bc=1.5: .*integer"),
    "Br True": ((X, X, X), {"Br": True}, ValueError, "Br=True"),
    "scale nan": ((X, X, X), {"scale": math.nan}, ValueError, "scale=nan: it must be a finite number"),
    "scale text": ((X, X, X), {"scale": "big"}, ValueError, "scale='big': it must be a finite number"),
    "mask dtype": ((X, X, X), {"mask": np.ones((4, 4))}, TypeError, "mask has dtype float64; it must be boolean"),
    "mask shape": ((X, X, X), {"mask": np.ones((3, 4), bool)}, ValueError, r"mask \(3, 4\).*\(1, 1, 4, 4\)"),
    "device": ((X, X, X), {"device": "tpu"}, ValueError, "device='tpu' is none of"),
    "record": ((X, X, X), {"record": 1}, TypeError, "blocks to keep: 1; give True, False, or a list"),
    "record text": ((X, X, X), {"record": ["a"]}, TypeError, r"blocks to keep: \['a'\]"),
    "record nothing": ((X, X, X), {"record": [7]}, ValueError, r"blocks to keep: \{7\}: none of them began"),
}


@pytest.mark.parametrize(("arrays", "options", "kind", "message"), WRONG.values(), ids=WRONG)
def test_errors_name_the_value_and_what_it_must_be(arrays, options, kind, message):
    with pytest.raises(kind, match=message):
        fv.flash_attention_2(*arrays, **{"device": "numpy", **options})


def test_errors_of_a_readers_loop():
    fa = fv.FlashAttention2(X, X, X, Br=2, Bc=2)
    with pytest.raises(RuntimeError, match=r"load_q before a block has begun: call begin\(i\) first"):
        fa.load_q()
    with pytest.raises(IndexError, match="block i=2, head=0, batch=0: i runs to 1"):
        fa.begin(2)
    fa.begin(0)
    fa.load_q()
    with pytest.raises(IndexError, match="K has tiles 0 to 1, not 2"):
        fa.load_k(2)


def test_devices():
    assert run(X, X, X).device == "numpy"
    assert fv.flash_attention_2(X, X, X, mask=np.ones((4, 4), bool)).device == "numpy"
    with pytest.raises(fv.DeviceError, match=r'device="cpu": a mask is given.*use device="numpy"'):
        fv.flash_attention_2(X, X, X, device="cpu", mask=np.ones((4, 4), bool))
    with pytest.raises(fv.DeviceError, match=r'device="gpu": a mask is given'):
        fv.flash_attention_2(X, X, X, device="gpu", mask=np.ones((4, 4), bool))


def test_auto_takes_a_gpu_where_one_is_usable_and_gpu_by_name_says_why_not():
    from flashviz.cuda import gpu

    if gpu.status().usable:
        pytest.skip("this machine has a usable GPU: tests/cuda covers it")
    assert fv.flash_attention_2(X, X, X).device == "numpy"
    with pytest.raises(fv.DeviceError, match=r'device="gpu": .+device="numpy" runs the tile program anywhere'):
        fv.flash_attention_2(X, X, X, device="gpu")
