"""Explore: sliders that record again, with the player below, or that draw a picture again. Change a size and see what becomes of it."""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Callable
from html import escape
from typing import Any

import ipywidgets as widgets

from flashviz.checks.traffic import traffic
from flashviz.player import Player, close_all, remember
from flashviz.recording import Recording, as_recording
from flashviz.view.figure import Figure
from flashviz.view.storyboard import png, storyboard


class Explorer:
    """Sliders for the arguments of ``make``, which returns a run, a recording or a picture, and what it returns: runs are played.

    A call that raises shows the message and keeps what was shown. Display it as a cell's last line.
    """

    def __init__(self, make: Callable[..., Any], **ranges: tuple[int, int, int]) -> None:
        self._make = make
        for name, limits in ranges.items():
            if len(limits) != 3 or not limits[0] <= limits[1] <= limits[2]:
                raise ValueError(f"{name}={limits}: give (least, value at the start, most)")
        made = make(**{name: value for name, (_, value, _) in ranges.items()})
        self._sliders = {
            name: widgets.IntSlider(value=value, min=low, max=high, description=name, continuous_update=False)
            for name, (low, value, high) in ranges.items()
        }
        self._note = widgets.HTML()
        self._place = widgets.VBox()
        self._closed = False
        row = widgets.HBox(list(self._sliders.values()), layout=widgets.Layout(flex_flow="row wrap"))
        self.widget = widgets.VBox([row, self._note, self._place])
        for slider in self._sliders.values():
            slider.observe(self._changed, "value")
        self.player: Player | None = None
        self.picture: bytes | None = None
        self._show(made)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={slider.value}" for name, slider in self._sliders.items())
        return f"Explorer({sizes})"

    @property
    def values(self) -> dict[str, int]:
        """What the sliders say."""
        return {name: slider.value for name, slider in self._sliders.items()}

    def set(self, **values: int) -> None:
        """Move sliders: past either end, to the end.

        Raises:
            KeyError: there is no slider of that name.
        """
        for name, value in values.items():
            if name not in self._sliders:
                raise KeyError(f"no slider {name!r}; there are {', '.join(self._sliders)}")
            self._sliders[name].value = value

    def close(self) -> None:
        """Close the widgets and the player's."""
        if not self._closed:
            self._closed = True
            if self.player is not None:
                self.player.close()
                self._place.children = ()
            close_all(self.widget)

    def _changed(self, _: Any) -> None:
        try:
            self._show(self._make(**self.values))
        except Exception as error:  # the reader's own function: whatever it raises has to be seen
            text = f"{type(error).__name__}: {error}"
            self._note.value = f'<div role="alert" style="white-space:pre-wrap">{escape(text)}</div>'

    def _show(self, made: Any) -> None:
        if hasattr(made, "_repr_png_"):
            self._draw(made)
        else:
            self._play(as_recording(made))

    def _draw(self, made: Any) -> None:
        self.picture = _lighter(made._repr_png_())
        said = escape(
            ", ".join(f"{name} = {value}" for name, value in self.values.items())
            if isinstance(made, Figure)
            else repr(made)
        )
        data = b64encode(self.picture).decode()
        image = widgets.HTML(f'<img alt="{said}" style="max-width:100%" src="data:image/png;base64,{data}">')
        old, self._place.children = self._place.children, (image,)
        for widget in old:
            close_all(widget)
        self._note.value = "" if isinstance(made, Figure) else f"<div>{said}</div>"

    def _play(self, recording: Recording) -> None:
        old = self.player
        self.player = Player(recording, speed=old.speed.value if old else 1.0)
        if old is not None and old.page.value in [value for _, value in self.player.page.options]:
            self.player.page.value = old.page.value
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
        drawn = self.picture if self.player is None else png(storyboard(self.player.recording))
        bundle: dict[str, Any] = {"text/plain": repr(self), "image/png": drawn}
        if not self._closed:
            view = {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}
            bundle["application/vnd.jupyter.widget-view+json"] = view
        return bundle


def _lighter(picture: bytes) -> bytes:
    """The PNG with a palette of 128 colours, a third of its bytes: a slider sends one for each move."""
    from PIL import Image  # matplotlib needs it

    out = io.BytesIO()
    with Image.open(io.BytesIO(picture)) as image:
        image.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(out, "png", optimize=True)
    return out.getvalue()


def explore(make: Callable[..., Any], **ranges: tuple[int, int, int]) -> Explorer:
    """Sliders over the integer arguments of ``make``; moving one records again and plays the new recording, or draws the picture again.

    Args:
        make: a function that returns a run or a recording, or else always a picture: ``fv.swizzle``.
        ranges: for each argument, (least, value at the start, most).

    Raises:
        ValueError: a range is not in order; and whatever ``make`` raises for the values at the start.
    """
    explorer = Explorer(make, **ranges)
    remember(explorer)
    return explorer
