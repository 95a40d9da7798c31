"""How many splits flash decoding cuts the keys into: enough to give every multiprocessor work, and no more."""

from __future__ import annotations

START = 1.0
"""What a block takes to begin and to merge, in tiles: measured on an H200, where it is 1 to 3 microseconds."""

GAIN = 0.03
"""The part of the time that more splits must save."""


def choose_splits(heads: int, n: int, multiprocessors: int, step: int, *, each: int = 2, most: int = 128) -> int:
    """The number of splits with which ``heads`` blocks a split are done soonest.

    Blocks of a launch run in rounds, ``each`` of them on a multiprocessor; a round takes as long as its longest block, which
    walks ceil(tiles / splits) tiles of the keys, and a little to begin and to merge: as long as ``START`` tiles. More splits
    leave more partial answers to merge, so they are taken only where they gain ``GAIN`` of the time.

    Args:
        heads: blocks a split has: batches x heads of K and V (x the queries that have a block of their own).
        n: keys.
        multiprocessors: of the GPU.
        step: keys of a tile, Bc.
        each: blocks that share a multiprocessor. With two, one loads while the other begins or merges; measured on an H200,
            more did not help where there was room for them.
        most: splits at most.

    Returns:
        Splits, 1 to ``most``, none of them without a tile unless n is 0.

    Raises:
        ValueError: ``n`` is negative, or another argument is not 1 or more.

    >>> choose_splits(32, 4096, 132, 256)    # 32 heads alone would leave 100 of 132 multiprocessors idle; with 8 splits, none
    8
    >>> choose_splits(512, 8192, 132, 256)   # 512 heads keep them busy as they are
    1
    """
    for name, value in {
        "heads": heads,
        "multiprocessors": multiprocessors,
        "step": step,
        "each": each,
        "most": most,
    }.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be 1 or more")
    if n < 0:
        raise ValueError(f"n={n} must be 0 or more")
    tiles = max(1, -(-n // step))
    best, best_time = 1, float("inf")
    for asked in range(1, min(most, tiles) + 1):
        longest = -(-tiles // asked)
        splits = -(-tiles // longest)  # with so many tiles in each, the others would have none
        rounds = -(-heads * splits // (multiprocessors * each))
        time = rounds * (longest + START)
        if time < best_time * (1 - GAIN):
            best, best_time = splits, time
    return best
