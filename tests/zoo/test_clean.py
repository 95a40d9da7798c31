"""Every kernel on the processor: right against float64, the same bits in three orders, and nothing to report."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from zoo.oracles import ORACLES, every_file, expected, files, gpu_files, kernels, random_cases

from flashviz.bfloat16 import from_bfloat16
from flashviz.checks.kernel_cases import Case, make_plan
from flashviz.checks.kernels import check
from flashviz.cuda import ArgumentError, LaunchError, cpu, find
from flashviz.cuda.cpu_build import build
from flashviz.cuda.cpu_library import ORDERS, CpuLibrary, load
from flashviz.cuda.launching import Plan, check_arch
from flashviz.cuda.scalars import BFLOAT16

if not cpu.status().usable:
    pytest.skip("no C++ compiler is here: pip install ziglang", allow_module_level=True)

FEW, MANY = 6, 100


def library_of(plans: list[Any], *, check: bool = False) -> tuple[CpuLibrary, list[str]]:
    """One library with all instantiations, so that a file is compiled once."""
    instances = sorted({plan.instance for plan in plans})
    return load(build(plans[0].source.assembled, instances, check=check).path), instances


def test_every_kernel_has_an_oracle() -> None:
    assert {function for _, function in kernels()} - set(ORACLES) == set()


def test_what_the_processor_cannot_run_it_refuses() -> None:
    """No test below is left out in silence: what is not in kernels() says at each door why."""
    assert set(files()) | set(gpu_files()) == set(every_file())
    for file, function in kernels(gpu_files()):
        source = find(file, function)
        assert source.header.exact, f"{function}: all kernels of a file run on the processor, or none"
        assert 'line 1 "hopper.cuh"' in source.assembled
        report = check(file, function)
        assert not report.ok
        assert f"{function} cannot be run on the processor: TMA and wgmma" in report.problem
        with pytest.raises(LaunchError, match="cannot be run on the processor"):
            check_arch(source, cpu.LIMITS)
    for file in files():
        assert 'line 1 "hopper.cuh"' not in find(file).assembled, f"{file}.cu needs a line `// @arch 90a`"


def close(got: np.ndarray, want: np.ndarray | None, slack: float = 1e-5) -> bool:
    """float32 against float64: rounding of sums of up to 70 products of normal numbers, with slack; -inf where -inf is due.

    Where nothing is due, nothing is written: the NaN that was there before still is.
    """
    if want is None:
        return bool(np.isnan(got).all())
    same = np.isneginf(got) == np.isneginf(want)
    finite = np.isfinite(want)
    return bool(same.all() and np.allclose(got[finite], want[finite], rtol=3 * slack, atol=slack))


def slack_of(plan: Plan, name: str) -> float:
    """What rounding may do: P, and O at the end, are rounded to 16 bits where Q, K and V have them; sums and L never are."""
    types = set(plan.types.values())
    if name == "L" or name == "Ls" or not types & {"half", *BFLOAT16}:
        return 1e-5
    return 2.0**-7 if types & set(BFLOAT16) else 2.0**-10  # twice the half of a last bit, of numbers up to 4


def numbers(plan: Plan, name: str, values: np.ndarray) -> np.ndarray:
    """An output as numbers: of bfloat16 there are the bits."""
    return from_bfloat16(values) if plan.types[name] in BFLOAT16 else values


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
            assert close(numbers(plan, name, results[0][name]), value, slack_of(plan, name)), (case, name)
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
        nothing_due = {n for n, want in expected(find(file, function), case, plan.arguments).items() if want is None}
        assert set(outcome.unwritten) == nothing_due, (case, order, outcome.unwritten)


@pytest.mark.parametrize(("file", "function"), kernels())
def test_nothing_to_report(file: str, function: str) -> None:
    checked(file, function, FEW, 3)


@pytest.mark.slow
@pytest.mark.parametrize(("file", "function"), kernels())
def test_nothing_to_report_at_many_sizes(file: str, function: str) -> None:
    checked(file, function, MANY, 4)


@pytest.mark.parametrize("causal", [0, 1])
def test_the_aligned_rung_5(causal: int) -> None:
    """No mask and no tail in it: right, and nothing to report, at sizes that are multiples of the tiles; refused at others."""
    file = "flash_attention_2_tuned"
    template = {"T": "half", "Br": 32, "Bc": 16, "D": 32, "Warps": 1, "Stages": 2, "Causal": causal, "Aligned": 1}
    for nq, nk in ((64, 64), (32, 96), (64, 16)):
        case = Case(file, template, {"B": 1, "Hq": 2, "Hkv": 1, "Nq": nq, "Nk": nk})
        plan = make_plan(find(file).path, case)
        want = expected(find(file), case, plan.arguments)
        for looked_at, order in ((False, "random"), (True, "reverse")):
            outcome, outputs = cpu.launch_once(
                cpu.compile_plan(plan, check=looked_at), plan, order=order, check=looked_at, poison=True
            )
            assert outcome.fault is None, (case, outcome.fault)
            assert all(close(outputs[name], value, slack_of(plan, name)) for name, value in want.items()), case
    with pytest.raises(ArgumentError, match="requires Aligned"):
        make_plan(find(file).path, Case(file, template, {"B": 1, "Hq": 2, "Hkv": 1, "Nq": 64, "Nk": 65}))


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
