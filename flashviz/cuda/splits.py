"""How many splits flash decoding cuts the keys into: enough to give every multiprocessor work, and no more."""

from __future__ import annotations


def choose_splits(heads: int, n: int, multiprocessors: int, step: int, *, most: int = 128) -> int:
    """The number of splits with which ``heads`` blocks a split are done soonest.

    Blocks of a launch run in rounds of ``multiprocessors``; a round takes as long as its longest block, which walks
    ceil(tiles / splits) tiles of the keys, and a little to begin and to merge: as long as ``START`` tiles. More splits than the
    best leave more partial answers to merge, so of equals the fewest are taken.

    Args:
        heads: blocks a split has: batches x heads of K and V (x the queries that have a block of their own).
        n: keys.
        multiprocessors: how many blocks run at a time: the GPU's multiprocessors, times the blocks that one of them holds.
        step: keys of a tile, Bc.
        most: splits at most.

    Returns:
        Splits, 1 to ``most``, none of them without a tile unless n is 0.

    Raises:
        ValueError: ``n`` is negative, or another argument is not 1 or more.

    >>> choose_splits(32, 4096, 132, 256)    # 32 heads leave 100 of 132 multiprocessors idle; 4 splits of each, 4
    4
    >>> choose_splits(512, 4096, 132, 256)   # here the heads alone keep them busy
    1
    """
    for name, value in {"heads": heads, "multiprocessors": multiprocessors, "step": step, "most": most}.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be 1 or more")
    if n < 0:
        raise ValueError(f"n={n} must be 0 or more")
    tiles = max(1, -(-n // step))
    best, best_time = 1, float("inf")
    for asked in range(1, min(most, tiles) + 1):
        each = -(-tiles // asked)
        splits = -(-tiles // each)  # with so many tiles each, the others would have none
        time = -(-heads * splits // multiprocessors) * (each + START)
        if time < best_time:
            best, best_time = splits, time
    return best


START = 1.0
"""What a block takes to begin and to merge, in tiles: measured on an H200, where it is 1 to 3 microseconds."""
