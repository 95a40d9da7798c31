"""The player without a browser: one state whatever control moves it, and nothing left behind when a cell is run again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from html import unescape
from typing import Any

import nbclient
import nbformat
import numpy as np
import pytest
from playing import PNG, VIEW, Shell, made, open_widgets

import flashviz as fv
from flashviz import player as players
from flashviz.player import Player
from flashviz.recording import Recording
from flashviz.view import panel


@pytest.fixture(scope="module")
def run() -> Any:
    return made()


@pytest.fixture
def player(run: Any) -> Iterator[Player]:
    player = fv.play(run)
    yield player
    player.close()


def positions(player: Player) -> tuple[int, ...]:
    return (player.index, player.slider.value, player.play.value, player.box.value, player.list.value)


def state(player: Player) -> dict[str, Any]:
    """Everything that a reader sees, but for the tween."""
    picture = unescape(player.picture.value)
    return {
        "positions": positions(player),
        "picture": picture.split("<title")[1].split(">", 1)[1].split("</title>")[0],
        "index": picture.split('data-index="')[1].split('"')[0],
        "where": player.where.value,
        "counts": player.counts.value,
        "mark": player.mark.value,
        "beside": player.beside.value,
    }


WAYS: dict[str, Callable[[Player, int], None]] = {
    "slider": lambda p, n: setattr(p.slider, "value", n),
    "play": lambda p, n: setattr(p.play, "value", n),
    "box": lambda p, n: setattr(p.box, "value", n),
    "list": lambda p, n: setattr(p.list, "value", n),
    "index": lambda p, n: setattr(p, "index", n),
    "go": lambda p, n: p.go(n),
}


@pytest.mark.parametrize("N", [4, 8, 40])
def test_every_control_ends_at_the_last_step(N: int) -> None:
    player = Player(made(N))
    last = len(player) - 1
    assert (player.slider.max, player.play.max, player.box.max) == (last, last, last)
    assert (player.slider.min, player.play.min, player.box.min) == (0, 0, 0)
    assert [value for _, value in player.list.options] == list(range(last + 1))
    player.play.value = last
    assert state(player)["index"] == str(last)
    assert state(player)["picture"] == player.recording.steps[last].caption
    player.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("page", [0, 1, -1])
def test_every_way_to_a_step_shows_the_same(run: Any, way: str, page: int) -> None:
    one, other = Player(run), Player(run)
    other._name = one._name
    one.page.value = other.page.value = page
    for n in (18, 0, 1, 2, 7, 6, 18, 5, 4):
        WAYS[way](one, n)
        other._show(n)
        assert positions(one) == (n,) * 5
        assert state(one) == state(other)
        assert state(one)["picture"] == run.recording.steps[n].caption
    one.close()
    other.close()


def test_the_buttons(player: Player) -> None:
    first, back, following, last = player.buttons
    last.click()
    assert positions(player) == (18,) * 5
    following.click()
    assert positions(player) == (18,) * 5
    back.click()
    assert positions(player) == (17,) * 5
    first.click()
    assert positions(player) == (0,) * 5
    back.click()
    assert positions(player) == (0,) * 5
    following.click()
    assert positions(player) == (1,) * 5


@pytest.mark.parametrize(
    ("steps", "numbers"),
    [
        (range(3, 9), (3, 4, 5, 6, 7, 8)),
        (slice(15, None), (15, 16, 17, 18)),
        (slice(None, None, 6), (0, 6, 12, 18)),
        ([2, 11], (2, 11)),
        ([-1], (18,)),
        (np.array([4, 7]), (4, 7)),
        (range(8, 5, -1), (8, 7, 6)),
    ],
)
def test_a_part(run: Any, steps: Any, numbers: tuple[int, ...]) -> None:
    player = Player(run, steps)
    assert player.steps == numbers
    assert len(player) == len(numbers)
    assert player.slider.max == player.play.max == player.box.max == len(numbers) - 1
    for position, number in enumerate(numbers):
        player.index = position
        assert player.step == number
        assert state(player)["picture"] == run.recording.steps[number].caption
        label = run.recording.steps[number].label
        text = player.list.options[position][0]
        assert text == (f"{position} · {label}" if position == number else f"{position} · {label} (step {number})")
    player.close()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"steps": [99]}, IndexError, ["99", "19 steps", "0 to 18"]),
        ({"steps": [-20]}, IndexError, ["-20", "0 to 18"]),
        ({"steps": range(5, 5)}, ValueError, ["range(5, 5)", "19 steps", "0 to 18"]),
        ({"steps": slice(40, 50)}, ValueError, ["slice(40, 50", "19 steps"]),
        ({"steps": 3}, TypeError, ["steps=3", "range"]),
        ({"steps": "3"}, TypeError, ["'3'", "range"]),
        ({"steps": [1.5]}, TypeError, ["1.5", "numbers"]),
        ({"speed": 3}, ValueError, ["speed=3", "0.5, 1, 2, 4"]),
    ],
)
def test_errors_name_value_limit_and_fix(run: Any, arguments: Any, error: type[Exception], words: list[str]) -> None:
    before = open_widgets()
    with pytest.raises(error) as caught:
        fv.play(run, **arguments)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert open_widgets() == before


def test_what_cannot_be_played() -> None:
    with pytest.raises(TypeError, match="expected a run or a recording, got int"):
        fv.play(3)
    with pytest.raises(ValueError, match="record=False"):
        fv.play(made(record=False))
    with pytest.raises(ValueError, match="no steps"):
        fv.play(Recording("nothing"))


def test_what_it_displays(run: Any) -> None:
    player = Player(run)
    bundle = player._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "image/png", VIEW}
    assert bundle["text/plain"] == "Player(19 steps of flash_attention_2)"
    assert bundle["image/png"].startswith(PNG)
    assert bundle[VIEW]["model_id"] == player.widget.model_id
    player.go(7)
    again = player._repr_mimebundle_()
    assert again.pop(VIEW) != bundle[VIEW], "each display has a Play of its own"
    assert again.items() < bundle.items(), "a moved player is stored as the same bytes"
    player.close()
    player.close()
    assert set(player._repr_mimebundle_()) == {"text/plain", "image/png"}
    part = Player(run, range(3))
    assert part._repr_mimebundle_()["image/png"] != bundle["image/png"]
    part.close()


def test_tween_only_one_step_forward(run: Any) -> None:
    def moves(player: Player) -> bool:
        return "@keyframes" in player.picture.value

    player = Player(run)
    assert not moves(player)
    for n, expected in [(1, True), (2, True), (3, True), (2, False), (3, True), (5, False), (4, False), (18, False)]:
        player.go(n)
        assert moves(player) == expected, n
    player.close()
    part = Player(run, [2, 3, 7])
    for n, expected in [(1, True), (2, False)]:
        part.go(n)
        assert moves(part) == expected
    part.close()


def test_the_next_frame_is_drawn_ahead_and_each_only_once(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[int, bool]] = []
    real = players.frame_svg

    def frame_svg(recording: Any, step: int, prefix: str, *, tween: bool) -> str:
        drawn.append((step, tween))
        return real(recording, step, prefix, tween=tween)

    monkeypatch.setattr(players, "frame_svg", frame_svg)
    player = Player(run)
    assert drawn == [(0, False), (1, True)]
    player.go(1)
    assert drawn[-1] == (2, True)
    for n in (2, 3, 2, 3, 4, 0, 1, 2, 3, 4):
        player.go(n)
    assert len(drawn) == len(set(drawn))
    player.close()


def test_the_frames_kept_are_bounded(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(players, "MOST_FRAMES", 5)
    player = Player(run)
    for n in (*range(19), *range(18, -1, -1)):
        player.go(n)
        assert len(player._frames) <= 5
        assert state(player)["picture"] == run.recording.steps[n].caption
    player.close()


def test_speed(player: Player) -> None:
    intervals = {}
    for _, speed in players.SPEEDS:
        player.speed.value = speed
        intervals[speed] = player.play.interval
        assert f"--fv-step:{900 / speed:.0f}ms" in player.mark.value
    assert intervals[1.0] == 1250
    assert all(value == round(1250 / speed) for speed, value in intervals.items())
    player.go(5)
    assert "--fv-step:225ms" in player.mark.value, "a move keeps the speed"


def test_code_of_the_step_is_marked_and_where_names_i_and_j(player: Player) -> None:
    for n, step in enumerate(player.recording.steps):
        player.go(n)
        name = player._name
        marked = {a for a in ALL_ACTIONS if f".{name} .{panel.action_class(a)}" in player.mark.value}
        assert marked == set(step.actions)
        where = unescape(player.where.value)
        for letter, value in step.tiles:
            assert f"{letter} = {value}" in where
        assert all(action in where for action in step.actions)
    player.go(7)
    assert "i = 0, j = 1 · scores" in player.where.value


ALL_ACTIONS = ("load_q", "load_k", "load_v", "scores", "softmax", "accumulate", "store_o")


def test_running_counts_are_the_traffic_so_far(player: Player) -> None:
    for n in range(len(player)):
        player.go(n)
        counted = fv.traffic(player.recording, upto_step=n)
        text = player.counts.value
        assert f"{counted.fetches} fetch" in text
        assert f"{counted.bytes_read:,} bytes" in text.split("\n")[0]
        assert f"{counted.stores} store" in text
        assert f"{counted.bytes_written:,} bytes" in text.split("\n")[1]
    assert counted.fetches == 6
    assert counted.stores == 2


def test_a_part_counts_from_the_start(run: Any) -> None:
    player = Player(run, range(9, 12))
    assert f"{fv.traffic(run, upto_step=9).bytes_read:,} bytes" in player.counts.value
    player.close()


def test_numbers_are_the_recordings(player: Player) -> None:
    player.page.value = -1
    player.go(8)
    shown = player.beside.value
    for slot in ("mi", "li", "Oi", "Sij", "Qi"):
        rows = shown.split(f"<h4>{slot}")[1].split("<table>")[1].split("</table>")[0]
        numbers = [float(cell.split("</td>")[0]) for cell in rows.split("<td>")[1:]]
        np.testing.assert_allclose(numbers, player.recording.values(8, slot).ravel(), atol=5.1e-4)
    player.go(9)
    assert player.beside.value != shown
    player.page.value = 0
    assert "fv-code" in player.beside.value


def test_pages_beside_the_picture(player: Player) -> None:
    assert [text for text, _ in player.page.options] == ["Python", "CUDA", "Numbers"]
    player.page.value = 1
    assert "__global__" in unescape(player.beside.value).replace("</span>", "").replace("<span>", "")


def test_a_recording_without_code_shows_numbers() -> None:
    r = fv.Recorder("mine", {})
    x = r.tensor("x", np.ones(4), tile=2)
    r.launch("mine", (1, 1, 1), (1, 1, 1))
    xi = r.slot("xi", (2,), "float32", memory="shared", scope="block", tensor="x")
    r.block(0)
    with r.step("load"):
        r.move(x[0], xi)
    player = Player(r.recording())
    assert [text for text, _ in player.page.options] == ["Numbers"]
    player.go(len(player) - 1)
    assert "1.000" in player.beside.value
    player.close()


def test_closing_leaves_nothing(run: Any) -> None:
    before = open_widgets()
    player = Player(run)
    assert open_widgets() > before + 20
    player.close()
    assert open_widgets() == before


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    import IPython

    shell = Shell()
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    monkeypatch.setattr(players, "_open", {})
    yield shell
    for entries in players._open.values():
        for _, shown in entries:
            shown.close()


def test_a_cell_run_25_times_and_200_moves(run: Any, shell: Shell) -> None:
    from matplotlib import pyplot as plt

    counts = []
    for _ in range(25):
        shell.cell("fv.play(run)", "a")
        player = fv.play(run)
        player._repr_mimebundle_()
        for n in range(8):
            player.go(n * 5 % 19)
        counts.append(open_widgets())
    assert len(set(counts)) == 1, counts
    assert plt.get_fignums() == []


def test_displays_of_one_player_step_together(run: Any, shell: Shell) -> None:
    shell.cell("player = fv.play(run)", "a")
    player = fv.play(run)
    player._repr_mimebundle_()
    counts = []
    for _ in range(5):
        shell.cell("player", "b")
        player._repr_mimebundle_()
        counts.append(open_widgets())
    assert len(set(counts)) == 1, "a display that is run again closes its last run's"
    one, two = (view.play for view in player._views)
    two.value = 5
    assert positions(player) == (5,) * 5
    one.value = 7
    assert (two.value, player.index) == (7, 7)
    playing = players._playing(one)
    setattr(one, playing, True)
    setattr(two, playing, True)
    assert not getattr(one, playing), "two of them would step twice as fast"
    player.speed.value = 4.0
    assert one.interval == two.interval == 312
    player.go(18)
    assert not getattr(two, playing)


def test_other_cells_and_other_players_of_the_cell_stay_open(run: Any, shell: Shell) -> None:
    shell.cell("fv.play(run)", "a")
    one, two = fv.play(run), fv.play(run, range(3))
    shell.cell("fv.play(run)", "b")
    other = fv.play(run)
    assert [p._closed for p in (one, two, other)] == [False] * 3
    shell.cell("fv.play(run, speed=2)", "a")
    again = fv.play(run)
    assert one._closed
    assert two._closed
    assert [p._closed for p in (other, again)] == [False] * 2


def test_a_front_end_that_does_not_name_its_cells(run: Any, shell: Shell) -> None:
    """Two cells may hold the same code: the latest few stay open, so nothing grows and neither is taken away."""
    made, counts = [], []
    for _ in range(12):
        shell.cell("fv.play(run)", None)
        made.append(fv.play(run))
        counts.append(open_widgets())
    assert not made[-1]._closed
    assert not made[-2]._closed
    assert [player._closed for player in made].count(False) == players.MOST_ALIKE
    assert len(set(counts[players.MOST_ALIKE :])) == 1


def test_outside_a_notebook(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(players, "_open", {})
    player = fv.play(run)
    assert players._open == {}
    player.close()


def test_one_output_however_it_is_displayed() -> None:
    """D03, in a kernel: the last line of a cell is one output, an assignment none, and ten moves add none."""
    code = {
        "import numpy as np, flashviz as fv\nx = np.eye(4, dtype='float32')\n"
        "run = fv.flash_attention_2(x, x, x, Br=2, Bc=2, device='numpy')": 0,
        "p = fv.play(run)\np": 1,
        "fv.play(run)": 1,
        "_ = fv.play(run)": 0,
        "for n in range(10): p.go(n)": 0,
        "display(p)": 1,
        "q = fv.play(run, range(3))": 0,
        "q.close()\nq": 1,
    }
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in code])
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    assert [len(cell.outputs) for cell in notebook.cells] == list(code.values())
    for cell in notebook.cells:
        for output in cell.outputs:
            assert output.data["image/png"]
            assert output.data["text/plain"].startswith("Player(")
            assert (VIEW in output.data) == ("close" not in cell.source)


def test_ten_thousand_steps_open(capsys: pytest.CaptureFixture[str]) -> None:
    r = fv.Recorder("long", {}, keep_values=4)
    x = r.tensor("x", np.ones(4), tile=2)
    r.launch("long", (1, 1, 1), (1, 1, 1))
    xi = r.slot("xi", (2,), "float32", memory="shared", scope="block", tensor="x")
    r.block(0)
    for n in range(10_000):
        with r.step(f"load {n}", tiles={"i": n}):
            r.move(x[n % 2], xi)
    recording = r.recording()
    start = time.perf_counter()
    player = Player(recording)
    opened = time.perf_counter()
    player.go(9_000)
    moved = time.perf_counter()
    last = len(recording.steps) - 1
    assert player.slider.max == last >= 9_999
    with capsys.disabled():
        print(
            f" [{last + 1} steps: opened in {opened - start:.2f} s, first jump {(moved - opened) * 1000:.0f} ms] ",
            end="",
        )
    player.close()


def test_a_run_with_times_of_a_gpu_has_its_timeline_beside_the_picture() -> None:
    stored = fv.stored("flash_attention_2")
    player = fv.play(stored, steps=range(30))
    assert ("Timeline", -2) in player.page.options
    player.page.value = -2
    assert player.beside.value.count("<img") == 1
    seen = set()
    for index in range(len(player)):
        player.go(index)
        place = player._strip.places.get(player.step)
        if place is None:
            assert ".fv-time-mark{display:none}" in player.mark.value
            continue
        assert all(0 <= part <= 1 for part in place)
        assert f"left:{100 * place[0]:.3f}%" in player.mark.value
        seen.add(place)
    assert len(seen) > 10  # steps of a block stand at places of their own
    lefts = [player._strip.places[n][0] for n in range(30) if n in player._strip.places]
    assert lefts == sorted(lefts)  # a block's actions go to the right


def test_a_run_without_times_has_no_timeline(run: Any) -> None:
    assert "Timeline" not in dict(fv.play(run).page.options)
