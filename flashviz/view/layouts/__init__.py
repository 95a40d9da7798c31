"""Layouts: one module an algorithm, found by the algorithm's name, with a function ``layout(recording, block, launch)``."""

from __future__ import annotations

import importlib
import importlib.util
import re

from flashviz.recording import Recording
from flashviz.slots import Block
from flashviz.view.layout import Layout


def layout_of(recording: Recording, block: Block, launch: int = 0) -> Layout:
    """The layout in which a block of a launch is drawn: the algorithm's own, or the generic one."""
    name = recording.algorithm
    own = re.fullmatch(r"[a-z][a-z0-9_]*", name) and importlib.util.find_spec(f"{__name__}.{name}")
    module = importlib.import_module(f"{__name__}.{name if own else 'generic'}")
    made: Layout = module.layout(recording, block, launch)
    return made
