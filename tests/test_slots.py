"""Slots and values: sizes, bytes and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flashviz import Block, Slot, Values
from flashviz.slots import shape_text


@pytest.mark.parametrize(
    ("shape", "dtype", "nbytes"),
    [
        ((4, 8), "float32", 128),
        ((4, 8), "float16", 64),
        ((), "float64", 8),
        ((0, 3), "float32", 0),
        ((7,), "int8", 7),
        ((4, 8), "bfloat16", 64),
    ],
)
def test_bytes(shape, dtype, nbytes):
    assert Slot("x", "shared", "block", shape, dtype).nbytes == nbytes


def test_memories_are_open_and_scopes_are_not():
    slot = Slot("x", "tensor memory", "warp", (2,))
    assert not slot.shared_by_grid
    assert Slot("x", "hbm", "grid", (2,)).shared_by_grid
    with pytest.raises(ValueError, match="slot 'x': scope 'galaxy' is none of grid, block, warp, thread"):
        Slot("x", "hbm", "galaxy", (2,))


def test_what_is_refused():
    with pytest.raises(ValueError, match="a slot needs a name"):
        Slot("", "hbm", "grid", (2,))
    with pytest.raises(ValueError, match=r"slot 'x': shape 2 × -1 has a negative length"):
        Slot("x", "hbm", "grid", (2, -1))
    with pytest.raises(TypeError, match="float31"):
        Slot("x", "hbm", "grid", (2,), "float31")
    with pytest.raises(AttributeError):
        Slot("x", "hbm", "grid", (2,)).name = "y"


@given(
    hnp.arrays(
        st.sampled_from(["<f2", "<f4", ">f4", "<f8", ">f8", "|i1", ">i4", "<i8", "|b1"]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    )
)
def test_values_keep_every_number(array):
    for given_array in (array, array.T, array[::-1] if array.ndim else array):
        values = Values.of(given_array)
        assert values.shape == given_array.shape
        assert values.dtype == given_array.dtype.name
        assert np.array_equal(values.array, given_array, equal_nan=array.dtype.kind == "f")
        assert values == Values.of(given_array.copy())
        assert hash(values) == hash(Values.of(given_array.copy()))
        assert not values.array.flags.writeable


def test_values_of_a_view_do_not_follow_it():
    array = np.zeros(3)
    values = Values.of(array)
    array[:] = 1
    assert values.array.tolist() == [0, 0, 0]


def test_values_that_do_not_fit_their_shape():
    with pytest.raises(ValueError, match="12 bytes where float32 2 × 2 takes 16"):
        Values("float32", (2, 2), b"x" * 12)
    assert "data" not in repr(Values("float32", (1,), b"\0" * 4))


def test_blocks_and_shapes_in_words():
    assert Block(tile=3) == (0, 0, 3) == Block(0, 0, 3)
    assert shape_text((4, 8)) == "4 × 8"
    assert shape_text(()) == "1"


def test_bfloat16_is_kept_as_bits_and_read_as_float32():
    kept = Values.of(np.array([[1 / 3, -np.inf], [0.0, 65536.0]], dtype="float32"), "bfloat16")
    assert (kept.dtype, len(kept.data)) == ("bfloat16", 8)
    assert kept.array.dtype == np.float32
    assert np.array_equal(kept.array, np.array([[0.333984375, -np.inf], [0.0, 65536.0]]))
    with pytest.raises(ValueError, match="read-only"):
        kept.array[0, 0] = 1
    with pytest.raises(ValueError, match="4 bytes where bfloat16 1 takes 2"):
        Values("bfloat16", (), bytes(4))
