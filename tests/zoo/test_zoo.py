"""The zoo: every planted fault is reported, as what it is, with the right line."""

from __future__ import annotations

from pathlib import Path

import pytest
from zoo.faults import FAULTS, Fault
from zoo.oracles import files

from flashviz.checks.kernel_report import NAMES
from flashviz.checks.kernels import check
from flashviz.cuda import cpu

if not cpu.status().usable:
    pytest.skip("no C++ compiler is here: pip install ziglang", allow_module_level=True)

SAMPLE = {
    "barrier for half of the threads",
    "tail of V not set to 0",
    "no tail mask on O",
    "heads that share O",
    "half of the lanes shuffle",
    "a wait for all groups but one",
    "half a row of 16 bytes further",
}


def caught(fault: Fault, tmp_path: Path) -> None:
    path = tmp_path / f"{fault.file}.cu"
    path.write_text(fault.source(), encoding="utf-8")
    report = check(path, answers=False, seconds=2)
    assert report.problem == "", report
    found = [
        finding
        for finding in report.findings
        if finding.kind == fault.kind and (not fault.array or finding.array == fault.array)
    ]
    assert found, report
    if fault.kind != "missing":  # which no line does
        places = {place for finding in found for side in finding.places for place in side}
        assert any(file == path.name and line in fault.lines for file, line in places), (fault.lines, report)
    for finding in found:
        assert finding.element.startswith(finding.array) or fault.kind in (
            "barrier",
            "crash",
            "wild",
            "endless",
            "trap",
        )


@pytest.mark.parametrize("fault", [f for f in FAULTS if f.name in SAMPLE], ids=lambda f: f.name)
def test_a_fault_is_caught(fault: Fault, tmp_path: Path) -> None:
    caught(fault, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [f for f in FAULTS if f.name not in SAMPLE], ids=lambda f: f.name)
def test_every_fault_is_caught(fault: Fault, tmp_path: Path) -> None:
    caught(fault, tmp_path)


def test_every_file_and_kind_is_here() -> None:
    assert len(FAULTS) >= 25
    assert {fault.name for fault in FAULTS} >= SAMPLE
    for file in files():
        assert sum(fault.file == file for fault in FAULTS) >= 2, (
            f"{file}.cu has no planted faults in tests/zoo/faults.py"
        )
    # "order" and "shared" cannot be planted in a kernel of the package by one edit; tests/checks/test_kernels.py has them.
    assert {fault.kind for fault in FAULTS} == set(NAMES) - {"order", "shared"}
