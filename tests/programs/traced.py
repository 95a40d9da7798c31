"""Every algorithm that has a kernel, small, with random sizes; and kernels with a fault put in."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashviz import cuda
from flashviz.cuda import sources
from flashviz.programs import flash_attention_1 as fa1
from flashviz.programs import flash_attention_2 as fa2
from flashviz.programs import flash_attention_2_rope as fa2_rope
from flashviz.programs import flash_decoding as decoding
from flashviz.programs import online_softmax as softmax
from flashviz.programs import rope
from flashviz.programs import standard_attention as standard
from flashviz.programs.base import Program


@dataclass(frozen=True)
class Case:
    """An algorithm: its program on random inputs of random sizes, its loops, and the launch of its kernels."""

    name: str
    make: Callable[[np.random.Generator], Program]
    loops: Callable[[Any], None]
    launch: Callable[[Any], Any]

    def __str__(self) -> str:
        return self.name


def qkv(rng: np.random.Generator, Nq: int, Hq: int, Hkv: int, d: int = 8) -> list[np.ndarray]:
    B, Nk = int(rng.integers(1, 3)), int(rng.integers(1, 22))
    shapes = (B, Hq, Nq, d), (B, Hkv, Nk, d), (B, Hkv, Nk, d)
    return [rng.standard_normal(shape, "f4") for shape in shapes]


def keys(rng: np.random.Generator, Nk: int) -> dict[str, Any]:
    """A mask, a window and a number of keys in use, each now and then."""
    causal = bool(rng.integers(2))
    window = int(rng.integers(1, 12)) if causal and rng.integers(2) else None
    kv_len = int(rng.integers(0, Nk + 1)) if rng.integers(2) else None
    return {"causal": causal, "window": window, "kv_len": kv_len}


def attention(kind: Any) -> Callable[[np.random.Generator], Program]:
    def make(rng: np.random.Generator) -> Program:
        Hq, Hkv = rng.choice([(1, 1), (2, 1), (4, 2)])
        Br, Bc = rng.choice([(4, 4), (3, 5)])
        inputs = qkv(rng, int(rng.integers(1, 22)), int(Hq), int(Hkv))
        options = keys(rng, inputs[1].shape[2])
        if kind not in (fa1.FlashAttention1, fa2.FlashAttention2):
            options = {"causal": options["causal"]}
        return kind(*inputs, Br=int(Br), Bc=int(Bc), **options)  # type: ignore[no-any-return]

    return make


def a_decoding(rng: np.random.Generator) -> Program:
    Hq, Hkv, Nq = (int(n) for n in rng.choice([(2, 2, 1), (4, 2, 2)]))
    splits = int(rng.choice([1, 3]))
    q, K, V = qkv(rng, Nq, Hq, Hkv)
    return decoding.FlashDecoding(q, K, V, splits=splits, Bc=4, **keys(rng, K.shape[2]))


def a_softmax(form: str) -> Callable[[np.random.Generator], Program]:
    def make(rng: np.random.Generator) -> Program:
        R, N = int(rng.integers(1, 4)), int(rng.integers(1, 22))
        V = rng.standard_normal((N, 8), "f4") if form == "fused" else None
        return softmax.OnlineSoftmax(4 * rng.standard_normal((R, N), "f4"), V, tile=5, form=form)

    return make


def a_rope(form: str) -> Callable[[np.random.Generator], Program]:
    def make(rng: np.random.Generator) -> Program:
        B, H, N = (int(n) for n in rng.integers(1, (3, 4, 22)))
        dim = int(rng.choice([8, 4]))
        return rope.Rope(
            rng.standard_normal((B, H, N, 8), "f4"), form=form, rotary_dim=dim, offset=int(rng.integers(9))
        )

    return make


CASES = (
    Case("flash_attention_2", attention(fa2.FlashAttention2), fa2.forward, lambda p: fa2.launch_kernel(p.a, "cpu")),
    Case("flash_attention_1", attention(fa1.FlashAttention1), fa1.forward, lambda p: fa1.launch_kernel(p.a, "cpu")),
    Case(
        "standard_attention",
        attention(standard.StandardAttention),
        standard.forward,
        lambda p: standard.launch_kernels(p.a, "cpu"),
    ),
    Case("flash_decoding", a_decoding, decoding.forward, lambda p: decoding.launch_kernels(p, "cpu")),
    *(
        Case(f"{form}_softmax", a_softmax(form), loops, lambda p: softmax.launch_kernel(p, "cpu"))
        for form, loops in softmax.LOOPS.items()
    ),
    *(
        Case(f"rope_{form}", a_rope(form), rope.forward, lambda p: rope.launch_kernel(p.rotation, "cpu"))
        for form in rope.KERNELS
    ),
    Case(
        "flash_attention_2_rope",
        attention(fa2_rope.FlashAttention2Rope),
        fa2.forward,
        lambda p: fa2_rope.launch_kernel(p, "cpu"),
    ),
)
BY_NAME = {case.name: case for case in CASES}


def change(monkeypatch: pytest.MonkeyPatch, folder: Path, file: str, *edits: tuple[str, str]) -> None:
    """From here on ``file`` is a copy with each first text, which stands in it once, replaced by the second."""
    text = cuda.find(file).text
    for old, new in edits:
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {file}.cu"
        text = text.replace(old, new)
    (folder / f"{file}.cu").write_text(text, encoding="utf-8")
    known = sources.folders()
    monkeypatch.setattr(sources, "folders", lambda: (folder, *known))


def loop_of(file: str, variable: str, depth: int = 4) -> str:
    """The line that begins the loop over tiles, indented by ``depth`` blanks."""
    text = cuda.find(file).text
    (head,) = re.findall(
        rf"^ {{{depth}}}(for \(int {variable} = [^;]*; {variable} [^;]*; \+\+{variable}\) {{\n)(?! *for)", text, re.M
    )
    return str(head)


def an_attention(kind: Any = fa2.FlashAttention2, Nq: int = 10, Nk: int = 14, **options: Any) -> Any:
    """Three row blocks and four key tiles, the last ones short."""
    rng = np.random.default_rng(7)
    Q, K, V = rng.standard_normal((2, Nq, 8), "f4"), *rng.standard_normal((2, 2, Nk, 8), "f4")
    return kind(Q, K, V, **{"Br": 4, "Bc": 4, **options})
