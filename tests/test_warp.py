"""Lanes and banks: every element has one place, the product comes out right from the registers, and passes are counted as banks serve."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashviz.warp import BANKS, LANES, LAYOUTS, SHAPES, bank_of, chunk_address, fragment, wavefronts, words_by_bank


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("operand", ["a", "b", "d"])
def test_every_element_has_a_place_of_its_own(operand: str, shape: str) -> None:
    found = fragment(operand, shape)
    places = {tuple(x) for x in np.stack([found.lane, found.register, found.place], -1).reshape(-1, 3).tolist()}
    assert len(places) == found.lane.size
    assert found.lane.min() == found.register.min() == found.place.min() == 0
    assert found.lane.max() == LANES - 1
    assert found.lane.size == LANES * found.registers * (found.place.max() + 1)


def test_the_places_of_the_manual() -> None:
    """PTX ISA, matrix fragments of mma.m16n8k16 and mma.m16n8k8 (.tf32): the elements of lane 13, group 3, member 1."""
    assert fragment("a").of_lane(13) == [
        *[(0, 0, 3, 2), (0, 1, 3, 3), (1, 0, 11, 2), (1, 1, 11, 3)],
        *[(2, 0, 3, 10), (2, 1, 3, 11), (3, 0, 11, 10), (3, 1, 11, 11)],
    ]
    assert fragment("b").of_lane(13) == [(0, 0, 2, 3), (0, 1, 3, 3), (1, 0, 10, 3), (1, 1, 11, 3)]
    assert fragment("d").of_lane(13) == [(0, 0, 3, 2), (1, 0, 3, 3), (2, 0, 11, 2), (3, 0, 11, 3)]
    assert fragment("a", "m16n8k8").of_lane(13) == [(0, 0, 3, 1), (1, 0, 11, 1), (2, 0, 3, 5), (3, 0, 11, 5)]
    assert fragment("b", "m16n8k8").of_lane(13) == [(0, 0, 1, 3), (1, 0, 5, 3)]


def test_two_accumulators_side_by_side_are_the_next_products_operand() -> None:
    """What lets P stay in registers: scores of 16 keys, d of two products, are held like a of P V, two neighbours to a register."""
    d, a = fragment("d"), fragment("a")
    assert np.array_equal(np.hstack([d.lane, d.lane]), a.lane)
    pair = np.hstack(
        [d.register // 2, d.register // 2 + 2]
    )  # d[0], d[1] → a[0]; d[2], d[3] → a[1]; of the second product a[2], a[3]
    assert np.array_equal(pair, a.register)
    assert np.array_equal(np.hstack([d.register % 2] * 2), a.place)


@pytest.mark.parametrize("n", [8, 16, 72, 256])
def test_a_warpgroup_holds_its_accumulator_as_the_kernels_say(n: int) -> None:
    """kernels/include/wgmma.cuh and write_result of kernels/hopper_steps.cu, thread by thread."""
    d = fragment("d", f"m64n{n}k16")
    assert (d.shape, d.registers, int(d.lane.max())) == ((64, n), n // 2, 127)
    for t in range(128):
        for i in range(n // 2):
            row, column = t // 32 * 16 + t % 32 // 4 + i // 2 % 2 * 8, t % 4 * 2 + i // 4 * 8 + i % 2
            assert (d.lane[row, column], d.register[row, column]) == (t, i)


def test_a_warpgroup_is_four_warps_one_below_the_other() -> None:
    for operand in "ad":
        one, four = fragment(operand), fragment(operand, "m64n8k16")
        assert np.array_equal(four.lane, np.concatenate([one.lane + 32 * warp for warp in range(4)]))
        assert np.array_equal(four.register, np.concatenate([one.register] * 4))
        assert np.array_equal(four.place, np.concatenate([one.place] * 4))


def test_a_warpgroups_scores_are_its_next_left_side() -> None:
    """16 columns of d, packed by twos, are the four registers of a: P needs no exchange."""
    d, a = fragment("d", "m64n16k16"), fragment("a", "m64n16k16")
    assert np.array_equal(d.lane, a.lane)
    assert np.array_equal(d.register // 2, a.register)
    assert np.array_equal(d.register % 2, a.place)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="'b' of 'm64n16k16': a warpgroup's product reads it from shared memory"):
        fragment("b", "m64n16k16")
    for shape in ("m64n12k16", "m64n264k16", "m64n0k16"):
        with pytest.raises(ValueError, match=f"'d' of '{shape}': operands are a, b, d, shapes .*m64nNk16"):
            fragment("d", shape)
    with pytest.raises(ValueError, match=r"'c' of 'm16n8k16': operands are a, b, d, shapes m16n8k16, m16n8k8"):
        fragment("c")
    with pytest.raises(ValueError, match="of 'm8n8k4'"):
        fragment("a", "m8n8k4")
    with pytest.raises(ValueError, match="size=2: a lane takes 4, 8 or 16 bytes"):
        wavefronts([0], 2)
    with pytest.raises(ValueError, match="layout='odd' is none of plain, padded, swizzled"):
        chunk_address(0, 0, 64, "odd")
    with pytest.raises(ValueError, match="d=48: a swizzled row is a multiple of 64 elements, or 8, 16 or 32"):
        chunk_address(0, 0, 48, "swizzled")
    with pytest.raises(ValueError, match="d=12: a plain row is a multiple of 8"):
        chunk_address(0, 0, 12, "plain")


# -- banks -----------------------------------------------------------------------------------------------------------------


def served(addresses: list[int], size: int) -> int:
    """The same count by doing it: each pass gives every bank one word, until nobody waits."""
    lanes = 32 * 4 // size
    passes = 0
    for first in range(0, len(addresses), lanes):
        waiting = {(a + k) // 4 for a in addresses[first : first + lanes] for k in range(size)}
        while waiting:
            given: dict[int, int] = {}
            for word in sorted(waiting):
                given.setdefault(word % 32, word)
            waiting -= set(given.values())
            passes += 1
    return passes


@given(st.lists(st.integers(0, 4095), min_size=32, max_size=32), st.sampled_from([4, 8, 16]))
def test_passes_are_what_serving_every_bank_takes(words: list[int], size: int) -> None:
    addresses = [word * size for word in words]
    assert wavefronts(addresses, size) == served(addresses, size)


def test_well_known_accesses() -> None:
    assert wavefronts([4 * n for n in range(32)]) == 1
    assert wavefronts([8 * n for n in range(32)]) == 2  # every second word
    assert wavefronts([0] * 32) == 1  # a broadcast
    assert wavefronts([16 * n for n in range(32)], 16) == 4  # 512 bytes, 128 a pass
    assert wavefronts([4 * 33 * n for n in range(32)]) == 1  # a column of a tile with 33 words a row
    assert [bank_of(a) for a in (0, 4, 124, 128)] == [0, 1, 31, 0]


@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ldmatrix_on_the_three_layouts(d: int, layout: str) -> None:
    """Question 13: eight rows of the same 16 bytes collide in all of a plain tile's chunks, and in none of the others'."""
    for chunk in range(d // 8):
        read = [chunk_address(row, chunk, d, layout) for row in range(8, 16)]
        assert wavefronts(read, 16) == (8 if layout == "plain" else 1)
        assert max(words_by_bank(read, 16)) == (8 if layout == "plain" else 1)


@pytest.mark.parametrize("d", [16, 32])
def test_short_rows_are_swizzled_without_conflicts_too(d: int) -> None:
    for chunk in range(d // 8):
        assert wavefronts([chunk_address(row, chunk, d, "swizzled") for row in range(8)], 16) == 1
        assert wavefronts([chunk_address(row, chunk, d, "plain") for row in range(8)], 16) == d // 8


@pytest.mark.parametrize("d", [16, 32, 64, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_give_each_chunk_a_place_of_its_own(d: int, layout: str) -> None:
    places = [chunk_address(row, chunk, d, layout) for row in range(64) for chunk in range(d // 8)]
    assert len(set(places)) == len(places)
    assert all(place % 16 == 0 for place in places)
    assert max(places) + 16 <= 64 * (2 * d + 16 * (layout == "padded"))
    assert len(words_by_bank(places, 16)) == BANKS
