"""Record the runs that travel with flashviz, and what tracing costs, on this machine's GPU: `python benchmarks/gpu_trace.py --out FOLDER`.

Needs CuPy and NumPy, about a minute. For each case below it launches the chapter's kernels traced, replays the trace, holds the
replayed output against the kernel's and the recording against the tile program's, and writes `<case>.npz`: copied to flashviz/traces,
that is the file which `fv.stored("<case>")` reads. Then it times a kernel with tracing off and on, in turns, at N = 4096. The tables are
also written to gpu_trace.json and gpu_trace.md in the folder, and printed last.

Where there is no usable GPU it says so and ends.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # products of small tiles: threads only get in each other's way
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flashviz import cuda, ladder  # noqa: E402
from flashviz.checks.same import same  # noqa: E402
from flashviz.cuda import gpu  # noqa: E402
from flashviz.cuda.trace import CAPACITY, DEFINE, RECORDS, REGIONS, buffers  # noqa: E402
from flashviz.cuda.trace_files import code_of, read_traces, write_traces  # noqa: E402
from flashviz.programs import flash_attention_1 as fa1  # noqa: E402
from flashviz.programs import flash_attention_2 as fa2  # noqa: E402
from flashviz.programs import flash_attention_2_rope as fa2_rope  # noqa: E402
from flashviz.programs import flash_attention_2_rungs as rungs  # noqa: E402
from flashviz.programs import flash_attention_3 as fa3  # noqa: E402
from flashviz.programs import flash_decoding as decoding  # noqa: E402
from flashviz.programs import online_softmax as softmax  # noqa: E402
from flashviz.programs import rope  # noqa: E402
from flashviz.programs import standard_attention as standard  # noqa: E402
from flashviz.programs.flash_attention_2_registers import FlashAttention2Registers  # noqa: E402
from flashviz.programs.replay import as_traced, check_outputs, most_actions, replay  # noqa: E402
from flashviz.programs.stored import example  # noqa: E402

SEED = 0
TARGET = 0.01  # of the time: what tracing may cost at N = 4096
LARGEST = 200_000  # bytes of a file


@dataclass(frozen=True)
class Case:
    """One stored run: the module of its program, the sizes of its inputs, its options, its loops, and how its kernels are launched."""

    name: str
    algorithm: str
    sizes: Mapping[str, int]
    loops: Callable[[Any], None]
    launch: Callable[[Any], Any]
    options: Mapping[str, Any] = field(default_factory=dict)


def attention(H: int, Nq: int, Nk: int, d: int = 64, Hkv: int | None = None, B: int = 1) -> dict[str, int]:
    return {"B": B, "Hq": H, "Hkv": Hkv or H, "Nq": Nq, "Nk": Nk, "d": d}


# 8 heads of 1024 rows: FlashAttention-1 has a block for each of 8 heads, FlashAttention-2 one for each of 128 row blocks. Decoding has 4
# heads of K and V: 4 blocks with one split, 128 with 32.
SQUARE, LONG = attention(8, 1024, 1024), attention(8, 1, 8192, Hkv=4)
TILES = {"Br": 64, "Bc": 64}


def decode(splits: int) -> Case:
    options = {"splits": splits, "Bc": 64}
    name = f"flash_decoding_{splits}"
    return Case(name, "flash_decoding", LONG, decoding.forward, lambda p: decoding.launch_kernels(p), options)


def row_softmax(form: str, D: int = 0) -> Case:
    sizes, options = {"R": 64, "N": 4096, "D": D}, {"form": form, "tile": 128 if D else 256}
    return Case(
        f"{form}_softmax", "online_softmax", sizes, softmax.LOOPS[form], lambda p: softmax.launch_kernel(p), options
    )


def rung_of_the_ladder(n: int) -> Case:
    """As flash_attention_2, but 16-bit inputs: the same blocks on the same sizes."""
    options = {**TILES, "rung": n}
    return Case(
        ladder.rung(n).kernel, "flash_attention_2_rungs", SQUARE, rungs.loops, lambda p: rungs.launch_kernel(p), options
    )


CASES = (
    Case("flash_attention_1", "flash_attention_1", SQUARE, fa1.forward, lambda p: fa1.launch_kernel(p.a), TILES),
    Case("flash_attention_2", "flash_attention_2", SQUARE, fa2.forward, lambda p: fa2.launch_kernel(p.a), TILES),
    Case(
        "flash_attention_2_causal",
        "flash_attention_2",
        SQUARE,
        fa2.forward,
        lambda p: fa2.launch_kernel(p.a),
        {**TILES, "causal": True},
    ),
    Case(
        "flash_attention_2_rope",
        "flash_attention_2_rope",
        attention(8, 512, 512),
        fa2.forward,
        lambda p: fa2_rope.launch_kernel(p),
        {"Br": 32, "Bc": 64},
    ),
    *(rung_of_the_ladder(n) for n in (3, 4)),
    Case(  # 264 full row blocks, two for each multiprocessor of an H100 or H200: its blocks walk; skipped where the GPU is no Hopper
        "flash_attention_3",
        "flash_attention_3",
        attention(66, 768, 768),
        fa3.one_by_one,
        lambda p: fa3.launch_kernel(p),
        {"Br": 192, "Bc": 128, "stages": 3, "consumers": 3},
    ),
    Case(
        "standard_attention",
        "standard_attention",
        attention(8, 512, 512),
        standard.forward,
        lambda p: standard.launch_kernels(p.a),
        {"Br": 32, "Bc": 64},
    ),
    decode(1),
    decode(32),
    row_softmax("safe"),
    row_softmax("online"),
    row_softmax("fused", D=64),
    Case(
        "rope",
        "rope",
        {"B": 1, "H": 8, "N": 256, "d": 64},
        rope.forward,
        lambda p: rope.launch_kernel(p.rotation),
        {"tile": 16},
    ),
)


def record(case: Case, machine: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """Launch, replay, check and store one case; a row of the table."""
    if "stages" in case.options:  # as many blocks stay as there are multiprocessors
        case = replace(case, options={**case.options, "multiprocessors": machine["multiprocessors"]})
    program: Any = example(case.algorithm, case.sizes, case.options, SEED)
    rooms = most_actions(program, case.loops)
    case.launch(program)  # compiled, and the clocks are up
    for _ in range(3):
        with cuda.tracing(rooms) as launched:
            given = case.launch(program)
    traces: Sequence[Any] = launched
    outputs: Sequence[Any] = given if isinstance(given, tuple) else (given,)
    replay(program, traces)
    result = program.run()
    check_outputs(program, outputs, result)
    expected: Any = example(case.algorithm, case.sizes, case.options, SEED)
    (fa3.forward if case.loops is fa3.one_by_one else case.loops)(expected)
    differences = same(as_traced(result.recording, traces, "gpu"), expected.run())
    if differences:
        raise AssertionError(str(differences[0]))
    names = [name for name in ("O", "y", "o") if getattr(result, name, None) is not None]
    replayed = getattr(result, names[0]).reshape(outputs[0].shape)
    file = program.kernel if isinstance(program, FlashAttention2Registers) else case.algorithm
    about = {
        **machine,
        "algorithm": case.algorithm,
        "sizes": dict(case.sizes),
        "options": dict(case.options),
        "seed": SEED,
        "file": file,
        "code": code_of(file, [trace.kernel for trace in traces]),
        "error": float(np.abs(outputs[0] - replayed).max()),
        "bound": program.bound(),
    }
    size = write_traces(out / f"{case.name}.npz", traces, about)
    again, _ = read_traces(out / f"{case.name}.npz")
    assert [trace.blocks for trace in again] == [trace.blocks for trace in traces], (
        "the file does not give back the trace"
    )
    assert size < LARGEST, f"{size:,} bytes"
    actions = [action for trace in traces for block in trace.blocks for action in block.actions]
    steps = np.diff(np.unique([action.start for action in actions]))
    return {
        "case": case.name,
        "blocks": sum(len(trace.blocks) for trace in traces),
        "actions": len(actions),
        "multiprocessors": len({action.multiprocessor for action in actions}),
        "microseconds": (traces[-1].end - traces[0].begin) / 1000,
        "busy": busy(traces, machine["multiprocessors"]),
        "tick ns": int(steps.min(initial=10**9)),
        "error": about["error"],
        "bound": about["bound"],
        "bytes": size,
    }


def busy(traces: Sequence[Any], multiprocessors: int) -> float:
    """The part of all multiprocessors' time, from the first block's begin to the last one's end, in which one has a block."""
    total = 0
    spans: dict[int, list[tuple[int, int]]] = {}
    for trace in traces:
        for block in trace.blocks:
            spans.setdefault(block.actions[0].multiprocessor, []).append((block.begin, block.end))
    for mine in spans.values():
        until = 0
        for begin, end in sorted(mine):
            total += max(0, end - max(begin, until))
            until = max(until, end)
    return total / (multiprocessors * (traces[-1].end - traces[0].begin))


def cost(sizes: Mapping[str, int], Br: int, Bc: int, causal: bool, rounds: int, repeat: int) -> dict[str, Any]:
    """Milliseconds of FlashAttention-2's kernel with tracing off and on, in turns. The arrays stay on the GPU."""
    import cupy

    a = example("flash_attention_2", sizes, {"Br": Br, "Bc": Bc, "causal": causal}, SEED, record=False).a  # type: ignore[attr-defined]
    Q, K, V = map(cupy.asarray, (a.Q, a.K, a.V))
    O, L = cupy.empty(a.Q.shape, np.float32), cupy.empty(a.Q.shape[:3], np.float32)
    kernel = cuda.Kernel("flash_attention_2", {"Br": Br, "Bc": Bc, "D": a.d}, block=fa2.THREADS)
    planned = cuda.plan(kernel, (Q, K, V, O, L, a.Nq, a.Nk, a.scale, causal, a.Q.shape[1], a.K.shape[1]))
    room = 2 + 5 * a.Tc
    records, regions = buffers(planned, room)
    on_a_gpu = {RECORDS: records, REGIONS: regions, CAPACITY: np.uint64(room)}
    times: dict[bool, list[float]] = {False: [], True: []}
    results = {}
    for turn in range(rounds):
        for on in (False, True) if turn % 2 else (True, False):
            how: dict[str, Any] = {"defines": (DEFINE,), "device_globals": on_a_gpu} if on else {}
            launched = gpu.run(planned, repeat=repeat, **how)
            assert launched.times is not None
            times[on] += launched.times.milliseconds
            results[on] = cupy.asnumpy(O).copy()
    assert np.allclose(results[True], results[False], atol=1e-5), "tracing changes the output"
    assert 2 < int(regions["count"].min()) <= int(regions["count"].max()) <= room, "not every action was written"
    off, on_ = statistics.median(times[False]), statistics.median(times[True])
    return {
        "kernel": f"B={sizes['B']} H={sizes['Hq']} N={a.Nk} d={a.d} Br={Br} Bc={Bc}{' causal' if causal else ''}",
        "off ms": off,
        "on ms": on_,
        "cost": on_ / off - 1,
    }


FULL = attention(32, 4096, 4096, B=4)  # B N = 16384 rows, H d = 2048; the target is for these
COSTS: tuple[dict[str, Any], ...] = tuple(
    {"sizes": sizes, "Br": tile, "Bc": tile, "causal": causal}
    for sizes in (FULL, attention(8, 4096, 4096))
    for tile, causal in ((64, False), (32, False), (64, True))
)


def driver_version() -> str:
    """The driver's own version, or the CUDA version that it supports."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return f"for CUDA {cuda.status().driver}"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a Markdown table."""
    if not rows:
        return ""

    def cell(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)

    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([cell(row.get(name, "")) for name in names] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--cases", default="", help="only these, separated by commas")
    parser.add_argument("--rounds", type=int, default=6, help="turns of timing with tracing off and on, 0 for none")
    options = parser.parse_args(argv)
    found = cuda.status()
    if not found.usable:
        print(f"No traces are recorded: {found.reason} {found.fix}".strip())
        return 0
    started = time.perf_counter()
    machine = {
        "gpu": found.device,
        "arch": found.arch,
        "driver": driver_version(),
        "cuda": found.runtime,
        "nvrtc": found.nvrtc,
        "cupy": found.cupy,
        "multiprocessors": found.multiprocessors,
        "date": datetime.date.today().isoformat(),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    rows, costs, failures = [], [], []
    wanted = [name for name in options.cases.split(",") if name]
    for case in CASES:
        if wanted and case.name not in wanted:
            continue
        if case.algorithm == "flash_attention_3" and found.arch != "sm_90":
            print(f"{case.name}: runs on sm_90 alone, and this is {found.arch}", flush=True)
            continue
        try:
            rows.append(record(case, machine, options.out))
        except Exception as error:
            (options.out / f"{case.name}.npz").unlink(missing_ok=True)
            failures.append(f"{case.name}: {type(error).__name__}: {error}")
        print(f"[{time.perf_counter() - started:5.1f} s] {case.name}", flush=True)
    for what in COSTS if options.rounds else ():
        try:
            costs.append(cost(**what, rounds=options.rounds, repeat=3 if what["sizes"] is FULL else 10))
        except Exception as error:
            failures.append(f"cost of tracing, {what}: {type(error).__name__}: {error}")
        print(f"[{time.perf_counter() - started:5.1f} s] cost of tracing", flush=True)
    failures += [
        f"tracing costs {row['cost']:.2%} of {row['kernel']}, more than {TARGET:.0%}"
        for row in costs
        if row["cost"] > TARGET and f"H={FULL['Hq']} " in row["kernel"]
    ]
    text = "\n\n".join(
        [
            ", ".join(f"{name} {value}" for name, value in machine.items()),
            table(rows),
            table([{**row, "cost": f"{row['cost']:+.2%}"} for row in costs]),
            "\n".join(failures) or f"All checks passed in {time.perf_counter() - started:.0f} s.",
        ]
    )
    result = {"machine": machine, "cases": rows, "costs": costs, "failures": failures}
    (options.out / "gpu_trace.json").write_text(json.dumps(result, indent=1))
    (options.out / "gpu_trace.md").write_text(text + "\n")
    print("\n" + text)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
