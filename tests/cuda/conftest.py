"""Fixtures: a fake CuPy in place of the real one, and a status that is asked anew."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flashviz.cuda import gpu

_spec = importlib.util.spec_from_file_location("fake_cupy", Path(__file__).with_name("fake_cupy.py"))
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules["fake_cupy"] = _module
_spec.loader.exec_module(_module)


@pytest.fixture(autouse=True)
def fresh_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees another's status, compiled kernels or broken GPU."""
    monkeypatch.setattr(gpu, "_status", None)
    monkeypatch.setattr(gpu, "_functions", {})
    monkeypatch.setattr(gpu, "_broken", "")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``fake(driver=..., count=...)`` puts a CuPy made of NumPy in place and returns what it recorded."""

    def install(**what: Any) -> Any:
        machine = _module.Machine(**what)
        module: ModuleType = _module.make(machine)
        monkeypatch.setitem(sys.modules, "cupy", module)
        return machine

    return install
