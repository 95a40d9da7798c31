"""All steps in one file that moves by itself: an animated SVG, a GIF, an MP4. They sample the same scene as the player."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg

from flashviz.recording import Recording
from flashviz.view.draw import HEIGHT, WIDTH, blank
from flashviz.view.palette import GROUND, OUTLINE, STALE, TEXT
from flashviz.view.paths import Paths, add_all
from flashviz.view.scene import scene
from flashviz.view.shapes import Shape
from flashviz.view.svg import FAMILY, css_id, fragment, tween_css
from flashviz.view.text import clean

TWEEN_S, PAUSE_S = 0.9, 0.5
FRAMES = 9
"""Pictures of a tween in a GIF or MP4; the last one stands still for the pause."""


def movie_svg(recording: Recording, steps: Sequence[int], prefix: str = "fv") -> str:
    """An SVG that plays the steps over and over, with CSS alone; readers who ask for less motion see the last step."""
    count, length = len(steps), TWEEN_S + PAUSE_S
    total = count * length
    shapes: dict[str, str] = {}
    css: list[str] = []
    groups = []
    for n, number in enumerate(steps):
        end = scene(recording, number, 1.0)
        start = {s.id: s for s in scene(recording, number, 0.0).shapes}
        uses = []
        for shape in end.shapes:
            drawn = fragment(shape)
            ref = shapes.setdefault(drawn, f"{prefix}f{len(shapes)}")
            motion = tween_css(shape, start[shape.id]) if shape.id in start else None
            key = ""
            if motion:
                name = f"{prefix}{n}-{css_id(shape.id)}"
                key = f' id="{name}"'
                a = 100 * (n * length + shape.start * TWEEN_S) / total
                b = 100 * (n * length + shape.end * TWEEN_S) / total
                easing, _, origin = motion[1].partition(";")
                css.append(
                    f"@keyframes {name}{{0%,{a:.4f}%{{{motion[0]};animation-timing-function:{easing}}}"
                    f"{b:.4f}%,100%{{transform:none}}}}#{name}{{animation:{name} {total:.2f}s infinite;{origin}}}"
                )
            uses.append(f'<use href="#{ref}"{key}/>')
        a, b = 100 * n / count, 100 * (n + 1) / count
        if count > 1:
            before = "0%{visibility:hidden}" if n else ""
            after = f"{b:.4f}%{{visibility:hidden}}" if n < count - 1 else ""
            css.append(
                f"@keyframes {prefix}s{n}{{{before}{a:.4f}%{{visibility:visible}}{after}}}"
                f"#{prefix}s{n}{{animation:{prefix}s{n} {total:.2f}s step-end infinite}}"
            )
        hidden = ' visibility="hidden"' if n < count - 1 else ""
        groups.append(f'<g id="{prefix}s{n}"{hidden}>{"".join(uses)}</g>')
    defs = "".join(f'<g id="{ref}">{drawn}</g>' for drawn, ref in shapes.items())
    still = "@media (prefers-reduced-motion:reduce){*{animation:none!important}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" width="{WIDTH:g}" '
        f'height="{HEIGHT:g}" font-family="{FAMILY}" role="img"><title>{css_title(recording)}</title><style>{"".join(css)}{still}</style>'
        f'<defs>{defs}</defs><rect width="100%" height="100%" rx="6" fill="{GROUND}"/>{"".join(groups)}</svg>\n'
    )


def css_title(recording: Recording) -> str:
    """What the movie is, for screen readers."""
    return escape(clean(f"{recording.algorithm.replace('_', ' ')}: {len(recording.steps)} steps"))


Picture = np.ndarray[Any, np.dtype[np.uint8]]


def pictures(recording: Recording, steps: Sequence[int], dpi: float) -> Iterator[tuple[Picture, float]]:
    """(RGB array, seconds it stands) for every picture of a movie; pictures that are alike are one object."""
    figure, axes = blank(dpi)
    canvas: Any = FigureCanvasAgg(figure)
    last: tuple[Shape, ...] = ()
    array = np.zeros((0, 0, 3), np.uint8)
    for position, number in enumerate(steps):
        times = [1.0] if position == 0 else [k / FRAMES for k in range(1, FRAMES + 1)]
        for t in times:
            shapes = scene(recording, number, t).shapes
            if shapes != last:
                paths = Paths(1.0)
                add_all(paths, (s for s in shapes if t < 1 or not s.under))
                artist = paths.draw(axes)
                canvas.draw()
                artist.remove()
                made = np.asarray(canvas.buffer_rgba())[..., :3]
                if not np.array_equal(made, array):
                    array = made.copy()
                last = shapes
            still = TWEEN_S / FRAMES + PAUSE_S if len(times) > 1 else TWEEN_S + PAUSE_S
            yield array, still if t == 1.0 else TWEEN_S / FRAMES


def colors_of(recording: Recording, steps: Sequence[int]) -> list[tuple[int, int, int]]:
    """At most 256 colours for a GIF: every solid one of these steps, and what lies between it, the ground and the ink."""
    solid: dict[str, None] = dict.fromkeys((GROUND, TEXT, OUTLINE, STALE))
    for number in steps:
        for shape in scene(recording, number, 1.0).shapes:
            solid |= dict.fromkeys(c for c in (getattr(shape, "fill", None), getattr(shape, "stroke", None)) if c)
    kept = [(int(c[1:3], 16), int(c[3:5], 16), int(c[5:7], 16)) for c in solid]
    for part in (0.5, 0.25, 0.75):
        for to in kept[:2]:
            for color in kept[: len(solid)]:
                r, g, b = (round(x + (y - x) * part) for x, y in zip(color, to, strict=True))
                # Pillow looks colours up in steps of 4: one close to a solid colour could be taken for it.
                if all(max(abs(r - x), abs(g - y), abs(b - z)) >= 9 for x, y, z in kept):
                    kept.append((r, g, b))
    return kept[:256]


def save_gif(recording: Recording, steps: Sequence[int], path: Path, dpi: float = 60.0) -> None:
    """Write a GIF; each step takes the same time, also where pictures are alike."""
    from PIL import Image

    palette = Image.new("P", (1, 1))
    palette.putpalette([x for color in colors_of(recording, steps) for x in color])
    images: list[Any] = []
    times: list[int] = []
    due = 0.0
    before: Picture | None = None
    for array, seconds in pictures(recording, steps, dpi):
        due += seconds * 100
        now = round(due) - sum(times)
        if array is before:
            times[-1] += now
        else:
            images.append(Image.fromarray(array).quantize(palette=palette, dither=Image.Dither.NONE))
            times.append(now)
        before = array
    durations = [10 * t for t in times]
    images[0].save(path, "GIF", save_all=True, append_images=images[1:], duration=durations, loop=0, disposal=1)


def need_ffmpeg(name: str) -> str:
    """The path of ffmpeg, or what to do where MP4 cannot be written.

    Raises:
        RuntimeError: there is no ffmpeg.
    """
    program = shutil.which("ffmpeg")
    if program is None:
        raise RuntimeError(
            f"{name}: writing MP4 needs the program ffmpeg, which is not on the PATH; install it "
            "(conda install -c conda-forge ffmpeg, apt-get install ffmpeg, brew install ffmpeg, winget install ffmpeg), "
            "or save a .gif or .html, which need nothing"
        )
    return program


def save_mp4(recording: Recording, steps: Sequence[int], path: Path, dpi: float = 90.0) -> None:
    """Write an MP4 by piping the pictures into ffmpeg.

    Raises:
        RuntimeError: there is no ffmpeg, or it failed; with the end of what it said.
    """
    program = need_ffmpeg(path.name)
    rate, due, written = 20, 0.0, 0
    width, height = (round(x / 72 * dpi) for x in (WIDTH, HEIGHT))
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", str(rate), "-i", "-"]
    target = ["-an", "-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2", "-pix_fmt", "yuv420p", "-f", "mp4", str(path)]
    with tempfile.TemporaryFile() as said:
        command = [program, "-y", "-loglevel", "error", *source, *target]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=said, stderr=said) as ffmpeg:
            assert ffmpeg.stdin is not None
            try:
                for array, seconds in pictures(recording, steps, dpi):
                    due += seconds * rate
                    data = array.tobytes()
                    while written < round(due):
                        ffmpeg.stdin.write(data)
                        written += 1
                ffmpeg.stdin.close()
            except BrokenPipeError:
                pass  # it ended early: its exit status and its words say why
            except BaseException:
                ffmpeg.kill()
                raise
        if ffmpeg.returncode:
            said.seek(0)
            words = said.read().decode(errors="replace").strip()[-500:]
            raise RuntimeError(f"ffmpeg could not write the MP4 (exit status {ffmpeg.returncode}): {words}")
