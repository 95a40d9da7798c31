"""The report of a whole machine, and of broken ones."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import flashviz.doctor as module
from flashviz.doctor import CHECKS, Check, Finding, Report, doctor


def one(name: str) -> tuple[Check, ...]:
    return tuple(check for check in CHECKS if check.name == name)


def alone(name: str) -> Finding:
    """What one check says, whatever it builds on."""
    (check,) = one(name)
    (result,) = doctor([Check(check.name, check.about, check.look)]).results
    return Finding(result.status, result.detail, result.fix)


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend that these versions are installed."""

    def pretend(**named: str | None) -> None:
        real = importlib.metadata.version

        def version(name: str) -> str:
            if name in named:
                text = named[name]
                if text is None:
                    raise importlib.metadata.PackageNotFoundError(name)
                return text
            return real(name)

        monkeypatch.setattr(importlib.metadata, "version", version)

    return pretend


def test_this_machine_runs_the_chapters() -> None:
    report = doctor()
    assert report.ok, str(report)
    assert "numpy" in report.devices
    assert "The chapters run here" in str(report)
    assert [result.name for result in report.results] == [check.name for check in CHECKS]


def test_json_says_the_same() -> None:
    report = doctor()
    loaded = json.loads(report.to_json())
    assert loaded["ok"] == report.ok
    assert loaded["results"][0] == {
        "name": "python",
        "about": "everything",
        "needed": True,
        "status": "ok",
        "detail": report["python"].detail,
        "fix": "",
    }


def test_the_essentials_name_no_version() -> None:
    assert not any(letter.isdigit() for letter in doctor().essentials)
    assert doctor().essentials.splitlines()[0].split() == ["python", "ok"]


def test_a_check_that_raises_is_a_finding() -> None:
    def broken(found: dict[str, Finding]) -> Finding:
        print("noise", file=sys.stderr)
        raise SystemExit("no\nGPU today")

    report = doctor([Check("odd", "nothing", broken), Check("later", "nothing", broken, after=("odd",))])
    assert report["odd"].detail == "SystemExit: no GPU today"
    assert report["later"].status == "skipped"
    assert report["later"].detail == "needs odd first"
    assert not report.ok
    with pytest.raises(KeyError, match="no check is called"):
        report["other"]


def test_ipywidgets_8_1_9_is_flagged(versions: Callable[..., None]) -> None:
    versions(ipywidgets="8.1.9")
    finding = alone("ipywidgets")
    assert finding.status == "problem"
    assert "VS Code" in finding.detail
    assert "!=8.1.9" in finding.fix


@pytest.mark.parametrize(
    ("lab", "widgets", "manager", "status", "words"),
    [
        ("4.4.0", "7.7.1", "1.1.11", "problem", "ipywidgets 7.7.1"),
        ("4.4.0", "7.7.1", "3.0.13", "problem", "ipywidgets 8 only"),
        ("4.4.0", "8.1.8", "1.1.11", "problem", "do not belong together"),
        ("4.4.0", "8.1.8", None, "problem", "jupyterlab_widgets is missing"),
        ("3.6.0", "7.7.1", "3.0.13", "problem", "do not belong together"),
        ("3.6.0", "7.7.1", "1.1.11", "ok", "3.6.0"),
        ("4.4.0", "8.1.8", "3.0.13", "ok", "4.4.0"),
        (None, "7.7.1", "1.1.11", "missing", "not installed"),
    ],
)
def test_jupyterlab_and_ipywidgets_belong_together(
    versions: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    lab: str | None,
    widgets: str,
    manager: str | None,
    status: str,
    words: str,
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "jupyterlab" else real(name))
    versions(jupyterlab=lab, ipywidgets=widgets, jupyterlab_widgets=manager)
    finding = alone("jupyterlab")
    assert finding.status == status
    assert words in finding.detail
    assert bool(finding.fix) == (status != "ok")


def test_a_missing_and_an_old_package(monkeypatch: pytest.MonkeyPatch) -> None:
    look = module._package("no_such_module", (1, 2))
    finding = look({})
    assert (finding.status, finding.detail) == ("missing", "not installed")
    assert finding.fix.endswith('-m pip install "no_such_module>=1.2"')
    assert module._package("numpy", (99,))({}).status == "problem"


@pytest.mark.parametrize(
    ("status", "expected", "detail"),
    [
        (
            SimpleNamespace(usable=True, reason="", fix="", device="NVIDIA H200", arch="sm_90"),
            "ok",
            "NVIDIA H200 (sm_90)",
        ),
        (
            SimpleNamespace(usable=False, reason="no CuPy", fix="make x", device=None, arch=None),
            "missing",
            "no CuPy",
        ),
        (
            SimpleNamespace(usable=False, reason="old driver", fix="", device="GPU", arch="sm_50"),
            "problem",
            "old driver",
        ),
    ],
)
def test_gpu(monkeypatch: pytest.MonkeyPatch, status: SimpleNamespace, expected: str, detail: str) -> None:
    monkeypatch.setitem(sys.modules, "flashviz.cuda.gpu", SimpleNamespace(status=lambda: status))
    finding = alone("gpu")
    assert (finding.status, finding.detail, finding.fix) == (expected, detail, status.fix)


def test_a_cupy_that_raises_at_import_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text("raise RuntimeError('planted: CUDA is not what it was')\n")
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib" / "__init__.py").write_text("raise OSError('planted: libfreetype is broken')\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from flashviz.cli import main; sys.exit(main(['doctor']))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    assert "libfreetype is broken" in result.stdout
    assert "The chapters do not run here yet; see matplotlib." in result.stdout


def test_the_module_can_be_called_like_the_function() -> None:
    # fv.doctor is the module wherever `flashviz.doctor` was imported before the name was looked up.
    import flashviz as fv

    assert isinstance(fv.doctor([]), Report)
    assert fv.doctor([])._repr_mimebundle_()["text/plain"] == str(doctor([]))
