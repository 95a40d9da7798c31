"""A recording from a stranger in a real browser: its texts run nothing and break nothing, whatever a reader does."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import pytest
from browser.conftest import browser as browser
from browser.conftest import chromium as chromium
from view.strangers import evil

import flashviz as fv
from flashviz.view import panel
from flashviz.view.movie import movie_svg
from flashviz.view.page import Page
from flashviz.view.svg import frame_svg

pytestmark = pytest.mark.browser


class Watched:
    """A page, and what went wrong in it."""

    def __init__(self, browser: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1100, "height": 900})
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.dialogs: list[str] = []
        self.requests: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.dialogs.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def poke(self) -> None:
        """Point at everything, focus everything and click what can be clicked."""
        self.page.evaluate(
            """async () => {
                for (const e of [...document.querySelectorAll('*')]) {
                    for (const type of ['mouseover', 'mouseenter', 'focus', 'click', 'animationstart', 'load', 'error'])
                        if (e.closest('.fv-row') === null) e.dispatchEvent(new Event(type, {bubbles: false}));
                }
                await new Promise(done => setTimeout(done, 100));
            }"""
        )

    def hacked(self) -> Any:
        return self.page.evaluate("() => window.hacked ?? null")

    def count(self, selector: str) -> int:
        return int(self.page.locator(selector).count())

    def calm(self) -> None:
        assert self.hacked() is None
        assert self.errors == []
        assert self.dialogs == []
        assert [u for u in self.requests if not u.startswith(("file:", "about:", "data:"))] == []
        assert self.count("img, iframe, object, embed, link, base, form") == 0


@pytest.fixture
def watched(browser: Any) -> Iterator[Watched]:
    made = Watched(browser)
    yield made
    made.context.close()


def test_the_watch_sees_a_script_that_runs(watched: Watched) -> None:
    watched.page.set_content("<b onmouseover='window.hacked=1'>x</b>")
    watched.poke()
    with pytest.raises(AssertionError):
        watched.calm()


def test_pictures_and_panels(watched: Watched) -> None:
    recording = evil()
    every = range(len(recording.steps))
    pieces = [frame_svg(recording, n, f"p{n}") for n in every]
    pieces += [panel.numbers_html(recording, n) for n in every]
    pieces += [panel.code_html(s, panel.targets_of(recording, every)) for s in recording.code]
    pieces += [f"<style>{panel.STYLE}{panel.mark_css('scope', s)}</style>" for s in recording.steps]
    pieces += [f"<p>{escape(panel.where_text(s))}</p>" for s in recording.steps]
    pieces += [panel.legend_html(recording)]
    watched.page.set_content('<div class="fv-player scope">' + "".join(pieces) + '</div><p id="last">whole</p>')
    watched.poke()
    watched.calm()
    assert watched.count("body > div > svg") == len(recording.steps), "no picture ends early or swallows the next"
    assert watched.count("body > div > .fv-numbers") == len(recording.steps)
    assert watched.count("body > div > .fv-code") == len(recording.code)
    assert watched.count("body > div > .fv-legend") == 1
    assert watched.count("body > #last") == 1
    assert watched.count("script") == 0


def test_movie(watched: Watched, tmp_path: Path) -> None:
    target = fv.save(evil(), tmp_path / "x.svg")
    watched.page.goto(target.as_uri())
    watched.page.evaluate("() => document.getAnimations().length")
    watched.poke()
    watched.calm()
    assert watched.page.evaluate("() => document.documentElement.tagName") == "svg"
    assert watched.count("svg > g") == len(evil().steps)
    assert watched.count("script") == 0
    watched.page.goto("about:blank")
    text = movie_svg(evil(), range(4))
    watched.page.set_content(f"<div>{text}</div>")
    watched.poke()
    watched.calm()


def test_page(watched: Watched, tmp_path: Path) -> None:
    recording = evil()
    target = tmp_path / "x.html"
    target.write_text(Page(recording, name="fvp").document(), encoding="utf-8")
    watched.page.goto(target.as_uri())
    watched.page.locator(".fv-pic svg").wait_for()
    steps = len(recording.steps)
    assert watched.count(".fv-steps option") == steps
    assert watched.count("script") == 2, "the data and the player's own"
    tabs = watched.page.locator(".fv-tabs button")
    assert tabs.count() == len(recording.code) + 1
    for tab in range(tabs.count()):
        tabs.nth(tab).click()
        watched.poke()
        for step in range(0, steps, 5):
            watched.page.locator(".fv-steps").select_option(index=step)
            assert watched.count(".fv-pic > svg") == 1
            watched.poke()
    watched.calm()
    assert watched.page.locator(".fv-steps option").nth(3).text_content() is not None


def test_a_file_of_a_hostile_name(watched: Watched, tmp_path: Path) -> None:
    folder = tmp_path / "a'b\" onload=window.hacked=1 <script>window.hacked=2<script>"
    folder.mkdir()
    for suffix in (".svg", ".html", ".json"):
        target = fv.save(evil(), folder / f"<img src=x onerror=window.hacked=3>{suffix}")
        assert target.exists()
    watched.page.goto((folder / "<img src=x onerror=window.hacked=3>.html").as_uri())
    watched.page.locator(".fv-pic svg").wait_for()
    watched.poke()
    watched.calm()


def test_the_browser_starts_the_tween_where_the_scene_does(watched: Watched) -> None:
    """What Chromium makes of the CSS: at the start, half and end of steps, boxes are where the scene has them."""
    from view.pictures import attention, by_id

    from flashviz.view.layout import LEFT, TOP
    from flashviz.view.scene import scene
    from flashviz.view.svg import css_id
    from flashviz.view.text import UNIT

    recording = attention((3, 2), (1, 1))
    for step in (2, 3, 5, 6, 9):
        watched.page.set_content(f'<div style="width:601.6px">{frame_svg(recording, step, "p")}</div>')
        for t in (0.0, 0.5, 1.0):
            watched.page.evaluate(
                """t => document.getAnimations().forEach(a => {
                    a.pause(); a.currentTime = Math.min(900 * t, a.effect.getComputedTiming().endTime - 0.001) })""",
                t,
            )
            places = watched.page.evaluate(
                """() => Object.fromEntries([...document.querySelectorAll('svg > g')].map(g => {
                    const s = g.ownerSVGElement.getBoundingClientRect(), b = g.getBoundingClientRect();
                    return [g.id, [b.left - s.left, b.top - s.top, b.right - s.left, b.bottom - s.top]] }))"""
            )
            for key, shape in by_id(scene(recording, step, t)).items():
                if key.endswith((".fill", ".edge")) and shape.grow > 0:
                    x, y = (shape.x + shape.dx - LEFT) * UNIT, (TOP - shape.y - shape.dy) * UNIT
                    want = (x, y - shape.h * shape.grow * UNIT, x + shape.w * UNIT, y)
                    assert places[f"p-{css_id(key)}"] == pytest.approx(want, abs=1.2), (step, t, key)
