"""Figures: the storyboard's geometry, what it says where steps are left out, and nothing that stays open."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from view.pictures import attention

import flashviz as fv
from flashviz import Recorder
from flashviz.recording import Recording
from flashviz.view import storyboard as module
from flashviz.view.draw import HEIGHT, WIDTH, blank, draw
from flashviz.view.layout import BOTTOM, LEFT, RIGHT, TOP
from flashviz.view.paths import Paths, add_all, text_path
from flashviz.view.scene import scene
from flashviz.view.shapes import Shape
from flashviz.view.storyboard import BORDER, FRAME_WIDTH, GAP, MOST_FRAMES, frame, png, storyboard
from flashviz.view.text import UNIT

CELL = (RIGHT - LEFT + GAP, TOP - BOTTOM + GAP)


def collection(figure: Figure) -> PathCollection:
    (axes,) = figure.axes
    (found,) = axes.collections
    assert isinstance(found, PathCollection)
    return found


def borders(figure: Figure) -> list[tuple[float, float]]:
    """Upper left corner of every frame, in the order in which they are drawn."""
    from matplotlib.colors import to_rgba

    made = collection(figure)
    edges = made.get_edgecolors()
    extents = [p.get_extents() for p, e in zip(made.get_paths(), edges, strict=True) if tuple(e) == to_rgba(BORDER)]
    assert all(np.allclose((e.width, e.height), (RIGHT - LEFT, TOP - BOTTOM)) for e in extents)
    return [(e.x0 - GAP / 2, e.y1 + GAP / 2) for e in extents]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every text that is drawn on a sheet."""
    texts: list[str] = []
    real = Paths.text

    def text(self: Paths, x: float, y: float, text: str, *more: Any) -> None:
        texts.append(text)
        real(self, x, y, text, *more)

    monkeypatch.setattr(Paths, "text", text)
    return texts


def test_as_many_frames_as_steps_in_reading_order(said: list[str]) -> None:
    figure = storyboard(attention())
    places = borders(figure)
    assert len(places) == 19
    for n, (x, y) in enumerate(places):
        assert (x, y) == pytest.approx((n % 5 * CELL[0], -(n // 5) * CELL[1]))
    width, height = figure.get_size_inches()
    assert width == pytest.approx(5 * FRAME_WIDTH)
    assert height == pytest.approx(4 * FRAME_WIDTH * CELL[1] / CELL[0])
    assert [t for t in said if t.isdigit()] == [str(n) for n in range(19)]
    assert [t for t in said if t in ("Setup ready", "[KV loop: 1] fill Sij")].count("[KV loop: 1] fill Sij") == 2


@pytest.mark.parametrize(("columns", "rows"), [(1, 19), (4, 5), (19, 1), (25, 1)])
def test_columns(columns: int, rows: int) -> None:
    figure = storyboard(attention(), columns=columns)
    assert figure.get_size_inches()[0] == pytest.approx(columns * FRAME_WIDTH)
    assert len({y for _, y in borders(figure)}) == rows


@pytest.mark.parametrize("steps", [range(2, 6), slice(2, 6), [2, 3, 4, 5], [2, 3, -15, -14]])
def test_parts(steps: Any, said: list[str]) -> None:
    assert len(borders(storyboard(attention(), steps))) == 4
    assert [t for t in said if t.isdigit()] == ["2", "3", "4", "5"]


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"columns": 0}, ValueError, "columns=0"),
        ({"columns": -2}, ValueError, "columns=-2"),
        ({"steps": []}, ValueError, "at least one step"),
        ({"steps": [3, 19]}, IndexError, "step 19"),
    ],
)
def test_refused(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        storyboard(attention(), **arguments)


@pytest.mark.parametrize("columns", [None, 6])
def test_more_steps_are_thinned_out_and_the_sheet_says_so(columns: int | None, said: list[str]) -> None:
    recording = attention((5, 8))
    total = len(recording.steps)
    assert total > MOST_FRAMES
    figure = storyboard(recording, columns=columns)
    assert len(borders(figure)) == MOST_FRAMES
    assert f"60 of {total} steps" in said
    numbers = [int(t) for t in said if t.isdigit()]
    assert numbers == sorted(set(numbers))
    assert (numbers[0], numbers[-1]) == (0, total - 1)
    extents = [p.get_extents() for p in collection(figure).get_paths()]
    bottom, right = figure.axes[0].get_ylim()[0], figure.axes[0].get_xlim()[1]
    assert all(e.y0 >= bottom - 1e-6 and e.x1 <= right + 1e-6 and e.x0 >= -1e-6 for e in extents)


def test_60_steps_are_all_there(said: list[str]) -> None:
    recording = attention((5, 8))
    assert len(borders(storyboard(recording, range(60)))) == 60
    assert not any("of" in t and "steps" in t for t in said)


def test_larger_letters_still_fit_their_boxes(said: list[str]) -> None:
    r = Recorder("long names")
    x = r.tensor("weights", np.ones((4, 2)), tile=2)
    xi = r.slot("tile", (2, 2), tensor="weights")
    r.launch("k")
    r.block()
    with r.step("load"):
        r.move(x[0], xi)
    figure = storyboard(r.recording())
    made = collection(figure)
    label, _ = text_path("weights0")
    assert label is not None
    count = len(label.vertices)
    widths = [p.get_extents().width for p in made.get_paths() if len(p.vertices) == count]
    assert len(widths) == 4
    assert max(widths) <= 1.6


def test_empty_and_invisible_texts_are_drawn_as_nothing() -> None:
    for text in ("", " ", "\u200b", "\u2003"):
        assert text_path(text) == (None, 0.0)
    r = Recorder("quiet")
    with r.step("", ""):
        pass
    assert len(png(storyboard(r.recording()))) > 1000


def test_a_frame_is_the_scene_with_ids() -> None:
    figure = frame(attention(), 7, 0.63)
    (axes,) = figure.axes
    ids = {a.get_gid() for a in axes.get_children() if a.get_gid()}
    shapes = scene(attention(), 7, 0.63).shapes
    grown = {s.id for s in shapes if getattr(s, "grow", 1) > 0 and (getattr(s, "text", "x") != "")}
    assert ids == grown
    assert figure.get_size_inches() == pytest.approx((WIDTH / 72, HEIGHT / 72))


@pytest.mark.parametrize("recording", [attention(), attention((3, 5), (3, 2))])
def test_one_collection_looks_like_one_artist_a_shape(recording: Recording) -> None:
    """Movies draw scenes as one collection; still frames as an artist a shape. They differ in antialiasing alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    def pixels(figure: Figure) -> np.ndarray:
        canvas: Any = FigureCanvasAgg(figure)
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].astype(float)

    for step, t in ((4, 0.4), (6, 0.5), (len(recording.steps) - 1, 1.0)):
        one, many = blank(72), blank(72)
        paths = Paths()
        shapes = [s for s in scene(recording, step, t).shapes if type(s).__name__ != "Text"]
        add_all(paths, shapes)
        paths.draw(one[1])
        draw(many[1], shapes)
        off = np.abs(pixels(one[0]) - pixels(many[0])).max(axis=-1) > 100
        assert off.mean() < 0.004, "only edges differ"


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(TypeError, match="Shape"):
        Paths().shape(Shape("x"))


OPEN = """
import sys
sys.path.insert(0, "tests")
from view.pictures import attention
import flashviz as fv
recording = attention()
for n in range(25):
    fv.storyboard(recording)
    fv.frame(recording, n % 19, 0.5)
assert "matplotlib.pyplot" not in sys.modules, "pyplot was imported"
import matplotlib.pyplot as plt
assert plt.get_fignums() == [], plt.get_fignums()
print("none open")
"""


def test_no_pyplot_figure_stays_open(root: Any) -> None:
    made = subprocess.run([sys.executable, "-c", OPEN], cwd=root, capture_output=True, text=True, check=False)
    assert (made.stdout, made.stderr) == ("none open\n", "")


def test_a_png_is_the_same_bytes_again() -> None:
    assert png(storyboard(attention())) == png(storyboard(attention()))
    assert png(storyboard(attention())).startswith(b"\x89PNG")
    assert isinstance(fv.storyboard(attention()), Figure)
    assert module.MOST_FRAMES == 60


def test_a_figure_shows_itself_without_pyplot() -> None:
    figure: Any = storyboard(attention(), [0, 1])
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_a_caption_stays_below_the_names_of_the_lowest_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers as a third band leave little room: the caption of a step is smaller there, and the same as ever elsewhere."""
    drawn: list[tuple[float, str, float]] = []  # from the frame's own origin
    real = Paths.text

    def text(self: Paths, x: float, y: float, text: str, size: float, *more: Any) -> None:
        drawn.append((y, text, size))
        real(self, x, y, text, size, *more)

    monkeypatch.setattr(Paths, "text", text)
    x = np.random.default_rng(1).standard_normal((8, 4), "f4")
    run = fv.flash_attention_3(x, x, x, device="numpy")
    assert run.recording is not None
    sizes = set()
    for step in range(6, 24):
        drawn.clear()
        storyboard(run, [step])
        at = next(n for n, (_, said, _) in enumerate(drawn) if said.startswith("["))
        y, said, size = drawn[at]
        names = min(other for n, (other, _, _) in enumerate(drawn) if n != at)
        assert y + 0.6 * size / UNIT * (said.count("\n") + 1) < names - 0.2
        sizes.add(size)
    assert 16 <= min(sizes) < max(sizes) == 25
