"""Store the chapters' outputs, the same bytes every time, and check what is stored.

    python tools/notebooks.py [FILE ...]           # execute without a GPU, clean, store
    python tools/notebooks.py --check [FILE ...]   # exit 1 and say what is wrong with the stored files

A stored chapter opens with no kernel: it keeps text and pictures, and no widget view (its model id is random and means
nothing without the kernel). nbval compares the text of each output but not its pictures, so `--check` decodes those.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import io
import os
import re
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
CELL_SECONDS = 60
LARGEST = 1_000_000
WIDGET_TYPES = ("application/vnd.jupyter.widget-view+json", "application/vnd.jupyter.widget-state+json")
KEPT_METADATA = ("tags", "jupyter")
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
# Not the version: a chapter stored with another Python is the same chapter.
LANGUAGE = {"file_extension": ".py", "mimetype": "text/x-python", "name": "python", "pygments_lexer": "ipython3"}
MACHINE = {
    "an object's address": re.compile(r"\b0x[0-9a-fA-F]{6,}\b"),
    "a path of one machine": re.compile(
        r"(?:^|[\s'\"(=])(?:/(?:home|root|tmp|Users|work|opt|usr|var)/\S|[A-Z]:\\\S)", re.M
    ),
    "a random id": re.compile(r"\b[0-9a-f]{32}\b"),
    "a GPU's name": re.compile(r"\b(?:NVIDIA|GeForce|Tesla) (?:[A-Z]+ )?[A-Z]*\d"),
}


def chapters(folder: Path = ROOT / "notebooks") -> list[Path]:
    return sorted(path for path in folder.glob("*.ipynb") if not path.name.startswith("."))


# ---------------------------------------------------------------- storing


def execute(path: Path, seconds: int = CELL_SECONDS) -> NotebookNode:
    """Run every cell in a fresh kernel of this Python, with no GPU visible; raises what the failing cell raised."""
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    class ThisPython(AsyncKernelManager):  # type: ignore[misc]
        """Looks in no folder: a kernel called python3 that the user registered for another Python must not be taken."""

        def __init__(self, **options: Any) -> None:
            super().__init__(kernel_spec_manager=KernelSpecManager(kernel_dirs=[]), **options)

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        kernel_manager_class=ThisPython,
        kernel_name="python3",
        timeout=seconds,
        resources={"metadata": {"path": str(path.parent)}},
        store_widget_state=False,
        extra_arguments=["--log-level=ERROR"],
    )
    hidden = {"CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    client.execute(env={**os.environ, **hidden})
    return notebook


def clean(notebook: NotebookNode, stem: str) -> NotebookNode:
    """Drop what differs between two runs: widget views, timings, the Python's version, how output was chunked."""
    notebook.metadata = NotebookNode({"kernelspec": KERNEL, "language_info": LANGUAGE})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    used: set[str] = set()
    for index, cell in enumerate(notebook.cells):
        cell.metadata = NotebookNode({key: cell.metadata[key] for key in KEPT_METADATA if key in cell.metadata})
        if not cell.get("id") or cell.id in used:
            cell.id = _new_id(stem, index, used | {str(other.get("id")) for other in notebook.cells})
        used.add(cell.id)
        if cell.cell_type == "code":
            cell.outputs = list(_clean_outputs(cell.outputs))
    return notebook


def _new_id(stem: str, index: int, taken: set[str]) -> str:
    base = f"{re.sub(r'[^a-zA-Z0-9]+', '-', stem)[:40].strip('-')}-{index:02d}"
    return next(name for name in (base, *(f"{base}-{n}" for n in range(2, 1000))) if name not in taken)


def _clean_outputs(outputs: list[NotebookNode]) -> Iterator[NotebookNode]:
    previous: NotebookNode | None = None
    for output in outputs:
        if output.output_type == "stream":
            if previous is not None and previous.output_type == "stream" and previous.name == output.name:
                previous.text += output.text
                continue
        elif "data" in output:
            for kind in WIDGET_TYPES:
                output.data.pop(kind, None)
                output.metadata.pop(kind, None)
            if not output.data:
                continue
            if "image/png" in output.data:
                output.data["image/png"] = _without_comments(output.data["image/png"])
        previous = output
        yield output


def _without_comments(text: str) -> str:
    """The PNG without its text and time chunks: they name the version of matplotlib, not the picture."""
    data = base64.b64decode(text)
    kept, position = [data[:8]], 8
    while position + 8 <= len(data):
        (length,) = struct.unpack_from(">I", data, position)
        end = position + 12 + length
        if data[position + 4 : position + 8] not in (b"tEXt", b"iTXt", b"zTXt", b"tIME", b"eXIf"):
            kept.append(data[position:end])
        position = end
    return base64.b64encode(b"".join(kept)).decode() + "\n"


def text_of(notebook: NotebookNode) -> str:
    return nbformat.writes(notebook, version=nbformat.NO_CONVERT) + "\n"


# ---------------------------------------------------------------- checking


def problems(path: Path) -> list[str]:
    """What is wrong with a stored chapter; an empty list is good."""
    raw = path.read_text(encoding="utf-8")
    try:
        notebook = nbformat.reads(raw, as_version=nbformat.NO_CONVERT)
        nbformat.validate(notebook)
    except Exception as error:
        return [f"is not a notebook: {str(error).splitlines()[0]}"]
    found = []
    if path.stat().st_size > LARGEST:
        found.append(f"has {path.stat().st_size:,} bytes; {LARGEST:,} are allowed")
    if "widgets" in notebook.metadata:
        found.append("has metadata.widgets, which breaks the page on GitHub")
    if notebook.metadata.get("kernelspec", {}).get("name") != "python3":
        found.append("its kernelspec is not python3")
    expected = 0
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type != "code" or not cell.source.strip():
            continue
        expected += 1
        if cell.execution_count is None:
            found.append(f"cell {index} was never executed")
        elif cell.execution_count != expected:
            found.append(f"cell {index} has run as number {cell.execution_count}, from top to bottom it is {expected}")
        for output in cell.outputs:
            found += [f"cell {index} {problem}" for problem in _output_problems(output)]
    if not found and text_of(clean(nbformat.reads(raw, as_version=4), path.stem)) != raw:
        found.append("is not as `make notebooks` writes it")
    return found


def _output_problems(output: NotebookNode) -> Iterator[str]:
    if output.output_type == "error":
        yield f"stores an error: {output.ename}"
        return
    if output.output_type == "stream":
        if output.name == "stderr":
            yield f"stores text on stderr: {output.text.strip()[:60]!r}"
        texts = {"text/plain": output.text}
    else:
        texts = {kind: value for kind, value in output.data.items() if isinstance(value, str)}
    for kind, value in texts.items():
        if kind.startswith("image/"):
            yield from _picture_problems(kind, value)
        else:
            for what, pattern in MACHINE.items():
                match = pattern.search(value)
                if match:
                    yield f"stores {what} in {kind}: {match.group(0).strip()!r}"
    for kind in WIDGET_TYPES:
        if kind in output.get("data", {}):
            yield "stores a widget view, which shows nothing without the kernel"


def _picture_problems(kind: str, value: str) -> Iterator[str]:
    from PIL import Image

    try:
        if kind == "image/svg+xml":
            ElementTree.fromstring(value)
            return
        with Image.open(io.BytesIO(base64.b64decode(value, validate=False))) as picture:
            picture.load()
            width, height = picture.size
            colours = picture.convert("RGB").getcolors(1)
        if min(width, height) < 8 or colours is not None:
            yield f"stores an empty picture of {width} × {height}"
    except (OSError, SyntaxError, ValueError, binascii.Error, struct.error) as error:
        yield f"stores {kind} that is no picture: {error}"


# ---------------------------------------------------------------- command


def store(path: Path) -> str:
    """Execute one chapter and write it when it changed; what happened, in a word."""
    before = path.read_text(encoding="utf-8")
    after = text_of(clean(execute(path), path.stem))
    if after == before:
        return "unchanged"
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(after, encoding="utf-8")
    temporary.replace(path)
    return "stored"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Execute the chapters without a GPU and store their outputs.")
    parser.add_argument("files", nargs="*", type=Path, help="notebooks (all chapters)")
    parser.add_argument("--check", action="store_true", help="execute nothing: say what is wrong with the stored files")
    arguments = parser.parse_args(argv)
    files: list[Any] = arguments.files or chapters()
    failed = 0
    for path in files:
        if arguments.check:
            found = problems(path)
        else:
            start, found = time.perf_counter(), []
            try:
                outcome = store(path)
                print(f"{path.name}: {outcome} in {time.perf_counter() - start:.0f} s", flush=True)
            except Exception as error:  # the file stays as it was
                found = [f"{type(error).__name__}: {error}"]
            found = found or problems(path)
        failed += bool(found)
        for problem in found:
            print(f"{path.name}: {problem}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
