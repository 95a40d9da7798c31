"""Flash decoding's tile program: its numbers against the oracle, its splits, its two launches and what they move."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from programs.oracle import attention, bound

import flashviz as fv
from flashviz.events import Begin, Change, Move
from flashviz.programs.flash_decoding import FlashDecoding, forward
from flashviz.view.layouts import layout_of


def run(q, K, V, **options):
    return fv.flash_decoding(q, K, V, device="numpy", **{"record": False, **options})


def assert_right(q, K, V, *, scale=None, causal=False, mask=None, **options):
    got = run(q, K, V, scale=scale, causal=causal, mask=mask, **options)
    exact = [np.asarray(x, dtype="float32") for x in (q, K, V)]
    used = None if scale is None else float(np.float32(scale))
    O, L = attention(*exact, scale=used, causal=causal, mask=mask)
    most_o, most_l = bound(*exact, scale=scale)
    assert got.O.shape == np.shape(q)
    assert got.L.shape == np.shape(q)[:-1]
    assert got.O.dtype == got.L.dtype == np.float32
    assert not np.isnan(got.O).any()
    assert np.array_equal(np.isneginf(got.L), np.isneginf(L))
    assert np.abs(got.O - O).max() <= 2 * most_o
    seen = ~np.isneginf(L)
    assert not seen.any() or np.abs(got.L[seen] - L[seen]).max() <= 2 * most_l
    return got


@st.composite
def problems(draw):
    """q, K and V of any accepted shape, with grouped heads, and options: more splits than keys as well."""
    axes = draw(st.integers(2, 4))
    nq, nk, d = draw(st.integers(1, 6)), draw(st.integers(1, 24)), draw(st.integers(1, 8))
    heads, group, batch = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    q_lead = [(), (heads * group,), (batch, heads * group)][axes - 2]
    k_lead = [(), (heads,), (batch, heads)][axes - 2]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = draw(st.sampled_from([0.1, 1.0, 8.0]))

    def tensor(*shape):
        return (rng.normal(size=shape) * size).astype(draw(st.sampled_from(["float16", "float32", "float64"])))

    options = {
        "splits": draw(st.integers(1, 9)),
        "Bc": draw(st.integers(1, 9)),
        "causal": draw(st.booleans()),
        "scale": draw(st.sampled_from([None, 0, 0.5, -1.0])),
        "mask": rng.random((*q_lead, nq, nk)) < draw(st.sampled_from([0.1, 0.8])) if draw(st.booleans()) else None,
    }
    return (tensor(*q_lead, nq, d), tensor(*k_lead, nk, d), tensor(*k_lead, nk, d)), options


@given(problems())
def test_random_problems_against_the_oracle(problem):
    arrays, options = problem
    assert_right(*arrays, **options)


@given(problems())
@settings(max_examples=60)
def test_any_number_of_splits_is_one_split(problem):
    arrays, options = problem
    one = run(*arrays, **{**options, "splits": 1})
    many = run(*arrays, **options)
    most_o, most_l = bound(*(np.asarray(x, "float32") for x in arrays), scale=options["scale"])
    assert np.abs(many.O - one.O).max() <= 2 * most_o
    none = np.isneginf(one.L)
    assert np.array_equal(np.isneginf(many.L), none)
    assert np.abs(many.L[~none] - one.L[~none]).max(initial=0) <= 2 * most_l


def test_scores_of_thirty_thousand_in_one_split_only():
    k = np.zeros((12, 1))
    k[7] = 30000.0
    got = assert_right(np.ones((1, 1)), k, np.arange(12.0)[:, None], scale=1.0, splits=4, Bc=3)
    assert got.O.tolist() == [[7.0]]
    assert got.L.tolist() == [30000.0]


# -- cases.md --------------------------------------------------------------------------------------------------------


def test_a01_tail_keys_are_not_padded_with_zeros():
    got = run(np.ones((1, 1)), np.full((5, 1), -10.0), np.ones((5, 1)), scale=1.0, Bc=4, splits=2)
    assert got.O.tolist() == [[1.0]]


@pytest.mark.parametrize(("nq", "nk", "want"), [(2, 5, [2.5, 3]), (5, 2, [0, 0, 0, 1, 1.5]), (1, 8, [4.5])])
@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("Bc", [1, 2, 8])
def test_a04_causal_is_bottom_right(nq, nk, want, splits, Bc):
    v = np.arange(1.0, nk + 1)[:, None]
    got = run(np.zeros((nq, 1)), np.zeros((nk, 1)), v, causal=True, splits=splits, Bc=Bc)
    assert got.O[:, 0] == pytest.approx(want, abs=1e-6)
    blind = max(nq - nk, 0)
    assert np.isneginf(got.L).tolist() == [True] * blind + [False] * (nq - blind)


def test_a05_rows_and_splits_that_see_no_key():
    mask = np.array([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=bool)
    got = run(np.zeros((3, 1)), np.zeros((4, 1)), np.arange(1.0, 5)[:, None], mask=mask, Bc=2, splits=2)
    assert got.O[:, 0] == pytest.approx([3.5, 2.5, 0])
    assert pytest.approx([math.log(2), math.log(4), -math.inf]) == got.L


def test_a10_l_is_a_natural_logarithm():
    assert pytest.approx([math.log(8)]) == run(np.zeros((1, 2)), np.zeros((8, 2)), np.ones((8, 2)), Bc=3).L


def test_a10_splits_with_sums_2_and_8_merge_to_four_fifths():
    v = np.repeat([0.0, 1.0], 8)[:, None]
    seen = [[n < 2 or n >= 8 for n in range(16)]]  # two keys of the first split, all eight of the second
    got = fv.flash_decoding(np.zeros((1, 1)), np.zeros((16, 1)), v, splits=2, Bc=8, mask=seen, device="numpy")
    assert [got.recording.values(-1, f"Ls{s}")[0] for s in (0, 1)] == pytest.approx([math.log(2), math.log(8)])
    assert [got.recording.values(-1, f"Os{s}")[0, 0] for s in (0, 1)] == [0, 1]
    assert got.O[0, 0] == pytest.approx(0.8)
    assert got.L[0] == pytest.approx(math.log(10))


def test_a11_an_empty_split_has_weight_0_and_l_minus_inf():
    rng = np.random.default_rng(11)
    q, (k, v) = rng.normal(size=(1, 4)), rng.normal(size=(2, 5, 4))
    got = fv.flash_decoding(q, k, v, splits=4, Bc=2, device="numpy")
    one = run(q, k, v, splits=1, Bc=2)
    assert np.abs(got.O - one.O).max() < 1e-6
    recording = got.recording
    assert np.isneginf(recording.values(-1, "Ls3")).all()
    assert not recording.values(-1, "Os3").any()
    assert recording.values(-1, "w")[0, 3] == 0
    assert recording.values(-1, "w")[0, :3].max() == 1
    assert recording.findings == ()


@pytest.mark.parametrize(
    ("lead_q", "lead_k", "Nq", "Nk", "splits"),
    [((1, 1), (1, 1), 1, 257, 2), ((2, 3), (2, 3), 5, 257, 2), ((2, 6), (2, 2), 5, 33, 3)],
)
def test_a12_inputs_are_left_alone_and_the_oracle_is_met(lead_q, lead_k, Nq, Nk, splits):
    rng = np.random.default_rng(12)
    guarded = [np.full((*lead, n + 2, 32), np.nan, "float32") for lead, n in ((lead_q, Nq), (lead_k, Nk), (lead_k, Nk))]
    for g in guarded:
        g[..., 1:-1, :] = rng.normal(size=g[..., 1:-1, :].shape)
    before = [g.copy() for g in guarded]
    assert_right(*(g[..., 1:-1, :] for g in guarded), splits=splits, Bc=32)
    for g, b in zip(guarded, before, strict=True):
        assert np.array_equal(g, b, equal_nan=True)


@pytest.mark.parametrize("splits", [1, 2, 8])
def test_one_key_gives_v_exactly(splits):
    rng = np.random.default_rng(1)
    q, (k, v) = rng.normal(size=(3, 2, 4)), rng.normal(size=(2, 3, 1, 4)).astype("float32")
    got = run(q, k, v, splits=splits)
    assert np.array_equal(got.O, np.broadcast_to(v, got.O.shape))


def test_a14_views_give_the_bits_of_copies():
    rng = np.random.default_rng(14)
    packed = rng.normal(size=(2, 7, 3, 4, 6)).astype("float32")  # B, N, 3, H, D
    q, k, v = (packed[:, :, n].transpose(0, 2, 1, 3) for n in range(3))
    views, copies = run(q, k, v, splits=3, Bc=2), run(q.copy(), k.copy(), v.copy(), splits=3, Bc=2)
    assert np.array_equal(views.O, copies.O)
    assert np.array_equal(views.L, copies.L)


# -- the splits ------------------------------------------------------------------------------------------------------


@given(Nk=st.integers(1, 60), Bc=st.integers(1, 9), splits=st.integers(1, 70))
def test_splits_take_every_tile_once_in_order_and_equally_many(Nk, Bc, splits):
    x = np.ones((Nk, 1))
    fd = FlashDecoding(x[:1], x, x, splits=splits, Bc=Bc, record=False)
    tiles = [list(fd.key_tiles(s)) for s in range(splits)]
    assert [j for part in tiles for j in part] == list(range(math.ceil(Nk / Bc)))
    sizes = [len(part) for part in tiles]
    most = math.ceil(fd.Tc / splits)
    assert max(sizes) == most
    assert sizes == sorted(sizes, reverse=True)
    assert sum(0 < n < most for n in sizes) <= 1


# -- what moves ------------------------------------------------------------------------------------------------------


@st.composite
def sizes(draw):
    """B, Hkv, group, Nq, Nk, d, and Bc, splits, causal."""
    small = st.integers(1, 3)
    B, Hkv, group, Nq = draw(small), draw(small), draw(small), draw(small)
    Nk, d, Bc, splits = draw(st.integers(1, 12)), draw(small), draw(st.integers(1, 5)), draw(st.integers(1, 7))
    return (B, Hkv, group, Nq, Nk, d), {"Bc": Bc, "splits": splits, "causal": draw(st.booleans())}


@given(sizes())
@example(((1, 1, 1, 1, 16, 4), {"Bc": 4, "splits": 4, "causal": False}))
@settings(max_examples=60)
def test_flash_decoding_costs_what_algorithms_md_says(case):
    (B, Hkv, group, Nq, Nk, d), options = case
    q, k = np.ones((B, Hkv * group, Nq, d)), np.ones((B, Hkv, Nk, d))
    made = fv.flash_decoding(q, k, k, **options, device="numpy", keep_values=0)
    S, queries = options["splits"], B * Hkv * group * Nq
    t = fv.traffic(made)
    read = queries * S * d + 2 * B * Hkv * Nk * d + queries * S * (d + 1)
    written = queries * S * (d + 1) + queries * (d + 1)
    assert (t.bytes_read, t.bytes_written) == (4 * read, 4 * written)
    assert fv.check_traffic(made) == []
    assert t.trips == {"Q": S, "K": 1, "V": 1, "Os": 1, "Ls": 1, "O": 1, "L": 1}
    assert made.recording.findings == ()
    tiles = math.ceil(Nk / options["Bc"])
    assert t.fetches == B * Hkv * (S + tiles + 1 + S)
    assert t.stores == B * Hkv * (S + 1)


@given(sizes())
@settings(max_examples=40)
def test_actions_of_the_kernels_in_their_order(case):
    (B, Hkv, group, Nq, Nk, d), options = case
    q, k = np.ones((B, Hkv * group, Nq, d)), np.ones((B, Hkv, Nk, d))
    recording = fv.flash_decoding(q, k, k, **options, device="numpy", keep_values=0).recording
    S, tiles = options["splits"], math.ceil(Nk / options["Bc"])
    each = math.ceil(tiles / S)
    want = []
    for s in range(S):
        n = max(0, min(each, tiles - s * each))
        loop = ("load_k", "load_v", "scores", "softmax", "accumulate")
        want.append(("load_q", *loop * n, "store_partial"))
    merge = ("load_l", "weights", *("load_o", "combine") * S, "store_o")
    acted: dict = {}
    for step in recording.steps:
        if step.block is not None:
            acted.setdefault((step.launch, step.block), []).extend(step.actions)
    assert [e.block for e in recording.events if isinstance(e, Begin)] == [key[1] for key in acted]
    for (launch, block), actions in acted.items():
        assert tuple(actions) == (merge if launch else want[block.tile])
    assert [(x.kernel, x.grid) for x in recording.launches] == [
        ("flash_decoding_split", (S, Hkv, B)),
        ("flash_decoding_combine", (1, Hkv, B)),
    ]


# -- the picture -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four():
    rng = np.random.default_rng(4)
    q, (k, v) = rng.normal(size=(1, 4)), rng.normal(size=(2, 16, 4))
    return fv.flash_decoding(q, k, v, splits=2, Bc=4, device="numpy")


def test_the_frames(four):
    frames = [("start", "Setup ready")]
    for s in range(2):
        frames.append((f"visualize split {s}", f"visualize {('a single', 'another')[s]} block"))
        frames.append((f"split {s} · load q", "load q"))
        for j in (2 * s, 2 * s + 1):
            for text in ("load Kj, Vj", "fill Sj", "update m, l and o"):
                frames.append((f"split {s} · j = {j} · {text}", f"[KV loop: {j}] {text}"))
        frames.append((f"split {s} · write Os, Ls", "write Os, Ls"))
    frames += [("visualize combine", "visualize another block")]
    frames += [(f"combine · {text}", text) for text in ("load every Ls", "fill w")]
    for s in range(2):
        for text in ("load Os", "add ws · Os to o"):
            frames.append((f"combine · s = {s} · {text}", f"[split loop: {s}] {text}"))
    frames.append(("combine · write O, L", "write O, L"))
    assert [(x.label, x.caption) for x in four.recording.steps] == frames
    by_label = {x.label: dict(x.tiles) for x in four.recording.steps}
    assert by_label["split 1 · j = 2 · fill Sj"] == {"s": 1, "j": 2}
    assert by_label["combine · s = 1 · load Os"] == {"s": 1}
    assert by_label["combine · fill w"] == {}


def test_each_launch_shows_its_own_slots_and_grid(four):
    recording = four.recording
    first, second = (layout_of(recording, recording.blocks(n)[0], n) for n in range(2))
    hbm = {s.name for s in recording.slots if s.shared_by_grid}
    assert hbm == {"Q0", "K0", "K1", "K2", "K3", "V0", "V1", "V2", "V3", "Os0", "Os1", "Ls0", "Ls1", "O0", "L0"}
    assert set(first.boxes) - hbm == {"q", "Kj", "Sj", "Vj", "m", "l", "o"}
    assert set(second.boxes) - hbm == {"ls0", "ls1", "w", "m", "l", "os", "o"}
    assert {key[0] for key in first.square} == {0}
    assert {key[0] for key in second.square} == {1}
    assert first.boxes["Sj"].cells == (1, 4)
    assert second.boxes["w"].cells == (1, 2)


def test_the_tiles_of_a_split_stand_together_beside_its_partial_answer(four):
    boxes = layout_of(four.recording, four.recording.blocks(0)[0], 0).boxes

    def between(a, b):
        return boxes[a].y - boxes[a].h / 2 - boxes[b].y - boxes[b].h / 2

    assert between("K1", "K2") == pytest.approx(3 * between("K0", "K1"))
    for s in range(2):
        tiles = boxes[f"V{2 * s}"], boxes[f"V{2 * s + 1}"]
        assert boxes[f"Os{s}"].y == pytest.approx((tiles[0].y + tiles[1].y) / 2)
        assert boxes[f"Os{s}"].h == pytest.approx(tiles[0].y - tiles[1].y + tiles[0].h)


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 40))
@settings(max_examples=30)
def test_every_box_is_on_the_canvas_and_on_chip_slots_do_not_overlap(Nk, Bc, splits):
    x = np.ones((Nk, 2))
    recording = fv.flash_decoding(x[:1], x, x, splits=splits, Bc=Bc, device="numpy", keep_values=0).recording
    for launch in (0, 1):
        boxes = layout_of(recording, recording.blocks(launch)[0], launch).boxes
        assert all(abs(b.x) + b.w / 2 <= 4.7 and b.y - b.h / 2 >= -6 and b.y + b.h / 2 <= 5.4 for b in boxes.values())
        chip = sorted((b for name, b in boxes.items() if not recording.slot(name).shared_by_grid), key=lambda b: b.x)
        assert all(a.x + a.w / 2 <= b.x - b.w / 2 + 1e-9 for a, b in pairwise(chip) if a.y == b.y)


def test_partial_answers_are_attention_over_their_own_keys(four):
    recording = four.recording
    k, v = (np.concatenate([recording.values(0, f"{name}{j}") for j in range(4)]) for name in "KV")
    q = recording.values(0, "Q0")
    for s in range(2):
        O, L = attention(q, k[8 * s : 8 * s + 8], v[8 * s : 8 * s + 8])
        assert np.abs(recording.values(-1, f"Os{s}") - O).max() < 1e-6
        assert np.abs(recording.values(-1, f"Ls{s}") - L).max() < 1e-6
    w = recording.values(-1, "w")[0]
    Ls = np.array([recording.values(-1, f"Ls{s}")[0] for s in range(2)])
    assert w == pytest.approx(np.exp(Ls - Ls.max()))
    assert np.array_equal(recording.values(-1, "O0"), four.O)
    assert np.array_equal(recording.values(-1, "L0"), four.L)


def test_every_split_is_written_before_the_combine_block_reads(four):
    at = {}
    for n, event in enumerate(four.recording.events):
        if isinstance(event, Move):
            for part in event.parts:
                at.setdefault((part.src, part.dst), n)
    for s in range(2):
        assert at["o", f"Os{s}"] < at[f"Os{s}", "os"]
        assert at["l", f"Ls{s}"] < at[f"Ls{s}", f"ls{s}"]
    fills = [e for e in four.recording.events if isinstance(e, Change) and e.slot == "w"]
    assert [e.cells for e in fills] == [True]
    assert fills[0].reads == ("ls0", "ls1")


def test_a_readers_own_loop_gives_an_equal_recording(four):
    rng = np.random.default_rng(4)
    q, (k, v) = rng.normal(size=(1, 4)), rng.normal(size=(2, 16, 4))
    fd = fv.FlashDecoding(q, k, v, splits=2, Bc=4)
    forward(fd)
    assert fd.run().recording == four.recording


def test_one_block_holds_the_query_heads_that_share_a_head():
    q, k = np.ones((2, 6, 3, 4)), np.ones((2, 2, 8, 4))
    recording = fv.flash_decoding(q, k, k, splits=2, device="numpy").recording
    assert recording.slot("q").shape == (9, 4)
    assert len(recording.blocks(0)) == 2 * 2 * 2
    assert len(recording.blocks(1)) == 2 * 2
    assert "batch 1 · head 1 · split 1 · load q" in [s.label for s in recording.steps]


def test_the_recording_carries_both_sources_with_every_action(four):
    python, cuda = four.recording.code
    for name in FlashDecoding.action_names():
        assert python.span(name), name
        assert cuda.lines_of(name).strip().startswith(f"TRACE({name}, ")


FIRST = ("load_k", "load_v", "scores", "softmax", "accumulate")


@given(st.sets(st.sampled_from(FlashDecoding.action_names())), st.integers(1, 6), st.integers(1, 4), st.booleans())
@example({"load_v"}, 4, 2, False)
@example({"scores"}, 2, 3, True)
@settings(max_examples=60)
def test_an_action_left_out_is_seen_and_never_crashes(left_out, Bc, splits, masked):
    rng = np.random.default_rng(0)
    q, (k, v) = rng.normal(size=(2, 3)), rng.normal(size=(2, 9, 3))
    fd = FlashDecoding(q, k, v, Bc=Bc, splits=splits, mask=rng.random((2, 9)) < 0.5 if masked else None)

    def act(name, *args):
        if name not in left_out:
            getattr(fd, name)(*args)

    for s in range(splits):
        fd.begin(s)
        act("load_q")
        for j in fd.key_tiles(s):
            for name in FIRST:
                act(name, j)
        act("store_partial")
    fd.begin_combine()
    act("load_l")
    act("weights")
    for s in range(splits):
        act("load_o", s)
        act("combine", s)
    act("store_o")
    found = {f.slot for f in fd.run().recording.findings}
    for gone, use, slot in (
        ("load_q", "scores", "q"),
        ("load_k", "scores", "Kj"),
        ("load_v", "accumulate", "Vj"),
        ("scores", "softmax", "Sj"),
        ("store_partial", "load_l", "Ls0"),
        ("store_partial", "load_o", "Os0"),
        ("load_l", "weights", "ls0"),
        ("weights", "combine", "w"),
        ("load_o", "combine", "os"),
    ):
        if gone in left_out and use not in left_out:
            assert slot in found


def test_record_some_and_none():
    x = np.ones((8, 2))
    assert run(x[:1], x, x).recording is None
    some = fv.flash_decoding(x[:1], x, x, splits=2, record=[1], device="numpy")
    assert {s.block.tile for s in some.recording.steps if s.block} == {1}
    assert some.O.tolist() == [[1.0, 1.0]]


# -- errors ----------------------------------------------------------------------------------------------------------

X = np.ones((4, 3))


def test_errors_name_the_value_and_what_it_must_be():
    with pytest.raises(ValueError, match=r"splits=0: .*at least 1"):
        run(X, X, X, splits=0)
    with pytest.raises(ValueError, match=r"splits=1\.5"):
        run(X, X, X, splits=1.5)
    with pytest.raises(ValueError, match="3 query heads over 2 K, V heads"):
        run(np.ones((3, 1, 3)), *[np.ones((2, 4, 3))] * 2)
    with pytest.raises(fv.DeviceError, match=r'device="gpu": a mask is given, which the kernels do not take'):
        fv.flash_decoding(X, X, X, device="gpu", mask=np.ones((4, 4), bool))


def test_errors_of_a_readers_loop():
    fd = fv.FlashDecoding(X[:1], X, X, splits=2, Bc=2)
    with pytest.raises(RuntimeError, match="load_q before a block has begun"):
        fd.load_q()
    with pytest.raises(IndexError, match="split s=2: s runs to 1"):
        fd.begin(2)
    with pytest.raises(IndexError, match="head=1, batch=0"):
        fd.begin(0, head=1)
    fd.begin_combine()
    fd.load_l()
    assert {f.slot for f in fd.run().recording.findings} == {"Ls0", "Ls1"}
    with pytest.raises(RuntimeError, match="split 0 after a combine block"):
        fd.begin(0)
