"""Where a run happens: ``"numpy"``, ``"cpu"`` or ``"gpu"``, and the kernel's source beside the program's."""

from __future__ import annotations

from typing import Any

from flashviz.events import Source


class DeviceError(RuntimeError):
    """The device asked for by name is not usable here; the message says why and what to install."""


def choose_device(device: Any, not_on_gpu: str = "") -> str:
    """The device a run will really use.

    Args:
        device: what the caller asked for; ``"auto"`` takes a GPU where one is usable, else NumPy.
        not_on_gpu: why this call cannot run on a GPU, empty where it can.
    """
    if device not in ("auto", "numpy", "cpu", "gpu"):
        raise ValueError(f'device={device!r} is none of "auto", "numpy", "cpu", "gpu"')
    if device == "cpu":
        raise DeviceError(
            'device="cpu" (the CUDA source on the processor) is not part of this version of flashviz; '
            'device="numpy" runs the tile program anywhere'
        )
    if device == "numpy" or (device == "auto" and not_on_gpu):
        return "numpy"
    from flashviz.cuda import gpu

    status = gpu.status()
    if device == "auto":
        return "gpu" if status.usable else "numpy"
    if not_on_gpu:
        raise DeviceError(f'device="gpu": {not_on_gpu}; use device="numpy"')
    if not status.usable:
        fix = f" Fix: {status.fix}" if status.fix else ""
        raise DeviceError(f'device="gpu": {status.reason}{fix} device="numpy" runs the tile program anywhere.')
    return "gpu"


def kernel_source(name: str, *functions: str) -> Source:
    """A kernel file's text and its actions' lines, to travel with a recording.

    Args:
        name: the file's.
        functions: the kernels whose actions were performed, where the file has several; all of them when not given.
            An action of several kernels has its lines in the first.
    """
    from flashviz.cuda import sources

    found = sources.find(name)
    actions: dict[str, tuple[int, int]] = {}
    for function in functions or found.kernels:
        actions |= {k: v for k, v in sources.find(name, function).actions.items() if k not in actions}
    lines = tuple((action, first, last) for action, (first, last) in actions.items())
    return Source("cuda", found.path.name, found.text, lines)
