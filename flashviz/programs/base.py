"""What all tile programs share: actions that record themselves as steps, and the result of a run.

An action is a verb of the algorithm at tile level (``load_q``, ``scores`` …). Performing one does its arithmetic on
real tiles and records what it read and wrote, so whoever calls the actions (the program's own loops, a replayed trace
of the CUDA kernel, a reader's loop in a notebook cell) makes a recording by doing so.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from flashviz.events import Source
from flashviz.recorder import Recorder
from flashviz.recording import Param, Recording
from flashviz.slots import Block, Slot

if TYPE_CHECKING:
    from flashviz.cuda.trace import Action, TracedBlock

Method = TypeVar("Method", bound=Callable[..., None])


@dataclass(frozen=True, eq=False)
class Run:
    """What a run gave.

    Args:
        O: the output, float32, shaped like the queries.
        L: logsumexp of each query's scores, natural logarithm, float32.
        recording: what was done, None with ``record=False``.
        device: where O and L were really computed: ``"numpy"``, ``"cpu"`` or ``"gpu"``.
        params: sizes and options.
    """

    O: np.ndarray
    L: np.ndarray
    recording: Recording | None
    device: str
    params: dict[str, Param] = field(default_factory=dict)

    def __repr__(self) -> str:
        steps = "not recorded" if self.recording is None else f"{len(self.recording.steps)} steps"
        return f"Run(O {self.O.shape}, L {self.L.shape}, device={self.device!r}, {steps})"


def quiet() -> np.errstate:
    """Inf and NaN of an algorithm with a fault show in its recording: NumPy need not warn as well."""
    return np.errstate(invalid="ignore", over="ignore")


def action(text: str, part: str = "") -> Callable[[Method], Method]:
    """Mark a method as an action: performing it is one step, or one part of a composite step.

    Args:
        text: what the step is called, after the block and the loop variable: ``"fill Sij"``.
        part: its own name inside a composite step: consecutive actions with the same ``text``, block and loop
            variables become parts of one step, and their moves in one direction one transfer.
    """

    def mark(method: Method) -> Method:
        names = list(inspect.signature(method).parameters)[1:]

        @functools.wraps(method)
        def perform(self: Program, *args: int, **kwargs: int) -> None:
            if not self.r.in_block:
                raise RuntimeError(f"{method.__name__} before a block has begun: call begin(i) first")
            given = self.counted(method.__name__, {**dict(zip(names, args, strict=False)), **kwargs})
            tiles = {**self.place, **given}
            loops = [(loop, v) for loop, v in zip(self.loop[::2], self.loop[1::2], strict=True) if v in given]
            where = "".join(f"{v} = {given[v]} · " for _, v in loops)
            label = f"{self.r.block_name} · {where}{text}"
            where = ", ".join(f"{loop}: {given[v]}" for loop, v in loops)
            self.prefix = f"[{where}] " if where else ""
            caption = self.prefix + text
            name = method.__name__
            if not part:
                with self.r.step(label, caption, action=name, tiles=tiles), quiet():
                    method(self, *args, **kwargs)
                return
            with (
                self.r.step(label, caption, join=True, tiles=tiles),
                self.r.step(part, caption, action=name, tiles=tiles),
                quiet(),
            ):
                method(self, *args, **kwargs)

        perform.__flashviz_action__ = True  # type: ignore[attr-defined]
        return perform  # type: ignore[return-value]

    return mark


class Program:
    """Base of the tile programs: a recorder, the tile it works on, and its actions' lines in the source.

    ``loop`` names the loops inside a block, outermost first, each with the variable that the actions take:
    ``("KV loop", "j", "Q loop", "i")``. An action's step says the variables that it was given.
    """

    loop: tuple[str, ...] = ("loop", "j")
    r: Recorder
    i = 0
    prefix = ""

    def counted(self, action: str, given: dict[str, int]) -> dict[str, int]:
        """The loop variables of an action: those it was given, and those that a program counts by itself."""
        return given

    def say(self, text: str) -> None:
        """Inside an action: the caption of its step, where it can be said only once the numbers are known."""
        self.r.caption(self.prefix + text)

    @property
    def place(self) -> dict[str, int]:
        """The variables that the block itself fixes, with their values: the row block i, unless it is a loop inside."""
        return {} if "i" in self.loop[1::2] else {"i": self.i}

    def enter(self, kernel: str, block: Block) -> None:
        """A block begins, as a trace of ``kernel`` names it: ``begin`` with its tile, head and batch, as far as it takes them."""
        begin: Callable[..., None] = self.begin  # type: ignore[attr-defined]
        given = {"head": block.head, "batch": block.batch}
        begin(**{name: given.get(name, block.tile) for name in inspect.signature(begin).parameters})

    def in_order(self, blocks: Sequence[TracedBlock]) -> Sequence[TracedBlock]:
        """A traced launch's blocks in the order in which they can be performed: any, where no block waits for another."""
        return blocks

    def elements(self, slot: Slot, array: np.ndarray, first: int) -> np.ndarray:
        """The part of a kernel's array that a slot in HBM names; ``first`` is the first row of the tile in its tensor.

        Here for arrays [B, H, N, ...] that are cut in tiles along N.
        """
        part: np.ndarray = array[slot.head][first : first + slot.shape[0]]
        return part

    def arguments(self, action: Action) -> tuple[int, ...]:
        """What a traced action is given: the coordinates that its TRACE line says, and those that its role says."""
        return action.tiles

    def bound(self) -> float:
        """How far the output of the kernel, which rounds in another order, may be from this program's, both in float32."""
        return 1e-4

    @classmethod
    def action_names(cls) -> tuple[str, ...]:
        """The actions, in the order in which the source defines them."""
        return tuple(n for n, f in vars(cls).items() if getattr(f, "__flashviz_action__", False))

    @classmethod
    def source(cls) -> Source:
        """The program's source text with the lines of each action; of a class made in a notebook, that of the class it is based on."""
        in_file = (k for k in cls.__mro__ if getattr(sys.modules.get(k.__module__), "__file__", None))
        if (home := next(in_file, cls)) is not cls and issubclass(home, Program):
            return home.source()
        module = inspect.getmodule(cls)
        path = inspect.getsourcefile(cls) or ""
        text = inspect.getsource(module) if module is not None else inspect.getsource(cls)
        spans = []
        for name in cls.action_names():
            lines, first = inspect.getsourcelines(inspect.unwrap(getattr(cls, name)))
            spans.append((name, first, first + len(lines) - 1))
        return Source("python", path.replace("\\", "/").rsplit("/", 1)[-1], text, tuple(spans))


def unknown_device(device: Any) -> ValueError:
    """The error for a device that does not exist."""
    return ValueError(f'device={device!r} is none of "auto", "numpy", "cpu", "gpu"')
