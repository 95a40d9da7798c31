"""Layouts: one module an algorithm, found by the algorithm's name, with a function ``layout(recording, block, launch)``.

A module whose pictures depend on the block's tile, and not on its batch and head alone, says ``BY_TILE = True``.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from types import ModuleType

from flashviz.recording import Recording
from flashviz.slots import Block
from flashviz.view.layout import Layout


def layout_of(recording: Recording, block: Block, launch: int = 0) -> Layout:
    """The layout in which a block of a launch is drawn: the algorithm's own, or the generic one."""
    made: Layout = _module(recording.algorithm).layout(recording, block, launch)
    return made


def by_tile(recording: Recording) -> bool:
    """Whether each block of a head has a layout of its own."""
    return bool(getattr(_module(recording.algorithm), "BY_TILE", False))


def _module(name: str) -> ModuleType:
    own = re.fullmatch(r"[a-z][a-z0-9_]*", name) and importlib.util.find_spec(f"{__name__}.{name}")
    return importlib.import_module(f"{__name__}.{name if own else 'generic'}")
