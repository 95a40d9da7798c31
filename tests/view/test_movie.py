"""GIF and MP4: as long as their steps, the scene's own pictures and colours, and what to do without ffmpeg."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from view.pictures import attention

import flashviz as fv
from flashviz import Recorder
from flashviz.recording import Recording
from flashviz.view import movie
from flashviz.view.movie import FRAMES, PAUSE_S, TWEEN_S, colors_of, pictures
from flashviz.view.palette import HUES, STALE

STEP_S = TWEEN_S + PAUSE_S


def five() -> Recording:
    """Five steps, of which three show the same."""
    r = Recorder("alike")
    x, xi = r.tensor("x", np.ones((2, 2)), tile=2), r.slot("xi", (2, 2), tensor="x")
    r.launch("k")
    r.block()
    with r.step("load"):
        r.move(x[0], xi)
    for _ in range(2):
        with r.step("load"):
            r.barrier()
    return r.recording()


def gif(path: Path) -> tuple[list[np.ndarray], list[int]]:
    frames, times = [], []
    with Image.open(path) as image:
        for n in range(getattr(image, "n_frames", 1)):
            image.seek(n)
            frames.append(np.asarray(image.convert("RGB")).copy())
            times.append(int(image.info["duration"]))
        assert image.info["loop"] == 0
    return frames, times


def test_gif_takes_as_long_as_its_steps_also_where_they_look_alike(tmp_path: Path) -> None:
    recording = five()
    ends = [next(pictures(recording, [n], 30))[0].tobytes() for n in range(5)]
    assert len(set(ends)) == 3
    assert ends[2] == ends[3] == ends[4]
    frames, times = gif(fv.save(recording, tmp_path / "x.gif"))
    assert sum(times) == pytest.approx(5 * STEP_S * 1000, abs=10)
    assert len(frames) < 2 + 2 * FRAMES + 1, "pictures that are alike are one"
    assert all(t >= 20 for t in times), "browsers slow shorter ones down"


def test_gif_of_the_chapter(tmp_path: Path) -> None:
    frames, times = gif(fv.save(attention(), tmp_path / "x.gif"))
    assert sum(times) == pytest.approx(19 * STEP_S * 1000, abs=10)
    seen = {color for f in frames[::3] for _, color in Image.fromarray(f).getcolors(10_000) or ()}
    solid = [STALE, "#ffffff"] + [c for h in HUES.values() for c in (h.light, h.dark, h.outline)]
    missing = [c for c in solid if tuple(int(c[i : i + 2], 16) for i in (1, 3, 5)) not in seen]
    assert missing == [], "colours are the palette's own"
    assert (frames[0][2, 2] == 255).all()


def test_gif_of_one_step(tmp_path: Path) -> None:
    frames, times = gif(fv.save(attention(), tmp_path / "x.gif", [0]))
    assert len(frames) == 1
    assert times == [1400]


def test_gif_colours_fit_in_a_gif() -> None:
    colors = colors_of(attention((3, 5), (3, 2)), range(40))
    assert len(colors) == len(set(colors)) <= 256
    assert all(0 <= x <= 255 for color in colors for x in color)


def test_pictures_are_the_scenes() -> None:
    recording = attention()
    made = list(pictures(recording, range(3, 6), 30))
    assert len(made) == 1 + 2 * FRAMES
    assert sum(seconds for _, seconds in made) == pytest.approx(3 * STEP_S)
    heights = {array.shape for array, _ in made}
    assert len(heights) == 1
    end = next(pictures(recording, [5], 30))[0]
    assert (made[-1][0] == end).all(), "the end of a step looks the same however one gets there"
    assert not (made[FRAMES][0] == made[FRAMES + 1][0]).all()


# -- MP4 ---------------------------------------------------------------------------------------------------------------


def test_mp4_without_ffmpeg_offers_gif_and_html(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match=r"x\.mp4: .*ffmpeg.*install.*\.gif or \.html"):
        fv.save(attention(), tmp_path / "x.mp4")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name == "nt", reason="the stand-in for ffmpeg is a shell script")
@pytest.mark.parametrize("read", ["", "head -c 100000 >/dev/null;", "cat >/dev/null;"])
def test_mp4_where_ffmpeg_fails(read: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "ffmpeg"
    program.write_text(f"#!/bin/sh\n{read} echo 'no encoder for this' >&2; exit 3\n")
    program.chmod(0o755)
    folder = tmp_path / "out"
    folder.mkdir()
    monkeypatch.setattr(movie.shutil, "which", lambda name: str(program))
    with pytest.raises(RuntimeError, match=r"exit status 3\): no encoder for this"):
        fv.save(attention(), folder / "x.mp4", range(3))
    assert list(folder.iterdir()) == []


def test_mp4_for_real(tmp_path: Path) -> None:
    if shutil.which("ffmpeg") is None or shutil.which("ffprobe") is None:
        pytest.skip("ffmpeg is missing; on Debian and Ubuntu: apt-get install ffmpeg")
    target = fv.save(attention(), tmp_path / "x.mp4", range(4))
    ask = ["ffprobe", "-v", "error", "-select_streams", "v", "-show_entries", "stream=width,height,pix_fmt,duration"]
    said: Any = subprocess.run([*ask, "-of", "csv=p=0", str(target)], capture_output=True, text=True, check=True)
    width, height, pixels, seconds = said.stdout.strip().split(",")
    assert (width, height, pixels) == ("752", "912", "yuv420p")
    assert float(seconds) == pytest.approx(4 * STEP_S, abs=0.06)
