"""The number of splits of flash decoding, from the GPU's multiprocessors and the keys."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashviz.cuda import choose_splits
from flashviz.cuda.splits import GAIN, START

SIZES = {
    "heads": st.integers(1, 600),
    "n": st.integers(0, 40_000),
    "slots": st.integers(1, 300),
    "step": st.integers(1, 512),
}


def rounds(heads: int, n: int, slots: int, step: int, splits: int) -> float:
    """What the splits take, in tiles, counted block by block: each goes to the multiprocessor that is free first."""
    tiles = max(1, -(-n // step))
    each = -(-tiles // splits)
    free = [0.0] * slots
    for _ in range(heads * splits):
        at = free.index(min(free))
        free[at] += each + START
    return max(free)


@given(**SIZES)
def test_no_split_is_without_keys(heads: int, n: int, slots: int, step: int) -> None:
    splits = choose_splits(heads, n, slots, step, each=1)
    tiles = -(-n // step)
    assert 1 <= splits <= 128
    if n:
        each = -(-tiles // splits)
        assert (splits - 1) * each < tiles, "the last split has no tile"


@given(heads=st.integers(1, 40), n=st.integers(0, 5000), slots=st.integers(1, 40), step=st.integers(16, 512))
def test_no_other_number_of_splits_is_done_much_sooner(heads: int, n: int, slots: int, step: int) -> None:
    chosen = choose_splits(heads, n, slots, step, each=1, most=16)
    tiles = max(1, -(-n // step))
    for other in range(1, min(tiles, 16) + 1):
        soonest = rounds(heads, n, slots, step, other)
        assert rounds(heads, n, slots, step, chosen) * (1 - GAIN) <= soonest + 1e-9


@pytest.mark.parametrize(
    ("heads", "n", "expected"),
    [
        (32, 0, 1),  # nothing to split
        (32, 256, 1),  # one tile
        (264, 131_072, 1),  # two heads for each multiprocessor
        (132, 131_072, 2),
        (32, 131_072, 8),  # 9 or 17 would fill the last round better, and gain too little
        (1, 131_072, 128),  # one head: as many as there may be
        (528, 8192, 1),  # two full rounds
    ],
)
def test_known_sizes(heads: int, n: int, expected: int) -> None:
    assert choose_splits(heads, n, 132, 256) == expected


@pytest.mark.parametrize(
    ("sizes", "words"),
    [((0, 1, 1, 1), "heads=0"), ((1, -1, 1, 1), "n=-1"), ((1, 1, 0, 1), "multiprocessors=0"), ((1, 1, 1, 0), "step=0")],
)
def test_sizes_that_make_no_sense(sizes: tuple[int, int, int, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        choose_splits(*sizes)


def test_each_multiplies_the_multiprocessors() -> None:
    for n in (1000, 4096, 100_000):
        assert choose_splits(16, n, 132, 64, each=3) == choose_splits(16, n, 396, 64, each=1)
    with pytest.raises(ValueError, match="each=0"):
        choose_splits(1, 1, 1, 1, each=0)


def test_room_for_no_split() -> None:
    with pytest.raises(ValueError, match="most=0"):
        choose_splits(1, 1, 1, 1, most=0)
