"""Save a run to a file, by its suffix."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flashviz.recording import Recording, as_recording

SUFFIXES = (".json", ".html", ".svg", ".png", ".gif", ".mp4")


def save(run: Any, path: str | os.PathLike[str], steps: Sequence[int] | range | slice | None = None) -> Path:
    """Write a run or a recording to a file and return its path.

    The suffix says what is written: ``.json`` the recording itself (see :func:`flashviz.load`), ``.html`` a
    self-contained player, ``.svg`` an animated picture of all steps, ``.png`` the storyboard, ``.gif`` and ``.mp4``
    movies. The file appears whole or not at all.

    Args:
        run: a run or a recording.
        path: where to; its folder must exist.
        steps: only these steps, as a range, a slice or step numbers (not for ``.json``).

    Raises:
        ValueError: another suffix, or no steps; IndexError: there is no such step; FileNotFoundError: there is no such
        folder; RuntimeError: MP4 without ffmpeg.
    """
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{target.name}: the suffix {suffix!r} is none of {', '.join(SUFFIXES)}")
    recording = as_recording(run)
    if suffix == ".json":
        if steps is not None:
            raise ValueError("a .json file holds the whole recording: leave steps= out")
        from flashviz.files import save_json

        save_json(recording, target)
        return target
    from flashviz.view.panel import part_of

    numbers = part_of(recording, steps)
    if suffix == ".mp4":
        from flashviz.view.movie import need_ffmpeg

        need_ffmpeg(target.name)
    write = _writer(suffix)
    folder = target.parent
    if not folder.is_dir():
        raise FileNotFoundError(f"{target}: there is no folder {folder}; make it first")
    handle, name = tempfile.mkstemp(suffix=suffix, dir=folder)
    os.close(handle)
    try:
        write(recording, numbers, Path(name))
        Path(name).chmod(0o644)  # mkstemp's file is its owner's alone
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return target


def _writer(suffix: str) -> Callable[[Recording, Sequence[int], Path], None]:
    from flashviz.view import movie, page, storyboard

    def html(recording: Recording, numbers: Sequence[int], path: Path) -> None:
        path.write_text(page.Page(recording, numbers, name="fvp").document(), encoding="utf-8", newline="\n")

    def svg(recording: Recording, numbers: Sequence[int], path: Path) -> None:
        path.write_text(movie.movie_svg(recording, numbers), encoding="utf-8", newline="\n")

    def sheet(recording: Recording, numbers: Sequence[int], path: Path) -> None:
        path.write_bytes(storyboard.png(storyboard.storyboard(recording, numbers)))

    writers: dict[str, Callable[[Recording, Sequence[int], Path], None]] = {
        ".html": html,
        ".svg": svg,
        ".png": sheet,
        ".gif": movie.save_gif,
        ".mp4": movie.save_mp4,
    }
    return writers[suffix]
