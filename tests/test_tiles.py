"""The library step on NumPy tiles: the recurrence against one softmax, and the values that must not make a NaN."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flashviz.tiles import causal_mask, mask_cols, normalise, online_softmax, softmax_step

INF = np.float32(np.inf)


@pytest.fixture(autouse=True)
def no_numpy_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def stream(scores, values, cuts):
    """O and L of rows of scores, tile by tile."""
    rows, d = len(scores), values.shape[1]
    acc, m, l = np.zeros((rows, d), "float32"), np.full(rows, -INF), np.zeros(rows, "float32")
    for a, b in zip([0, *cuts], [*cuts, scores.shape[1]], strict=True):
        if a < b:
            acc, m, l, p = online_softmax(acc, m, l, scores[:, a:b], values[a:b])
            assert p.shape == (rows, b - a)
            assert (p <= 1).all()
    return normalise(acc, m, l)


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 5),
    st.integers(1, 12),
    st.lists(st.integers(0, 12), max_size=4),
    st.sampled_from([1.0, 30.0, 30000.0]),
    st.floats(0, 1),
)
@example(0, 2, 6, [2, 4], 30000.0, 1.0)
@example(0, 3, 6, [2, 4], 1.0, 0.9)
def test_any_tiling_gives_one_softmax(seed, rows, keys, cuts, size, hidden):
    rng = np.random.default_rng(seed)
    s = np.where(rng.random((rows, keys)) < hidden, -np.inf, rng.uniform(-size, size, (rows, keys))).astype("float32")
    v = rng.normal(size=(keys, 3)).astype("float32")
    O, L = stream(s, v, sorted(min(c, keys) for c in cuts))
    for i in range(rows):
        x = s[i].astype("float64")
        if np.isneginf(x).all():
            assert O[i].tolist() == [0, 0, 0]
            assert np.isneginf(L[i])
            continue
        w = np.exp(x - x.max())
        assert O[i] == pytest.approx(w @ v / w.sum(), abs=1e-4)
        assert L[i] == pytest.approx(x.max() + math.log(w.sum()), rel=1e-6, abs=1e-4)


def test_a_first_tile_that_is_all_hidden_leaves_the_carries_as_they_were():
    m, l, p, correction = softmax_step(np.array([-INF]), np.zeros(1, "float32"), np.full((1, 3), -INF))
    assert (m.tolist(), l.tolist(), p.tolist()) == ([-np.inf], [0], [[0, 0, 0]])
    assert np.isfinite(correction).all()


def test_a_hidden_tile_later_changes_nothing():
    m, l = np.array([2.0], "float32"), np.array([3.0], "float32")
    m2, l2, p, correction = softmax_step(m, l, np.full((1, 2), -INF))
    assert (m2.tolist(), l2.tolist(), p.tolist(), correction.tolist()) == ([2], [3], [[0, 0]], [1])


def test_the_step_stays_in_float32():
    s, v = np.zeros((2, 3), "float32"), np.zeros((3, 4), "float32")
    out = online_softmax(np.zeros((2, 4), "float32"), np.full(2, -INF), np.zeros(2, "float32"), s, v)
    assert {x.dtype.name for x in (*out, *normalise(*out[:3]))} == {"float32"}
    assert mask_cols(s, 1).dtype == causal_mask(s, 0, 0).dtype == np.float32


def test_mask_cols():
    s = np.ones((2, 3), "float32")
    assert mask_cols(s, 2).tolist() == [[1, 1, -np.inf]] * 2
    assert mask_cols(s, 3).tolist() == s.tolist()
    assert np.isneginf(mask_cols(s, 0)).all()


@given(st.integers(0, 6), st.integers(0, 6), st.integers(1, 4), st.integers(1, 4), st.integers(-6, 6))
def test_causal_mask_of_a_tile_is_a_part_of_the_whole_mask(i0, j0, rows, cols, more_keys):
    whole = np.arange(20)[None, :] <= np.arange(20)[:, None] + more_keys  # bottom-right: more_keys = Nk - Nq
    tile = causal_mask(np.zeros((rows, cols), "float32"), i0 + more_keys, j0)
    assert np.array_equal(np.isneginf(tile), ~whole[i0 : i0 + rows, j0 : j0 + cols])


def test_nan_scores_stay_nan():
    _, l, _, _ = softmax_step(np.full(1, -INF), np.zeros(1, "float32"), np.array([[1, np.nan]], "float32"))
    assert np.isnan(l).all()
    O, L = normalise(np.ones((1, 1), "float32"), np.zeros(1, "float32"), l)
    assert np.isnan(L).all()
    assert np.isnan(O).all()
