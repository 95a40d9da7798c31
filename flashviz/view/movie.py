"""All steps in one file that moves by itself: an animated SVG, a GIF, an MP4. They sample the same scene as the player."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flashviz.recording import Recording
from flashviz.view.draw import HEIGHT, WIDTH, blank, draw
from flashviz.view.palette import GROUND
from flashviz.view.scene import scene
from flashviz.view.svg import css_id, fragment, tween_css

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
        f'height="{HEIGHT:g}" role="img"><title>{css_title(recording)}</title><style>{"".join(css)}{still}</style>'
        f'<defs>{defs}</defs><rect width="100%" height="100%" rx="6" fill="{GROUND}"/>{"".join(groups)}</svg>\n'
    )


def css_title(recording: Recording) -> str:
    """What the movie is, for screen readers."""
    from html import escape

    return escape(f"{recording.algorithm.replace('_', ' ')}: {len(recording.steps)} steps")


def pictures(recording: Recording, steps: Sequence[int], dpi: float) -> Iterator[tuple[Any, float]]:
    """(RGB array, seconds it stands) for every picture of a movie."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    for position, number in enumerate(steps):
        times = [1.0] if position == 0 else [k / FRAMES for k in range(1, FRAMES + 1)]
        for t in times:
            figure, axes = blank(dpi)
            draw(axes, (s for s in scene(recording, number, t).shapes if t < 1 or not s.under))
            canvas: Any = FigureCanvasAgg(figure)
            canvas.draw()
            last = TWEEN_S / FRAMES + PAUSE_S if len(times) > 1 else TWEEN_S + PAUSE_S
            yield np.asarray(canvas.buffer_rgba())[..., :3].copy(), last if t == 1.0 else TWEEN_S / FRAMES


def save_gif(recording: Recording, steps: Sequence[int], path: Path, dpi: float = 60.0) -> None:
    """Write a GIF; each step takes the same time, also where pictures are alike."""
    from PIL import Image

    frames: list[Any] = []
    times: list[int] = []
    due = 0.0
    for array, seconds in pictures(recording, steps, dpi):
        due += seconds * 100
        now = round(due) - sum(times)
        if frames and array.tobytes() == frames[-1][1]:
            times[-1] += now
        else:
            frames.append((Image.fromarray(array), array.tobytes()))
            times.append(now)
    colors = frames[-1][0].quantize(128)
    images = [image.quantize(palette=colors, dither=Image.Dither.NONE) for image, _ in frames]
    durations = [10 * t for t in times]
    images[0].save(path, "GIF", save_all=True, append_images=images[1:], duration=durations, loop=0, disposal=1)


def need_ffmpeg(name: str) -> None:
    """Say what to do where MP4 cannot be written.

    Raises:
        RuntimeError: there is no ffmpeg.
    """
    if shutil.which("ffmpeg") is None:
        raise RuntimeError(
            f"{name}: writing MP4 needs the program ffmpeg, which is not on the PATH; install it "
            "(conda install -c conda-forge ffmpeg, apt-get install ffmpeg, brew install ffmpeg, winget install ffmpeg), "
            "or save a .gif or .html, which need nothing"
        )


def save_mp4(recording: Recording, steps: Sequence[int], path: Path, dpi: float = 90.0) -> None:
    """Write an MP4 through matplotlib's ffmpeg writer; see :func:`need_ffmpeg`."""
    from matplotlib.animation import FFMpegWriter
    from matplotlib.figure import Figure

    rate = 20
    writer = FFMpegWriter(fps=rate, codec="h264", extra_args=["-pix_fmt", "yuv420p"])
    width, height = (round(x / 72 * dpi / 2) * 2 for x in (WIDTH, HEIGHT))
    figure = Figure(figsize=(width / dpi, height / dpi), dpi=dpi)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    with writer.saving(figure, str(path), dpi):
        due = 0.0
        written = 0
        for array, seconds in pictures(recording, steps, dpi):
            axes.clear()
            axes.set_axis_off()
            axes.imshow(array, aspect="auto")
            due += seconds * rate
            while written < round(due):
                writer.grab_frame()
                written += 1
