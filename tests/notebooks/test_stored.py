"""The stored chapters, and which planted faults nbval and the static check catch."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

import notebooks

ROOT = Path(__file__).resolve().parents[2]
Plant = Callable[[NotebookNode], None]

CELLS = [
    "import numpy as np\nprint('bytes', int(np.arange(6).sum()) * 4)",
    "%matplotlib inline\nfrom matplotlib.figure import Figure\nfigure = Figure(figsize=(2, 1))\nfigure.subplots().bar([1, 2], [3, 4])\nfigure",
    "import ipywidgets as widgets\nwidgets.IntSlider(max=9)",
    "6 * 7",
]


@pytest.mark.parametrize("path", notebooks.chapters(), ids=lambda path: path.stem)
def test_a_stored_chapter_is_good(path: Path) -> None:
    assert notebooks.problems(path) == []


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small chapter, executed and stored as the real ones are."""
    path = tmp_path_factory.mktemp("good") / "chapter.ipynb"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbformat.write(notebook, path)
    assert notebooks.main([str(path)]) == 0
    return path


def test_stored_twice_is_the_same_bytes(good: Path) -> None:
    before = good.read_bytes()
    assert notebooks.store(good) == "unchanged"
    assert good.read_bytes() == before
    assert b"widget-view" not in before
    assert b"image/png" in before
    assert b"Matplotlib version" not in base64.b64decode(nbformat.read(good, 4).cells[1].outputs[-1].data["image/png"])


def number(notebook: NotebookNode) -> None:
    notebook.cells[0].outputs[0].text = "bytes 61\n"


def cleared(notebook: NotebookNode) -> None:
    notebook.cells[3].outputs = []


def never_run(notebook: NotebookNode) -> None:
    notebook.cells[3].outputs, notebook.cells[3].execution_count = [], None


def junk_picture(notebook: NotebookNode) -> None:
    notebook.cells[1].outputs[-1].data["image/png"] = base64.b64encode(b"x" * 99).decode()


def cut_picture(notebook: NotebookNode) -> None:
    data = base64.b64decode(notebook.cells[1].outputs[-1].data["image/png"])
    notebook.cells[1].outputs[-1].data["image/png"] = base64.b64encode(data[: len(data) // 2]).decode()


def blank_picture(notebook: NotebookNode) -> None:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")

    header = chunk(b"IHDR", (9).to_bytes(4, "big") * 2 + bytes([8, 0, 0, 0, 0]))
    data = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(10) * 9)) + chunk(b"IEND", b"")
    notebook.cells[1].outputs[-1].data["image/png"] = base64.b64encode(data).decode()


def widget_state(notebook: NotebookNode) -> None:
    notebook.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": {}}}


def widget_view(notebook: NotebookNode) -> None:
    view = {"model_id": "0" * 32, "version_major": 2, "version_minor": 0}
    notebook.cells[2].outputs[0].data["application/vnd.jupyter.widget-view+json"] = view


def other_kernel(notebook: NotebookNode) -> None:
    notebook.metadata.kernelspec.name = "my-env"


def other_order(notebook: NotebookNode) -> None:
    notebook.cells[3].execution_count = notebook.cells[3].outputs[0].execution_count = 9


def stored_error(notebook: NotebookNode) -> None:
    notebook.cells[3].outputs = [nbformat.v4.new_output("error", ename="ValueError", evalue="x", traceback=[])]


def said(text: str, stream: str = "stdout") -> Plant:
    def plant(notebook: NotebookNode) -> None:
        notebook.cells[0].outputs = [nbformat.v4.new_output("stream", name=stream, text=text)]

    plant.__name__ = text.replace("/", "_").replace(" ", "_")
    return plant


def timings(notebook: NotebookNode) -> None:
    notebook.cells[0].metadata["execution"] = {"iopub.execute_input": "2026-01-01T00:00:00Z"}


def large(notebook: NotebookNode) -> None:
    notebook.cells[0].outputs[0].text = "a" * 1_000_001


def planted(good: Path, folder: Path, plant: Plant | None) -> Path:
    notebook = nbformat.read(good, as_version=4)
    if plant is not None:
        plant(notebook)
    path = folder / "chapter.ipynb"
    path.write_text(notebooks.text_of(notebook), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (never_run, "cell 3 was never executed"),
        (junk_picture, "cell 1 stores image/png that is no picture"),
        (cut_picture, "cell 1 stores image/png that is no picture"),
        (blank_picture, "cell 1 stores an empty picture of 9 × 9"),
        (widget_state, "has metadata.widgets"),
        (widget_view, "cell 2 stores a widget view"),
        (other_kernel, "its kernelspec is not python3"),
        (other_order, "cell 3 has run as number 9"),
        (stored_error, "cell 3 stores an error: ValueError"),
        (said("/home/someone/x.py"), "a path of one machine"),  # a planted path
        (said("<object at 0x7f00deadbeef>"), "an object's address"),
        (said("on NVIDIA H200"), "a GPU's name"),
        (said("a warning", "stderr"), "text on stderr"),
        (timings, "is not as `make notebooks` writes it"),
        (large, "1,000,000 are allowed"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_static_check_catches(good: Path, tmp_path: Path, plant: Plant, words: str) -> None:
    assert any(words in problem for problem in notebooks.problems(planted(good, tmp_path, plant)))


def nbval(path: Path) -> subprocess.CompletedProcess[str]:
    """Exactly what `make test` runs on a chapter, with the plugin that tests/conftest.py adds."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "never_executed", "-c", os.devnull),
            *("--nbval", "--nbval-current-env", "--nbval-sanitize-with", str(ROOT / "tests/notebooks/sanitize.cfg")),
            *("--nbval-cell-timeout", "60", "--rootdir", str(path.parent), str(path)),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tools")},
    )


@pytest.mark.parametrize(
    ("plant", "failing"),
    [
        (None, None),
        (number, 0),
        (cleared, 3),
        (never_run, 3),
        # nbval compares no pictures: this is why chapters print values too, and why the static check decodes pictures.
        (junk_picture, None),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_nbval_catches(good: Path, tmp_path: Path, plant: Plant | None, failing: int | None) -> None:
    result = nbval(planted(good, tmp_path, plant))
    if failing is None:
        assert result.returncode == 0, result.stdout
    else:
        assert result.returncode == 1, result.stdout
        assert f"Cell {failing}" in result.stdout
        assert f"1 failed, {len(CELLS) - 1} passed" in result.stdout


def test_a_cell_that_loops_is_named_and_nothing_is_stored(tmp_path: Path) -> None:
    path = tmp_path / "chapter.ipynb"
    nbformat.write(
        nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("while True:\n    pass  # planted")]), path
    )
    before = path.read_bytes()
    with pytest.raises(Exception, match="planted"):
        notebooks.execute(path, seconds=2)
    assert path.read_bytes() == before
