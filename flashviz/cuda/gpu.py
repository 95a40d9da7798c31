"""The GPU, through CuPy: whether there is one that really runs a kernel, and launches on it. Nothing else imports CuPy.

`status` is for people: one calm line and the one command that would help. That CuPy imports, or that a module compiles, proves
nothing; only a kernel that ran and returned its value does.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from flashviz.cuda.launching import STATIC_SHARED, Limits, Plan
from flashviz.cuda.signatures import ArgumentError
from flashviz.cuda.tensor_maps import encode
from flashviz.cuda.trace import KernelTrace

REGISTERS = 65_536  # of a multiprocessor, compute capability 7.0 to 12.1; given out to a thread in steps of 8
OPTIONS = ("-std=c++17", "-lineinfo")  # line numbers cost no code, and tools then name source lines
ALIGNED = 16  # bytes: what kernels load at once, and where CuPy's own arrays begin at the least
_PROBE = 'extern "C" __global__ void flashviz_probe(int* x) { *x = 42; }'
_INSTALL = 'pip install "cupy-cuda13x[ctk]"'  # ctk: NVRTC and the rest of CUDA as wheels, no toolkit needed
_INSTALL_12 = 'pip install "cupy-cuda12x[ctk]"'
_FATAL = ("illegal", "misaligned", "launch_failed", "launch failure", "launchfailure", "device-side assert")
_DRIVER = "install the NVIDIA driver from https://www.nvidia.com/drivers"


class KernelError(RuntimeError):
    """A kernel that did not compile or failed while it ran; the message names it."""


class GpuUnavailableError(RuntimeError):
    """The GPU was asked for by name and none is usable; the message says why and what would help."""


@dataclass(frozen=True)
class GpuStatus:
    """Whether kernels run on a GPU here, and if not, why. Versions that are not known are empty.

    ``fix`` is the one command (or step) that would help, empty when nothing is missing or nothing can be done.
    """

    usable: bool
    reason: str
    fix: str = ""
    device: str = ""
    arch: str = ""  # "sm_90"
    driver: str = ""  # the CUDA version that the driver supports, "13.0"
    runtime: str = ""
    nvrtc: str = ""
    cupy: str = ""
    shared_per_block: int = 0  # bytes, opted into
    multiprocessors: int = 0

    @property
    def versions(self) -> str:
        """Device and versions in one line, as far as they are known."""
        parts = [("", f"{self.device} ({self.arch})" if self.device else "")]
        parts += [("driver ", self.driver), ("runtime ", self.runtime), ("NVRTC ", self.nvrtc), ("CuPy ", self.cupy)]
        return ", ".join(label + value for label, value in parts if value)

    @property
    def limits(self) -> Limits:
        """What this GPU allows a launch."""
        arch = int(self.arch.removeprefix("sm_"))
        return Limits(shared_bytes=self.shared_per_block, arch=arch, multiprocessors=self.multiprocessors or 132)


@dataclass(frozen=True)
class Times:
    """Milliseconds of each timed launch, measured by CUDA events after a warm-up."""

    milliseconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median, in milliseconds."""
        return statistics.median(self.milliseconds)


@dataclass(frozen=True)
class Launched:
    """What a launch gave: the arrays that were written, by name (the very arrays passed in), times and trace if asked for."""

    plan: Plan
    outputs: dict[str, Any] = field(repr=False)
    times: Times | None = None
    trace: KernelTrace | None = field(default=None, repr=False)


_status: GpuStatus | None = None
_functions: dict[tuple[str, str, tuple[str, ...], int], tuple[Any, Any]] = {}
_broken = ""  # after an error that ends the process's CUDA context: which launch it was


def status(refresh: bool = False) -> GpuStatus:
    """Whether a kernel runs on a GPU here; never raises. The answer is kept: ask anew with ``refresh``."""
    global _status
    if _status is None or refresh:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _status = _probe()
        except Exception as error:  # whatever a half-installed CUDA does, a notebook goes on without it
            _status = GpuStatus(False, f"The GPU cannot be used: {_line(error)}")
    return _status


def _probe() -> GpuStatus:
    try:
        cupy = import_module("cupy")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "cupy":
            return GpuStatus(False, "CuPy is not installed.", _INSTALL)
        return GpuStatus(False, f"CuPy does not import: {_line(error)}", _INSTALL)
    except Exception as error:  # CuPy raises ImportError, RuntimeError and more when its CUDA is not there
        return GpuStatus(False, f"CuPy does not import: {_line(error)}", _INSTALL)
    runtime = cupy.cuda.runtime
    known: dict[str, Any] = {
        "cupy": str(getattr(cupy, "__version__", "")),
        "driver": _version(runtime.driverGetVersion),
        "runtime": _version(runtime.runtimeGetVersion),
        "nvrtc": _version(lambda: cupy.cuda.nvrtc.getVersion()),
    }
    try:
        count = runtime.getDeviceCount()
    except Exception as error:  # CUDARuntimeError: 35 no driver or an old one, 100 no device
        code = getattr(error, "status", None)
        if code == 35 and not known["driver"].strip("0."):
            return GpuStatus(False, "There is no NVIDIA driver here.", _DRIVER, **known)
        if code == 35:
            reason = (
                f"The NVIDIA driver supports CUDA {known['driver']}, older than this CuPy's CUDA {known['runtime']}."
            )
            return GpuStatus(False, reason, _INSTALL_12 if known["runtime"].startswith("13") else _DRIVER, **known)
        return GpuStatus(
            False, "There is no GPU here." if code == 100 else f"CUDA does not start: {_line(error)}", **known
        )
    if not count:
        return GpuStatus(False, "There is no GPU here.", **known)
    index = runtime.getDevice()
    properties = runtime.getDeviceProperties(index)
    name = properties["name"]
    known |= {
        "device": name.decode() if isinstance(name, bytes) else str(name),
        "arch": f"sm_{properties['major']}{properties['minor']}",
        "shared_per_block": int(properties.get("sharedMemPerBlockOptin") or properties["sharedMemPerBlock"]),
        "multiprocessors": int(properties["multiProcessorCount"]),
    }
    try:
        x = cupy.zeros(1, dtype=np.int32)
        cupy.RawModule(code=_PROBE, options=OPTIONS).get_function("flashviz_probe")((1,), (1,), (x,))
        right = int(x[0]) == 42
    except Exception as error:
        return _explain_probe(error, known)
    if not right:
        return GpuStatus(False, "A test kernel ran on the GPU and returned a wrong value.", **known)
    return GpuStatus(True, f"{known['device']} runs CUDA kernels.", **known)


def _explain_probe(error: Exception, known: dict[str, Any]) -> GpuStatus:
    text = f"{type(error).__name__} {error}"
    install = _INSTALL if str(known["runtime"]).startswith("13") else _INSTALL_12
    if not known["nvrtc"] or "DynamicLibNotFound" in text or ("nvrtc" in text.lower() and "not found" in text.lower()):
        return GpuStatus(False, "NVRTC, the CUDA compiler that CuPy calls, is not installed.", install, **known)
    unsupported = (
        "gpu-architecture",
        "NO_BINARY_FOR_GPU",
        "NoKernelImage",
        "UNSUPPORTED_PTX",
        "InvalidPtx",
        "INVALID_PTX",
    )
    if any(word in text for word in unsupported):
        versions = GpuStatus(False, "", **known).versions
        old = int(known["arch"].removeprefix("sm_")) < 75
        reason = f"This NVRTC compiles nothing that {known['device']} runs: the GPU is too {'old' if old else 'new'} for it ({versions})."
        return GpuStatus(False, reason, _INSTALL_12 if old else _INSTALL, **known)
    return GpuStatus(False, f"A test kernel did not run: {_line(error)}", install, **known)


def run(
    plan: Plan,
    *,
    poison: bool = False,
    repeat: int = 0,
    warm_up: int = 3,
    defines: Sequence[str] = (),
    device_globals: Mapping[str, Any] | None = None,
) -> Launched:
    """Launch ``plan`` on the current GPU and wait for it, so that its errors surface here.

    NumPy arrays are copied to the GPU and outputs copied back into them; CuPy arrays are used where they are. An array that is
    not contiguous, or does not begin at a multiple of 16 bytes, which kernels load at once, reaches the kernel as a copy, and an output
    is copied back. With ``poison`` outputs are filled with
    NaN (all bits set for integers) first. With ``repeat`` the kernel is launched that many times more and timed.
    ``defines`` are macros to compile with; ``device_globals`` are ``extern "C"`` device globals to set before the launch, by name:
    a NumPy scalar sets a variable, a NumPy array sets a pointer to a copy of itself and holds, afterwards, what the kernel wrote there.

    Raises GpuUnavailableError, or KernelError naming the kernel.
    """
    global _broken
    if _broken:
        raise KernelError(_broken)
    cupy = library()
    label = f"{plan.source.path.name}: {plan.instance}"
    try:
        module, function = _function(cupy, plan, defines)
    except Exception as error:
        raise KernelError(f"{label} does not compile for {status().arch}.\n{_details(error)}") from error
    try:
        passed = {name: _in_place(cupy, value) if _is_array(value) else value for name, value in plan.arguments.items()}
        for name in plan.outputs if poison else ():
            if passed[name].dtype.kind == "f":
                passed[name].fill(np.nan)
            else:
                passed[name].view(np.uint8).fill(255)
        launch = _launch(function, plan, passed)
        held = {name: _set_global(cupy, module, name, value) for name, value in (device_globals or {}).items()}
        stream = cupy.cuda.get_current_stream()
        launch()
        stream.synchronize()
        times = _time(cupy, launch, repeat, warm_up) if repeat else None
        for name in plan.outputs:
            given = plan.arguments[name]
            if isinstance(given, np.ndarray):
                given[...] = cupy.asnumpy(passed[name])
            elif passed[name] is not given:
                given[...] = passed[name]
        for name, value in (device_globals or {}).items():
            if isinstance(value, np.ndarray):
                value.view(np.uint8)[...] = cupy.asnumpy(held[name])
        stream.synchronize()
    except Exception as error:
        message = (
            f"{label}, grid {plan.grid}, block {plan.block}, {plan.shared_bytes:,} bytes of shared memory, failed on the GPU: "
            f"{_line(error)}"
        )
        if any(word in str(error).lower() for word in _FATAL):
            _broken = (
                f"An earlier launch, of {label}, left the GPU unusable in this process: restart the notebook's kernel."
            )
            message += " Until the notebook's kernel is restarted, no further launch works in this process."
        raise KernelError(message) from error
    return Launched(plan, {name: plan.arguments[name] for name in plan.outputs}, times)


def _function(cupy: Any, plan: Plan, defines: Sequence[str]) -> tuple[Any, Any]:
    """The module and the function in it.

    With macros (which trace) as many blocks fit on a multiprocessor as without them, at the price of registers where need be: else
    what is looked at would be another run.
    """
    made = _compiled(cupy, plan, defines)
    if defines:
        blocks, untraced = (_blocks(cupy, plan, f) for f in (made[1], _compiled(cupy, plan, ())[1]))
        if blocks < untraced:
            made = _compiled(cupy, plan, defines, max(16, REGISTERS // (math.prod(plan.block) * untraced) // 8 * 8))
    return made


def _compiled(cupy: Any, plan: Plan, defines: Sequence[str], registers: int = 0) -> tuple[Any, Any]:
    """The same, compiled once for each source, instantiation, set of macros, limit of ``registers`` a thread (0: none) and device."""
    header = plan.source.header
    target = (f"-arch=sm_{header.arch}a",) if header.exact else ()  # else CuPy names the GPU's own
    options = (*OPTIONS, *target, *(f"-D{macro}" for macro in defines))
    options += (f"--maxrregcount={registers}",) if registers else ()
    key = (plan.source.assembled, plan.instance, options, int(cupy.cuda.runtime.getDevice()))
    if key not in _functions:
        module = cupy.RawModule(code=plan.source.assembled, options=options, name_expressions=(plan.instance,))
        _functions[key] = module, module.get_function(plan.instance)
    return _functions[key]


def _blocks(cupy: Any, plan: Plan, function: Any) -> int:
    """How many blocks of a launch fit on a multiprocessor at once."""
    _allow_shared(plan, function)
    most = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor
    return int(most(function.kernel.ptr, math.prod(plan.block), plan.shared_bytes))


def _allow_shared(plan: Plan, function: Any) -> None:
    if plan.shared_bytes > STATIC_SHARED:
        function.max_dynamic_shared_size_bytes = plan.shared_bytes


def library() -> Any:
    """CuPy, where `status` says that a GPU is usable. Raises GpuUnavailableError."""
    found = status()
    if not found.usable:
        raise GpuUnavailableError(" ".join(filter(None, [found.reason, found.fix and f"To add it: {found.fix}"])))
    return import_module("cupy")


def _in_place(cupy: Any, value: Any) -> Any:
    """An array as kernels take it, contiguous and from a multiple of 16 bytes on: itself where it is so, else a copy."""
    array = cupy.ascontiguousarray(cupy.asarray(value))
    return array.copy() if array.data.ptr % ALIGNED else array


def launcher(plan: Plan) -> Callable[[], None]:
    """What launches ``plan`` on CuPy's current stream and does not wait: to time it among other things.

    Its arrays are CuPy's, contiguous and from a multiple of 16 bytes on, else ArgumentError; raises GpuUnavailableError, or what the compiler says.
    """
    cupy = library()
    for name, value in plan.arguments.items():
        if _is_array(value) and (
            isinstance(value, np.ndarray) or not value.flags.c_contiguous or value.data.ptr % ALIGNED
        ):
            raise ArgumentError(
                f"{plan.source.name}: argument {name} must be a contiguous CuPy array that begins at a multiple of 16 bytes, for this."
            )
    return _launch(_function(cupy, plan, ())[1], plan, plan.arguments)


def _launch(function: Any, plan: Plan, passed: Mapping[str, Any]) -> Callable[[], None]:
    """A launch of a compiled function with arrays on the GPU; those that are tensor maps are encoded here, once."""
    _allow_shared(plan, function)
    handed = tuple(encode(n, plan.maps[n], v.data.ptr) if n in plan.maps else v for n, v in passed.items())
    return lambda: function(plan.grid, plan.block, handed, shared_mem=plan.shared_bytes)


def _set_global(cupy: Any, module: Any, name: str, value: Any) -> Any:
    """Set a device global; the array on the GPU that it points at, where ``value`` is an array."""
    array = cupy.asarray(value.view(np.uint8)) if isinstance(value, np.ndarray) else None
    cell = np.array(value if array is None else array.data.ptr, None if array is None else np.uint64)
    place = cupy.ndarray((cell.nbytes,), np.uint8, module.get_global(name))
    place[...] = cupy.asarray(np.frombuffer(cell.tobytes(), np.uint8))
    return array


def _time(cupy: Any, launch: Any, repeat: int, warm_up: int) -> Times:
    for _ in range(warm_up):
        launch()
    pairs = [(cupy.cuda.Event(), cupy.cuda.Event()) for _ in range(repeat)]
    for start, end in pairs:
        start.record()
        launch()
        end.record()
    pairs[-1][1].synchronize()
    return Times(tuple(float(cupy.cuda.get_elapsed_time(start, end)) for start, end in pairs))


def _is_array(value: object) -> bool:
    return hasattr(value, "shape") and not isinstance(value, np.generic)


def _version(ask: Any) -> str:
    """ "13.0" from 13000, or from (13, 0); empty when asking fails."""
    try:
        answer = ask()
    except Exception:
        return ""
    if isinstance(answer, tuple):
        return ".".join(map(str, answer))
    return f"{int(answer) // 1000}.{int(answer) % 1000 // 10}"


def _line(error: BaseException) -> str:
    """The first line that says something of an error, with its type."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip(" =-*")), "")
    return f"{type(error).__name__}: {text}".rstrip(": ").rstrip(".") + "."


def _details(error: BaseException) -> str:
    """The compiler's error lines, at most twelve."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return "\n".join(lines[:12])
