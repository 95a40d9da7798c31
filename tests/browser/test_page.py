"""The page in Chromium: opened from a file, and as a cell's output in JupyterLab."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playing import made
from playwright.sync_api import expect
from watching import Watched, every_control, plays_to_the_end, tween_moves, watch

import flashviz as fv


@pytest.fixture(scope="module")
def run() -> Any:
    return made()


@pytest.fixture(scope="module")
def file(run: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fv.save(run, tmp_path_factory.mktemp("page") / "x.html")


class Opened:
    """A file opened in Chromium; whatever it logs and asks for is noted."""

    def __init__(self, browser: Any, file: Path, **context: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1366, "height": 768}, **context})
        self.context.set_default_timeout(30_000)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(file.as_uri())

    def quiet(self, file: Path) -> None:
        assert self.said == []
        assert self.asked == [file.as_uri()]


@pytest.fixture
def opened(browser: Any) -> Iterator[Any]:
    contexts = []

    def open_file(file: Path, **context: Any) -> Opened:
        contexts.append(Opened(browser, file, **context))
        return contexts[-1]

    yield open_file
    for one in contexts:
        one.context.close()


def test_a_saved_page_plays_without_a_kernel(opened: Any, file: Path, run: Any) -> None:
    shown = opened(file)
    page = shown.page
    player = watch(page, page.locator(".fv-page"), run)
    every_control(player)
    tween_moves(player)
    plays_to_the_end(player)
    play = player.root.locator(".fv-play")
    play.click()
    expect(play).to_have_attribute("aria-label", "Pause")
    expect(player.picture).to_have_attribute("data-index", "0")
    play.click()
    expect(play).to_have_attribute("aria-label", "Play")
    handle = player.root.get_by_role("slider", name="Step")
    handle.focus()
    for key, position in [("Home", 0), ("ArrowRight", 1), ("End", 18)]:
        page.keyboard.press(key)
        player.shows(position)
    track = handle.bounding_box()
    page.mouse.move(track["x"] + track["width"] - 5, track["y"] + track["height"] / 2)
    page.mouse.down()
    for part in (90, 20, 80, 40):
        page.mouse.move(track["x"] + track["width"] * part / 100, track["y"] + track["height"] / 2)
    page.mouse.up()
    player.shows(int(handle.input_value()))
    assert 5 <= int(handle.input_value()) <= 9
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is cut off"
    assert page.evaluate("document.querySelector('.fv-pic').getBoundingClientRect().bottom <= innerHeight")
    shown.quiet(file)


def test_dark_still_and_by_keyboard(opened: Any, file: Path, run: Any) -> None:
    shown = opened(file, color_scheme="dark", reduced_motion="reduce", device_scale_factor=2)
    page = shown.page
    player = watch(page, page.locator(".fv-page"), run)
    assert player.picture.bounding_box()["width"] == pytest.approx(0.64 * 768, abs=2)
    reached = []
    for _ in range(40):
        page.keyboard.press("Tab")
        here = page.evaluate(
            "() => { const e = document.activeElement; return e.getAttribute('aria-label') || e.textContent }"
        )
        if reached and here == reached[0]:
            break
        reached.append(here)
    wanted = "Play|« First|‹ Back|Next ›|Last »|Step|Go to step|Speed|Steps|Python|CUDA|Numbers"
    assert reached[:12] == wanted.split("|")
    assert sum("go to its next step" in name for name in reached) == 7
    for position, key in enumerate(["Enter", "Space", "Enter"], 1):
        player.button("Next ›").focus()
        page.keyboard.press(key)
        player.shows(position)
        assert player.root.evaluate("r => r.querySelector('.fv-pic svg').getAnimations({subtree: true}).length") == 0
    assert player.low_contrast() == []
    for name in ("CUDA", "Numbers"):
        player.button(name).click()
        expect(player.button(name)).to_have_attribute("aria-pressed", "true")
        assert player.low_contrast() == []
    shown.quiet(file)


@pytest.mark.parametrize("width", [700, 360])
def test_a_narrow_window(opened: Any, file: Path, run: Any, width: int) -> None:
    shown = opened(file, viewport={"width": width, "height": 900})
    watch(shown.page, shown.page.locator(".fv-page"), run).shows(0)
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= width


def test_one_step(opened: Any, tmp_path: Path, run: Any) -> None:
    file = fv.save(run, tmp_path / "one.html", steps=[7])
    shown = opened(file)
    player = Watched(shown.page, shown.page.locator(".fv-page"), run, (7,))
    player.shows(0)
    player.root.locator(".fv-play").click()
    expect(player.root.locator(".fv-play")).to_have_attribute("aria-label", "Play")
    player.shows(0)
    shown.quiet(file)


def test_pages_in_a_notebook_do_not_disturb_each_other(lab: Any, run: Any) -> None:
    setup = (
        "import numpy as np\nimport flashviz as fv\nrng = np.random.default_rng(26)\n"
        "Q, K, V = (rng.standard_normal((8, 4), dtype=np.float32) for _ in range(3))\n"
        "run = fv.flash_attention_2(Q, K, V, Br=4, Bc=4, device='numpy')"
    )
    page = lab.open([setup, "page = fv.page(run)\npage", "page", "fv.play(run)"])
    lab.run_all(page)
    roots = page.locator(".fv-page")
    expect(roots).to_have_count(2)
    one, two = (watch(page, roots.nth(n), run) for n in range(2))
    widget = watch(page, page.locator(".fv-player:not(.fv-page)"), run)
    assert roots.nth(0).get_attribute("id") != roots.nth(1).get_attribute("id")
    every_control(two)
    one.shows(0)
    widget.shows(0)
    one.type_step(4)
    one.shows(4)
    widget.button("Next ›").click()
    widget.shows(1)
    one.shows(4)
    one.root.get_by_role("listbox", name="Steps").focus()
    page.keyboard.press("b")
    assert len(lab.cells(page)) == 4, "a letter inserts no cell"
    assert lab.console_errors == []
    assert lab.outside_requests == []
