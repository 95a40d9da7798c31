"""FlashAttention-1's tile program: its numbers against the oracle, its two loops, and what travels at every tile."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from programs.oracle import attention, bound
from programs.test_flash_attention_2 import WRONG, problems

import flashviz as fv
from flashviz.events import Begin, Change, Launch, Move
from flashviz.programs.flash_attention_1 import forward
from flashviz.slots import Block
from flashviz.view.layouts import layout_of

BOTH = pytest.mark.parametrize("algorithm", [fv.flash_attention_1, fv.standard_attention])
"""The cases of attention hold for the algorithm that this chapter measures by, too."""


def run(Q, K, V, *, algorithm=fv.flash_attention_1, **options):
    return algorithm(Q, K, V, device="numpy", **{"record": False, **options})


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


@BOTH
@given(problem=problems())
def test_random_problems_against_the_oracle(algorithm, problem):
    arrays, options = problem
    assert_right(*arrays, **options, algorithm=algorithm)


@BOTH
@given(seed=st.integers(0, 2**32 - 1), Br=st.integers(1, 9), Bc=st.integers(1, 9), steep=st.booleans())
def test_scores_of_thirty_thousand(algorithm, seed, Br, Bc, steep):
    rng = np.random.default_rng(seed)
    q = np.ones((5, 1)) * (173.0 if not steep else 1.0)
    k = rng.choice([-30000.0, 0.0, 29999.0, 30000.0], size=(9, 1)) / q[0, 0]
    assert_right(q, k, rng.normal(size=(9, 1)), scale=1.0, Br=Br, Bc=Bc, algorithm=algorithm)


# -- cases.md --------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("score", [-10.0, 0.0])
def test_a01_tail_keys_are_not_padded_with_zeros(algorithm, score):
    got = run(np.ones((1, 1)), np.full((5, 1), score), np.ones((5, 1)), scale=1.0, Bc=4, algorithm=algorithm)
    assert pytest.approx(1.0, abs=1e-6) == got.O[0, 0]


@BOTH
@pytest.mark.parametrize("N", [1, 2, 31, 32, 33, 63, 65])
def test_a02_sizes_around_a_block(algorithm, N):
    rng = np.random.default_rng(N)
    guarded = [np.full((2, 3, N + 2, 64), np.nan, dtype="float32") for _ in range(3)]
    for g in guarded:
        g[:, :, 1:-1] = rng.normal(size=(2, 3, N, 64))
    before = [g.copy() for g in guarded]
    q, k, v = (g[:, :, 1:-1] for g in guarded)
    got = assert_right(q, k, v, Br=32, Bc=32, algorithm=algorithm)
    for g, b in zip(guarded, before, strict=True):
        assert np.array_equal(g, b, equal_nan=True)
    if N == 1:
        assert np.array_equal(got.O, v)


@BOTH
@pytest.mark.parametrize(
    ("nq", "nk", "want"), [(2, 5, [2.5, 3]), (5, 2, [0, 0, 0, 1, 1.5]), (1, 8, [4.5])], ids=["2x5", "5x2", "1x8"]
)
@pytest.mark.parametrize("Bc", [1, 2, 3, 8])
def test_a04_causal_is_bottom_right(algorithm, nq, nk, want, Bc):
    arrays = np.zeros((nq, 1)), np.zeros((nk, 1)), np.arange(1.0, nk + 1)[:, None]
    got = run(*arrays, causal=True, Br=2, Bc=Bc, algorithm=algorithm)
    assert got.O[:, 0] == pytest.approx(want, abs=1e-6)
    blind = max(nq - nk, 0)
    assert np.isneginf(got.L).tolist() == [True] * blind + [False] * (nq - blind)


@BOTH
def test_a05_rows_and_first_blocks_that_see_no_key(algorithm):
    mask = np.array([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=bool)
    arrays = np.zeros((3, 1)), np.zeros((4, 1)), np.arange(1.0, 5)[:, None]
    got = run(*arrays, mask=mask, Bc=2, algorithm=algorithm)
    assert got.O[:, 0] == pytest.approx([3.5, 2.5, 0])
    assert pytest.approx([math.log(2), math.log(4), -math.inf]) == got.L


@BOTH
def test_a07_f16_does_not_overflow_before_the_scale(algorithm):
    q, k, v = np.full((1, 128), 24), np.stack([np.full(128, 24), np.full(128, -24)]), np.eye(2, 128)
    got = run(*(x.astype("float16") for x in (q, k, v)), algorithm=algorithm)
    assert got.O[0, 0] == 1.0
    assert np.isfinite(got.L).all()


@BOTH
@pytest.mark.parametrize(
    ("scale", "want"),
    [(None, [[1, 2], [2.0495, 3.0495], [3.2066, 4.2066]]), (0, [[1, 2], [2, 3], [3, 4]])],
    ids=["default", "zero"],
)
def test_a09_scale(algorithm, scale, want):
    q, k, v = ((np.arange(6.0).reshape(3, 2) + n) * f for n, f in ((1, 0.1), (7, 0.1), (1, 1)))
    got = run(q, k, v, scale=scale, causal=True, Br=2, Bc=2, algorithm=algorithm)
    assert pytest.approx(np.array(want), abs=6e-5) == got.O


@BOTH
def test_a10_l_is_a_natural_logarithm(algorithm):
    got = run(np.zeros((1, 2)), np.zeros((8, 2)), np.ones((8, 2)), Bc=3, algorithm=algorithm)
    assert pytest.approx([math.log(8)]) == got.L


@BOTH
def test_a14_views_give_the_bits_of_copies(algorithm):
    packed = np.random.default_rng(14).normal(size=(2, 7, 3, 4, 6)).astype("float32")  # B, N, 3, H, D
    q, k, v = (packed[:, :, n].transpose(0, 2, 1, 3) for n in range(3))
    for value in (v, v[..., ::-1], packed[:, ::-1, 2].transpose(0, 2, 1, 3)):
        assert not value.flags.c_contiguous
        views = run(q, k, value, algorithm=algorithm)
        copies = run(q.copy(), k.copy(), value.copy(), algorithm=algorithm)
        assert np.array_equal(views.O, copies.O)
        assert np.array_equal(views.L, copies.L)


# -- the frames ------------------------------------------------------------------------------------------------------

INNER = ("load Qi, Oi, mi, li", "fill Sij", "update mi, li and Oi", "write Oi, mi, li")
FRAMES = [
    ("start", "Setup ready"),
    ("visualize block 0", "visualize a single block"),
    ("block 0 · set O = 0, m = -inf, l = 0 in HBM", "set O = 0, m = -inf, l = 0 in HBM"),
]
for j in range(2):
    FRAMES.append((f"block 0 · j = {j} · load Kj, Vj", f"[KV loop: {j}] load Kj, Vj"))
    for i in range(2):
        FRAMES += [(f"block 0 · j = {j} · i = {i} · {t}", f"[KV loop: {j}, Q loop: {i}] {t}") for t in INNER]


@pytest.fixture(scope="module")
def two_by_two():
    rng = np.random.default_rng(2)
    return fv.flash_attention_1(*rng.normal(size=(3, 8, 8)), Br=4, Bc=4, device="numpy")


def test_the_twenty_one_frames(two_by_two):
    assert [(s.label, s.caption) for s in two_by_two.recording.steps] == FRAMES
    assert len({label for label, _ in FRAMES}) == len(FRAMES) == 21


def test_the_picture_is_its_siblings_with_m_and_l_in_hbm(two_by_two):
    arrays = np.random.default_rng(2).normal(size=(3, 8, 8))
    other = fv.flash_attention_2(*arrays, Br=4, Bc=4, device="numpy").recording
    mine, theirs = layout_of(two_by_two.recording, Block()), layout_of(other, Block())
    on_chip = ("Qi", "Kj", "Sij", "Vj", "mi", "li", "Oi")
    assert [mine.boxes[n] for n in on_chip] == [theirs.boxes[n] for n in on_chip]
    columns = [mine.boxes[f"{n}0"] for n in "QKVOml"]
    assert all(a.x + a.w / 2 < b.x - b.w / 2 for a, b in pairwise(columns))
    assert {b.w for b in columns} == {1.6, 0.25}
    ring = {s.id for s in fv.scene(two_by_two, 2).shapes if s.id.endswith(".ring")}
    assert ring == {f"{n}{i}.ring" for n in "Oml" for i in range(2)}  # drawn empty: the ring says what was set


def test_k_and_v_travel_once_and_the_carries_at_every_tile(two_by_two):
    counted = fv.traffic(two_by_two)
    assert (counted.fetches, counted.stores, counted.transfers) == (6, 4, 10)
    assert counted.trips == {"Q": 2, "K": 1, "V": 1, "O": 2, "m": 2, "l": 2}


def test_composite_steps_open_into_their_actions(two_by_two):
    steps = {s.label: s for s in two_by_two.recording.steps}
    load = steps["block 0 · j = 1 · i = 0 · load Qi, Oi, mi, li"]
    assert [(p.label, p.action) for p in load.parts] == [("load Qi", "load_q"), ("load Oi, mi, li", "load_o")]
    assert dict(load.tiles) == {"j": 1, "i": 0}
    assert steps["block 0 · j = 0 · i = 1 · update mi, li and Oi"].actions == ("softmax", "accumulate")
    assert steps["block 0 · j = 1 · load Kj, Vj"].actions == ("load_k", "load_v")
    assert dict(steps["block 0 · j = 1 · load Kj, Vj"].tiles) == {"j": 1}


def test_only_scores_get_stale_when_a_tile_they_came_from_is_replaced(two_by_two):
    recording = two_by_two.recording
    for n, step in enumerate(recording.steps[3:], 3):
        found = {name: recording.content(n, name) for name in ("Sij", "mi", "li", "Oi")}
        stale = {name for name, c in found.items() if c is not None and c.stale}
        first = n < 5  # there are no scores yet
        assert stale == ({"Sij"} if "load" in step.label and not first else set()), step.label


def test_levels_go_to_hbm_and_come_back(two_by_two):
    recording = two_by_two.recording
    levels = {n: [] for n in ("Oi", "mi", "li", "O0", "O1", "m1")}
    for n, step in enumerate(recording.steps):
        if step.actions[:1] in (("load_q",), ("store_o",)):
            for slot, found in levels.items():
                found.append(recording.content(n, slot).level)
    on_chip = [0, 1, 0, 1, 1, 2, 1, 2]  # loaded, written: i = 0, 1 for j = 0, then for j = 1
    assert levels == {
        **dict.fromkeys(("Oi", "mi", "li"), on_chip),
        "O0": [0, 1, 1, 1, 1, 2, 2, 2],
        "O1": [0, 0, 0, 1, 1, 1, 1, 2],
        "m1": [0, 0, 0, 1, 1, 1, 1, 2],
    }


def test_what_is_in_the_slots_says_which_rows_it_is(two_by_two):
    recording = two_by_two.recording
    at = {s.label: n for n, s in enumerate(recording.steps)}
    step = at["block 0 · j = 1 · i = 0 · fill Sij"]
    assert [recording.content(step, n).label for n in ("Qi", "Kj", "Vj", "Oi", "mi", "li")] == [
        *("Q0", "K1", "V1", "O0", "m0", "l0")
    ]


def test_oi_is_normalised_at_every_tile():
    rng = np.random.default_rng(4)
    q, k, v = rng.normal(size=(3, 8, 4)).astype("float32")
    recording = fv.flash_attention_1(q, k, v, Br=4, Bc=4, device="numpy").recording
    for n, step in enumerate(recording.steps):
        if "accumulate" in step.actions:
            j, i = dict(step.tiles)["j"], dict(step.tiles)["i"]
            O, L = attention(q[4 * i : 4 * i + 4], k[: 4 * j + 4], v[: 4 * j + 4])
            assert recording.values(n, "Oi") == pytest.approx(O, abs=1e-6)
            assert recording.values(n, "mi") + np.log(recording.values(n, "li")) == pytest.approx(L, abs=1e-6)


def test_the_start_is_in_hbm_and_is_no_transfer(two_by_two):
    recording = two_by_two.recording
    assert np.isnan(recording.values(1, "O0")).all()
    assert [np.unique(recording.values(2, n)).tolist() for n in ("O1", "m1", "l1")] == [[0.0], [-math.inf], [0.0]]
    step = recording.steps[2]
    events = recording.events[step.first : step.end]
    assert [(e.slot, e.role, e.level) for e in events] == [(f"{n}{i}", "init", 0) for i in range(2) for n in "Oml"]
    assert sum(math.prod(e.shape) for e in events) == 8 * (8 + 2)  # Nq · (d + 2)
    assert fv.traffic(two_by_two, 2).bytes_written == 0


def test_values_in_hbm_are_the_results(two_by_two):
    recording = two_by_two.recording
    for i in range(2):
        rows = slice(4 * i, 4 * i + 4)
        assert np.array_equal(recording.values(-1, f"O{i}"), two_by_two.O[rows])
        L = recording.values(-1, f"m{i}") + np.log(recording.values(-1, f"l{i}"))
        assert np.array_equal(L, two_by_two.L[rows])


# -- events ----------------------------------------------------------------------------------------------------------

OUTER, LOOP = ("load_k", "load_v"), ("load_q", "load_o", "scores", "softmax", "accumulate", "store_o")
DOES = {  # what each action moves and changes, in order
    "init_o": ["O:init", "m:init", "l:init"],
    "load_k": ["Sij:stale", "K>Kj"],
    "load_v": ["V>Vj"],
    "load_q": ["Sij:stale", "Q>Qi"],
    "load_o": ["O>Oi m>mi l>li", "|"],
    "scores": ["Sij:compute", "|"],
    "softmax": ["mi:compute", "Sij:rescale", "Oi:rescale", "li:compute", "|"],
    "accumulate": ["Oi:compute", "|"],
    "store_o": ["Oi>O mi>m li>l"],
}


def said(event):
    if isinstance(event, Move):
        return " ".join("".join(c for c in f"{p.src}>{p.dst}" if not c.isdigit()) for p in event.parts)
    name = "".join(c for c in getattr(event, "slot", "") if not c.isdigit())
    return f"{name}:{event.role}" if isinstance(event, Change) else "|"


@given(
    *(st.integers(1, 12), st.integers(1, 12), st.integers(1, 3)),
    *(st.integers(1, 6), st.integers(1, 6), st.booleans()),
)
@settings(max_examples=60)
def test_events_against_the_listing(Nq, Nk, d, Br, Bc, causal):
    """The events of any size are those of the two loops, one action after another."""
    rng = np.random.default_rng(Nq * 100 + Nk)
    q, k, v = rng.normal(size=(Nq, d)), rng.normal(size=(Nk, d)), rng.normal(size=(Nk, d))
    recording = fv.flash_attention_1(q, k, v, Br=Br, Bc=Bc, causal=causal, device="numpy").recording
    Tr, Tc = -(-Nq // Br), -(-Nk // Bc)
    actions, expected, scored = ["init_o"], DOES["init_o"] * Tr, False
    for j in range(Tc):
        seen = [i for i in range(Tr) if not causal or min((i + 1) * Br, Nq) + Nk - Nq > j * Bc]
        order = [*OUTER, *LOOP * len(seen)]
        actions += order
        for name in order:
            expected += [e for e in DOES[name] if scored or "stale" not in e]
            scored = scored or name == "scores"
    assert [a for s in recording.steps for a in s.actions] == actions
    assert [said(e) for e in recording.events if e.launch >= 0 and not isinstance(e, (Launch, Begin))] == expected
    assert recording.findings == ()


@st.composite
def runs(draw):
    """A recorded FlashAttention-1 and its sizes."""
    B, Hkv, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    Nq, Nk, d = draw(st.integers(1, 12)), draw(st.integers(1, 12)), draw(st.integers(1, 4))
    Br, Bc, causal = draw(st.integers(1, 13)), draw(st.integers(1, 13)), draw(st.booleans())
    q, k = np.ones((B, Hkv * group, Nq, d)), np.ones((B, Hkv, Nk, d))
    run = fv.flash_attention_1(q, k, k, Br=Br, Bc=Bc, causal=causal, device="numpy", keep_values=0)
    return run, B * Hkv * group, Nq, Nk, d, -(-Nk // Bc), causal


@settings(max_examples=60)
@given(runs())
def test_bytes_are_those_of_the_formula(case):
    run, heads, Nq, Nk, d, Tc, causal = case
    assert fv.check_traffic(run) == []
    t = fv.traffic(run)
    if not causal:  # algorithms.md, in elements
        assert t.bytes_read == 4 * heads * (2 * Nk * d + Tc * Nq * d + Tc * Nq * d + Tc * 2 * Nq)
        assert t.bytes_written == 4 * heads * (Tc * Nq * d + Tc * 2 * Nq)
    else:
        assert t.bytes_written <= 4 * heads * Tc * Nq * (d + 2)


def test_the_check_of_bytes_can_fail():
    x = np.ones((8, 2))
    fa = fv.FlashAttention1(x, x, x, Br=4, Bc=4)
    forward(fa)
    fa.load_o(1, 1)  # once too often
    counted, model = fv.traffic(fa.run()), fv.traffic_model("flash_attention_1", **fa.a.params)
    assert model.differences(counted) == [
        *("O: 160 bytes read, the formula says 128",),
        *(f"{n}: 80 bytes read, the formula says 64" for n in "ml"),
    ]


# -- readers' loops --------------------------------------------------------------------------------------------------


def test_the_same_call_gives_the_same_recording_and_a_readers_loop_too(two_by_two):
    arrays = np.random.default_rng(2).normal(size=(3, 8, 8))
    assert fv.flash_attention_1(*arrays, Br=4, Bc=4, device="numpy").recording == two_by_two.recording
    fa = fv.FlashAttention1(*arrays, Br=4, Bc=4)
    fa.begin()
    fa.init_o()
    for j in range(fa.Tc):
        fa.load_k(j)
        fa.load_v(j)
        for i in fa.row_blocks(j):
            for name in LOOP:
                getattr(fa, name)(j, i)
    mine = fa.run()
    assert mine.recording == two_by_two.recording
    assert np.array_equal(mine.O, two_by_two.O)


@given(st.sets(st.sampled_from(("init_o", *OUTER, *LOOP))), st.integers(1, 7), st.integers(1, 7), st.booleans())
@example({"init_o"}, 3, 2, True)
@example({"load_o"}, 3, 4, False)
@example({"load_o", "softmax"}, 2, 1, False)
@settings(max_examples=60)
def test_an_action_left_out_is_seen_and_never_crashes(left_out, Br, Bc, masked):
    rng = np.random.default_rng(0)
    mask = rng.random((5, 5)) < 0.5 if masked else None
    fa = fv.FlashAttention1(*rng.normal(size=(3, 5, 3)), Br=Br, Bc=Bc, mask=mask)

    def perform(names, *tiles):
        for name in names:
            if name not in left_out:
                getattr(fa, name)(*tiles)

    fa.begin()
    perform(["init_o"])
    for j in range(fa.Tc):
        perform(OUTER, j)
        for i in range(fa.Tr):
            perform(LOOP, j, i)
    findings = {f.slot for f in fa.run().recording.findings}
    if "init_o" in left_out and "load_o" not in left_out:
        assert {"O0", "m0", "l0"} <= findings
    for load, use, slot in (
        *(("load_k", "scores", "Kj"), ("load_v", "accumulate", "Vj")),
        *(("scores", "softmax", "Sij"), ("load_o", "softmax", "Oi")),
    ):
        if load in left_out and use not in left_out:
            assert slot in findings


def test_a_start_left_out_is_not_a_number():
    x = np.ones((4, 2))
    fa = fv.FlashAttention1(x, x, x)
    fa.begin()
    fa.load_k(0)
    fa.load_v(0)
    for name in LOOP:
        getattr(fa, name)(0, 0)
    assert np.isnan(fa.run().O).all()


# -- what is recorded, errors ----------------------------------------------------------------------------------------


def test_heads_are_blocks_and_are_named_in_the_steps():
    run = fv.flash_attention_1(*np.ones((3, 2, 2, 4, 1)), device="numpy")
    labels = [s.label for s in run.recording.steps]
    assert "batch 1 · head 0 · block 0 · j = 0 · i = 0 · fill Sij" in labels
    assert len(set(labels)) == len(labels)
    assert run.recording.blocks() == tuple((b, h, 0) for b in range(2) for h in range(2))
    assert run.recording.launches[0].grid == (2, 2, 1)


def test_record_false_and_record_some():
    arrays = np.random.default_rng(5).normal(size=(3, 2, 12, 2))
    whole = fv.flash_attention_1(*arrays, device="numpy")
    none = fv.flash_attention_1(*arrays, device="numpy", record=False)
    assert none.recording is None
    some = fv.flash_attention_1(*arrays, device="numpy", record=[(0, 1, 0)])
    for other in (none, some):
        assert np.array_equal(other.O, whole.O)
        assert np.array_equal(other.L, whole.L)
    assert some.recording.blocks() == ((0, 1, 0),)


def test_the_recording_carries_both_sources_with_every_action():
    recording = fv.flash_attention_1(*np.ones((3, 4, 2)), device="numpy").recording
    assert recording.source == "program"
    python, cuda = recording.code
    names = fv.FlashAttention1.action_names()
    assert [name for name, _, _ in cuda.lines] == list(names)  # the same words in the same order
    for name in names:
        first, last = python.span(name)
        assert f"def {name}(" in "\n".join(python.text.split("\n")[first - 1 : last])


@BOTH
@pytest.mark.parametrize(("arrays", "options", "kind", "message"), WRONG.values(), ids=WRONG)
def test_errors_name_the_value_and_what_it_must_be(algorithm, arrays, options, kind, message):
    with pytest.raises(kind, match=message):
        algorithm(*arrays, **{"device": "numpy", **options})


def test_errors_of_a_readers_loop():
    x = np.ones((4, 3))
    fa = fv.FlashAttention1(x, x, x, Br=2, Bc=2)
    with pytest.raises(RuntimeError, match="load_k before a block has begun"):
        fa.load_k(0)
    with pytest.raises(IndexError, match=r"block head=1, batch=0: heads are \(\(0, 0\),\)"):
        fa.begin(1)
    fa.begin()
    with pytest.raises(IndexError, match="Q has tiles 0 to 1, not 2"):
        fa.load_q(0, 2)


@BOTH
def test_devices(algorithm):
    x = np.ones((4, 3))
    assert algorithm(x, x, x, mask=np.ones((4, 4), bool)).device == "numpy"
    with pytest.raises(fv.DeviceError, match=r'device="gpu": a mask is given'):
        algorithm(x, x, x, device="gpu", mask=np.ones((4, 4), bool))
