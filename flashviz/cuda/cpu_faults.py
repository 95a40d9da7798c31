"""What the processor found, in words: one sentence for what happened, one for what it means on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flashviz.cuda.cpu_results import Fault, Side
from flashviz.cuda.launching import Plan

MEANING: Mapping[str, str] = {
    "race": "The order of the two is left to chance on a GPU: a __syncthreads() that every thread reaches must lie between them.",
    "unwritten": "What lies there is whatever was in that memory before: write it first, also for the rows and keys past the end.",
    "bounds": "On a GPU this reads or overwrites a neighbour, or ends the launch with an illegal access.",
    "barrier": "A barrier waits for all threads of the block: on a GPU this hangs or goes on with half of the work done.",
    "blocks": "Blocks run in any order and at the same time, and no barrier joins them: give each its own elements.",
    "warp": "A warp intrinsic waits for every lane that its mask names: on a GPU this hangs or returns an undefined value.",
    "wild": "On a GPU this is an illegal access, which ends the launch and the process's use of the GPU.",
    "input": "The kernel declares this array const: others may read it from a cache that does not see the write.",
    "shared": "A block gets no more shared memory than the launch asks for.",
    "crash": "The kernel cannot go on from here.",
    "endless": "A loop that never ends, or threads that wait for each other in a loop of their own.",
    "trap": "The kernel stopped itself.",
    "pending": "An asynchronous copy is there after a cp_async_commit() and the cp_async_wait that covers it, for other threads than the one "
    "that issued it after a barrier behind that.",
    "aligned": "On a GPU this is a misaligned address, which ends the launch and the process's use of the GPU.",
    "missing": "The array keeps what was in it before at these elements.",
    "order": "A kernel without races gives the same bits in every order.",
}


def thread_name(side: Side, plan: Plan | None = None) -> str:
    """``thread 3``, or ``thread (3, 1)`` where the block has two extents."""
    x, y, z = side.thread
    extents = 1 if plan is None else max([1, *(n for n, size in enumerate(plan.block, 1) if size > 1)])
    if plan is None:
        extents = 3 if z else 2 if y else 1
    return f"thread {x}" if extents == 1 else f"thread ({', '.join(map(str, (x, y, z)[:extents]))})"


def block_name(block: Sequence[int]) -> str:
    """``block (2, 0, 0)``."""
    return f"block ({', '.join(map(str, block))})"


def place_name(side: Side, file: str = "") -> str:
    """``line 80``; ``line 12 of attention.cuh (called at line 80)`` where it happened in a function, or in another file than ``file``."""
    if not side.places:
        return "an unknown line"
    named = [f"line {line}" if not file or name == file else f"line {line} of {name}" for name, line in side.places]
    calls = " and ".join(filter(None, [", ".join(named[1:-1]), *named[1:][-1:]]))
    return named[0] + (f" (called at {calls})" if calls else "")


def element_name(fault: Fault, shape: Sequence[int] = ()) -> str:
    """``Sij[3, 5]`` where ``shape`` is known and holds it, else ``Sij[53]``."""
    if not fault.array:
        return "memory that belongs to no array"
    total = 1
    for size in shape:
        total *= size
    if not shape or total != fault.count or not 0 <= fault.element < fault.count:
        return f"{fault.array}[{fault.element}]"
    index, left = [], fault.element
    for size in reversed(shape):
        index.append(left % size)
        left //= size
    return f"{fault.array}[{', '.join(map(str, reversed(index)))}]"


def sentence(fault: Fault, file: str = "", shape: Sequence[int] = (), plan: Plan | None = None) -> str:
    """What happened, in one sentence: array, element, threads and lines. ``file`` is the kernel's own, whose lines need no file name."""
    what = element_name(fault, shape)
    sides = fault.sides
    who = [thread_name(side, plan) for side in sides]
    where = [place_name(side, file) for side in sides]
    did = ["writes" if side.write else "reads" for side in sides]
    block = block_name(sides[0].block) if sides else ""
    match fault.kind:
        case "race":
            return f"{what}: {who[0]} {did[0]} it at {where[0]} and {who[1]} {did[1]} it at {where[1]}, with no barrier between ({block})."
        case "blocks":
            other = block_name(sides[1].block)
            return f"{what}: {block} {did[0]} it at {where[0]} and {other} {did[1]} it at {where[1]} ({who[1]})."
        case "pending":
            own = "the copy that it" if who[0] == who[1] else f"the copy that {who[0]}"
            return (
                f"{what}: {who[1]} {did[1]} it at {where[1]} while {own} started at {where[0]} is under way ({block})."
            )
        case "aligned":
            it = f"{what}: " if fault.array else ""
            return f"{it}{who[0]} {did[0]} {fault.detail}, at {where[0]} ({block})."
        case "unwritten":
            return f"{what}: {who[0]} reads it at {where[0]}, and nothing has written it ({block})."
        case "bounds" if not sides:
            return f"{what} was overwritten, and {fault.array} ends at {fault.count - 1}."
        case "bounds":
            side = "before its start" if fault.element < 0 else f"past its end, {fault.array}[{fault.count - 1}]"
            return f"{what}: {who[0]} {did[0]} {side}, at {where[0]} ({block})."
        case "barrier" if fault.detail:
            return f"{who[0]} waits at the barrier of {where[0]}, which {fault.detail} without reaching, {who[1]} among them ({block})."
        case "barrier":
            return f"{who[0]} waits at the barrier of {where[0]} and {who[1]} at that of {where[1]} ({block})."
        case "warp":
            rest = f"; {who[1]} is at {where[1]}" if len(sides) > 1 else ""
            return f"{fault.array}: {who[0]} calls it at {where[0]}, and {fault.detail}{rest} ({block})."
        case "wild" if fault.detail:
            at = f" ({what})" if fault.array else ""
            return f"{who[0]} uses an address{at} at {where[0]}, and {fault.detail} ({block})."
        case "wild":
            return f"{who[0]} {did[0]} memory that belongs to no array, at {where[0]} ({block})."
        case "input":
            return f"{what}: {who[0]} writes it at {where[0]}, and the kernel declares {fault.array} const ({block})."
        case "shared":
            needs = f"needs {fault.element:,} bytes" if fault.element else "needs more than there is"
            limit = f"{fault.detail} shared memory ends at {fault.count:,}" if fault.element else fault.detail
            return f"{fault.array} {needs}; {limit} (carved at {where[0] if sides else 'an unknown line'})."
        case "crash":
            return f"{who[0]} stopped at {where[0]}: {fault.detail} ({block})."
        case "endless":
            return f"The kernel was still running at the time limit; {who[0]} was at {where[0]} ({block})."
        case "trap":
            return f"{who[0]} stopped at {where[0]}: {fault.detail} ({block})."
    return f"{fault.kind}: {what}"
