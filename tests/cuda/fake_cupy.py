"""A CuPy made of NumPy: records what a launch is given, and computes flash_attention_2 where it is asked to run it."""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashviz.cuda import cpu_library
from flashviz.cuda.cpu_build import build


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class CompileException(Exception):
    pass


@dataclass
class Machine:
    """What the fake finds. An exception in place of a value is raised when the value is asked for."""

    count: Any = 1
    driver: Any = 13000
    runtime: Any = 13000
    nvrtc: Any = (13, 0)
    capability: tuple[int, int] = (9, 0)
    optin: int = 232_448
    probe: int = 42
    fit: Any = lambda options: 2  # how many blocks fit on a multiprocessor, of what was compiled with these options
    compile_error: Exception | None = None
    launch_error: Exception | None = None
    sync_error: Exception | None = None
    modules: list[dict[str, Any]] = field(default_factory=list)
    launches: list[dict[str, Any]] = field(default_factory=list)
    poisoned: list[bool] = field(default_factory=list)


def _ask(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


class Array(np.ndarray):
    """Knows its address as a CuPy array does."""

    @property
    def data(self) -> Any:
        return types.SimpleNamespace(ptr=self.ctypes.data)


class _Function:
    def __init__(self, machine: Machine, name: str, module: Any = None) -> None:
        self.machine, self.name, self.module = machine, name, module
        self.max_dynamic_shared_size_bytes = 48 * 1024
        self.kernel = types.SimpleNamespace(ptr=self)

    def __call__(self, grid: Any, block: Any, args: Any, shared_mem: int = 0) -> None:
        machine = self.machine
        if machine.launch_error:
            raise machine.launch_error
        if self.name == "flashviz_probe":
            args[0][0] = machine.probe
            return
        assert shared_mem <= self.max_dynamic_shared_size_bytes, "the opt-in attribute was not set"
        machine.launches.append(
            {"function": self.name, "grid": grid, "block": block, "args": args, "shared_mem": shared_mem}
        )
        kernel = self.name.partition("<")[0]
        outputs = [a for a in args[3:5] if isinstance(a, np.ndarray)]
        machine.poisoned.append(all(np.isnan(a).all() for a in outputs))
        if "-DFLASHVIZ_TRACE" in self.module.options:
            self.on_the_processor(grid, block, args, shared_mem)
        elif kernel in KERNELS:
            KERNELS[kernel](*args)

    def on_the_processor(self, grid: Any, block: Any, args: Any, shared_mem: int) -> None:
        """A traced launch really runs, so that what it writes down is true."""
        library = cpu_library.load(build(self.module.code, [self.name], defines=("FLASHVIZ_TRACE",)).path)
        for name, cell in self.module.globals.items():
            library.set_global(name, cell.view(np.uint64)[0])
        named = {f"{n}": arg for n, arg in enumerate(args)}
        outputs = [n for n, arg in named.items() if isinstance(arg, np.ndarray) and arg.ndim]
        assert library.launch(0, grid, block, shared_mem, named, outputs).fault is None


def _flash_attention_2(
    Q: Any, K: Any, V: Any, O: Any, L: Any, Nq: Any, Nk: Any, scale: Any, causal: Any, Hq: Any, Hkv: Any, *limits: Any
) -> None:
    q, k, v = (
        x.astype(np.float64).reshape(-1, h, n, x.shape[-1]) for x, h, n in ((Q, Hq, Nq), (K, Hkv, Nk), (V, Hkv, Nk))
    )
    kv_len, window = map(int, limits)
    k, v, Nk = k[:, :, :kv_len], v[:, :, :kv_len], kv_len
    s = q @ np.repeat(k, Hq // Hkv, 1).swapaxes(-1, -2) * float(scale)
    if causal:
        s[..., np.arange(Nk)[None] > np.arange(Nq)[:, None] + int(Nk) - int(Nq)] = -np.inf
    if window:
        s[..., np.arange(Nk)[None] <= np.arange(Nq)[:, None] + int(Nk) - int(Nq) - window] = -np.inf
    base = s.max(-1, keepdims=True)
    base[np.isinf(base)] = 0
    total = np.exp(s - base).sum(-1, keepdims=True)
    O[...] = (np.exp(s - base) @ np.repeat(v, Hq // Hkv, 1) / np.where(total == 0, 1, total)).reshape(O.shape)
    with np.errstate(divide="ignore"):
        L[...] = (base + np.log(total)).reshape(L.shape)


KERNELS: dict[str, Any] = {"flash_attention_2": _flash_attention_2}
"""What the fake computes, by the kernel's name; a test may add its own (monkeypatch.setitem)."""


def make(machine: Machine) -> types.ModuleType:
    """A module to put into sys.modules as ``cupy``."""
    cupy: Any = types.ModuleType("cupy")
    cupy.__version__ = "14.0"
    for name in ("zeros", "empty", "empty_like", "full", "concatenate", "asarray"):
        setattr(cupy, name, getattr(np, name))
    cupy.asarray = lambda x: (
        np.array(x, order="K").view(Array) if isinstance(x, np.ndarray) and x.ndim else np.asarray(x)
    )
    cupy.ascontiguousarray = lambda x: np.asanyarray(x, order="C")  # still knows its address
    cupy.asnumpy = np.asarray
    cupy.ndarray = lambda shape, dtype, memory: memory[: shape[0]].view(dtype)

    class RawModule:
        def __init__(self, code: str, options: Any = (), name_expressions: Any = None) -> None:
            machine.modules.append({"code": code, "options": options, "name_expressions": name_expressions})
            self.names, self.code, self.options = name_expressions, code, options
            self.globals: dict[str, np.ndarray] = {}

        def get_global(self, name: str) -> np.ndarray:
            return self.globals.setdefault(name, np.zeros(8, np.uint8))

        def get_function(self, name: str) -> _Function:
            if machine.compile_error and name != "flashviz_probe":
                raise machine.compile_error
            if isinstance(machine.nvrtc, Exception):
                raise machine.nvrtc
            return _Function(machine, name, self)

    class Event:
        def record(self) -> None: ...

        def synchronize(self) -> None: ...

    def synchronize() -> None:
        if machine.sync_error:
            raise machine.sync_error

    cupy.RawModule = RawModule
    runtime = types.SimpleNamespace(
        getDeviceCount=lambda: _ask(machine.count),
        driverGetVersion=lambda: _ask(machine.driver),
        runtimeGetVersion=lambda: _ask(machine.runtime),
        getDevice=lambda: 0,
        getDeviceProperties=lambda _: {
            "name": b"Fake GPU",
            "major": machine.capability[0],
            "minor": machine.capability[1],
            "sharedMemPerBlock": 49_152,
            "sharedMemPerBlockOptin": machine.optin,
            "multiProcessorCount": 132,
        },
        CUDARuntimeError=CUDARuntimeError,
    )
    driver = types.SimpleNamespace(
        occupancyMaxActiveBlocksPerMultiprocessor=lambda function, threads, shared: machine.fit(function.module.options)
    )
    cupy.cuda = types.SimpleNamespace(
        driver=driver,
        runtime=runtime,
        nvrtc=types.SimpleNamespace(getVersion=lambda: _ask(machine.nvrtc)),
        get_current_stream=lambda: types.SimpleNamespace(synchronize=synchronize),
        get_elapsed_time=lambda start, end: 1.5,
        Event=Event,
    )
    return cupy  # type: ignore[no-any-return]
