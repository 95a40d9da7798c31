"""One launch, checked whole before any device sees it: source, template values, arguments, shapes, grid, block, shared memory.

`plan` needs no GPU. Every device runs the same `Plan`, so a launch that is refused is refused everywhere, in the same words.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flashviz.cuda.expressions import evaluate
from flashviz.cuda.scalars import TemplateValues
from flashviz.cuda.signatures import ArgumentError, check_arguments, is_array
from flashviz.cuda.sources import KernelSource, SourceError, find
from flashviz.cuda.tensor_maps import Layout, layout

STATIC_SHARED = 48 * 1024  # bytes of shared memory a block gets without asking for more


class LaunchError(ValueError):
    """A launch that the device cannot run: grid, block, shared memory or architecture."""


@dataclass(frozen=True)
class Limits:
    """What one device allows. The defaults hold on every GPU of compute capability 7.5 to 9.0 but for ``shared_bytes``."""

    shared_bytes: int = 232_448  # a block's dynamic shared memory, opted into
    threads: int = 1024
    grid: tuple[int, int, int] = (2**31 - 1, 65_535, 65_535)
    arch: int | None = None  # 90 for sm_90
    name: str = "this GPU"
    multiprocessors: int = 132  # an H100's; a kernel whose blocks stay for all the work starts as many
    processor: bool = False  # no GPU at all


@dataclass(frozen=True)
class Kernel:
    """What to launch.

    Parameters
    ----------
    file
        Name of a kernel file ("flash_attention_2") or a path to a .cu file.
    template
        Its template values by name: numbers, and for `typename T` the name of a type, ``{"T": "half", "Br": 64}``.
    function
        Which kernel of the file, where it has several; the first when not given.
    grid, block, shared_bytes
        Blocks in x, y, z; threads in x, y, z (or in x alone); bytes of dynamic shared memory. Left out, each comes from
        the kernel file: its @grid and @block lines and the sum of its shared-memory parts.
    """

    file: str | Path
    template: TemplateValues = field(default_factory=dict)
    grid: tuple[int, ...] | None = None
    block: tuple[int, ...] | int | None = None
    shared_bytes: int | None = None
    function: str = ""


@dataclass(frozen=True)
class Plan:
    """A launch that passed every check. ``arguments`` are by name, in declared order, of exactly the declared types.

    Of a bfloat16 array it is a view of its bits, uint16.
    """

    source: KernelSource
    instance: str
    arguments: Mapping[str, Any]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    types: Mapping[str, str] = field(default_factory=dict)  # of each parameter, as the instantiation has it: "half"
    maps: Mapping[str, Layout] = field(default_factory=dict)  # of the arrays that the kernel gets as tensor maps

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the arrays that the kernel may write."""
        return tuple(p.name for p in self.source.signature.parameters if p.output)


def plan(kernel: Kernel, args: Sequence[object] | Mapping[str, object], limits: Limits | None = None) -> Plan:
    """Check a launch against the kernel's source and a device's limits.

    Raises SourceError (no such kernel), ArgumentError (what it is given) or LaunchError (what the device allows).
    """
    limits = limits or Limits()
    source = find(kernel.file, kernel.function)
    template = dict(kernel.template)
    instance = source.signature.instance(template)
    signature = source.signature.resolved(template)
    arguments = check_arguments(signature, with_defaults(source, template, args))
    sizes = check_shapes(source, template, arguments)
    check_arch(source, limits)
    sizes.setdefault("multiprocessors", limits.multiprocessors)
    grid = _triple(kernel.grid if kernel.grid is not None else _extents(source, source.header.grid, sizes, "grid"))
    block = kernel.block if kernel.block is not None else _extents(source, source.header.block, sizes, "block")
    block = _triple((block,) if isinstance(block, int) else block)
    shared = source.shared_bytes(template) if kernel.shared_bytes is None else kernel.shared_bytes
    check_grid(source, grid, block, limits)
    check_shared(source, template, shared, limits)
    types = {p.name: p.type for p in signature.parameters}
    maps = {
        name: layout(source.name, line, types[name], template, arguments[name].shape)
        for name, line in source.header.maps.items()
    }
    return Plan(source, instance, arguments, grid, block, shared, types, maps)


def with_defaults(
    source: KernelSource, template: TemplateValues, args: Sequence[object] | Mapping[str, object]
) -> Sequence[object] | Mapping[str, object]:
    """``args`` by name with the header's @default values for what was left out; as they are where nothing was, or has none.

    In a sequence, the last ones may be left out.
    """
    names = [p.name for p in source.signature.parameters]
    if not isinstance(args, Mapping):
        if len(args) >= len(names) or any(n not in source.header.defaults for n in names[len(args) :]):
            return args
        args = dict(zip(names, args, strict=False))
    known: dict[str, Any] = {**template, **{n: v for n, v in args.items() if isinstance(v, (int, float, np.number))}}
    for name, dims in source.header.arrays.items():  # whether the shapes agree, and with the numbers, is checked later
        value: Any = args.get(name)
        if is_array(value):
            shape = tuple(value.shape)
            known = {**dict(zip(dims, (1,) * (len(dims) - len(shape)) + shape, strict=False)), **known}
    given = dict(args)
    for name, expression in source.header.defaults.items():
        if name not in args:
            try:
                given[name] = known[name] = evaluate(expression, known)
            except ValueError:
                continue
    return given


def check_shapes(source: KernelSource, template: TemplateValues, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Hold every array's shape against the header's @array lines; the value of every dimension, template and scalar by name.

    Leading dimensions of 1 may be left out: [N, d] is taken where [B, H, N, D] is declared. Raises ArgumentError.
    """
    name = source.signature.function
    values: dict[str, Any] = dict(template)
    origin = {key: f"template value {key}={value}" for key, value in template.items()}
    for key, value in arguments.items():
        if not is_array(value) or not value.shape:
            values[key] = value.item()
            origin[key] = f"argument {key}={values[key]}"
    for key, dims in source.header.arrays.items():
        shape = tuple(int(n) for n in arguments[key].shape)
        declared = f"[{', '.join(dims)}]"
        if len(shape) > len(dims):
            raise ArgumentError(f"{name}: argument {key} is {declared}; got {len(shape)} dimensions, shape {shape}.")
        for dim, size in zip(dims, (1,) * (len(dims) - len(shape)) + shape, strict=True):
            if values.setdefault(dim, size) != size:
                raise ArgumentError(
                    f"{name}: argument {key} is {declared}; got shape {shape}, {dim}={size}, but {origin[dim]}."
                )
            origin.setdefault(dim, f"{dim}={size} in argument {key}")
    for requirement in source.header.requires:
        if not evaluate(requirement, values):
            given = {n: v for n, v in values.items() if n in requirement.split()}
            raise ArgumentError(
                f"{name} requires {requirement}; got {', '.join(f'{n}={v}' for n, v in given.items())}."
            )
    return values


def check_arch(source: KernelSource, limits: Limits) -> None:
    """Raise LaunchError where the kernel was not written for the device, with the kernel that does the same work there."""
    header = source.header
    if limits.processor and source.not_on_processor:
        raise LaunchError(source.not_on_processor)
    if limits.arch is None or limits.arch == header.arch or (limits.arch > header.arch and not header.exact):
        return
    needs = (
        f"runs on sm_{header.arch}a alone (Hopper: TMA, wgmma)" if header.exact else f"needs sm_{header.arch} or newer"
    )
    other = next((name for name in header.instead if _runs_on(name, limits.arch)), "")
    instead = f" {other} does the same work there." if other else ""
    raise LaunchError(f"{source.name} {needs}; {limits.name} is sm_{limits.arch}.{instead}")


def _runs_on(file: str, arch: int) -> bool:
    try:
        header = find(file).header
    except SourceError:
        return False
    return header.arch == arch if header.exact else header.arch <= arch


def check_grid(source: KernelSource, grid: Sequence[int], block: Sequence[int], limits: Limits) -> None:
    """Raise LaunchError when the grid or the block is empty or beyond what the device allows."""
    name = source.signature.function
    for axis, extent, limit in zip("xyz", grid, limits.grid, strict=True):
        if extent < 1:
            raise LaunchError(f"{name}: a grid of {tuple(grid)} has no blocks: there is nothing to compute in {axis}.")
        if extent > limit:
            where = f" ({source.header.grid['xyz'.index(axis)]})" if "xyz".index(axis) < len(source.header.grid) else ""
            raise LaunchError(
                f"{name}: {extent:,} blocks in {axis}{where}; {limits.name} allows {limit:,}. Launch it in parts of at most {limit:,}."
            )
    threads = block[0] * block[1] * block[2]
    if min(block) < 1 or threads > limits.threads or block[2] > 64:
        raise LaunchError(
            f"{name}: a block of {' × '.join(map(str, block))} = {threads:,} threads; {limits.name} allows 1 to {limits.threads:,}"
            " threads, at most 64 of them in z."
        )


def check_shared(source: KernelSource, template: TemplateValues, needed: int, limits: Limits) -> None:
    """Raise LaunchError with bytes needed, bytes allowed and a block size that fits, when a block asks for too much shared memory."""
    if needed <= limits.shared_bytes:
        return
    given = ", ".join(f"{'d' if name == 'D' else name}={value}" for name, value in template.items()) or source.name
    message = f"{given} needs {needed:,} bytes of shared memory a block; {limits.name} allows {limits.shared_bytes:,}"
    fitting = fitting_blocks(source, template, limits.shared_bytes)
    if fitting is None:
        raise LaunchError(f"{message}; no block size of {source.name} fits.")
    sizes = ", ".join(f"{name}={fitting[name]}" for name in source.header.blocks)
    raise LaunchError(f"{message}; {sizes} fits ({source.shared_bytes(fitting):,}).")


def fitting_blocks(source: KernelSource, template: TemplateValues, allowed: int) -> dict[str, int | str] | None:
    """The largest block sizes, each the given one halved any number of times, that fit in ``allowed`` bytes; None when none does.

    Largest is the most elements in a tile of scores, and among those the squarest.
    """
    if not source.header.blocks:
        return None
    given = {name: int(template[name]) for name in source.header.blocks}
    halved = [[value >> n for n in range(value.bit_length())] for value in given.values()]
    fitting = []
    for sizes in itertools.product(*halved):
        candidate = {**template, **dict(zip(source.header.blocks, sizes, strict=True))}
        if source.shared_bytes(candidate) <= allowed:
            fitting.append(((math.prod(sizes), min(sizes), sizes), candidate))
    return max(fitting, key=lambda pair: pair[0])[1] if fitting else None


def _extents(source: KernelSource, expressions: Sequence[str], sizes: Mapping[str, Any], what: str) -> tuple[int, ...]:
    if not expressions:
        raise LaunchError(f"{source.name}: its header has no @{what} line, so the launch must give {what}=.")
    try:
        return tuple(int(evaluate(expression, sizes)) for expression in expressions)
    except ValueError as error:
        raise LaunchError(f"{source.name}: @{what}: {error}. Give {what}= in the launch.") from None


def _triple(extents: Sequence[int]) -> tuple[int, int, int]:
    if not 1 <= len(extents) <= 3:
        raise LaunchError(f"a grid or block has 1 to 3 extents; got {tuple(extents)}.")
    x, y, z = (*(int(n) for n in extents), 1, 1)[:3]
    return x, y, z
