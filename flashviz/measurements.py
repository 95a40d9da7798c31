"""Figures that were measured on a GPU and travel with the chapters, each with where it was measured.

They are the JSON that the scripts in ``benchmarks/`` print, stored as ``_measured/NAME.json``. A chapter that has none
says so; it never shows a figure that nobody measured.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "_measured"


@dataclass(frozen=True)
class Measured:
    """One script's figures.

    Args:
        name: whose.
        where: the machine and the day, in words.
        data: what the script printed; times in milliseconds, bandwidths in TB/s (10¹² bytes a second).
    """

    name: str
    where: str
    data: dict[str, Any]

    def __repr__(self) -> str:
        return f"Measured({self.name!r}, {self.where})"

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The timed cases, one dictionary each."""
        return list(self.data["rows"])


def measured(name: str) -> Measured | None:
    """The figures stored under a name (``"flash_decoding"``), or None where nothing was measured yet.

    >>> measured("nothing of that name") is None
    True
    """
    path = FOLDER / f"{name}.json"
    if not path.is_file():
        return None
    data = json.loads(path.read_text(encoding="utf-8"))
    gpu = str(data["gpu"]).removeprefix("NVIDIA ")
    return Measured(name, f"one {gpu} with {data['multiprocessors']} multiprocessors, {data['date']}", data)
