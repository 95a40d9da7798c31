"""Check and time the kernels of the RoPE chapter on this machine's GPU, in one run: `python benchmarks/gpu_rope.py --out FOLDER`.

Needs CuPy, and uses PyTorch and compute-sanitizer where they are. Three parts, each reported even when another fails:

1. checks      rope.cu in both forms, and flash_attention_2_rope.cu, against float64 over many shapes, outputs poisoned with NaN
               between guard values; the latter also with tables that turn nothing, where it must be flash_attention_2.cu
2. times       CUDA events, medians: both forms over tiles and threads beside PyTorch and the copy bandwidth; FlashAttention-2 fused and not
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
from flashviz.programs.angles import rope_tables

FILE, FUSED = "rope", "flash_attention_2_rope"
KERNELS = {"halves": "rope_rows", "pairs": "rope_pairs_rows"}
SMALL = (
    (1, 1, 33),
    (2, 3, 5),
    (1, 2, 16),
)  # B, H, N with R=16, D=64: a tail after whole tiles, one short tile, one whole
FAULTS = {  # title: tool, what is replaced, by what
    "x read past its end": ("memcheck", "n < N ? x[", "n <= N ? x["),
    "cos read past its end": ("memcheck", "n < N ? cos[", "n <= N ? cos["),
    "O written past its end": ("memcheck", "if (n < N) O[", "if (n <= N) O["),
    "O read before it is written": ("initcheck", "= xi[r][z];", "= xi[r][z] + 0.f * O[(long long)n * D + z];"),
    "a barrier for some threads only": ("synccheck", "TRACE(rotate, i);", "if (threadIdx.x % 2) __syncthreads();"),
}
FUSED_FAULTS = {
    "K and its angles read past their end": ("memcheck", "if (k < Nk) {", "if (k <= Nk) {"),
    **{title: fault for title, fault in gpu.FAULTS.items() if not title.startswith("K ")},
}


def oracle(x: Any, positions: Any, pairs: int, form: str, base: float = 10000.0) -> Any:
    """Rotated rows in float64: a pair is a complex number, and turning it is a product."""
    x = np.asarray(x, np.float64)
    d = 2 * pairs
    turn = np.exp(1j * np.asarray(positions, np.float64)[:, None] * base ** (-np.arange(0, d, 2) / d))
    head, out = x[..., :d], x.copy()
    if form == "halves":
        turned = (head[..., :pairs] + 1j * head[..., pairs:]) * turn
        out[..., :d] = np.concatenate([turned.real, turned.imag], -1)
    else:
        turned = (head[..., 0::2] + 1j * head[..., 1::2]) * turn
        out[..., :d] = np.stack([turned.real, turned.imag], -1).reshape(head.shape)
    return out


def rotate(x: Any, form: str, R: int, positions: Any, pairs: int, file: Any = FILE, **how: Any) -> Any:
    """O of a kernel, through a guarded device array; AssertionError when a guard changed."""
    import cupy

    _, H, N, D = x.shape
    O, buffer = gpu.guarded(cupy, x.shape)
    kernel = cuda.Kernel(file, {"R": R, "D": D, "Pairs": pairs}, function=KERNELS[form], **how)
    cuda.launch(kernel, (x, *rope_tables(positions, 2 * pairs), O, N, H))
    edges = cupy.asnumpy(cupy.concatenate((buffer[: gpu.GUARDS], buffer[-gpu.GUARDS :])))
    assert (edges == gpu.GUARD).all(), "a guard value beside O was overwritten"
    return cupy.asnumpy(O)


def error_of(got: Any, want: Any, most: float) -> float:
    """Largest error as a fraction of the bound; AssertionError for what is not finite or past it."""
    assert np.isfinite(got).all(), f"O holds {np.count_nonzero(~np.isfinite(got))} values that are not finite"
    error = float(np.abs(got - want).max() / (gpu.BOUND * max(1.0, most)))
    assert error <= 1, f"O is off by {error:.2f} times the bound"
    return error


def numeric(rng: Any, B: int, H: int, N: int, D: int, pairs: int, R: int, **how: Any) -> tuple[float, float]:
    """The larger error of both forms, as a fraction of the bound."""
    x = rng.standard_normal((B, H, N, D), dtype=np.float32)
    positions = np.arange(N) + int(rng.integers(0, 100_000))
    worst = 0.0
    for form in KERNELS:
        got = rotate(x, form, R, positions, pairs, **how)
        worst = max(worst, error_of(got, oracle(x, positions, pairs, form), float(np.abs(x).max())))
        assert (got[..., 2 * pairs :] == x[..., 2 * pairs :]).all(), "an element that is not rotated changed"
    return worst, 0.0


def fused(Q: Any, K: Any, V: Any, Br: int, Bc: int, tables: Any, pairs: int, **how: Any) -> tuple[Any, Any]:
    """O and L of the fused kernel, through guarded device arrays; AssertionError when a guard changed."""
    import cupy

    _, Hq, Nq, D = Q.shape
    Hkv, Nk = K.shape[1:3]
    scale, causal = how.pop("scale", None), how.pop("causal", False)
    (O, O_all), (L, L_all) = gpu.guarded(cupy, Q.shape), gpu.guarded(cupy, Q.shape[:3])
    kernel = cuda.Kernel(FUSED, {"Br": Br, "Bc": Bc, "D": D, "Pairs": pairs}, **how)
    scale = 1 / np.sqrt(D) if scale is None else scale
    cuda.launch(kernel, (Q, K, V, *tables, O, L, Nq, Nk, scale, causal, Hq, Hkv))
    for buffer in (O_all, L_all):
        edges = cupy.asnumpy(cupy.concatenate((buffer[: gpu.GUARDS], buffer[-gpu.GUARDS :])))
        assert (edges == gpu.GUARD).all(), "a guard value beside O or L was overwritten"
    return cupy.asnumpy(O), cupy.asnumpy(L)


def unturned(Q: Any, K: Any, V: Any, Br: int, Bc: int, **how: Any) -> tuple[Any, Any]:
    """The fused kernel with angles of 0: attention as it is. An odd head dimension gets a column of zeros."""
    D = Q.shape[-1]
    if how.get("scale") is None:
        how["scale"] = 1 / np.sqrt(D)
    if D % 2:
        Q, K, V = (np.pad(x, ((0, 0),) * 3 + ((0, 1),)) for x in (Q, K, V))
    pairs = Q.shape[-1] // 2
    tables = [f((x.shape[2], pairs), np.float32) for x in (Q, K) for f in (np.ones, np.zeros)]
    O, L = fused(Q, K, V, Br, Bc, tables, pairs, **how)
    return O[..., :D], L


def fused_numeric(rng: Any, sizes: Any, blocks: Any, causal: bool, part: bool) -> tuple[float, float]:
    """Errors of O and L, as fractions of the bound, with Q and K rotated in float64 for the oracle."""
    Q, K, V = gpu.random(rng, *sizes)
    Nq, Nk, D = sizes[3:]
    pairs = D // 4 if part else D // 2
    at = (np.arange(Nq) + Nk - Nq, np.arange(Nk))
    tables = [t for positions in at for t in rope_tables(positions, 2 * pairs)]
    q, k = (oracle(x, positions, pairs, "halves") for x, positions in zip((Q, K), at, strict=True))
    O, L = fused(Q, K, V, *blocks, tables, pairs, causal=causal)
    return gpu.compare(O, L, q, k, V, None, causal)


def part_checks(say: Any) -> dict[str, Any]:
    rng = np.random.default_rng(2104)
    check = gpu.Checks(say)
    for N in (1, 2, 3, 15, 16, 17, 33, 257, 1000):
        for D, pairs in ((2, 1), (8, 4), (64, 32), (128, 64)):
            check(f"N={N} D={D} Pairs={pairs}", lambda a=(2, 3, N, D, pairs, 16): numeric(rng, *a))
    for D, pairs, R in ((8, 2, 4), (10, 5, 3), (80, 16, 16), (128, 16, 16), (3, 1, 4), (128, 64, 1), (256, 32, 32)):
        for N in (1, 33, 100):
            check(f"N={N} D={D} Pairs={pairs} R={R}", lambda a=(1, 2, N, D, pairs, R): numeric(rng, *a))
    check("B01", lambda: known(rng))
    check("B04", lambda: precise(rng))
    check("B06 equal rows in 4 heads of 4 tokens", lambda: equal_rows(rng))
    check("A14 views", lambda: views(rng))
    check("A15 elements past 2^31", far)
    check("thread counts", lambda: threads(rng))
    check("carve", carve)
    one = np.zeros((1, 1, 1, 8), np.float32)
    check("C01 float64", lambda: refused("float64", one.astype(np.float64), 4, 4))
    check("C03 too much shared memory", lambda: refused("fits (", np.zeros((1, 1, 1, 256), np.float32), 512, 128))
    gpu.attention_checks(check, rng, unturned)
    for nq, nk in ((1, 1), (33, 33), (65, 65), (257, 257), (1, 257), (5, 70), (70, 5), (257, 33)):
        for causal in (False, True):
            for D, blocks, part in (
                (64, (32, 32), False),
                (64, (64, 32), True),
                (128, (32, 32), False),
                (8, (4, 8), False),
            ):
                sizes = (2, 4, 2, nq, nk, D)
                title = f"fused {sizes} blocks {blocks} causal {causal} partial {part}"
                check(title, lambda a=(sizes, blocks, causal, part): fused_numeric(rng, *a))
    return check.result()


def known(rng: Any) -> None:
    x = np.array([[[[1, 0, 0, 0]]]], np.float32)
    for form, want in (("halves", [0.5403, 0, 0.8415, 0]), ("pairs", [0.5403, 0.8415, 0, 0])):
        np.testing.assert_allclose(rotate(x, form, 4, [1], 2)[0, 0, 0], want, atol=5e-5)


def precise(rng: Any) -> None:
    x = np.zeros((1, 1, 1, 32), np.float32)
    x[..., 1] = 1
    np.testing.assert_allclose(rotate(x, "halves", 4, [1857], 16)[0, 0, 0, 1], 0.3067, atol=5e-5)


def equal_rows(rng: Any) -> None:
    x = np.broadcast_to(rng.standard_normal(8, dtype=np.float32), (1, 4, 4, 8))
    for form in KERNELS:
        got = rotate(x, form, 4, np.arange(4), 4)
        assert (got == got[:, :1]).all(), f"{form}: heads differ"
        assert (got[:, :, 1:] != got[:, :, :1]).any(-1).all(), f"{form}: tokens do not"


def views(rng: Any) -> None:
    packed = rng.standard_normal((2, 70, 3, 4, 64), dtype=np.float32)
    for x in (packed[:, :, 1].transpose(0, 2, 1, 3), packed[:, ::-1, 0].transpose(0, 2, 1, 3)):
        for form in KERNELS:
            dense = rotate(np.ascontiguousarray(x), form, 16, np.arange(70), 32)
            assert (rotate(x, form, 16, np.arange(70), 32) == dense).all(), "a view gives another result than its copy"


def far() -> None:
    """65 heads of 2^19 rows of 64: the last one's elements lie past 2^31."""
    import cupy

    H, N, D = 65, 1 << 19, 64
    x, O = cupy.zeros((1, H, N, D), np.float32), cupy.empty((1, H, N, D), np.float32)
    row = np.arange(1, D + 1, dtype=np.float32)
    x[0, -1, -1] = cupy.asarray(row)
    cos, sin = rope_tables(np.arange(N), D)
    for form in KERNELS:
        O.fill(np.nan)
        cuda.launch(cuda.Kernel(FILE, {"R": 16, "D": D, "Pairs": 32}, function=KERNELS[form]), (x, cos, sin, O, N, H))
        got = cupy.asnumpy(O[0, -1, -2:])
        assert (got[0] == 0).all(), f"{form}: the last row but one is wrong"
        error_of(got[1:], oracle(row[None], [N - 1], 32, form), float(D))
    del x, O
    cupy.get_default_memory_pool().free_all_blocks()


def threads(rng: Any) -> None:
    x = rng.standard_normal((1, 2, 70, 64), dtype=np.float32)
    for form in KERNELS:
        first = rotate(x, form, 16, np.arange(70), 32)
        for block in (32, 96, 128, 512, 1024):
            assert (rotate(x, form, 16, np.arange(70), 32, block=block) == first).all(), (
                f"{form}: {block} threads differ"
            )


def carve() -> None:
    """The kernels carve as many bytes as the launcher gives them."""
    x = np.zeros((1, 1, 1, 10), np.float32)
    with tempfile.TemporaryDirectory() as folder:
        for n, form in enumerate(KERNELS):
            marker = "    load_x<R>(xi, x, i, N);\n"
            text = "    if (threadIdx.x == 0) O[0] = carve.used * 4;\n    return;\n"
            path = gpu.planted(Path(folder), form, marker, text + marker, n, FILE)
            import cupy

            O = cupy.zeros((1, 1, 1, 10), np.float32)
            sizes = {"R": 3, "D": 10, "Pairs": 4}
            kernel = cuda.Kernel(path, sizes, function=KERNELS[form])
            cuda.launch(kernel, (x, *rope_tables([0], 8), O, 1, 1))
            got, want = float(cupy.asnumpy(O)[0, 0, 0, 0]), cuda.find(FILE, KERNELS[form]).shared_bytes(sizes)
            assert got == want, f"{form} carves {got}, the launcher gives {want}"


def refused(words: str, x: Any, R: int, pairs: int) -> None:
    """A launch that must be refused, with these words."""
    message = ""
    try:
        rotate(x, "halves", R, np.arange(x.shape[2]), pairs)
    except (cuda.LaunchError, cuda.ArgumentError) as error:
        message = str(error)
    assert words in message, f"the message lacks {words!r}: {message or 'it was not refused'}"


def sanitize_run(file: str) -> None:
    """The small shapes; without CuPy's memory pool, so that each array ends where its memory does."""
    import cupy

    cupy.cuda.set_allocator(None)
    rng = np.random.default_rng(1)
    right = True
    if cuda.find(file).kernels == (FUSED,):
        for B, Hq, Hkv, Nq, Nk, causal in gpu.SMALL:
            arrays = gpu.random(rng, B, Hq, Hkv, Nq, Nk, 64)
            at = (np.arange(Nq) + Nk - Nq, np.arange(Nk))
            tables = [cupy.asarray(t) for positions in at for t in rope_tables(positions, 64)]
            q, k = (oracle(x, positions, 32, "halves") for x, positions in zip(arrays, at, strict=False))
            Q, K, V = (cupy.asarray(x) for x in arrays)
            O, L = cupy.empty(Q.shape, np.float32), cupy.empty(Q.shape[:3], np.float32)
            kernel = cuda.Kernel(file, {"Br": 32, "Bc": 32, "D": 64, "Pairs": 32})
            cuda.launch(kernel, (Q, K, V, *tables, O, L, Nq, Nk, 0.125, causal, Hq, Hkv))
            try:
                gpu.compare(*(cupy.asnumpy(x) for x in (O, L)), q, k, arrays[2], 0.125, causal)
            except AssertionError as error:
                print(error)
                right = False
        print("SMALL SHAPES RIGHT" if right else "SMALL SHAPES WRONG")
        return
    for B, H, N in SMALL:
        x = rng.standard_normal((B, H, N, 64), dtype=np.float32)
        tables = [cupy.asarray(t) for t in rope_tables(np.arange(N), 48)]
        for form, function in KERNELS.items():
            O = cupy.empty(x.shape, np.float32)
            kernel = cuda.Kernel(file, {"R": 16, "D": 64, "Pairs": 24}, function=function, block=64)
            cuda.launch(kernel, (cupy.asarray(x), *tables, O, N, H))
            try:
                error_of(cupy.asnumpy(O), oracle(x, np.arange(N), 24, form), 4.0)
            except AssertionError as error:
                print(f"{form}: {error}")
                right = False
    print("SMALL SHAPES RIGHT" if right else "SMALL SHAPES WRONG")


def part_sanitizer(say: Any) -> dict[str, Any]:
    """Both files, the titles of one after the other's."""
    made = {
        "": gpu.part_sanitizer(say, FILE, FAULTS, __file__),
        "fused, ": gpu.part_sanitizer(say, FUSED, FUSED_FAULTS, __file__),
    }
    out: dict[str, Any] = {
        kind: {f"{start}{title}": row for start, one in made.items() for title, row in one[kind].items()}
        for kind in ("clean", "planted")
    }
    return out | {key: all(one[key] for one in made.values()) for key in ("all clean", "all planted found")}


def part_times(say: Any) -> dict[str, Any]:
    copy = gpu.copy_bandwidth(say)
    made: list[dict[str, Any]] = []
    for work in (rotations, attentions):
        for sizes in {rotations: ((1, 32, 4096, 128), (4, 32, 8192, 128)), attentions: ((64, 1024), (64, 4096))}[work]:
            try:
                made += work(say, copy, *sizes)
            except Exception as error:
                say(f"{work.__name__} {sizes}: {type(error).__name__}: {error}")
    return {"copy TB/s": copy, "rows": made}


def row(say: Any, sizes: str, what: str, times: Any, nbytes: int = 0, floor: float | None = None) -> dict[str, Any]:
    """One line of the report; ``nbytes`` is what the algorithm must move."""
    median = float(np.median(times))
    rate = nbytes / median / 1e9 if nbytes else None
    say(f"{sizes} {what}: {median:.3f} ms" + (f", {rate:.2f} TB/s" if rate else ""))
    spread = (float(min(times)), float(max(times)))
    return {"sizes": sizes, "what": what, "ms": median, "ms min, max": spread, "TB/s": rate, "floor, ms": floor}


def rotations(say: Any, copy: float, B: int, H: int, N: int, D: int) -> list[dict[str, Any]]:
    """Both forms over tiles and threads, and PyTorch as models write it."""
    import cupy

    x, O = cupy.random.standard_normal((B, H, N, D), dtype=np.float32), cupy.empty((B, H, N, D), np.float32)
    cos, sin = (cupy.asarray(t) for t in rope_tables(np.arange(N), D))
    nbytes, sizes, made = 2 * x.nbytes + 2 * cos.nbytes, f"B={B} H={H} N={N} d={D}", []
    floor = nbytes / copy / 1e9
    for R, block in ((4, 128), (4, 256), (16, 256), (16, 512), (32, 512)):
        for form, function in KERNELS.items():
            kernel = cuda.Kernel(FILE, {"R": R, "D": D, "Pairs": D // 2}, function=function, block=block)
            done = cuda.launch(kernel, (x, cos, sin, O, N, H), repeat=11)
            made.append(row(say, sizes, f"{form}, R={R}, {block} threads", done.times.milliseconds, nbytes, floor))
    try:
        made += torch_rotations(say, sizes, nbytes, floor, x, cos, sin, O)
    except ImportError:
        say("no PyTorch")
    del x, O
    cupy.get_default_memory_pool().free_all_blocks()
    return made


def torch_rotations(
    say: Any, sizes: str, nbytes: int, floor: float, x: Any, cos: Any, sin: Any, O: Any
) -> list[dict[str, Any]]:
    """Both forms as models write them in PyTorch, and how far their results are from the kernels'."""
    import torch

    made, (B, H, N, D), half = [], x.shape, x.shape[-1] // 2
    X, C, S = (torch.from_dlpack(t) for t in (x, cos, sin))
    C2, S2, turn = torch.cat([C, C], -1), torch.cat([S, S], -1), torch.complex(C, S)

    def eager() -> Any:
        return X * C2 + torch.cat([-X[..., half:], X[..., :half]], -1) * S2

    def as_complex() -> Any:
        return torch.view_as_real(torch.view_as_complex(X.view(B, H, N, half, 2)) * turn).view(B, H, N, D)

    for form, what, work in (
        ("halves", "torch, x cos + rotate_half(x) sin", eager),
        ("pairs", "torch, complex", as_complex),
    ):
        times, out = gpu.torch_times(torch, work)
        made.append(row(say, sizes, what, times, nbytes, floor))
        kernel = cuda.Kernel(FILE, {"R": 16, "D": D, "Pairs": half}, function=KERNELS[form])
        cuda.launch(kernel, (x, cos, sin, O, N, H))
        made[-1]["largest difference from the kernel"] = float((out - torch.from_dlpack(O)).abs().max())
        del out
    torch.cuda.empty_cache()
    return made


def attentions(say: Any, copy: float, d: int, N: int) -> list[dict[str, Any]]:
    """FlashAttention-2 alone, with the rotation in its loads, and the rotations of Q and K before it."""
    import cupy

    B, H = 16384 // N, 2048 // d
    Q, K, V = (cupy.random.standard_normal((B, H, N, d), dtype=np.float32) for _ in range(3))
    O, L, turned = cupy.empty_like(Q), cupy.empty((B, H, N), np.float32), cupy.empty_like(Q)
    cos, sin = (cupy.asarray(t) for t in rope_tables(np.arange(N), d))
    sizes, made = f"B={B} H={H} N={N} d={d}", []
    values = {"Q": Q, "K": K, "V": V, "O": O, "L": L, "Nq": N, "Nk": N, "scale": 1 / np.sqrt(d), "causal": 0}
    values |= {"Hq": H, "Hkv": H, "kv_len": N, "window": 0, "cq": cos, "sq": sin, "ck": cos, "sk": sin}
    for Br, Bc, block in ((32, 32, 512), (64, 64, 512)):
        for file in ("flash_attention_2", FUSED):
            template = {"Br": Br, "Bc": Bc, "D": d} | ({"Pairs": d // 2} if file == FUSED else {})
            names = [p.name for p in cuda.find(file).signature.parameters]
            kernel = cuda.Kernel(file, template, block=block)
            done = cuda.launch(kernel, {name: values[name] for name in names}, repeat=11)
            made.append(row(say, sizes, f"{file} Br={Br} Bc={Bc}, {block} threads", done.times.milliseconds))
    kernel = cuda.Kernel(FILE, {"R": 16, "D": d, "Pairs": d // 2}, function=KERNELS["halves"], block=256)
    done = cuda.launch(kernel, (Q, cos, sin, turned, N, H), repeat=11)
    made.append(row(say, sizes, "rotating Q (and as long again for K)", done.times.milliseconds))
    return made


def times_table(times: dict[str, Any]) -> list[str]:
    """The report's lines."""
    lines = [
        "",
        f"Device copy {times['copy TB/s']:.2f} TB/s. float32; TB/s of what must move: x, O and the tables once.",
        "",
    ]
    lines += ["| sizes | what | ms | TB/s | the same bytes at copy speed, ms |", "| --- | --- | --- | --- | --- |"]
    for r in times["rows"]:
        rate, floor = ("" if r[key] is None else f"{r[key]:.{n}f}" for key, n in (("TB/s", 2), ("floor, ms", 3)))
        lines.append(f"| {r['sizes']} | {r['what']} | {r['ms']:.3f} | {rate} | {floor} |")
    return lines


if __name__ == "__main__":
    parts = {"checks": part_checks, "times": part_times, "sanitizer": part_sanitizer}
    sys.exit(gpu.main(parts, name="gpu_rope", text=__doc__, small=sanitize_run, times=times_table))
