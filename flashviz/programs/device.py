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
        not_on_gpu: why this call cannot run as a CUDA kernel (on a GPU or on the processor), empty where it can.

    Raises:
        ValueError: no such device. DeviceError: the one asked for is not usable here; says why and what to install.
    """
    if device not in ("auto", "numpy", "cpu", "gpu"):
        raise ValueError(f'device={device!r} is none of "auto", "numpy", "cpu", "gpu"')
    if device == "numpy" or (device == "auto" and not_on_gpu):
        return "numpy"
    if not_on_gpu:
        raise DeviceError(f'device="{device}": {not_on_gpu}; use device="numpy"')
    from flashviz.cuda import cpu, gpu

    status = cpu.status() if device == "cpu" else gpu.status()
    if device == "auto":
        return "gpu" if status.usable else "numpy"
    if not status.usable:
        fix = f" Fix: {status.fix}" if status.fix else ""
        raise DeviceError(f'device="{device}": {status.reason}{fix} device="numpy" runs the tile program anywhere.')
    return str(device)


def kernel_source(name: str, *functions: str) -> Source:
    """A kernel file's text and its actions' lines, to travel with a recording.

    Args:
        name: the file's.
        functions: the kernels whose actions were performed, where the file has several; all of them when not given.
            An action of several kernels has its lines in the first, and where that names it twice, in both places.
    """
    from flashviz.cuda import sources

    found = sources.find(name)
    lines: list[tuple[str, int, int]] = []
    for function in functions or found.kernels:
        known = {action for action, _, _ in lines}
        lines += [place for place in sources.find(name, function).places if place[0] not in known]
    return Source("cuda", found.path.name, found.text, tuple(lines))
