"""When a traced kernel did what: multiprocessors down, time across, one bar an action, in the picture's hues.

Requirements: only times of a GPU are drawn; multiprocessors that had nothing to do are rows too, since that is what one
looks for; tens of thousands of bars are a few artists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from flashviz.events import Begin, Change, Launch, Move, Step, Trace
from flashviz.recording import Recording, as_recording
from flashviz.slots import Block
from flashviz.view.facts import hues_of
from flashviz.view.figure import Figure
from flashviz.view.palette import GROUND, OUTLINE, TEXT, Hue, contrast, fill_of, text_on

WIDTH, LEAST_HEIGHT, MOST_HEIGHT, ROW = 9.0, 2.4, 7.5, 0.3
"""Inches of the figure, and of a row where there is room."""
MOST_LABELS = 250
"""More bars than this bear no names."""
WAITING = "#52525b"
MOST_ROLES = 24
"""More lanes than this bear no names of roles."""
LEAST_OUTLINED = 0.04
"""Bars have outlines where half of them are wider than this many inches: narrower ones would be all outline."""
_GAP = 0.12


@dataclass(frozen=True, slots=True)
class Bar:
    """One action of one block: its step, where and when. Times in nanoseconds, of the GPU's timer."""

    action: str
    launch: int
    block: Block
    step: int
    trace: Trace


def timeline(
    run: Any,
    step: int | None = None,
    *,
    multiprocessors: Sequence[int] | None = None,
    between: tuple[float, float] | None = None,
) -> Figure:
    """What each multiprocessor did when, as a matplotlib figure (no pyplot: nothing stays open).

    Args:
        run: a run on ``"gpu"`` with its recording, a recording of one, or a stored trace: ``fv.stored("flash_attention_2")``.
        step: number of a step to mark; negative ones count from the end.
        multiprocessors: which ones to show; all of the GPU, also idle ones, when not given.
        between: from when to when, in microseconds from the start of the first launch; all of it when not given.

    Returns:
        A figure. Blocks that share a multiprocessor at one time are drawn below each other in its row, and so are the roles of a block.

    Raises:
        ValueError: the run has no times of a GPU; says what to draw instead. IndexError: no such step.

    >>> import numpy as np, flashviz as fv
    >>> x = np.eye(4, dtype="float32")
    >>> timeline(fv.flash_attention_2(x, x, x, device="numpy"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: a timeline needs times of a GPU, and this run was made on "numpy", where nothing is timed; ...
    """
    return _draw(as_recording(run), step, multiprocessors, between)[0]


def _draw(
    recording: Recording,
    step: int | None,
    multiprocessors: Sequence[int] | None = None,
    between: tuple[float, float] | None = None,
) -> tuple[Figure, list[Bar], np.ndarray]:
    """The figure, the bars in it, and the edges of each: left, right, top, bottom in the axes' data."""
    bars = bars_of(recording)
    if step is not None:
        recording.check_step(step)
        step %= len(recording.steps)
    shown = _rows(recording, bars, multiprocessors)
    row_of = {multiprocessor: row for row, multiprocessor in enumerate(shown)}
    roles = list(dict.fromkeys(bar.trace.role for bar in bars))
    lanes = {key: lane * len(roles) for key, lane in _lanes(bars).items()}
    depth = max(lanes.values(), default=0) + len(roles)
    origins, cuts = _origins(bars)
    height = min(MOST_HEIGHT, max(LEAST_HEIGHT, 1.3 + ROW * len(shown) * len(roles)))
    figure = Figure(figsize=(WIDTH, height), dpi=100, facecolor=GROUND, layout="constrained")
    axes = figure.add_subplot()
    drawn = [bar for bar in bars if bar.trace.multiprocessor in row_of]
    at = np.array(
        [
            _edges(
                bar.trace,
                row_of,
                lanes[bar.launch, bar.block] + roles.index(bar.trace.role),
                depth,
                origins[bar.launch],
            )
            for bar in drawn
        ]
    ).reshape(-1, 4)
    colours = colours_of(recording)
    end = max(bar.trace.end - origins[bar.launch] for bar in bars) / 1000
    low, high = between or (0.0, end)
    narrow = float(np.median(at[:, 1] - at[:, 0])) / (high - low) * WIDTH * 0.88 if drawn else 0.0
    for action, colour in colours.items():
        mine = at[[bar.action == action for bar in drawn]] if drawn else at
        if len(mine):
            _add_bars(axes, mine, action, colour, outlined=narrow > LEAST_OUTLINED)
    _add_begins(axes, recording, row_of, lanes, depth, origins, len(roles))
    axes.set_xlim(low, high)
    axes.set_ylim(len(shown), 0)
    _add_cuts(axes, cuts)
    if step is not None:
        _mark(axes, [edges for edges, bar in zip(at, drawn, strict=True) if bar.step == step])
    _dress(axes, recording, shown, roles if depth == len(roles) else [""])
    visible = at[(at[:, 1] > low) & (at[:, 0] < high)]
    if len(visible) <= MOST_LABELS:
        _name(axes, figure, zip(drawn, at, strict=True), colours)
    handles = [Patch(facecolor=c, edgecolor=OUTLINE, label=a.replace("_", " ")) for a, c in colours.items()]
    columns = len(handles) if len(handles) <= 8 else -(-len(handles) // 2)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    return figure, drawn, at


@dataclass(frozen=True)
class Strip:
    """A timeline as a picture, and where each step is on it: left, top, width, height as parts of the picture."""

    png: bytes
    places: dict[int, tuple[float, float, float, float]]


def timed(recording: Recording) -> bool:
    """Whether a recording has times of a GPU to draw a timeline of."""
    return recording.device == "gpu" and any(e.trace is not None and e.trace.start >= 0 for e in recording.events)


def strip(recording: Recording) -> Strip:
    """The timeline for showing beside the player: drawn once, with a place to mark for every step.

    Raises:
        ValueError: the recording has no times of a GPU.
    """
    figure, drawn, at = _draw(recording, None)
    picture = figure._repr_png_()
    axes = figure.axes[0]
    width, height = figure.get_size_inches() * figure.dpi
    pixels = axes.transData.transform(at[:, [0, 2, 1, 3]].reshape(-1, 2))
    corners = (pixels / (width, height)).reshape(-1, 4)
    edges: dict[int, list[float]] = {}
    for bar, (left, top, right, bottom) in zip(drawn, corners.tolist(), strict=True):
        own = edges.setdefault(bar.step, [left, top, right, bottom])
        own[:] = [min(own[0], left), max(own[1], top), max(own[2], right), min(own[3], bottom)]
    places = {n: (left, 1 - top, right - left, top - bottom) for n, (left, top, right, bottom) in edges.items()}
    return Strip(picture, places)


def bars_of(recording: Recording) -> list[Bar]:
    """Every action with its place and time, in the order of the recording.

    Raises:
        ValueError: it has no times of a GPU.
    """
    if recording.device != "gpu":
        where = "where nothing is timed" if recording.device == "numpy" else "whose times say nothing about a GPU"
        raise ValueError(
            f'a timeline needs times of a GPU, and this run was made on "{recording.device}", {where}; '
            'fv.timeline(fv.stored("flash_attention_2")) draws a real run that is stored with flashviz'
        )
    bars = []
    for number, step in enumerate(recording.steps):
        for part in _actions(step):
            trace = next((e.trace for e in recording.events[part.first : part.end] if e.trace is not None), None)
            if trace is not None and trace.start >= 0 and part.block is not None:
                bars.append(Bar(part.action, part.launch, part.block, number, trace))
    if not bars:
        raise ValueError("a timeline needs a traced run: this recording's events have no times")
    return bars


def _actions(step: Step) -> Iterator[Step]:
    if step.action:
        yield step
    for part in step.parts:
        yield from _actions(part)


def colours_of(recording: Recording) -> dict[str, str]:
    """A fill for every action, in order of appearance: the hue of what it makes, in as many shades as actions share it.

    Those that make nothing, but wait or say that they are done, come last and are dark grey.
    """
    hues, made, seen = hues_of(recording), dict[str, Hue](), dict[str, None]()
    for step in recording.steps:
        for part in _actions(step):
            seen[part.action] = None
            if part.action not in made and (tensor := _makes(recording, part)):
                made[part.action] = hues[tensor]
    colours: dict[str, str] = {}
    for action, hue in made.items():
        sharing = [other for other, its in made.items() if its == hue]
        level = sharing.index(action) + 1
        plain = hue.light == hue.dark and level > 1
        colours[action] = hue.outline if plain else _seen(fill_of(hue, level, max(len(sharing), 2)), hue.outline)
    return colours | {action: WAITING for action in seen if action not in colours}


def _seen(fill: str, outline: str) -> str:
    """A fill that is not taken for an idle multiprocessor: one next to white becomes a quarter of its outline."""
    if contrast(fill, GROUND) >= 1.2:
        return fill
    a, b = (tuple(int(c[i : i + 2], 16) for i in (1, 3, 5)) for c in (fill, outline))
    return "#" + "".join(f"{round(x + (y - x) / 4):02x}" for x, y in zip(a, b, strict=True))


def _makes(recording: Recording, step: Step) -> str:
    """The tensor that an action is about: what it moves, else what it computes last, else what it changes at all."""
    events = recording.events[step.first : step.end]
    moved = [part for event in events if isinstance(event, Move) for part in event.parts]
    if moved:  # what leaves by way of another tensor's slot is known where it arrives
        targets = [recording.slot(part.dst) for part in moved]
        return next((slot for slot in targets if slot.memory == "hbm"), targets[0]).tensor
    changes = [event for event in events if isinstance(event, Change) and event.role != "stale"]
    computed = [event for event in changes if event.role == "compute"] or changes
    return recording.slot(computed[-1].slot).tensor if computed else ""


def _rows(recording: Recording, bars: list[Bar], wanted: Sequence[int] | None) -> list[int]:
    used = sorted({bar.trace.multiprocessor for bar in bars})
    total = max(int(recording.params.get("multiprocessors", 0)), used[-1] + 1)
    if wanted is None:
        return list(range(total))
    beyond = [n for n in wanted if not 0 <= n < total]
    if beyond or not len(wanted):
        raise ValueError(
            f"multiprocessors={list(wanted)}: this GPU has 0 to {total - 1}, and at least one must be shown"
        )
    return list(wanted)


def _lanes(bars: list[Bar]) -> dict[tuple[int, Block], int]:
    """For each block the place below others that its multiprocessor runs at the same time."""
    spans: dict[tuple[int, Block], list[int]] = {}
    for bar in bars:
        span = spans.setdefault((bar.launch, bar.block), [bar.trace.multiprocessor, bar.trace.start, bar.trace.end])
        span[1], span[2] = min(span[1], bar.trace.start), max(span[2], bar.trace.end)
    free: dict[int, list[int]] = {}
    lanes = {}
    for key, (multiprocessor, start, end) in sorted(spans.items(), key=lambda item: item[1][1]):
        ends = free.setdefault(multiprocessor, [])
        lane = next((n for n, until in enumerate(ends) if until <= start), len(ends))
        ends[lane : lane + 1] = [end]
        lanes[key] = lane
    return lanes


def _origins(bars: list[Bar]) -> tuple[dict[int, int], list[tuple[float, float]]]:
    """What counts as time 0 for each launch, and where time was cut: (where, how much), in microseconds.

    Between two launches the host may take far longer than the kernels. Where it takes more than a fifth of what they
    take together, the wait is cut to a twentieth, and the figure says so.
    """
    spans: dict[int, list[int]] = {}
    for bar in bars:
        span = spans.setdefault(bar.launch, [bar.trace.start, bar.trace.end])
        span[0], span[1] = min(span[0], bar.trace.start), max(span[1], bar.trace.end)
    ordered = sorted(spans.items(), key=lambda item: item[1])
    busy = sum(end - start for _, (start, end) in ordered)
    origin = ordered[0][1][0]
    origins, cuts, last = {}, [], ordered[0][1][0]
    for launch, (start, end) in ordered:
        wait = start - last
        if wait > busy / 5:
            left_out = wait - busy // 20
            cuts.append(((last - origin + busy / 40) / 1000, left_out / 1000))
            origin += left_out
        origins[launch] = origin
        last = max(last, end)
    return origins, cuts


def _add_cuts(axes: Axes, cuts: list[tuple[float, float]]) -> None:
    """A dashed line where time on the host was left out, and how much it was."""
    for at, left_out in cuts:
        axes.axvline(at, color=OUTLINE, linewidth=1, linestyle=(0, (4, 3)), gid="cut")
        text = f"{left_out / 1000:,.1f} ms on the host left out"
        axes.text(at, sum(axes.get_ylim()) / 2, text, rotation=90, ha="right", va="center", fontsize=9, color=TEXT)


def _edges(
    trace: Trace, row_of: dict[int, int], lane: int, depth: int, start: int, across: int = 1
) -> tuple[float, float, float, float]:
    """Left and right in microseconds, top and bottom in rows; ``across`` so many lanes."""
    top = row_of[trace.multiprocessor] + _GAP / 2 + (1 - _GAP) * lane / depth
    return (trace.start - start) / 1000, (trace.end - start) / 1000, top, top + (1 - _GAP) * across / depth


def _add_bars(axes: Axes, at: np.ndarray, action: str, colour: str, outlined: bool) -> None:
    left, right, top, bottom = at.T
    corners = np.stack([left, top, right, top, right, bottom, left, bottom], axis=-1).reshape(-1, 4, 2)
    edge = {"edgecolors": OUTLINE, "linewidths": 0.4} if outlined else {"edgecolors": "none", "linewidths": 0.0}
    collection = PolyCollection(corners, facecolors=colour, gid=f"action.{action}", **edge)  # type: ignore[arg-type]
    axes.add_collection(collection)


def _add_begins(
    axes: Axes,
    recording: Recording,
    row_of: dict[int, int],
    lanes: dict[tuple[int, Block], int],
    depth: int,
    origins: dict[int, int],
    roles: int,
) -> None:
    """A line where each block begins, across the lanes of its roles."""
    lines = []
    for event in recording.events:
        key = (event.launch, event.block) if isinstance(event, Begin) else None
        if key in lanes and event.trace is not None and event.trace.multiprocessor in row_of:
            left, _, top, bottom = _edges(event.trace, row_of, lanes[key], depth, origins[event.launch], roles)
            lines.append([(max(left, 0), top), (max(left, 0), bottom)])
    axes.add_collection(LineCollection(lines, colors=OUTLINE, linewidths=0.8, gid="begins"))


def _mark(axes: Axes, edges: list[np.ndarray]) -> None:
    """Outline the bars of a step, and lead the eye to it from above and below."""
    if not edges:
        return
    left, top = np.min(edges, axis=0)[[0, 2]]
    right, bottom = np.max(edges, axis=0)[[1, 3]]
    across: dict[str, Any] = {
        "facecolor": OUTLINE,
        "alpha": 0.13,
        "linewidth": 0,
        "transform": axes.get_xaxis_transform(),
    }
    axes.add_patch(Rectangle((left, 0), right - left, 1, gid="step.time", **across))
    box = Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor=TEXT, linewidth=2, gid="step")
    axes.add_patch(box)


def _name(axes: Axes, figure: Figure, bars: Any, colours: dict[str, str]) -> None:
    """Names in bars that are wide enough for them."""
    low, high = axes.get_xlim()
    per_inch = (high - low) / (figure.get_figwidth() * 0.88)
    for bar, (left, right, top, bottom) in bars:
        text = bar.action.replace("_", " ")
        size = min(8.0, (bottom - top) * 72 * figure.get_figheight() / max(axes.get_ylim()) * 0.6)
        inside = low <= (left + right) / 2 <= high
        if inside and size >= 4 and len(text) * size * 0.62 / 72 * per_inch < right - left:
            place = ((left + right) / 2, (top + bottom) / 2)
            colour = text_on(colours[bar.action])
            axes.text(*place, text, ha="center", va="center", fontsize=size, color=colour, clip_on=True)


def _dress(axes: Axes, recording: Recording, shown: list[int], roles: list[str]) -> None:
    every = max(1, -(-len(shown) // 16))
    axes.set_yticks([n + 0.5 for n in range(0, len(shown), every)], [str(n) for n in shown[::every]])
    if len(roles) > 1 and len(shown) * len(roles) <= MOST_ROLES:
        lanes = [(row, n) for row in range(len(shown)) for n in range(len(roles))]
        places = [row + _GAP / 2 + (1 - _GAP) * (n + 0.5) / len(roles) for row, n in lanes]
        axes.set_yticks(places, [f"{shown[row]} · {roles[n]}" if n == 0 else roles[n] for row, n in lanes])
    axes.set_ylabel("multiprocessor")
    axes.set_xlabel("microseconds")
    axes.xaxis.set_major_locator(MaxNLocator(8))
    axes.set_axisbelow(True)
    axes.grid(axis="x", color="#e4e4e7", linewidth=0.6)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(left=False, labelsize=9)
    kernels = [e.kernel.replace("_", " ") for e in recording.events if isinstance(e, Launch)]
    where = recording.params.get("stored")
    title = " → ".join(kernels) + (f"   (stored trace: {where})" if where else "")
    axes.set_title(title, fontsize=10, loc="left", color=TEXT)
