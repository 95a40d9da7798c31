"""Compare: two recordings side by side on one slider."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from html import escape
from typing import Any

import ipywidgets as widgets

from flashviz.checks.traffic import running
from flashviz.player import close_all, remember
from flashviz.recording import as_recording
from flashviz.view import panel
from flashviz.view.storyboard import png, storyboard
from flashviz.view.svg import STEP_MS, frame_svg


class Comparison:
    """Two pictures that step together; the shorter recording waits at its end.

    Args:
        first, second: runs or recordings.
        names: what to call them; their algorithms when not given.
    """

    def __init__(self, first: Any, second: Any, names: Sequence[str] | None = None) -> None:
        self.recordings = (as_recording(first), as_recording(second))
        self.names = tuple(names) if names else tuple(r.algorithm.replace("_", " ") for r in self.recordings)
        if len(self.names) != 2:
            raise ValueError(f"{len(self.names)} names for two runs")
        self._counts = tuple(running(r) for r in self.recordings)
        self._shown, self._closed = 0, False
        last = len(self) - 1
        w = widgets
        self.slider = w.IntSlider(value=0, min=0, max=last, description="Step", layout=w.Layout(flex="1 1 240px"))
        self.play = w.Play(value=0, min=0, max=last, interval=STEP_MS + 350)
        back, forward = w.Button(description="‹ Back"), w.Button(description="Next ›")
        back.on_click(lambda _: self.go(self._shown - 1))
        forward.on_click(lambda _: self.go(self._shown + 1))
        self.play.show_repeat = False
        # Not linked in the browser: an earlier value that the kernel sends back would move the slider while it is dragged.
        for control in (self.play, self.slider):
            control.observe(lambda change: self.go(change["new"]), "value")
        self.pictures = (w.HTML(), w.HTML())
        self.texts = (w.HTML(), w.HTML())
        sides = [
            w.VBox([text, picture], layout=w.Layout(flex="1 1 360px", max_width="560px"))
            for text, picture in zip(self.texts, self.pictures, strict=True)
        ]
        row = w.Layout(flex_flow="row wrap", align_items="flex-start", grid_gap="16px")
        style = w.HTML(f"<style>{panel.STYLE}</style>", layout=w.Layout(display="none"))
        controls = w.HBox([self.play, back, forward, self.slider], layout=w.Layout(flex_flow="row wrap"))
        legend = w.HTML(panel.legend_html(self.recordings[0]) + panel.NAMES)
        self.widget = w.VBox([controls, w.HBox(sides, layout=row), legend, style])
        self.widget.add_class("fv-player")
        self._name = f"fvc{uuid.uuid4().hex[:8]}"
        self._draw(False)

    def __len__(self) -> int:
        return max(len(r.steps) for r in self.recordings)

    def __repr__(self) -> str:
        lengths = " and ".join(f"{n} ({len(r.steps)} steps)" for n, r in zip(self.names, self.recordings, strict=True))
        return f"Comparison({lengths})"

    @property
    def index(self) -> int:
        """The step shown; a recording that is shorter stays at its last one."""
        return self._shown

    def go(self, index: int) -> None:
        """Show a step of both; past either end, the end."""
        index = min(max(int(index), 0), len(self) - 1)
        if index != self._shown:
            follows = index == self._shown + 1
            self._shown = index
            self._draw(follows)
        self.slider.value = self.play.value = index

    def close(self) -> None:
        """Close the widgets."""
        if not self._closed:
            self._closed = True
            close_all(self.widget)

    def _draw(self, tween: bool) -> None:
        for side, recording in enumerate(self.recordings):
            last = len(recording.steps) - 1
            number = min(self._shown, last)
            moving = tween and self._shown <= last
            self.pictures[side].value = frame_svg(
                recording, number, f"{self._name}{side}s{number}{moving}", tween=moving
            )
            done = " · done" if self._shown > last else ""
            counts = panel.counts_text(self._counts[side][number])
            head = f"<b>{escape(self.names[side])}</b>, step {number} of {last}{done}"
            self.texts[side].value = f'<div class="fv-now">{head}<br>{escape(counts)}</div>'

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        del include, exclude
        longest = max(self.recordings, key=lambda r: len(r.steps))
        bundle: dict[str, Any] = {"text/plain": repr(self), "image/png": png(storyboard(longest))}
        if not self._closed:
            view = {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}
            bundle["application/vnd.jupyter.widget-view+json"] = view
        return bundle


def compare(first: Any, second: Any, names: Sequence[str] | None = None) -> Comparison:
    """Two recordings on one slider, with what each has moved so far.

    Args:
        first, second: runs or recordings.
        names: what to call them; their algorithms when not given.

    Raises:
        ValueError: a run was made with ``record=False``, or there are not two names.
    """
    comparison = Comparison(first, second, names)
    remember(comparison)
    return comparison
