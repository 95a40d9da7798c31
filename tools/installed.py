"""What an installed flashviz must do, away from the tree: run by .ci/run with the Python of a clean environment.

python -m pytest --import-mode=importlib -c /dev/null tools/installed.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import flashviz as fv
from flashviz import lab

CHAPTERS = lab.chapters_folder()
NAMES = sorted(path.name for path in CHAPTERS.glob("*.ipynb")) if CHAPTERS else []


def run(*command: str) -> str:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True).stdout


def test_it_is_the_installed_one() -> None:
    tree = Path(__file__).resolve().parent.parent
    assert not Path(fv.__file__).resolve().is_relative_to(tree)
    assert CHAPTERS is not None
    assert lab.is_installed(CHAPTERS)


def test_the_doctor_finds_kernels_and_chapters() -> None:
    assert "The chapters run here" in run("-m", "flashviz", "doctor")
    report = json.loads(run("-m", "flashviz", "doctor", "--json"))
    status = {result["name"]: result["status"] for result in report["results"]}
    assert status["kernels"] == "ok"
    assert status["chapters"] == "ok"
    # Clean: neither JupyterLab nor CuPy comes with the base install, and both are only named, with a command.
    assert status["jupyterlab"] == status["gpu"] == "missing"


def test_lab_copies_the_chapters_and_names_what_is_missing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flashviz", "lab", "--dir", str(tmp_path / "mine")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "JupyterLab is not installed; add it:" in result.stderr
    assert sorted(path.name for path in (tmp_path / "mine").glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_chapter_runs_from_a_copy(name: str, tmp_path: Path) -> None:
    assert CHAPTERS is not None
    lab.copy_chapters(CHAPTERS, tmp_path)
    notebook = nbformat.read(tmp_path / name, as_version=4)
    # Raises where a cell does, and names it.
    NotebookClient(
        notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute(env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
