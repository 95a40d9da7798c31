"""Rotary embedding: both forms against the oracle, positions, partial dimensions, and what the recording says who meets whom."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import flashviz as fv
from flashviz import tiles
from flashviz.checks.same import same
from flashviz.cuda import cpu
from flashviz.events import Barrier, Change, Launch, Move
from flashviz.programs.claims import observe
from flashviz.programs.rope import forward, launch_kernel

FORMS = {"halves": fv.rope, "pairs": fv.rope_pairs}


def oracle(x, positions, form, base=10000.0, rotary_dim=None):
    """Float64, with complex numbers: pair (a, b) is a + bi, and a rotation by an angle is a product with e^(i angle)."""
    x = np.asarray(x, "float64")
    d = x.shape[-1] if rotary_dim is None else rotary_dim
    turn = np.exp(1j * np.asarray(positions, "float64")[:, None] * base ** (-np.arange(0, d, 2) / d))
    head, rest = x[..., :d], x[..., d:]
    if form == "halves":
        turned = (head[..., : d // 2] + 1j * head[..., d // 2 :]) * turn
        made = np.concatenate([turned.real, turned.imag], axis=-1)
    else:
        turned = (head[..., 0::2] + 1j * head[..., 1::2]) * turn
        made = np.stack([turned.real, turned.imag], axis=-1).reshape(head.shape)
    return np.concatenate([made, rest], axis=-1)


def run(form, *args, **options):
    return FORMS[form](*args, **{"device": "numpy", "record": False, **options})


def assert_right(got, x, positions, form, **options):
    exact = np.asarray(x, "float32")
    want = oracle(exact, positions, form, **options)
    assert got.shape == exact.shape
    assert got.dtype == np.float32
    # Table entries are off by half a rounding each, then two products and a sum.
    assert np.abs(got - want).max() <= 6 * 2**-24 * max(float(np.abs(exact).max()), 1e-30)


@st.composite
def problems(draw):
    """x of any accepted shape, positions and options."""
    n, d = draw(st.integers(1, 9)), 2 * draw(st.integers(1, 6))
    lead = [(), (draw(st.integers(1, 3)),), (draw(st.integers(1, 2)), draw(st.integers(1, 3)))][draw(st.integers(0, 2))]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from(["float16", "float32", "float64", "int8"]))
    x = np.round(rng.normal(size=(*lead, n, d)) * 4, 3).astype(dtype)
    options = {
        "tile": draw(st.integers(1, 10)),
        "base": draw(st.sampled_from([10000.0, 500000.0, 2.0])),
        "rotary_dim": draw(st.sampled_from([None, *range(2, d + 1, 2)])),
    }
    positions = rng.integers(-5, 100_000, size=n) if draw(st.booleans()) else None
    return x, positions, draw(st.sampled_from([0, 1, 17, 4095, 0.5])), options


@given(problems(), st.sampled_from(["halves", "pairs"]))
def test_random_problems_against_the_oracle(problem, form):
    x, positions, offset, options = problem
    at = (np.arange(x.shape[-2]) if positions is None else positions) + offset
    got = run(form, x, positions, offset=offset, **options)
    assert_right(got.O, x, at, form, base=options["base"], rotary_dim=options["rotary_dim"])


@given(
    st.integers(0, 2**32 - 1), st.sampled_from(["halves", "pairs"]), st.integers(0, 5000), st.sampled_from([None, 4])
)
@settings(max_examples=30)
def test_scores_depend_on_the_distance_alone(seed, form, offset, rotary_dim):
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, 1, 8)).astype("float32").repeat(6, axis=1)
    q, k = (run(form, x, rotary_dim=rotary_dim, offset=o).O for x, o in ((q, offset), (k, offset)))
    scores = q.astype(float) @ k.T.astype(float)
    for distance in range(-5, 6):
        same_distance = np.diagonal(scores, -distance)
        assert np.ptp(same_distance) < 2e-6 * max(np.linalg.norm(q[0]) * np.linalg.norm(k[0]), 1)
    assert np.ptp(scores) > 1e-6, "and they do depend on it"


@given(st.integers(1, 6), st.integers(0, 2**32 - 1), st.integers(0, 9999))
def test_a_permutation_turns_one_form_into_the_other(half, seed, offset):
    x = np.random.default_rng(seed).normal(size=(3, 2 * half)).astype("float32")
    p = np.arange(2 * half).reshape(2, half).T.ravel()  # 0, half, 1, half + 1 …: where the interleaved form wants them
    halves, pairs = (run("halves", x, offset=offset).O, run("pairs", x[:, p], offset=offset).O)
    assert np.array_equal(halves[:, p], pairs)


def test_decoding_with_an_offset_gives_the_bits_of_the_whole_row():
    x = np.random.default_rng(0).normal(size=(2, 9, 8))
    for form in FORMS:
        whole = run(form, x).O
        for n in range(9):
            assert np.array_equal(run(form, x[:, n : n + 1], offset=n).O, whole[:, n : n + 1])
            assert np.array_equal(run(form, x[:, n : n + 1], [n]).O, whole[:, n : n + 1])


def test_views_give_the_bits_of_copies():
    packed = np.random.default_rng(14).normal(size=(2, 7, 3, 4, 6)).astype("float32")  # B, N, 3, H, D
    for x in (packed[:, :, 1].transpose(0, 2, 1, 3), packed[:, ::-1, 0].transpose(0, 2, 1, 3)[..., ::-1]):
        assert not x.flags.c_contiguous
        for form in FORMS:
            assert np.array_equal(run(form, x).O, run(form, x.copy()).O)


# -- cases.md --------------------------------------------------------------------------------------------------------

B01 = {"halves": [0.5403, 0, 0.8415, 0], "pairs": [0.5403, 0.8415, 0, 0]}


@pytest.mark.parametrize("form", FORMS)
def test_b01_one_element_at_position_one(form):
    got = run(form, [[1, 0, 0, 0]], [1]).O[0]
    assert got == pytest.approx(B01[form], abs=5e-5)
    assert np.linalg.norm(got) == pytest.approx(1, abs=1e-6)


def test_b01_a_mix_of_the_two_loses_the_norm():
    """Cosines and sines doubled side by side, as the halves have them, with the rotation of pairs: a common mistake."""
    cos, sin = (np.concatenate([t, t], axis=1) for t in fv.rope_tables([1], 4))  # c0 c1 c0 c1
    x = np.array([[1, 0, 0, 0]], "float32")
    swapped = np.stack([-x[:, 1::2], x[:, 0::2]], axis=-1).reshape(1, 4)
    assert np.linalg.norm(x * cos + swapped * sin) == pytest.approx(0.5404, abs=5e-5)


@pytest.mark.parametrize("d", [65, 33, 9, 3])
@pytest.mark.parametrize("form", FORMS)
def test_b03_an_odd_dimension_is_refused_by_name(d, form):
    with pytest.raises(ValueError, match=f"d={d} elements"):
        run(form, np.ones((2, d)))
    with pytest.raises(ValueError, match=f"rotary_dim={d}"):
        run(form, np.ones((2, 66)), rotary_dim=d)
    with pytest.raises(ValueError, match=f"dim={d}"):
        fv.rope_tables([0], d)
    with pytest.raises(ValueError, match=f"Q has rows of d={d}"):
        fv.flash_attention_2_rope(*np.ones((3, 2, d)), device="numpy")
    assert run(form, np.ones((2, d)), rotary_dim=d - 1).O[1, -1] == 1, "what is left over passes"


def test_b04_angles_do_not_have_the_datas_precision():
    cos, sin = fv.rope_tables(np.array([1857], "float16"), 32)
    assert cos[0, 1] == pytest.approx(0.3067, abs=1e-3), "1857 in float16 is 1857 exactly"
    frequency = np.float16(10000.0 ** (-2 / 32))
    assert np.cos(float(np.float16(1857) * frequency)) == pytest.approx(-0.4082, abs=5e-5)
    x = np.zeros((1, 32), "float16")
    x[0, 1] = 1
    got = run("halves", x, [1857]).O[0]
    assert got[[1, 17]] == pytest.approx([cos[0, 1], sin[0, 1]])
    assert cos.dtype == sin.dtype == np.float32


@pytest.mark.parametrize("form", FORMS)
def test_b06_the_rotation_depends_on_the_token_only(form):
    row = np.random.default_rng(6).normal(size=8)
    got = run(form, np.broadcast_to(row, (4, 4, 8))).O  # H = N = 4: a swapped axis would not be refused
    assert (got == got[:1]).all(), "every head alike"
    assert_right(got, np.broadcast_to(row, (4, 4, 8)), range(4), form)
    assert (got[0, 1:] != got[0, :1]).any(axis=1).all(), "and every token otherwise"


@pytest.mark.parametrize("form", FORMS)
def test_b06_partial_rotary_dimensions(form):
    x = np.random.default_rng(7).normal(size=(5, 8)).astype("float32")
    got = run(form, x, rotary_dim=4).O
    assert np.array_equal(got[:, 4:], x[:, 4:])
    cos, _ = fv.rope_tables(np.arange(5), 4)
    assert cos == pytest.approx(np.cos(np.arange(5)[:, None] * [1, 0.01]))
    assert_right(got, x, range(5), form, rotary_dim=4)


def test_tables_are_right_far_out():
    at = np.array([0, 1, 131_071, 10**6])
    cos, sin = fv.rope_tables(at, 128, 500000.0)
    angles = at.astype(np.longdouble)[:, None] * np.longdouble(500000) ** (-np.arange(0, 128, 2) / np.longdouble(128))
    assert np.abs(cos - np.cos(angles)).max() < 2**-23
    assert np.abs(sin - np.sin(angles)).max() < 2**-23


# -- the picture's steps and events ----------------------------------------------------------------------------------


def test_the_steps_of_a_block():
    for form, said in (("halves", "element p meets element p + 4"), ("pairs", "element 2p meets element 2p + 1")):
        made = run(form, np.ones((8, 8)), record=True).recording
        assert [(s.label, s.caption) for s in made.steps] == [
            ("start", "Setup ready"),
            *[
                (f"{start} {i}{text}", caption)
                for i in range(2)
                for start, text, caption in (
                    ("visualize block", "", f"visualize {('a single', 'another')[i]} block"),
                    ("block", " · load xi, cos, sin", "load xi, cos, sin"),
                    ("block", " · rotate xi", f"rotate: {said}"),
                    ("block", " · write xi", "write xi"),
                )
            ],
        ]
        assert made.steps[2].actions == ("load_x", "load_angles")
    assert fv.traffic(made).fetches == fv.traffic(made).stores == 2


@pytest.mark.parametrize(("form", "partner"), [("halves", {0: 2, 1: 3}), ("pairs", {0: 1, 2: 3})])
def test_reads_and_writes_say_who_meets_whom(form, partner):
    made = run(form, np.arange(12.0).reshape(2, 6), rotary_dim=4, record=True).recording
    rotate = next(s for s in made.steps if s.action == "rotate")
    events = made.events[rotate.first : rotate.end]
    (move,) = [e for e in events if isinstance(e, Move)]
    assert made.events.index(move) == rotate.first, "both are copied out before either is written"
    held = {p.dst: p.src for p in move.parts}
    written = [e for e in events if isinstance(e, Change)]
    assert {e.slot for e in written} == {f"xi{e}" for both in partner.items() for e in both}, "4 and 5 pass"
    for change in written:
        p = change.reads[0][1:]
        assert change.reads == (f"a{p}", f"b{p}", f"ci{p}", f"si{p}")
        a, b = (int(held[name][2:]) for name in change.reads[:2])
        assert partner[a] == b
        assert change.slot in (f"xi{a}", f"xi{b}")


@given(
    st.integers(1, 2),
    st.integers(1, 2),
    st.integers(1, 7),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from(list(FORMS)),
)
@example(2, 2, 5, 4, 2, "pairs")
@settings(max_examples=30)
def test_events_and_traffic(B, H, N, half, tile, form):
    x = np.random.default_rng(N).normal(size=(B, H, N, 2 * half))
    made = run(form, x, tile=tile, record=True)
    recording = made.recording
    assert recording.algorithm == made.algorithm == "rope"
    assert recording.findings == ()
    assert [e.grid for e in recording.events if isinstance(e, Launch)] == [(-(-N // tile), H, B)]
    acted = [a for s in recording.steps for a in s.actions]
    assert acted == ["load_x", "load_angles", "rotate", "store_o"] * (-(-N // tile) * H * B)
    assert fv.check_traffic(made) == []
    assert fv.traffic(made).trips["cos"] == B * H
    assert len({s.label for s in recording.steps}) == len(recording.steps)
    last = [recording.values(-1, s.name) for s in recording.slots if s.tensor == "O" and s.head == (B - 1, H - 1)]
    rows = np.concatenate(last).reshape(-1)
    assert np.array_equal(np.sort(rows), np.sort(made.O[-1, -1].ravel()))


def test_a_formula_that_does_not_fit_is_seen():
    made = run("halves", np.ones((4, 8)), record=True)
    assert fv.traffic_model("rope", N=4, d=8, rotary_dim=4).differences(fv.traffic(made)) == [
        "cos: 64 bytes read, the formula says 32",
        "sin: 64 bytes read, the formula says 32",
    ]
    assert fv.traffic_model(run("halves", np.ones((4, 8)))).bytes_read == fv.traffic(made).bytes_read


def test_barriers_say_what_they_protect():
    recording = run("halves", np.ones((4, 8)), record=True).recording
    barriers = [e for e in recording.events if isinstance(e, Barrier)]
    assert len(barriers) == 2
    assert all(len(e.protects.split()) > 5 for e in barriers)


def test_shared_memory_of_a_recording_is_the_kernels():
    from flashviz.cuda import find

    slots = run("halves", np.ones((8, 8)), rotary_dim=6, record=True).recording.slots
    bytes_of = {}
    for s in slots:
        if s.memory == "shared":
            bytes_of[s.name.rstrip("0123456789")] = bytes_of.get(s.name.rstrip("0123456789"), 0) + s.nbytes
    assert find("rope").shared_parts({"R": 4, "D": 8, "Pairs": 3}) == bytes_of


def test_the_recording_carries_both_sources_with_every_action():
    recording = run("pairs", np.ones((4, 8)), record=True).recording
    python, cuda = recording.code
    assert [n for n, _, _ in python.lines] == [n for n, _, _ in cuda.lines] == list(fv.Rope.action_names())
    assert "rope_pairs<R>(x0, x1, ci, si);" in cuda.lines_of("rotate")
    assert "rope<R>(xi, ci, si);" in run("halves", np.ones((4, 8)), record=True).recording.code[1].lines_of("rotate")


# -- a reader's own loops, the kernels -------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_a_readers_own_loop_gives_an_equal_recording(form):
    x = np.random.default_rng(1).normal(size=(2, 5, 6))
    mine = fv.Rope(x, form=form)
    forward(mine)
    assert mine.run().recording == run(form, x, record=True).recording


@given(st.sets(st.sampled_from(["load_x", "load_angles", "rotate"])))
def test_an_action_left_out_is_seen_and_never_crashes(left_out):
    ro = fv.Rope(np.ones((4, 6)))
    ro.begin(0)
    for name in ("load_x", "load_angles", "rotate", "store_o"):
        if name not in left_out:
            getattr(ro, name)()
    found = {f.slot.rstrip("0123456789") for f in ro.run().recording.findings}
    want = {"load_x": {"xi"}, "load_angles": {"ci", "si"} if "rotate" not in left_out else set(), "rotate": set()}
    assert found == set().union(*(want[name] for name in left_out))


def test_tiles_and_library_functions_agree():
    x = np.random.default_rng(2).normal(size=(3, 8)).astype("float32")
    cos, sin = fv.rope_tables(range(3), 6)
    assert np.array_equal(tiles.rope(x, cos, sin), run("halves", x, rotary_dim=6).O)
    x0, x1 = tiles.rope_pairs(x[:, 0:6:2], x[:, 1:6:2], cos, sin)
    got = run("pairs", x, rotary_dim=6).O
    assert np.array_equal(x0, got[:, 0:6:2])
    assert np.array_equal(x1, got[:, 1:6:2])


CASES = [
    (1, 1, 1, 2, None, 1),
    (2, 3, 5, 8, None, 4),
    (1, 2, 33, 10, 6, 16),
    (1, 1, 9, 64, None, 4),
    (2, 1, 3, 6, 2, 5),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("B", "H", "N", "d", "rotary_dim", "tile"), CASES)
def test_the_kernels_on_the_processor(form, B, H, N, d, rotary_dim, tile):
    if not cpu.status().usable:
        pytest.skip(cpu.status().reason)
    x = np.random.default_rng(N).normal(size=(B, H, N, d)).astype("float32")
    options = {"rotary_dim": rotary_dim, "tile": tile, "offset": 1000}
    got = run(form, x, device="cpu", **options)
    assert got.device == "cpu"
    assert_right(got.O, x, np.arange(N) + 1000, form, rotary_dim=rotary_dim)


@pytest.mark.parametrize("form", FORMS)
def test_the_traced_kernel_does_what_the_program_does(form):
    if not cpu.status().usable:
        pytest.skip(cpu.status().reason)
    x = np.random.default_rng(8).normal(size=(2, 5, 8))
    options = {"rotary_dim": 6, "tile": 2, "record": True}
    traced, performed = (run(form, x, device=d, **options).recording for d in ("cpu", "numpy"))
    assert (traced.source, performed.source) == ("kernel", "program")
    assert same(traced, performed) == []
    assert [s.caption for s in traced.steps] == [s.caption for s in performed.steps]
    other = run("pairs" if form == "halves" else "halves", x, device="numpy", **options).recording
    assert same(traced, other), "the other form is another recording"
    ro = fv.Rope(x, form=form, rotary_dim=6, tile=2)
    assert observe(ro, forward, lambda: launch_kernel(ro.rotation, "cpu"))[2] == [], "every access is one that is named"


WRONG = {
    "one axis": ((np.ones(4),), {}, ValueError, r"x has shape \(4,\): it must be \[N, d\]"),
    "empty": ((np.ones((0, 4)),), {}, ValueError, r"x has shape \(0, 4\).*none of them 0"),
    "text": (([["a", "b"]],), {}, TypeError, "x has dtype <U1"),
    "positions too few": ((np.ones((3, 4)), [0, 1]), {}, ValueError, "positions has 2 entries for N=3 rows"),
    "positions of two axes": ((np.ones((3, 4)), np.ones((1, 3))), {}, ValueError, r"positions has shape \(1, 3\)"),
    "positions NaN": ((np.ones((1, 4)), [np.nan]), {}, TypeError, "finite real numbers"),
    "positions text": ((np.ones((1, 4)), ["0"]), {}, TypeError, "positions of dtype <U1"),
    "rotary_dim past d": ((np.ones((3, 4)),), {"rotary_dim": 6}, ValueError, "rotary_dim=6 is more than the d=4"),
    "rotary_dim 0": ((np.ones((3, 4)),), {"rotary_dim": 0}, ValueError, "rotary_dim=0: .*even number of at least 2"),
    "base": ((np.ones((3, 4)),), {"base": 0}, ValueError, "base=0: it must be a finite number above 0"),
    "offset": ((np.ones((3, 4)),), {"offset": np.inf}, ValueError, "offset=inf: it must be a finite number"),
    "tile": ((np.ones((3, 4)),), {"tile": 0}, ValueError, "tile=0: .*at least 1"),
    "device": ((np.ones((3, 4)),), {"device": "tpu"}, ValueError, "device='tpu' is none of"),
    "record": ((np.ones((3, 4)),), {"record": [3]}, ValueError, r"blocks to keep: \{3\}: none of them began"),
}


@pytest.mark.parametrize(("arrays", "options", "kind", "message"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("form", FORMS)
def test_errors_name_the_value_and_what_it_must_be(form, arrays, options, kind, message):
    with pytest.raises(kind, match=message):
        run(form, *arrays, **options)


def test_errors_of_a_readers_loop():
    with pytest.raises(ValueError, match='form=\'both\' is none of "halves", "pairs"'):
        fv.Rope(np.ones((4, 4)), form="both")
    ro = fv.Rope(np.ones((4, 4)))
    with pytest.raises(RuntimeError, match="rotate before a block has begun"):
        ro.rotate()
    with pytest.raises(IndexError, match="block i=1, head=0, batch=0: i runs to 0"):
        ro.begin(1)
