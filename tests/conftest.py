"""What all tests share: `root`, and nbval's missing check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import never_executed

# A machine that is busy is no failure: pytest-timeout bounds each test.
settings.register_profile("flashviz", deadline=None)
settings.load_profile("flashviz")

NO_BROWSER = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.is_registered(never_executed):
        config.pluginmanager.register(never_executed)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = [
        report for report in terminalreporter.stats.get("skipped", []) if "Chromium is missing" in str(report.longrepr)
    ]
    terminalreporter.config.stash[NO_BROWSER] = len(skipped)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    # After pytest's own summary: the last line that is seen.
    count = config.stash.get(NO_BROWSER, 0)
    if count:
        print(
            f"{count} browser tests were skipped: Chromium is missing. On Debian and Ubuntu: apt-get install chromium"
        )


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the repository."""
    return Path(__file__).resolve().parent.parent
