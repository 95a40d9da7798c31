"""FlashAttention-2 with rotated loads: its picture with the angles beside Q and K in HBM, and two registers a pair of them."""

from __future__ import annotations

from flashviz.recording import Recording
from flashviz.slots import Block
from flashviz.view.layout import Layout, bands
from flashviz.view.palette import OTHERS, Hue

COS = Hue(OTHERS[0].light, OTHERS[0].light, OTHERS[0].outline, "cosines of the positions' angles")
SIN = Hue(OTHERS[3].light, OTHERS[3].light, OTHERS[3].outline, "sines")


def layout(recording: Recording, block: Block, launch: int = 0) -> Layout:
    """Places from the tile counts."""
    made = bands(
        recording,
        block,
        launch,
        columns=["Q", "cq", "sq", "K", "ck", "sk", "V", "O", "L"],
        slots=["Qi", "Kj", "Sij", "Vj", "mi", "li", "Oi", "c", "s"],
        widths={
            "L": 0.25,
            "mi": 0.25,
            "li": 0.25,
            "Sij": 1.2,
            **dict.fromkeys(("cq", "sq", "ck", "sk", "c", "s"), 0.62),
        },
        cells=["Sij"],
        kv=("K", "V"),
    )
    hues = {**dict.fromkeys(("cos", "cq", "ck"), COS), **dict.fromkeys(("sin", "sq", "sk"), SIN)}
    return Layout(made.boxes, made.labels, made.squares, made.square, made.rest, made.zoom, hues)
