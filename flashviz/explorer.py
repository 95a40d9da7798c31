"""Explore: sliders that record again, with the player below. Change a size and see what the recording becomes."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

import ipywidgets as widgets

from flashviz.checks.traffic import traffic
from flashviz.player import Player
from flashviz.recording import as_recording
from flashviz.view.storyboard import png, storyboard


class Explorer:
    """Sliders for the arguments of ``make``, which returns a run or a recording, and a player of what it returns.

    A call that raises shows the message and keeps the last recording. Display it as a cell's last line.
    """

    def __init__(self, make: Callable[..., Any], **ranges: tuple[int, int, int]) -> None:
        self._make = make
        self._sliders = {}
        for name, (low, value, high) in ranges.items():
            if not low <= value <= high:
                raise ValueError(f"{name}=({low}, {value}, {high}): give (least, value at the start, most)")
            self._sliders[name] = widgets.IntSlider(
                value=value, min=low, max=high, description=name, continuous_update=False
            )
        self._note = widgets.HTML()
        self._place = widgets.VBox()
        self.player: Player | None = None
        row = widgets.HBox(list(self._sliders.values()), layout=widgets.Layout(flex_flow="row wrap"))
        self.widget = widgets.VBox([row, self._note, self._place])
        for slider in self._sliders.values():
            slider.observe(self._changed, "value")
        self._record()

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={slider.value}" for name, slider in self._sliders.items())
        return f"Explorer({sizes})"

    @property
    def values(self) -> dict[str, int]:
        """What the sliders say."""
        return {name: slider.value for name, slider in self._sliders.items()}

    def set(self, **values: int) -> None:
        """Move sliders."""
        for name, value in values.items():
            self._sliders[name].value = value

    def _changed(self, _: Any) -> None:
        try:
            self._record()
        except (ValueError, TypeError, IndexError) as error:
            self._note.value = f'<div role="alert">{escape(str(error))}</div>'

    def _record(self) -> None:
        recording = as_recording(self._make(**self.values))
        old, self.player = self.player, Player(recording)
        counted = traffic(recording)
        trips = ", ".join(f"{name} {trip:g}" for name, trip in counted.trips.items())
        self._note.value = (
            f"<div>{len(recording.steps)} steps · {counted.fetches} fetches, {counted.bytes_read:,} bytes read · "
            f"{counted.stores} stores, {counted.bytes_written:,} bytes written · trips: {escape(trips)}</div>"
        )
        self._place.children = (self.player.widget,)
        if old is not None:
            old.close()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        del include, exclude
        assert self.player is not None
        view = {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}
        return {
            "text/plain": repr(self),
            "image/png": png(storyboard(self.player.recording)),
            "application/vnd.jupyter.widget-view+json": view,
        }


def explore(make: Callable[..., Any], **ranges: tuple[int, int, int]) -> Explorer:
    """Sliders over the integer arguments of ``make``; moving one records again and plays the new recording.

    Args:
        make: a function that returns a run or a recording.
        ranges: for each argument, (least, value at the start, most).

    Raises:
        ValueError: a range is not in order; and whatever ``make`` raises for the values at the start.
    """
    return Explorer(make, **ranges)
