"""Check and time `kernels/online_softmax.cu` on this machine's GPU: `python benchmarks/gpu_online_softmax.py --out FOLDER`.

The parts are those of `benchmarks/gpu.py`, for the safe, the online and the fused kernel:

1. checks      y and o against float64, outputs poisoned with NaN between guard values
2. times       the three kernels over the size of the tile, beside PyTorch's softmax and the copy bandwidth
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

FILE = "online_softmax"
READS = {"safe": 3, "online": 2}
SMALL = ((3, 70), (1, 33), (2, 1))  # R, N with Tile=33: a tail after whole tiles, one whole tile, one element
FAULTS = {  # title: tool, what is replaced, by what
    "x read past its end": ("memcheck", "n < N ? x[n]", "n <= N ? x[n]"),
    "V read past its end": ("memcheck", "n < N ? V[", "n <= N ? V["),
    "y written past its end": ("memcheck", "if (n < N) y[n]", "if (n <= N) y[n]"),
    "o read before it is written": ("initcheck", "out[z] = o[z];", "out[z] = o[z] + 0.f * out[z];"),
    "a barrier for some threads only": ("synccheck", "TRACE(store_o, 0);", "if (threadIdx.x % 2) __syncthreads();"),
}


def oracle(x: Any) -> Any:
    """Softmax of each row in float64; 0 where a row holds nothing but -inf."""
    s = np.asarray(x, np.float64)
    m = s.max(-1, keepdims=True)
    e = np.exp(s - np.where(np.isneginf(m), 0, m))
    total = e.sum(-1, keepdims=True)
    return e / np.where(total == 0, 1, total)


def softmax(x: Any, tile: int, form: str, V: Any = None, file: Any = FILE, **how: Any) -> Any:
    """y or o of a kernel, through a guarded device array; AssertionError when a guard changed."""
    import cupy

    R, N = x.shape
    out, buffer = gpu.guarded(cupy, (R, N if V is None else V.shape[1]))
    template = {"Tile": tile} if V is None else {"Tile": tile, "D": V.shape[1]}
    kernel = cuda.Kernel(file, template, function=f"{form}_softmax", **how)
    cuda.launch(kernel, (x, out, N) if V is None else (x, V, out, N))
    edges = cupy.asnumpy(cupy.concatenate((buffer[: gpu.GUARDS], buffer[-gpu.GUARDS :])))
    assert (edges == gpu.GUARD).all(), "a guard value beside the output was overwritten"
    return cupy.asnumpy(out)


def error_of(got: Any, want: Any, most: float = 1.0) -> float:
    """Largest error as a fraction of the bound; AssertionError for what is not finite or past it."""
    assert np.isfinite(got).all(), f"the output holds {np.count_nonzero(~np.isfinite(got))} values that are not finite"
    error = float(np.abs(got - want).max() / (gpu.BOUND * max(1.0, most)))
    assert error <= 1, f"off by {error:.2f} times the bound"
    return error


def numeric(x: Any, tile: int, D: int, rng: Any, **how: Any) -> tuple[float, float]:
    """Errors of o and y of all three kernels, as fractions of the bound."""
    want, none = oracle(x), np.isneginf(x).all(-1)
    worst = [0.0, 0.0]
    for form in ("safe", "online"):
        y = softmax(x, tile, form, **how)
        worst[1] = max(worst[1], error_of(y, want))
        assert (y[none] == 0).all(), "y is not 0 where a row holds nothing but -inf"
        assert (y[np.isneginf(x)] == 0).all(), "a score of -inf has a weight"
    V = rng.standard_normal((x.shape[1], D), dtype=np.float32)
    o = softmax(x, tile, "fused", V, **how)
    worst[0] = error_of(o, want @ V, float(np.abs(V).max()))
    assert (o[none] == 0).all(), "o is not 0 where a row holds nothing but -inf"
    if x.shape[1] == 1:
        assert (o[~none] == V[0]).all(), "with one score o is not V exactly"
    return worst[0], worst[1]


def rows(rng: Any, R: int, N: int, size: float) -> Any:
    """Random scores; the first row begins with -inf, the second holds nothing else, the third climbs in every tile."""
    x = (rng.standard_normal((R, N)) * size).astype(np.float32)
    if R > 3:
        x[0, : (N + 1) // 2 if N > 1 else 0] = -np.inf
        x[1] = -np.inf
        x[2] = np.linspace(-30000, 30000, N)
    return x


def part_checks(say: Any) -> dict[str, Any]:
    rng = np.random.default_rng(1805)
    check = gpu.Checks(say, ("o", "y"))
    for N in (1, 2, 3, 31, 32, 33, 63, 65, 257, 1000, 5000):
        for tile, D in ((4, 4), (33, 40), (64, 64), (128, 128)):
            for R, size in ((1, 1.0), (5, 20.0)):
                x = rows(rng, R, N, size)
                check(f"R={R} N={N} Tile={tile} D={D}", lambda a=(x, tile, D): numeric(*a, rng))
    check("tiles of 1", lambda: numeric(rows(rng, 5, 77, 3.0), 1, 3, rng))
    check("a long row", lambda: numeric(rows(rng, 4, 200_000, 3.0), 256, 64, rng))
    check("scores of 3e38", lambda: numeric(np.array([[3e38, -3e38, 3e38, 0, -np.inf]], np.float32), 2, 4, rng))
    check("A01 five scores of -10", lambda: known([-10] * 5, [1] * 5, 1.0))
    check("A05 first tile masked", lambda: known([-np.inf, -np.inf, 0, 0], [1, 2, 3, 4], 3.5))
    check("A05 all masked", lambda: known([-np.inf] * 4, [1, 2, 3, 4], 0.0))
    check("A14 views", lambda: views(rng))
    check("A15 rows past 2^31", far_rows)
    check("A15 V past 2^31", far_values)
    check("thread counts", lambda: threads(rng))
    check("carve", carve)
    check("C01 float64", lambda: refused("float64", np.zeros((1, 8)), 4, "online"))
    big = np.zeros((1024, 128), np.float32)
    check("C03 too much shared memory", lambda: refused("fits (", np.zeros((1, 1024), np.float32), 1024, "fused", big))
    return check.result()


def known(x: Any, V: Any, want: float) -> None:
    """A case with a known o."""
    got = softmax(np.array([x], np.float32), 2, "fused", np.array(V, np.float32)[:, None])
    np.testing.assert_allclose(got[0, 0], want, atol=1e-6)


def views(rng: Any) -> None:
    """x and V as slices of larger arrays give the bits of contiguous copies."""
    x, V = rng.standard_normal((140, 8), dtype=np.float32)[::2].T, rng.standard_normal((70, 80), dtype=np.float32)
    for form, values in (("safe", None), ("online", None), ("fused", V[:, ::2])):
        dense = None if values is None else values.copy()
        same = softmax(x, 33, form, values) == softmax(np.ascontiguousarray(x), 33, form, dense)
        assert same.all(), f"{form}: views give another result than contiguous copies"


def far_rows() -> None:
    """2^21 + 8 rows of 1024: the last one's elements lie past 2^31, and its largest score takes the whole weight."""
    import cupy

    R, N = (1 << 21) + 8, 1024
    x, V = cupy.zeros((R, N), np.float32), cupy.arange(4 * N, dtype=np.float32).reshape(N, 4)
    x[-1, 5] = 200
    for form in ("safe", "online", "fused"):
        out = cupy.full((R, 4 if form == "fused" else N), np.nan, np.float32)
        template = {"Tile": 256, "D": 4} if form == "fused" else {"Tile": 256}
        kernel = cuda.Kernel(FILE, template, function=f"{form}_softmax")
        cuda.launch(kernel, (x, V, out, N) if form == "fused" else (x, out, N))
        last, first = cupy.asnumpy(out[-1]), cupy.asnumpy(out[0])
        want = cupy.asnumpy(V[5]) if form == "fused" else np.arange(N) == 5
        assert (last == want).all(), f"{form}: the last row is wrong"
        even = cupy.asnumpy(V.mean(0)) if form == "fused" else 1 / N
        np.testing.assert_allclose(first, even, rtol=1e-4)
        del out
    del x
    cupy.get_default_memory_pool().free_all_blocks()


def far_values() -> None:
    """2^25 + 5 rows of V of 64: the last one lies past 2^31 and takes the whole weight."""
    import cupy

    N = (1 << 25) + 5
    x, V = cupy.zeros((1, N), np.float32), cupy.zeros((N, 64), np.float32)
    x[0, -1], V[-1] = 200, cupy.arange(64)
    o = softmax(x, 128, "fused", V)
    del x, V
    cupy.get_default_memory_pool().free_all_blocks()
    assert (o[0] == np.arange(64)).all(), "the last row of V was not found"


def threads(rng: Any) -> None:
    """The number of threads does not change a bit."""
    x, V = rows(rng, 5, 300, 3.0), rng.standard_normal((300, 40), dtype=np.float32)
    for form in ("safe", "online", "fused"):
        values = V if form == "fused" else None
        first = softmax(x, 64, form, values)
        for block in (32, 96, 128, 512, 1024):
            assert (softmax(x, 64, form, values, block=block) == first).all(), f"{form}: {block} threads differ"


def carve() -> None:
    """The kernels carve as many bytes as the launcher gives them."""
    x, V = np.zeros((1, 1), np.float32), np.zeros((1, 40), np.float32)
    with tempfile.TemporaryDirectory() as folder:
        for n, form in enumerate(("safe", "online", "fused")):
            marker = "    const int tiles = (N + Tile - 1) / Tile;\n"
            text = f"    if (threadIdx.x == 0) {'o' if form == 'fused' else 'y'}[0] = carve.used * 4;\n    return;\n"
            path = gpu.planted(Path(folder), form, marker, text + marker, n, FILE)
            template = {"Tile": 33, "D": 40} if form == "fused" else {"Tile": 33}
            got = softmax(x, 33, form, V if form == "fused" else None, file=path)[0, 0]
            want = cuda.find(FILE, f"{form}_softmax").shared_bytes(template)
            assert got == want, f"{form} carves {got}, the launcher gives {want}"


def refused(words: str, x: Any, tile: int, form: str, V: Any = None) -> None:
    """A launch that must be refused, with these words."""
    message = ""
    try:
        softmax(x, tile, form, V)
    except (cuda.LaunchError, cuda.ArgumentError) as error:
        message = str(error)
    assert words in message, f"the message lacks {words!r}: {message or 'it was not refused'}"


def sanitize_run(file: str) -> None:
    """The small shapes; without CuPy's memory pool, so that each array ends where its memory does."""
    import cupy

    cupy.cuda.set_allocator(None)
    rng = np.random.default_rng(1)
    right = True
    for R, N in SMALL:
        x, V = (cupy.asarray(rng.standard_normal(s, dtype=np.float32)) for s in ((R, N), (N, 40)))
        want = oracle(cupy.asnumpy(x))
        for form in ("safe", "online", "fused"):
            fused = form == "fused"
            out = cupy.empty((R, 40 if fused else N), np.float32)
            template = {"Tile": 33, "D": 40} if fused else {"Tile": 33}
            kernel = cuda.Kernel(file, template, function=f"{form}_softmax", block=64)
            cuda.launch(kernel, (x, V, out, N) if fused else (x, out, N))
            try:
                error_of(cupy.asnumpy(out), want @ cupy.asnumpy(V) if fused else want, 10.0)
            except AssertionError as error:
                print(f"{form}: {error}")
                right = False
    print("SMALL SHAPES RIGHT" if right else "SMALL SHAPES WRONG")


def part_times(say: Any) -> dict[str, Any]:
    copy = gpu.copy_bandwidth(say)
    made: list[dict[str, Any]] = []
    for R, N in ((65536, 1024), (16384, 8192), (4096, 32768), (512, 262144)):
        try:
            made += series(say, copy, R, N)
        except Exception as error:
            say(f"R={R} N={N}: {type(error).__name__}: {error}")
    for R, N, D in ((1024, 4096, 64), (4096, 16384, 64)):
        try:
            made += fused_series(say, R, N, D)
        except Exception as error:
            say(f"fused R={R} N={N} D={D}: {type(error).__name__}: {error}")
    return {"copy TB/s": copy, "rows": made}


def row(say: Any, sizes: str, what: str, times: Any, nbytes: int, floor: float | None = None) -> dict[str, Any]:
    """One line of the report: the bytes that the algorithm asks for, and how fast they came."""
    median = float(np.median(times))
    say(f"{sizes} {what}: {median:.3f} ms, {nbytes / median / 1e9:.2f} TB/s asked for")
    return {
        "sizes": sizes,
        "what": what,
        "ms": median,
        "ms min, max": (float(min(times)), float(max(times))),
        "runs": len(times),
        "TB/s": nbytes / median / 1e9,
        "one read and one write, ms": floor,
    }


def series(say: Any, copy: float, R: int, N: int) -> list[dict[str, Any]]:
    """The safe and the online kernel over tiles and threads, and PyTorch's softmax."""
    import cupy

    x, y = cupy.random.standard_normal((R, N), dtype=np.float32), cupy.empty((R, N), np.float32)
    floor, made, sizes = 2 * x.nbytes / copy / 1e9, [], f"R={R} N={N}"
    for tile, block in ((256, 256), (1024, 256), (1024, 512), (4096, 512), (4096, 1024)):
        for form, reads in READS.items():
            kernel = cuda.Kernel(FILE, {"Tile": tile}, function=f"{form}_softmax", block=block)
            done = cuda.launch(kernel, (x, y, N), repeat=11)
            what = f"{form} Tile={tile}, {block} threads"
            made.append(row(say, sizes, what, done.times.milliseconds, (reads + 1) * x.nbytes, floor))
    try:
        import torch
    except ImportError:
        return made
    given = torch.from_dlpack(x)
    times, out = gpu.torch_times(torch, lambda given=given: torch.softmax(given, -1))
    made.append(row(say, sizes, "torch.softmax", times, 2 * x.nbytes, floor))
    made[-1]["largest difference from the kernel"] = float((out - torch.from_dlpack(y)).abs().max())
    del out, given
    torch.cuda.empty_cache()
    del x, y
    cupy.get_default_memory_pool().free_all_blocks()
    return made


def fused_series(say: Any, R: int, N: int, D: int) -> list[dict[str, Any]]:
    """The fused kernel over tiles, and PyTorch's softmax and product."""
    import cupy

    x, V = (cupy.random.standard_normal(s, dtype=np.float32) for s in ((R, N), (N, D)))
    o, made, sizes = cupy.empty((R, D), np.float32), [], f"R={R} N={N} D={D}"
    for tile, block in ((64, 64), (128, 128), (256, 256)):
        kernel = cuda.Kernel(FILE, {"Tile": tile, "D": D}, function="fused_softmax", block=block)
        done = cuda.launch(kernel, (x, V, o, N), repeat=11)
        nbytes = x.nbytes + R * V.nbytes + o.nbytes
        made.append(row(say, sizes, f"fused Tile={tile}, {block} threads", done.times.milliseconds, nbytes))
    try:
        import torch
    except ImportError:
        return made
    given, values = torch.from_dlpack(x), torch.from_dlpack(V)
    times, out = gpu.torch_times(torch, lambda: torch.softmax(given, -1) @ values)
    made.append(row(say, sizes, "torch softmax @ V", times, 3 * x.nbytes + V.nbytes + o.nbytes))
    made[-1]["largest difference from the kernel"] = float((out - torch.from_dlpack(o)).abs().max())
    return made


def times_table(times: dict[str, Any]) -> list[str]:
    """The report's lines."""
    lines = [
        "",
        f"Device copy {times['copy TB/s']:.2f} TB/s. float32; TB/s of the bytes that the algorithm asks for.",
        "",
    ]
    lines += [
        "| sizes | what | ms | TB/s | one read and one write at copy speed, ms |",
        "| --- | --- | --- | --- | --- |",
    ]
    for r in times["rows"]:
        floor = r["one read and one write, ms"]
        cells = (r["sizes"], r["what"], f"{r['ms']:.3f}", f"{r['TB/s']:.2f}", "" if floor is None else f"{floor:.3f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    parts = {
        "checks": part_checks,
        "times": part_times,
        "sanitizer": lambda say: gpu.part_sanitizer(say, FILE, FAULTS, __file__),
    }
    sys.exit(gpu.main(parts, name="gpu_online_softmax", text=__doc__, small=sanitize_run, times=times_table))
