"""Who sees whom, by number: against a table of every query and key."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import flashviz as fv

SIZES = st.integers(1, 14)


def table(s):
    """[Nq, keys], True where the query sees the key, from the definition."""
    ago = np.arange(s.Nq)[:, None] + s.keys - s.Nq - np.arange(s.keys)[None, :]
    if not s.causal:
        return np.ones((s.Nq, s.keys), bool)
    return (ago >= 0) & (ago < (s.window or s.Nq + s.keys))


@given(SIZES, st.integers(0, 14), st.booleans(), st.none() | st.integers(1, 20), SIZES, SIZES)
@example(5, 2, True, None, 2, 1)
@example(1, 8, True, 3, 1, 4)
def test_keys_and_tiles_are_those_of_the_table(Nq, keys, causal, window, Br, Bc):
    s = fv.Sight(Nq, keys, causal, window if causal else None)
    seen = table(s)
    for q in range(Nq):
        assert list(s.keys_of(q)) == np.flatnonzero(seen[q]).tolist()
    tiles = s.tiles(Br, Bc)
    assert len(tiles) == -(-Nq // Br)
    for i, row in enumerate(tiles):
        for j in range(-(-keys // Bc)):
            part = seen[i * Br : (i + 1) * Br, j * Bc : (j + 1) * Bc]
            assert (j in row) == part.any(), (i, j)
            if j in row:
                assert s.whole(i, j, Br, Bc) == part.all()


@pytest.mark.parametrize(("N", "B"), [(4, 1), (64, 16), (96, 8), (8192, 64)])
def test_the_triangle_has_half_the_tiles(N, B):
    Tr = N // B
    assert sum(len(row) for row in fv.Sight(N, N, causal=True).tiles(B, B)) == Tr * (Tr + 1) // 2


def test_from_the_params_of_a_run():
    x = np.zeros((6, 2))
    run = fv.flash_attention_2(x, x, x, causal=True, window=2, kv_len=5, device="numpy")
    assert fv.Sight.of(run.params) == fv.Sight(6, 5, True, 2)
    assert fv.Sight.of({"Nq": 3, "Nk": 4}) == fv.Sight(3, 4)
    with pytest.raises(KeyError, match="Nk"):
        fv.Sight.of({"Nq": 3})
