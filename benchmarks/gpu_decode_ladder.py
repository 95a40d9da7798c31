"""Check and time the decoding rungs on this machine's GPU: `python benchmarks/gpu_decode_ladder.py --out FOLDER`.

The rungs are those of `flashviz/ladder.py`: `kernels/flash_decoding_vectors.cu` and `kernels/flash_decoding_heads.cu`, with
`kernels/flash_decoding.cu` below them. Parts, each reported even when another fails:

1. checks      O, L and the partial Os, Ls against float64, float16 and bfloat16, from NaN between guard values
2. times       TB/s of K and V beside PyTorch's cuDNN backend and a device copy, and what the loads in flight give
3. sanitizer   compute-sanitizer's four tools on both files, and on copies with planted faults
4. counters    what Nsight Compute (ncu) reads of one launch of each rung, where it runs

The checks are in `benchmarks/decode_checks.py`, which runs them on the processor.
"""

from __future__ import annotations

import concurrent.futures
import csv
import sys
from typing import Any

import gpu
import numpy as np
from decode_checks import HEADS, SMALL, TINY, UNIT, VECTORS, Decode, part_checks, values

from flashviz import cuda
from flashviz.cuda import gpu as device
from flashviz.ladder import DECODE

FAULTS = {  # title: tool, what is replaced, by what
    VECTORS: {
        "K read past its end": ("memcheck", "load_once(K + (long long)min(key + n * Groups, kv_len - 1) * D)",
                                "load_once(K + (long long)(key + n * Groups) * D)"),
        "O written past its end": ("memcheck", "*reinterpret_cast<unsigned*>(O + x)", "*reinterpret_cast<unsigned*>(O + x + D)"),
        "Ls not written": ("initcheck", "if (x == 0) Ls[s * queries] = logsumexp;", ""),
        "a barrier for some threads only": ("synccheck", "TRACE(store_partial, s);", "if (threadIdx.x % 2) __syncthreads();"),
    },
    HEADS: {
        "V read past its end": ("memcheck", "(long long)min(key + t * 2 + i % 2 + i / 2 * 8, kv_len - 1)",
                                "(long long)(key + t * 2 + i % 2 + i / 2 * 8)"),
        "O written past its end": ("memcheck", "if (e < rows * D) store(", "store("),
        "Os not written": ("initcheck", "*reinterpret_cast<float4*>(Os + s * queries * D + e) =", "(void)"),
        "a barrier for some threads only": ("synccheck", "TRACE(store_partial, s);", "if (threadIdx.x % 2) __syncthreads();"),
    },
}  # fmt: skip


def sanitize_run(file: str) -> None:
    """The small shapes, at tiny template values; without CuPy's memory pool, so that each array ends where its memory does."""
    import cupy

    cupy.cuda.set_allocator(None)
    rng = np.random.default_rng(1)
    kernel = cuda.find(file).name
    right = True
    for sizes in SMALL:
        work = Decode(cupy, "gpu", rng, kernel, TINY[kernel], sizes)
        numbers = (work.Nq, work.Nk, work.scale, work.causal, work.Hq, work.Hkv, work.splits)
        O, L = cupy.empty(work.q.shape, np.float16), cupy.empty(work.q.shape[:3], np.float32)
        Os, Ls = (cupy.empty((work.splits, *shape), np.float32) for shape in (work.q.shape, work.q.shape[:3]))
        cuda.launch(cuda.Kernel(file, TINY[kernel]), (work.Q, work.K, work.V, O, L, Os, Ls, *numbers))
        try:
            work.compare(values(O, "half"), values(L, ""), slice(0, work.Nk), UNIT["half"])
        except AssertionError as error:
            print(error)
            right = False
    print("SMALL SHAPES RIGHT" if right else "SMALL SHAPES WRONG")


def part_sanitizer(say: Any) -> dict[str, Any]:
    """Both files at the same time; the results of the second carry its name."""
    results: dict[str, Any] = {"clean": {}, "planted": {}, "all clean": True, "all planted found": True}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        runs = {file: pool.submit(gpu.part_sanitizer, say, file, FAULTS[file], __file__) for file in FAULTS}
    for file, run in runs.items():
        for kind in ("clean", "planted"):
            results[kind] |= {f"{file}: {title}": found for title, found in run.result()[kind].items()}
        for whole in ("all clean", "all planted found"):
            results[whole] &= run.result()[whole]
    return results


HOLD = 'extern "C" __global__ void hold(long long cycles) { const long long start = clock64(); while (clock64() - start < cycles); }'
SIZES = ((1, 4096), (1, 16384), (1, 65536), (1, 131072), (16, 8192), (16, 32768))  # B, N; the K, V heads are 2048 / d


class Queue:
    """Milliseconds of a call when the queue is never empty: a kernel holds the GPU until all calls are in it."""

    def __init__(self, cupy: Any) -> None:
        self.cupy, self.hold = cupy, cupy.RawKernel(HOLD, "hold")

    def once(self, work: Any, calls: int) -> float:
        """Of that many calls, the time of one."""
        start, end = self.cupy.cuda.Event(), self.cupy.cuda.Event()
        self.hold((1,), (1,), (np.int64(2_000_000),))
        start.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        return float(self.cupy.cuda.get_elapsed_time(start, end)) / calls

    def medians(self, contenders: dict[str, Any], calls: int, repeat: int = 7) -> dict[str, float]:
        """Of each contender, taken in turns."""
        for work in contenders.values():
            for _ in range(3):
                work()
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(repeat):
            for name, work in contenders.items():
                times[name].append(self.once(work, calls))
        return {name: float(np.median(found)) for name, found in times.items()}


def in_turns(works: list[Any]) -> Any:
    """Calls one after the other, and again: so that K and V come from HBM, not from L2."""
    at = [0]

    def work() -> None:
        at[0] += 1
        works[at[0] % len(works)]()

    return work


def launches(cupy: Any, kernel: str, template: Any, q: Any, sets: Any, splits: int) -> tuple[Any, Any]:
    """A call that launches the compiled kernel on one set of K and V after the other, and O."""
    B, Hq, Nq, _ = q.shape
    Hkv, n = sets[0][0].shape[1:3]
    O, L = cupy.zeros(q.shape, q.dtype), cupy.empty(q.shape[:3], np.float32)
    Os, Ls = cupy.empty((splits, *q.shape), np.float32), cupy.empty((splits, B, Hq, Nq), np.float32)
    limits = cuda.status().limits
    numbers = (Nq, n, q.shape[3] ** -0.5, 0, Hq, Hkv, splits)
    plans = [cuda.plan(cuda.Kernel(kernel, template), (q, K, V, O, L, Os, Ls, *numbers), limits) for K, V in sets]
    return in_turns([device.launcher(plan) for plan in plans]), O


def first_rung(cupy: Any, template: Any, q: Any, sets: Any, splits: int) -> Any:
    """The chapter's two kernels, in float32."""
    B, Hq, Nq, D = q.shape
    Hkv, n = sets[0][0].shape[1:3]
    O, L = cupy.zeros(q.shape, np.float32), cupy.empty(q.shape[:3], np.float32)
    Os, Ls = cupy.empty((splits, *q.shape), np.float32), cupy.empty((splits, B, Hq, Nq), np.float32)
    limits = cuda.status().limits
    works = []
    combine = cuda.Kernel(
        "flash_decoding", {"Splits": splits, "Br": template["Br"], "D": D}, function="flash_decoding_combine"
    )
    second = device.launcher(cuda.plan(combine, (Os, Ls, O, L, Nq, Hq, Hkv), limits))
    for K, V in sets:
        split = cuda.Kernel("flash_decoding", {**template, "D": D}, function="flash_decoding_split")
        first = device.launcher(cuda.plan(split, (q, K, V, Os, Ls, Nq, n, D**-0.5, 0, Hq, Hkv, splits), limits))
        works.append(lambda first=first: (first(), second()))
    return in_turns(works)


def part_times(say: Any) -> dict[str, Any]:
    import cupy

    copy, queue = gpu.copy_bandwidth(say), Queue(cupy)
    rows, steps, sizes = [], [], []
    try:
        import torch
    except ImportError:
        torch = None
    for group in (1, 8):
        for d in (64, 128):
            for B, n in SIZES:
                row, sets, q = one_size(cupy, torch, queue, group, d, B, n)
                rows.append(row)
                say(
                    " ".join(
                        f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}"
                        for key, value in row.items()
                    )
                )
                if group == 1 and d == 128 and (B, n) in ((1, 131072), (16, 8192)):
                    steps += loads_in_flight(cupy, queue, q, sets)
                if group == 8 and (B, n) in ((1, 4096), (1, 131072), (16, 8192)):
                    sizes += block_sizes(cupy, queue, q, sets)
                del sets, q
                cupy.get_default_memory_pool().free_all_blocks()
    return {"copy TB/s": copy, "rows": rows, "steps": steps, "sizes": sizes}


def one_size(
    cupy: Any, torch: Any, queue: Queue, group: int, d: int, B: int, n: int
) -> tuple[dict[str, Any], Any, Any]:
    H = 2048 // d
    nbytes = 4 * B * H * n * d
    count = max(2, min(8, int(1e9 // nbytes) + 1))
    calls = 16 if nbytes < 1e9 else 6

    def normal(*shape: int, dtype: Any = np.float16) -> Any:
        return cupy.random.standard_normal(shape, dtype=np.float32).astype(dtype)

    sets = [(normal(B, H, n, d), normal(B, H, n, d)) for _ in range(count)]
    q = normal(B, H * group, 1, d)
    row: dict[str, Any] = {"group": group, "d": d, "B": B, "N": n}
    contenders, outputs, bytes_of = {}, {}, {}
    multiprocessors = cuda.status().multiprocessors
    for one in DECODE[1:]:
        template = {"T": "half", "D": d, **one.measured[d]}
        heads = B * H * (group if one.kernel == VECTORS else 1)
        splits = cuda.choose_splits(heads, n, multiprocessors, template["Bc"], each=one.each(d, template["Bc"]))
        contenders[one.label], outputs[one.label] = launches(cupy, one.kernel, template, q, sets, splits)
        row[f"{one.label} splits"] = splits
    if group == 1 and B == 1 and n in (16384, 131072):
        template = DECODE[0].measured[d]
        wide = [tuple(x.astype(np.float32) for x in pair) for pair in sets[:2]]
        contenders["rung 0"] = first_rung(cupy, template, q.astype(np.float32), wide, 32 if n < 1e5 else 128)
        bytes_of["rung 0"] = 2 * nbytes
    if torch is not None:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        attend = torch.nn.functional.scaled_dot_product_attention
        given = [[torch.from_dlpack(x) for x in (q, *pair)] for pair in sets]
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            contenders["cuDNN"] = in_turns([lambda a=a: attend(*a, enable_gqa=group > 1) for a in given])
            times = queue.medians(contenders, calls)
            torch.cuda.synchronize()
            for label, O in outputs.items():  # every output is that of the set that came last, each contender's its own
                last = [float((torch.from_dlpack(O) - attend(*a, enable_gqa=group > 1)).abs().max()) for a in given]
                row[f"{label} differs"] = min(last)
    else:
        times = queue.medians(contenders, calls)
    for name, ms in times.items():
        row[f"{name} us"], row[f"{name} TB/s"] = ms * 1e3, bytes_of.get(name, nbytes) / ms / 1e9
    return row, sets, q


def loads_in_flight(cupy: Any, queue: Queue, q: Any, sets: Any) -> list[dict[str, Any]]:
    """The vectors rung with 1, 2, 4 and 8 loads of K and of V a lane before the first is used."""
    B, H, n, d = sets[0][0].shape
    contenders, rows = {}, []
    for loads in (1, 2, 4, 8):
        template = {"T": "half", "Bc": 16 * loads, "D": d, "Warps": 8}
        contenders[loads] = launches(cupy, VECTORS, template, q, sets, cuda.choose_splits(B * H, n, 132, 128))[0]
    for loads, ms in queue.medians(contenders, 6).items():
        rows.append({"d": d, "B": B, "N": n, "loads": loads, "TB/s": 4 * B * H * n * d / ms / 1e9})
    return rows


def block_sizes(cupy: Any, queue: Queue, q: Any, sets: Any) -> list[dict[str, Any]]:
    """The heads rung with blocks of 4, 8 and 12 warps, for several numbers of splits."""
    B, H, n, d = sets[0][0].shape
    contenders = {}
    for warps in (4, 8, 12):
        for splits in (1,) if B > 1 else (8, 16):
            template = {"T": "half", "Bc": 16 * warps, "D": d, "Warps": warps}
            contenders[warps, splits] = launches(cupy, HEADS, template, q, sets, splits)[0]
    found = queue.medians(contenders, 6 if B > 1 else 16)
    rate = 4 * B * H * n * d / 1e9
    return [{"d": d, "B": B, "N": n, "warps": w, "splits": s, "TB/s": rate / ms} for (w, s), ms in found.items()]


def times_table(times: dict[str, Any]) -> list[str]:
    names = ("cuDNN", "rung 1", "rung 2")
    lines = ["", f"Device copy {times['copy TB/s']:.2f} TB/s. TB/s of K and V, queued calls.", ""]
    lines += [
        "| queries a head | d | B | N | cuDNN | rung 1 | rung 2 | rung 1 : cuDNN | rung 2 : cuDNN | us | splits |"
    ]
    lines += ["| --- " * 11 + "|"]
    for r in times["rows"]:
        rates = [r.get(f"{name} TB/s", float("nan")) for name in names]
        ratios = [rate / rates[0] for rate in rates[1:]]
        cells = (
            [str(r[key]) for key in ("group", "d", "B", "N")]
            + [f"{x:.2f}" for x in rates]
            + [f"{x:.3f}" for x in ratios]
        )
        took = ", ".join(f"{r[f'{name} us']:.1f}" for name in names if f"{name} us" in r)
        splits = ", ".join(str(r[f"{name} splits"]) for name in names[1:])
        lines.append(f"| {' | '.join(cells)} | {took} | {splits} |")
    below = [r for r in times["rows"] if "rung 0 TB/s" in r]
    lines += ["", "Rung 0, float32, twice the bytes:", ""]
    lines += [f"- d = {r['d']}, N = {r['N']}: {r['rung 0 us']:.0f} us, {r['rung 0 TB/s']:.2f} TB/s" for r in below]
    lines += ["", "| loads of K and of V in flight | d, B, N | TB/s |", "| --- | --- | --- |"]
    lines += [f"| {r['loads']} | {r['d']}, {r['B']}, {r['N']} | {r['TB/s']:.2f} |" for r in times["steps"]]
    lines += ["", "| rung 2, d, B, N | warps | splits | TB/s |", "| --- | --- | --- | --- |"]
    keys = ("warps", "splits")
    return lines + [
        f"| {r['d']}, {r['B']}, {r['N']} | {' | '.join(str(r[key]) for key in keys)} | {r['TB/s']:.2f} |"
        for r in times["sizes"]
    ]


METRICS = {
    "dram__bytes_read.sum": "bytes read from HBM",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "HBM, % of its peak",
    "sm__warps_active.avg.per_cycle_active": "warps a multiprocessor",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue slots used, %",
    "sm__inst_executed_pipe_tensor.sum": "tensor-core instructions",
    "smsp__inst_executed.sum": "instructions",
    "launch__registers_per_thread": "registers",
    "gpu__time_duration.sum": "ns",
}


def counter_run() -> None:
    """One launch of each measured rung, for ncu."""
    import cupy

    for one, group in ((DECODE[1], 1), (DECODE[2], 1), (DECODE[2], 8)):
        for d in (64, 128):
            q = cupy.random.standard_normal((1, 2048 // d * group, 1, d), dtype=np.float32).astype(np.float16)
            K, V = (
                cupy.random.standard_normal((1, 2048 // d, 65536, d), dtype=np.float32).astype(np.float16)
                for _ in range(2)
            )
            template = {"T": "half", "D": d, **one.measured[d]}
            splits = cuda.choose_splits(
                2048 // d, 65536, 132, int(template["Bc"]), each=one.each(d, int(template["Bc"]))
            )
            launches(cupy, one.kernel, template, q, [(K, V)], splits)[0]()
    cupy.cuda.Device().synchronize()


def part_counters(say: Any) -> dict[str, Any]:
    command = ["ncu", "--clock-control", "none", "--csv", "--metrics", ",".join(METRICS)]
    command += ["--kernel-name", "regex:flash_decoding", sys.executable, __file__, "--counter-run"]
    output = gpu.run_group(command, 100)
    lines = output.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise RuntimeError("ncu gave no table: " + " | ".join(lines[-3:]))
    table: dict[str, dict[str, str]] = {}
    for row in csv.DictReader(lines[start:]):
        table.setdefault(f"{row['ID']} {row['Kernel Name']}", {})[row["Metric Name"]] = (
            f"{row['Metric Value']} {row['Metric Unit']}"
        )
    for name, found in table.items():
        say(f"{name[:100]}: " + ", ".join(f"{METRICS.get(k, k)} {v}" for k, v in found.items()))
    return {"kernels": table}


if __name__ == "__main__":
    if "--counter-run" in sys.argv:
        counter_run()
        sys.exit()
    parts = {"checks": part_checks, "times": part_times}
    parts |= {"sanitizer": part_sanitizer, "counters": part_counters}
    sys.exit(gpu.main(parts, name="gpu_decode_ladder", text=__doc__, small=sanitize_run, times=times_table))
