"""The explorer: a slider records again, an error is shown and changes nothing, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from html import unescape
from typing import Any

import numpy as np
import pytest
from playing import PNG, VIEW, Shell, open_widgets

import flashviz as fv
from flashviz import player as players
from flashviz.explorer import Explorer


def record(N: int, Br: int) -> Any:
    if Br == 3:
        raise ArithmeticError("no <b>threes</b>")
    x = np.eye(N, 2, dtype="float32")
    return fv.flash_attention_2(x, x, x, Br=Br, Bc=2, device="numpy")


@pytest.fixture
def explorer() -> Iterator[Explorer]:
    explorer = fv.explore(record, N=(2, 4, 8), Br=(1, 2, 4))
    yield explorer
    explorer.close()


def test_a_slider_records_again(explorer: Explorer) -> None:
    first = explorer.player
    assert first is not None
    assert explorer._place.children == (first.widget,)
    steps = len(first)
    explorer.set(N=8)
    assert explorer.player is not first
    assert first._closed
    assert len(explorer.player) > steps
    assert explorer._place.children == (explorer.player.widget,)
    assert explorer.values == {"N": 8, "Br": 2}
    assert repr(explorer) == "Explorer(N=8, Br=2)"
    counted = fv.traffic(explorer.player.recording)
    assert f"{counted.fetches} fetches, {counted.bytes_read:,} bytes read" in explorer._note.value
    assert f"{len(explorer.player)} steps" in explorer._note.value


def test_an_error_is_shown_and_the_last_recording_kept(explorer: Explorer) -> None:
    kept = explorer.player
    explorer.set(Br=3)
    assert "ArithmeticError: no <b>threes</b>" in unescape(explorer._note.value)
    assert "<b>" not in explorer._note.value, "what a function says is text, not markup"
    assert explorer.player is kept
    assert not kept._closed
    kept.go(1)
    explorer.set(Br=4)
    assert "alert" not in explorer._note.value
    assert kept._closed


def test_speed_and_page_are_kept(explorer: Explorer) -> None:
    explorer.player.speed.value = 4.0
    explorer.player.page.value = -1
    explorer.set(N=6)
    assert explorer.player.speed.value == 4.0
    assert explorer.player.page.value == -1
    assert "fv-numbers" in explorer.player.beside.value


def test_what_it_displays(explorer: Explorer) -> None:
    bundle = explorer._repr_mimebundle_()
    assert bundle["text/plain"] == "Explorer(N=4, Br=2)"
    assert bundle["image/png"].startswith(PNG)
    assert bundle[VIEW]["model_id"] == explorer.widget.model_id
    explorer.close()
    explorer.close()
    assert set(explorer._repr_mimebundle_()) == {"text/plain", "image/png"}


def test_errors() -> None:
    before = open_widgets()
    with pytest.raises(ValueError, match=r"N=\(5, 4, 8\)"):
        fv.explore(record, N=(5, 4, 8))
    with pytest.raises(ValueError, match=r"N=\(4, 8\): give"):
        fv.explore(record, N=(4, 8))
    with pytest.raises(ArithmeticError):
        fv.explore(record, N=(2, 4, 8), Br=(1, 3, 4))
    assert open_widgets() == before
    explorer = fv.explore(record, N=(2, 4, 8), Br=(1, 2, 4))
    with pytest.raises(KeyError, match="no slider 'Bc'; there are N, Br"):
        explorer.set(Bc=3)
    explorer.close()
    assert open_widgets() == before


def test_sliders_moved_and_the_cell_run_again_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import IPython

    shell = Shell()
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    monkeypatch.setattr(players, "_open", {})
    before, counts = open_widgets(), []
    for _ in range(5):
        shell.cell("fv.explore(record)", "a")
        explorer = fv.explore(record, N=(2, 4, 8), Br=(1, 2, 4))
        shell.parent = {}  # a slider is moved: no cell runs
        for N in (6, 8, 5):
            explorer.set(N=N)
        counts.append(open_widgets())
    assert len(set(counts)) == 1, counts
    explorer.close()
    assert open_widgets() == before


def test_a_picture_is_drawn_again() -> None:
    def lanes(row: int) -> Any:
        if row == 3:
            raise ArithmeticError("no threes")
        return fv.swizzle(row)

    explorer = fv.explore(lanes, row=(0, 5, 7))
    try:
        assert explorer.player is None
        first, (image,) = explorer.picture, explorer._place.children
        assert first is not None
        assert first.startswith(PNG)
        assert 'alt="row = 5"' in image.value
        assert len(first) < 0.6 * len(fv.swizzle(5)._repr_png_())  # a slider sends one for each move
        explorer.set(row=2)
        assert explorer.picture not in (None, first)
        assert 'alt="row = 2"' in explorer._place.children[0].value
        kept = explorer.picture
        explorer.set(row=3)
        assert "ArithmeticError: no threes" in explorer._note.value
        assert explorer.picture == kept
        bundle = explorer._repr_mimebundle_()
        assert bundle["image/png"] == kept
        assert bundle["text/plain"] == "Explorer(row=3)"
        assert VIEW in bundle
    finally:
        explorer.close()


def test_what_a_picture_says_of_itself_stands_above_it() -> None:
    run = fv.ring(np.ones((12, 4)), consumers=2)
    before = open_widgets()
    explorer = fv.explore(lambda copy: fv.turns(run, copy=copy), copy=(0, 2, 4))
    explorer.set(copy=1)
    assert "Turns(7: producer waits 1" in explorer._note.value
    explorer.close()
    assert open_widgets() == before
