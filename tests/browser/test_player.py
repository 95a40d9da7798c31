"""The player in JupyterLab 4 and Notebook 7: the picture shown belongs to the slider's step, whatever moved it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbconvert
import nbformat
import pytest
from playing import VIEW, made
from playwright.sync_api import expect
from watching import NOTE_MOVES, Watched, every_control, plays_to_the_end, tween_moves, watch

CHAPTER = "03_flash_attention_2.ipynb"
RUN = (
    "import time\nimport numpy as np\nimport ipywidgets\nimport flashviz as fv\nrng = np.random.default_rng(26)\n"
    "Q, K, V = (rng.standard_normal((8, 4), dtype=np.float32) for _ in range(3))\n"
    "run = fv.flash_attention_2(Q, K, V, Br=4, Bc=4, device='numpy')"
)


@pytest.fixture(scope="module")
def run() -> Any:
    return made()


def first_player(page: Any, run: Any) -> Watched:
    return watch(page, page.locator(".fv-player:not(.fv-page)").first, run)


def quiet(jupyter: Any) -> None:
    assert jupyter.console_errors == []
    assert jupyter.outside_requests == []


def test_the_chapter_played(both: Any, root: Path, run: Any) -> None:
    page = both.open(root / "notebooks" / CHAPTER)
    both.run_all(page)
    player = first_player(page, run)
    player.root.scroll_into_view_if_needed()
    top = "() => document.querySelector('.fv-player').getBoundingClientRect().top"
    player.root.evaluate("r => r.scrollIntoView({block: 'start'})")
    before = page.evaluate(top)
    every_control(player)
    tween_moves(player)
    plays_to_the_end(player)
    assert page.evaluate(top) == before, "the marked code scrolls inside its panel, not the page"
    handle = player.root.get_by_role("slider", name="Step")
    for key, position in [("Home", 0), ("ArrowRight", 1), ("ArrowRight", 2), ("End", 18)]:
        handle.focus()
        page.keyboard.press(key)
        player.shows(position)
    explorer = page.locator(".jp-OutputArea-output", has=page.get_by_label("legend")).last
    expect(explorer).to_contain_text("trips:")
    steps = explorer.get_by_role("listbox", name="Steps").locator("option")
    assert steps.count() == len(made(10).recording.steps)
    readout = explorer.locator(".widget-readout").first
    readout.click()
    readout.fill("4")
    readout.press("Enter")
    expect(steps).to_have_count(len(made(4).recording.steps))
    expect(explorer.locator(".fv-player")).to_have_count(1)
    file = both.save(page)
    quiet(both)
    notebook = nbformat.read(file, 4)
    assert "widgets" not in notebook["metadata"]
    outputs = [o["data"] for c in notebook["cells"] for o in c.get("outputs", []) if VIEW in o.get("data", {})]
    calls = [c for c in notebook["cells"] if re.search(r"^fv\.(play|compare|explore)\(", c["source"], re.M)]
    assert len(outputs) == len(calls) >= 3
    assert all(data["image/png"] and data["text/plain"] for data in outputs)
    assert file.stat().st_size < 1_500_000
    if both.kind == "lab":
        seen_elsewhere(both, notebook)


def seen_elsewhere(lab: Any, notebook: Any) -> None:
    """D07: what a saved chapter shows where its widgets do not exist: on another machine, and on a static viewer.

    Another machine does not trust the file, so JupyterLab takes the picture. (Its own reader, who opens it again with a
    new kernel, is told by JupyterLab to run the cell: "model not found".)
    """
    lab.close()
    pictures = sum("image/png" in o.get("data", {}) for c in notebook["cells"] for o in c.get("outputs", []))
    assert pictures >= 3
    page_text, _ = nbconvert.HTMLExporter().from_notebook_node(notebook)
    assert page_text.count('<img alt="No description has been provided for this image"') == pictures
    assert "widget-view+json" not in page_text.split("<body")[1]
    notebook["cells"][0]["source"] += " "
    file = lab.server.root / "elsewhere.ipynb"
    nbformat.write(notebook, file)
    page = lab.open(file)
    expect(page.locator(".jp-OutputArea-output img")).to_have_count(pictures)
    expect(page.locator(".jp-OutputArea-output").filter(has_text=re.compile("widget", re.I))).to_have_count(0)
    quiet(lab)


SLOW = """
player = fv.play(run)
drawn, draw = [], player.frame
def frame(index, tween=False):
    time.sleep(0.1)
    drawn.append(index)
    return draw(index, tween)
player.frame = frame
player
"""


def test_a_quick_drag_ends_where_it_is_released(lab: Any, run: Any) -> None:
    """D02, with a kernel that takes 0.1 s and more for a picture: no backlog is replayed, and nothing jumps back."""
    page = lab.open([RUN, SLOW])
    lab.run_all(page)
    player = first_player(page, run)
    player.root.scroll_into_view_if_needed()
    handle = player.root.get_by_role("slider", name="Step")
    box = handle.bounding_box()
    track = player.root.locator(".noUi-base").bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] / 2, y)
    page.mouse.down()
    moves = 0
    for _ in range(3):
        for part in (*range(0, 101, 2), *range(100, 39, -2)):
            page.mouse.move(track["x"] + track["width"] * part / 100, y)
            moves += 1
    page.mouse.up()
    final = int(float(handle.get_attribute("aria-valuenow")))
    assert 0 < final < 18
    values = "r => r.querySelector('.noUi-handle').getAttribute('aria-valuenow')"
    handle_of_root = player.root.element_handle()
    page.evaluate(
        "r => { window.values = []; new MutationObserver(() => window.values.push("
        f"({values})(r))).observe(r.querySelector('.noUi-handle'), {{attributes: true}}) }}",
        handle_of_root,
    )
    player.root.evaluate(NOTE_MOVES)
    player.shows(final)
    assert lab.value(page, "player.index") == str(final), "the kernel has answered everything"
    player.shows(final)
    assert {int(float(v)) for v in page.evaluate("window.values")} <= {final}, "the slider stays where it was released"
    after = [int(n) for n, _ in page.evaluate("window.notes")]
    assert len(after) <= 3, f"a backlog was replayed: {after}"
    assert int(lab.value(page, "len(drawn)")) < moves, "steps are skipped"
    page.evaluate("window.values = []")
    lab.value(page, "setattr(player.play, 'interval', 20)")
    player.root.locator(".fv-play button").first.click()
    player.shows(18)
    expect(player.root.locator(".fv-play i.fa-play")).to_be_visible()
    assert lab.value(page, "(player.index, player.play.value)") == "(18, 18)"
    player.shows(18)
    played = [int(float(v)) for v in page.evaluate("window.values")]
    assert played == sorted(played), "never backwards"
    quiet(lab)


def test_shown_twice_and_run_again(lab: Any, run: Any) -> None:
    """D01, D03 and D04: two cells show one player in step; a cell that runs again leaves nothing of its last run."""
    opened = "print(len(ipywidgets.widgets.widget._instances))"
    cells = [RUN, "player = fv.play(run)\nplayer", "player", "fv.play(run)", "fv.play(run, range(3, 9))", opened]
    page = lab.open(cells)
    lab.run_all(page)
    roots = page.locator(".fv-player")
    expect(roots).to_have_count(4)
    one, two, three = (watch(page, roots.nth(n), run) for n in range(3))
    part = Watched(page, roots.nth(3), run, tuple(range(3, 9)))
    for n in range(10):
        one.button("Next ›").click()
        one.shows(n + 1)
    two.shows(10)
    two.pick(4)
    one.shows(4)
    two.shows(4)
    three.shows(0)
    part.shows(0)
    part.button("Last »").click()
    part.shows(5)
    expect(roots.nth(3).get_by_role("listbox", name="Steps").locator("option").nth(5)).to_contain_text("(step 8)")
    plays_to_the_end(one)
    two.shows(18)
    counts = []
    for _ in range(3):
        lab.run_all(page)
        expect(roots).to_have_count(4)
        expect(page.locator(".fv-pic")).to_have_count(4)
        shown = lab.cells(page)
        assert [len(cell["outputs"]) for cell in shown] == [0, 1, 1, 1, 1, 1]
        counts.append(int(shown[5]["outputs"][0]["text"]))
    assert len(set(counts)) == 1, f"open widgets: {counts}"
    assert lab.value(page, "'matplotlib.pyplot' in __import__('sys').modules") == "False"
    quiet(lab)


def accessible_names(page: Any, root: Any) -> dict[str, list[str]]:
    """Role → names of everything in the player that can be focused."""
    names: dict[str, list[str]] = {}
    for line in root.aria_snapshot().splitlines():
        found = re.match(
            r"""\s*- '?(button|slider|spinbutton|combobox|listbox|region)(?: "((?:[^"\\]|\\.)*)")?""", line
        )
        if found:
            names.setdefault(found[1], []).append(found[2] or "")
    return names


def test_dark_sharp_still_and_by_keyboard(lab: Any, run: Any) -> None:
    """D11; reduced motion; a name on every control; Tab alone reaches them all, and no arrow key is needed."""
    page = lab.open(
        [RUN, "fv.play(run)"], reduced_motion="reduce", device_scale_factor=2, viewport={"width": 1366, "height": 768}
    )
    page.evaluate("window.jupyterapp.commands.execute('application:toggle-left-area')")
    page.evaluate("window.jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'})")
    lab.run_all(page)
    player = first_player(page, run)
    expect(page.locator("body")).to_have_attribute("data-jp-theme-light", "false")
    assert page.evaluate("devicePixelRatio") == 2
    names = accessible_names(page, player.root)
    assert all(name for found in names.values() for name in found), names
    assert {"Step"} == set(names["slider"])
    assert {"Play or pause", "Stop", "« First", "‹ Back", "Next ›", "Last »"} <= set(names["button"])
    assert any("scores" in name for name in names["button"])
    assert any("FlashAttention" in name or "source of" in name for name in names["region"])

    player.root.locator(".fv-play button").first.focus()
    reached: list[str] = []
    for _ in range(40):
        here = page.evaluate(
            "() => { const e = document.activeElement; if (!e.closest('.fv-player')) return ''; return "
            "e.getAttribute('aria-label') || e.labels?.[0]?.textContent || e.closest('.fv-box, .fv-speed')?.textContent"
            " || e.textContent }"
        )
        if not here:
            break
        reached.append(" ".join(here.split()))
        page.keyboard.press("Tab")
    controls = "Play or pause|Stop|« First|‹ Back|Next ›|Last »|Step|Go to|Speed|Steps|Python|CUDA|Numbers|source of"
    for wanted in controls.split("|"):
        assert any(wanted in name for name in reached), (wanted, reached)
    assert sum("go to its next step" in name for name in reached) == 7

    for position, key in enumerate(["Enter", "Space", "Enter", "Space"], 1):
        player.button("Next ›").focus()
        page.keyboard.press(key)
        player.shows(position)
        running = player.root.evaluate("r => r.querySelector('.fv-pic svg').getAnimations({subtree: true}).length")
        assert running == 0, "reduced motion"
    listbox = player.root.get_by_role("listbox", name="Steps")
    listbox.focus()
    page.keyboard.press("b")
    assert len(lab.cells(page)) == 2, "a letter inserts no cell"

    assert player.low_contrast() == []
    player.button("CUDA").click()
    expect(player.root.locator(".fv-code")).to_contain_text("__global__")
    assert player.low_contrast() == []
    player.button("Numbers").click()
    expect(player.root.locator(".fv-numbers")).to_be_visible()
    assert player.low_contrast() == []
    width, bottom, top = player.root.evaluate(
        "r => { r.scrollIntoView({block: 'start'}); const a = r.querySelector('.fv-pic').getBoundingClientRect();"
        " return [a.width, a.bottom, r.getBoundingClientRect().top] }"
    )
    assert width == pytest.approx(0.64 * 768, abs=6), "the same number of CSS pixels as on any screen"
    assert bottom - top < 768 - 92 - 30, "controls and picture fit on a laptop's screen, under JupyterLab's bars"
    outside = page.evaluate(
        """r => { const a = r.getBoundingClientRect(), parts = '.fv-pic, .fv-code, .fv-numbers, .fv-list select, .fv-now, button';
        return [...r.querySelectorAll(parts)].filter(e => { const b = e.getBoundingClientRect(); if (!b.width) return false;
            return b.left < a.left - 1 || b.right > a.right + 1 }).map(e => [e.className, e.getBoundingClientRect().right, a.right]) }""",
        player.root.element_handle(),
    )
    assert outside == [], "nothing is cut off"
    quiet(lab)
