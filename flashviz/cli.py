"""The command `flashviz`: `lab` opens the chapters, `doctor` says what this machine can run, `check` what is wrong with a kernel, `bench`
how fast the ladder's kernels are.

Each command imports what it needs when it runs, so that `flashviz doctor` works where half of the dependencies do not.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from flashviz import __version__

if TYPE_CHECKING:
    from flashviz.lab import Copied


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="flashviz", description="Step through attention kernels in Jupyter notebooks."
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    lab = commands.add_parser(
        "lab",
        help="open the chapters in JupyterLab",
        description="Open the chapters in JupyterLab. From an installed package they are copied to a folder first; "
        "a file that you changed is kept, and a newer version of it is put beside it.",
    )
    lab.add_argument("--dir", type=Path, help="folder of your copy of the chapters (./flashviz-chapters)")
    lab.add_argument("--no-browser", action="store_true", help="start the server and print its address only")
    lab.set_defaults(run=run_lab)

    doctor = commands.add_parser("doctor", help="say what this machine can run, what is missing and how to add it")
    doctor.add_argument("--json", action="store_true", help="print the report as JSON")
    doctor.set_defaults(run=run_doctor)

    check = commands.add_parser(
        "check",
        help="run a CUDA kernel file on the processor and report races, reads of unwritten memory, accesses out of bounds …",
        description="Run the kernels of a .cu file on the processor, with every memory access looked at, in three orders of "
        "threads. Exits 0 when there is nothing to report, 1 when there is, 2 when the check cannot run. The file is compiled and "
        "run on this machine: check only what you would run.",
    )
    check.add_argument("file", help="a .cu file, or the name of a kernel that comes with flashviz")
    check.add_argument("--function", help="one kernel of the file; all of them when not given")
    check.add_argument("--all", action="store_true", help="every instantiation; else the two smallest of each kernel")
    check.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="SIZES",
        help='in place of the file\'s own: "B=1 Nq=33 Nk=33 …"; repeatable',
    )
    check.add_argument("--seconds", type=int, default=10, help="time limit of one run (10)")
    check.add_argument("--limit", type=float, default=300, help="time limit of the whole check, in seconds (300)")
    check.set_defaults(run=run_check)

    bench = commands.add_parser(
        "bench",
        help="time the ladder's kernels on this machine's GPU, beside PyTorch where it is installed",
        description="Time every rung of chapter 6's ladder that this machine's GPU runs, beside PyTorch's attention where it is "
        "installed, and hold every result against float64. Without a GPU it shows the figures that are stored with flashviz, and "
        "where they were measured.",
    )
    bench.add_argument("--quick", action="store_true", help="a few problems only, under a minute")
    bench.add_argument(
        "-o",
        dest="output",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="write the chart (.png, .svg, .pdf) or the figures (.json); repeatable",
    )
    bench.set_defaults(run=run_bench)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.version:
        print(f"flashviz {__version__}")
        return 0
    if arguments.command is None:
        parser.print_help()
        return 0
    return int(arguments.run(arguments))


def run_lab(arguments: argparse.Namespace) -> int:
    """`flashviz lab`."""
    from flashviz import lab

    source = lab.chapters_folder()
    if source is None:
        return _fail(
            "the chapters are not in this installation; reinstall it: python -m pip install --force-reinstall flashviz"
        )
    folder = source
    if arguments.dir is not None or lab.is_installed(source):
        folder = arguments.dir or Path("flashviz-chapters")
        try:
            copied = lab.copy_chapters(source, folder)
        except OSError as error:
            return _fail(f"the chapters could not be copied to {folder}: {error}")
        for line in _report_copies(copied, folder):
            print(line, flush=True)
    if importlib.util.find_spec("jupyterlab") is None:
        from flashviz.doctor import doctor

        return _fail(f"JupyterLab is not installed; add it: {doctor()['jupyterlab'].fix}")
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={folder.resolve()}"]
    if arguments.no_browser:
        command.append("--no-browser")
    if (folder / "00_start_here.ipynb").is_file():
        command.append("--LabApp.default_url=/lab/tree/00_start_here.ipynb")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")
    try:
        return subprocess.call(command)
    except KeyboardInterrupt:
        return 0


def run_doctor(arguments: argparse.Namespace) -> int:
    """`flashviz doctor`: a report is never a failure, so it always exits 0."""
    from flashviz.doctor import doctor

    report = doctor()
    print(report.to_json() if arguments.json else report)
    return 0


def run_check(arguments: argparse.Namespace) -> int:
    """`flashviz check`: 0 when there is nothing to report, 1 when there is, 2 when the check cannot run."""
    from flashviz.checks.kernels import check

    try:
        shapes = [{n: int(v) for n, v in (size.split("=") for size in text.split())} for text in arguments.shape]
    except ValueError:
        print(f"flashviz: --shape {arguments.shape}: expected NAME=NUMBER, separated by blanks", file=sys.stderr)
        return 2
    report = check(
        arguments.file,
        arguments.function,
        shapes,
        everything=arguments.all,
        seconds=arguments.seconds,
        limit=arguments.limit,
    )
    print(report)
    return 1 if report.findings else 2 if report.problem else 0


def run_bench(arguments: argparse.Namespace) -> int:
    """`flashviz bench`: 0 when every contender that ran was right, 1 when one was wrong, 2 when there is nothing to show."""
    from flashviz.benchmark import FILES, bench
    from flashviz.programs.device import DeviceError

    for path in arguments.output:
        if path.suffix not in FILES:
            print(f"flashviz: -o {path}: a name ends in one of {', '.join(FILES)}", file=sys.stderr)
            return 2
    try:
        found = bench(arguments.quick)
    except DeviceError as error:
        print(f"flashviz: {error}", file=sys.stderr)
        return 2
    print(found)
    for path in arguments.output:
        found.save(path)
        print(f"written: {path}")
    return 1 if found.wrong else 0


def _report_copies(copied: list[Copied], folder: Path) -> list[str]:
    lines = []
    written = sum(one.outcome in ("new", "updated") for one in copied)
    if written:
        lines.append(f"{written} files copied to {folder}")
    kept = [one.name for one in copied if one.outcome == "kept"]
    if kept:
        lines.append(f"kept your changes in {', '.join(kept)}")
    for one in copied:
        if one.outcome == "beside" and one.written is not None:
            lines.append(
                f"kept your {one.name}; the new version is beside it: {one.written.relative_to(folder).as_posix()}"
            )
    return lines


def _fail(message: str) -> int:
    print(f"flashviz: {message}", file=sys.stderr)
    return 1
