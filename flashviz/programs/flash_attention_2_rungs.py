"""The rungs of FlashAttention-2's ladder by their names: program, loops and kernel of each (:data:`flashviz.ladder.PREFILL`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flashviz import ladder
from flashviz.programs.base import Run
from flashviz.programs.device import choose_device
from flashviz.programs.flash_attention_2 import forward
from flashviz.programs.flash_attention_2_ahead import FlashAttention2Ahead, FlashAttention2Tuned, forward_ahead
from flashviz.programs.flash_attention_2_registers import FlashAttention2Registers, FlashAttention2Tiled, dtype_of
from flashviz.programs.replay import run_on
from flashviz.programs.rung_kernels import launch, loaded, stored, template_for

SWIZZLED = 2
"""Rung 4's way to lay out a tile, of the three that it has."""
KINDS: dict[int | str, type[FlashAttention2Registers]] = {
    2: FlashAttention2Tiled,
    4: FlashAttention2Ahead,
    5: FlashAttention2Tuned,
}
"""The actions of a rung, where they are not :class:`FlashAttention2Registers`."""


def check_options(
    rung: int | str,
    dtype: str | None,
    limits: Mapping[str, Any],
    rungs: tuple[ladder.Rung, ...] = ladder.PREFILL,
) -> None:
    """Raise ValueError for what a rung does not take: another type, a mask, a window or a used length, or this way to call it."""
    found = ladder.rung_to_run(rung, rungs)
    dtype_of(found, dtype)
    for name, value in limits.items():
        if value is not None and rung != 0:
            raise ValueError(f"{name}= with rung={rung!r}: {found.kernel} has no {name}; rung=0 does")


def program(Q: Any, K: Any, V: Any, *, rung: int | str, **options: Any) -> FlashAttention2Registers:
    """The actions of a rung on real tiles; ``options`` as for :class:`FlashAttention2Registers`."""
    return KINDS.get(rung, FlashAttention2Registers)(Q, K, V, rung=rung, **options)


def loops(fa: FlashAttention2Registers) -> None:
    """The loops of the program's rung."""
    if isinstance(fa, FlashAttention2Ahead):
        forward_ahead(fa)
    else:
        forward(fa)


def shares(rung: int | str, Br: int, d: int) -> dict[str, int]:
    """How the rows of a block are shared out among its warps, where the kernel leaves that open.

    Rung 1 gives a warp a quarter of them, up to 8. Rung 5 gives it 32, or 16 where the copies of a row need more warps.
    """
    if rung == 1:
        return {"Rows": max(n for n in range(1, 9) if Br % n == 0 and n <= max(1, Br // 4))}
    return {"Warps": min(max(d // 32, Br // 32, 1), max(Br // 16, 1))} if rung == 5 else {}


def launch_kernel(fa: FlashAttention2Registers, device: str = "gpu") -> tuple[np.ndarray, np.ndarray]:
    """O and L, as float32, from the kernel of the program's rung, launched on outputs filled with NaN.

    Raises:
        LaunchError: the sizes do not fit this GPU; says which would. KernelError: it failed while it ran.
    """
    a, T = fa.a, fa.dtype
    whole = a.Nq % a.Br == 0 and a.Nk % a.Bc == 0
    flags = {
        **shares(fa.rung.name, a.Br, a.d),
        "Causal": int(a.causal),
        "Aligned": int(whole),
        "Stages": fa.stages,
        "Layout": SWIZZLED,
    }
    template = template_for(fa.kernel, {"Br": a.Br, "Bc": a.Bc, "D": a.d}, T, **flags)
    O, L = stored(np.zeros(a.Q.shape), T), np.empty(a.Q.shape[:3], np.float32)
    arrays = {"Q": stored(a.Q, T), "K": stored(a.K, T), "V": stored(a.V, T), "O": O, "L": L}
    numbers = {"Nq": a.Nq, "Nk": a.Nk, "scale": a.scale, "causal": a.causal, "Hq": a.Q.shape[1], "Hkv": a.K.shape[1]}
    launch(fa.kernel, template, arrays | numbers, device)
    return loaded(O, T).reshape(a.given), L.reshape(a.given[:-1])


def run_rung(Q: Any, K: Any, V: Any, *, device: str = "auto", record: Any = True, **options: Any) -> Run:
    """What :func:`flashviz.flash_attention_2` does with ``rung=``."""
    where = choose_device(device)
    fa = program(Q, K, V, record=record, **options)
    return run_on(where, fa, loops, lambda: launch_kernel(fa, where), record, fa.params)
