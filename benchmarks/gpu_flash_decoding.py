"""Check and time `kernels/flash_decoding.cu` on this machine's GPU: `python benchmarks/gpu_flash_decoding.py --out FOLDER`.

The parts are those of `benchmarks/gpu.py`, for the split kernel and the combine kernel together:

1. checks      O and L, and the partial Os and Ls, against float64; all four poisoned with NaN between guard values
2. times       both kernels over the number of splits, beside PyTorch's attention and the time that memory alone would take
3. sanitizer   compute-sanitizer's four tools, and on copies with planted faults: every barrier deleted in turn, and others

The report's last lines are the JSON that the chapter plots: store them as `flashviz/_measured/flash_decoding.json`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import gpu
import numpy as np

from flashviz import cuda

FILE, SPLIT, COMBINE = "flash_decoding", "flash_decoding_split", "flash_decoding_combine"
SMALL = (  # B, Hq, Hkv, Nq, Nk, causal, in 4 splits: a tail, several tiles a split, grouped heads, splits without keys
    (1, 1, 1, 1, 257, False),
    (2, 3, 1, 5, 200, True),
    (1, 6, 2, 5, 3, True),
)
FAULTS = {  # title: tool, what is replaced, by what
    "K read past its end": ("memcheck", "k < Nk ? K[", "k <= Nk ? K["),
    "Ls written past its end": ("memcheck", ") Ls[r] = m[r]", ") Ls[r + 1] = m[r]"),
    "O written past its end": ("memcheck", "O[e] = l[r] == 0.f", "O[e + D] = l[r] == 0.f"),
    "a split without keys that writes nothing": ("initcheck", "TRACE(store_partial, s);", "if (first == last) return;"),
    "a barrier for some threads only": (
        "synccheck",
        "TRACE(store_partial, s);",
        "if (threadIdx.x % 2) __syncthreads();",
    ),
}
CASES = (  # B, Hq, Hkv, Nk, Bc: one query of dimension 128 each
    (1, 8, 8, 16384, 64),
    (1, 8, 8, 131072, 64),
    (1, 8, 8, 131072, 32),
    (1, 32, 8, 131072, 64),
    (16, 8, 8, 8192, 64),
)
SPLITS = (1, 2, 4, 8, 16, 32, 64, 128)


def decode(
    q: Any, K: Any, V: Any, splits: int, Br: int, Bc: int, *, causal: bool = False, scale: Any = None, **how: Any
) -> list[Any]:
    """O, L, Os and Ls of the two kernels, through guarded device arrays; AssertionError when a guard changed."""
    import cupy

    B, Hq, Nq, D = q.shape
    Hkv, Nk = K.shape[1:3]
    shapes = {"O": q.shape, "L": q.shape[:3], "Os": (splits, *q.shape), "Ls": (splits, B, Hq, Nq)}
    arrays, buffers = {}, {}
    for name, shape in shapes.items():
        arrays[name], buffers[name] = gpu.guarded(cupy, shape)
    O, L, Os, Ls = arrays.values()
    file, limits = how.pop("file", FILE), how.pop("limits", ())
    scale = 1 / np.sqrt(D) if scale is None else scale
    split = cuda.Kernel(file, {"Br": Br, "Bc": Bc, "D": D}, function=SPLIT, **how)
    cuda.launch(split, (q, K, V, Os, Ls, Nq, Nk, scale, causal, Hq, Hkv, splits, *limits))
    combine = cuda.Kernel(file, {"Splits": splits, "Br": Br, "D": D}, function=COMBINE, **how)
    cuda.launch(combine, (Os, Ls, O, L, Nq, Hq, Hkv))
    for name, buffer in buffers.items():
        edges = cupy.asnumpy(cupy.concatenate((buffer[: gpu.GUARDS], buffer[-gpu.GUARDS :])))
        assert (edges == gpu.GUARD).all(), f"a guard value beside {name} was overwritten"
    return [cupy.asnumpy(x) for x in (O, L, Os, Ls)]


def numeric(rng: Any, sizes: Any, splits: int, Br: int, Bc: int, **how: Any) -> tuple[float, float]:
    """Errors of O and L, as fractions of the bound; the partial answers are held against float64 as well."""
    q, K, V = gpu.random(rng, *sizes)
    O, L, Os, Ls = decode(q, K, V, splits, Br, Bc, **how)
    scale, causal = how.get("scale"), how.get("causal", False)
    if sizes[4] == 1 and not causal:
        assert (np.repeat(V, sizes[1] // sizes[2], axis=1) == O).all(), "with one key O is not V exactly"
    Nk, tiles = sizes[4], -(-sizes[4] // Bc)
    each = -(-tiles // splits) * Bc
    for s in range(splits):
        keys = slice(min(s * each, Nk), min((s + 1) * each, Nk))
        if keys.start == keys.stop:
            assert (Os[s] == 0).all(), f"split {s} has no key and Os is not 0"
            assert np.isneginf(Ls[s]).all(), f"split {s} has no key and Ls is not -inf"
        elif not causal:
            gpu.compare(Os[s], Ls[s], q, K[:, :, keys], V[:, :, keys], scale, False)
    return gpu.compare(O, L, q, K, V, scale, causal)


def part_checks(say: Any) -> dict[str, Any]:
    rng = np.random.default_rng(2310)
    check = gpu.Checks(say)
    for nq, nk in ((1, 1), (1, 5), (1, 31), (1, 33), (1, 257), (5, 3), (5, 70), (5, 257), (3, 1000)):
        for splits in (1, 2, 4, 7):
            for causal in (False, True):
                sizes = (2, 6, 2, nq, nk, 64)
                check(
                    f"Nq={nq} Nk={nk} in {splits}, causal {causal}",
                    lambda a=(sizes, splits, 16, 32), c=causal: numeric(rng, *a, causal=c),
                )
    for title, sizes, splits, Br, Bc in (
        ("A12 one head", (1, 1, 1, 1, 257, 32), 2, 1, 32),
        ("A12 several heads", (2, 3, 3, 5, 257, 32), 2, 5, 32),
        ("long", (1, 2, 2, 1, 10000, 128), 128, 1, 64),
        ("grouped", (2, 32, 4, 1, 777, 128), 8, 8, 32),
        ("tiny tiles", (1, 1, 1, 1, 16, 8), 4, 1, 4),
        ("odd sizes", (2, 2, 1, 3, 100, 40), 3, 7, 9),
    ):
        check(title, lambda a=(sizes, splits, Br, Bc): numeric(rng, *a))
    for scale in (0.0, 0.3, -0.2):
        check(f"scale {scale}", lambda s=scale: numeric(rng, (1, 2, 2, 3, 70, 64), 4, 16, 32, causal=True, scale=s))

    def known(q: Any, K: Any, V: Any, want: Any, splits: int, L_want: Any = None, **how: Any) -> None:
        arrays = [np.asarray(x, np.float32)[None, None] for x in (q, K, V)]
        O, L = decode(*arrays, splits, 8, 2, scale=1.0, **how)[:2]
        np.testing.assert_allclose(O[0, 0], want, atol=1e-6)
        if L_want is not None:
            np.testing.assert_allclose(L[0, 0], L_want, atol=1e-6)

    one = np.ones
    for splits in (1, 2, 5):
        check(
            f"A01 keys of -10 in {splits}",
            lambda s=splits: known(one((1, 1)), -10 * one((5, 1)), one((5, 1)), [[1]], s),
        )
        check(
            f"A10 base of L in {splits}",
            lambda s=splits: known(one((1, 1)), 0 * one((8, 1)), one((8, 1)), [[1]], s, [np.log(8)]),
        )
        for (nq, nk), want in {(2, 5): [2.5, 3], (5, 2): [0, 0, 0, 1, 1.5], (1, 8): [4.5]}.items():
            L_want = [np.log(max(0, i + 1 + nk - nq)) if i + 1 + nk - nq > 0 else -np.inf for i in range(nq)]
            args = (np.zeros((nq, 1)), np.zeros((nk, 1)), np.arange(1, nk + 1)[:, None], np.array(want)[:, None])
            check(f"A04 {nq, nk} in {splits}", lambda a=args, s=splits, w=L_want: known(*a, s, w, causal=True))
    check("one split and many", lambda: one_and_many(rng))
    check("A14 views", lambda: views(rng))
    check("A15 offsets past 2^31", far)
    check("thread counts", lambda: threads(rng))
    check("carve", carve)
    return check.result()


def one_and_many(rng: Any) -> None:
    """Any number of splits gives one split's result, within the bound."""
    q, K, V = gpu.random(rng, 1, 6, 2, 2, 500, 64)
    O, L = decode(q, K, V, 1, 16, 32)[:2]
    for splits in (2, 4, 7):
        O2, L2 = decode(q, K, V, splits, 16, 32)[:2]
        assert np.abs(O - O2).max() <= gpu.BOUND * max(1, np.abs(V).max()), f"O in {splits} splits"
        assert np.abs(L - L2).max() <= gpu.BOUND * max(1, np.abs(L).max()), f"L in {splits} splits"


def views(rng: Any) -> None:
    """q, K and V as slices of one array give the bits of contiguous copies."""
    packed = rng.standard_normal((2, 70, 3, 2, 64), dtype=np.float32)
    q, K, V = (packed[:, :, n].transpose(0, 2, 1, 3) for n in range(3))
    q = q[:, :, :5]
    dense = [np.ascontiguousarray(x) for x in (q, K, V)]
    for a, b in zip(decode(q, K, V, 4, 16, 32), decode(*dense, 4, 16, 32), strict=True):
        assert (a == b).all(), "views give another result than contiguous copies"


def far() -> None:
    """Two heads of 2^24 + 5 keys: the last one's elements lie past 2^31. Its last key takes the whole weight."""
    import cupy

    n = (1 << 24) + 5
    K, V = (cupy.zeros((1, 2, n, 64), np.float32) for _ in range(2))
    K[0, 1, -1], V[0, 1, -1] = 10, cupy.arange(64)
    q = np.ones((1, 2, 1, 64), np.float32)
    O = decode(q, K, V, 128, 1, 64)[0]
    del K, V
    cupy.get_default_memory_pool().free_all_blocks()
    assert (O[0, 0] == 0).all(), "the first head reads what is not its own"
    assert (O[0, 1, 0] == np.arange(64)).all(), "the last key of the second head was not found"


def threads(rng: Any) -> None:
    """The number of threads does not change a bit."""
    q, K, V = gpu.random(rng, 1, 6, 2, 5, 300, 64)
    first = decode(q, K, V, 4, 16, 32)
    for block in (32, 96, 128, 1024):
        for a, b in zip(first, decode(q, K, V, 4, 16, 32, block=block), strict=True):
            assert (a == b).all(), f"{block} threads give another result than 256"


def carve() -> None:
    """The kernels carve as many bytes as the launcher gives them."""
    sizes = {SPLIT: {"Br": 16, "Bc": 32, "D": 64}, COMBINE: {"Splits": 4, "Br": 16, "D": 64}}
    x, K = np.zeros((1, 1, 1, 64), np.float32), np.zeros((1, 1, 1, 64), np.float32)
    with tempfile.TemporaryDirectory() as folder:
        for function, output, marker in (
            (SPLIT, "Ls", "    // The tiles of this split"),
            (COMBINE, "L", "    TRACE(load_l"),
        ):
            text = f"    if (threadIdx.x == 0) {output}[0] = carve.used * 4; return;\n{marker}"
            path = gpu.planted(Path(folder), function, marker, text, 0, FILE)
            Os, Ls, L = (
                np.zeros((4, 1, 1, 1, 64), np.float32),
                np.zeros((4, 1, 1, 1), np.float32),
                np.zeros((1, 1, 1), np.float32),
            )
            kernel = cuda.Kernel(path, sizes[function], function=function)
            if function == SPLIT:
                cuda.launch(kernel, (x, K, K, Os, Ls, 1, 1, 1.0, 0, 1, 1, 4))
            else:
                cuda.launch(kernel, (Os, Ls, x.copy(), L, 1, 1, 1))
            got = Ls[0, 0, 0, 0] if function == SPLIT else L[0, 0, 0]
            want = cuda.find(FILE, function).shared_bytes(sizes[function])
            assert got == want, f"{function} carves {got}, the launcher gives {want}"


def sanitize_run(file: str) -> None:
    """The small shapes; without CuPy's memory pool, so that each array ends where its memory does."""
    import cupy

    cupy.cuda.set_allocator(None)
    rng = np.random.default_rng(1)
    right = True
    for B, Hq, Hkv, Nq, Nk, causal in SMALL:
        q, K, V = (cupy.asarray(x) for x in gpu.random(rng, B, Hq, Hkv, Nq, Nk, 64))
        O, L = cupy.empty(q.shape, np.float32), cupy.empty(q.shape[:3], np.float32)
        Os, Ls = cupy.empty((4, *q.shape), np.float32), cupy.empty((4, *q.shape[:3]), np.float32)
        split = cuda.Kernel(file, {"Br": 16, "Bc": 32, "D": 64}, function=SPLIT)
        cuda.launch(split, (q, K, V, Os, Ls, Nq, Nk, 0.125, causal, Hq, Hkv, 4))
        combine = cuda.Kernel(file, {"Splits": 4, "Br": 16, "D": 64}, function=COMBINE)
        cuda.launch(combine, (Os, Ls, O, L, Nq, Hq, Hkv))
        try:
            gpu.compare(*(cupy.asnumpy(x) for x in (O, L, q, K, V)), 0.125, causal)
        except AssertionError as error:
            print(error)
            right = False
    print("SMALL SHAPES RIGHT" if right else "SMALL SHAPES WRONG")


def part_times(say: Any) -> dict[str, Any]:
    copy = gpu.copy_bandwidth(say)
    found = cuda.status()
    rows = []
    for B, Hq, Hkv, Nk, Bc in CASES:
        try:
            rows.append(series(say, copy, B, Hq, Hkv, Nk, Bc))
        except Exception as error:
            say(f"B={B} Hq={Hq} Hkv={Hkv} Nk={Nk} Bc={Bc}: {type(error).__name__}: {error}")
    machine = {"gpu": found.device, "multiprocessors": found.multiprocessors, "cupy": found.cupy}
    return {"copy TB/s": round(copy, 3), "date": gpu.machine()["date"], **machine, "rows": rows}


def series(say: Any, copy: float, B: int, Hq: int, Hkv: int, Nk: int, Bc: int, d: int = 128) -> dict[str, Any]:
    """Both kernels over the number of splits: medians in milliseconds, each kernel timed alone."""
    import cupy

    q = cupy.random.standard_normal((B, Hq, 1, d), dtype=np.float32)
    K, V = (cupy.random.standard_normal((B, Hkv, Nk, d), dtype=np.float32) for _ in range(2))
    made: dict[str, Any] = {"B": B, "Hq": Hq, "Hkv": Hkv, "Nq": 1, "Nk": Nk, "d": d, "Bc": Bc}
    made |= {"kv bytes": 2 * K.nbytes, "floor ms": round(2 * K.nbytes / copy / 1e9, 5)}
    made |= {"splits": [], "blocks": [], "split ms": [], "combine ms": [], "peers": {}}
    rows = Hq // Hkv
    O = None
    for splits in SPLITS:
        Os, Ls = cupy.empty((splits, *q.shape), np.float32), cupy.empty((splits, B, Hq, 1), np.float32)
        O, L = cupy.empty_like(q), cupy.empty((B, Hq, 1), np.float32)
        split = cuda.Kernel(FILE, {"Br": rows, "Bc": Bc, "D": d}, function=SPLIT)
        first = cuda.launch(split, (q, K, V, Os, Ls, 1, Nk, 1 / np.sqrt(d), 0, Hq, Hkv, splits), repeat=11)
        combine = cuda.Kernel(FILE, {"Splits": splits, "Br": rows, "D": d}, function=COMBINE)
        second = cuda.launch(combine, (Os, Ls, O, L, 1, Hq, Hkv), repeat=11)
        made["splits"].append(splits)
        made["blocks"].append(splits * Hkv * B)
        made["split ms"].append(round(first.times.median, 5))
        made["combine ms"].append(round(second.times.median, 5))
        total = first.times.median + second.times.median
        say(f"B={B} Hq={Hq} Hkv={Hkv} Nk={Nk} Bc={Bc}, {splits} splits: {total:.3f} ms, floor {made['floor ms']:.3f}")
    peers(say, made, q, K, V, O)
    del K, V
    cupy.get_default_memory_pool().free_all_blocks()
    return made


def peers(say: Any, made: dict[str, Any], q: Any, K: Any, V: Any, O: Any) -> None:
    """PyTorch's attention on the same arrays; grouped heads are left out, for its float32 backends take none."""
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        return
    if made["Hq"] != made["Hkv"]:
        return
    q, K, V, want = (torch.from_dlpack(x) for x in (q, K, V, O))
    for name in ("EFFICIENT_ATTENTION", "MATH"):
        try:
            with sdpa_kernel(getattr(SDPBackend, name)):
                attend = torch.nn.functional.scaled_dot_product_attention
                times, out = gpu.torch_times(torch, lambda attend=attend: attend(q, K, V), 11)
            made["peers"][f"torch {name}"] = round(float(np.median(times)), 5)
            say(f"torch {name}: {np.median(times):.3f} ms, differs by {float((out - want).abs().max()):.1e}")
            del out
        except Exception as error:
            say(f"torch {name}: {type(error).__name__}: {error}")
    torch.cuda.empty_cache()


def times_table(times: dict[str, Any]) -> list[str]:
    """The report's lines: a table, then what the chapter plots."""
    lines = ["", f"Device copy {times['copy TB/s']:.2f} TB/s; float32, one query of dimension 128.", ""]
    lines += ["| B, Hq, Hkv, Nk, Bc | floor ms | " + " | ".join(f"{s} splits" for s in SPLITS) + " | peers |"]
    lines += ["| --- " * (len(SPLITS) + 3) + "|"]
    for r in times["rows"]:
        cells = [f"{a + b:.3f} ({b:.3f})" for a, b in zip(r["split ms"], r["combine ms"], strict=True)]
        peer = ", ".join(f"{name} {ms:.3f}" for name, ms in r["peers"].items())
        head = ", ".join(str(r[k]) for k in ("B", "Hq", "Hkv", "Nk", "Bc"))
        lines.append(f"| {head} | {r['floor ms']:.3f} | {' | '.join(cells)} | {peer} |")
    return [
        *lines,
        "",
        "Milliseconds of both kernels (of them the combine kernel).",
        "",
        "```json",
        as_json(times),
        "```",
    ]


def as_json(times: dict[str, Any]) -> str:
    """What is stored in the package: a row a line."""
    head = json.dumps({k: v for k, v in times.items() if k != "rows"})[:-1]
    return head + ', "rows": [\n' + ",\n".join(json.dumps(row) for row in times["rows"]) + "\n]}"


if __name__ == "__main__":
    parts = {
        "checks": part_checks,
        "times": part_times,
        "sanitizer": lambda say: gpu.part_sanitizer(say, FILE, FAULTS, __file__),
    }
    sys.exit(gpu.main(parts, name="gpu_flash_decoding", text=__doc__, small=sanitize_run, times=times_table))
