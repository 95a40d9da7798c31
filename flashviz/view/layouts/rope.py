"""Rotary embedding: elements of a tile's rows side by side, x and O in HBM, xi in shared memory, a and b of each pair in registers.

A pair has a hue of its own, and so have its cosine and sine: which elements meet is seen wherever they stand. Only the
block's own tile of x and O is drawn; of more pairs than there is room for, the first ones and the last.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from flashviz.recording import Recording
from flashviz.slots import Block
from flashviz.view.layout import CAPTION, TITLE, WIDEST, Box, Label, Layout
from flashviz.view.palette import OTHERS, Hue

BY_TILE = True
"""The rows shown are the block's."""
MOST_PAIRS, MOST_REST = 4, 4
"""Pairs, and elements that are not rotated, that are drawn."""
GAP, APART, MARGIN, WIDTH, HEIGHT, SIZE = 0.06, 0.3, 0.35, 0.85, 1.05, 12.0
HBM_X, HBM_O, SHARED, SINES, REGISTERS = 3.75, 2.5, -0.1, -1.35, -3.6
"""Middles of the strips: x with cos, O with sin, xi with ci, si, a and b."""
PAIR_HUES = OTHERS[:4]
ANGLES = ("cos", "sin", "ci", "si")
REST = Hue("#e7e5e4", "#e7e5e4", "#57534e", "not rotated")


@dataclass(frozen=True)
class _Strip:
    """Places of numbered things side by side; what is not shown stands at the ellipsis."""

    shown: list[int]
    x: dict[int, float]
    dots: list[float]
    right: float


def layout(recording: Recording, block: Block, launch: int = 0) -> Layout:
    """Places from how many elements a row has and how many of them are rotated."""
    params = recording.params
    d, pairs = int(params["d"]), int(params["rotary_dim"]) // 2
    halves = params["form"] == "halves"
    partners = [(p, p + pairs) if halves else (2 * p, 2 * p + 1) for p in range(pairs)]
    pair_of = {e: p for p, both in enumerate(partners) for e in both}
    few = list(range(pairs)) if pairs <= MOST_PAIRS else [*range(MOST_PAIRS - 1), pairs - 1]
    rest = list(range(2 * pairs, d))
    rest = rest if len(rest) <= MOST_REST else [*rest[: MOST_REST - 1], rest[-1]]
    elements = sorted([e for p in few for e in partners[p]] + rest)
    gaps = sum(b - a > 1 for n in (elements, few) for a, b in itertools.pairwise(n))
    places = len(elements) + len(few) + gaps
    width = min(WIDTH, (WIDEST - MARGIN - APART) / places - GAP)
    wide = places * (width + GAP) - 2 * GAP + APART + MARGIN
    xs = _strip(elements, d, -wide / 2 + MARGIN, width)
    cs = _strip(few, pairs, xs.right + APART, width)
    t, head = block.tile, (block.batch, block.head)
    several = int(params["B"]) * int(params["H"]) > 1
    lead = f"{head[0]},{head[1]}," if several else ""
    boxes: dict[str, Box] = {}
    labels: list[Label] = []
    number = int(params["tile"]) == 1

    def put(strip: _Strip, y: float, name: str, count: int, suffix: str = "") -> None:
        for e in range(count):
            hidden = e not in strip.shown
            boxes[f"{name}{e}{suffix}"] = Box(
                strip.x[e], y, width, HEIGHT, text=SIZE, hidden=hidden, numbers=int(number), digits=3
            )
        labels.extend(Label(x, y, "…", CAPTION) for x in strip.dots)

    put(xs, HBM_X, "x", d, f"[{lead}{t}]")
    put(cs, HBM_X, "cos", pairs, f"[{t}]")
    put(cs, HBM_O, "sin", pairs, f"[{t}]")
    put(xs, HBM_O, "O", d, f"[{lead}{t}]")
    put(xs, SHARED, "xi", d)
    put(cs, SHARED, "ci", pairs)
    put(cs, SINES, "si", pairs)
    labels += registers(boxes, few, pairs, width, number)
    for y, text in ((HBM_X, "x"), (HBM_O, "O"), (SHARED, "xi")):
        labels.append(Label(round(-wide / 2 + MARGIN / 2 - GAP, 6), y, text, CAPTION))
    first, N = t * int(params["tile"]), int(params["N"])
    last = min(first + int(params["tile"]), N) - 1
    title = f"row {first}" if first == last else f"rows {first} to {last}"
    who = f"batch {head[0]}, head {head[1]}, " if several else ""
    labels += [Label(0, 5, f"HBM · {who}{title}", TITLE), Label(0, 1.0, "SRAM", TITLE)]
    labels.append(Label(0, -2.5, "registers, one thread a pair", TITLE))
    return Layout(boxes, tuple(labels), hues=hues(boxes, pair_of, partners))


def registers(boxes: dict[str, Box], few: list[int], pairs: int, width: float, number: bool) -> list[Label]:
    """Boxes of a and b, each pair's two side by side, and the ellipsis where pairs are left out."""
    each = 2 * width + GAP
    dots = len(few) < pairs
    wide = (len(few) + dots) * (each + APART) - APART
    left, labels = -wide / 2, []
    for place, p in enumerate(few):
        x = left + (place + (dots and place == len(few) - 1)) * (each + APART)
        for n, name in enumerate("ab"):
            at = round(x + width / 2 + n * (width + GAP), 6)
            boxes[f"{name}{p}"] = Box(at, REGISTERS, width, HEIGHT, f"{name}{p}", SIZE, numbers=int(number), digits=3)
    if dots:
        x = round(left + (len(few) - 1) * (each + APART) + each / 2, 6)
        labels.append(Label(x, REGISTERS, "…", CAPTION))
        hidden = [f"{name}{p}" for p in range(pairs) if p not in few for name in "ab"]
        boxes.update({name: Box(x, REGISTERS, width, HEIGHT, hidden=True) for name in hidden})
    return labels


def hues(boxes: dict[str, Box], pair_of: dict[int, int], partners: list[tuple[int, int]]) -> dict[str, Hue]:
    """The hue of every slot: its pair's, or grey where it is not rotated."""
    tones = []
    for n, hue in enumerate(PAIR_HUES):
        mine = [f"{a} and {b}" for a, b in partners[n :: len(PAIR_HUES)]]
        text = ", ".join(mine if len(mine) <= 2 else [mine[0], mine[1], "…"])
        tones.append(Hue(hue.light, hue.dark, hue.outline, f"elements {text}"))
    out = {}
    for name in boxes:
        kind = name.rstrip("[0123456789,]")
        n = int(name[len(kind) :].partition("[")[0])
        pair = pair_of.get(n) if kind in ("x", "O", "xi") else n
        hue = REST if pair is None else tones[pair % len(tones)]
        out[name] = Hue(hue.light, hue.light, hue.outline, hue.meaning) if kind in ANGLES else hue
    return out


def _strip(shown: list[int], count: int, left: float, width: float) -> _Strip:
    """Boxes of ``shown`` of ``count`` things from ``left`` on, with an ellipsis wherever some are left out."""
    x: dict[int, float] = {}
    dots: list[float] = []
    place = 0
    before = -1
    for n in range(count):
        if n in shown:
            x[n] = round(left + place * (width + GAP) + width / 2, 6)
            place += 1
        else:
            if before in shown or before < 0:
                dots.append(round(left + place * (width + GAP) + width / 2, 6))
                place += 1
            x[n] = dots[-1]
        before = n
    return _Strip(shown, x, dots, left + place * (width + GAP) - GAP)
