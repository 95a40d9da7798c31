"""The picture of FlashAttention-3: every slot has a place of its own, copies are on their way until somebody waits."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from view.pictures import by_id
from view.test_layout import check

import flashviz as fv
from flashviz.slots import Block
from flashviz.view.layout import BOTTOM, LEFT, RIGHT, TOP
from flashviz.view.layouts.flash_attention_3 import layout
from flashviz.view.shapes import Rect


@pytest.mark.parametrize(("consumers", "stages", "heads"), [(2, 2, 1), (3, 3, 1), (2, 4, 2)])
def test_every_slot_has_a_place_of_its_own(consumers: int, stages: int, heads: int) -> None:
    x = np.random.default_rng(1).standard_normal((heads, 12, 4), "f4")
    run = fv.flash_attention_3(x, x, x, Br=6, consumers=consumers, stages=stages, device="numpy")
    assert run.recording is not None
    made = layout(run.recording, Block())
    slots = [s for s in run.recording.slots if not s.shared_by_grid or s.head == (0, 0)]
    assert set(made.boxes) == {s.name for s in slots}
    for box in made.boxes.values():
        assert box.x - box.w / 2 >= LEFT
        assert box.x + box.w / 2 <= RIGHT
        assert box.y - box.h / 2 - box.drop >= BOTTOM
        assert box.y + box.h / 2 <= TOP
    for one, two in combinations(made.boxes.values(), 2):
        apart = abs(one.x - two.x) - (one.w + two.w) / 2, abs(one.y - two.y) - (one.h + two.h) / 2
        assert max(apart) > 0
    registers = [s.name for s in slots if s.memory == "register"]
    assert len(registers) == 6 * consumers
    across = sorted(registers, key=lambda name: (-made.boxes[name].y, made.boxes[name].x))
    assert [name.split(" ")[1] for name in across] == [str(w) for w in range(1, consumers + 1) for _ in range(6)]


def test_a_copy_is_on_its_way_until_somebody_waits_for_it() -> None:
    x = np.random.default_rng(1).standard_normal((8, 4), "f4")
    run = fv.flash_attention_3(x, x, x, device="numpy")
    assert run.recording is not None
    labels = [step.label for step in run.recording.steps]
    asked = labels.index("block 0 · i = 0 · j = 1 · ask for Kj")
    used = labels.index("block 0 · w = 1 · i = 0 · j = 1 · fill Sij")
    for step in (asked, used - 1, used):
        fill = by_id(fv.scene(run, step, 1.0))["Kj[1].fill"]
        assert isinstance(fill, Rect)
        assert fill.hatched == (step < used)


@pytest.mark.parametrize(("consumers", "stages"), [(2, 2), (3, 3)])
def test_nothing_overlaps_and_all_is_inside(consumers: int, stages: int) -> None:
    x = np.random.default_rng(1).standard_normal((15, 4), "f4")
    run = fv.flash_attention_3(x, x, x, Br=6, consumers=consumers, stages=stages, causal=True, device="numpy")
    assert run.recording is not None
    for step in range(0, len(run.recording.steps), 3):
        check(run.recording, step)
