"""A kernel's launch from little: the arguments, template values and candidates that follow from its header and the arrays given."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flashviz.cuda import gpu
from flashviz.cuda.launching import Kernel, Limits, Plan, plan
from flashviz.cuda.scalars import TemplateValues, dtype_of, is_bfloat16
from flashviz.cuda.sources import KernelSource

TYPES = {"float32": "float", "float16": "half", "float64": "double"}


def sizes_of(source: KernelSource, args: Mapping[str, Any]) -> dict[str, Any]:
    """The dimensions of the arrays, as the kernel's @array lines name them, and the scalars, by name."""
    sizes = {name: value for name, value in args.items() if not np.ndim(value)}
    for name, dims in source.header.arrays.items():
        if name in args:
            shape = tuple(map(int, args[name].shape))
            sizes |= dict(zip(dims, (1,) * (len(dims) - len(shape)) + shape, strict=False))
    return sizes


def fixed_values(source: KernelSource, args: Mapping[str, Any]) -> dict[str, int | str]:
    """Template values that the arguments decide: dimensions (D), types (T), and Causal where an argument of that name is given.

    >>> from flashviz.cuda import find
    >>> fixed_values(find("flash_attention_2"), {"Q": np.zeros((1, 2, 8, 64), "f4")})
    {'D': 64}
    """
    sizes = sizes_of(source, args)
    sizes["Causal"] = int(bool(sizes.get("causal", 0)))
    found = {name: sizes[name] for name in source.signature.template if name in sizes}
    for parameter in source.signature.parameters:
        if parameter.type in source.signature.template_types and parameter.name in args:
            array = args[parameter.name]
            bits = is_bfloat16(array) or array.dtype == np.uint16
            found[parameter.type] = "bfloat16" if bits else TYPES.get(str(array.dtype), str(array.dtype))
    return found


def arguments(source: KernelSource, args: Mapping[str, Any], fixed: TemplateValues, device: str) -> dict[str, Any]:
    """The kernel's arguments, complete: of ``args`` those that it has, sizes from the arrays, and outputs that were left out.

    A scalar that is nowhere else to be had is 0 if it is a switch (causal, window) and left to the kernel's defaults if not.
    """
    sizes = {"causal": 0, "window": 0, **sizes_of(source, args), **fixed}
    full: dict[str, Any] = {}
    empty = gpu.library().empty if device == "gpu" else np.empty
    for parameter in source.signature.parameters:
        name = parameter.name
        if name in args:
            full[name] = args[name]
        elif parameter.output and all(dim in sizes for dim in source.header.arrays.get(name, ("",))):
            shape = tuple(int(sizes[dim]) for dim in source.header.arrays[name])
            full[name] = empty(shape, dtype_of(str(fixed.get(parameter.type, parameter.type))))
        elif name not in source.header.defaults and name in sizes:
            full[name] = sizes[name]
    return full


def candidates_of(source: KernelSource, given: Any, fixed: TemplateValues) -> Iterator[dict[str, int | str]]:
    """Candidates without the values that are ``fixed``, each once: ``given`` (a dictionary of lists, or a list), else the header's."""
    if given is None and source.header.tunes:
        grids: Sequence[Mapping[str, Any]] = source.header.tunes
        listed: list[Mapping[str, Any]] = []
    elif given is None:
        grids, listed = (), [i for i in source.header.instances if all(i.get(n, v) == v for n, v in _sized(fixed))]
    elif isinstance(given, Mapping):
        grids, listed = (given,), []
    else:
        grids, listed = (), list(given)
    for grid in grids:
        listed += [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    seen = set()
    for values in listed:
        own = {n: v for n, v in values.items() if n not in fixed and n != "Aligned"}
        if (key := tuple(sorted(own.items()))) not in seen:
            seen.add(key)
            yield own


def _sized(fixed: TemplateValues) -> list[tuple[str, int | str]]:
    """Of the fixed values those that choose among instances: sizes. A kernel takes other types and flags than those it lists."""
    return [(name, value) for name, value in fixed.items() if name not in ("T", "Causal", "Aligned")]


def planned(
    kernel: str | Path, source: KernelSource, values: TemplateValues, args: Mapping[str, Any], limits: Limits | None
) -> Plan:
    """The launch with these template values. A flag Aligned is set where rows and keys are whole tiles, unless it is given.

    Raises what ``cuda.plan`` raises.
    """
    template = dict(values)
    if "Aligned" in source.signature.template and "Aligned" not in template:
        sizes = sizes_of(source, args)
        tiles = ((sizes[n], int(template[tile])) for n, tile in (("Nq", "Br"), ("Nk", "Bc")) if tile in template)
        template["Aligned"] = int(all(n % tile == 0 for n, tile in tiles))
    return plan(Kernel(kernel, template, function=source.header.kernel), args, limits)
