"""What stands beside the picture: escaped, and each line of code knows where it leads."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from playing import made

import flashviz as fv
from flashviz.events import Source
from flashviz.recording import Recording
from flashviz.view import panel

MARKUP = "\"><script>alert(1)</script><img src=x onerror='alert(2)'>"


class Seen(HTMLParser):
    """Every element and its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def recording() -> Recording:
    return made().recording


def lines_of(seen: Seen) -> dict[str, dict[str, str | None]]:
    """The clickable runs of lines, under their action's class."""
    found = {}
    for tag, attributes in seen.elements:
        classes = (attributes.get("class") or "").split()
        if tag == "span" and "fv-a" in classes:
            found[classes[1]] = attributes
    return found


@pytest.mark.parametrize("language", ["python", "cuda"])
@pytest.mark.parametrize("numbers", [range(19), range(3, 9), [7, 16]])
def test_a_line_of_code_leads_to_the_steps_that_perform_it(recording: Recording, language: str, numbers: Any) -> None:
    source = next(s for s in recording.code if s.language == language)
    seen = Seen(panel.code_html(source, panel.targets_of(recording, numbers)))
    lines = lines_of(seen)
    assert {name for name, _, _ in source.lines} == {
        name for name, _, _ in source.lines if panel.action_class(name) in lines
    }
    for name, _, _ in source.lines:
        attributes = lines[panel.action_class(name)]
        expected = [p for p, n in enumerate(numbers) if name in recording.steps[n].actions]
        click = attributes.get("onclick")
        if not expected:
            assert click is None
            assert attributes.get("role") is None
            continue
        targets = re.search(r"const t=\[([\d,]+)\]", click or "")
        assert targets is not None
        assert [int(t) for t in targets[1].split(",")] == expected
        assert attributes["role"] == "button"
        assert attributes["tabindex"] == "0"
        assert name in (attributes["aria-label"] or "")


def test_code_keeps_every_line(recording: Recording) -> None:
    for source in recording.code:
        page = panel.code_html(source, {})
        shown = re.findall(r'data-n="(\d+)">(.*?)</span>(?=<span class="fv-l"|</span>|<span class="fv-a|</code>)', page)
        assert [int(n) for n, _ in shown] == list(range(1, len(shown) + 1))
        text = html.unescape(re.sub("<[^>]*>", "", page.replace('<span class="fv-l"', '\n<span class="fv-l"')))
        assert [line.rstrip() for line in text.split("\n")[1:]] == [
            line.rstrip() for line in source.text.split("\n")[: len(shown)]
        ]


def test_marks_name_the_actions_of_the_step(recording: Recording) -> None:
    for step in recording.steps:
        css = panel.mark_css("fvx", step)
        assert set(re.findall(r"\.fvx \.(fv-a-\w+)", css)) == {panel.action_class(a) for a in step.actions}
    assert panel.mark_css("fvx", recording.steps[0]) == ""


@pytest.mark.parametrize("language", ["python", "cuda", "no such language", MARKUP])
def test_what_comes_from_a_recording_is_text(language: str) -> None:
    r = fv.Recorder(MARKUP, {"note": MARKUP})
    x = r.tensor("x", np.ones(4), tile=2)
    r.launch(MARKUP, (1, 1, 1), (1, 1, 1))
    xi = r.slot(MARKUP, (2,), "float32", memory="shared", scope="block", tensor=MARKUP)
    r.block(0)
    with r.step(MARKUP, MARKUP, tiles={MARKUP: 1}, action=MARKUP):
        r.move(x[0], xi)
    source = Source(language, MARKUP, f"{MARKUP}\n{MARKUP}\n", ((MARKUP, 1, 1),))
    recording = r.recording((source,))
    last = len(recording.steps) - 1
    step = recording.steps[last]
    assert step.actions == (MARKUP,)
    pieces = [
        panel.code_html(source, panel.targets_of(recording, range(last + 1))),
        panel.numbers_html(recording, last),
        panel.legend_html(recording),
        fv.page(recording).document(),
    ]
    own = {"onclick", "onkeydown", "onanimationstart"}
    for piece in pieces[:3]:
        for tag, attributes in Seen(piece).elements:
            assert tag not in ("script", "img")
            assert {a for a in attributes if a.startswith("on")} <= own
            assert "alert" not in (attributes.get("onclick") or "")
    assert [tag for tag, _ in Seen(pieces[3]).elements].count("script") == 2
    assert "<" not in panel.mark_css("fvx", step)
    player = fv.play(recording)
    player.go(last)
    for widget in (player.where, player.counts, player.picture, player.mark):
        assert not {tag for tag, _ in Seen(widget.value).elements} & {"script", "img"}
    player.close()


def test_numbers_before_a_block_runs_and_of_empty_slots(recording: Recording) -> None:
    assert "No block runs yet" in panel.numbers_html(recording, 0)
    assert "<h4>Kj</h4><div>empty</div>" in panel.numbers_html(recording, 2)
    assert "(stale)" in panel.numbers_html(recording, 6)


def test_numbers_are_of_the_slots_of_the_launch_shown() -> None:
    x = np.ones((8, 2))
    two = fv.flash_decoding(x[:1], x, x, splits=2, device="numpy").recording
    first, second = (panel.numbers_html(two, n) for n in (2, len(two.steps) - 1))
    assert "<h4>Kj</h4><div>empty</div>" in first
    assert "<h4>w" not in first
    assert "<h4>w</h4><table>" in second
    assert "Kj" not in second


def test_numbers_too_many_to_travel_say_so() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((64, 128), dtype=np.float32)
    recording = fv.flash_attention_2(x, x, x, Br=64, Bc=64, device="numpy").recording
    assert "too large to travel along" in panel.numbers_html(recording, len(recording.steps) - 1)


def test_legend_names_each_hue_once(recording: Recording) -> None:
    text = Seen(panel.legend_html(recording)).text
    for words in ("Q tile", "K tile", "V tile", "scores", "running max m", "denominator l", "output O", "stale"):
        assert text.count(words) == 1, words


def test_where() -> None:
    recording = made().recording
    assert panel.where_text(recording.steps[0]) == "start"
    assert panel.where_text(recording.steps[8]) == "i = 0, j = 1 · softmax, accumulate"
