"""What all tests share: `root`, and nbval's missing check."""

from __future__ import annotations

from pathlib import Path

import never_executed
import pytest


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.is_registered(never_executed):
        config.pluginmanager.register(never_executed)


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the repository."""
    return Path(__file__).resolve().parent.parent
