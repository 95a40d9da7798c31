"""What a kernel file is checked with: its instantiations and shapes, and arguments made for them.

All of it comes from the header block: @instance and @shape lines give the sizes, @array lines the extents, @default lines the numbers
that follow from others. A pair that a @require line refuses is left out.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flashviz.bfloat16 import to_bfloat16
from flashviz.cuda.expressions import evaluate
from flashviz.cuda.launching import Kernel, Limits, Plan, plan
from flashviz.cuda.scalars import BFLOAT16, TemplateValues, dtype_of
from flashviz.cuda.sources import KernelSource, find

SAMPLE = 2  # instantiations of each kernel, the smallest ones, unless all are asked for


class CannotCheckError(ValueError):
    """The file does not say enough to run it, or does not compile; the message says what is missing."""


@dataclass(frozen=True)
class Case:
    """One run: which kernel of the file, its template values and the sizes of its arguments."""

    function: str
    template: TemplateValues
    shape: Mapping[str, int]

    def __str__(self) -> str:
        values = f"<{', '.join(f'{k}={v}' for k, v in self.template.items())}>" if self.template else ""
        sizes = " ".join(f"{k}={v}" for k, v in self.shape.items())
        return f"{self.function}{values}" + (f" with {sizes}" if sizes else "")


def make_cases(
    path: Path, function: str = "", shapes: Sequence[Mapping[str, int]] = (), everything: bool = False
) -> tuple[list[Case], int]:
    """The cases of a file (of one of its kernels, when named), and how many there would be with ``everything``.

    ``shapes`` take the place of the file's own. Raises SourceError, or CannotCheckError where a kernel has no case at all.
    """
    cases: list[Case] = []
    total = 0
    for name in [function] if function else find(path).kernels:
        source = find(path, name)
        if source.not_on_processor:
            raise CannotCheckError(source.not_on_processor)
        every = source.header.instances or ({},)
        if not source.header.instances and source.signature.template:
            wanted = " ".join(f"{value}=..." for value in source.signature.template)
            raise CannotCheckError(
                f"{name} is a template, and no line says with which values: `// @instance {wanted}`."
            )
        sizes = tuple(shapes) or source.header.shapes or ({},)
        by_instance = []
        for template in every:
            fitting = [Case(name, template, shape) for shape in sizes if fits(source, template, shape)]
            if fitting:
                by_instance.append((source.shared_bytes(template), fitting))
        if not by_instance:
            raise CannotCheckError(f"{name}: no @instance goes with a @shape; see its @require lines.")
        total += sum(len(fitting) for _, fitting in by_instance)
        by_instance.sort(key=lambda pair: pair[0])
        chosen = by_instance if everything else by_instance[:SAMPLE]
        cases += itertools.chain.from_iterable(fitting for _, fitting in chosen)
    return cases, total


def sizes_of(source: KernelSource, case: Case) -> dict[str, float | str]:
    """Every value by name: template values, sizes, and the @default lines that follow from them."""
    values: dict[str, float | str] = {**case.template, **case.shape}
    left = {name: text for name, text in source.header.defaults.items() if name not in values}
    while left:
        known = {}
        for name, text in left.items():
            with contextlib.suppress(ValueError):
                known[name] = evaluate(text, values)
        if not known:
            break
        values |= known
        left = {name: text for name, text in left.items() if name not in known}
    return values


def fits(source: KernelSource, template: TemplateValues, shape: Mapping[str, int]) -> bool:
    """Whether the sizes satisfy the kernel's @require lines and agree with its template values."""
    if any(name in template and template[name] != value for name, value in shape.items()):
        return False
    values = sizes_of(source, Case(source.header.kernel, template, shape))
    try:
        return all(evaluate(requirement, values) for requirement in source.header.requires)
    except ValueError as error:
        raise CannotCheckError(f"{source.header.kernel}: @require: {error}. Give it in a @shape line.") from None


def make_plan(path: Path, case: Case, seed: int = 0) -> Plan:
    """The launch of a case on random arguments. Raises CannotCheckError naming the parameter that has no value."""
    source = find(path, case.function)
    values = sizes_of(source, case)
    rng = np.random.default_rng(seed)
    arguments: dict[str, Any] = {}
    for parameter in source.signature.resolved(case.template).parameters:
        name, header = parameter.name, source.header
        if parameter.pointer:
            if name not in header.arrays:
                raise CannotCheckError(
                    f"{case.function}: no line says how large {name} is: `// @array {name} [N, ...]`."
                )
            arguments[name] = random_array(rng, _extents(source, name, values), parameter.type)
        elif name in values:
            arguments[name] = values[name]
        elif name in header.defaults:
            _evaluate(source, f"@default {name}", header.defaults[name], values)  # says what it lacks
        else:
            raise CannotCheckError(
                f"{case.function}: the parameter {name} has no value: `// @shape {name}=...` gives it one."
            )
    return plan(Kernel(path, case.template, function=case.function), arguments, Limits())


def random_array(rng: np.random.Generator, shape: tuple[int, ...], type: str) -> np.ndarray:
    """Normally distributed numbers of a CUDA type; zeros for whole-number types, which are mostly indices and counters."""
    dtype = dtype_of(type)
    if type in BFLOAT16:
        return to_bfloat16(rng.standard_normal(shape, dtype=np.float32))
    if dtype.kind != "f":
        return np.zeros(shape, dtype)
    return rng.standard_normal(shape, dtype=np.float32).astype(dtype)


def array_shape(source: KernelSource, name: str, case: Case) -> tuple[int, ...]:
    """Extents of a global array or of a shared part in a case; empty where they are not known."""
    values = sizes_of(source, case)
    extents = source.header.arrays.get(name) or source.parts.get(name) or ()
    try:
        return tuple(int(evaluate(extent, values)) for extent in extents)
    except ValueError:
        return ()


def _extents(source: KernelSource, name: str, values: Mapping[str, float | str]) -> tuple[int, ...]:
    return tuple(int(_evaluate(source, f"@array {name}", extent, values)) for extent in source.header.arrays[name])


def _evaluate(source: KernelSource, what: str, expression: str, values: Mapping[str, float | str]) -> float:
    try:
        return evaluate(expression, values)
    except ValueError as error:
        raise CannotCheckError(f"{source.header.kernel}: {what}: {error}. Give it in a @shape line.") from None
