"""Create the virtual environment and install flashviz into it, once for each state of pyproject.toml.

    python3 tools/environment.py lab            # what a reader needs
    python3 tools/environment.py dev            # what the tests and the linters need

Needs only the standard library. The environment remembers what it was made from: when neither pyproject.toml nor
the Python changed and the extras asked for are there, nothing is done.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What an extra brings along, so that `make lab` after `make test` has nothing to do.
CONTAINS = {"test": {"lab"}, "dev": {"test", "lab"}}


def python_of(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def fingerprint(root: Path) -> str:
    return hashlib.sha256((root / "pyproject.toml").read_bytes() + sys.version.encode()).hexdigest()


def read_state(file: Path) -> dict[str, object]:
    try:
        state = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def ensure(folder: Path, extras: set[str], root: Path = ROOT) -> bool:
    """Bring the environment up to date; True when something had to be installed."""
    file = folder / "flashviz-environment.json"
    state = read_state(file)
    have = state.get("extras", [])
    installed = {str(extra) for extra in have} if isinstance(have, list) else set()
    fresh = state.get("fingerprint") == fingerprint(root) and python_of(folder).exists()
    reach = installed | {inner for extra in installed for inner in CONTAINS.get(extra, set())}
    if fresh and extras <= reach:
        return False
    if not python_of(folder).exists():
        print(f"creating {folder.name}", flush=True)
        venv.create(folder, with_pip=True)
    # A failed install leaves no fingerprint, so the next run tries again.
    file.unlink(missing_ok=True)
    wanted = sorted(installed | extras)
    print(f"installing flashviz[{','.join(wanted)}] into {folder.name}", flush=True)
    command = [str(python_of(folder)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, "--editable", f"{root}[{','.join(wanted)}]"], check=True, stdin=subprocess.DEVNULL)
    file.write_text(json.dumps({"fingerprint": fingerprint(root), "extras": wanted}) + "\n")
    return True


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Create the virtual environment and install flashviz into it.")
    parser.add_argument("extras", nargs="*", help="extras of pyproject.toml, such as lab, gpu or dev")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the environment (.venv)")
    arguments = parser.parse_args(argv)
    if sys.version_info < (3, 10):  # noqa: UP036  (this file is what tells an older Python)
        print(f"flashviz needs Python 3.10 or newer; this is {sys.version.split()[0]}. Try: make PYTHON=python3.12 lab")
        return 1
    try:
        ensure(arguments.venv.resolve(), set(arguments.extras))
    except subprocess.CalledProcessError as error:
        if "ensurepip" in str(error.cmd):
            print(
                "this Python cannot create an environment with pip; on Debian and Ubuntu: apt-get install python3-venv"
            )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
