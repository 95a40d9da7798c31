"""Check and time the Hopper kernels on this machine's GPU, in one run: `python benchmarks/gpu_hopper.py --out FOLDER`.

Needs CuPy and a GPU of compute capability 9.0; uses PyTorch (cuDNN's attention), FlashAttention-3 and compute-sanitizer where they are.

1. steps       the kernels of hopper_steps.cu on whole numbers: every element must be exact
2. checks      flash_attention_3 against float64 from NaN-filled outputs: odd sizes, steep and rising scores, one row, more row blocks than
               multiprocessors, rows that see no key, grouped heads, both types; each launch twice, bit for bit the same
3. launches    random shapes, outputs filled with NaN before each; none may be left, and none may hang (a time limit ends the part)
4. sanitizer   compute-sanitizer over small shapes
5. times       CUDA events, medians, beside cuDNN in the same run, with rests between

`--parts steps,checks` runs some of them; the last two are written to hopper.json and hopper.md in the folder.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import gpu  # noqa: E402
from gpu_hopper_steps import STEPS, blank, numbers, part_steps, rounded  # noqa: E402

from flashviz import cuda  # noqa: E402
from flashviz.cuda import launching  # noqa: E402
from flashviz.cuda.gpu import launcher  # noqa: E402
from flashviz.cuda.launching import Plan  # noqa: E402
from flashviz.ladder import rung  # noqa: E402

TYPES = ("half", "bfloat16")
MEASURED = {d: dict(values) for d, values in rung(6).measured.items()}
BOUND_O = {"half": 2.0**-10, "bfloat16": 2.0**-7}  # of max(1, max |V|): P and O are rounded to 2^-11 or 2^-8, once each
BOUND_L = 2.0**-17  # of max(1, |L|): sums in float, and 2^x and log to 2^-22
TOKENS, WIDTH = 16384, 2048  # B * N and H * D of every timed size


def part_compile(say: Any, types: tuple[str, ...] = TYPES) -> dict[str, Any]:
    """Every instantiation that the other parts launch, several at a time."""
    import cupy

    steps = [cuda.find("hopper_steps", function) for function in STEPS]
    wanted = [(step, dict(values)) for step in steps for values in step.header.instances]
    attention = cuda.find("flash_attention_3")
    wanted += [
        (attention, {"T": type, "D": D, "Causal": causal, **MEASURED[D]})
        for type in types
        for D in MEASURED
        for causal in (0, 1)
    ]
    plans = [Plan(s, s.signature.instance(values), {}, (1, 1, 1), (1, 1, 1), 0) for s, values in wanted]
    cupy.zeros(1)
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda plan: launcher(plan), plans))
    return {"instantiations": len(plans), "failures": []}


# -- 2: attention -----------------------------------------------------------------------------------------------------


def attend(q: Any, k: Any, v: Any, type: str, causal: bool, scale: float | None = None) -> tuple[Any, Any]:
    """O and L of two launches, which must be the same bits; outputs start as NaN."""
    D, results = q.shape[-1], []
    for _ in range(2):
        O, L = blank(q.shape, type), np.full(q.shape[:-1], np.nan, np.float32)
        more = {} if scale is None else {"scale": scale}
        sizes = {"Nq": q.shape[2], "Nk": k.shape[2], "Hq": q.shape[1], "Hkv": k.shape[1]}
        kernel = cuda.Kernel("flash_attention_3", {"T": type, "D": D, "Causal": int(causal), **MEASURED[D]})
        cuda.launch(kernel, {"Q": q, "K": k, "V": v, "O": O, "L": L, **sizes, **more}, poison=True)
        results.append((O, L))
    (O, L), again = results
    assert O.tobytes() == again[0].tobytes(), "a second launch gave another O"
    assert L.tobytes() == again[1].tobytes(), "a second launch gave another L"
    return O, L


def oracle(Q: Any, K: Any, V: Any, scale: float, causal: bool) -> tuple[Any, Any]:
    """O and L in float64, by CuPy; causal aligned bottom-right."""
    import cupy

    q, k, v = (cupy.asarray(x, np.float64) for x in (Q, K, V))
    k, v = (cupy.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    s = q @ k.swapaxes(-1, -2) * scale
    if causal:
        nq, nk = s.shape[-2:]
        s[..., cupy.arange(nk)[None] > cupy.arange(nq)[:, None] + nk - nq] = -np.inf
    m = s.max(-1, keepdims=True)
    m[cupy.isinf(m)] = 0
    p = cupy.exp(s - m)
    total = p.sum(-1, keepdims=True)
    O = p @ v / cupy.where(total == 0, 1, total)
    L = cupy.where(total == 0, -np.inf, m + cupy.log(cupy.where(total == 0, 1, total)))
    return cupy.asnumpy(O), cupy.asnumpy(L[..., 0])


def compare(O: Any, L: Any, Q: Any, K: Any, V: Any, type: str, causal: bool, scale: float) -> tuple[float, float]:
    """Errors of O and L as fractions of their bounds; AssertionError past them."""
    want_O, want_L = oracle(Q, K, V, scale, causal)
    none = np.isneginf(want_L)
    assert not np.isnan(O).any(), f"O holds {np.count_nonzero(np.isnan(O))} NaN"
    assert not np.isnan(L).any(), f"L holds {np.count_nonzero(np.isnan(L))} NaN"
    assert (np.isneginf(L) == none).all(), "L is not -inf exactly where a row sees no key"
    assert (O[none] == 0).all(), "O is not 0 where a row sees no key"
    error_O = np.abs(O - want_O).max() / (BOUND_O[type] * max(1.0, float(np.abs(V).max())))
    L, want_L = L[~none], want_L[~none]
    error_L = (np.abs(L - want_L) / (BOUND_L * np.maximum(1.0, np.abs(want_L)))).max(initial=0.0)
    assert error_O <= 1, f"O is off by {error_O:.2f} times the bound"
    assert error_L <= 1, f"L is off by {error_L:.2f} times the bound"
    return float(error_O), float(error_L)


def attention_cases() -> list[tuple[str, tuple[int, ...], str]]:
    """(title, (B, Hq, Hkv, Nq, Nk), what the inputs are like)."""
    cases = [(f"N={n}", (2, 3, 3, n, n), "normal") for n in (1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 257, 1000)]
    cases += [
        (f"Nq={nq} Nk={nk}", (2, 4, 2, nq, nk), "normal")
        for nq, nk in (
            (1, 1),
            (1, 1000),
            (5, 700),
            (300, 700),
            (700, 300),
            (700, 1),
            (1000, 64),
            (64, 1000),
            (130, 129),
        )
    ]
    cases += [
        (f"{kind} N={n}", (1, 2, 1, n, n), kind)
        for kind in ("steep", "rising", "falling", "large V")
        for n in (130, 900)
    ]
    cases += [
        ("more row blocks than multiprocessors", (3, 40, 8, 700, 650), "normal"),
        ("many heads of one row", (5, 64, 64, 1, 33), "normal"),
    ]
    return cases


def inputs(rng: Any, sizes: tuple[int, ...], D: int, kind: str) -> list[Any]:
    Q, K, V = gpu.random(rng, *sizes, D)
    ramp = np.arange(sizes[4], dtype=np.float32)[:, None]
    if kind == "steep":
        Q *= 8
    elif kind in ("rising", "falling"):  # the largest score is in the last tile, or in the first
        Q[..., 0], K[..., :1] = 3, 0.05 * (ramp if kind == "rising" else -ramp)
    elif kind == "large V":
        V *= 100
    return [Q, K, V]


def part_checks(say: Any) -> dict[str, Any]:
    check = gpu.Checks(say)
    rng = np.random.default_rng(1)

    def case(sizes: tuple[int, ...], D: int, kind: str, type: str, causal: bool, scale: float | None = None) -> Any:
        (q, Q), (k, K), (v, V) = (rounded(x, type) for x in inputs(rng, sizes, D, kind))
        O, L = attend(q, k, v, type, causal, scale)
        return compare(numbers(O, type), L, Q, K, V, type, causal, 1 / math.sqrt(D) if scale is None else scale)

    for number, (title, sizes, kind) in enumerate(attention_cases()):
        for D in MEASURED:
            for causal in (False, True):
                types = TYPES if number % 4 == 0 else (TYPES[(number + D // 64 + causal) % 2],)
                for type in types:
                    check(
                        f"{title} {sizes} D={D} {type} causal={causal}",
                        lambda a=(sizes, D, kind, type, causal): case(*a),
                    )
    for scale in (0.01, 0.5, 0.0, -0.2):
        check(f"scale={scale}", lambda s=scale: case((1, 2, 1, 200, 300), 64, "normal", "half", True, s))
    return check.result() | {"bound": {"O": BOUND_O, "L": BOUND_L}}


# -- 3: many launches -------------------------------------------------------------------------------------------------


def plan_of(Q: Any, K: Any, V: Any, O: Any, L: Any, type: str, causal: bool) -> Plan:
    sizes = {"Nq": Q.shape[2], "Nk": K.shape[2], "Hq": Q.shape[1], "Hkv": K.shape[1]}
    kernel = cuda.Kernel(
        "flash_attention_3", {"T": type, "D": Q.shape[3], "Causal": int(causal), **MEASURED[Q.shape[3]]}
    )
    return cuda.plan(kernel, {"Q": Q, "K": K, "V": V, "O": O, "L": L, **sizes}, cuda.status().limits)


def launches(count: int, seed: int) -> None:
    """Launches of random shapes, one right after another; prints how many outputs kept a NaN, and the largest error of a sample."""
    import cupy

    launching.find = functools.cache(launching.find)  # the file does not change meanwhile
    rng = np.random.default_rng(seed)
    pool = 1 << 22
    q, k, v = (cupy.asarray(rounded(rng.standard_normal(pool, dtype=np.float32), "half")[0]) for _ in range(3))
    o, lse = cupy.empty(pool, np.float16), cupy.empty(pool, np.float32)
    left, worst, start = cupy.zeros((), np.int64), 0.0, time.monotonic()
    for n in range(count):
        D, causal = int(rng.choice((64, 128))), bool(rng.integers(2))
        group, Hkv, B = int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.integers(1, 5))
        Nq, Nk = (int(2 ** rng.uniform(0, 10)) for _ in range(2))
        Hq = group * Hkv
        if B * Hq * max(Nq, Nk) * D > pool:
            continue
        Q, O = (x[: B * Hq * Nq * D].reshape(B, Hq, Nq, D) for x in (q, o))
        K, V = (x[: B * Hkv * Nk * D].reshape(B, Hkv, Nk, D) for x in (k, v))
        L = lse[: B * Hq * Nq].reshape(B, Hq, Nq)
        O.fill(np.nan)
        L.fill(np.nan)
        launcher(plan_of(Q, K, V, O, L, "half", causal))()
        left += cupy.isnan(O).sum() + cupy.isnan(L).sum()
        if n % 200 == 0:
            arrays = [numbers(cupy.asnumpy(x), "half") for x in (O, Q, K, V)]
            worst = max(worst, *compare(arrays[0], cupy.asnumpy(L), *arrays[1:], "half", causal, 1 / math.sqrt(D)))
        if n % 1000 == 999:
            print(f"{n + 1} launches, {int(left)} elements left NaN, worst {worst:.2f} of the bound", flush=True)
    cupy.cuda.Device().synchronize()
    print(
        f"ENDED {count} launches in {time.monotonic() - start:.0f} s, {int(left)} elements left NaN, worst {worst:.2f} of the bound"
    )


def part_launches(say: Any, count: int, limit: float) -> dict[str, Any]:
    command = [sys.executable, __file__, "--launches", str(count)]
    try:
        output = gpu.run_group(command, limit)
    except subprocess.TimeoutExpired:
        return {"failures": [f"{count} launches did not end in {limit:.0f} s"]}
    last = (output.strip().splitlines() or ["no word"])[-1]
    say(last)
    right = last.startswith("ENDED") and " 0 elements left NaN" in last
    return {"said": last, "failures": [] if right else [output[-600:]]}


# -- 4: the sanitizer -------------------------------------------------------------------------------------------------


def sanitize_run(_: str) -> None:
    import cupy

    cupy.cuda.set_allocator(None)
    rng, right = np.random.default_rng(3), True
    try:
        for function, step in STEPS.items():
            step(rng, dict(cuda.find("hopper_steps", function).header.instances[0]))
        for D, sizes, causal in ((64, (1, 2, 1, 70, 5), True), (128, (1, 1, 1, 130, 140), False)):
            (q, Q), (k, K), (v, V) = (rounded(x, "half") for x in inputs(rng, sizes, D, "normal"))
            O, L = attend(q, k, v, "half", causal)
            compare(numbers(O, "half"), L, Q, K, V, "half", causal, 1 / math.sqrt(D))
    except AssertionError as error:
        print(error)
        right = False
    print("SMALL SHAPES RIGHT" if right else "SMALL SHAPES WRONG")


def part_sanitizer(
    say: Any, tools: tuple[str, ...] = ("memcheck", "synccheck", "racecheck", "initcheck")
) -> dict[str, Any]:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        futures = {tool: pool.submit(gpu.sanitize, tool, "hopper", 100, __file__) for tool in tools}
        results = {tool: future.result() for tool, future in futures.items()}
    for tool, result in results.items():
        say(f"{tool}: {result}")
    clean = all(r["found"] == 0 and r["right"] for r in results.values())
    return {"clean": results, "failures": [] if clean else ["not clean"]}


# -- 5: times ---------------------------------------------------------------------------------------------------------


def flops(B: int, H: int, N: int, D: int, causal: bool) -> float:
    """As everybody counts them: half of the scores with causal."""
    return 4.0 * B * H * N * N * D / (2 if causal else 1)


def milliseconds(
    launch: Callable[[], Any], repeat: int, event: Callable[[], Any], elapsed: Callable[[Any, Any], float]
) -> float:
    for _ in range(2):
        launch()
    pairs = [(event(), event()) for _ in range(repeat)]
    for start, end in pairs:
        start.record()
        launch()
        end.record()
    pairs[-1][1].synchronize()
    return statistics.median(elapsed(*pair) for pair in pairs)


def part_times(say: Any, lengths: tuple[int, ...], types: tuple[str, ...], rest: float = 0.2) -> dict[str, Any]:
    import cupy
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    try:
        from flash_attn_interface import flash_attn_func as flash_attention_3_of_its_authors
    except ImportError:
        flash_attention_3_of_its_authors = None
    rows: dict[str, dict[str, float]] = {}
    for type in types:
        dtype = torch.float16 if type == "half" else torch.bfloat16
        for D in MEASURED:
            for N in lengths:
                B, H = TOKENS // N, WIDTH // D
                q, k, v = (torch.randn(B, H, N, D, device="cuda", dtype=dtype) for _ in range(3))
                o, lse = torch.empty_like(q), torch.empty(B, H, N, device="cuda")
                bits = torch.int16 if type == "bfloat16" else dtype
                Q, K, V, O = (cupy.asarray(x.view(bits)) for x in (q, k, v, o))
                if type == "bfloat16":
                    Q, K, V, O = (x.view(np.uint16) for x in (Q, K, V, O))
                L = cupy.asarray(lse)
                for causal in (False, True):
                    ours = launcher(plan_of(Q, K, V, O, L, type, causal))

                    def cudnn(q: Any = q, k: Any = k, v: Any = v, causal: bool = causal) -> Any:
                        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                            return scaled_dot_product_attention(q, k, v, is_causal=causal)

                    runs: dict[str, Any] = {"ours": ours, "cuDNN": cudnn}
                    if flash_attention_3_of_its_authors:
                        apart = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
                        runs["FlashAttention-3"] = lambda a=apart, c=causal: flash_attention_3_of_its_authors(
                            *a, causal=c
                        )
                    rates: dict[str, float] = {}
                    for name, launch in runs.items():
                        time.sleep(rest)  # a warm chip runs slower: nobody runs in another's heat
                        if name == "ours":
                            ms = milliseconds(launch, 20, cupy.cuda.Event, cupy.cuda.get_elapsed_time)
                        else:
                            ms = milliseconds(
                                launch, 20, lambda: torch.cuda.Event(enable_timing=True), lambda a, b: a.elapsed_time(b)
                            )
                        rates[name] = flops(B, H, N, D, causal) / ms / 1e9
                    ours()
                    cupy.cuda.Device().synchronize()
                    torch.cuda.synchronize()
                    off = float((o.float() - cudnn().float()).abs().max())
                    assert off < (0.01 if type == "half" else 0.06), (
                        f"{type} D={D} N={N} causal={causal}: {off} from cuDNN"
                    )
                    key = f"{type} d={D} N={N}{' causal' if causal else ''}"
                    rows[key] = {name: round(rate, 1) for name, rate in rates.items()}
                    say(f"{key}: {rows[key]} {rates['ours'] / rates['cuDNN']:.3f}")
    return {"rates": rows, "failures": []}


def table(rates: dict[str, dict[str, float]]) -> str:
    """Markdown: TFLOP/s, ours beside cuDNN and their ratio."""
    names = list(next(iter(rates.values())))
    lines = [f"| | {' | '.join(names)} | ours / cuDNN |", "|" + "---|" * (len(names) + 2)]
    for key, row in rates.items():
        lines.append(f"| {key} | {' | '.join(f'{row[n]:.0f}' for n in names)} | {row['ours'] / row['cuDNN']:.2f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-hopper"))
    parser.add_argument("--parts", default="compile,steps,checks,launches,sanitizer,times")
    parser.add_argument("--count", type=int, default=10_000, help="random launches")
    parser.add_argument("--limit", type=float, default=120, help="seconds that they may take")
    parser.add_argument("--lengths", default="1024,2048,4096,8192,16384")
    parser.add_argument("--types", default="half,bfloat16")
    parser.add_argument("--launches", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--sanitize-run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.launches:
        launches(options.launches, 2)
        return 0
    if options.sanitize_run:
        sanitize_run(options.sanitize_run)
        return 0
    found = cuda.status()
    if not found.usable:
        print(f"Nothing is measured: {found.reason} {found.fix}".strip())
        return 0
    lengths, types = tuple(map(int, options.lengths.split(","))), tuple(options.types.split(","))
    parts: dict[str, Callable[[Any], dict[str, Any]]] = {
        "compile": part_compile,
        "steps": part_steps,
        "checks": part_checks,
        "launches": lambda say: part_launches(say, options.count, options.limit),
        "sanitizer": part_sanitizer,
        "times": lambda say: part_times(say, lengths, types),
    }
    say = lambda text: print(text, flush=True)  # noqa: E731
    result: dict[str, Any] = {"device": cuda.status().versions}
    for name in options.parts.split(","):
        start = time.monotonic()
        try:
            result[name] = parts[name](say)
        except Exception as error:
            result[name] = {"failures": [f"{type(error).__name__}: {error}"]}
        result[name]["seconds"] = round(time.monotonic() - start, 1)
        say(f"{name}: { ({k: v for k, v in result[name].items() if k not in ('rates', 'clean')}) }")
        options.out.mkdir(parents=True, exist_ok=True)  # after each part: a run that is cut off keeps what it has
        (options.out / "hopper.json").write_text(json.dumps(result, indent=1))
    if rates := result.get("times", {}).get("rates"):
        (options.out / "hopper.md").write_text(table(rates) + "\n")
        say(table(rates))
    return int(any(part["failures"] for part in result.values() if isinstance(part, dict)))


if __name__ == "__main__":
    sys.exit(main())
