"""Check and time masks and the attention library on this machine's GPU: `python benchmarks/gpu_masks.py --out FOLDER`.

`kernels/attention_library.cu`, and what `kv_len` and `window` do in the kernels of FlashAttention-1, -2 and flash decoding, with the
parts of `benchmarks/gpu.py`:

1. checks      O and L against float64, poisoned with NaN between guard values, NaN in K and V behind the used keys; known cases
2. code        registers and instructions of each kind of the kernel built from the library beside the one written out by hand
3. times       both side by side; causal, windowed and short caches beside the full computation and PyTorch's attention
4. sanitizer   compute-sanitizer's four tools, and on copies with each barrier of library and kernel deleted in turn
"""

from __future__ import annotations

import concurrent.futures
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import gpu
import gpu_flash_attention_1
import gpu_flash_decoding
import numpy as np

from flashviz import cuda
from flashviz.sight import Sight

LIBRARY, BY_HAND = "attention_library", "flash_attention_2"
BUILT = (LIBRARY, "attention_short")  # the kernels of the library's file
RULES = (  # B, Hq, Hkv, Nq, Nk, kv_len, window, causal
    (2, 4, 2, 100, 257, 201, 0, False),
    (2, 4, 2, 100, 257, 201, 0, True),
    (2, 4, 2, 100, 257, 201, 33, True),
    (1, 2, 1, 257, 100, 70, 1, True),
    (1, 2, 2, 65, 64, 64, 31, True),
    (1, 1, 1, 33, 70, 0, 0, True),
    (1, 1, 1, 33, 70, 1, 5, True),
    (2, 3, 1, 1000, 1000, 999, 128, True),
)
SMALL = (
    (1, 1, 1, 33, 33, 33, 0, 0),
    (2, 2, 1, 5, 70, 61, 9, 1),
    (1, 2, 2, 70, 5, 5, 0, 1),
)  # the same, for compute-sanitizer
TILE, THREADS = {"Br": 64, "Bc": 64}, 512


def part_checks(say: Any) -> dict[str, Any]:
    rng = np.random.default_rng(2205)
    check = gpu.Checks(say)
    for function in BUILT:
        say(function)
        gpu.attention_checks(
            check, rng, lambda *a, f=function, **how: gpu.attention(*a, file=LIBRARY, function=f, **how)
        )

    def rules(attend: Any, case: tuple[int, ...]) -> tuple[float, float]:
        B, Hq, Hkv, Nq, Nk, kv_len, window, causal = case
        Q, K, V = gpu.random(rng, B, Hq, Hkv, Nq, Nk, 64)
        K[:, :, kv_len:] = V[:, :, kv_len:] = np.nan
        O, L = attend(Q, K, V, 32, 32, causal=bool(causal), limits=(kv_len, window))
        return gpu.compare(O, L, Q, K, V, None, bool(causal), (kv_len, window))

    kernels = {BY_HAND: gpu.attention, "flash_attention_1": gpu_flash_attention_1.flash}
    kernels |= {name: lambda *a, f=name, **how: gpu.attention(*a, file=LIBRARY, function=f, **how) for name in BUILT}
    for name, attend in kernels.items():
        for case in RULES:
            check(f"{name} {case}", lambda a=attend, c=case: rules(a, c))

    def decode(Q: Any, K: Any, V: Any, Br: int, Bc: int, **how: Any) -> Any:
        return gpu_flash_decoding.decode(Q, K, V, 5, Q.shape[1] // K.shape[1] * Q.shape[2], Bc, **how)[:2]

    for case in RULES:
        few = (*case[:3], min(case[3], 5), *case[4:])
        check(f"flash_decoding {few}", lambda c=few: rules(decode, c))

    def same_bits() -> None:
        Q, K, V = gpu.random(rng, 2, 4, 2, 257, 300, 64)
        results = [gpu.attention(Q, K, V, 32, 32, causal=True, limits=(290, 100))]
        for function in BUILT:
            how: dict[str, Any] = {"file": LIBRARY, "function": function}
            results.append(gpu.attention(Q, K, V, 32, 32, causal=True, limits=(290, 100), **how))
        for O, L in results[1:]:
            assert (results[0][0] == O).all(), "O differs from the kernel by hand"
            assert (results[0][1] == L).all(), "L differs from the kernel by hand"

    check("the same bits as by hand", same_bits)
    check("torch's convention", lambda: conventions(rng, say))
    return check.result()


def conventions(rng: Any, say: Any) -> None:
    """PyTorch's is_causal is top left: equal where Nq = Nk, other rows where not; with the bottom-right mask given, equal."""
    import torch

    attend = torch.nn.functional.scaled_dot_product_attention
    for Nq, Nk in ((64, 64), (5, 70), (70, 5)):
        Q, K, V = gpu.random(rng, 1, 2, 2, Nq, Nk, 64)
        O, _ = gpu.attention(Q, K, V, 32, 32, causal=True)
        q, k, v = (torch.from_numpy(x).cuda() for x in (Q, K, V))
        theirs = attend(q, k, v, is_causal=True).cpu().numpy()
        seen = np.arange(Nk)[None] <= np.arange(Nq)[:, None] + Nk - Nq
        given = attend(q, k, v, attn_mask=torch.from_numpy(seen).cuda()).cpu().numpy()
        rows = seen.any(axis=1)  # what PyTorch gives a row that sees nothing is not compared
        apart = float(np.abs(theirs - O).max())
        say(
            f"Nq={Nq} Nk={Nk}: is_causal differs by {apart:.2g}, the mask given by {np.abs(given - O)[:, :, rows].max():.2g}"
        )
        assert (apart <= 1e-5) == (Nq == Nk), "is_causal agrees where it should not, or the other way round"
        assert np.abs(given - O)[:, :, rows].max() <= 1e-5, "the bottom-right mask gives something else"


def mnemonics(cubin: bytes) -> Counter[str]:
    """How often each instruction stands in cuobjdump's listing of a cubin with one kernel; its padding is not counted."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run(["cuobjdump", "--dump-sass", str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", done.stdout, re.M)
    return Counter(name for name in found if name != "NOP")


def part_code(say: Any) -> dict[str, Any]:
    """Registers and instructions, from NVRTC's machine code; cuobjdump's names where it is on the PATH."""
    from flashviz.cuda.machine_code import instructions, sections
    from flashviz.cuda.nvrtc import Nvrtc

    nvrtc, rows, equal = Nvrtc(), [], True
    disassembles = shutil.which("cuobjdump") is not None
    for arch in (80, 90):
        for sizes in ((32, 32, 64), (64, 64, 128)):
            costs = {}
            for file, function in ((BY_HAND, BY_HAND), *((LIBRARY, name) for name in BUILT)):
                compiled = nvrtc.compile(cuda.find(file).assembled, [f"{function}<{', '.join(map(str, sizes))}>"], arch)
                assert compiled.ok, compiled.problems
                ((used,), (code,)) = compiled.resources.values(), sections(compiled.cubin).values()
                kinds = mnemonics(compiled.cubin) if disassembles else instructions(code)
                shared = cuda.find(file, function).shared_bytes(dict(zip(("Br", "Bc", "D"), sizes, strict=True)))
                costs[function] = (used.registers, shared, used.spill_stores, kinds)
            hand, built = costs[BY_HAND], costs[LIBRARY]
            same = hand == built
            equal &= hand[:3] == built[:3] and sum(hand[3].values()) == sum(built[3].values())
            if not same:  # compilers may write one address in two ways
                say(f"only by hand {dict(hand[3] - built[3])}, only from the library {dict(built[3] - hand[3])}")
            for function, (registers, shared, spills, kinds) in costs.items():
                row = {"arch": arch, "sizes": sizes, "kernel": function, "registers": registers, "shared": shared}
                row |= {"spills": spills, "instructions": sum(kinds.values()), "kinds": dict(kinds.most_common())}
                rows.append({**row, "equal": same if function == LIBRARY else None})
                say(f"sm_{arch} {sizes} {function}: {registers} registers, {sum(kinds.values())} instructions")
    assert equal, "the library's kernel takes other registers, shared memory or another number of instructions"
    return {"rows": rows, "by": "cuobjdump" if disassembles else "opcode"}


def part_times(say: Any) -> dict[str, Any]:
    import cupy

    copy, rows = gpu.copy_bandwidth(say), []
    for d, N in ((64, 4096), (128, 4096)):
        B, H = 16384 // N, 2048 // d
        Q, K, V = (cupy.random.standard_normal((B, H, N, d), dtype=np.float32) for _ in range(3))
        O, L = cupy.empty_like(Q), cupy.empty((B, H, N), np.float32)
        every = sum(len(row) for row in Sight(N, N).tiles(64, 64))

        def row(
            what: str, times: Any, tiles: int, d: int = d, N: int = N, every: int = every, B: int = B, H: int = H
        ) -> None:
            median, share = float(np.median(times)), tiles / every
            work = 4 * B * H * N * N * d * share
            made = {"d": d, "N": N, "what": what, "ms": median, "ms min, max": (float(min(times)), float(max(times)))}
            rows.append({**made, "runs": len(times), "tiles": tiles, "of": every, "TFLOP/s": work / median / 1e9})
            say(f"d={d} N={N} {what}: {median:.3f} ms, {share:.1%} of the tiles")

        def launch(file: str, function: str, causal: int, kv_len: int, window: int, repeat: int = 7) -> Any:
            kernel = cuda.Kernel(file, {**TILE, "D": d}, function=function, block=THREADS)  # noqa: B023
            arguments = (Q, K, V, O, L, N, N, 1 / np.sqrt(d), causal, H, H, kv_len, window)  # noqa: B023
            return cuda.launch(kernel, arguments, repeat=repeat).times.milliseconds

        # Side by side: the same three kernels in turn, so that a change of the clock meets all of them.
        for causal in (0, 1):
            sight, together = Sight(N, N, bool(causal)), {name: [] for name in (BY_HAND, *BUILT)}
            for _ in range(3):
                for name, times in together.items():
                    times += launch(BY_HAND if name == BY_HAND else LIBRARY, name, causal, N, 0, repeat=4)
            for name, times in together.items():
                visited = sum(len(r) for r in sight.tiles(64, 64))
                row(f"{name}{', causal' if causal else ''}", times, visited)
        for kv_len, window in ((N, N // 8), (N, 256), (N // 2, 0)):
            sight = Sight(N, kv_len, True, window or None)
            words = [f"kv_len={kv_len}"] * (kv_len < N) + [f"window={window}"] * bool(window)
            visited = sum(len(r) for r in sight.tiles(64, 64))
            row(f"{BY_HAND}, causal, {', '.join(words)}", launch(BY_HAND, BY_HAND, 1, kv_len, window), visited)
        peers(say, row, Q, K, V, every, sum(len(r) for r in Sight(N, N, True).tiles(64, 64)))
        cupy.get_default_memory_pool().free_all_blocks()
    return {"copy TB/s": copy, "rows": rows}


def peers(say: Any, row: Any, Q: Any, K: Any, V: Any, every: int, half: int) -> None:
    """PyTorch's memory-efficient attention on the same arrays, full and causal."""
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        return
    q, k, v = (torch.from_dlpack(x) for x in (Q, K, V))
    attend = torch.nn.functional.scaled_dot_product_attention
    for causal in (False, True):
        try:
            with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                times, out = gpu.torch_times(torch, lambda c=causal: attend(q, k, v, is_causal=c), 11)
            row(f"torch EFFICIENT_ATTENTION{', causal' if causal else ''}", times, half if causal else every)
            del out
        except Exception as error:
            say(f"torch causal={causal}: {type(error).__name__}: {error}")
    torch.cuda.empty_cache()


def sanitize_run(file: str) -> None:
    """The small shapes; without CuPy's memory pool, so that each array ends where its memory does."""
    import cupy

    cupy.cuda.set_allocator(None)
    rng, right = np.random.default_rng(1), True
    for function in cuda.find(file).kernels:
        for B, Hq, Hkv, Nq, Nk, kv_len, window, causal in SMALL:
            arrays = gpu.random(rng, B, Hq, Hkv, Nq, Nk, 64)
            Q, K, V = (cupy.asarray(x) for x in arrays)
            O, L = cupy.empty(Q.shape, np.float32), cupy.empty(Q.shape[:3], np.float32)
            kernel = cuda.Kernel(file, {"Br": 32, "Bc": 32, "D": 64}, function=function)
            cuda.launch(kernel, (Q, K, V, O, L, Nq, Nk, 0.125, causal, Hq, Hkv, kv_len, window))
            try:
                gpu.compare(cupy.asnumpy(O), cupy.asnumpy(L), *arrays, 0.125, bool(causal), (kv_len, window))
            except AssertionError as error:
                print(error)
                right = False
    print("SMALL SHAPES RIGHT" if right else "SMALL SHAPES WRONG")


FAULTS = {  # of the library's header: title: tool, what is replaced, by what
    "K and V read past the used keys": ("memcheck", "first + r < end ? X", "first + r <= end ? X"),
    "a barrier for some threads only": ("synccheck", "TRACE(softmax, step);", "if (threadIdx.x % 2) __syncthreads();"),
}


def copy_with(folder: Path, name: str, part: str, old: str, new: str, which: int) -> Path:
    """The library's file and header in a folder of their own, with the ``which``-th occurrence of ``old`` in one of them replaced."""
    source = cuda.find(LIBRARY)
    texts = {f"{LIBRARY}.cu": source.text}
    texts["include/attention.cuh"] = (source.path.parent / "include" / "attention.cuh").read_text()
    text = texts[part]
    at = [m.start() for m in re.finditer(re.escape(old), text)][which]
    texts[part] = text[:at] + new + text[at + len(old) :]
    (folder / name / "include").mkdir(parents=True)
    for file, written in texts.items():
        (folder / name / file).write_text(written)
    return folder / name / f"{LIBRARY}.cu"


def part_sanitizer(say: Any) -> dict[str, Any]:
    """The four tools on both kernels of the library's file and on the one by hand; every barrier of the library deleted in turn."""
    if not shutil.which("compute-sanitizer"):
        raise RuntimeError("compute-sanitizer is not on the PATH")
    results: dict[str, Any] = {"clean": {}, "planted": {}}
    header, barrier = "include/attention.cuh", "__syncthreads();"
    with tempfile.TemporaryDirectory() as name, concurrent.futures.ThreadPoolExecutor(4) as pool:
        folder = Path(name)
        jobs: dict[tuple[str, str], tuple[str, str]] = {}
        every = [(LIBRARY, tool) for tool in ("memcheck", "racecheck", "initcheck", "synccheck")]
        for file, tool in (*every, (BY_HAND, "memcheck"), (BY_HAND, "racecheck")):
            jobs["clean", f"{file}, {tool}"] = (tool, file)
        source = cuda.find(LIBRARY)
        counts = {
            header: (source.path.parent / header).read_text().count(barrier),
            f"{LIBRARY}.cu": source.text.count(barrier),
        }
        for part, count in counts.items():
            for n in range(count):
                path = copy_with(folder, f"{part.split('/')[-1]}{n}", part, barrier, "", n)
                jobs["planted", f"{part}, barrier {n + 1} of {count} deleted"] = ("racecheck", str(path))
        for n, (title, (tool, old, new)) in enumerate(FAULTS.items()):
            jobs["planted", title] = (tool, str(copy_with(folder, f"fault{n}", header, old, new, 0)))
        futures = {key: pool.submit(gpu.sanitize, *job, script=__file__) for key, job in jobs.items()}
        for (kind, title), future in futures.items():
            results[kind][title] = future.result()
            say(f"{kind} · {title}: {future.result()}")
    results["all clean"] = all(r["found"] == 0 and r["right"] for r in results["clean"].values())
    results["all planted found"] = all(r["found"] for r in results["planted"].values())
    return results


def times_table(times: dict[str, Any]) -> list[str]:
    """The report's lines: what was visited and how long it took."""
    lines = [
        "",
        f"Device copy {times['copy TB/s']:.2f} TB/s; float32, forward, B · N = 16384, H · d = 2048, Br = Bc = 64.",
        "",
    ]
    lines += ["| d | N | what | tiles | share | ms | min to max | TFLOP/s of these |", "| --- " * 8 + "|"]
    for r in times["rows"]:
        low, high = r["ms min, max"]
        share = f"{r['tiles']:,} of {r['of']:,} | {r['tiles'] / r['of']:.1%}"
        lines.append(
            f"| {r['d']} | {r['N']} | {r['what']} | {share} | {r['ms']:.3f} | {low:.3f} to {high:.3f} | {r['TFLOP/s']:.2f} |"
        )
    return lines


if __name__ == "__main__":
    every_part = {"checks": part_checks, "code": part_code, "times": part_times, "sanitizer": part_sanitizer}
    sys.exit(gpu.main(every_part, name="gpu_masks", text=__doc__, small=sanitize_run, times=times_table))
