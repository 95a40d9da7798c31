"""Attention in float64, one dense softmax: what every program and kernel is compared with."""

from __future__ import annotations

import math

import numpy as np


def attention(Q, K, V, *, scale=None, causal=False, mask=None, window=None, kv_len=None):
    """O and L of softmax(Q Kᵀ · scale) V for [N, d], [H, N, d] or [B, H, N, d], in float64.

    Query i sees key j where j ≤ i + Nk - Nq (causal, aligned bottom-right) and where mask is True. Query head h reads
    K, V head h // (Hq / Hkv). A row that sees no key gets O = 0 and L = -inf. With a window, of the causal keys only the
    last ``window``; with kv_len the first kv_len rows of K and V are all there is.
    """
    if kv_len is not None:
        K, V = np.asarray(K)[..., :kv_len, :], np.asarray(V)[..., :kv_len, :]
        mask = None if mask is None else np.asarray(mask)[..., :kv_len]
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (Q, K, V))
    if q.ndim > 2:
        group = q.shape[-3] // k.shape[-3]
        k, v = np.repeat(k, group, axis=-3), np.repeat(v, group, axis=-3)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = np.einsum("...id,...jd->...ij", q, k) * scale
    seen = np.ones(scores.shape, dtype=bool)
    if causal:
        nq, nk = scores.shape[-2:]
        seen &= np.arange(nk)[None, :] <= np.arange(nq)[:, None] + nk - nq
        if window is not None:
            seen &= np.arange(nk)[None, :] > np.arange(nq)[:, None] + nk - nq - window
    if mask is not None:
        seen &= np.asarray(mask)
    any_seen = seen.any(axis=-1)
    m = np.where(any_seen, np.max(np.where(seen, scores, -np.inf), axis=-1, initial=-np.inf), 0.0)
    e = np.where(seen, np.exp(np.where(seen, scores - m[..., None], 0.0)), 0.0)
    total = e.sum(axis=-1)
    safe = np.where(any_seen, total, 1.0)
    O = np.einsum("...ij,...jd->...id", e, v) / safe[..., None]
    return O, np.where(any_seen, m + np.log(safe), -np.inf)


def bound(Q, K, V, *, scale=None):
    """How far float32 may be from the oracle, in O and in L: rounding of the scores, then of the sums, with slack.

    A score is a dot of d products rounded to float32, so its error grows with |q|·|k|; the softmax turns an absolute
    error e of the scores into a relative error of about 2 e of the output.
    """
    q, k, v = (np.abs(np.asarray(x, dtype=np.float64)) for x in (Q, K, V))
    d, nk = q.shape[-1], k.shape[-2]
    factor = 1 / math.sqrt(d) if scale is None else abs(scale)
    eps = float(np.finfo(np.float32).eps)
    score = eps * (d + 4) * q.max() * k.max() * d * factor
    steps = eps * (nk + 16)
    return float((4 * score + 4 * steps) * max(v.max(), 1e-30)), float(
        2 * score + 4 * steps + eps * q.max() * k.max() * d * factor
    )
