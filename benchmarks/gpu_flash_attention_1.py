"""Check and time chapter 2's kernels on this machine's GPU: `python benchmarks/gpu_flash_attention_1.py --out FOLDER`.

`kernels/flash_attention_1.cu` and the three of `kernels/standard_attention.cu`, with the parts of `benchmarks/gpu.py`:

1. checks      O and L (and O, m, l, S, P themselves) against float64, poisoned with NaN between guard values; known cases
2. times       both beside flash_attention_2.cu and PyTorch's attention, with the bytes that the formulas say they move
3. sanitizer   compute-sanitizer's four tools, and on copies with planted faults: every barrier deleted in turn, and others
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import gpu
import numpy as np

from flashviz import cuda
from flashviz.checks.model import traffic_model
from flashviz.programs.standard_attention import KERNELS, softmax_template

FLASH, STANDARD = "flash_attention_1", "standard_attention"
FAULTS = {  # title: tool, what is replaced, by what
    "K read past its end": ("memcheck", "k < Nk ? K[", "k <= Nk ? K["),
    "O written past its end": (
        "memcheck",
        "if (q < Nq) O[(long long)q * D + x] = Oi",
        "if (q <= Nq) O[(long long)q * D + x] = Oi",
    ),
    "O not set before the loops": ("initcheck", "if (q < Nq) O[(long long)q * D + e % D] = 0.f;", ""),
    "m not set before the loops": ("initcheck", "if (q < Nq) m[q] = -INFINITY;", ""),
    "a barrier for some threads only": ("synccheck", "TRACE(store_o, j, i);", "if (threadIdx.x % 2) __syncthreads();"),
}
STANDARD_FAULTS = {
    "K read past its end": ("memcheck", "k < Nk ? K[", "k <= Nk ? K["),
    "S written past its end": ("memcheck", "if (q < Nq && k < Nk) S[", "if (q <= Nq && k < Nk) S["),
    "the last score of a row not written": ("initcheck", "if (q < Nq && k < Nk) S[", "if (q < Nq && k < Nk - 1) S["),
    "a barrier for some threads only": ("synccheck", "TRACE(store_o, i);", "if (threadIdx.x % 2) __syncthreads();"),
}
SIZES = ((64, 1024), (64, 4096), (128, 1024), (128, 4096))  # d, N; B · N = 16384 tokens, H · d = 2048


def outputs(cupy: Any, shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """NaN-filled arrays between guard values, and their whole buffers, by name."""
    arrays, buffers = {}, {}
    for name, shape in shapes.items():
        arrays[name], buffers[name] = gpu.guarded(cupy, shape)
    return arrays, buffers


def unguarded(cupy: Any, arrays: dict[str, Any], buffers: dict[str, Any]) -> list[Any]:
    """The arrays on the host; AssertionError where a guard value changed."""
    for name, buffer in buffers.items():
        edges = cupy.asnumpy(cupy.concatenate((buffer[: gpu.GUARDS], buffer[-gpu.GUARDS :])))
        assert (edges == gpu.GUARD).all(), f"a guard value beside {name} was overwritten"
    return [cupy.asnumpy(x) for x in arrays.values()]


def logsumexp(m: Any, l: Any) -> Any:
    """m + ln l, -inf where a row sees no key; AssertionError where m = -inf and l = 0 do not go together."""
    assert (np.isneginf(m) == (l == 0)).all(), "m is -inf where l is not 0, or the other way round"
    return m + np.log(np.where(l == 0, np.float32(1), l))


def flash(
    Q: Any, K: Any, V: Any, Br: int, Bc: int, *, causal: bool = False, scale: float | None = None, **how: Any
) -> tuple[Any, Any]:
    """O and L = m + ln l of flash_attention_1.cu, through guarded device arrays."""
    import cupy

    _, Hq, Nq, D = Q.shape
    Hkv, Nk = K.shape[1:3]
    arrays, buffers = outputs(cupy, {"O": Q.shape, "m": Q.shape[:3], "l": Q.shape[:3]})
    limits = how.pop("limits", ())
    kernel = cuda.Kernel(how.pop("file", FLASH), {"Br": Br, "Bc": Bc, "D": D}, **how)
    scale = 1 / np.sqrt(D) if scale is None else scale
    cuda.launch(kernel, (Q, K, V, *arrays.values(), Nq, Nk, scale, causal, Hq, Hkv, *limits))
    O, m, l = unguarded(cupy, arrays, buffers)
    return O, logsumexp(m, l)


def standard(
    Q: Any, K: Any, V: Any, Br: int, Bc: int, *, causal: bool = False, scale: float | None = None, **how: Any
) -> tuple[Any, Any]:
    """O of standard_attention.cu, through guarded device arrays, and L of the scores that it wrote; P's rows sum to 1."""
    import cupy

    B, Hq, Nq, D = Q.shape
    Hkv, Nk = K.shape[1:3]
    arrays, buffers = outputs(cupy, {"S": (B, Hq, Nq, Nk), "P": (B, Hq, Nq, Nk), "O": Q.shape})
    S, P, O = arrays.values()
    scale = 1 / np.sqrt(D) if scale is None else scale
    file, tiles = how.pop("file", STANDARD), {"Br": Br, "Bc": Bc, "D": D}
    rows = {"Br": 4, "Keys": 64 if Nk <= 64 else 1024}
    arguments = {
        "standard_scores": (tiles, (Q, K, S, Nq, Nk, scale, causal, Hq, Hkv)),
        "standard_softmax": (rows, (S, P, Nq, Nk, Hq)),
        "standard_values": (tiles, (P, V, O, Nq, Nk, Hq, Hkv)),
    }
    for name, (template, args) in arguments.items():
        cuda.launch(cuda.Kernel(file, template, function=name, **how), args)
    scores, probabilities, out = (np.asarray(x) for x in unguarded(cupy, arrays, buffers))
    m = scores.max(axis=-1)
    l = np.exp(scores - np.where(np.isneginf(m), 0, m)[..., None], dtype=np.float64).sum(axis=-1)
    assert not np.isnan(scores).any(), "S holds NaN"
    assert not np.isnan(probabilities).any(), "P holds NaN"
    assert np.abs(probabilities.sum(axis=-1, dtype=np.float64) - (l > 0)).max() <= gpu.BOUND, (
        "rows of P do not sum to 1"
    )
    return out, logsumexp(m, l).astype(np.float32)


def part_checks(say: Any) -> dict[str, Any]:
    rng = np.random.default_rng(2205)
    check = gpu.Checks(say)
    for attend in (flash, standard):
        say(attend.__name__)
        gpu.attention_checks(check, rng, attend)
    check("carve", carve)
    check("both alike", lambda: alike(rng))
    return check.result()


def alike(rng: Any) -> None:
    """Both chapters' kernels agree on one causal, grouped problem."""
    Q, K, V = gpu.random(rng, 2, 4, 2, 130, 200, 64)
    results = [attend(Q, K, V, 32, 32, causal=True) for attend in (flash, standard, gpu.attention)]
    for O, L in results[1:]:
        assert np.abs(O - results[0][0]).max() <= gpu.BOUND * max(1, np.abs(V).max()), "O differs"
        assert np.abs(L - results[0][1]).max() <= gpu.BOUND * max(1, np.abs(L).max()), "L differs"


def carve() -> None:
    """The kernels carve as many bytes as the launcher gives them."""
    x, row, scores = (
        np.zeros((1, 1, 1, 64), np.float32),
        np.zeros((1, 1, 1), np.float32),
        np.zeros((1,) * 4, np.float32),
    )
    tiles = {"Br": 32, "Bc": 16, "D": 64}
    launches = (  # file, function, output that says it, right after which line, template, arguments
        (FLASH, "", "l", 'carve.vector<Br>("li");', tiles, (x, x, x, x.copy(), row.copy(), row, 1, 1, 1.0, 0, 1, 1)),
        (STANDARD, KERNELS[0], "S", 'carve.tile<Br, Bc>("Sij");', tiles, (x, x, scores, 1, 1, 1.0, 0, 1, 1)),
        (
            STANDARD,
            KERNELS[1],
            "P",
            'carve.tile<Br, Keys>("Si");',
            {"Br": 4, "Keys": 64},
            (scores.copy(), scores, 1, 1, 1),
        ),
        (STANDARD, KERNELS[2], "O", 'carve.tile<Br, D>("Oi");', tiles, (scores.copy(), x, x, 1, 1, 1, 1)),
    )
    with tempfile.TemporaryDirectory() as folder:
        for number, (file, function, output, line, template, args) in enumerate(launches):
            code = f"{line} if (threadIdx.x == 0) {output}[0] = carve.used * 4; return;"
            which = (
                1 if output == "O" else 0
            )  # the line stands in two kernels where it does not end in a part of its own
            text = cuda.find(file).text
            path = gpu.planted(Path(folder), f"carve{number}", line, code, min(which, text.count(line) - 1), file)
            done = cuda.launch(cuda.Kernel(path, template, function=function), args)
            got, want = done.outputs[output].flat[0], cuda.find(file, function).shared_bytes(template)
            assert got == want, f"{file} {function} carves {got}, the launcher gives {want}"


def sanitize_run(file: str) -> None:
    """The small shapes; without CuPy's memory pool, so that each array ends where its memory does."""
    import cupy

    cupy.cuda.set_allocator(None)
    rng = np.random.default_rng(1)
    right = True
    for B, Hq, Hkv, Nq, Nk, causal in gpu.SMALL:
        Q, K, V = (cupy.asarray(x) for x in gpu.random(rng, B, Hq, Hkv, Nq, Nk, 64))
        O, tiles = cupy.empty(Q.shape, np.float32), {"Br": 32, "Bc": 32, "D": 64}
        if cuda.find(file).kernels == KERNELS:
            S, P = (cupy.empty((B, Hq, Nq, Nk), np.float32) for _ in range(2))
            scores, softmax, values = (cuda.Kernel(file, tiles, function=name) for name in KERNELS)
            softmax = cuda.Kernel(file, {"Br": 4, "Keys": 128}, function=KERNELS[1])
            cuda.launch(scores, (Q, K, S, Nq, Nk, 0.125, causal, Hq, Hkv))
            cuda.launch(softmax, (S, P, Nq, Nk, Hq))
            cuda.launch(values, (P, V, O, Nq, Nk, Hq, Hkv))
            _, L = gpu.oracle(*(cupy.asnumpy(x) for x in (Q, K, V)), 0.125, causal)
        else:
            m, l = (cupy.empty(Q.shape[:3], np.float32) for _ in range(2))
            cuda.launch(cuda.Kernel(file, tiles), (Q, K, V, O, m, l, Nq, Nk, 0.125, causal, Hq, Hkv))
            m, l = cupy.asnumpy(m), cupy.asnumpy(l)
            L = m + np.log(np.where(l == 0, 1, l))
        try:
            gpu.compare(cupy.asnumpy(O), L, *(cupy.asnumpy(x) for x in (Q, K, V)), 0.125, causal)
        except AssertionError as error:
            print(error)
            right = False
    print("SMALL SHAPES RIGHT" if right else "SMALL SHAPES WRONG")


def part_sanitizer(say: Any) -> dict[str, Any]:
    """Both files, one after the other: all tools clean on each, all faults found."""
    merged: dict[str, Any] = {"clean": {}, "planted": {}, "all clean": True, "all planted found": True}
    for file, faults in ((FLASH, FAULTS), (STANDARD, STANDARD_FAULTS)):
        done = gpu.part_sanitizer(say, file, faults, __file__)
        for kind in ("clean", "planted"):
            merged[kind] |= {f"{file}, {title}": found for title, found in done[kind].items()}
        for flag in ("all clean", "all planted found"):
            merged[flag] = merged[flag] and done[flag]
    return merged


def part_times(say: Any) -> dict[str, Any]:
    import cupy

    copy = gpu.copy_bandwidth(say)
    rows: list[dict[str, Any]] = []
    for d, N in SIZES:
        B, H = 16384 // N, 2048 // d
        Q, K, V = (cupy.random.standard_normal((B, H, N, d), dtype=np.float32) for _ in range(3))
        O, m, l = cupy.empty_like(Q), cupy.empty((B, H, N), np.float32), cupy.empty((B, H, N), np.float32)
        sizes = {"B": B, "Hq": H, "Hkv": H, "Nq": N, "Nk": N, "d": d}

        def row(
            what: str, times: Any, moved: int = 0, d: int = d, N: int = N, work: float = 4 * B * H * N * N * d
        ) -> None:
            median = float(np.median(times))
            made = {"d": d, "N": N, "what": what, "ms": median, "ms min, max": (float(min(times)), float(max(times)))}
            made |= {"runs": len(times), "TFLOP/s": work / median / 1e9 if work else None, "GB by formula": moved / 1e9}
            rows.append(made)
            say(
                f"d={d} N={N} {what}: {median:.3f} ms, {work / median / 1e9:.2f} TFLOP/s, {moved / 1e9:.2f} GB by formula"
            )

        def moved(algorithm: str, Br: int, Bc: int, sizes: dict[str, int] = sizes) -> Any:
            return traffic_model(algorithm, **sizes, Br=Br, Bc=Bc)

        for Br, Bc, threads in ((32, 32, 256), (32, 32, 512), (64, 64, 512)):
            template = {"Br": Br, "Bc": Bc, "D": d}
            for file, out in ((FLASH, (O, m, l)), ("flash_attention_2", (O, l))):
                try:
                    kernel = cuda.Kernel(file, template, block=threads)
                    done = cuda.launch(kernel, (Q, K, V, *out, N, N, 1 / np.sqrt(d), 0, H, H), repeat=5)
                    times = done.times.milliseconds
                    model = moved(file, Br, Bc)
                    gb = model.bytes_read + model.bytes_written
                    row(f"{file} Br={Br} Bc={Bc}, {threads} threads", times, gb)
                except Exception as error:
                    say(f"{file} Br={Br} Bc={Bc}: {type(error).__name__}: {error}")
        try:
            standard_rows(row, moved, Q, K, V, cupy)
        except Exception as error:
            say(f"{STANDARD}: {type(error).__name__}: {error}")
        cupy.get_default_memory_pool().free_all_blocks()
        peers(say, row, Q, K, V)
    return {"copy TB/s": copy, "rows": rows}


def standard_rows(row: Any, moved: Any, Q: Any, K: Any, V: Any, cupy: Any) -> None:
    """The three kernels of standard attention, each timed alone, and their sum."""
    B, H, N, d = Q.shape
    S, P, O = cupy.empty((B, H, N, N), np.float32), cupy.empty((B, H, N, N), np.float32), cupy.empty_like(Q)
    tiles = {"Br": 64, "Bc": 64, "D": d} if d <= 64 else {"Br": 32, "Bc": 32, "D": d}
    arguments = (
        (tiles, (Q, K, S, N, N, 1 / np.sqrt(d), 0, H, H), 512),
        (softmax_template(4, N), (S, P, N, N, H), 128),
        (tiles, (P, V, O, N, N, H, H), 512),
    )
    e = moved(
        STANDARD, tiles["Br"], tiles["Bc"]
    ).elements  # (read, written) by tensor: each kernel moves a part of them
    parts = (e["Q"][0] + e["K"][0] + e["S"][1], e["S"][0] + e["P"][1], e["P"][0] + e["V"][0] + e["O"][1])
    work = 2 * B * H * N * N * d
    total: Any = 0
    for name, (template, args, threads), part in zip(KERNELS, arguments, parts, strict=True):
        kernel = cuda.Kernel(STANDARD, template, function=name, block=threads)
        times = np.array(cuda.launch(kernel, args, repeat=5).times.milliseconds)
        row(name, times, 4 * part, work=0 if name == "standard_softmax" else work)
        total = total + times
    row(f"{STANDARD}, the sum, Br={tiles['Br']} Bc={tiles['Bc']}", total, 4 * sum(parts))


def peers(say: Any, row: Any, Q: Any, K: Any, V: Any) -> None:
    """PyTorch's attention on the same arrays: MATH is standard attention with cuBLAS."""
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        return
    q, k, v = (torch.from_dlpack(x) for x in (Q, K, V))
    for name in ("EFFICIENT_ATTENTION", "MATH"):
        try:
            with sdpa_kernel(getattr(SDPBackend, name)):
                attend = torch.nn.functional.scaled_dot_product_attention
                times, out = gpu.torch_times(torch, lambda attend=attend: attend(q, k, v), 11)
            row(f"torch {name}", times)
            del out
        except Exception as error:
            say(f"torch {name}: {type(error).__name__}: {error}")
    torch.cuda.empty_cache()


def times_table(times: dict[str, Any]) -> list[str]:
    """The report's lines: a table with what the formulas say was moved, and how fast that would be."""
    lines = ["", f"Device copy {times['copy TB/s']:.2f} TB/s; float32, forward, B · N = 16384, H · d = 2048.", ""]
    lines += ["| d | N | what | ms | TFLOP/s | GB by formula | TB/s of them |", "| --- " * 7 + "|"]
    for r in times["rows"]:
        gb = r["GB by formula"]
        moved = f"{gb:.2f} | {gb / r['ms']:.2f}" if gb else " | "
        work = f"{r['TFLOP/s']:.2f}" if r["TFLOP/s"] else ""
        lines.append(f"| {r['d']} | {r['N']} | {r['what']} | {r['ms']:.3f} | {work} | {moved} |")
    return lines


if __name__ == "__main__":
    parts = {"checks": part_checks, "times": part_times, "sanitizer": part_sanitizer}
    sys.exit(gpu.main(parts, name="gpu_flash_attention_1", text=__doc__, small=sanitize_run, times=times_table))
