"""The player as one page: the same steps, list, code and controls with a small script, no kernel and no network."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from flashviz.checks.traffic import running
from flashviz.recording import Recording, as_recording
from flashviz.view import panel
from flashviz.view.svg import STEP_MS, frame_svg


class Page:
    """A self-contained player: displays itself in a notebook, and ``.document()`` is a whole HTML file.

    Args:
        run: a run or a recording.
        steps: the part to show, as a range, a slice or step numbers; everything when not given.
        name: begins every id in it; the script adds something of its own, so that pages do not disturb each other.
    """

    def __init__(self, run: Any, steps: range | slice | Sequence[int] | None = None, name: str = "fvpage") -> None:
        self.recording: Recording = as_recording(run)
        self.steps = panel.part_of(self.recording, steps)
        self.name = name

    def __repr__(self) -> str:
        return f"Page({len(self.steps)} steps of {self.recording.algorithm})"

    def _repr_html_(self) -> str:
        return self.fragment()

    def data(self) -> dict[str, Any]:
        """What the script shows: pictures, marks and texts of every step, and the code."""
        recording, counts = self.recording, running(self.recording)
        targets = panel.targets_of(recording, self.steps)
        steps = []
        for position, number in enumerate(self.steps):
            step = recording.steps[number]
            follows = position > 0 and self.steps[position - 1] == number - 1
            steps.append(
                {
                    "svg": frame_svg(recording, number, f"{self.name}s{position}", tween=follows),
                    "css": panel.mark_css(self.name, step),
                    "where": panel.where_text(step),
                    "counts": panel.counts_text(counts[number]),
                    "numbers": panel.numbers_html(recording, number),
                }
            )
        pages = [{"name": s.language, "html": panel.code_html(s, targets)} for s in recording.code]
        return {"steps": steps, "code": pages, "tween": STEP_MS}

    def fragment(self) -> str:
        """The player as a piece of HTML."""
        raw = json.dumps(self.data(), separators=(",", ":")).encode()
        packed = base64.b64encode(zlib.compress(raw, 9)).decode()
        labels = panel.options_of(self.recording, self.steps)
        options = "".join(f'<option value="{n}">{escape(text)}</option>' for n, text in enumerate(labels))
        text = files("flashviz.view").joinpath("page.html").read_text(encoding="utf-8")
        values = {
            "NAME": self.name,
            "LAST": str(len(self.steps) - 1),
            "OPTIONS": options,
            "LEGEND": panel.legend_html(self.recording),
            "STYLE": panel.STYLE,
            "DATA": packed,
        }
        # In one pass: what is filled in may hold such a mark itself, in a label, and must not be filled in again.
        return re.sub(r"@([A-Z]+)@", lambda mark: values.get(mark[1], mark[0]), text)

    def document(self) -> str:
        """The player as a whole HTML file."""
        title = escape(f"{self.recording.algorithm.replace('_', ' ')} · flashviz")
        return (
            '<!doctype html><html lang="en" style="color-scheme:light dark"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            f"<title>{title}</title></head>"
            '<body style="margin:16px">'
            f"{self.fragment()}</body></html>\n"
        )


def page(run: Any, steps: range | slice | Sequence[int] | None = None) -> Page:
    """A player that needs no kernel and no widgets: the same steps, code and controls as one piece of HTML.

    Args:
        run: a run or a recording.
        steps: the part to show, as a range, a slice or step numbers; everything when not given.
    """
    return Page(run, steps)
