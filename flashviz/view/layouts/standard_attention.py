"""Standard attention: Q, K, S, P, V and O in HBM, S and P cut both ways; on the chip what the launch shown works on."""

from __future__ import annotations

from dataclasses import replace

from flashviz.recording import Recording
from flashviz.slots import Block, Slot
from flashviz.view.layout import MOST_TILES, TILE_GAP, Box, Label, Layout, bands

ON_CHIP = (("Qi", "Kj", "Sij"), (), ("Pij", "Vj", "Oi"))
"""The slots of each launch; the softmax has one for each key tile of its rows."""


def layout(recording: Recording, block: Block, launch: int = 0) -> Layout:
    """Places from the tile counts; a tile of S or P stands in the row of its Q tile and the column of its K, V tile."""
    rows = [s.name for s in recording.slots if s.name.startswith("Si") and s.name[2:].isdigit()]
    made = bands(
        recording,
        block,
        launch,
        columns=["Q", "K", "S", "P", "V", "O"],
        slots=list(ON_CHIP[launch]) or rows,
        widths={"Sij": 1.2, "Pij": 1.2, **dict.fromkeys(rows, 1.2)},
        cells=["Sij", "Pij", *rows],
        kv=("K", "V"),
    )
    boxes, labels = dict(made.boxes), list(made.labels)
    several = len({s.head for s in recording.slots if s.tensor == "Q"}) > 1
    suffix = f"[{block.batch},{block.head}]" if several else ""
    for name in ("S", "P"):
        tiles = [s for s in recording.slots if s.tensor == name and s.shared_by_grid]
        x, w = boxes[tiles[0].name].x, boxes[tiles[0].name].w
        for tile in tiles:  # the column that was made of them
            boxes.pop(tile.name, None)
        labels = [label for label in labels if (label.x, label.text) != (x, "⋮")]
        own = {s.name.removesuffix(suffix): s for s in tiles if s.name.endswith(suffix)}
        more, extra = cut_both_ways(name, own, x, w, boxes, suffix)
        boxes |= more
        labels += extra
    return replace(made, boxes=boxes, labels=tuple(labels))


def cut_both_ways(
    name: str, tiles: dict[str, Slot], x: float, w: float, boxes: dict[str, Box], suffix: str
) -> tuple[dict[str, Box], list[Label]]:
    """The boxes of a tensor's tiles (i, j), slots ``f"{name}{i},{j}"``, in the rows of Q's column and columns of their own."""
    out: dict[str, Box] = {}
    labels: dict[tuple[float, str], Label] = {}
    last = max(int(tile.split(",")[1]) for tile in tiles)
    whole = max(s.shape[1] for s in tiles.values())
    places = min(last + 1, MOST_TILES)
    width = (w - TILE_GAP * (places - 1)) / places
    for tile, slot in tiles.items():
        i, j = (int(n) for n in tile.removeprefix(name).split(","))
        row = boxes[f"Q{i}{suffix}"]
        hidden = last >= MOST_TILES and MOST_TILES - 2 <= j < last
        place = j if j < MOST_TILES - 2 or last < MOST_TILES else MOST_TILES - 1 - hidden
        wide = width * slot.shape[1] / whole
        left = x - w / 2 + place * (width + TILE_GAP)
        middle = round(left + wide / 2, 6)
        out[slot.name] = Box(middle, row.y, wide, row.h, text=row.text, hidden=hidden or row.hidden)
        if hidden and not row.hidden:
            labels[middle, "⋯"] = Label(middle, boxes[f"Q0{suffix}"].y, "⋯", 10.0)
        if row.hidden:
            labels[x, "⋮"] = Label(x, row.y, "⋮", 14.0)
    return out, list(labels.values())
