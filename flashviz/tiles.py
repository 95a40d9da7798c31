"""The library step on NumPy tiles: the names and the order of ``kernels/include/attention.cuh``.

Requirements: every function works on tiles as they lie in a block's shared memory; -inf is a value that may come in
(masked scores, a row that has seen no key) and no -inf - -inf is ever taken.
"""

from __future__ import annotations

import numpy as np

NEG_INF = np.float32(-np.inf)


def mask_cols(s: np.ndarray, cols: int) -> np.ndarray:
    """Scores [Br, Bc] with the columns from ``cols`` on set to -inf: the padding of the last key tile."""
    return np.where(np.arange(s.shape[1]) < cols, s, NEG_INF)


def causal_mask(s: np.ndarray, row0: int, col0: int, window: int | None = None) -> np.ndarray:
    """Scores [Br, Bc] with everything above the diagonal, and with ``window`` all but its last keys, set to -inf.

    ``row0`` is the last key that the first row sees (its query number + Nk - Nq: the mask is aligned bottom-right),
    ``col0`` the number of the first key. ``window`` counts the keys that a row sees, its own among them.
    """
    rows, cols = row0 + np.arange(s.shape[0]), col0 + np.arange(s.shape[1])
    seen = cols[None, :] <= rows[:, None]
    if window is not None:
        seen &= cols[None, :] > rows[:, None] - window
    return np.where(seen, s, NEG_INF)


def softmax_step(m: np.ndarray, l: np.ndarray, s: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """One step of the online softmax (Milakov and Gimelshein, arXiv 1805.02867, Algorithm 3).

    Args:
        m: running maximum [Br], -inf before the first key.
        l: running denominator [Br], relative to m.
        s: scaled and masked scores [Br, Bc].

    Returns:
        The new m and l, the unnormalised probabilities e^(s - m) [Br, Bc], and the correction e^(m_old - m_new) [Br]
        for everything that was summed relative to the old maximum.
    """
    m_new = np.maximum(m, s.max(axis=1))
    safe = np.where(np.isneginf(m_new), np.float32(0), m_new)
    p = np.exp(s - safe[:, None])
    correction = np.exp(m - safe)
    return m_new, l * correction + p.sum(axis=1), p, correction


def online_softmax(
    acc: np.ndarray, m: np.ndarray, l: np.ndarray, s: np.ndarray, v: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The whole library step: acc [Br, d] gains the softmax of s [Br, Bc] times v [Bc, d], unnormalised.

    Returns the new acc, m, l and the probabilities that overwrite s. Divide acc by l after the last step.
    """
    m, l, p, correction = softmax_step(m, l, s)
    return acc * correction[:, None] + p @ v, m, l, p


def normalise(acc: np.ndarray, m: np.ndarray, l: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """O = acc / l [Br, d] and L = m + ln l [Br]; a row that saw no key (l = 0) gets O = 0 and L = -inf."""
    seen = l > 0
    safe = np.where(seen | np.isnan(l), l, np.float32(1))
    return acc / safe[:, None], m + np.log(safe)


def rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotary embedding, rotate-half form (Su and others, arXiv 2104.09864): GPT-NeoX, Hugging Face's LLaMA.

    Args:
        x: rows [R, d].
        cos, sin: of each row's angles [R, pairs], 2 · pairs ≤ d.

    Returns:
        [a cos - b sin, b cos + a sin] for the halves a, b of the first 2 · pairs elements; those after them unchanged.
    """
    pairs = cos.shape[1]
    a, b = x[:, :pairs], x[:, pairs : 2 * pairs]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[:, 2 * pairs :]], axis=1)


def rope_pairs(x0: np.ndarray, x1: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rotary embedding, interleaved form: GPT-J, llama.cpp by default.

    ``x0`` and ``x1`` [R, pairs] are the even and the odd elements of each row: ``x[:, 0::2]`` and ``x[:, 1::2]``.
    """
    return x0 * cos - x1 * sin, x1 * cos + x0 * sin
