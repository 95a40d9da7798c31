"""The project's own files: what it needs is said once and the same everywhere, and the wheel carries what it must."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from lowest import lowest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# conda-forge's name where it differs: matplotlib without a desktop toolkit
CONDA = {"matplotlib": "matplotlib-base"}
CUDA = re.compile(r"cupy|cuda|nvidia|torch|jax|triton", re.I)


@pytest.fixture(scope="module")
def project(root: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return loaded


def wanted(project: dict[str, Any]) -> dict[str, str]:
    """What environment.yml must hold, by name: the base and `lab`, whose tighter bounds win."""
    needs = {}
    for text in [*project["dependencies"], *project["optional-dependencies"]["lab"]]:
        requirement = Requirement(text)
        needs[CONDA.get(requirement.name, requirement.name)] = str(requirement.specifier)
    return needs


def test_environment_yml_equals_pyproject(root: Path, project: dict[str, Any]) -> None:
    environment = yaml.safe_load((root / "environment.yml").read_text())
    entries = [entry for entry in environment["dependencies"] if isinstance(entry, str) and entry != "pip"]
    conda = {Requirement(entry).name: str(Requirement(entry).specifier) for entry in entries}
    assert conda.pop("python") == project["requires-python"]
    assert conda == wanted(project)
    # No build strings (name=version=build), no package of one system.
    assert not [entry for entry in entries if re.search(r"[^<>=!]=[^=]", entry) or CUDA.search(entry)]
    assert {"pip": ["-e ."]} in environment["dependencies"]


def test_the_base_install_brings_no_cuda(project: dict[str, Any]) -> None:
    assert not [need for need in project["dependencies"] if CUDA.search(need)]
    assert not [need for need in project["optional-dependencies"]["lab"] if CUDA.search(need)]
    for extra in ("gpu", "gpu-cuda12"):
        assert any("cupy" in need for need in project["optional-dependencies"][extra])


def test_every_need_has_one_lower_bound(project: dict[str, Any]) -> None:
    for need in project["dependencies"]:
        lowest(need)
    with pytest.raises(ValueError, match="exactly one lower bound"):
        lowest("numpy<3")


@pytest.mark.parametrize(("version", "allowed"), [("7.7.0", 0), ("7.7.1", 1), ("8.1.8", 1), ("8.1.9", 0), ("9.0", 0)])
def test_ipywidgets_versions(project: dict[str, Any], version: str, allowed: int) -> None:
    (need,) = [Requirement(text) for text in project["dependencies"] if text.startswith("ipywidgets")]
    assert need.specifier.contains(Version(version)) == bool(allowed)


def test_jupyterlab_4_comes_with_ipywidgets_8(project: dict[str, Any]) -> None:
    for name, needs in project["optional-dependencies"].items():
        requirements = {Requirement(text).name: Requirement(text).specifier for text in needs}
        if "jupyterlab" in requirements:
            assert not requirements["jupyterlab"].contains("3.6.0"), name
            assert not requirements["ipywidgets"].contains("7.8.5"), name
            assert not requirements["ipywidgets"].contains("8.1.9"), name


def tracked(root: Path) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("needs git and a clone")
    files = [root / name for name in listed.stdout.split("\0") if name]
    return [file for file in files if file.is_file() and file.suffix not in (".png", ".gif", ".mp4", ".npz", ".npy")]


# Spelled in pieces, so that this file does not hold them itself.
FORBIDDEN = re.compile(
    "|".join(
        [
            r"(?<![\w.~])/(?:" + "wo" + r"rk|ro" + r"ot)/\w",
            r"/ho" + r"me/\w+/",
            "pypi" + r"\.org/simple",
            "files" + r"\.pythonhosted",
            "registry" + r"\.npmjs",
            "index" + "-url",
        ]
    )
)


def test_no_path_of_one_machine_and_no_registry(root: Path) -> None:
    found = []
    for file in tracked(root):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if FORBIDDEN.search(line) and "# a planted" not in line:
                found.append(f"{file.relative_to(root)}:{number}: {line.strip()[:100]}")
    assert found == []
    assert FORBIDDEN.search("cd /" + "work/x")


def test_the_make_targets_are_there(root: Path) -> None:
    targets = re.findall(r"^(\w+):", (root / "Makefile").read_text(), re.M)
    assert {"lab", "test", "notebooks", "bench", "lint"} <= set(targets)
    # A gate that cannot fail is none: the formatter must check, not write.
    assert "ruff format --check" in (root / "Makefile").read_text()


@pytest.mark.slow
def test_wheel_and_sdist_are_complete(root: Path, tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(tmp_path), str(root)], check=True, capture_output=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    (sdist,) = tmp_path.glob("*.tar.gz")
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, inside in (("kernels", "_kernels"), ("notebooks", "_notebooks"), ("flashviz", "")):
        for file in tracked(root):
            if file.is_relative_to(root / folder):
                shipped = "/".join(
                    part for part in ("flashviz", inside, file.relative_to(root / folder).as_posix()) if part
                )
                assert shipped in names
    assert "flashviz/py.typed" in names
    top = {name.split("/")[0] for name in names}
    assert top == {"flashviz", next(name for name in top if name.endswith(".dist-info"))}
    with tarfile.open(sdist) as archive:
        packed = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    for needed in (
        "Makefile",
        "LICENSE",
        "README.md",
        "environment.yml",
        "tests/test_project.py",
        "tools/notebooks.py",
    ):
        assert needed in packed
    assert any(name.startswith("kernels/") for name in packed)


@pytest.mark.slow
def test_what_is_measured_on_a_gpu_says_so_where_there_is_none(root: Path, tmp_path: Path) -> None:
    scripts = sorted((root / "benchmarks").glob("gpu*.py"))
    assert len(scripts) > 10
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    for script in scripts:
        done = subprocess.run(
            [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, script.name + done.stderr
        assert "Traceback" not in done.stderr, script.name
        assert done.stdout.startswith(("Nothing is", "No traces")) or script.name == "gpu_hopper_steps.py", script.name
    assert not list(tmp_path.iterdir())
