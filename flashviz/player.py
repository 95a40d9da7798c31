"""The player: the picture with a slider, a step list and the code beside it, as ipywidgets.

Requirements: the only module that imports ipywidgets, and nothing in it that 7.7 or 8.1 lacks; frames are strings from
a cache that is filled ahead; tweens run in the browser as CSS, never frame by frame from the kernel; showing the same
object twice shows the same state; where there are no widgets, it displays the storyboard as a PNG.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import cached_property
from html import escape
from typing import Any

import ipywidgets as widgets

from flashviz.checks.traffic import running
from flashviz.events import Source
from flashviz.recording import Recording, as_recording
from flashviz.view import panel
from flashviz.view.storyboard import png, storyboard
from flashviz.view.svg import STEP_MS, frame_svg
from flashviz.view.timeline import Strip, strip, timed

SPEEDS = (("0.5 ×", 0.5), ("1 ×", 1.0), ("2 ×", 2.0), ("4 ×", 4.0))
PAUSE_MS = 350
"""How long a step stands still after its tween while playing."""
NUMBERS, TIMELINE = -1, -2
"""The pages beside the picture that are not source code."""
LANGUAGES = {"python": "Python", "cuda": "CUDA"}
MOST_FRAMES = 400
"""Frames that are kept as text; an older one is drawn again when it is asked for."""
MOST_ALIKE = 4
"""Players that stay open of the same code, where the front end does not say which cell runs."""
_open: dict[str, list[tuple[int, Any]]] = {}


class Player:
    """Steps through a recording. Display it as a cell's last line, or call ``display(player)``.

    Args:
        run: a run or a recording.
        steps: the part to play, as a range, a slice or step numbers; everything when not given.
        speed: 1 plays a step in about 1.25 s.

    Attributes:
        index: position in the part that is played, 0 to ``len(player) - 1``; can be set.
        step: number of the step shown.
        widget: the ipywidgets container.
    """

    def __init__(self, run: Any, steps: range | slice | Sequence[int] | None = None, *, speed: float = 1.0) -> None:
        self.recording: Recording = as_recording(run)
        self.steps = panel.part_of(self.recording, steps)
        if speed not in [v for _, v in SPEEDS]:
            raise ValueError(f"speed={speed}: choose one of {', '.join(f'{v:g}' for _, v in SPEEDS)}")
        self._name = f"fv{uuid.uuid4().hex[:8]}"
        self._frames: dict[tuple[int, bool], str] = {}
        self._counts = running(self.recording)
        self._targets = panel.targets_of(self.recording, self.steps)
        self._views: list[_View] = []
        self._shown = 0
        self._busy = False
        self._closed = self._displayed = False
        self._build(speed)
        self._show(0, tween=False)

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        return f"Player({len(self.steps)} steps of {self.recording.algorithm})"

    # -- what the reader sees --------------------------------------------------------------------------------------

    def _build(self, speed: float) -> None:
        last = len(self.steps) - 1
        w = widgets
        self.slider = w.IntSlider(
            value=0, min=0, max=last, description="Step", readout=False,
            layout=w.Layout(flex="1 1 180px", width="auto", min_width="140px"),
        )  # fmt: skip
        self.box = w.BoundedIntText(
            value=0, min=0, max=last, description="Go to", layout=w.Layout(width="130px"),
            style={"description_width": "46px"},
        )  # fmt: skip
        self.box.add_class("fv-box")
        self.slider.style.description_width = "34px"
        self.speed = w.Dropdown(
            options=SPEEDS, value=speed, description="Speed", layout=w.Layout(width="130px"),
            style={"description_width": "46px"},
        )  # fmt: skip
        self.speed.add_class("fv-speed")
        self.buttons = [
            w.Button(description=text, tooltip=tip, layout=w.Layout(width="72px", flex="0 0 auto"))
            for text, tip in (
                ("« First", "First step"),
                ("‹ Back", "Previous step"),
                ("Next ›", "Next step"),
                ("Last »", "Last step"),
            )
        ]
        options = [(text, n) for n, text in enumerate(panel.options_of(self.recording, self.steps))]
        self.list = w.Select(options=options, value=0, rows=9, layout=w.Layout(width="auto", height="176px"))
        self.list.add_class("fv-list")
        self.picture = w.HTML(layout=w.Layout(width="auto"))
        self.counts = w.HTML()
        self.where = w.HTML()
        self.beside = w.HTML(layout=w.Layout(width="auto"))
        self.mark = w.HTML(layout=w.Layout(display="none"))
        pages = [(LANGUAGES.get(s.language, s.language), n) for n, s in enumerate(self.recording.code)]
        pages.append(("Numbers", NUMBERS))
        if timed(self.recording):
            pages.append(("Timeline", TIMELINE))
        self.page = w.ToggleButtons(options=pages, style={"button_width": "auto"})
        style = w.HTML(f"<style>{panel.STYLE}</style>", layout=w.Layout(display="none"))
        legend = w.HTML(panel.legend_html(self.recording) + panel.NAMES, layout=w.Layout(width="auto"))
        left = w.VBox([self.picture, legend])
        left.add_class("fv-left")
        side = [self.list, self.where, self.counts, self.page, self.beside, self.mark]
        right = w.VBox(
            side, layout=w.Layout(flex="1 1 380px", min_width="300px", overflow="hidden", padding="0 0 0 12px")
        )
        both = w.HBox([left, right], layout=w.Layout(display="flex", flex_flow="row wrap", align_items="flex-start"))
        self._shared = ([*self.buttons, self.slider, self.box, self.speed], [both, style])
        self.play = w.Play(value=0, min=0, max=last, layout=w.Layout(flex="0 0 auto"))
        self.widget = self._view(self.play).widget
        for control in (self.slider, self.box, self.list):
            control.observe(self._moved, "value")
        self.page.observe(self._turned, "value")
        self.speed.observe(self._sped, "value")
        goals = (lambda: 0, lambda: self.index - 1, lambda: self.index + 1, lambda: last)
        for button, goal in zip(self.buttons, goals, strict=True):
            button.on_click(lambda _, goal=goal: self.go(goal()))
        self._sped(None)
        self._turned(None)

    def _view(self, play: Any) -> _View:
        """One display of the player: a Play of its own, and everything else shared with the other displays."""
        play.show_repeat = False
        play.add_class("fv-play")
        # Not linked in the browser: what the kernel sends back about an earlier value would then move the slider while
        # it is dragged. One value goes to the kernel, one picture comes back, and everything else follows it.
        play.observe(self._moved, "value")
        play.observe(self._started, _playing(play))
        view = _View(play, *self._shared, (self._name, "fv-player"))
        self._views.append(view)
        return view

    @property
    def index(self) -> int:
        """Position in the part that is played."""
        return self._shown

    @index.setter
    def index(self, value: int) -> None:
        self.go(value)

    @property
    def step(self) -> int:
        """Number of the step shown."""
        return self.steps[self._shown]

    def go(self, index: int) -> None:
        """Show a position of the part; past either end, the end."""
        self._show(min(max(int(index), 0), len(self.steps) - 1))

    def frame(self, index: int, tween: bool = False) -> str:
        """The picture of one position as SVG; drawn once."""
        key = (index, tween)
        if key not in self._frames:
            kind = "t" if tween else "s"
            while len(self._frames) >= MOST_FRAMES:
                del self._frames[next(iter(self._frames))]
            self._frames[key] = frame_svg(self.recording, self.steps[index], f"{self._name}{kind}{index}", tween=tween)
        return self._frames[key]

    def _show(self, index: int, tween: bool | None = None) -> None:
        follows = index == self._shown + 1 and self.steps[index] == self.steps[self._shown] + 1
        self._shown = index
        step = self.recording.steps[self.steps[index]]
        self._busy = True
        try:
            svg = self.frame(index, follows if tween is None else tween)
            self.picture.value = f'<div class="fv-pic" data-index="{index}">{svg}</div>'
            self.slider.value = self.box.value = self.list.value = index
            for view in self._views:
                view.play.value = index
                if index == len(self.steps) - 1:
                    setattr(view.play, _playing(view.play), False)
        finally:
            self._busy = False
        self.counts.value = self._counts_html(index)
        self.where.value = f'<div class="fv-now fv-where" aria-live="polite">{escape(panel.where_text(step))}</div>'
        self._style()
        if self.page.value == NUMBERS:
            self.beside.value = panel.numbers_html(self.recording, self.steps[index])
        if index + 1 < len(self.steps):
            self.frame(index + 1, tween=self.steps[index + 1] == self.steps[index] + 1)

    def _moved(self, change: Any) -> None:
        if not self._busy and change["new"] is not None and change["new"] != self._shown:
            self._show(int(change["new"]))

    def _started(self, change: Any) -> None:
        for view in self._views:
            if change["new"] and view.play is not change["owner"]:
                setattr(view.play, _playing(view.play), False)

    @cached_property
    def _strip(self) -> Strip:
        return strip(self.recording)

    def _turned(self, _: Any) -> None:
        if self.page.value == NUMBERS:
            self.beside.value = panel.numbers_html(self.recording, self.step)
        elif self.page.value == TIMELINE:
            self.beside.value = panel.timeline_html(self._strip)
            self._style()
        else:
            source: Source = self.recording.code[self.page.value]
            self.beside.value = panel.code_html(source, self._targets)

    def _sped(self, _: Any) -> None:
        for view in self._views:
            view.play.interval = round((STEP_MS + PAUSE_MS) / self.speed.value)
        self._style()

    def _style(self) -> None:
        tween = STEP_MS / self.speed.value
        marked = panel.mark_css(self._name, self.recording.steps[self.step])
        if self.page.value == TIMELINE:
            marked += panel.timeline_css(self._name, self._strip, self.step)
        self.mark.value = f"<style>.{self._name}{{--fv-step:{tween:.0f}ms}}{marked}</style>"

    def _counts_html(self, index: int) -> str:
        return f'<div class="fv-now fv-counts">{escape(panel.counts_text(self._counts[self.steps[index]]))}</div>'

    # -- where it is displayed -------------------------------------------------------------------------------------

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        del include, exclude
        numbers = None if len(self.steps) == len(self.recording.steps) else self.steps
        bundle: dict[str, Any] = {"text/plain": repr(self), "image/png": png(storyboard(self.recording, numbers))}
        if not self._closed:
            widget = self._display()
            view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
            bundle["application/vnd.jupyter.widget-view+json"] = view
        return bundle

    def _display(self) -> Any:
        """The widget to display: another one each time, because two views of one Play stop each other in the browser."""
        if not self._displayed:
            self._displayed = True
            return self.widget
        first = self.play
        play = widgets.Play(value=self._shown, min=0, max=first.max, interval=first.interval)
        view = self._view(play)
        remember(view)
        self._views = [v for v in self._views if not v.closed]
        return view.widget

    def close(self) -> None:
        """Close the widgets; the frames stay."""
        if not self._closed:
            self._closed = True
            for view in self._views:
                view.close()
            for widget in (*self._shared[0], *self._shared[1]):
                close_all(widget)


class _View:
    """A display of a player: the containers and a Play. What is shared with other displays is not closed with it."""

    def __init__(self, play: Any, controls: list[Any], rest: list[Any], classes: Sequence[str]) -> None:
        self.play = play
        row = widgets.Layout(display="flex", flex_flow="row wrap", align_items="center")
        self.controls = widgets.HBox([play, *controls], layout=row)
        self.widget = widgets.VBox([self.controls, *rest])
        for name in classes:
            self.widget.add_class(name)
        self.closed = False

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.controls.children = self.widget.children = ()
            for widget in (self.play, self.controls, self.widget):
                close_all(widget)


def play(run: Any, steps: range | slice | Sequence[int] | None = None, *, speed: float = 1.0) -> Player:
    """A player for a run or a recording: slider, play, step list, code and numbers beside the picture.

    Args:
        run: a run or a recording.
        steps: the part to play, as a range, a slice or step numbers; everything when not given.
        speed: 0.5, 1, 2 or 4.

    Raises:
        ValueError: the run was made with ``record=False``, the part is empty, or there is no such speed.
        IndexError: there is no such step.
        TypeError: not a run or a recording, or ``steps`` is neither a range, a slice nor numbers.
    """
    player = Player(run, steps, speed=speed)
    remember(player)
    return player


def _playing(play: Any) -> str:
    """The trait that says that it plays, in ipywidgets 8 or 7."""
    return "playing" if play.has_trait("playing") else "_playing"


def close_all(widget: Any) -> None:
    """Close a widget, what is in it, and their layouts and styles."""
    for child in getattr(widget, "children", ()):
        close_all(child)
    for part in (widget.layout, getattr(widget, "style", None), widget):
        if isinstance(part, widgets.Widget):
            part.close()


def remember(shown: Any) -> None:
    """Close what earlier runs of the same cell made. Outside a notebook it does nothing.

    Where the front end does not say which cell runs, the code stands for the cell. Two cells may hold the same code, so
    the latest few are left open then.
    """
    try:
        from IPython import get_ipython

        shell: Any = get_ipython()
        parent = shell.get_parent()
        run = int(shell.execution_count)
    except (ImportError, AttributeError):
        return
    cell = parent.get("metadata", {}).get("cellId")
    key = cell or parent.get("content", {}).get("code")
    if not key:
        return
    known = _open.get(key, [])
    old = [entry for entry in known if entry[0] != run]
    keep = 0 if cell else MOST_ALIKE - 1
    for _, player in old[: max(0, len(old) - keep)]:
        player.close()
    _open[key] = [*old[max(0, len(old) - keep) :], *(e for e in known if e[0] == run), (run, shown)]
