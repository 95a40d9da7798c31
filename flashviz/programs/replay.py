"""A traced kernel's actions, performed: what the kernel said that it did becomes a recording like any other.

Nothing here knows an algorithm. A trace names actions and tiles; the program has methods of these names, and performing
them in the kernel's order does the arithmetic and records it. If the kernel did what it named, the two outputs agree.

>>> from flashviz import cuda
>>> from flashviz.programs import flash_attention_2 as fa2
>>> fa = fa2.FlashAttention2(*np.eye(4, dtype="float32")[None].repeat(3, 0), Br=2, Bc=2)
>>> action = lambda n, name, *tiles: cuda.trace.Action(name, tiles, 0, n, n + 1)
>>> did = [("load_q", 0), ("load_k", 1), ("load_v", 1), ("scores", 1), ("softmax", 1), ("accumulate", 1), ("store_o", 0)]
>>> actions = tuple(action(n, *what) for n, what in enumerate(did))
>>> block = cuda.trace.TracedBlock(Block(0, 0, 0), 0, 0, 7, actions)
>>> trace = cuda.KernelTrace("flash_attention_2", "cpu", (2, 1, 1), (256, 1, 1), (block,))
>>> replay(fa, [trace])
>>> [step.label for step in fa.r.recording().steps][2:]
['block 0 · load Qi', 'block 0 · j = 1 · load Kj, Vj', 'block 0 · j = 1 · fill Sij', \
'block 0 · j = 1 · update mi, li and Oi', 'block 0 · write Oi, Li']
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from flashviz.events import Event, Launch, Trace
from flashviz.programs.base import Program, Run, quiet
from flashviz.programs.roles import Act, Deadlock, side_by_side
from flashviz.recording import Recording
from flashviz.slots import Block

if TYPE_CHECKING:
    from flashviz.cuda.trace import Action, KernelTrace, TracedBlock

T = TypeVar("T")
P = TypeVar("P", bound=Program)


class ReplayError(RuntimeError):
    """A trace that the program cannot perform, or whose output is not the kernel's."""


def run_kernel(program: P, loops: Callable[[P], None], launch: Callable[[], T], device: str) -> tuple[T, Recording]:
    """Call ``launch`` with tracing on and replay what its kernels did through ``program``.

    Args:
        program: nothing has been performed by it yet.
        loops: the program's own loops, for how many actions to expect.
        launch: launches the algorithm's kernels, in order, on ``device``; gives their output or a tuple of them.
        device: ``"cpu"`` or ``"gpu"``.

    Returns:
        What ``launch`` gave, and the recording of what was replayed: source ``"kernel"``, every event with its trace.

    Raises:
        ReplayError: the trace names what the program has not, or the replayed output is not the kernel's.
    """
    from flashviz import cuda

    with cuda.tracing(most_actions(program, loops)) as traces:
        given = launch()
    replay(program, traces)
    result = program.run()  # type: ignore[attr-defined]
    outputs: Any = given if isinstance(given, tuple) else (given,)
    check_outputs(program, outputs, result)
    recording = as_traced(result.recording, traces, device)
    if device == "gpu":  # a timeline has a row for each, also for those that had nothing to do
        recording = replace(recording, params={**recording.params, "multiprocessors": cuda.status().multiprocessors})
    return given, recording


def run_on(
    device: str, program: P, loops: Callable[[P], None], launch: Callable[[], tuple[Any, Any]], record: Any, params: Any
) -> Run:
    """Where every public function ends: the program's own loops on ``"numpy"``, else its kernels, whose trace is replayed unless ``record`` is False."""
    if device == "numpy":
        loops(program)
        return program.run()  # type: ignore[attr-defined, no-any-return]
    if record is False:
        return Run(*launch(), None, device, params)
    (O, L), recording = run_kernel(program, loops, launch, device)
    return Run(O, L, recording, device, params)


def most_actions(program: P, loops: Callable[[P], None]) -> list[int]:
    """How many actions a block of each launch performs at most, by going through the loops without performing any."""
    counts = _Counts()
    ghost = copy.copy(program)
    ghost.r = counts  # type: ignore[assignment]
    for name in program.action_names():
        vars(ghost)[name] = counts.count
    loops(ghost)
    return [most for most in counts.most if most]


class _Counts:
    """In place of a recorder: counts the actions of each block, does nothing else."""

    trace = None

    def __init__(self) -> None:
        self.most, self.now = [0], 0

    def launch(self, *args: Any, **kwargs: Any) -> None:
        self.most.append(0)
        self.now = 0

    def block(self, *args: Any, **kwargs: Any) -> None:
        self.now = 0

    def count(self, *args: Any, **kwargs: Any) -> None:
        self.now += 1
        self.most[-1] = max(self.most[-1], self.now)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def replay(program: Program, traces: Sequence[KernelTrace]) -> None:
    """Perform what the traces of the algorithm's launches name, block by block, each block's actions in its order.

    Where a block has roles, each role's actions are performed in that role's order, and none before what it waits for has come: the
    times of different roles say nothing that is finer than a tick of the clock.

    Raises:
        ReplayError: naming the kernel, the block and the action that the program cannot perform.
    """
    for trace in traces:
        for block in program.in_order(trace.blocks):
            where = f"{trace.kernel}, block {tuple(block.block)} (batch, head, tile)"
            program.r.trace = whole(block)
            try:
                program.enter(trace.kernel, block.block)
            except (IndexError, RuntimeError) as error:
                raise ReplayError(f"{where}: {error}") from error
            roles = dict.fromkeys(action.role for action in block.actions)
            if any(roles):
                acts = {role: _acts(program, block, role, where) for role in roles}
                try:
                    side_by_side(program, acts)  # type: ignore[arg-type]
                except (Deadlock, IndexError) as error:
                    raise ReplayError(f"{where}: {error}") from error
            else:
                for action in block.actions:
                    perform(program, action, block.block, where)
    program.r.trace = None


def _acts(program: Program, block: TracedBlock, role: str, where: str) -> Iterator[Act]:
    """What a role of a traced block did, as `side_by_side` takes it."""
    for action in block.actions:
        if action.role == role:
            given = replace(action, tiles=program.arguments(action))

            def act(*_: int, given: Action = given) -> None:
                perform(program, given, block.block, where)

            act.__name__ = action.name
            yield act, given.tiles


def whole(block: TracedBlock) -> Trace:
    """Where a block ran, and from when to when."""
    multiprocessor = block.actions[0].multiprocessor if block.actions else -1
    return Trace("", multiprocessor, block.begin, block.end)


_known: dict[type[Program], dict[str, int]] = {}


def _actions(kind: type[Program]) -> dict[str, int]:
    """A program's actions and how many tile coordinates each takes."""
    if kind not in _known:
        _known[kind] = {n: len(inspect.signature(getattr(kind, n)).parameters) - 1 for n in kind.action_names()}
    return _known[kind]


def perform(program: Program, action: Action, block: Block, where: str = "") -> None:
    """Perform one traced action.

    The action takes as many of the coordinates as its method has parameters. Where it has none, the kernel still says one:
    it must be the block's own tile, or 0.

    Raises:
        ReplayError: no such action, other coordinates than it takes, or a tile that is not there.
    """
    known = _actions(type(program))
    said = f"{where or type(program).__name__}: TRACE({', '.join([action.name, *map(str, action.tiles)])})"
    if action.name not in known:
        raise ReplayError(f"{said} is no action of {type(program).__name__}; it has {', '.join(known)}.")
    takes = known[action.name]
    idle = action.tiles[takes:]
    if len(action.tiles) < takes or (takes and idle) or any(tile not in (0, block.tile) for tile in idle):
        wants = f"{takes} tile coordinates" if takes else f"the block's own tile, {block.tile}"
        raise ReplayError(f"{said}: {type(program).__name__}.{action.name} takes {wants}.")
    program.r.trace = Trace(action.role, action.multiprocessor, action.start, action.end)
    try:
        getattr(program, action.name)(*action.tiles[:takes])
    except (IndexError, ValueError) as error:
        raise ReplayError(f"{said} cannot be performed: {error}") from error


def check_outputs(program: Program, given: Sequence[np.ndarray], result: Any) -> None:
    """Hold the kernel's outputs against the replayed ones.

    Raises:
        ReplayError: an element differs by more than ``program.bound()``, or is NaN on one side: the kernel did not do what it named.
    """
    names = [name for name in ("O", "L", "y", "o") if getattr(result, name, None) is not None]
    limit = program.bound()
    if not limit >= 0:  # inputs with NaN bound nothing: what is compared then is where the outputs are NaN
        limit = np.inf
    for name, kernel in zip(names, given, strict=True):
        replayed = getattr(result, name).reshape(kernel.shape)
        with quiet():
            wrong = ~(np.abs(kernel - replayed) <= limit) & (kernel != replayed)
        wrong &= ~(np.isnan(kernel) & np.isnan(replayed))
        if wrong.any():
            at = tuple(int(n) for n in np.argwhere(wrong)[0])
            raise ReplayError(
                f"{name}{list(at)} is {kernel[at]:.6g} from the kernel and {replayed[at]:.6g} from the actions that it named, "
                f"further apart than rounding allows ({limit:.2g}); {int(wrong.sum()):,} of {wrong.size:,} elements are. "
                "A TRACE line names what the kernel does not do, or an action computes what the program's does not."
            )


def as_traced(recording: Recording, traces: Sequence[KernelTrace], device: str) -> Recording:
    """The recording as that of a kernel: its source, its device, and the time of each launch."""
    events: list[Event] = []
    for event in recording.events:
        if isinstance(event, Launch) and event.launch < len(traces):
            trace = traces[event.launch]
            event = replace(event, trace=Trace("", -1, trace.begin, trace.end), grid=trace.grid, threads=trace.threads)
        events.append(event)
    return replace(recording, source="kernel", device=device, events=tuple(events))
