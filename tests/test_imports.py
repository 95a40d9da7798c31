"""What `import flashviz` loads, and which way imports point: slots ← recording ← programs, cuda, checks ← view ← player."""

from __future__ import annotations

import ast
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

HEAVY = ("matplotlib", "ipywidgets", "IPython", "cupy", "msgspec", "pygments", "PIL")
# A part may import parts below it and its own. `tiles` and the recording's modules are one level.
LEVEL = {
    "slots": 0,
    "events": 0,
    "recording": 0,
    "recorder": 0,
    "contents": 0,
    "steps": 0,
    "files": 0,
    "tiles": 0,
    "bfloat16": 0,
    "sight": 0,
    "measurements": 0,
    "ladder": 0,
    "warp": 0,
    "programs": 1,
    "cuda": 1,
    "checks": 1,
    "view": 2,
    "player": 3,
    "comparison": 4,
    "explorer": 4,
    "doctor": 4,
    "tuning": 4,
    "contenders": 4,
    "benchmark": 4,
    "lab": 4,
    "cli": 4,
    "__main__": 4,
}
# Parts of one level that may use each other, and what no level allows.
ALSO = {("programs", "cuda"), ("checks", "cuda")}
NEVER = {("view", "programs"), ("view", "cuda"), ("checks", "view")}
LONGEST = 350


def imports(file: Path, package: Path) -> list[str]:
    """Every module that a file imports, at the top or inside a function; `if TYPE_CHECKING:` is typing, not importing."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    parts = ["flashviz", *file.relative_to(package).with_suffix("").parts]
    found = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                visit(other)
            return
        if isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # For a package's __init__, `parts` ends with "__init__": one dot means the package itself.
            base = parts[: len(parts) - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found.append(module)
            found.extend(f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            argument = node.args[0] if node.args else None
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                found.append(argument.value)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return found


def part_of(module: str) -> str | None:
    names = module.split(".")
    return names[1] if names[0] == "flashviz" and len(names) > 1 and names[1] in LEVEL else None


def wrong_imports(package: Path) -> list[str]:
    """Every import against the design's directions, as `file imports module`."""
    wrong = []
    for file in sorted(package.rglob("*.py")):
        name = file.relative_to(package).as_posix()
        if name == "__init__.py" or name.startswith("_"):
            continue
        own = name.split("/")[0].removesuffix(".py")
        if own not in LEVEL:
            wrong.append(f"{name} belongs to no part that the design knows")
            continue
        for module in imports(file, package):
            top, other = module.split(".")[0], part_of(module)
            bad = (
                (top == "cupy" and name != "cuda/gpu.py")
                or (top == "ipywidgets" and LEVEL[own] < LEVEL["player"])
                or (top == "IPython" and LEVEL[own] < LEVEL["player"])
            )
            if other is not None and other != own:
                level, below = LEVEL[own], LEVEL[other]
                sideways = level == below and level in (1, 2) and (own, other) not in ALSO
                bad = bad or below > level or sideways or (own, other) in NEVER
            if bad:
                wrong.append(f"{name} imports {module}")
    return sorted(set(wrong))


def test_import_flashviz_loads_numpy_at_most() -> None:
    code = f"import sys, flashviz; print([name for name in {HEAVY!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_command_loads_nothing_heavy_for_its_help() -> None:
    code = (
        "import sys, flashviz.cli; flashviz.cli.main([]); "
        f"print([name for name in {(*HEAVY, 'numpy')!r} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_imports_point_one_way(root: Path) -> None:
    assert wrong_imports(root / "flashviz") == []


@pytest.mark.parametrize(
    ("file", "line", "caught"),
    [
        ("view/scene.py", "from flashviz.programs import flash_attention_2", True),
        ("view/scene.py", "from ..programs.flash_attention_2 import run", True),
        ("view/scene.py", "def f():\n    import flashviz.cuda.gpu", True),
        ("view/scene.py", "from flashviz import cuda", True),
        ("view/scene.py", "import ipywidgets", True),
        ("checks/traffic.py", "from flashviz.view.scene import scene", True),
        ("cuda/launch.py", "from flashviz.programs import flash_attention_2", True),
        ("cuda/launch.py", "import cupy as cp", True),
        ("slots.py", "from flashviz.programs import base", True),
        ("recording.py", "from .player import play", True),
        ("new_part.py", "import os", True),
        ("cuda/gpu.py", "import cupy", False),
        ("programs/base.py", "from flashviz.cuda import gpu", False),
        ("recording.py", "from .slots import Slot", False),
        ("view/scene.py", "from . import palette\nfrom flashviz.recording import Recording", False),
        ("view/scene.py", "if TYPE_CHECKING:\n    from flashviz.programs.base import Run", False),
        ("player.py", "import ipywidgets\nfrom flashviz.view import scene", False),
    ],
)
def test_a_planted_import_is_caught(tmp_path: Path, file: str, line: str, caught: bool) -> None:
    planted = tmp_path / file
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.write_text(line + "\n")
    assert bool(wrong_imports(tmp_path)) == caught


def test_files_are_short(root: Path) -> None:
    for file in sorted(root.glob("flashviz/**/*.py")):
        lines = len(file.read_text(encoding="utf-8").splitlines())
        if lines > LONGEST:
            warnings.warn(f"{file.relative_to(root)} has {lines} lines: is it one thing?", stacklevel=1)
