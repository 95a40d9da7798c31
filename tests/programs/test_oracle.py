"""The oracle itself, against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from programs.oracle import attention


def test_uniform_scores_give_the_mean_and_the_logarithm_of_the_count():
    O, L = attention(np.zeros((2, 3)), np.zeros((4, 3)), np.arange(12.0).reshape(4, 3))
    assert O.tolist() == [[4.5, 5.5, 6.5]] * 2
    assert pytest.approx([math.log(4)] * 2) == L


def test_causal_is_aligned_bottom_right():
    zero, v = np.zeros((1, 1)), np.arange(1.0, 6)[:, None]
    O, L = attention(np.repeat(zero, 5, 0), np.repeat(zero, 2, 0), v[:2], causal=True)
    assert O[:, 0].tolist() == [0, 0, 0, 1, 1.5]
    assert np.isneginf(L).tolist() == [True, True, True, False, False]


def test_grouped_heads_repeat_each_key_head():
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(4, 3, 2)), rng.normal(size=(2, 5, 2)), rng.normal(size=(2, 5, 2))
    O, L = attention(q, k, v)
    for h in range(4):
        o, l = attention(q[h], k[h // 2], v[h // 2])
        assert np.allclose(O[h], o, rtol=1e-14)
        assert np.allclose(L[h], l, rtol=1e-14)


def test_against_a_row_by_row_softmax():
    rng = np.random.default_rng(1)
    q, k, v = rng.normal(size=(6, 4)), rng.normal(size=(7, 4)), rng.normal(size=(7, 4))
    mask = rng.random((6, 7)) < 0.6
    O, L = attention(q, k, v, scale=0.3, mask=mask, causal=True)
    for i in range(6):
        keys = [j for j in range(7) if j <= i + 1 and mask[i, j]]
        weights = [math.exp(0.3 * float(q[i] @ k[j])) for j in keys]
        want = sum(w * v[j] for w, j in zip(weights, keys, strict=True)) / sum(weights) if keys else np.zeros(4)
        assert O[i] == pytest.approx(want)
        assert L[i] == pytest.approx(math.log(sum(weights)) if keys else -math.inf)
