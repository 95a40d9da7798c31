"""Texts that fit: how wide letters are, the size at which a text fits a box, and what is cut off where none does.

Requirements: no font is read, so that a scene is the same data everywhere; widths are upper bounds for DejaVu Sans, the
font that matplotlib brings along. A text from a recording is cleaned of what no document can hold.
"""

from __future__ import annotations

import re
from functools import lru_cache

UNIT = 64.0
"""Points for a unit of the canvas."""
LEAST = 5.0
"""No text is smaller than this many points: it is cut off instead."""
_NARROW, _WIDE = frozenset("'ijlIJ ,./:;\\|f-()[]t!r·"), frozenset("mMW%@w#+<=>^~")
_NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def clean(text: str) -> str:
    """One line of text that XML can hold: white space runs are one space, control characters are marked.

    >>> clean("load\\n Q\\0")
    'load Q�'
    """
    return printable(" ".join(text.split()))


def printable(text: str) -> str:
    """Text without the characters that no XML document can hold."""
    return _NOT_XML.sub("�", text)


@lru_cache(maxsize=4096)
def ems(text: str) -> float:
    """At most how wide a line of text is, in units of its size."""
    return sum(
        0.42
        if c in _NARROW
        else 1.0
        if c in _WIDE
        else 1.1
        if not c.isascii()
        else 0.79
        if c.isupper() or c == "&"
        else 0.64
        for c in text
    )


def fit(text: str, size: float, w: float, h: float = 10.0) -> float:
    """The size, at most ``size`` and at least :data:`LEAST`, at which a text fits a box of w × h canvas units.

    >>> fit("Q0", 14, 1.6, 1.2), fit("L11", 10, 0.25), fit("Q0", 14, 1.6, 0.2)
    (14, 7.11, 9.21)
    """
    room = 0.92 * w * UNIT / max(ems(text), 0.1)
    best = min(size, h * UNIT * 0.72, room)
    return size if best == size else max(LEAST, int(best * 100) / 100)


def shorten(text: str, size: float, w: float) -> str:
    """As much of a text as fits a width, with an ellipsis where something is cut off."""
    room = w * UNIT / size
    if ems(text) <= room:
        return text
    kept = text[: max(1, int(room / 0.42))]
    while len(kept) > 1 and ems(kept) + 1 > room:
        kept = kept[:-1]
    return kept.rstrip() + "…" if ems(kept) + 1 <= room else "…" if room >= 1 else ""


def wrap(text: str, size: float, w: float, lines: int = 3) -> str:
    """A text in lines of at most that width; what does not fit in ``lines`` of them is cut off."""
    out = [""]
    for word in text.split():
        longer = f"{out[-1]} {word}" if out[-1] else word
        if out[-1] and ems(longer) * size > w * UNIT:
            out.append(word)
        else:
            out[-1] = longer
    if len(out) > lines:
        out[lines - 1 :] = [f"{out[lines - 1]} …"]
    return "\n".join(shorten(line, size, w) for line in out)
