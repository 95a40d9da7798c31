"""What this machine can run, what is missing, and the one command that adds it.

Each `Check` says what it looks at, why it is wanted and which earlier checks it builds on. A check may raise
whatever it likes: `doctor` turns it into a finding, so that a machine where half of the imports fail still gets a
whole report.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import json
import platform
import shlex
import shutil
import sys
import types
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "missing", "problem", "skipped"]

LAB = ('"jupyterlab>=4.2"', '"ipywidgets>=8.1,!=8.1.9,<9"')
WIDGETS = '"ipywidgets>=7.7.1,!=8.1.9,<9"'


@dataclass(frozen=True)
class Finding:
    """What one check found: `detail` in a few words, `fix` the one command that helps, or empty."""

    status: Status
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class Check:
    """One thing to look at.

    `about` says what it is for; `needed` is False where the chapters run without it; `after` names the checks that
    must be ok before this one makes sense. `look` gets the findings so far, by name.
    """

    name: str
    about: str
    look: Callable[[dict[str, Finding]], Finding]
    needed: bool = True
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """One line of the report: a check and what it found."""

    name: str
    about: str
    needed: bool
    status: Status
    detail: str
    fix: str


@dataclass(frozen=True)
class Report:
    """The result of `doctor`. Prints as text; `to_json` gives the same as JSON."""

    results: tuple[Result, ...]

    def __getitem__(self, name: str) -> Result:
        """The result of one check, by its name."""
        for result in self.results:
            if result.name == name:
                return result
        raise KeyError(f"no check is called {name!r}; there are {', '.join(result.name for result in self.results)}")

    @property
    def ok(self) -> bool:
        """Whether the chapters run here. True on every machine that executes one to its end."""
        return all(result.status == "ok" for result in self.results if result.needed)

    @property
    def devices(self) -> tuple[str, ...]:
        """Where attention can run here: ("numpy",) or ("numpy", "cpu", "gpu")."""
        status = {result.name: result.status for result in self.results}
        return tuple(device for device in ("numpy", "cpu", "gpu") if status.get(device) == "ok")

    @property
    def essentials(self) -> str:
        """The needed checks with their status and no version or device: the same text wherever a chapter runs."""
        return "\n".join(f"{result.name:<12}{result.status}" for result in self.results if result.needed)

    def to_json(self) -> str:
        """The report as a JSON object with the keys ok, devices and results."""
        return json.dumps(
            {"ok": self.ok, "devices": list(self.devices), "results": [asdict(result) for result in self.results]},
            indent=2,
        )

    def __str__(self) -> str:
        lines = []
        for result in self.results:
            status = "-" if result.status == "missing" and not result.needed else result.status
            lines.append(f"{status:<9}{result.name:<13}{result.detail}")
            if result.status != "ok":
                lines.append(f"{'':<22}wanted for: {result.about}")
            if result.fix:
                lines.append(f"{'':<22}fix: {result.fix}")
        where = {"numpy": "in NumPy", "cpu": "as CUDA source on the processor", "gpu": "on the GPU"}
        if self.ok:
            places = [where[device] for device in self.devices]
            listed = " and ".join(filter(None, [", ".join(places[:-1]), *places[-1:]]))
            lines.append(f"\nThe chapters run here, {listed}.")
        else:
            broken = ", ".join(result.name for result in self.results if result.needed and result.status != "ok")
            lines.append(f"\nThe chapters do not run here yet; see {broken}.")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": str(self)}


def doctor(checks: Iterable[Check] | None = None) -> Report:
    """Look at this machine: Python, the packages, the kernels and chapters, the GPU. Never raises.

    Args:
        checks: what to look at; None is everything (`CHECKS`).

    Returns:
        A `Report`: print it, or read `.ok`, `.devices` and `.results`.

    Example:
        >>> doctor([Check("python", "everything", lambda found: Finding("ok", "3.11"))]).ok
        True
    """
    found: dict[str, Finding] = {}
    results = []
    for check in CHECKS if checks is None else checks:
        found[check.name] = finding = _look(check, found)
        results.append(Result(check.name, check.about, check.needed, finding.status, finding.detail, finding.fix))
    return Report(tuple(results))


def _look(check: Check, found: dict[str, Finding]) -> Finding:
    waiting = [name for name in check.after if name not in found or found[name].status != "ok"]
    if waiting:
        return Finding("skipped", f"needs {', '.join(waiting)} first")
    # Broken extension modules write pages to stderr while they fail; the finding says it in one line.
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        try:
            return check.look(found)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # an import can even raise SystemExit
            return Finding("problem", _one_line(error))


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    name = type(error).__name__
    return f"{name}: {text[:160]}{'…' if len(text) > 160 else ''}" if text else name


def _pip(*packages: str) -> str:
    # `python` where that is this Python, else its full path: the command must change this environment.
    known = shutil.which("python")
    this = bool(known) and Path(str(known)).parent == Path(sys.executable).parent
    return f"{'python' if this else shlex.quote(sys.executable)} -m pip install {' '.join(packages)}"


def _version(package: str) -> tuple[int, ...] | None:
    try:
        text = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    return _numbers(text)


def _numbers(text: str) -> tuple[int, ...]:
    numbers = []
    for part in text.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _package(module: str, least: tuple[int, ...], distribution: str = "") -> Callable[[dict[str, Finding]], Finding]:
    """A check that a package is there, new enough and importable."""

    def look(found: dict[str, Finding]) -> Finding:
        name = distribution or module
        fix = _pip(f'"{name}>={_dotted(least)}"')
        if importlib.util.find_spec(module) is None:
            return Finding("missing", "not installed", fix)
        try:
            imported = importlib.import_module(module)
        except Exception as error:
            return Finding(
                "problem",
                f"cannot be imported: {_one_line(error)}",
                fix.replace("install", "install --force-reinstall", 1),
            )
        version = str(getattr(imported, "__version__", "")) or _dotted(_version(name) or ())
        if _numbers(version) < least:
            return Finding("problem", f"{version} is older than {_dotted(least)}", fix)
        return Finding("ok", version)

    return look


def _python(found: dict[str, Finding]) -> Finding:
    return Finding("ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def _matplotlib(found: dict[str, Finding]) -> Finding:
    first = _package("matplotlib", (3, 8))(found)
    if first.status == "ok":
        # An import proves little: fonts and the SVG writer are found when something is drawn.
        figure = importlib.import_module("matplotlib.figure").Figure(figsize=(1, 1))
        figure.text(0.5, 0.5, "m")
        figure.savefig(io.BytesIO(), format="svg")
    return first


def _ipywidgets(found: dict[str, Finding]) -> Finding:
    version = _version("ipywidgets")
    if version is not None and version[:3] == (8, 1, 9):
        return Finding("problem", "8.1.9 is not rendered by VS Code", _pip(WIDGETS))
    if version is not None and version >= (9,):
        return Finding("problem", f"{_dotted(version)} is not known to work", _pip(WIDGETS))
    finding = _package("ipywidgets", (7, 7, 1))(found)
    return Finding(finding.status, finding.detail, _pip(WIDGETS)) if finding.fix else finding


def _jupyterlab(found: dict[str, Finding]) -> Finding:
    lab = _version("jupyterlab")
    if lab is None or importlib.util.find_spec("jupyterlab") is None:
        return Finding("missing", "not installed; any other Jupyter will do", _pip(*LAB))
    widgets = _version("ipywidgets") or ()
    manager = _version("jupyterlab_widgets")
    text = f"{_dotted(lab)} with ipywidgets {_dotted(widgets)}"
    if lab >= (4,) and widgets < (8,):
        return Finding("problem", f"{text}: JupyterLab 4 shows the widgets of ipywidgets 8 only", _pip(*LAB))
    if manager is None:
        return Finding("problem", f"{text}: jupyterlab_widgets is missing, widgets will not show", _pip(*LAB))
    if (manager >= (3,)) != (widgets >= (8,)):
        return Finding(
            "problem", f"{text} and jupyterlab_widgets {_dotted(manager)} do not belong together", _pip(*LAB)
        )
    return Finding("ok", text)


def _shipped(folder: str, pattern: str) -> Callable[[dict[str, Finding]], Finding]:
    """A check that the wheel's data, or the clone's, is there."""

    def look(found: dict[str, Finding]) -> Finding:
        package = Path(__file__).resolve().parent
        for place in (package / f"_{folder}", package.parent / folder):
            count = len(list(place.glob(pattern)))
            if count:
                return Finding("ok", f"{count} in {place}")
        return Finding("missing", "not in this installation; install flashviz again")

    return look


def _cpu(found: dict[str, Finding]) -> Finding:
    status = importlib.import_module("flashviz.cuda.cpu").status()
    if status.usable:
        return Finding("ok", str(status.compiler))
    return Finding("missing", str(status.reason), _pip(str(status.fix).removeprefix("pip install ")))


def _gpu(found: dict[str, Finding]) -> Finding:
    status = importlib.import_module("flashviz.cuda.gpu").status()
    device, arch = getattr(status, "device", None), getattr(status, "arch", None)
    if status.usable:
        return Finding("ok", " ".join(str(part) for part in (device, f"({arch})" if arch else None) if part))
    fix = str(status.fix or "")
    if fix.startswith("pip install "):
        fix = _pip(fix.removeprefix("pip install "))
    return Finding("problem" if device else "missing", str(status.reason), fix)


CHECKS: tuple[Check, ...] = (
    Check("python", "everything", _python),
    Check("numpy", "the tile programs", _package("numpy", (1, 26))),
    Check("msgspec", "saving and loading recordings", _package("msgspec", (0, 18, 6))),
    Check("pygments", "the source beside the picture", _package("pygments", (2, 17))),
    Check("matplotlib", "the pictures", _matplotlib, after=("numpy",)),
    Check("ipywidgets", "the player", _ipywidgets),
    Check("chapters", "flashviz lab", _shipped("notebooks", "*.ipynb")),
    Check("kernels", "the CUDA source beside the picture, and launching it", _shipped("kernels", "*.cu")),
    Check("jupyterlab", "flashviz lab", _jupyterlab, needed=False, after=("ipywidgets",)),
    Check("gpu", "launching the CUDA kernels", _gpu, needed=False, after=("numpy", "kernels")),
    Check("cpu", "the CUDA kernels on the processor", _cpu, needed=False, after=("numpy", "kernels")),
)


class _Callable(types.ModuleType):
    def __call__(self, checks: Iterable[Check] | None = None) -> Report:
        return doctor(checks)


# Importing this module binds flashviz.doctor to it, where a reader expects the function of that name.
sys.modules[__name__].__class__ = _Callable
