"""A pytest plugin beside nbval: a code cell that was never executed fails, where nbval alone would pass it."""

from __future__ import annotations

from typing import Any

import pytest


def never_executed(item: Any) -> bool:
    cell = getattr(item, "cell", None)
    return cell is not None and bool(cell.source.strip()) and cell.execution_count is None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    if never_executed(item):
        pytest.fail("this cell was never executed: run `make notebooks` and commit the outputs", pytrace=False)
