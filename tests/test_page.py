"""The page without a browser: everything of every step is in it, and nothing that is fetched."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
from playing import made

import flashviz as fv


def data_of(text: str) -> dict[str, Any]:
    packed = re.search(r'class="fv-data">([^<]*)<', text)
    assert packed is not None
    return dict(json.loads(zlib.decompress(base64.b64decode(packed[1]))))


@pytest.fixture(scope="module")
def run() -> Any:
    return made()


def test_as_many_frames_as_steps(run: Any) -> None:
    page = fv.page(run)
    data = data_of(page.document())
    assert len(data["steps"]) == 19
    for n, (shown, step) in enumerate(zip(data["steps"], run.recording.steps, strict=True)):
        assert f">{step.caption}</title>" in shown["svg"]
        counted = fv.traffic(run, upto_step=n)
        assert f"{counted.bytes_read:,} bytes" in shown["counts"]
        assert all(f"{name} = {value}" in shown["where"] for name, value in step.tiles)
    assert [page["name"] for page in data["code"]] == ["python", "cuda"]


@pytest.mark.parametrize(("N", "steps"), [(4, 7), (4, 1), (8, 400)])
def test_many_steps_and_one(N: int, steps: int) -> None:
    run = made(N)
    numbers = [n % len(run.recording.steps) for n in range(steps)]
    page = fv.page(run, numbers)
    assert len(data_of(page.fragment())["steps"]) == steps
    assert page.fragment().count("<option value=") - 4 == steps
    assert page.fragment().count(f'max="{steps - 1}"') == 2


@pytest.mark.parametrize("steps", [range(3, 9), slice(3, 9), [3, 4, 5, 6, 7, 8]])
def test_a_part(run: Any, steps: Any) -> None:
    text = fv.page(run, steps).fragment()
    assert "0 · block 0 · j = 0 · load Kj, Vj (step 3)" in text
    data = data_of(text)
    assert len(data["steps"]) == 6
    assert "@keyframes" not in data["steps"][0]["svg"]
    assert "@keyframes" in data["steps"][1]["svg"]


def test_errors(run: Any) -> None:
    with pytest.raises(IndexError, match="step 99"):
        fv.page(run, [99])
    with pytest.raises(ValueError, match="none of the 19 steps"):
        fv.page(run, [])
    with pytest.raises(TypeError, match="expected a run"):
        fv.page(3)


def test_the_same_run_gives_the_same_page(run: Any) -> None:
    assert fv.page(run)._repr_html_() == fv.page(made())._repr_html_()
    assert repr(fv.page(run)) == "Page(19 steps of flash_attention_2)"


def test_nothing_is_fetched(run: Any, tmp_path: Path) -> None:
    file = fv.save(run, tmp_path / "x.html")
    text = file.read_text(encoding="utf-8")
    text += json.dumps(data_of(text), ensure_ascii=False)
    addresses = set(re.findall(r"https?://[^\s\"'<)\\]+", re.sub(r'xmlns(:\w+)?=\\?"[^"]*"', "", text)))
    assert not re.search(r"<(link|img|iframe|script[^>]* src)", text)
    assert not re.search(r"url\((?!#)|@import|fetch\(|XMLHttp", text)
    assert all("github" in a or "arxiv" in a or "w3.org" in a for a in addresses), addresses


def test_size_of_a_step(run: Any) -> None:
    """About 5 KB a step beside the code."""
    whole, none = len(fv.page(run).fragment()), len(fv.page(run, [0]).fragment())
    assert (whole - none) / 18 < 6_000


def test_a_label_that_looks_like_a_mark_of_the_template_stays_a_label() -> None:
    r = fv.Recorder("marks")
    r.launch("marks")
    r.block(0)
    with r.step("@DATA@ and @LEGEND@"):
        r.init(r.slot("s", (1,)), 0.0)
    text = fv.page(r.recording()).fragment()
    assert "@DATA@ and @LEGEND@</option>" in text
