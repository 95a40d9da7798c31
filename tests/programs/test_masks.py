"""Masks in all three algorithms: windows, used lengths, rows and blocks that see nothing, grouped heads, on both devices."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from programs.oracle import attention, bound

import flashviz as fv
from flashviz import cuda
from flashviz.cuda import cpu
from flashviz.events import Move
from flashviz.programs import flash_attention_1 as fa1
from flashviz.programs import flash_attention_2 as fa2
from flashviz.programs import flash_decoding as fd
from flashviz.programs.claims import observe

ALL = (fv.flash_attention_1, fv.flash_attention_2, fv.flash_decoding)
EACH = pytest.mark.parametrize("algorithm", ALL, ids=lambda f: f.__name__)
DEVICES = pytest.mark.parametrize("device", ["numpy", "cpu"])


def run(algorithm, Q, K, V, *, Br=4, device="numpy", **options):
    if device == "cpu" and not cpu.status().usable:
        pytest.skip(cpu.status().reason)
    tiles = {} if algorithm is fv.flash_decoding else {"Br": Br}
    return algorithm(Q, K, V, device=device, **tiles, **{"record": False, **options})


def assert_right(algorithm, Q, K, V, **options):
    got = run(algorithm, Q, K, V, **options)
    rules = {name: options[name] for name in ("scale", "causal", "mask", "window", "kv_len") if name in options}
    O, L = attention(Q, K, V, **rules)
    most_o, most_l = bound(*(np.nan_to_num(x) for x in (Q, K, V)), scale=options.get("scale"))
    assert not np.isnan(got.O).any()
    assert np.array_equal(np.isneginf(got.L), np.isneginf(L))
    assert (got.O[np.isneginf(L)] == 0).all()
    assert np.abs(got.O - O).max() <= most_o
    seen = ~np.isneginf(L)
    assert np.abs(got.L[seen] - L[seen]).max(initial=0) <= most_l
    return got


@st.composite
def problems(draw):
    """Grouped heads, Nq and Nk apart, a window, and NaN behind the used keys."""
    Nq, Nk, d = draw(st.integers(1, 14)), draw(st.integers(1, 18)), draw(st.integers(1, 6))
    heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    Q, K, V = (
        rng.standard_normal((h, n, d), dtype="float32") for h, n in ((heads * group, Nq), (heads, Nk), (heads, Nk))
    )
    used = draw(st.none() | st.integers(0, Nk))
    if used is not None:
        K[:, used:] = V[:, used:] = np.nan
    causal = draw(st.booleans())
    mask = rng.random((heads * group, Nq, Nk)) < 0.6 if draw(st.booleans()) else None
    rules = {
        "causal": causal,
        "window": draw(st.none() | st.integers(1, 20)) if causal else None,
        "kv_len": used,
        "mask": mask,
    }
    return (Q, K, V), {"Br": draw(st.integers(1, 9)), "Bc": draw(st.integers(1, 9)), **rules}


@EACH
@given(problems())
@settings(max_examples=60)
def test_random_problems_against_the_oracle(algorithm, problem):
    arrays, options = problem
    assert_right(algorithm, *arrays, **options)


@EACH
@given(problems())
@settings(max_examples=30)
def test_bytes_are_those_of_the_formula(algorithm, problem):
    arrays, options = problem
    made = run(algorithm, *arrays, record=True, **options)
    assert fv.check_traffic(made) == []
    assert made.recording.findings == ()


@EACH
@given(problems())
@settings(max_examples=5, deadline=None)
@example(
    (
        tuple(np.ones((1, n, 2), "float32") for n in (5, 2, 2)),
        {"Br": 2, "Bc": 1, "causal": True, "window": 1, "kv_len": 1, "mask": None},
    )
)
def test_the_kernels_do_the_same(algorithm, problem):
    """d is a template value: few examples, since each compiles a kernel."""
    arrays, options = problem
    arrays = [np.repeat(x, 8, axis=-1)[..., :8] for x in arrays]
    options = {**options, "mask": None, "Br": 4, "Bc": 4}
    kernel = run(algorithm, *arrays, device="cpu", record=True, **options)
    program = run(algorithm, *arrays, record=True, **options)
    assert_right(algorithm, *arrays, device="cpu", **options)
    assert fv.same(kernel, program) == []


@EACH
@pytest.mark.parametrize(
    ("Nq", "Nk", "used", "window"), [(5, 12, 10, 3), (5, 12, 12, 1), (3, 20, 13, 8), (9, 6, 5, 2), (1, 16, 9, 4)]
)
def test_the_kernels_windows_against_the_oracle(algorithm, Nq, Nk, used, window):
    rng = np.random.default_rng(window)
    Q, K, V = (rng.standard_normal((h, n, 8), dtype="float32") for h, n in ((2, Nq), (1, Nk), (1, Nk)))
    K[:, used:] = V[:, used:] = np.nan
    for device in ("numpy", "cpu"):
        assert_right(algorithm, Q, K, V, causal=True, window=window, kv_len=used, Bc=4, device=device)


# -- cases.md --------------------------------------------------------------------------------------------------------


@EACH
@DEVICES
@pytest.mark.parametrize("score", [-10.0, 0.0])
def test_a01_tail_keys(algorithm, device, score):
    got = run(algorithm, np.ones((1, 1)), np.full((5, 1), score), np.ones((5, 1)), scale=1.0, Bc=4, device=device)
    assert got.O.tolist() == [[1.0]]


@EACH
@DEVICES
@pytest.mark.parametrize(("nq", "nk", "want"), [(2, 5, [2.5, 3]), (5, 2, [0, 0, 0, 1, 1.5]), (1, 8, [4.5])])
def test_a04_causal_is_bottom_right(algorithm, device, nq, nk, want):
    v = np.arange(1.0, nk + 1)[:, None]
    got = run(algorithm, np.zeros((nq, 1)), np.zeros((nk, 1)), v, causal=True, Bc=2, device=device)
    assert got.O[:, 0] == pytest.approx(want, abs=1e-6)
    assert np.isneginf(got.L).tolist() == [q + nk - nq < 0 for q in range(nq)]


@EACH
@pytest.mark.parametrize("Bc", [1, 2, 4])
def test_a05_rows_that_see_no_key_in_their_first_middle_or_last_tile(algorithm, Bc):
    mask = np.array([[0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 0, 0], [0] * 6, [1] * 6], dtype=bool)
    v = np.arange(1.0, 7)[:, None]
    got = run(algorithm, np.zeros((5, 1)), np.zeros((6, 1)), v, mask=mask, Bc=Bc)
    assert got.O[:, 0] == pytest.approx([4.5, 3.5, 2.5, 0, 3.5])
    assert pytest.approx([math.log(4)] * 3 + [-math.inf, math.log(6)]) == got.L


@EACH
@pytest.mark.parametrize("blind", [0, 1, 2], ids=["first", "middle", "last"])
@pytest.mark.parametrize("axis", ["rows", "keys"])
def test_whole_row_blocks_and_key_tiles_that_nobody_sees(algorithm, blind, axis):
    rng = np.random.default_rng(blind)
    Q, K, V = (rng.standard_normal((12, 3)).astype("float32") for _ in range(3))
    mask = np.ones((12, 12), dtype=bool)
    part = slice(4 * blind, 4 * blind + 4)
    mask[(part, slice(None)) if axis == "rows" else (slice(None), part)] = False
    got = assert_right(algorithm, Q, K, V, mask=mask, Bc=4)
    assert np.isneginf(got.L).sum() == (4 if axis == "rows" else 0)


@EACH
@DEVICES
@pytest.mark.parametrize(
    ("scale", "want"), [(None, [[1, 2], [2.0495, 3.0495], [3.2066, 4.2066]]), (0, [[1, 2], [2, 3], [3, 4]])]
)
def test_a09_scale(algorithm, device, scale, want):
    q, k, v = ((np.arange(6.0).reshape(3, 2) + n) * f for n, f in ((1, 0.1), (7, 0.1), (1, 1)))
    got = run(algorithm, q, k, v, scale=scale, causal=True, device=device)
    assert pytest.approx(np.array(want), abs=6e-5) == got.O


@EACH
@given(st.integers(0, 2**32 - 1), st.integers(1, 9))
@settings(max_examples=30)
def test_scores_of_minus_thirty_thousand_beside_masked_ones(algorithm, seed, Bc):
    rng = np.random.default_rng(seed)
    k = rng.choice([-30000.0, -29999.0, 0.0, 30000.0], size=(9, 1))
    assert_right(
        algorithm, np.ones((5, 1)), k, rng.normal(size=(9, 1)), scale=1.0, mask=rng.random((5, 9)) < 0.5, Bc=Bc
    )


@EACH
@DEVICES
def test_a_hidden_score_is_lower_than_any_other(algorithm, device):
    """A finite minus infinity would lose against -30000 here, and let the keys ahead in."""
    k, v = np.full((8, 1), -30000.0), np.arange(8.0)[:, None]
    got = run(algorithm, np.ones((8, 1)), k, v, scale=1.0, causal=True, device=device)
    # Decoding merges by L, and float32 has steps of 0.002 at 30000.
    slack = 4e-3 if algorithm is fv.flash_decoding else 1e-6
    assert got.O[:, 0] == pytest.approx(np.arange(8) / 2, abs=slack)


# -- what is never touched -------------------------------------------------------------------------------------------


@EACH
@DEVICES
@pytest.mark.parametrize("used", [0, 1, 4, 6, 8])
def test_nan_behind_the_used_keys_does_not_leak(algorithm, device, used):
    rng = np.random.default_rng(used)
    Q, K, V = (rng.standard_normal((2, n, 8), dtype="float32") for n in (3, 8, 8))
    whole = run(algorithm, Q, K[:, : max(used, 1)], V[:, : max(used, 1)], causal=True, device=device)
    K[:, used:] = V[:, used:] = np.nan
    got = run(algorithm, Q, K, V, causal=True, kv_len=used, device=device)
    if used:
        assert np.array_equal(got.O, whole.O)
        assert np.array_equal(got.L, whole.L)
    else:
        assert (got.O == 0).all()
        assert np.isneginf(got.L).all()


def test_a_kernel_that_reads_behind_the_used_keys_is_caught(tmp_path):
    """The fault that kv_len is for, planted."""
    if not cpu.status().usable:
        pytest.skip(cpu.status().reason)
    text = cuda.find("flash_attention_2").text
    line = "? V[(long long)k * D + x] : 0.f;"
    faulty = text.replace("Vj[c][x] = k < Nk " + line, "Vj[c][x] = true " + line, 1)
    assert faulty != text
    (tmp_path / "flash_attention_2.cu").write_text(faulty)
    x = np.random.default_rng(0).standard_normal((1, 1, 8, 8)).astype("float32")
    V = x.copy()
    V[:, :, 6:] = np.nan
    results = []
    for file in ("flash_attention_2", tmp_path / "flash_attention_2.cu"):
        O, L = np.empty_like(x), np.empty(x.shape[:3], "float32")
        kernel = cuda.Kernel(file, {"Br": 4, "Bc": 4, "D": 8})
        cuda.launch(kernel, (x, x, V, O, L, 8, 8, 1.0, 0, 1, 1, 6, 0), device="cpu", poison=True)
        results.append(np.isnan(O).any())
    assert results == [False, True]


@pytest.mark.parametrize(
    "rules", [{"causal": True}, {"causal": True, "window": 3}, {"causal": True, "window": 5, "kv_len": 9}]
)
def test_a_trace_line_does_not_lie_about_what_it_skips(rules):
    if not cpu.status().usable:
        pytest.skip(cpu.status().reason)
    Q, K, V = np.random.default_rng(2).standard_normal((3, 2, 12, 8), dtype="float32")
    K, V = K[:1], V[:1]
    for made, loops, launch in (
        (fa1.FlashAttention1(Q, K, V, **rules), fa1.forward, lambda p: fa1.launch_kernel(p.a, "cpu")),
        (fa2.FlashAttention2(Q, K, V, **rules), fa2.forward, lambda p: fa2.launch_kernel(p.a, "cpu")),
        (fd.FlashDecoding(Q[:, :2], K, V, **rules), fd.forward, lambda p: fd.launch_kernels(p, "cpu")),
    ):
        _, _, false = observe(made, loops, lambda m=made, go=launch: go(m))
        assert false == []


def loads(recording):
    """The K tiles that move, in order, each with its rows."""
    moves = (e for e in recording.events if isinstance(e, Move))
    return [(p.src, p.shape[0]) for e in moves for p in e.parts if p.src.startswith("K")]


def test_tiles_outside_are_never_loaded_and_the_last_one_arrives_short():
    x = np.random.default_rng(1).normal(size=(3, 16, 2))
    made = run(fv.flash_attention_2, *x, Bc=4, record=True, causal=True, window=5, kv_len=14)
    by_block = {}
    for step in made.recording.steps:
        if "load_k" in step.actions:
            by_block.setdefault(step.block.tile, []).append(dict(step.tiles)["j"])
    assert by_block == {0: [0], 1: [0, 1], 2: [0, 1, 2], 3: [1, 2, 3]}
    assert [rows for name, rows in loads(made.recording) if name == "K3"] == [2]
    first = run(fv.flash_attention_1, *x, Bc=4, record=True, causal=True, window=5, kv_len=14)
    assert [name for name, _ in loads(first.recording)] == ["K0", "K1", "K2", "K3"]
    late = run(fv.flash_attention_1, x[0][:2], *x[1:], Bc=4, record=True, causal=True, window=3)
    assert [name for name, _ in loads(late.recording)] == ["K3"]


def test_what_lies_behind_is_nan_and_a_finding_for_a_loop_that_goes_there():
    x = np.ones((8, 2), "float32")
    fa = fv.FlashAttention2(x, x, x, kv_len=4)
    assert (fa.Tc, [list(fa.key_tiles(i)) for i in range(fa.Tr)]) == (1, [[0], [0]])
    fa.begin(0)
    fa.load_q()
    fa.load_k(1)
    recording = fa.run().recording
    assert [f.slot for f in recording.findings] == ["K1"]
    assert np.isnan(recording.values(-1, "Kj")).all()


@pytest.mark.parametrize("group", [1, 2, 4])
def test_grouped_heads_read_the_head_that_division_gives(group):
    rng = np.random.default_rng(group)
    Q, K, V = (rng.standard_normal((h, 5, 4), dtype="float32") for h in (4, 4 // group, 4 // group))
    for algorithm in ALL:
        assert_right(algorithm, Q, K, V, causal=True)
    recording = run(fv.flash_attention_2, Q, K, V, record=True).recording
    for step in recording.steps:
        for event in recording.events[step.first : step.end]:
            if isinstance(event, Move) and event.parts[0].dst == "Kj" and group < 4:
                assert recording.slot(event.parts[0].src).head == (0, step.block.head // group)


# -- errors ----------------------------------------------------------------------------------------------------------

X = np.ones((4, 3))


@EACH
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0, "causal": True}, "window=0: it counts the keys that a query sees, an integer of at least 1"),
        ({"window": 2.5, "causal": True}, "window=2.5: .*an integer"),
        ({"window": True, "causal": True}, "window=True"),
        ({"window": 2}, "window=2 without causal=True: a window ends at the query's own key"),
        ({"kv_len": 5}, "kv_len=5: it counts the used rows of K and V, an integer from 0 to 4"),
        ({"kv_len": -1}, "kv_len=-1"),
        ({"kv_len": False}, "kv_len=False"),
    ],
)
def test_errors_name_the_value_and_what_it_must_be(algorithm, options, message):
    with pytest.raises(ValueError, match=message):
        algorithm(X, X, X, device="numpy", **options)


@EACH
def test_a_window_longer_than_everything_is_no_window(algorithm):
    x = np.random.default_rng(0).normal(size=(3, 7, 2))
    plain = run(algorithm, *x, causal=True)
    for device in ("numpy", "cpu"):
        assert np.allclose(run(algorithm, *x, causal=True, window=2**40, device=device).O, plain.O, atol=1e-6)


def test_the_params_say_what_was_given_and_nothing_else():
    plain = run(fv.flash_attention_2, X, X, X)
    assert not {"window", "kv_len"} & set(plain.params)
    made = run(fv.flash_attention_2, X, X, X, causal=True, window=2, kv_len=np.int64(3))
    assert (made.params["window"], made.params["kv_len"], made.params["Nk"], made.params["Tc"]) == (2, 3, 4, 1)
