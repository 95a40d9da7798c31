"""Check and time the float32 rungs of the ladder on this machine's GPU: `python benchmarks/gpu_ladder_f32.py --out FOLDER`.

`flash_attention_2_warps.cu`, `flash_attention_2_registers.cu` and `flash_attention_2_tf32.cu`, with the parts of `benchmarks/gpu.py`:

1. checks      O and L against float64 over many shapes and all instantiations, poisoned with NaN between guard values, NaN around K and V
2. times       all rungs, PyTorch's memory-efficient and math backends and one large matrix product, in turns, with rests between
3. accuracy    errors of O and L against float64 at N = 4096 beside PyTorch's, for values around 0 and around 1
4. profile     what the units did, by ncu's counters
5. sanitizer   compute-sanitizer's four tools on each rung, and on copies with every barrier deleted in turn and other faults
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

from flashviz import cuda
from flashviz.ladder import PREFILL

FIRST = "flash_attention_2"  # rung 0
RUNGS = ("flash_attention_2_warps", "flash_attention_2_registers", "flash_attention_2_tf32")
SIZES = tuple(  # d, N, causal; B · N = 16384 tokens, H · d = 2048
    (d, N, causal) for d in (64, 128) for N, causal in ((1024, False), (4096, False), (4096, True))
)
PROFILED = tuple(itertools.product((FIRST, *RUNGS), (64, 128)))
SMALL = {  # the instantiation that compute-sanitizer sees: more than one warp, several tiles in the small shapes
    "flash_attention_2_warps": {"Br": 16, "Bc": 16, "D": 32, "Rows": 4},
    "flash_attention_2_registers": {"Br": 32, "Bc": 16, "D": 32, "Rows": 4},
    "flash_attention_2_tf32": {"Br": 64, "Bc": 16, "D": 32, "Rows": 32},
}
FAULTS = {  # of each file, title: tool, what is replaced, by what
    "flash_attention_2_warps": {
        "K read past its end": ("memcheck", "k < Nk ? K[", "k <= Nk ? K["),
        "O written past its end": ("memcheck", "if (q >= Nq) continue;", "if (q > Nq) continue;"),
    },
    "flash_attention_2_registers": {
        "K and V read past their end": ("memcheck", "row < exist", "row <= exist"),
        "O written past its end": ("memcheck", "if (q >= Nq) continue;", "if (q > Nq) continue;"),
    },
    "flash_attention_2_tf32": {
        "K and V read past their end": ("memcheck", "row < exist", "row <= exist"),
        "O written past its end": ("memcheck", "if (q >= Nq) continue;", "if (q > Nq) continue;"),
    },
}


def measured(file: str, D: int) -> dict[str, int]:
    """The template values that are timed for a head dimension."""
    rung = next(rung for rung in PREFILL if rung.kernel == file)
    return {**rung.measured[D], "D": D}


def surrounded(cupy: Any, x: Any) -> Any:
    """A copy of ``x`` on the GPU with NaN before and after it: what is read past an end shows in the result."""
    buffer = cupy.full(x.size + 2 * gpu.GUARDS, np.nan, np.float32)
    inside = buffer[gpu.GUARDS : gpu.GUARDS + x.size].reshape(x.shape)
    inside[...] = cupy.asarray(x)
    return inside


def attention(file: str, template: Any, Q: Any, K: Any, V: Any, causal: bool, scale: float | None) -> tuple[Any, Any]:
    """O and L of a rung, from inputs with NaN around them into guarded outputs; AssertionError when a guard changed."""
    import cupy

    _, Hq, Nq, D = Q.shape
    Hkv, Nk = K.shape[1:3]
    (O, O_all), (L, L_all) = gpu.guarded(cupy, Q.shape), gpu.guarded(cupy, Q.shape[:3])
    scale = 1 / np.sqrt(D) if scale is None else scale
    inputs = [surrounded(cupy, x) for x in (Q, K, V)]
    cuda.launch(cuda.Kernel(file, template), (*inputs, O, L, Nq, Nk, scale, causal, Hq, Hkv))
    for buffer in (O_all, L_all):
        edges = cupy.asnumpy(cupy.concatenate((buffer[: gpu.GUARDS], buffer[-gpu.GUARDS :])))
        assert (edges == gpu.GUARD).all(), "a guard value beside O or L was overwritten"
    return cupy.asnumpy(O), cupy.asnumpy(L)


def cases() -> Iterator[tuple[tuple[int, ...], bool, float | None]]:
    """((B, Hq, Hkv, Nq, Nk), causal, scale)."""
    for n, causal in itertools.product((1, 2, 31, 33, 64, 65, 127, 257, 600), (False, True)):
        yield (2, 3, 3, n, n), causal, None
    pairs = ((1, 257), (5, 600), (257, 33), (33, 257), (600, 31), (70, 5), (2, 5), (5, 2), (1, 8), (130, 61))
    for (nq, nk), causal in itertools.product(pairs, (False, True)):
        yield (2, 4, 2, nq, nk), causal, None
    for scale in (0.0, 0.3, -0.2):
        yield (1, 2, 1, 65, 70), True, scale


def inputs_of_a_kind(rng: Any, kind: str, D: int) -> list[Any]:
    """Inputs that a wrong online softmax, or a product of too few digits, would not survive."""
    Q, K, V = gpu.random(rng, 1, 2, 2, 300, 300, D)
    if kind == "steep scores":
        K *= 8
    if kind == "rising scores":  # the maximum moves in every tile
        order = np.argsort((Q[:, :, :1] * K).sum(-1)[0, 0])
        K = 4 * K[:, :, order]
    if kind == "values around 1":
        V = 1 + V / 10
    if kind == "large values":
        V = 1000 * V
    return [np.ascontiguousarray(x, np.float32) for x in (Q, K, V)]


def compile_all() -> None:
    """All instantiations at once, on as many threads as there are: the launches after this find them compiled."""
    one = np.zeros((1, 1, 1, 1), np.float32)

    def launch(job: tuple[str, Any]) -> None:
        x = np.repeat(one, job[1]["D"], axis=-1)
        attention(*job, x, x, x, False, None)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(launch, [(file, t) for file in RUNGS for t in cuda.find(file).header.instances]))


def part_checks(say: Any) -> dict[str, Any]:
    rng = np.random.default_rng(2307)
    check = gpu.Checks(say)

    def numeric(
        file: str, template: Any, arrays: Any, causal: bool, scale: float | None, slack: float = 1
    ) -> tuple[float, float]:
        O, L = attention(file, template, *arrays, causal, scale)
        return gpu.compare(O, L, *arrays, scale, causal, slack=slack)

    compile_all()
    worst = {}
    for file in RUNGS:
        check.worst = [0.0, 0.0]
        for template in cuda.find(file).header.instances:
            values = ", ".join(f"{k}={v}" for k, v in template.items())
            for sizes, causal, scale in cases():
                arrays = gpu.random(rng, *sizes, template["D"])
                check(
                    f"{file} {values}: {sizes} causal {causal} scale {scale}",
                    lambda a=(file, template, arrays, causal, scale): numeric(*a),
                )
            for kind in ("steep scores", "rising scores", "values around 1", "large values"):
                arrays = inputs_of_a_kind(rng, kind, template["D"])
                Q, K, _ = arrays  # a score of size s is itself off by some roundings of s, and its e^s by as much
                slack = max(1.0, float(np.abs(Q @ K.swapaxes(-1, -2)).max()) / template["D"] ** 0.5 / 8)
                case = (file, template, arrays, True, None, slack)
                check(f"{file} {values}: {kind}", lambda a=case: numeric(*a))
        worst[file] = check.worst
        say(f"{file}: largest errors of O and L {check.worst} of the bound")
    check.worst = [max(errors) for errors in zip(*worst.values(), strict=True)]
    return {**check.result(), "by rung": worst}


def contenders(torch: Any, d: int, N: int, causal: bool) -> tuple[dict[str, Any], Any]:
    """What is timed, by name, as functions that launch once; and the outputs that each kernel last wrote."""
    import cupy

    B, H = 16384 // N, 2048 // d
    Q, K, V = (cupy.random.standard_normal((B, H, N, d), dtype=np.float32) for _ in range(3))
    O, L = cupy.empty_like(Q), cupy.empty((B, H, N), np.float32)
    found: dict[str, Any] = {}
    for file in (FIRST, *RUNGS):
        kernel = cuda.Kernel(file, measured(file, d))
        found[file] = lambda kernel=kernel: cuda.launch(kernel, (Q, K, V, O, L, N, N, d**-0.5, causal, H, H), repeat=3)
    if torch is not None:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q, k, v = (torch.from_dlpack(x) for x in (Q, K, V))

        def attend(backend: Any) -> list[float]:
            with sdpa_kernel(backend):
                work = torch.nn.functional.scaled_dot_product_attention
                return gpu.torch_times(torch, lambda: work(q, k, v, is_causal=causal), 3)[0]

        found["PyTorch, memory-efficient"] = lambda: attend(SDPBackend.EFFICIENT_ATTENTION)
        found["PyTorch, math"] = lambda: attend(SDPBackend.MATH)
    return found, (Q, K, V, O, L)


def part_times(say: Any, rounds: int = 4, rest: float = 0.05) -> dict[str, Any]:
    import cupy

    try:
        import torch
    except ImportError:
        torch = None
    rows: list[dict[str, Any]] = []
    for d, N, causal in SIZES:
        named, _ = contenders(torch, d, N, causal)
        times: dict[str, list[float]] = {name: [] for name in named}
        for _ in range(rounds):
            for name, launch in named.items():
                done = launch()
                times[name] += done if isinstance(done, list) else list(done.times.milliseconds)
                time.sleep(rest)
        seen = N * (N + 1) / 2 if causal else N * N
        for name, measured in times.items():
            median = float(np.median(measured))
            rate = 4 * 16384 // N * 2048 * seen / median / 1e9
            rows.append({"d": d, "N": N, "causal": causal, "what": name, "ms": median, "TFLOP/s": rate})
            rows[-1] |= {"ms min, max": (min(measured), max(measured)), "runs": len(measured)}
            say(f"d={d} N={N} causal={causal} {name}: {median:.3f} ms, {rate:.1f} TFLOP/s")
        if torch is not None:
            torch.cuda.empty_cache()
        cupy.get_default_memory_pool().free_all_blocks()
    product = float("nan")
    if torch is not None:
        a, b = (torch.randn(8192, 8192, device="cuda") for _ in range(2))
        product = 2 * 8192**3 / float(np.median(gpu.torch_times(torch, lambda: a @ b, 11)[0])) / 1e9
    say(f"matrix product of float32, N = 8192: {product:.1f} TFLOP/s")
    return {"rows": rows, "f32 matrix product TFLOP/s": product, "copy TB/s": gpu.copy_bandwidth(say)}


def part_accuracy(say: Any) -> dict[str, Any]:
    """Largest and root-mean-square error of O, and largest of L, on one head of N = 4096."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    rng = np.random.default_rng(7)
    rows = []
    for d, mean in itertools.product((64, 128), (0, 1)):
        Q, K, V = gpu.random(rng, 1, 1, 1, 4096, 4096, d)
        V = np.float32(mean) + V * np.float32(0.1 if mean else 1)
        want, want_L = gpu.oracle(Q, K, V, d**-0.5, False)
        found = {file: attention(file, measured(file, d), Q, K, V, False, None) for file in (FIRST, *RUNGS)}
        q, k, v = (torch.from_numpy(x).cuda() for x in (Q, K, V))
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v).cpu().numpy()
        found["PyTorch, memory-efficient"] = (theirs, None)
        for name, (O, L) in found.items():
            error = np.abs(O - want)
            row = {"d": d, "values around": mean, "what": name, "largest": float(error.max())}
            row |= {
                "rms": float(np.sqrt((error**2).mean())),
                "L": None if L is None else float(np.abs(L - want_L).max()),
            }
            rows.append(row)
            say(str(row))
    return {"rows": rows}


def part_profile(say: Any) -> dict[str, Any]:
    """ncu's counters of one launch of each rung at N = 4096."""
    launches = ncu.profile([sys.executable, __file__, "--sanitize-run", "profile"], "^flash_attention_2")
    found = {f"{file}, d = {d}": row for (file, d), row in zip(PROFILED, launches, strict=True)}
    for name, row in found.items():
        say(f"{name}: {row}")
    return found


def profile_run() -> None:
    """One launch of each rung at N = 4096, for ncu."""
    import cupy

    for file, d in PROFILED:
        H = 2048 // d
        Q, K, V = (cupy.random.standard_normal((4, H, 4096, d), dtype=np.float32) for _ in range(3))
        O, L = cupy.empty_like(Q), cupy.empty((4, H, 4096), np.float32)
        cuda.launch(cuda.Kernel(file, measured(file, d)), (Q, K, V, O, L, 4096, 4096, d**-0.5, 0, H, H))


def small_run(file: str) -> None:
    """Small shapes of one rung, or of an edited copy, for compute-sanitizer; "profile" is one large launch of each."""
    if file == "profile":
        profile_run()
        return
    import cupy

    cupy.cuda.set_allocator(None)  # so that each array ends where its memory does
    rng = np.random.default_rng(1)
    right = True
    template = SMALL[cuda.find(file).header.kernel]
    for B, Hq, Hkv, Nq, Nk, causal in gpu.SMALL:
        Q, K, V = (cupy.asarray(x) for x in gpu.random(rng, B, Hq, Hkv, Nq, Nk, template["D"]))
        O, L = cupy.empty(Q.shape, np.float32), cupy.empty(Q.shape[:3], np.float32)
        cuda.launch(cuda.Kernel(file, template), (Q, K, V, O, L, Nq, Nk, 0.125, causal, Hq, Hkv))
        try:
            gpu.compare(*(cupy.asnumpy(x) for x in (O, L, Q, K, V)), 0.125, causal)
        except AssertionError as error:
            print(error)
            right = False
    print("SMALL SHAPES RIGHT" if right else "SMALL SHAPES WRONG")


def part_sanitizer(say: Any) -> dict[str, Any]:
    """The four tools on each rung, which must be clean, and on copies with faults, which must be found."""
    if not shutil.which("compute-sanitizer"):
        raise RuntimeError("compute-sanitizer is not on the PATH")
    results: dict[str, Any] = {"clean": {}, "planted": {}}
    with tempfile.TemporaryDirectory() as name, concurrent.futures.ThreadPoolExecutor(12) as pool:
        folder, jobs = Path(name), {}
        for file in RUNGS:
            for tool in ("memcheck", "racecheck", "initcheck", "synccheck"):
                jobs["clean", f"{file}: {tool}"] = (tool, file)
            for barrier in ("__syncthreads();", "__syncwarp();"):
                count = cuda.find(file).text.count(barrier)
                for n in range(count):
                    copy = gpu.planted(folder, f"{file}{barrier[6:10]}{n}", barrier, "", n, file)
                    jobs["planted", f"{file}: {barrier[:-1]} {n + 1} of {count} deleted"] = ("racecheck", str(copy))
            half = ("synccheck", "TRACE(store_o, i);", "if (threadIdx.x % 2) __syncthreads();")
            for n, (title, (tool, old, new)) in enumerate({**FAULTS[file], "a barrier for some threads": half}.items()):
                jobs["planted", f"{file}: {title}"] = (tool, str(gpu.planted(folder, f"{file}{n}", old, new, 0, file)))
        futures = {key: pool.submit(gpu.sanitize, *job, limit=90, script=__file__) for key, job in jobs.items()}
        for (kind, title), future in futures.items():
            results[kind][title] = future.result()
            say(f"{kind} · {title}: {future.result()}")
    results["all clean"] = all(r["found"] == 0 and r["right"] for r in results["clean"].values())
    results["all planted found"] = all(r["found"] for r in results["planted"].values())
    return results


def times_table(times: dict[str, Any]) -> list[str]:
    """Milliseconds and TFLOP/s, a row for each contender, a column for each size."""
    by = {(r["what"], r["d"], r["N"], r["causal"]): r for r in times["rows"]}
    titles = [f"d = {d}, N = {N}{', causal' if causal else ''}" for d, N, causal in SIZES]
    rates = f"{times['f32 matrix product TFLOP/s']:.1f} TFLOP/s; copy {times['copy TB/s']:.2f} TB/s."
    lines = ["", f"float32 matrix product, N = 8192: {rates}", "", f"| ms, TFLOP/s | {' | '.join(titles)} |"]
    lines.append("| --- |" + " --- |" * len(titles))
    for what in dict.fromkeys(r["what"] for r in times["rows"]):
        cells = [by[(what, *size)] for size in SIZES]
        lines.append(f"| {what} | " + " | ".join(f"{r['ms']:.2f}, {r['TFLOP/s']:.1f}" for r in cells) + " |")
    return lines


if __name__ == "__main__":
    parts = {"checks": part_checks, "times": part_times, "accuracy": part_accuracy}
    parts |= {"profile": part_profile, "sanitizer": part_sanitizer}
    sys.exit(gpu.main(parts, name="gpu_ladder_f32", text=__doc__, small=small_run, times=times_table))
