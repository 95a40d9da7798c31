"""Bank conflicts of a kernel, counted without a GPU: which lines make the lanes of a warp wait for each other at shared memory.

Shared memory has 32 banks, each with every 32nd word of 4 bytes, and a bank gives one word at a time. The kernel runs on the processor
with every access observed; the accesses of a warp's lanes at one line are put together, and counted by the rule that
``flashviz.warp.wavefronts`` states. It is a count of addresses, not a measurement: what a GPU hides behind other work is not in it, nor
that it may serve two phases at once where their lanes want the same words. On clang a float4 counts as what the compiler makes of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashviz.cuda import cpu
from flashviz.cuda.cpu_faults import sentence
from flashviz.cuda.cpu_source import HostCompileError
from flashviz.cuda.gpu import KernelError
from flashviz.cuda.launching import Kernel, plan


@dataclass(frozen=True)
class LineBanks:
    """What the warps did to one part of shared memory at one line of the kernel file.

    Args:
        line: in the kernel file, from 1; where a function did it, the line that calls the function.
        part: name of the part or array.
        write: whether it was written, else read.
        accesses: how many times a warp did it.
        phases: in how many passes that can be done at best: a warp's 32 lanes times 4 bytes, 16 times 8 or 8 times 16.
        wavefronts: how many passes it took.
    """

    line: int
    part: str
    write: bool
    accesses: int
    phases: int
    wavefronts: int

    @property
    def ways(self) -> float:
        """Passes for each that is needed: 1.0 without conflicts, 8.0 where eight lanes want words of the same bank."""
        return self.wavefronts / self.phases


@dataclass(frozen=True)
class BankConflicts:
    """The lines of a launch that touch shared memory, in the order of the file. Prints as a table."""

    instance: str
    lines: tuple[LineBanks, ...]
    text: tuple[str, ...]

    def part(self, name: str, *, write: bool | None = None) -> LineBanks:
        """All of one part, with line 0; ``write`` chooses its writes or its reads. Raises KeyError."""
        return self._sum([use for use in self.lines if use.part == name and write in (None, use.write)], name)

    @property
    def total(self) -> LineBanks:
        """Everything."""
        return self._sum(list(self.lines), "")

    def _sum(self, chosen: Sequence[LineBanks], name: str) -> LineBanks:
        if not chosen:
            raise KeyError(
                f"{self.instance} does that to no part {name}; it has {', '.join(sorted({u.part for u in self.lines}))}"
            )
        counts = [sum(values) for values in zip(*((u.accesses, u.phases, u.wavefronts) for u in chosen), strict=True)]
        return LineBanks(0, name, all(u.write for u in chosen), *counts)

    def __str__(self) -> str:
        rows = [f"{self.instance}: passes of the banks of shared memory"]
        rows.append(f"{'line':>5}  {'part':<8}{'':<7}{'accesses':>10}{'needed':>10}{'taken':>10}{'ways':>7}")
        for use in self.lines:
            did = "write" if use.write else "read"
            rows.append(
                f"{use.line:>5}  {use.part:<8}{did:<7}{use.accesses:>10,}{use.phases:>10,}{use.wavefronts:>10,}{use.ways:>7.2f}  "
                f"{self.text[use.line - 1].strip()[:70] if use.line else ''}".rstrip()
            )
        return "\n".join(rows)

    __repr__ = __str__


def bank_conflicts(kernel: Kernel, args: Sequence[object] | Mapping[str, object]) -> BankConflicts:
    """Run a kernel on the processor and count, line by line, how its warps meet the banks of shared memory.

    Parameters
    ----------
    kernel, args
        As for ``cuda.launch``; the arrays given are not written. Small sizes do: every block does the same.

    Raises
    ------
    SourceError, ArgumentError, LaunchError, CpuUnavailableError
        As for ``cuda.launch``.
    KernelError
        It does not compile for the processor, or the checks found something.
    """
    ready = plan(kernel, args, cpu.LIMITS)
    try:
        library = cpu.compile_plan(ready, check=True)
    except HostCompileError as error:
        raise KernelError(f"{ready.instance} does not compile for the processor.\n{error}") from error
    outcome, _ = cpu.launch_once(library, ready, check=True, banks=True)
    file = ready.source.path.name
    if outcome.fault:
        raise KernelError(f"{file}: {ready.instance}, on the processor: {sentence(outcome.fault, file, plan=ready)}")
    found: dict[tuple[int, str, bool], list[int]] = {}
    for use in outcome.banks:
        line = next((line for name, line in reversed(use.places) if name == file), 0)
        counts = found.setdefault((line, use.array, use.write), [0, 0, 0])
        for n, value in enumerate((use.accesses, use.phases, use.wavefronts)):
            counts[n] += value
    lines = tuple(LineBanks(*key, *counts) for key, counts in sorted(found.items()))
    return BankConflicts(ready.instance, lines, tuple(ready.source.text.splitlines()))
