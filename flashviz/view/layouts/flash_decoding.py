"""Flash decoding: K, V in HBM and the partial Os, Ls beside them; first a split's shared memory, then the combine block's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flashviz.recording import Recording
from flashviz.slots import Block
from flashviz.view.layout import CAPTION, HBM_BOTTOM, HBM_TOP, MOST_TILES, TILE, TILE_GAP, Box, Label, Layout, bands
from flashviz.view.text import clean, fit

GROUP_GAP, ELLIPSIS = 0.15, 0.15
"""Between the K, V tiles of two splits; the room for the logsumexps that are not drawn."""
MOST_PARTS = 8
"""More partial answers than these are not drawn in the last block."""


def layout(recording: Recording, block: Block, launch: int = 0) -> Layout:
    """Places from the tile counts; the second launch has slots of its own. Heads are those of K and V."""
    if recording.params.get("rung"):
        return rung(recording, block, launch)
    ls = [s.name for s in recording.slots if s.tensor == "L" and not s.shared_by_grid]
    shown = ls if len(ls) <= MOST_TILES else [*ls[: MOST_TILES - 2], ls[-1]]
    narrow = dict.fromkeys(("Ls", "L", "m", "l", *ls), 0.25)
    made = bands(
        recording,
        block,
        launch,
        columns=["Q", "K", "V", "Os", "Ls", "O", "L"],
        slots=[*shown, "w", "m", "l", "os", "o"] if launch == 1 else ["q", "Kj", "Sj", "Vj", "m", "l", "o"],
        widths={**narrow, "Sj": 1.2, "w": 1.2},
        cells=["Sj", "w"],
    )
    boxes = {**made.boxes, **grouped(recording, made.boxes)}
    if launch != 1 or shown == ls or made.zoom is None:
        return replace(made, boxes=boxes)
    first, last = boxes[shown[-2]], boxes[shown[-1]]
    boxes |= {name: replace(boxes[name], x=boxes[name].x - ELLIPSIS) for name in shown[:-1]}
    label = Label((first.x - ELLIPSIS + last.x) / 2, last.y, "…", CAPTION)
    left, right, top = made.zoom
    return replace(made, boxes=boxes, labels=(*made.labels, label), zoom=(left - ELLIPSIS, right, top))


def rung(recording: Recording, block: Block, launch: int) -> Layout:
    """The rungs of the ladder: one launch, all in registers; the partials that the last block merges in a row below."""
    chip = [s for s in recording.slots if not s.shared_by_grid]
    parts = [s.name for s in chip if s.name.startswith(("ls", "os"))]
    hbm = {s.tensor for s in recording.slots if s.shared_by_grid}
    made = bands(
        recording,
        block,
        launch,
        columns=[name for name in ("Q", "K", "V", "Os", "Ls", "O", "L") if name in hbm],
        slots=["q", "Kj", "Sj", "Vj", "m", "l", "o", *(parts if len(parts) <= MOST_PARTS else ())],
        widths={**dict.fromkeys(("Ls", "L", "m", "l", *(p for p in parts if p[0] == "l")), 0.25), "Sj": 1.2},
        cells=["Sj"],
        kv=("K", "V"),
        heads=int(recording.params["columns"]),
    )
    return replace(made, boxes={**made.boxes, **grouped(recording, made.boxes)}, maps=())


def grouped(recording: Recording, boxes: Mapping[str, Box]) -> dict[str, Box]:
    """The K, V tiles with room between splits, each split's partial answer as high as its tiles, where there is room."""
    tiles, splits = int(recording.params.get("Tc", 1)), int(recording.params.get("splits", 1))
    each = -(-tiles // splits)
    groups = [range(n, min(n + each, tiles)) for n in range(0, tiles, each)]
    limited = "window" in recording.params or "kv_len" in recording.params  # then tiles belong to no split
    if limited or tiles > MOST_TILES or each == 1 or len(groups) == 1:
        return {}
    room = HBM_TOP - HBM_BOTTOM - GROUP_GAP * (len(groups) - 1) - TILE_GAP * (tiles - len(groups))
    height, top = room / tiles, HBM_TOP
    spans: list[tuple[float, float]] = []
    rows: list[float] = []
    for group in groups:
        first = top
        for _ in group:
            rows.append(top)
            top -= height + TILE_GAP
        spans.append((first, top + TILE_GAP))
        top -= GROUP_GAP - TILE_GAP
    out = {}
    for slot in recording.slots:
        box = boxes.get(slot.name)
        if box is None or not slot.shared_by_grid:
            continue
        if slot.tensor in ("K", "V"):
            h = height * max(slot.shape[0] / recording.slot("Kj").shape[0], 0.5)
            text = fit(clean(slot.label), TILE, box.w, h)
            out[slot.name] = replace(box, y=round(rows[slot.index[0]] - h / 2, 6), h=h, text=text)
        elif slot.tensor in ("Os", "Ls") and len(groups) == splits:
            upper, lower = spans[slot.index[0]]
            out[slot.name] = replace(box, y=round((upper + lower) / 2, 6), h=upper - lower)
    return out
