"""Where FlashAttention-3 runs: as a tile program anywhere, as a kernel on Hopper GPUs alone."""

from __future__ import annotations

import numpy as np

from flashviz.programs.device import DeviceError, choose_device
from flashviz.programs.flash_attention_3_block import KERNEL, Flash3Block
from flashviz.programs.rung_kernels import launch, loaded, stored, template_for


def launch_kernel(fa: Flash3Block) -> tuple[np.ndarray, np.ndarray]:
    """O and L, as float32, from ``kernels/flash_attention_3.cu`` on this GPU, launched on outputs filled with NaN.

    Raises:
        LaunchError: the sizes do not fit, or this is no Hopper GPU; says what runs here. KernelError: it failed while it ran.
    """
    a, T = fa.a, fa.dtype
    template = template_for(KERNEL, {"Br": a.Br, "Bc": a.Bc, "D": a.d}, T, Causal=int(a.causal), Stages=fa.stages)
    O, L = stored(np.zeros(a.Q.shape), T), np.empty(a.Q.shape[:3], np.float32)
    arrays = {"Q": stored(a.Q, T), "K": stored(a.K, T), "V": stored(a.V, T), "O": O, "L": L}
    numbers = {"Nq": a.Nq, "Nk": a.Nk, "scale": a.scale, "Hq": a.Q.shape[1], "Hkv": a.K.shape[1]}
    launch(KERNEL, template, arrays | numbers, "gpu")
    return loaded(O, T).reshape(a.given), L.reshape(a.given[:-1])


def where_to_run(fa: Flash3Block, device: str) -> str:
    """``"numpy"`` or ``"gpu"``; on ``"auto"`` a GPU only where the kernel takes this call.

    Raises:
        ValueError: no such device. DeviceError: the one asked for cannot run this; says why and what can.
    """
    why = ""
    sizes = {"Br": (fa.a.Br, (128, 192)), "Bc": (fa.a.Bc, (64, 128)), "d": (fa.a.d, (64, 128))}
    for name, (value, taken) in sizes.items():
        if value not in taken:
            why = why or f"{KERNEL} takes {name} = {' or '.join(map(str, taken))}, not {value}"
    if fa.share != 64:
        why = (
            why
            or f"a consumer of {KERNEL} has 64 rows; Br={fa.a.Br} with consumers={len(fa.consumers)} gives it {fa.share}"
        )
    if device == "cpu":
        from flashviz import cuda

        raise DeviceError(f'device="cpu": {cuda.find(KERNEL).not_on_processor} device="numpy" runs the tile program.')
    if device == "auto" and not why:
        from flashviz.cuda import gpu

        status = gpu.status()
        why = "" if status.arch == "sm_90" else f"{KERNEL} runs on sm_90 alone"
    return choose_device(device, why)


def multiprocessors_here() -> int:
    """How many blocks the kernel starts on this GPU, where there is work for them."""
    from flashviz.cuda import gpu

    return gpu.status().limits.multiprocessors
