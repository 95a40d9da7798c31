"""Random performances: any sequence of the recorder's verbs, and what every slot held after each step of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from flashviz import Block, Recorder, Recording
from flashviz.events import Source

SHAPES = ((), (3,), (2, 3))


@dataclass
class Performance:
    """A recording, and for each of its steps what the recorder's memory held at its end: (block, slot) → numbers."""

    recording: Recording
    held: list[dict[tuple[int, Block, str], np.ndarray]] = field(default_factory=list)


@st.composite
def performances(draw: Any, most: int = 25) -> Performance:
    """Launches, blocks, nested and joined steps, plain and asynchronous moves, changes, registers, barriers."""
    r = Recorder("anything", {"N": 3, "scale": 0.5, "causal": draw(st.booleans()), "note": "<b>"}, keep_values=4)
    shape = draw(st.sampled_from(SHAPES))
    rows = shape[0] if shape else 1
    dtypes = st.sampled_from(["float32", "float16", "float64", "int32"])
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    x = r.tensor("x", rng.normal(size=(2 * rows, *shape[1:])), tile=rows, dtype=draw(dtypes), head=(0, 1))
    y = r.tensor("y", tile=rows, shape=(2 * rows, *shape[1:]), dtype=draw(dtypes))
    shape = (rows, *shape[1:])
    slots = [*x, *y]
    for n in range(draw(st.integers(1, 4))):
        memory, scope = draw(st.sampled_from([("shared", "block"), ("register", "thread"), ("register", "warp")]))
        slots.append(
            r.slot(f"s{n}", shape, draw(dtypes), memory=memory, scope=scope, tensor=draw(st.sampled_from("xyz")))
        )
    names = [s.name for s in slots]
    some = st.sampled_from(names)
    few = st.lists(some, max_size=2)
    performance = Performance(Recording("anything"))

    def act() -> None:
        verb = draw(
            st.sampled_from(["move", "move", "moves", "store", "async", "change", "init", "stale", "barrier", "wait"])
        )
        made = np.round(rng.normal(size=shape) * 9)
        if verb == "move":
            r.move(draw(some), draw(some))
        elif verb == "moves":
            r.move([draw(some), draw(some)], [draw(some), draw(some)])
        elif verb == "store":
            r.move(draw(some), draw(some), values=made[: draw(st.integers(1, rows))], reads=draw(few))
        elif verb == "async":
            r.move(draw(some), draw(some), group=draw(st.sampled_from("ab")), stage=draw(st.integers(0, 1)))
        elif verb == "change":
            r.change(
                draw(some),
                made,
                draw(few),
                role=draw(st.sampled_from(["compute", "rescale"])),
                cells=draw(st.booleans()),
            )
        elif verb == "init":
            r.init(draw(some), 0, rows=draw(st.sampled_from([None, 1])))
        elif verb == "stale":
            r.stale(*draw(few))
        elif verb == "barrier":
            r.barrier(draw(st.sampled_from(["block", "warp", "cluster", "grid", "launch"])), "a tile")
        else:
            r.wait(draw(st.sampled_from("ab")))

    def step(depth: int) -> None:
        label = draw(st.sampled_from(["load", "fill <i>", "update"]))
        tiles = {"j": draw(st.integers(0, 1))}
        with r.step(label, draw(st.sampled_from([None, "caption"])), join=draw(st.booleans()), tiles=tiles):
            for _ in range(draw(st.integers(0, 2))):
                act()
            if depth < 2 and draw(st.booleans()):
                step(depth + 1)

    def look() -> None:
        found = {}
        for s in slots:
            held = r._held.get(r._key(s))
            if held is not None:
                found[r._launch, r._block, s.name] = held.copy()
        while len(performance.held) < len(r._steps.all):
            performance.held.append({})
        performance.held[-1] = found

    look()
    for _ in range(draw(st.integers(0, most))):
        verb = draw(st.sampled_from(["launch", "block", "step", "step", "step", "barrier"]))
        if verb == "launch":
            r.launch(draw(st.sampled_from(["first", "second"])), (2, 1, 1), (32, 1, 1))
        elif verb == "block" and r._launch >= 0:
            r.block(draw(st.integers(0, 2)), draw(st.integers(0, 1)))
        elif verb == "barrier":
            r.barrier()
        else:
            step(0)
        look()
    code = Source("python", "anything.py", "load\nfill\n", (("load", 1, 1), ("fill", 2, 2)))
    performance.recording = r.recording((code,), source=draw(st.sampled_from(["program", "kernel"])))
    return performance
