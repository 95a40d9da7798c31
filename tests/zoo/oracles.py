"""What each kernel must answer, in float64, and random sizes for it. A new kernel joins by a line in ORACLES."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from programs.oracle import attention

from flashviz.bfloat16 import from_bfloat16
from flashviz.checks.kernel_cases import Case, fits, make_plan
from flashviz.cuda.launching import Plan
from flashviz.cuda.scalars import BFLOAT16
from flashviz.cuda.sources import KernelSource, find, folders

Arguments = Mapping[str, Any]
Outputs = dict[str, Any]  # an array in float64, or None where the kernel writes nothing at all


def seen_by(a: Arguments) -> np.ndarray:
    """Which query sees which key, [Nq, Nk]: kv_len, causal and window, as far as the kernel has them."""
    nq, nk = int(a["Nq"]), int(a["Nk"])
    used, window = int(a.get("kv_len", nk)), int(a.get("window", 0))
    q, k = np.arange(nq)[:, None] + used - nq, np.arange(nk)[None]
    seen = np.broadcast_to(k < used, (nq, nk))
    if a["causal"]:
        seen = seen & (k <= q) & ((k > q - window) if window else True)
    return seen


def attention_of(a: Arguments, Q: Any = None, K: Any = None, keys: Any = True) -> tuple[np.ndarray, np.ndarray]:
    """O and L of a kernel's arguments, over the given keys only."""
    Q, K = a["Q"] if Q is None else Q, a["K"] if K is None else K
    mask = np.broadcast_to(seen_by(a) & keys, (*Q.shape[:-1], int(a["Nk"])))
    return attention(Q, K, a["V"], scale=float(a["scale"]), mask=mask)


def flash_attention_1(a: Arguments) -> Outputs:
    """m is the largest score that the row sees, and l = e^(L - m)."""
    O, L = attention_of(a)
    q, k = (np.asarray(x, np.float64) for x in (a["Q"], grouped(a["K"], a)))
    m = np.where(seen_by(a), q @ k.swapaxes(-1, -2) * float(a["scale"]), -np.inf).max(-1)
    return {"O": O, "m": m, "l": np.where(np.isneginf(L), 0.0, np.exp(L - np.where(np.isneginf(m), 0, m)))}


def flash_attention_2(a: Arguments) -> Outputs:
    O, L = attention_of(a)
    return {"O": O, "L": L}


def flash_attention_2_rope(a: Arguments) -> Outputs:
    O, L = attention_of(a, halves(a["Q"], a["cq"], a["sq"]), halves(a["K"], a["ck"], a["sk"]))
    return {"O": O, "L": L}


def halves(x: Any, cos: Any, sin: Any) -> np.ndarray:
    """Rotate-half form: elements p and p + Pairs turn together; what comes after them stays."""
    x, cos, sin = (np.array(value, np.float64) for value in (x, cos, sin))
    pairs = cos.shape[-1]
    a, b = x[..., :pairs].copy(), x[..., pairs : 2 * pairs].copy()
    x[..., :pairs], x[..., pairs : 2 * pairs] = a * cos - b * sin, b * cos + a * sin
    return x


def neighbours(x: Any, cos: Any, sin: Any) -> np.ndarray:
    """Interleaved form: elements 2p and 2p + 1 turn together."""
    x, cos, sin = (np.array(value, np.float64) for value in (x, cos, sin))
    end = 2 * cos.shape[-1]
    a, b = x[..., 0:end:2].copy(), x[..., 1:end:2].copy()
    x[..., 0:end:2], x[..., 1:end:2] = a * cos - b * sin, b * cos + a * sin
    return x


def flash_decoding_split(a: Arguments, Bc: int) -> Outputs:
    """Attention over each split's own tiles; a split without keys gives O = 0 and L = -inf."""
    splits, used, window = int(a["splits"]), int(a.get("kv_len", a["Nk"])), int(a.get("window", 0))
    tiles = -(-used // Bc)
    begin = max(0, 1 + used - int(a["Nq"]) - window) // Bc if a["causal"] and window else 0
    each = -(-(tiles - begin) // splits)
    tile = np.arange(int(a["Nk"])) // Bc - begin
    parts = [attention_of(a, keys=(tile >= s * each) & (tile < (s + 1) * each)) for s in range(splits)]
    return {"Os": np.stack([O for O, _ in parts]), "Ls": np.stack([L for _, L in parts])}


def flash_decoding_combine(a: Arguments) -> Outputs:
    Os, Ls = (np.asarray(a[name], np.float64) for name in ("Os", "Ls"))
    m = Ls.max(0)
    w = np.exp(Ls - m)
    return {"O": (w[..., None] * Os).sum(0) / w.sum(0)[..., None], "L": m + np.log(w.sum(0))}


def flash_attention_2_tuned(a: Arguments, Causal: int) -> Outputs:
    return flash_attention_2({**a, "causal": Causal})


def flash_decoding_rung(a: Arguments, Bc: int) -> Outputs:
    """One launch: the answer, and each split's part, which one split alone does not write."""
    parts: Outputs = flash_decoding_split(a, Bc) if a["splits"] > 1 else {"Os": None, "Ls": None}
    return {**flash_attention_2(a), **parts}


def softmax(x: Any) -> np.ndarray:
    e = np.exp(np.asarray(x, np.float64) - np.max(x, -1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def standard_scores(a: Arguments) -> Outputs:
    q, k = (np.asarray(x, np.float64) for x in (a["Q"], grouped(a["K"], a)))
    s = q @ k.swapaxes(-1, -2) * float(a["scale"])
    if a["causal"]:
        nq, nk = s.shape[-2:]
        s[..., np.arange(nk)[None] > np.arange(nq)[:, None] + nk - nq] = -np.inf
    return {"S": s}


def grouped(k: Any, a: Arguments) -> np.ndarray:
    return np.repeat(k, int(a["Hq"]) // int(a["Hkv"]), axis=1)


def standard_values(a: Arguments) -> Outputs:
    return {"O": np.asarray(a["P"], np.float64) @ np.asarray(grouped(a["V"], a), np.float64)}


PREFILL = ("warps", "registers", "mma", "async", "tf32")
DECODE = ("vectors", "heads")
ORACLES: dict[str, Callable[..., Outputs]] = {
    "flash_attention_1": flash_attention_1,
    "flash_attention_2": flash_attention_2,
    "flash_attention_2_rope": flash_attention_2_rope,
    **dict.fromkeys((f"flash_attention_2_{rung}" for rung in PREFILL), flash_attention_2),
    **dict.fromkeys((f"flash_decoding_{rung}" for rung in DECODE), flash_decoding_rung),
    "flash_attention_2_tuned": flash_attention_2_tuned,
    "attention_library": flash_attention_2,
    "attention_short": flash_attention_2,
    "flash_decoding_split": flash_decoding_split,
    "flash_decoding_combine": flash_decoding_combine,
    "safe_softmax": lambda a: {"y": softmax(a["x"])},
    "online_softmax": lambda a: {"y": softmax(a["x"])},
    "fused_softmax": lambda a: {"o": softmax(a["x"]) @ np.asarray(a["V"], np.float64)},
    "rope_rows": lambda a: {"O": halves(a["x"], a["cos"], a["sin"])},
    "rope_pairs_rows": lambda a: {"O": neighbours(a["x"], a["cos"], a["sin"])},
    "standard_scores": standard_scores,
    "standard_softmax": lambda a: {"P": softmax(a["S"])},
    "standard_values": standard_values,
}
# Template values that an oracle needs besides the arguments.
NEEDS = {
    **dict.fromkeys(("flash_decoding_split", *(f"flash_decoding_{rung}" for rung in DECODE)), ("Bc",)),
    "flash_attention_2_tuned": ("Causal",),
}


def every_file() -> list[str]:
    """The kernel files, by name."""
    return sorted(path.stem for folder in folders() for path in folder.glob("*.cu"))


def files() -> list[str]:
    """The kernel files that the processor runs, by name."""
    return [file for file in every_file() if not find(file).not_on_processor]


def gpu_files() -> list[str]:
    """The kernel files that it cannot run, by name."""
    return [file for file in every_file() if find(file).not_on_processor]


def kernels(files: list[str] | None = None) -> list[tuple[str, str]]:
    """Every kernel of every file (that the processor runs, when not given): (file, function)."""
    chosen = globals()["files"]() if files is None else files
    return [(file, function) for file in chosen for function in find(file).kernels]


def expected(source: KernelSource, case: Case, arguments: Arguments) -> Outputs:
    types = source.signature.resolved(case.template).parameters
    arguments = {p.name: from_bfloat16(arguments[p.name]) if p.type in BFLOAT16 else arguments[p.name] for p in types}
    more = {name: case.template[name] for name in NEEDS.get(source.header.kernel, ())}
    return ORACLES[source.header.kernel](arguments, **more)


def random_cases(file: str, function: str, count: int, seed: int, instances: int = 3) -> Iterator[tuple[Case, Plan]]:
    """Launches of random sizes that satisfy the kernel's @require lines, over its instantiations that need least shared memory."""
    source = find(file, function)
    rng = np.random.default_rng(seed)
    templates = sorted(source.header.instances or ({},), key=source.shared_bytes)[:instances]
    made = 0
    for attempt in range(200 * count):
        template = templates[attempt % len(templates)]
        shape = {name: random_size(name, rng) for name in source.header.shapes[rng.integers(len(source.header.shapes))]}
        if "Hq" in shape and "Hkv" in shape:
            shape["Hq"] = shape["Hkv"] * int(rng.integers(1, 4))
        if "splits" in shape and "Br" not in template:  # one block a query, or eight rows at most
            shape["Nq"] = int(rng.integers(1, 4))
        if "Br" in template and rng.random() < 0.5:  # few queries, for those that hold all of them in one tile
            shape = {name: int(rng.integers(1, 4)) if name == "Nq" else value for name, value in shape.items()}
        if not fits(source, template, shape):
            continue
        case = Case(function, template, shape)
        yield case, make_plan(source.path, case, seed=seed + attempt)
        made += 1
        if made == count:
            return
    raise AssertionError(f"{file}, {function}: only {made} of {count} random sizes satisfy its @require lines")


def random_size(name: str, rng: np.random.Generator) -> int:
    low, high = {
        "B": (1, 2),
        "H": (1, 3),
        "Hq": (1, 3),
        "Hkv": (1, 2),
        "R": (1, 3),
        "causal": (0, 1),
        "scale": (-2, 2),
        "splits": (1, 6),
        "window": (0, 20),
    }.get(name, (1, 70))
    return int(rng.integers(low, high + 1))
