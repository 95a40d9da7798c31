"""Traces as files: what a launch's blocks did and when, small, with what it takes to know where they come from.

A file is an ``.npz`` archive (NumPy's, compressed) of whole numbers. Times are stored as differences, so that they take few bytes.

* ``about``: JSON, with ``algorithm``, ``sizes``, ``options``, ``seed``, ``gpu``, ``driver``, ``date``, the kernels' ``file`` and the digest of their ``code``;
* for launch number n, ``n.blocks`` [blocks, 6]: batch, head, tile, number in blockIdx order, multiprocessor, actions;
* ``n.spans`` [blocks, 2]: begin after the launch's begin, end after the last action's start;
* ``n.actions`` [actions]: which of the names; ``n.tiles`` [actions, 2] with -1 for none; ``n.starts`` [actions]: nanoseconds since the action
  before, or since the block's begin;
* where blocks have roles, ``n.roles`` [actions]: which of the roles' names; ``n.ends`` [actions]: nanoseconds since its own start.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from flashviz.cuda.sources import blank_comments, find
from flashviz.cuda.trace import Action, KernelTrace, TracedBlock
from flashviz.slots import Block

FORMAT = 1
NOTHING = -1


def code_of(file: str, kernels: Sequence[str]) -> str:
    """The digest of some kernels of a file as they are now, headers included: of the code, not of comments and line numbers."""
    lines = [line for name in kernels for line in blank_comments(find(file, name).assembled).splitlines()]
    code = [line.rstrip() for line in lines if line.strip() and not line.startswith("#line")]
    return hashlib.sha256("\n".join(code).encode()).hexdigest()


def write_traces(path: str | Path, traces: Sequence[KernelTrace], about: Mapping[str, Any]) -> int:
    """Write the traces of a run's launches, in order; the file's size in bytes. ``about`` is what JSON can hold."""
    arrays: dict[str, np.ndarray] = {}
    launches = []
    for number, trace in enumerate(traces):
        names = list(dict.fromkeys(action.name for block in trace.blocks for action in block.actions))
        actions = [(block, action) for block in trace.blocks for action in block.actions]
        starts = [
            action.start - before
            for block in trace.blocks
            for action, before in zip(
                block.actions, (block.begin, *(other.start for other in block.actions)), strict=False
            )
        ]
        arrays |= {
            f"{number}.blocks": np.array(
                [(*b.block, b.index, _multiprocessor(b), len(b.actions)) for b in trace.blocks], np.int32
            ),
            f"{number}.spans": np.array(
                [
                    (b.begin - trace.begin, b.end - (b.actions[-1].start if b.actions else b.begin))
                    for b in trace.blocks
                ],
                np.int64,
            ),
            f"{number}.actions": np.array([names.index(action.name) for _, action in actions], np.uint8),
            f"{number}.tiles": np.array([(*action.tiles, NOTHING)[:2] for _, action in actions], np.int32),
            f"{number}.starts": np.array(starts, np.int32),
        }
        roles = list(dict.fromkeys(action.role for _, action in actions))
        if roles not in ([], [""]):
            arrays[f"{number}.roles"] = np.array([roles.index(action.role) for _, action in actions], np.uint8)
            arrays[f"{number}.ends"] = np.array([action.end - action.start for _, action in actions], np.int32)
        launches.append(
            {
                "kernel": trace.kernel,
                "device": trace.device,
                "grid": trace.grid,
                "threads": trace.threads,
                "names": names,
                **({"roles": roles} if f"{number}.roles" in arrays else {}),
                "begin": trace.begin,
            }
        )
    text = json.dumps({"format": FORMAT, **about, "launches": launches}, sort_keys=True)
    packed = io.BytesIO()
    np.savez_compressed(packed, about=np.frombuffer(text.encode(), np.uint8), **arrays)  # type: ignore[arg-type]
    Path(path).write_bytes(packed.getvalue())
    return len(packed.getvalue())


def read_traces(path: str | Path) -> tuple[list[KernelTrace], dict[str, Any]]:
    """The traces of a file and what it says about itself.

    Raises
    ------
    ValueError
        It is not such a file, or of a later flashviz.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        about: dict[str, Any] = json.loads(arrays["about"].tobytes().decode())
    except (ValueError, KeyError, OSError, EOFError) as error:
        raise ValueError(f"{Path(path).name} is not a stored trace: {error}") from error
    if about.get("format") != FORMAT:
        raise ValueError(
            f"{Path(path).name} has format {about.get('format')}; this flashviz reads format {FORMAT}: install a newer one."
        )
    traces = []
    for number, launch in enumerate(about.pop("launches")):
        own = {name: arrays[f"{number}.{name}"].tolist() for name in ("blocks", "spans", "actions", "tiles", "starts")}
        if "roles" in launch:
            own |= {name: arrays[f"{number}.{name}"].tolist() for name in ("roles", "ends")}
        blocks, at = [], 0
        for (batch, head, tile, index, multiprocessor, count), (begin, last) in zip(
            own["blocks"], own["spans"], strict=True
        ):
            first = launch["begin"] + begin
            starts = np.cumsum([first, *own["starts"][at : at + count]])[1:].tolist()
            end = (starts[-1] if starts else first) + last
            actions = tuple(
                Action(launch["names"][action], tuple(t for t in tiles if t != NOTHING), multiprocessor, start, until)
                for action, tiles, start, until in zip(
                    own["actions"][at : at + count],
                    own["tiles"][at : at + count],
                    starts,
                    [*starts[1:], end],
                    strict=True,
                )
            )
            if "roles" in launch:
                kinds, ends = (own[name][at : at + count] for name in ("roles", "ends"))
                actions = tuple(
                    replace(action, role=launch["roles"][kind], end=action.start + long)
                    for action, kind, long in zip(actions, kinds, ends, strict=True)
                )
            blocks.append(TracedBlock(Block(batch, head, tile), index, first, end, actions))
            at += count
        grid, threads = (tuple(launch[name]) for name in ("grid", "threads"))
        most = max((len(block.actions) for block in blocks), default=0)
        traces.append(KernelTrace(launch["kernel"], launch["device"], grid, threads, tuple(blocks), most))
    return traces, about


def _multiprocessor(block: TracedBlock) -> int:
    """Where a block ran; one that moved is not stored."""
    found = {action.multiprocessor for action in block.actions}
    if len(found) > 1:
        raise ValueError(f"block {tuple(block.block)} ran on multiprocessors {sorted(found)}: record it again")
    return found.pop() if found else NOTHING
