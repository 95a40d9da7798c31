"""Check and time the 16-bit rungs of the ladder on this machine's GPU: `python benchmarks/gpu_ladder.py --out FOLDER`.

`flash_attention_2_mma.cu`, `flash_attention_2_async.cu` and `flash_attention_2_tuned.cu`, with the parts of `benchmarks/gpu.py`:

1. checks      O and L against float64 over many shapes, both types and all instantiations, poisoned with NaN, NaN around K and V
2. times       the three rungs, PyTorch's flash and cuDNN backends at sixteen sizes, in turns, with rests between; then in bfloat16
3. profile     what the units did, by ncu's counters, bank conflicts among them
4. sanitizer   compute-sanitizer's four tools on each rung, and on copies with every barrier and wait deleted in turn and other faults

`benchmarks/gpu_layouts.py` times rung 4's three layouts (question 13).
"""

from __future__ import annotations

import concurrent.futures
import itertools
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu
import ncu
import numpy as np
from ladder_checks import RUNGS, compare, part_checks, run, stored

from flashviz import cuda
from flashviz.ladder import PREFILL

TOKENS, WIDTH = 16384, 2048
SIZES = tuple(itertools.product((64, 128), (1024, 4096, 8192, 16384), (False, True)))  # d, N, causal
PROFILED = tuple(itertools.product(RUNGS, (64, 128)))
SMALL: dict[str, dict[str, int | str]] = {  # what compute-sanitizer sees: two warps, several tiles in the small shapes
    "flash_attention_2_mma": {"T": "half", "Br": 32, "Bc": 16, "D": 32},
    "flash_attention_2_async": {"T": "half", "Br": 32, "Bc": 16, "D": 32, "Layout": 2},
    "flash_attention_2_tuned": {"T": "half", "Br": 64, "Bc": 16, "D": 64, "Warps": 2, "Stages": 2, "Aligned": 0},
}
ENDS = ("__syncthreads();", "__syncwarp();", "cp_async_wait<0>();", "cp_async_wait<Stages - 2>();")
"""Each is deleted in turn, wherever it stands."""
UNSEEN = {  # of these no race can come in the small shapes: nobody reads what was copied; and they are for a negative scale
    "flash_attention_2_async": ("cp_async_wait<0>(); 2",),
    "flash_attention_2_tuned": ("cp_async_wait<0>(); 1", "__syncthreads(); 1"),
}
FAULTS = {  # of each file, title: tool, what is replaced, by what
    "flash_attention_2_mma": {
        "K and V read past their end": ("memcheck", "first + r < end", "first + r <= end"),
        "O written past its end": ("memcheck", "if (q >= Nq) continue;", "if (q > Nq) continue;"),
    },
    "flash_attention_2_async": {
        "K and V read past their end": ("memcheck", "first + r < end", "first + r <= end"),
        "O written past its end": ("memcheck", "if (q >= Nq) continue;", "if (q > Nq) continue;"),
    },
    "flash_attention_2_tuned": {
        "K and V read past their end": ("memcheck", "X + n * D, r + n < rows", "X + n * D, r + n <= rows"),
        "O written past its end": ("memcheck", "if (Aligned || i * Br + r < Nq)\n", "if (true)\n"),
    },
}


def measured(file: str, D: int, N: int = 0, T: str = "half") -> dict[str, Any]:
    """The template values that are timed; Aligned where N is a multiple of both tiles."""
    rung = next(rung for rung in PREFILL if rung.kernel.split("/")[-1] == cuda.find(file).header.kernel)
    values = rung.measured[D]
    return {"T": T, **values, "D": D, "Aligned": int(N % values["Br"] == N % values["Bc"] == 0)}


def contenders(torch: Any, d: int, N: int, causal: bool, files: Any, T: str) -> dict[str, Any]:
    """What is timed, by name, as functions that launch three times and return milliseconds."""
    import cupy

    def made() -> Any:
        x = cupy.random.standard_normal((TOKENS // N, WIDTH // d, N, d), dtype=np.float32)
        return x.astype(np.float16) if T == "half" else (x.view(np.uint32) >> 16).astype(np.uint16)

    Q, K, V = (made() for _ in range(3))
    B, H = Q.shape[:2]
    outputs = cupy.empty_like(Q), cupy.empty((B, H, N), np.float32)

    def ours(file: str, values: Any) -> Any:
        return lambda: run(file, values, Q, K, V, causal, d**-0.5, outputs, repeat=3).times.milliseconds

    found = {name: ours(file, values) for name, (file, values) in files(d, N, T).items()}
    if torch is None:
        return found
    from torch.nn.attention import SDPBackend, sdpa_kernel

    half = T == "half"
    q, k, v = (
        torch.from_dlpack(x) if half else torch.from_dlpack(x.view(np.int16)).view(torch.bfloat16) for x in (Q, K, V)
    )

    def theirs(backend: Any) -> Any:
        def attend() -> list[float]:
            with sdpa_kernel(backend):
                work = torch.nn.functional.scaled_dot_product_attention
                return gpu.torch_times(torch, lambda: work(q, k, v, is_causal=causal), 3)[0]

        return attend

    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    return {**found, **{f"PyTorch {name}": theirs(backend) for name, backend in backends.items()}}


def in_turns(say: Any, T: str, files: Any, torch: Any, rounds: int = 3, rest: float = 0.05) -> list[dict[str, Any]]:
    """Medians of all contenders at all sizes, who take turns with rests between."""
    import cupy

    rows: list[dict[str, Any]] = []
    for d, N, causal in SIZES:
        named = contenders(torch, d, N, causal, files, T)
        times: dict[str, list[float]] = {name: [] for name in named}
        for _, (name, launch) in itertools.product(range(rounds), named.items()):
            times[name] += list(launch())
            time.sleep(rest)
        work = 4 * TOKENS // N * WIDTH * (N * (N + 1) / 2 if causal else N * N)
        for name, found in times.items():
            median = float(np.median(found))
            row = {"T": T, "d": d, "N": N, "causal": causal, "what": name, "ms": median, "TFLOP/s": work / median / 1e9}
            rows.append({**row, "ms min, max": (min(found), max(found)), "runs": len(found)})
        say(
            f"{T} d={d} N={N} causal={causal}: "
            + ", ".join(f"{r['what']} {r['TFLOP/s']:.0f}" for r in rows[-len(times) :])
        )
        if torch is not None:
            torch.cuda.empty_cache()
        cupy.get_default_memory_pool().free_all_blocks()
    return rows


def part_times(say: Any) -> dict[str, Any]:
    try:
        import torch
    except ImportError:
        torch = None

    def files(d: int, N: int, T: str) -> dict[str, tuple[str, Any]]:
        return {file: (file, measured(file, d, N, T)) for file in RUNGS}

    rows = [row for T in ("half", "bfloat16") for row in in_turns(say, T, files, torch)]
    return {"rows": rows, "copy TB/s": gpu.copy_bandwidth(say)}


def profiled() -> list[tuple[str, str, dict[str, Any]]]:
    """Title, file and template values of each launch that ncu sees."""
    found = [(f"{file}, d = {d}", file, measured(file, d, 4096)) for file, d in PROFILED]
    plain = [(RUNGS[1], d, layout) for d in (64, 128) for layout in (0, 1)]
    return found + [(f"{f}, d = {d}, Layout {n}", f, {**measured(f, d, 4096), "Layout": n}) for f, d, n in plain]


def part_profile(say: Any) -> dict[str, Any]:
    """ncu's counters of one launch of each at N = 4096."""
    launches = ncu.profile([sys.executable, __file__, "--sanitize-run", "profile"], "^flash_attention_2")
    found = {title: row for (title, _, _), row in zip(profiled(), launches, strict=True)}
    for title, row in found.items():
        say(f"{title}: {row}")
    return found


def small_run(file: str) -> None:
    """Small shapes of one rung, or of an edited copy, for compute-sanitizer; "profile" is one large launch of each, for ncu."""
    import cupy

    if file == "profile":
        for _, name, values in profiled():
            H, d = WIDTH // values["D"], values["D"]
            Q, K, V = (cupy.random.standard_normal((4, H, 4096, d), dtype=np.float32).astype("e") for _ in range(3))
            run(name, values, Q, K, V, False, d**-0.5, (cupy.empty_like(Q), cupy.empty((4, H, 4096), np.float32)))
        return
    cupy.cuda.set_allocator(None)  # so that each array ends where its memory does
    rng = np.random.default_rng(1)
    right = True
    values = SMALL[cuda.find(file).header.kernel]
    for B, Hq, Hkv, Nq, Nk, causal in gpu.SMALL:
        arrays = [stored(x, "half") for x in gpu.random(rng, B, Hq, Hkv, Nq, Nk, int(values["D"]))]
        Q, K, V = (cupy.asarray(x) for x in arrays)
        outputs = cupy.empty_like(Q), cupy.empty(Q.shape[:3], np.float32)
        run(file, values, Q, K, V, causal, 0.125, outputs)
        try:
            compare(*(cupy.asnumpy(x) for x in outputs), *arrays, 0.125, causal, "half")
        except AssertionError as error:
            print(error)
            right = False
    print("SMALL SHAPES RIGHT" if right else "SMALL SHAPES WRONG")


def faults(folder: Path, file: str) -> Iterator[tuple[str, str, Path]]:
    """Title, tool and path of each faulty copy of a rung: what it waits for deleted in turn, and reads and writes past an end."""
    for what in ENDS:
        count = cuda.find(file).text.count(what)
        for n in range(count):
            if f"{what} {n + 1}" not in UNSEEN.get(file, ()):
                name = f"{file}_{ENDS.index(what)}_{n}"
                yield (
                    f"{what[:-1]} {n + 1} of {count} deleted",
                    "racecheck",
                    gpu.planted(folder, name, what, ";", n, file),
                )
    half = ("synccheck", "TRACE(store_o, i);", "if (threadIdx.x % 2) __syncthreads();")
    for n, (title, (tool, old, new)) in enumerate({**FAULTS[file], "a barrier for some threads": half}.items()):
        yield title, tool, gpu.planted(folder, f"{file}{n}", old, new, 0, file)


def part_sanitizer(say: Any) -> dict[str, Any]:
    """The four tools on each rung, which must be clean, and on copies with faults: what they find, and whether the result was right."""
    if not shutil.which("compute-sanitizer"):
        raise RuntimeError("compute-sanitizer is not on the PATH")
    results: dict[str, Any] = {"clean": {}, "planted": {}}
    with tempfile.TemporaryDirectory() as name, concurrent.futures.ThreadPoolExecutor(12) as pool:
        jobs: dict[tuple[str, str], tuple[str, str]] = {}
        for file in RUNGS:
            for tool in ("memcheck", "racecheck", "initcheck", "synccheck"):
                jobs["clean", f"{file}: {tool}"] = (tool, file)
            for title, tool, path in faults(Path(name), file):
                jobs["planted", f"{file}: {title}"] = (tool, str(path))
        futures = {key: pool.submit(gpu.sanitize, *job, limit=90, script=__file__) for key, job in jobs.items()}
        for (kind, title), future in futures.items():
            results[kind][title] = future.result()
            say(f"{kind} · {title}: {future.result()}")
    results["all clean"] = all(r["found"] == 0 and r["right"] for r in results["clean"].values())
    results["all planted found"] = all(r["found"] or not r["right"] for r in results["planted"].values())
    return results


def times_table(times: dict[str, Any]) -> list[str]:
    """TFLOP/s, a row for each contender, a column for each size; then rung 5 over both backends of PyTorch; for each type."""
    kinds = dict.fromkeys(row["T"] for row in times["rows"])
    tables = [line for T in kinds for line in ["", f"{T}:", *table([row for row in times["rows"] if row["T"] == T])]]
    return ["", f"Device copy {times['copy TB/s']:.2f} TB/s.", *tables]


def table(rows: list[dict[str, Any]]) -> list[str]:
    by = {(r["what"], r["d"], r["N"], r["causal"]): r["TFLOP/s"] for r in rows}
    titles = [f"{d}, {N}{', causal' if causal else ''}" for d, N, causal in SIZES]
    lines = ["", f"| TFLOP/s at d, N | {' | '.join(titles)} |"]
    lines.append("| --- |" + " --- |" * len(titles))
    names = list(dict.fromkeys(r["what"] for r in rows))
    lines += [f"| {name} | " + " | ".join(f"{by[(name, *size)]:.0f}" for size in SIZES) + " |" for name in names]
    for peer in (name for name in names if name.startswith("PyTorch")):
        ratios = (by[(RUNGS[-1], *size)] / by[(peer, *size)] for size in SIZES)
        lines.append(f"| rung 5 ÷ {peer} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
    return lines


if __name__ == "__main__":
    parts = {"checks": part_checks, "times": part_times, "profile": part_profile, "sanitizer": part_sanitizer}
    sys.exit(gpu.main(parts, name="gpu_ladder", text=__doc__, small=small_run, times=times_table))
