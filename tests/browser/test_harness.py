"""The harness itself: a widget is shown, moved by hand, and the kernel answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

SLIDER = [
    "import ipywidgets as widgets\n"
    "slider = widgets.IntSlider(max=9, description='step')\n"
    "answer = widgets.HTML('nothing yet')\n"
    "slider.observe(lambda change: setattr(answer, 'value', f'<b>step {change.new} of 9</b>'), 'value')\n"
    "widgets.VBox([slider, answer])",
]


def test_a_slider_is_shown_and_the_kernel_answers(both: Any) -> None:
    page = both.open(SLIDER)
    both.run_all(page)
    answer = page.locator(".jp-OutputArea .widget-html-content")
    expect(answer).to_have_text("nothing yet")
    box = page.locator(".widget-readout")
    box.click()
    box.fill("7")
    box.press("Enter")
    expect(answer).to_have_text("step 7 of 9")
    assert both.value(page, "slider.value") == "7"
    assert both.console_errors == []
    assert both.outside_requests == []


def test_a_cell_that_raises_fails_the_run(lab: Any) -> None:
    page = lab.open(["x = 1", "1 / 0"])
    with pytest.raises(AssertionError, match="cell 1: ZeroDivisionError"):
        lab.run_all(page)
    lab.run_all(page, allow_errors=True)


def test_an_error_in_the_console_is_collected(lab: Any) -> None:
    page = lab.open(["from IPython.display import Javascript\nJavascript('console.error(\"planted\")')"])
    lab.run_all(page)
    expect(page.locator(".jp-Notebook")).to_be_visible()
    assert any("planted" in error for error in lab.console_errors)


def test_the_first_chapter_opens(lab: Any, root: Path) -> None:
    page = lab.open(root / "notebooks" / "00_start_here.ipynb")
    lab.run_all(page)
    assert lab.console_errors == []
    assert lab.outside_requests == []
