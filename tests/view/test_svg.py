"""The SVG of a step: its CSS says what the scene says, its bytes are the same everywhere, and nothing breaks out of it."""

from __future__ import annotations

import hashlib
import math
import os
import re
import subprocess
import sys
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from view.pictures import attention, by_id, step_of
from view.strangers import EVIL, evil

from flashviz import Recorder
from flashviz.recording import Recording
from flashviz.view import svg
from flashviz.view.draw import HEIGHT, WIDTH, line_ends
from flashviz.view.layout import LEFT, TOP
from flashviz.view.movie import PAUSE_S, TWEEN_S, movie_svg
from flashviz.view.palette import GROUND, HUES, OTHERS, STALE, contrast, fill_of, text_on
from flashviz.view.scene import scene
from flashviz.view.shapes import Line, Rect, Text
from flashviz.view.svg import css_id, frame_svg, hover_rect
from flashviz.view.text import UNIT
from flashviz.view.tween import FLY_CSS, smoothstep

NS = {"s": "http://www.w3.org/2000/svg"}
RULE = re.compile(
    r"#([\w-]+)\{animation:([\w-]+) calc\(var\(--fv-step,900ms\)\*([\d.]+)\) "
    r"calc\(var\(--fv-step,900ms\)\*([\d.]+)\) both ([^;}]+);?([^}]*)\}"
)
FRAMES = re.compile(r"@keyframes ([\w-]+)\{from\{transform:([^}]+)\}\}")


def px(x: float, y: float) -> np.ndarray:
    return np.array([(x - LEFT) * UNIT, (TOP - y) * UNIT])


def points(shape: Any) -> np.ndarray:
    """Where a shape is now, in the SVG's units: corners of a box, ends of a line, centre of a text."""
    if isinstance(shape, Rect):
        x, y, w, h = shape.x + shape.dx, shape.y + shape.dy, shape.w, shape.h * shape.grow
        return np.array([px(x, y), px(x + w, y), px(x + w, y + h), px(x, y + h)])
    if isinstance(shape, Line):
        return np.array([px(*end) for end in line_ends(shape)])
    return np.array([px(shape.x + shape.dx, shape.y + shape.dy)])


def matrix(transform: str) -> tuple[np.ndarray, np.ndarray]:
    """A CSS transform list as a matrix and a shift."""
    total, shift = np.eye(2), np.zeros(2)
    for name, arguments in re.findall(r"(\w+)\(([^)]*)\)", transform):
        values = [float(re.sub("px|deg", "", a)) for a in arguments.split(",")]
        if name == "translate":
            shift = shift + total @ np.array(values)
        elif name == "scale":
            total = total * values[0]
        elif name == "scaleY":
            total = total @ np.diag([1, values[0]])
        elif name == "skewX":
            total = total @ np.array([[1, math.tan(math.radians(values[0]))], [0, 1]])
        else:
            raise AssertionError(f"unknown {name}")
    return total, shift


def moved(end: np.ndarray, transform: str, extra: str) -> np.ndarray:
    """Points of a shape under a transform with the transform-origin that its rule gives."""
    linear, shift = matrix(transform)
    origin = np.zeros(2)
    if "fill-box" in extra:
        assert "transform-origin:50% 100%" in extra
        origin = np.array([end[:, 0].mean(), end[:, 1].max()])
    elif found := re.search(r"transform-origin:([\d.-]+)px ([\d.-]+)px", extra):
        origin = np.array([float(found[1]), float(found[2])])
    return (end - origin) @ linear.T + origin + shift


CASES = [
    attention(),
    attention((3, 2), (1, 3)),
    attention((30, 1)),
    attention((2, 2), heads=(2, 1)),
    attention((1, 10)),
    attention((2, 3), (1, 1), rung=4),
]


@pytest.mark.parametrize(
    "recording", CASES, ids=["2x2", "ragged", "many blocks", "heads", "many tiles", "copies ahead"]
)
def test_the_tween_starts_where_the_scene_starts(recording: Recording) -> None:
    kinds = set()
    for step in range(1, min(len(recording.steps), 150)):
        text = frame_svg(recording, step, "p")
        frames, rules = dict(FRAMES.findall(text)), {r[0]: r[1:] for r in RULE.findall(text)}
        assert text.count("animation:") == len(rules) + ("@media" in text), "every rule was read"
        start, end = by_id(scene(recording, step, 0.0)), by_id(scene(recording, step, 1.0))
        for key, shape in end.items():
            rule = rules.pop(f"p-{css_id(key)}", None)
            there, here = points(shape), points(start[key])
            if rule is None:
                assert np.allclose(there, here, atol=0.05), f"step {step}: {key} jumps"
                continue
            name, length, delay, easing, extra = rule
            assert np.allclose(moved(there, frames[name], extra), here, atol=0.12), (step, key)
            assert float(delay) == pytest.approx(shape.start, abs=1e-4)
            assert float(length) == pytest.approx(shape.end - shape.start, abs=1e-4)
            flies = "translate" in frames[name] or "skew" in frames[name]
            assert easing == (FLY_CSS if flies else "linear")
            kinds |= set(re.findall(r"\w+(?=\()", frames[name]))
        assert not rules, "a rule names a shape that is not there"
    assert {"translate", "scaleY"} <= kinds


def test_easing_in_css_is_the_scenes() -> None:
    x1, y1, x2, y2 = map(float, re.findall(r"[\d.]+", FLY_CSS))
    for s in np.linspace(0, 1, 21):
        t = 3 * (1 - s) ** 2 * s * x1 + 3 * (1 - s) * s**2 * x2 + s**3
        y = 3 * (1 - s) ** 2 * s * y1 + 3 * (1 - s) * s**2 * y2 + s**3
        assert y == pytest.approx(smoothstep(t), abs=1e-3)


def test_what_matplotlib_drew_is_the_end_of_the_step() -> None:
    for step in (1, 4, 8, 9):
        tree = ElementTree.fromstring(frame_svg(attention(), step, "p"))
        groups = {g.get("id"): g for g in tree.findall("s:g", NS)}
        for key, shape in by_id(scene(attention(), step)).items():
            group = groups[f"p-{css_id(key)}"]
            if isinstance(shape, Text):
                lines = ["".join(t.itertext()) for t in group.iter("{http://www.w3.org/2000/svg}text")]
                assert "\n".join(lines) == shape.text
                continue
            paths = [p.get("d", "") for p in group.iter("{http://www.w3.org/2000/svg}path")]
            found = np.array([[float(n) for n in re.findall(r"-?[\d.]+", d)] for d in paths[:1]]).reshape(-1, 2)
            want = points(shape)
            assert np.allclose(found.min(0), want.min(0), atol=0.01), key
            assert np.allclose(found.max(0), want.max(0), atol=0.01), key


def test_the_document() -> None:
    text = frame_svg(attention(), 7, "p")
    tree = ElementTree.fromstring(text)
    assert tree.get("viewBox") == f"0 0 {WIDTH:g} {HEIGHT:g}"
    assert tree.get("width") == "100%"
    assert tree.get("role") == "img"
    title = tree.find("s:title", NS)
    assert title is not None
    assert (title.get("id"), title.text) == (tree.get("aria-labelledby"), "[KV loop: 1] fill Sij")
    ground = tree.find("s:rect", NS)
    assert ground is not None
    assert (ground.get("fill"), ground.get("width"), ground.get("height")) == (GROUND, "100%", "100%")
    assert "@media (prefers-reduced-motion:reduce){.p g{animation:none!important}}" in text
    assert "<text" in text, "letters stay letters"
    assert not re.search(r"date|creator|\b20\d\d-\d\d", text, re.IGNORECASE)


def test_without_tween_nothing_moves_and_nothing_is_hidden_below() -> None:
    text = frame_svg(attention(), 6, "p", tween=False)
    assert "animation" not in text
    assert "<style" not in text
    ids = {g.get("id") for g in ElementTree.fromstring(text).findall("s:g", NS)}
    assert ids == {f"p-{css_id(s.id)}" for s in scene(attention(), 6).shapes if not s.under}


def test_ids_are_unique_in_a_page_with_every_step_of_two_players() -> None:
    ids: list[str] = []
    for recording in (attention(), attention((3, 3), (1, 1))):
        for prefix in ("a", "b"):
            for step in range(len(recording.steps)):
                name = f"{prefix}{len(recording.steps)}s{step}"
                text = frame_svg(recording, step, name)
                mine = re.findall(r'\bid="([^"]*)"', text) + re.findall(r"@keyframes ([\w-]+)", text)
                assert all(i.startswith(f"{name}-") for i in mine)
                ids += mine
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    "texts", [("Qi.fill", "Qi_2e_fill"), ("a.b", "a_2e_b"), ("˪", ".a"), ("_2e_", "."), ("a b", "a_b")]
)
def test_ids_of_different_shapes_differ(texts: tuple[str, str]) -> None:
    assert css_id(texts[0]) != css_id(texts[1])
    assert all(re.fullmatch(r"[A-Za-z0-9_]+", css_id(t)) for t in texts)


PRINT = """
import hashlib, sys
sys.path.insert(0, "tests")
from view.pictures import attention
from flashviz.view.svg import frame_svg
from flashviz.view.movie import movie_svg
r = attention((2, 2), (1, 1))
text = "".join(frame_svg(r, n, f"p{n}") for n in range(19)) + movie_svg(r, range(19))
print(hashlib.sha256(text.encode()).hexdigest())
"""


def test_two_processes_write_the_same_bytes(root: Any) -> None:
    hashes = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "SOURCE_DATE_EPOCH": f"{seed}00000000"}
        made = subprocess.run([sys.executable, "-c", PRINT], cwd=root, env=environment, capture_output=True, check=True)
        hashes.add(made.stdout)
    recording = attention((2, 2), (1, 1))
    here = "".join(frame_svg(recording, n, f"p{n}") for n in range(19)) + movie_svg(recording, range(19))
    assert hashes == {hashlib.sha256(here.encode()).hexdigest().encode() + b"\n"}


def test_each_distinct_shape_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    real = svg._Pen.fragment
    monkeypatch.setattr(svg._Pen, "fragment", lambda pen, shape: drawn.append(shape) or real(pen, shape))
    svg._fragment.cache_clear()
    for prefix in ("a", "b"):
        for step in range(19):
            frame_svg(attention(), step, f"{prefix}{step}")
        assert len(drawn) == len(set(drawn))
        assert 60 < len(drawn) < 200, "19 steps of some 60 shapes"


def test_an_id_in_a_label_is_text() -> None:
    r = Recorder("labels")
    r.tensor('a id="b" ', np.ones((1, 2)), tile=1)
    text = "".join(ElementTree.fromstring(frame_svg(r.recording(), 0, "p")).itertext())
    assert 'a id="b"' in text


# -- the movie ---------------------------------------------------------------------------------------------------------


def test_movie_holds_every_step_once_and_shows_one_at_a_time() -> None:
    recording = attention()
    text = movie_svg(recording, range(19))
    tree = ElementTree.fromstring(text)
    groups = tree.findall("s:g", NS)
    assert [g.get("id") for g in groups] == [f"fvs{n}" for n in range(19)]
    assert [g.get("visibility") for g in groups] == ["hidden"] * 18 + [None], "without motion, the last one"
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    assert {u.get("href") for u in tree.iter("{http://www.w3.org/2000/svg}use")} == {
        f"#{g.get('id')}" for d in tree.findall("s:defs", NS) for g in d
    }
    length = TWEEN_S + PAUSE_S
    for n in range(19):
        uses = groups[n].findall("s:use", NS)
        assert len(uses) == len(scene(recording, n).shapes)
        rule = re.search(rf"@keyframes fvs{n}\{{(.*?)\}}\}}", text)
        assert rule is not None
        shown = re.search(r"([\d.]+)%\{visibility:visible", rule[1])
        assert shown is not None
        assert float(shown[1]) == pytest.approx(100 * n / 19, abs=1e-3)
    assert f"{19 * length:.2f}s" in text
    assert "prefers-reduced-motion:reduce" in text


def test_movie_of_one_step_stands_still() -> None:
    text = movie_svg(attention(), [0])
    assert "visibility" not in text
    assert len(ElementTree.fromstring(text).findall("s:g", NS)) == 1


# -- a stranger's recording --------------------------------------------------------------------------------------------


def danger(tree: ElementTree.Element) -> list[str]:
    """Elements and attributes that could run or fetch something."""
    found = []
    for element in tree.iter():
        name = element.tag.split("}")[-1].lower()
        if name in ("script", "foreignobject", "iframe", "image", "img", "a", "animate", "set", "handler"):
            found.append(name)
        for key, value in element.attrib.items():
            plain = key.split("}")[-1].lower()
            if plain.startswith("on") or (plain == "href" and not value.startswith("#")) or "javascript:" in value:
                found.append(f"{name} {plain}")
    return found


def test_a_strangers_recording_stays_text_in_svg() -> None:
    recording = evil()
    pages = [frame_svg(recording, n, f"p{n}") for n in range(len(recording.steps))]
    pages.append(movie_svg(recording, range(len(recording.steps))))
    names = {"svg", "title", "style", "rect", "g", "path", "text", "defs", "use", "tspan"}
    for text in pages:
        tree = ElementTree.fromstring(text)
        assert danger(tree) == []
        assert {e.tag.split("}")[-1] for e in tree.iter()} <= names
        for style in tree.iter("{http://www.w3.org/2000/svg}style"):
            assert re.search(r"@import|url\(|<|hacked=", style.text or "") is None
    assert len({len(ElementTree.fromstring(p).findall("s:style", NS)) for p in pages[1:-1]}) == 1
    titles = [ElementTree.fromstring(p).findtext("s:title", "", NS) for p in pages[2:16]]
    for n, title in enumerate(titles):
        plain = EVIL[(n + 1) % len(EVIL)].split("{n}")[0].split("\x00")[0].format()
        assert title.startswith(" ".join(plain.split())), "and it is all there to read"


def test_the_check_for_danger_sees_what_it_should() -> None:
    bad = '<svg xmlns="http://www.w3.org/2000/svg"><script/><g onload="x"/><use href="javascript:x"/></svg>'
    assert danger(ElementTree.fromstring(bad)) == ["script", "g onload", "use href"]


def test_hovers_say_what_a_slot_holds() -> None:
    hover = scene(attention(), 6).hovers
    texts = {h.id: h.text for h in hover}
    assert texts["Kj.hover"].startswith("Kj: 4 × 4 float32, 64 bytes of shared\nholds K1\n")
    assert "computed from an earlier tile" in texts["mi.hover"]
    rect = ElementTree.fromstring(hover_rect(hover[0]))
    assert rect.get("fill") == "none"
    assert rect.findtext("title") == hover[0].text


# -- contrast ----------------------------------------------------------------------------------------------------------


def test_wcag_contrast() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
    assert contrast("#27272a", "#71717a") < 4.5, "why text on stale grey is light"


def test_text_is_readable_on_every_fill_of_the_palette() -> None:
    fills = {GROUND, STALE}
    for hue in (*HUES.values(), *OTHERS):
        fills |= {fill_of(hue, level, 9) for level in range(1, 10)}
        assert contrast(hue.outline, GROUND) >= 3, "outlines are seen without their fill"
    for fill in fills:
        assert contrast(text_on(fill), fill) >= 4.5, fill


@pytest.mark.parametrize("recording", [attention(), attention((3, 5), (3, 2)), evil()])
def test_text_is_readable_where_it_stands(recording: Recording) -> None:
    for step in range(len(recording.steps)):
        shapes = scene(recording, step).shapes
        for n, text in enumerate(shapes):
            if isinstance(text, Text) and text.text and not text.under:
                below = [GROUND] + [
                    s.fill
                    for s in shapes[:n]
                    if isinstance(s, Rect) and s.fill and s.x <= text.x <= s.x + s.w and s.y <= text.y <= s.y + s.h
                ]
                assert contrast(text.fill, below[-1]) >= 4.5, (step, text)


def test_steps_that_move_have_ids_in_the_page() -> None:
    step = step_of(attention(), "fill Sij", 1)
    assert frame_svg(attention(), step, "p").count("@keyframes") == 1, "shapes that start alike share their keyframes"
