"""The command, and the copy of the chapters that never loses a reader's work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flashviz import cli, lab
from flashviz.lab import MANIFEST, copy_chapters


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for name in ("00_start.ipynb", "03_flash.ipynb"):
        (folder / name).write_text(f"{name} first")
    (folder / "notes.pyc").write_text("not a chapter")
    return folder


def outcomes(source: Path, target: Path) -> dict[str, str]:
    return {one.name: one.outcome for one in copy_chapters(source, target)}


def test_a_first_copy_and_a_second(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    assert outcomes(source, target) == {"00_start.ipynb": "new", "03_flash.ipynb": "new"}
    assert sorted(file.name for file in target.iterdir()) == [MANIFEST, "00_start.ipynb", "03_flash.ipynb"]
    assert set(outcomes(source, target).values()) == {"same"}


def test_what_the_reader_did_not_touch_is_updated(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    copy_chapters(source, target)
    (source / "03_flash.ipynb").write_text("second")
    assert outcomes(source, target)["03_flash.ipynb"] == "updated"
    assert (target / "03_flash.ipynb").read_text() == "second"


def test_what_the_reader_changed_is_kept(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    copy_chapters(source, target)
    (target / "03_flash.ipynb").write_text("my work")
    assert outcomes(source, target)["03_flash.ipynb"] == "kept"
    (source / "03_flash.ipynb").write_text("second")
    assert outcomes(source, target)["03_flash.ipynb"] == "beside"
    assert (target / "03_flash.ipynb").read_text() == "my work"
    assert (target / "03_flash.new.ipynb").read_text() == "second"
    # The same version is not delivered twice.
    assert outcomes(source, target)["03_flash.ipynb"] == "kept"


def test_a_changed_new_version_is_the_readers_too(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    copy_chapters(source, target)
    (target / "03_flash.ipynb").write_text("my work")
    (source / "03_flash.ipynb").write_text("second")
    copy_chapters(source, target)
    (target / "03_flash.new.ipynb").write_text("my work on the second")
    (source / "03_flash.ipynb").write_text("third")
    copy_chapters(source, target)
    assert (target / "03_flash.ipynb").read_text() == "my work"
    assert (target / "03_flash.new.ipynb").read_text() == "my work on the second"
    assert (target / "03_flash.new2.ipynb").read_text() == "third"


def test_a_folder_that_was_there_before(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    target.mkdir()
    (target / "00_start.ipynb").write_text("something of the reader's with the same name")
    assert outcomes(source, target) == {"00_start.ipynb": "beside", "03_flash.ipynb": "new"}
    assert (target / "00_start.ipynb").read_text() == "something of the reader's with the same name"


@pytest.mark.parametrize("manifest", ["", "{", "[]", '{"files": 3}', '{"files": {"03_flash.ipynb": "0"}}'])
def test_a_damaged_manifest_overwrites_nothing(source: Path, tmp_path: Path, manifest: str) -> None:
    target = tmp_path / "mine"
    copy_chapters(source, target)
    (target / MANIFEST).write_text(manifest)
    (source / "03_flash.ipynb").write_text("second")
    assert outcomes(source, target)["03_flash.ipynb"] == "beside"
    assert (target / "03_flash.ipynb").read_text() == "03_flash.ipynb first"


def test_a_file_that_the_reader_deleted_comes_back(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    copy_chapters(source, target)
    (target / "03_flash.ipynb").unlink()
    assert outcomes(source, target)["03_flash.ipynb"] == "new"


def test_the_target_is_a_file(source: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(NotADirectoryError, match="--dir"):
        copy_chapters(source, tmp_path / "mine")


def run_lab(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, list[str]]:
    called: list[str] = []

    def call(command: list[str]) -> int:
        called.extend(command)
        return 0

    monkeypatch.setattr(subprocess, "call", call)
    return cli.main(["lab", *arguments]), called


def test_lab_in_a_clone_opens_the_chapters_in_place(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    code, command = run_lab(monkeypatch, "--no-browser")
    assert code == 0
    assert f"--ServerApp.root_dir={root / 'notebooks'}" in command
    assert "--no-browser" in command


def test_lab_of_a_wheel_works_on_a_copy(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lab, "chapters_folder", lambda: source)
    monkeypatch.setattr(lab, "is_installed", lambda folder: True)
    monkeypatch.chdir(tmp_path)
    code, command = run_lab(monkeypatch)
    assert code == 0
    assert f"--ServerApp.root_dir={tmp_path / 'flashviz-chapters'}" in command
    assert "2 files copied to flashviz-chapters" in capsys.readouterr().out
    (tmp_path / "flashviz-chapters" / "03_flash.ipynb").write_text("my work")
    (source / "03_flash.ipynb").write_text("second")
    run_lab(monkeypatch)
    said = capsys.readouterr().out
    assert said == "kept your 03_flash.ipynb; the new version is beside it: 03_flash.new.ipynb\n"


def test_lab_without_jupyterlab_names_one_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jupyterlab" else real(name))
    code, command = run_lab(monkeypatch)
    said = capsys.readouterr().err
    assert (code, command) == (1, [])
    assert said.count("\n") == 1
    assert '-m pip install "jupyterlab>=4.2"' in said


def test_lab_into_a_folder_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("x")
    code, command = run_lab(monkeypatch, "--dir", str(tmp_path / "mine"))
    assert (code, command) == (1, [])
    assert "is a file" in capsys.readouterr().err


def test_the_module_is_the_command() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "flashviz", "doctor", "--json"], capture_output=True, text=True, check=True
    )
    assert {"ok", "devices", "results"} == set(json.loads(result.stdout))


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    import flashviz

    assert cli.main([]) == 0
    assert "doctor" in capsys.readouterr().out
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"flashviz {flashviz.__version__}\n"
