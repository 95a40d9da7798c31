"""Where the chapters are, and a reader's own copy of them.

In a clone the chapters are opened in place. From an installed wheel they are copied to a folder first, and a file
that the reader changed is never touched: what counts as changed is any byte, since merely running a chapter is a
reader's work too.

Needs only the standard library.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PACKAGE = Path(__file__).resolve().parent
MANIFEST = ".flashviz.json"
SUFFIXES = (".ipynb", ".json", ".md", ".png", ".svg")

Outcome = Literal["new", "same", "updated", "kept", "beside"]


@dataclass(frozen=True)
class Copied:
    """What became of one file.

    `outcome` is "new" (was not there), "same" (nothing to do), "updated" (the reader had not changed it), "kept" (the
    reader changed it, the chapter itself did not change) or "beside" (both changed: the reader's stays, ours is at
    `written`).
    """

    name: str
    outcome: Outcome
    written: Path | None = None


def chapters_folder(package: Path = PACKAGE) -> Path | None:
    """The folder that holds the chapters: inside an installed package, else beside it in a clone, else None."""
    for folder in (package / "_notebooks", package.parent / "notebooks"):
        if any(folder.glob("*.ipynb")):
            return folder
    return None


def is_installed(folder: Path, package: Path = PACKAGE) -> bool:
    """Whether `folder` is the wheel's own, which is not a place to work in."""
    return folder == package / "_notebooks"


def copy_chapters(source: Path, target: Path) -> list[Copied]:
    """Copy the chapters to `target`, keeping every file there that is not exactly as an earlier copy left it.

    The manifest in `target` holds the hash of each file as it was last delivered. A file that is there but not in the
    manifest is the reader's. Where the reader's file stays and our version is new to them, ours is written beside it as
    NAME.new.SUFFIX; a NAME.new.SUFFIX that is there already is the reader's as well, and the next free number is taken.

    Raises:
        NotADirectoryError: `target` is a file.
        OSError: `target` cannot be written.
    """
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"{target} is a file, not a folder; give another one with --dir")
    target.mkdir(parents=True, exist_ok=True)
    delivered = _read_manifest(target / MANIFEST)
    results = []
    for file in sorted(source.rglob("*")):
        name = file.relative_to(source).as_posix()
        if not file.is_file() or file.suffix not in SUFFIXES or any(part.startswith(".") for part in Path(name).parts):
            continue
        results.append(_copy_one(file.read_bytes(), name, target, delivered))
        # Written after each file: a copy that is interrupted must not make a delivered file look like the reader's.
        _write(target / MANIFEST, (json.dumps({"files": delivered}, indent=1, sort_keys=True) + "\n").encode())
    return results


def _copy_one(new: bytes, name: str, target: Path, delivered: dict[str, str]) -> Copied:
    path = target / name
    before = delivered.get(name)
    if not os.path.lexists(path):
        _write(path, new)
        delivered[name] = _digest(new)
        return Copied(name, "new", path)
    current = _digest(path.read_bytes()) if path.is_file() else None
    if current == _digest(new):
        delivered[name] = current
        return Copied(name, "same")
    if current is not None and current == before and not path.is_symlink():
        _write(path, new)
        delivered[name] = _digest(new)
        return Copied(name, "updated", path)
    if before == _digest(new):
        return Copied(name, "kept")
    beside = _beside(path, new)
    _write(beside, new)
    # From now on the reader knows this version; `current` still differs from it, so their file stays theirs.
    delivered[name] = _digest(new)
    return Copied(name, "beside", beside)


def _beside(path: Path, new: bytes) -> Path:
    number = 1
    while True:
        candidate = path.with_suffix(f".new{'' if number == 1 else number}{path.suffix}")
        if not os.path.lexists(candidate) or (candidate.is_file() and candidate.read_bytes() == new):
            return candidate
        number += 1


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read_manifest(file: Path) -> dict[str, str]:
    # A manifest that is damaged means that nothing is known to be ours, so nothing is overwritten.
    try:
        files = json.loads(file.read_text(encoding="utf-8"))["files"]
        return {str(name): str(digest) for name, digest in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _write(path: Path, data: bytes) -> None:
    """Write the whole file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".flashviz-")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
