"""Every kernel on the processor: right against float64, the same bits in three orders, and nothing to report."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from zoo.oracles import ORACLES, expected, kernels, random_cases

from flashviz.cuda import cpu, find
from flashviz.cuda.cpu_build import build
from flashviz.cuda.cpu_library import ORDERS, CpuLibrary, load

if not cpu.status().usable:
    pytest.skip("no C++ compiler is here: pip install ziglang", allow_module_level=True)

FEW, MANY = 6, 100


def library_of(plans: list[Any], *, check: bool = False) -> tuple[CpuLibrary, list[str]]:
    """One library with all instantiations, so that a file is compiled once."""
    instances = sorted({plan.instance for plan in plans})
    return load(build(plans[0].source.assembled, instances, check=check).path), instances


def test_every_kernel_has_an_oracle() -> None:
    assert {function for _, function in kernels()} - set(ORACLES) == set()


def close(got: np.ndarray, want: np.ndarray) -> bool:
    """float32 against float64: rounding of sums of up to 70 products of normal numbers, with slack; -inf where -inf is due."""
    same = np.isneginf(got) == np.isneginf(want)
    finite = np.isfinite(want)
    return bool(same.all() and np.allclose(got[finite], want[finite], rtol=3e-5, atol=1e-5))


def run(file: str, function: str, count: int, seed: int) -> None:
    cases = list(random_cases(file, function, count, seed))
    library, instances = library_of([plan for _, plan in cases])
    for case, plan in cases:
        index = instances.index(plan.instance)
        results = []
        for order in ORDERS:
            outcome, outputs = cpu.launch_once(library, plan, index=index, order=order, seed=seed, poison=True)
            assert outcome.fault is None, (case, order, outcome.fault)
            results.append(outputs)
        want = expected(find(file, function), case, plan.arguments)
        assert set(want) == set(plan.outputs)
        for name, value in want.items():
            assert close(results[0][name], value), (case, name)
            for other in results[1:]:
                assert results[0][name].tobytes() == other[name].tobytes(), (case, name)


@pytest.mark.parametrize(("file", "function"), kernels())
def test_right_in_every_order(file: str, function: str) -> None:
    run(file, function, FEW, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("file", "function"), kernels())
def test_right_in_every_order_at_many_sizes(file: str, function: str) -> None:
    run(file, function, MANY, 2)


def checked(file: str, function: str, count: int, seed: int) -> None:
    cases = list(random_cases(file, function, count, seed))
    library, instances = library_of([plan for _, plan in cases], check=True)
    for number, (case, plan) in enumerate(cases):
        order = ORDERS[number % 3]
        outcome, _ = cpu.launch_once(
            library, plan, index=instances.index(plan.instance), order=order, seed=seed, check=True, poison=True
        )
        assert outcome.fault is None, (case, order, outcome.fault)
        assert not outcome.unwritten, (case, order, outcome.unwritten)


@pytest.mark.parametrize(("file", "function"), kernels())
def test_nothing_to_report(file: str, function: str) -> None:
    checked(file, function, FEW, 3)


@pytest.mark.slow
@pytest.mark.parametrize(("file", "function"), kernels())
def test_nothing_to_report_at_many_sizes(file: str, function: str) -> None:
    checked(file, function, MANY, 4)


def test_a_wrong_kernel_is_not_right(tmp_path: Any) -> None:
    """The comparison above can fail: the division left out, and one barrier deleted."""
    text = find("flash_attention_2").text
    for old, new in (
        ("Oi[r][x] / li[r];", "Oi[r][x];"),
        ("__syncthreads();  // Sij holds", ";  // Sij holds"),
    ):
        assert old in text
        path = tmp_path / "wrong.cu"
        path.write_text(text.replace(old, new))
        with pytest.raises(AssertionError):
            run(str(path), "flash_attention_2", 2, 1)
