"""The ladder's table: its names, what is measured for which sizes, and that the kernels' files publish it."""

from __future__ import annotations

import pytest

import flashviz as fv
from flashviz import cuda, ladder
from flashviz.ladder import DECODE, PREFILL, Rung


def unpublished(rung: Rung) -> list[str]:
    """Template values that are measured and that no @instance of the rung's kernel has."""
    instances = cuda.find(rung.kernel).header.instances
    return [
        f"{rung.kernel}: D={d} {dict(values)}"
        for d, values in rung.measured.items()
        if not any({"D": d, **values}.items() <= instance.items() for instance in instances)
    ]


def test_what_is_measured_is_published_so_the_budgets_and_the_checks_see_it() -> None:
    first = 0  # the chapters' own kernels, which publish what their chapters launch
    assert [found for rung in PREFILL + DECODE if rung.name != first for found in unpublished(rung)] == []
    own = {"Br": 128, "Bc": 32, "Stages": 9}
    planted = Rung(9, "flash_attention_3", "", "float16", {64: PREFILL[-1].measured[64], 128: own})
    assert unpublished(planted) == ["flash_attention_3: D=128 {'Br': 128, 'Bc': 32, 'Stages': 9}"]


def test_both_dimensions_are_measured() -> None:
    assert [rung.label for rung in PREFILL + DECODE if set(rung.measured) != {64, 128}] == []


def test_blocks_that_have_a_multiprocessor_to_themselves() -> None:
    assert [ladder.rung(2, DECODE).each(128, Bc) for Bc in (64, 128)] == [2, 1]
    assert [rung.each(64, 128) for rung in DECODE] == [2, 2, 2]


@pytest.mark.parametrize("found", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_names_are_in_order_and_each_once(found: tuple[Rung, ...]) -> None:
    numbers = [rung.name for rung in found if isinstance(rung.name, int)]
    assert numbers == list(range(len(numbers)))
    assert len({rung.kernel for rung in found}) == len({rung.name for rung in found}) == len(found)
    types = [rung.dtype for rung in found]
    assert types == sorted(types, key=["float32", "float16"].index)  # a chart of the types does not go back


def test_which_rungs_another_function_runs() -> None:
    elsewhere = [rung for rung in PREFILL + DECODE if rung.function]
    assert [(rung.name, rung.function) for rung in elsewhere] == [(6, "flash_attention_3")]
    assert callable(fv.flash_attention_3)
    assert ladder.rung(6) is PREFILL[-1]
    for rung in PREFILL[:-1]:
        assert ladder.rung_to_run(rung.name) is rung
    with pytest.raises(ValueError, match=r"call fv.flash_attention_3\(Q, K, V, …\)"):
        ladder.rung_to_run(6)
    with pytest.raises(ValueError, match=r"rung=6 is none of 0, 1, 2$"):
        ladder.rung_to_run(6, DECODE)
