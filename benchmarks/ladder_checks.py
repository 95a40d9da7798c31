"""The checks of the 16-bit rungs: how they are launched, what their O and L may be off by, and the inputs they are held to.

Used by `benchmarks/gpu_ladder.py` on a GPU, and by the tests on the processor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import gpu
import numpy as np

from flashviz import cuda
from flashviz.bfloat16 import from_bfloat16, to_bfloat16

RUNGS = ("flash_attention_2_mma", "flash_attention_2_async", "flash_attention_2_tuned")
EPSILON = {"half": 2.0**-11, "bfloat16": 2.0**-8}
"""What rounding to the type changes at most, relative to the number."""


def stored(x: Any, T: str) -> Any:
    """Numbers as a kernel takes them: of bfloat16 the bits."""
    return to_bfloat16(np.asarray(x, np.float32)) if T == "bfloat16" else np.asarray(x, np.float16)


def loaded(x: Any, T: str) -> Any:
    """What a kernel was given or wrote, as float32."""
    return from_bfloat16(x) if T == "bfloat16" else x.astype(np.float32)


def instance(file: Any, values: Any, causal: bool) -> dict[str, Any]:
    """Template values with the flags that the inputs decide, in the kernel's order."""
    signature = cuda.find(file).signature
    given = {**values, "Causal": causal}
    kinds = zip(signature.template, signature.kinds, strict=True)
    return {name: bool(given[name]) if kind == "bool" else given[name] for name, kind in kinds}


def arguments(file: Any, **given: Any) -> dict[str, Any]:
    """Those of the given arguments that the kernel has."""
    names = [parameter.name for parameter in cuda.find(file).signature.parameters]
    return {name: given[name] for name in names}


def run(file: Any, values: Any, Q: Any, K: Any, V: Any, causal: bool, scale: float, outputs: Any, **how: Any) -> Any:
    """One launch, or with ``repeat`` several."""
    (_, Hq, Nq, _), (Hkv, Nk) = Q.shape, K.shape[1:3]
    O, L = outputs
    given = {"Q": Q, "K": K, "V": V, "O": O, "L": L, "Nq": Nq, "Nk": Nk, "scale": scale, "causal": int(causal)}
    kernel = cuda.Kernel(file, instance(file, values, causal))
    return cuda.launch(kernel, arguments(file, **given, Hq=Hq, Hkv=Hkv), **how)


def between(cupy: Any, shape: tuple[int, ...], dtype: Any, fill: Any, guard: Any) -> tuple[Any, Any]:
    """An array full of ``fill`` between guard values, aligned to 16 bytes, and the whole buffer."""
    size = int(np.prod(shape))
    buffer = cupy.full(size + 2 * gpu.GUARDS, guard, dtype)
    inside = buffer[gpu.GUARDS : gpu.GUARDS + size].reshape(shape)
    inside.fill(fill)
    return inside, buffer


def on_processor(file: Any, values: Any, Q: Any, K: Any, V: Any, causal: bool, scale: float) -> tuple[Any, Any]:
    """O and L of a rung on the processor."""
    O, L = np.empty_like(Q), np.empty(Q.shape[:3], np.float32)
    run(file, values, Q, K, V, causal, scale, (O, L), device="cpu", poison=True)
    return O, L


def attention(file: Any, values: Any, Q: Any, K: Any, V: Any, causal: bool, scale: float) -> tuple[Any, Any]:
    """O and L of a rung on the GPU, from inputs with NaN around them into guarded outputs; AssertionError when a guard changed."""
    import cupy

    nan = stored(np.nan, values["T"])
    inputs = []
    for x in (Q, K, V):
        inside, _ = between(cupy, x.shape, x.dtype, nan, nan)
        inside[...] = cupy.asarray(x)
        inputs.append(inside)
    guard = stored(12345.0, values["T"])
    (O, O_all), (L, L_all) = between(cupy, Q.shape, Q.dtype, nan, guard), gpu.guarded(cupy, Q.shape[:3])
    run(file, values, *inputs, causal, scale, (O, L))
    for buffer, kept in ((O_all, guard), (L_all, gpu.GUARD)):
        edges = cupy.asnumpy(cupy.concatenate((buffer[: gpu.GUARDS], buffer[-gpu.GUARDS :])))
        assert (edges == kept).all(), "a guard value beside O or L was overwritten"
    return cupy.asnumpy(O), cupy.asnumpy(L)


def compare(O: Any, L: Any, Q: Any, K: Any, V: Any, scale: float, causal: bool, T: str) -> tuple[float, float]:
    """Errors of O and L as fractions of what is allowed; AssertionError for a NaN, or an infinity that is not the oracle's.

    O may be off by three roundings to T of the largest value: P's, O's, and one for all that is float. L, for which nothing is
    rounded to T, by the bound of float32, of scores of size s > 8 times s / 8.
    """
    Q, K, V, O = (loaded(x, T) for x in (Q, K, V, O))
    want_O, want_L = gpu.oracle(Q, K, V, scale, causal)
    none = np.isneginf(want_L)
    assert np.isfinite(O).all(), f"O holds {np.count_nonzero(~np.isfinite(O))} values that are not finite"
    assert not np.isnan(L).any(), "L holds NaN"
    assert (np.isneginf(L) == none).all(), "L is not -inf exactly where a row sees no key"
    assert (O[none] == 0).all(), "O is not 0 where a row sees no key"
    keys = np.repeat(K, Q.shape[1] // K.shape[1], axis=1)
    steep = max(1.0, float(np.abs(Q @ keys.swapaxes(-1, -2)).max()) * abs(scale) / 8)
    error_O = float(np.abs(O - want_O).max() / (3 * EPSILON[T] * np.abs(V).max()))
    L, want_L = L[~none], want_L[~none]
    error_L = float((np.abs(L - want_L) / (gpu.BOUND * steep * np.maximum(1, np.abs(want_L)))).max(initial=0))
    assert error_O <= 1, f"O is off by {error_O:.2f} times the bound"
    assert error_L <= 1, f"L is off by {error_L:.2f} times the bound"
    return error_O, error_L


def cases(values: Any) -> Iterator[tuple[tuple[int, ...], bool, float | None]]:
    """((B, Hq, Hkv, Nq, Nk), causal, scale); for an instance of whole tiles, multiples of them."""
    if values.get("Aligned"):
        Br, Bc = int(values["Br"]), int(values["Bc"])
        pairs = [(Br, Bc), (2 * Br, 4 * Bc), (Br, 5 * Bc), (3 * Br, Bc)]
    else:
        pairs = [(n, n) for n in (1, 2, 17, 63, 64, 65, 127, 128, 129, 333, 600)]
        pairs += [(1, 257), (5, 600), (257, 33), (33, 257), (600, 31), (70, 5), (2, 5), (5, 2), (1, 8), (130, 61)]
    flags = (False, True) if "Causal" not in values else (bool(values["Causal"]),)
    for (nq, nk), causal in itertools.product(pairs, flags):
        yield (2, 4, 2, nq, nk), causal, None
    for scale in (0.0, 0.3, -0.2):
        yield (1, 2, 1, *pairs[-1]), flags[-1], scale


def inputs_of_a_kind(rng: Any, kind: str, values: Any, n: int = 384) -> list[Any]:
    """Inputs that a wrong online softmax would not survive, in the kernel's type."""
    Q, K, V = gpu.random(rng, 1, 2, 2, n, n, int(values["D"]))
    if kind == "steep scores":
        K *= 8
    if kind == "rising scores":  # the maximum moves in every tile
        K = 4 * K[:, :, np.argsort((Q[:, :, :1] * K).sum(-1)[0, 0])]
    if kind == "low scores":  # far below 0: what starts at m = 0 and never sinks would find nothing
        K, Q = -np.abs(K) - 2, np.abs(Q) + 2
    return [stored(x, values["T"]) for x in (Q, K, V)]


KINDS = ("steep scores", "rising scores", "low scores")


def part_checks(say: Any) -> dict[str, Any]:
    rng = np.random.default_rng(2307)
    check = gpu.Checks(say)

    def numeric(file: str, values: Any, arrays: Any, causal: bool, scale: float | None) -> tuple[float, float]:
        scale = values["D"] ** -0.5 if scale is None else scale
        O, L = attention(file, values, *arrays, causal, scale)
        return compare(O, L, *arrays, scale, causal, values["T"])

    worst = {}
    for file in RUNGS:
        check.worst = [0.0, 0.0]
        for values in cuda.find(file).header.instances:
            title = f"{file} {', '.join(f'{k}={v}' for k, v in values.items())}"
            for (B, Hq, Hkv, Nq, Nk), causal, scale in cases(values):
                arrays = [stored(x, str(values["T"])) for x in gpu.random(rng, B, Hq, Hkv, Nq, Nk, int(values["D"]))]
                case = (file, values, arrays, causal, scale)
                check(f"{title}: {B, Hq, Hkv, Nq, Nk} causal {causal} scale {scale}", lambda c=case: numeric(*c))
            for kind in KINDS:
                case = (file, values, inputs_of_a_kind(rng, kind, values), bool(values.get("Causal", 1)), None)
                check(f"{title}: {kind}", lambda c=case: numeric(*c))
        worst[file] = check.worst
        say(f"{file}: largest errors of O and L {check.worst} of what is allowed")
    check.worst = [max(errors) for errors in zip(*worst.values(), strict=True)]
    return {**check.result(), "by rung": worst}
