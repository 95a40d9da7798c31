"""What the tests of the player share: the chapter's run, a count of open widgets, and an IPython that names its cells."""

from __future__ import annotations

from typing import Any

import ipywidgets
import numpy as np

import flashviz as fv

PNG = b"\x89PNG\r\n\x1a\n"
VIEW = "application/vnd.jupyter.widget-view+json"


def open_widgets() -> int:
    module = ipywidgets.widgets.widget
    return len(module._instances if hasattr(module, "_instances") else ipywidgets.Widget.widgets)


def made(N: int = 8, **options: Any) -> Any:
    rng = np.random.default_rng(26)
    Q, K, V = (rng.standard_normal((N, 4), dtype=np.float32) for _ in range(3))
    return fv.flash_attention_2(Q, K, V, **{"Br": 4, "Bc": 4, "device": "numpy", **options})


class Shell:
    """What the player asks IPython for: which cell runs, and for the how-manieth time."""

    def __init__(self) -> None:
        self.execution_count = 0
        self.parent: dict[str, Any] = {}

    def get_parent(self) -> dict[str, Any]:
        return self.parent

    def cell(self, code: str, cell: str | None) -> None:
        self.execution_count += 1
        self.parent = {"content": {"code": code}, "metadata": {"cellId": cell} if cell else {}}
