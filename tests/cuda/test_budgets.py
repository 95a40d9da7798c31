"""The gate of tools/budgets.py can fail: on a kernel without a budget, above its budget, that spills, and that does not compile."""

from __future__ import annotations

from pathlib import Path

import pytest
from zoo.oracles import every_file, kernels

import budgets
from flashviz.cuda.nvrtc import NvrtcMissingError, library_path

try:
    library_path()
except NvrtcMissingError as error:
    pytest.skip(str(error), allow_module_level=True)


def test_every_kernel_has_a_budget() -> None:
    assert {function for _, function in kernels(every_file())} - set(budgets.BUDGETS) == set()


def costs(body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: budgets.Budget | None) -> list[str]:
    """What is wrong with a kernel, at one architecture."""
    path = tmp_path / "k.cu"
    path.write_text(f"// @kernel k\n// @arch 80\n__global__ void k(float* y, int n) {{ {body} }}\n")
    monkeypatch.setattr(budgets, "ARCHS", (75, 80))
    monkeypatch.setattr(budgets, "BUDGETS", {} if budget is None else {"k": budget})
    lines, wrong = budgets.costs(str(path))
    assert len(lines) == 1
    return wrong


def test_the_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = budgets.Budget(255, 255, 232_448)
    body = "__shared__ float s[99]; s[threadIdx.x] = n; __syncthreads(); y[threadIdx.x] = s[98 - threadIdx.x];"
    assert costs(body, tmp_path, monkeypatch, large) == []
    (off, on) = costs(body, tmp_path, monkeypatch, None)
    assert "sm_80, tracing off: k has no budget in tools/budgets.py" in off
    assert "tracing on" in on
    wrong = costs(body, tmp_path, monkeypatch, budgets.Budget(1, 255, 232_448))
    assert len(wrong) == 1
    assert "tracing off: k uses" in wrong[0]
    assert "registers; its budget is 1" in wrong[0]
    assert (
        "k uses 396 bytes of shared memory; its budget is 395"
        in costs(body, tmp_path, monkeypatch, budgets.Budget(255, 255, 395))[0]
    )
    assert "is undefined" in costs("y[0] = m;", tmp_path, monkeypatch, large)[0]
    spilling = "float a[200]; for (int i = 0; i < 200; ++i) a[i] = y[i * n]; for (int i = 0; i < 200; ++i) y[a[i] < 0 ? 0 : i] = a[(i * n) % 200];"
    assert any("bytes of stack" in line for line in costs(spilling, tmp_path, monkeypatch, large))
    allowed = costs(spilling, tmp_path, monkeypatch, budgets.Budget(255, 255, 232_448, spilled=10_000))
    assert allowed
    assert all("tracing off" in line for line in allowed), "nothing may spill without tracing"
