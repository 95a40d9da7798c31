"""Real runs that travel with flashviz: traces recorded on a GPU, replayed here, so that a reader without one sees them.

A stored trace holds what each block did and when, not the numbers: those are made again from the sizes and the seed that it
names, which is also how it was recorded (`benchmarks/gpu_trace.py`).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from flashviz.programs.base import Program
from flashviz.programs.replay import as_traced, replay
from flashviz.recording import Recording

FOLDER = Path(__file__).resolve().parent.parent / "traces"


def stored(name: str) -> Recording:
    """A recording of a real run on a GPU, from a trace that is stored with flashviz.

    Args:
        name: which one: an algorithm's name, with its splits for decoding ("flash_decoding_32").

    Returns:
        A recording like that of a run on ``"gpu"``: every event with its multiprocessor and its times. Its params say
        where it comes from: ``recording.params["stored"]`` names GPU, driver and date. Tiles carry no numbers.

    Raises:
        ValueError: no trace of that name; lists those there are.

    >>> stored("no such run")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: no stored trace 'no such run'; there are ...
    """
    path = FOLDER / f"{name}.npz"
    if not path.is_file():
        known = ", ".join(stored_names()) or "none in this version (benchmarks/gpu_trace.py records them on a GPU)"
        raise ValueError(f"no stored trace {name!r}; there are {known}")
    return load_trace(path)


def stored_names() -> tuple[str, ...]:
    """The names that :func:`stored` knows."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.npz")))


@lru_cache(maxsize=8)
def load_trace(path: Path) -> Recording:
    """The recording of a trace file. Raises ValueError for another file, ReplayError for a trace of another algorithm."""
    from flashviz.cuda.trace_files import read_traces

    traces, about = read_traces(path)
    program = example(about["algorithm"], about["sizes"], about["options"], about["seed"])
    replay(program, traces)
    recording: Recording = program.run().recording  # type: ignore[attr-defined]
    where = f"{about['gpu']}, driver {about['driver']}, {about['date']}"
    params = {**recording.params, "stored": where, "multiprocessors": about["multiprocessors"]}
    return replace(as_traced(recording, traces, "gpu"), params=params)


def example(
    algorithm: str, sizes: Mapping[str, int], options: Mapping[str, Any], seed: int, record: Any = True
) -> Program:
    """A program on random inputs: what a stored trace was recorded with, and is replayed with.

    Args:
        algorithm: name of a module of programs, ``"flash_attention_2"``.
        sizes: of the inputs: B, Hq, Hkv, Nq, Nk, d; for a softmax R, N and, in the fused form, D; for a rotation B, H, N, d.
        options: of the program: Br, Bc, splits, causal, form …
        seed: of NumPy's generator.
        record: as for the program; numbers are not kept.
    """
    module = importlib.import_module(f"flashviz.programs.{algorithm}")
    kinds = [v for v in vars(module).values() if isinstance(v, type) and issubclass(v, Program)]
    own = next((k for k in kinds if k.__module__ == module.__name__), None)
    kind: Any = own or module.program  # a ladder's module has a function instead, which takes the rung
    shapes: list[tuple[int, ...]]
    if "R" in sizes:
        shapes = [(sizes["R"], sizes["N"]), *([(sizes["N"], sizes["D"])] if sizes.get("D") else [])]
    elif "N" in sizes:
        shapes = [(sizes["B"], sizes["H"], sizes["N"], sizes["d"])]
    else:
        B, d = sizes["B"], sizes["d"]
        shapes = [(B, sizes["Hq"], sizes["Nq"], d), *[(B, sizes["Hkv"], sizes["Nk"], d)] * 2]
    rng = np.random.default_rng(seed)
    inputs = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
    program: Program = kind(*inputs, **options, record=record, keep_values=0)
    return program
