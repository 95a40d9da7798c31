"""Check and time the CUDA kernels on this machine's GPU, in one run: `python benchmarks/gpu.py --out FOLDER`.

Needs CuPy, and uses PyTorch and compute-sanitizer where they are. Five parts, each reported even when another fails:

1. checks      O and L against float64 over many shapes, outputs poisoned with NaN, guard values around them, and the launcher's refusals
2. times       CUDA events, medians, beside PyTorch's attention and the copy bandwidth, in the same run
3. sanitizer   compute-sanitizer's four tools over small shapes
4. planted     faults that the tools must find: every barrier deleted in turn, reads and writes out of bounds and of nothing
5. report      gpu.json and gpu.md in the folder, the tables printed last

With `--sanitize-run` it only runs the small shapes, for the tools of parts 3 and 4.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flashviz import cuda  # noqa: E402

EPS = 2.0**-23
BOUND = 32 * EPS  # of max(1, max |V|) for O and of max(1, |L|) for L: about 4e-6, some ten roundings
GUARD, GUARDS = np.float32(12345.0), 64
SMALL = (  # B, Hq, Hkv, Nq, Nk, causal: a tail on both sides, grouped heads, rows and a whole row block that see no key
    (1, 1, 1, 33, 33, False),
    (2, 2, 1, 5, 70, True),
    (1, 2, 2, 70, 5, True),
)


def oracle(
    Q: Any, K: Any, V: Any, scale: float, causal: bool, kv_len: int | None = None, window: int = 0
) -> tuple[Any, Any]:
    """O and L in float64, heads grouped, causal aligned bottom-right; of the first ``kv_len`` keys, in a window where it is not 0."""
    q, k, v = (np.asarray(x, np.float64) for x in (Q, K[:, :, :kv_len], V[:, :, :kv_len]))
    k, v = (np.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    s = q @ k.swapaxes(-1, -2) * scale
    if causal:
        nq, nk = s.shape[-2:]
        ago = np.arange(nq)[:, None] + nk - nq - np.arange(nk)[None, :]
        s[..., (ago < 0) | (ago >= (window or nq + nk))] = -np.inf
    m = s.max(-1, keepdims=True, initial=-np.inf)
    p = np.exp(s - np.where(np.isinf(m), 0, m))
    total = p.sum(-1, keepdims=True)
    O = p @ v / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        return O, (np.where(np.isinf(m), 0, m) + np.log(total))[..., 0]


def guarded(cupy: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """A NaN-filled array between guard values, and the whole buffer."""
    size = int(np.prod(shape))
    buffer = cupy.full(size + 2 * GUARDS, GUARD, np.float32)
    inside = buffer[GUARDS : GUARDS + size].reshape(shape)
    inside.fill(np.nan)
    return inside, buffer


def attention(
    Q: Any,
    K: Any,
    V: Any,
    Br: int,
    Bc: int,
    *,
    causal: bool = False,
    scale: float | None = None,
    file: Any = "flash_attention_2",
    limits: tuple[int, ...] = (),
    **how: Any,
) -> tuple[Any, Any]:
    """O and L of the kernel, through guarded device arrays; AssertionError when a guard changed. ``limits`` are kv_len and window."""
    import cupy

    _, Hq, Nq, D = Q.shape
    Hkv, Nk = K.shape[1:3]
    O, O_all = guarded(cupy, Q.shape)
    L, L_all = guarded(cupy, Q.shape[:3])
    scale = 1 / np.sqrt(D) if scale is None else scale
    kernel = cuda.Kernel(file, {"Br": Br, "Bc": Bc, "D": D}, **how)
    cuda.launch(kernel, (Q, K, V, O, L, Nq, Nk, scale, causal, Hq, Hkv, *limits))
    for buffer in (O_all, L_all):
        edges = cupy.asnumpy(cupy.concatenate((buffer[:GUARDS], buffer[-GUARDS:])))
        assert (edges == GUARD).all(), "a guard value beside O or L was overwritten"
    return cupy.asnumpy(O), cupy.asnumpy(L)


def compare(
    O: Any,
    L: Any,
    Q: Any,
    K: Any,
    V: Any,
    scale: float | None,
    causal: bool,
    limits: tuple[int, ...] = (),
    *,
    slack: float = 1,
) -> tuple[float, float]:
    """Errors of O and L as fractions of ``slack`` bounds; AssertionError for a NaN, or an infinity that is not the oracle's."""
    bound = slack * BOUND
    want_O, want_L = oracle(Q, K, V, 1 / np.sqrt(Q.shape[-1]) if scale is None else scale, causal, *limits)
    assert np.isfinite(O).all(), f"O holds {np.count_nonzero(~np.isfinite(O))} values that are not finite"
    none = np.isneginf(want_L)
    assert (np.isneginf(L) == none).all(), "L is not -inf exactly where a row sees no key"
    assert not np.isnan(L).any(), "L holds NaN"
    assert (O[none] == 0).all(), "O is not 0 where a row sees no key"
    error_O = np.abs(O - want_O).max() / (bound * max(1.0, float(np.nanmax(np.abs(V), initial=0))))
    L, want_L = L[~none], want_L[~none]
    error_L = (np.abs(L - want_L) / (bound * np.maximum(1.0, np.abs(want_L)))).max(initial=0.0)
    assert error_O <= 1, f"O is off by {error_O:.2f} times the bound"
    assert error_L <= 1, f"L is off by {error_L:.2f} times the bound"
    return float(error_O), float(error_L)


def random(rng: Any, B: int, Hq: int, Hkv: int, Nq: int, Nk: int, D: int) -> list[Any]:
    return [rng.standard_normal((B, h, n, D), dtype=np.float32) for h, n in ((Hq, Nq), (Hkv, Nk), (Hkv, Nk))]


def numeric_cases() -> list[tuple[str, tuple[int, ...], tuple[int, int], float | None, bool]]:
    """(title, (B, Hq, Hkv, Nq, Nk, D), (Br, Bc), scale, causal)."""
    cases = []
    for n in (1, 2, 31, 32, 33, 63, 65, 257, 1000):
        for causal in (False, True):
            cases.append((f"N={n}", (2, 3, 3, n, n, 64), (32, 32), None, causal))
    for nq, nk in ((1, 257), (5, 1000), (257, 33), (33, 257), (1000, 31), (70, 5), (2, 5), (5, 2), (1, 8)):
        for causal in (False, True):
            cases.append((f"Nq={nq} Nk={nk}", (2, 3, 1, nq, nk, 64), (32, 32), None, causal))
    sizes = (
        (4, 4, 8),
        (16, 16, 32),
        (64, 64, 64),
        (64, 32, 64),
        (32, 64, 64),
        (32, 32, 128),
        (64, 64, 128),
        (1, 1, 3),
        (16, 48, 40),
    )
    for Br, Bc, D in sizes:
        for nq, nk, causal in ((1, 1, False), (65, 65, True), (100, 257, True), (257, 100, False), (130, 61, True)):
            cases.append((f"Br={Br} Bc={Bc} D={D}", (2, 4, 2, nq, nk, D), (Br, Bc), None, causal))
    for scale in (0.0, 0.3, -0.2):
        cases.append((f"scale={scale}", (1, 2, 2, 65, 70, 64), (32, 32), scale, True))
    return cases


class Checks:
    """Runs checks one by one: a failure is kept and said, and the others go on.

    What a check returns, if anything, are the errors of the outputs ``names`` as fractions of the bound; the worst are kept.
    """

    def __init__(self, say: Any, names: tuple[str, str] = ("O", "L")) -> None:
        self.say, self.failures, self.worst, self.count, self.names = say, [], [0.0, 0.0], 0, names

    def __call__(self, title: str, work: Any) -> None:
        """Run one check."""
        self.count += 1
        try:
            errors = work()
            if errors:
                self.worst = [max(a, b) for a, b in zip(self.worst, errors, strict=True)]
        except Exception as error:
            self.failures.append(f"{title}: {type(error).__name__}: {error}")
            self.say(self.failures[-1])

    def result(self) -> dict[str, Any]:
        """What is reported."""
        return {
            "cases": self.count,
            "failures": self.failures,
            "bound": BOUND,
            **{f"worst {name}, of the bound": worst for name, worst in zip(self.names, self.worst, strict=True)},
        }


def attention_checks(check: Checks, rng: Any, attend: Any) -> None:
    """What any attention kernel must hold: the shapes against float64, A01, A04, A09, A10, A14, and any number of threads.

    ``attend(Q, K, V, Br, Bc, causal=, scale=, block=)`` returns O and L.
    """
    import cupy

    def numeric(sizes: Any, blocks: Any, scale: Any, causal: bool) -> tuple[float, float]:
        Q, K, V = random(rng, *sizes)
        O, L = attend(Q, K, V, *blocks, scale=scale, causal=causal)
        if sizes[4] == 1 and not causal:
            assert (np.repeat(V, sizes[1] // sizes[2], axis=1) == O).all(), "with one key O is not V exactly"
        return compare(O, L, Q, K, V, scale, causal)

    for title, sizes, blocks, scale, causal in numeric_cases():
        check(f"{title} {sizes} blocks {blocks} causal {causal}", lambda a=(sizes, blocks, scale, causal): numeric(*a))

    def known(Q: Any, K: Any, V: Any, want: Any, blocks: Any, L_want: Any = None, **how: Any) -> None:
        arrays = [np.asarray(x, np.float32)[None, None] for x in (Q, K, V)]
        O, L = attend(*arrays, *blocks, **how)
        np.testing.assert_allclose(O[0, 0], want, atol=5e-5 if "scale" not in how else 1e-6)
        if L_want is not None:
            np.testing.assert_allclose(L[0, 0], L_want, atol=1e-6)

    one = np.ones
    check("A01 keys of -10", lambda: known(one((1, 1)), -10 * one((5, 1)), one((5, 1)), [[1]], (4, 4), scale=1.0))
    check("A01 keys of 0", lambda: known(one((1, 1)), 0 * one((5, 1)), one((5, 1)), [[1]], (4, 4), scale=1.0))
    for (nq, nk), want in {(2, 5): [2.5, 3], (5, 2): [0, 0, 0, 1, 1.5], (1, 8): [4.5]}.items():
        L_want = [np.log(max(0, q + 1 + nk - nq)) if q + 1 + nk - nq > 0 else -np.inf for q in range(nq)]
        for blocks in ((2, 2), (4, 4), (1, 3)):
            args = (
                np.zeros((nq, 1)),
                np.zeros((nk, 1)),
                np.arange(1, nk + 1)[:, None],
                np.array(want)[:, None],
                blocks,
                L_want,
            )
            check(f"A04 {nq, nk} blocks {blocks}", lambda a=args: known(*a, causal=True, scale=1.0))
    q, k, v = (
        np.array([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]),
        np.array([[0.7, 0.8], [0.9, 1.0], [1.1, 1.2]]),
        np.arange(1.0, 7).reshape(3, 2),
    )
    check("A09 default", lambda: known(q, k, v, [[1, 2], [2.0495, 3.0495], [3.2066, 4.2066]], (2, 2), causal=True))
    check("A09 scale 0", lambda: known(q, k, v, [[1, 2], [2, 3], [3, 4]], (2, 2), causal=True, scale=0))
    check(
        "A10 base of L", lambda: known(one((1, 1)), 0 * one((8, 1)), one((8, 1)), [[1]], (4, 4), [np.log(8)], scale=1.0)
    )

    def views() -> None:
        packed = rng.standard_normal((2, 70, 3, 4, 64), dtype=np.float32)
        sliced = [packed[:, :, n].transpose(0, 2, 1, 3) for n in range(3)]
        wide = rng.standard_normal((2, 4, 64, 70), dtype=np.float32)
        for Q, K, V in (
            sliced,
            [sliced[0], sliced[1], wide.swapaxes(2, 3)],
            [cupy.asarray(packed)[:, :, n].transpose(0, 2, 1, 3) for n in range(3)],
        ):
            dense = [
                np.ascontiguousarray(x) if isinstance(x, np.ndarray) else cupy.ascontiguousarray(x) for x in (Q, K, V)
            ]
            for a, b in zip(attend(Q, K, V, 32, 32), attend(*dense, 32, 32), strict=True):
                assert (a == b).all(), "views give another result than contiguous copies"

    def threads() -> None:
        Q, K, V = random(rng, 1, 2, 1, 70, 45, 64)
        first = attend(Q, K, V, 32, 32)
        for block in (32, 96, 128, 512, 1024):
            for a, b in zip(first, attend(Q, K, V, 32, 32, block=block), strict=True):
                assert (a == b).all(), f"{block} threads give another result than 256"

    check("A14 views", views)
    check("thread counts", threads)


def part_checks(say: Any) -> dict[str, Any]:
    rng = np.random.default_rng(2307)
    check = Checks(say)
    attention_checks(check, rng, attention)

    def numpy_outputs() -> None:
        Q, K, V = random(rng, 1, 2, 1, 70, 45, 64)
        O, L = attention(Q, K, V, 32, 32)
        O_view, L2 = np.full((1, 70, 2, 64), np.nan, np.float32).swapaxes(1, 2), np.empty((1, 2, 70), np.float32)
        cuda.launch(
            cuda.Kernel("flash_attention_2", {"Br": 32, "Bc": 32, "D": 64}),
            (Q, K, V, O_view, L2, 70, 45, 0.125, 0, 2, 1),
            poison=True,
        )
        assert (O_view == O).all(), "a NumPy output that is a view was not written right"
        assert (L2 == L).all(), "a NumPy output was not written right"

    def carve() -> None:
        source = cuda.find("flash_attention_2")
        text = source.text.replace(
            "    // How many keys", "    if (threadIdx.x == 0) L[0] = carve.used * 4; return;\n    // How many keys", 1
        )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "carve.cu"
            path.write_text(text)
            for sizes in source.header.instances:
                L, x = np.zeros((1, 1, 1), np.float32), np.zeros((1, 1, 1, sizes["D"]), np.float32)
                cuda.launch(cuda.Kernel(path, sizes), (x, x, x, x.copy(), L, 1, 1, 1.0, 0, 1, 1))
                assert L[0, 0, 0] == source.shared_bytes(sizes), (
                    f"{sizes}: the kernel carves {L[0, 0, 0]}, the launcher gives {source.shared_bytes(sizes)}"
                )

    def refused(words: str, work: Any) -> None:
        message = ""
        try:
            work()
        except (cuda.LaunchError, cuda.ArgumentError) as error:
            message = str(error)
        assert words in message, f"the message lacks {words!r}: {message or 'it was not refused'}"
        say(f"refused as it should be: {message.splitlines()[0]}")

    def one_call(D: int, **how: Any) -> Any:
        x = np.zeros((1, 1, 1, D), np.float32)
        return lambda: attention(x, x, x, how.pop("Br", 32), how.pop("Bc", 32), **how)

    check("NumPy outputs", numpy_outputs)
    check("carve", carve)
    check("C03 too much shared memory", lambda: refused("fits (", one_call(128, Br=128, Bc=128)))
    check("C03 too many threads", lambda: refused("1,024", one_call(64, block=2048)))
    check(
        "C01 float64",
        lambda: refused(
            "float64", lambda: attention(np.zeros((1, 1, 1, 64)), *[np.zeros((1, 1, 1, 64), np.float32)] * 2, 32, 32)
        ),
    )
    crash = subprocess.run([sys.executable, __file__, "--crash-run"], capture_output=True, text=True, timeout=120)
    check(
        "C07 a crash names the kernel",
        lambda: (
            None
            if "CRASH NAMED" in crash.stdout
            else (_ for _ in ()).throw(AssertionError(crash.stdout + crash.stderr))
        ),
    )
    say(next((line for line in crash.stdout.splitlines() if "failed on the GPU" in line), ""))
    return check.result()


def planted(folder: Path, name: str, old: str, new: str, which: int = 0, file: str = "flash_attention_2") -> Path:
    """A copy of a kernel file with the `which`-th occurrence of `old` replaced."""
    text = cuda.find(file).text
    at = [m.start() for m in re.finditer(re.escape(old), text)][which]
    path = folder / f"{name}.cu"
    path.write_text(text[:at] + new + text[at + len(old) :])
    return path


def run_group(command: list[str], limit: float) -> str:
    """Output of a command; past the limit its whole process group ends, so that no hung kernel goes on beside the next part."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as process:
        try:
            return process.communicate(timeout=limit)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def sanitize(tool: str, file: str, limit: float = 60, script: str = __file__) -> dict[str, Any]:
    start = time.perf_counter()
    command = [
        "compute-sanitizer",
        "--tool",
        tool,
        "--print-limit",
        "3",
        sys.executable,
        script,
        "--sanitize-run",
        file,
    ]
    try:
        output = run_group(command, limit)
    except subprocess.TimeoutExpired:
        output = "timed out"
    lines = [line.strip("= \t") for line in output.splitlines()]
    summary = next((line for line in lines if "SUMMARY" in line), "no summary: " + " | ".join(lines[-3:])[-400:])
    counts = [int(n) for n in re.findall(r"(\d+) (?:errors?|hazards? displayed|warnings?)", summary)]
    where = next((m[0] for line in lines if (m := re.search(r"\w+\.cuh?:\d+", line))), "")
    ran = "SMALL SHAPES RIGHT" in output
    return {
        "tool": tool,
        "summary": summary,
        "found": counts[0] if counts and "SUMMARY" in summary else None,
        "where": where,
        "right": ran,
        "seconds": round(time.perf_counter() - start, 1),
    }


FAULTS = {  # title: tool, what is replaced, by what
    "K read past its end": ("memcheck", "k < Nk ? K[", "k <= Nk ? K["),
    "O written past its end": ("memcheck", "if (q < Nq) O[", "if (q <= Nq) O["),
    "O read before it is written": (
        "initcheck",
        "Oi[r][x] = 0.f;",
        "Oi[r][x] = q < Nq ? O[(long long)q * D + x] : 0.f;",
    ),
    "a barrier for some threads only": ("synccheck", "TRACE(store_o, i);", "if (threadIdx.x % 2) __syncthreads();"),
}


def part_sanitizer(
    say: Any, file: str = "flash_attention_2", faults: Any = FAULTS, script: str = __file__
) -> dict[str, Any]:
    """The four tools on a kernel file, which must be clean, and on copies with faults, which must be found."""
    if not shutil.which("compute-sanitizer"):
        raise RuntimeError("compute-sanitizer is not on the PATH")
    results: dict[str, Any] = {"clean": {}, "planted": {}}
    with tempfile.TemporaryDirectory() as name, concurrent.futures.ThreadPoolExecutor(4) as pool:
        folder = Path(name)
        barriers = cuda.find(file).text.count("__syncthreads();")
        jobs = {("clean", tool): (tool, file) for tool in ("memcheck", "racecheck", "initcheck", "synccheck")}
        for n in range(barriers):
            copy = planted(folder, f"barrier{n}", "__syncthreads();", "", n, file)
            jobs["planted", f"barrier {n + 1} of {barriers} deleted"] = ("racecheck", str(copy))
        for n, (title, (tool, old, new)) in enumerate(faults.items()):
            jobs["planted", title] = (tool, str(planted(folder, f"fault{n}", old, new, 0, file)))
        futures = {key: pool.submit(sanitize, *job, script=script) for key, job in jobs.items()}
        for (kind, title), future in futures.items():
            results[kind][title] = future.result()
            say(f"{kind} · {title}: {future.result()}")
    results["all clean"] = all(r["found"] == 0 and r["right"] for r in results["clean"].values())
    results["all planted found"] = all(r["found"] for r in results["planted"].values())
    return results


def sanitize_run(file: str) -> None:
    """The small shapes; without CuPy's memory pool, so that each array ends where its memory does."""
    import cupy

    cupy.cuda.set_allocator(None)
    rng = np.random.default_rng(1)
    right = True
    for B, Hq, Hkv, Nq, Nk, causal in SMALL:
        Q, K, V = (cupy.asarray(x) for x in random(rng, B, Hq, Hkv, Nq, Nk, 64))
        O, L = cupy.empty(Q.shape, np.float32), cupy.empty(Q.shape[:3], np.float32)
        cuda.launch(cuda.Kernel(file, {"Br": 32, "Bc": 32, "D": 64}), (Q, K, V, O, L, Nq, Nk, 0.125, causal, Hq, Hkv))
        try:
            compare(*(cupy.asnumpy(x) for x in (O, L, Q, K, V)), 0.125, causal)
        except AssertionError as error:
            print(error)
            right = False
    print("SMALL SHAPES RIGHT" if right else "SMALL SHAPES WRONG")


def crash_run() -> None:
    with tempfile.TemporaryDirectory() as name:
        file = planted(Path(name), "wild", "K[(long long)k * D + x]", "K[(long long)k * D + x + (1LL << 40)]")
        x = np.zeros((1, 1, 33, 64), np.float32)
        for attempt in range(2):
            try:
                kernel = cuda.Kernel("flash_attention_2" if attempt else file, {"Br": 32, "Bc": 32, "D": 64})
                cuda.launch(kernel, (x, x, x, x.copy(), np.zeros((1, 1, 33), np.float32), 33, 33, 1.0, 0, 1, 1))
            except cuda.KernelError as error:
                message = str(error)
                print(message)
        if "wild.cu: flash_attention_2<32, 32, 64>" in message:  # the second launch says whose fault it is
            print("CRASH NAMED")


def copy_bandwidth(say: Any) -> float:
    """TB/s of a device-to-device copy of 4 GiB, bytes read plus bytes written."""
    import cupy

    big = 1 << 30
    a, b = cupy.ones(big, np.float32), cupy.empty(big, np.float32)
    events = [(cupy.cuda.Event(), cupy.cuda.Event()) for _ in range(20)]
    for n in range(23):
        start, end = events[max(0, n - 3)]
        start.record()
        cupy.copyto(b, a)
        end.record()
    events[-1][1].synchronize()
    copy = 2 * a.nbytes / np.median([cupy.cuda.get_elapsed_time(*pair) for pair in events]) / 1e9
    say(f"device copy {copy:.2f} TB/s")
    del a, b
    cupy.get_default_memory_pool().free_all_blocks()
    return float(copy)


def torch_times(torch: Any, work: Any, repeat: int = 21) -> tuple[list[float], Any]:
    """Milliseconds of each call of ``work`` after three warm-ups, by CUDA events, and what the last one returned."""
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeat)]
    for n in range(repeat + 3):
        start, end = pairs[max(0, n - 3)]
        start.record()
        out = work()
        end.record()
    torch.cuda.synchronize()
    return [s.elapsed_time(e) for s, e in pairs], out


def part_times(say: Any) -> dict[str, Any]:
    import cupy

    rows: list[dict[str, Any]] = []
    copy = copy_bandwidth(say)
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        torch = None
    for d, N in ((64, 1024), (64, 4096), (128, 1024), (128, 4096)):
        B, H = 16384 // N, 2048 // d
        work = 4 * B * H * N * N * d
        Q, K, V = (cupy.random.standard_normal((B, H, N, d), dtype=np.float32) for _ in range(3))
        O, L = cupy.empty_like(Q), cupy.empty((B, H, N), np.float32)

        def row(what: str, times: Any, d: int = d, N: int = N, work: float = work) -> None:
            median = float(np.median(times))
            spread = (float(min(times)), float(max(times)))
            rows.append(
                {
                    "d": d,
                    "N": N,
                    "what": what,
                    "ms": median,
                    "ms min, max": spread,
                    "runs": len(times),
                    "TFLOP/s": work / median / 1e9,
                }
            )
            say(f"d={d} N={N} {what}: {median:.3f} ms, {work / median / 1e9:.2f} TFLOP/s")

        for Br, Bc in ((32, 32), (64, 32), (64, 64)):
            for threads in (128, 256, 512):
                kernel = cuda.Kernel("flash_attention_2", {"Br": Br, "Bc": Bc, "D": d}, block=threads)
                done = cuda.launch(kernel, (Q, K, V, O, L, N, N, 1 / np.sqrt(d), 0, H, H), repeat=11)
                row(f"flash_attention_2 Br={Br} Bc={Bc}, {threads} threads", done.times.milliseconds)
        if torch is None:
            continue
        q, k, v = (torch.from_dlpack(x) for x in (Q, K, V))
        for name in ("EFFICIENT_ATTENTION", "MATH"):
            try:
                with sdpa_kernel(getattr(SDPBackend, name)):
                    attend = torch.nn.functional.scaled_dot_product_attention
                    times, out = torch_times(torch, lambda q=q, k=k, v=v, attend=attend: attend(q, k, v))
                row(f"torch {name}", times)
                difference = float((out - torch.from_dlpack(O)).abs().max())
                rows[-1]["largest difference from the kernel"] = difference
                del out
            except Exception as error:
                say(f"torch {name}: {type(error).__name__}: {error}")
        torch.cuda.empty_cache()
    tf32 = torch.backends.cuda.matmul.allow_tf32 if torch else None
    return {"copy TB/s": copy, "rows": rows, "torch matmul allow_tf32": tf32}


def machine() -> dict[str, Any]:
    found = cuda.status()
    info = {
        "date": datetime.date.today().isoformat(),
        "gpu": found.device,
        "arch": found.arch,
        "multiprocessors": found.multiprocessors,
    }
    info |= {
        "shared memory a block": found.shared_per_block,
        "CUDA of the driver": found.driver,
        "CUDA runtime": found.runtime,
    }
    info |= {"NVRTC": found.nvrtc, "CuPy": found.cupy, "NumPy": np.__version__, "Python": sys.version.split()[0]}

    def ask(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout.strip()
        except OSError:
            return ""

    info["driver"] = ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    version = ask("compute-sanitizer", "--version").splitlines()
    info["compute-sanitizer"] = next((line for line in version if "ersion" in line), "")
    try:
        import torch

        info["PyTorch"] = torch.__version__
    except ImportError:
        info["PyTorch"] = ""
    info["status"] = found.reason
    return info


def markdown(result: dict[str, Any], times: Any = None) -> str:
    """The report as Markdown; ``times`` makes the lines of the part of that name, this script's own when not given."""
    lines = ["# GPU run", "", "| | |", "| --- | --- |"]
    lines += [f"| {key} | {value} |" for key, value in result.get("machine", {}).items()]
    if "cases" in (checks := result.get("checks", {})):
        worst = [(key.split()[1].rstrip(","), value) for key, value in checks.items() if key.startswith("worst ")]
        errors = " and ".join(f"of {name} {value:.2f}" for name, value in worst)
        lines += [
            "",
            f"{checks['cases']} checks, {len(checks['failures'])} failed; bound {checks['bound']:.2g}, largest error {errors} of it.",
        ]
        lines += [f"- {failure}" for failure in checks["failures"]]
    for kind in ("clean", "planted"):
        rows = result.get("sanitizer", {}).get(kind, {})
        lines += ["", f"| {kind} | tool | summary | where | s |", "| --- | --- | --- | --- | --- |"] if rows else []
        lines += [
            f"| {title} | {r['tool']} | {r['summary']} | {r['where']} | {r['seconds']} |" for title, r in rows.items()
        ]
    if result.get("times", {}).get("rows"):
        lines += (times or times_table)(result["times"])
    lines += [
        "",
        *(
            f"{part}: {result[part]['error']}"
            for part in result
            if isinstance(result[part], dict) and "error" in result[part]
        ),
    ]
    return "\n".join(lines) + "\n"


def times_table(times: dict[str, Any]) -> list[str]:
    lines = ["", f"Device copy {times['copy TB/s']:.2f} TB/s.", "", "| d | N | what | ms | TFLOP/s |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    return lines + [
        f"| {r['d']} | {r['N']} | {r['what']} | {r['ms']:.3f} | {r['TFLOP/s']:.2f} |" for r in times["rows"]
    ]


def main(
    parts: Any = None,
    *,
    name: str = "gpu",
    text: str | None = __doc__,
    small: Any = None,
    times: Any = None,
) -> int:
    """Run parts one by one and write NAME.json and NAME.md after each; 1 when something failed, 0 too where there is no usable GPU.

    ``parts`` are functions that take ``say`` and return what is reported, in order; ``small`` runs the small shapes for
    compute-sanitizer; ``times`` makes the report's lines of the part "times". This script's own when not given.
    """
    small = small or sanitize_run
    parts = parts or {"checks": part_checks, "times": part_times, "sanitizer": part_sanitizer}
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--parts", default=",".join(parts))
    parser.add_argument("--sanitize-run", metavar="FILE")
    parser.add_argument("--crash-run", action="store_true")
    options = parser.parse_args()
    if options.sanitize_run or options.crash_run:
        crash_run() if options.crash_run else small(options.sanitize_run)
        return 0
    found = cuda.status()
    if not found.usable:
        print(f"Nothing is measured: {found.reason} {found.fix}".strip())
        return 0
    started = time.perf_counter()
    result: dict[str, Any] = {}

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - started:6.1f} s] {text}", flush=True)

    for title, part in {"machine": lambda _: machine(), **parts}.items():
        if title != "machine" and title not in options.parts.split(","):
            continue
        say(title)
        try:
            result[title] = part(say)
        except Exception as error:
            traceback.print_exc()
            result[title] = {"error": f"{type(error).__name__}: {error}"}
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"{name}.json").write_text(json.dumps(result, indent=1))
        (options.out / f"{name}.md").write_text(markdown(result, times))
    say("done")
    print(markdown(result, times))
    checks, sanitizer = result.get("checks", {}), result.get("sanitizer", {})
    failed = (
        any("error" in part for part in result.values())
        or checks.get("failures")
        or not sanitizer.get("all clean", True)
    )
    return int(bool(failed) or not sanitizer.get("all planted found", True))


if __name__ == "__main__":
    sys.exit(main())
