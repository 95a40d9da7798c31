"""Saving: by suffix, whole or not at all, with every step in it."""

from __future__ import annotations

import re
import stat
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from view.pictures import attention

import flashviz as fv
from flashviz import Recorder
from flashviz.recording import Recording
from flashviz.view import export, movie, page, storyboard
from flashviz.view.page import Page

START = {".json": b"{", ".html": b"<!doctype html>", ".svg": b"<svg ", ".png": b"\x89PNG", ".gif": b"GIF89a"}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def long(steps: int) -> Recording:
    r = Recorder("many steps")
    x, xi = r.tensor("x", np.ones((8, 2)), tile=2), r.slot("xi", (2, 2), tensor="x")
    if steps > 1:
        r.launch("k")
        r.block()
    for n in range(steps - 2):
        with r.step(f"load {n}"):
            r.move(x[n % 4], xi)
    recording = r.recording()
    assert len(recording.steps) == steps
    return recording


@pytest.mark.parametrize("suffix", START)
def test_the_suffix_says_what_is_written(suffix: str, tmp_path: Path) -> None:
    target = tmp_path / f"a picture{suffix.upper()}"
    assert fv.save(attention(), target) == target
    assert target.read_bytes().startswith(START[suffix])
    assert names(tmp_path) == [target.name]
    assert sys.platform == "win32" or stat.S_IMODE(target.stat().st_mode) & 0o044 == 0o044, "others may read it"


@pytest.mark.parametrize("name", ["x.pdf", "x", "x.json.txt", ".svg"])
def test_an_unknown_suffix_names_those_there_are(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(".json, .html, .svg, .png, .gif, .mp4")):
        fv.save(attention(), tmp_path / name)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("steps", "error", "match"),
    [([], ValueError, "names none"), ([19], IndexError, "step 19"), (["a"], TypeError, "slice or step numbers")],
)
def test_steps_that_are_refused(steps: Any, error: type[Exception], match: str, tmp_path: Path) -> None:
    for suffix in (".svg", ".html", ".png", ".gif"):
        with pytest.raises(error, match=match):
            fv.save(attention(), tmp_path / f"x{suffix}", steps)
    assert names(tmp_path) == []


def test_a_part_of_a_json_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leave steps= out"):
        fv.save(attention(), tmp_path / "x.json", range(3))


@pytest.mark.parametrize("suffix", [".svg", ".png", ".gif", ".html"])
def test_a_folder_that_is_not_there(suffix: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere; make it first"):
        fv.save(attention(), tmp_path / "nowhere" / f"x{suffix}")


def test_a_run_without_a_recording(tmp_path: Path) -> None:
    x = np.eye(2, dtype="float32")
    run = fv.flash_attention_2(x, x, x, device="numpy", record=False)
    with pytest.raises(ValueError, match="record=False"):
        fv.save(run, tmp_path / "x.svg")


WRITERS = {
    ".svg": (movie, "fragment"),
    ".png": (storyboard, "png"),
    ".gif": (movie, "pictures"),
    ".html": (page, "frame_svg"),
}


@pytest.mark.parametrize("there", [b"", b"an older file"])
@pytest.mark.parametrize("error", [RuntimeError("disk full"), KeyboardInterrupt()])
@pytest.mark.parametrize("suffix", WRITERS)
def test_whole_or_not_at_all(
    suffix: str, error: BaseException, there: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / f"x{suffix}"
    if there:
        target.write_bytes(there)
    module, name = WRITERS[suffix]
    real, calls = getattr(module, name), []

    def fails(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) > (5 if suffix in (".svg", ".html") else 0):
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, fails)
    with pytest.raises(type(error)):
        fv.save(attention(), target)
    assert calls, "the fault was met"
    assert names(tmp_path) == ([target.name] if there else [])
    assert not there or target.read_bytes() == there


def test_a_fault_while_the_last_byte_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(recording: Recording, numbers: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(export, "_writer", lambda suffix: half)
    with pytest.raises(OSError, match="no space left"):
        fv.save(attention(), tmp_path / "x.svg")
    assert names(tmp_path) == []


# -- every step --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 400])
def test_as_many_frames_as_steps(steps: int, tmp_path: Path) -> None:
    recording = long(steps)
    svg = fv.save(recording, tmp_path / "x.svg").read_text(encoding="utf-8")
    groups = ElementTree.fromstring(svg).findall("{http://www.w3.org/2000/svg}g")
    assert [g.get("id") for g in groups] == [f"fvs{n}" for n in range(steps)]
    html = fv.save(recording, tmp_path / "x.html").read_text(encoding="utf-8")
    assert html.count("<option value=") - html.count('<option value="0.5"') - 3 == steps
    data = Page(recording, name="fvp").data()["steps"]
    assert len(data) == steps
    captions = [re.search(r"<title id=[^>]*>([^<]*)</title>", s["svg"]) for s in data]
    assert [c[1] for c in captions if c] == [s.caption for s in recording.steps]


@pytest.mark.parametrize("steps", [range(2, 6), slice(2, 6), [2, 3, -15, 5]])
def test_parts(steps: Any, tmp_path: Path) -> None:
    text = fv.save(attention(), tmp_path / "x.svg", steps).read_text(encoding="utf-8")
    assert text == movie.movie_svg(attention(), [2, 3, 4, 5])


def test_files_are_the_same_bytes_again(tmp_path: Path) -> None:
    for suffix in (".svg", ".html", ".png", ".json"):
        one, two = (fv.save(attention(), tmp_path / f"{n}{suffix}").read_bytes() for n in "ab")
        assert one == two


def test_texts_have_unix_line_ends(tmp_path: Path) -> None:
    for suffix in (".svg", ".html"):
        assert b"\r" not in fv.save(attention(), tmp_path / f"x{suffix}").read_bytes()
