"""The kernels of the ladder's rungs as programs launch them: template values, arrays in the rung's type, arguments by name."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from flashviz.bfloat16 import from_bfloat16, to_bfloat16

TYPES = {"float32": "float", "float16": "half", "bfloat16": "bfloat16"}
"""A dtype as the kernels name it."""


def stored(x: np.ndarray, dtype: str) -> np.ndarray:
    """Numbers as a kernel takes them: of bfloat16 the bits."""
    return to_bfloat16(x) if dtype == "bfloat16" else np.ascontiguousarray(x, dtype)


def loaded(x: np.ndarray, dtype: str) -> np.ndarray:
    """What a kernel wrote, as float32."""
    return from_bfloat16(x) if dtype == "bfloat16" else x.astype(np.float32)


def grid_of(kernel: str, sizes: Mapping[str, int]) -> tuple[int, int, int]:
    """Blocks in x, y and z of a launch, by the line in the kernel's header."""
    from flashviz import cuda
    from flashviz.cuda.expressions import evaluate

    found = [int(evaluate(expression, sizes)) for expression in cuda.find(kernel).header.grid]
    x, y, z = (*found, 1, 1)[:3]
    return x, y, z


def template_for(kernel: str, sizes: Mapping[str, int], dtype: str, **flags: int) -> dict[str, int | str]:
    """Template values of a kernel for tiles of these sizes.

    What the kernel has beside sizes and type (rows a warp, stages) is taken from the instance in its header that is nearest in
    size; ``flags`` are those that the inputs decide, as far as the kernel has them.
    """
    from flashviz import cuda

    source = cuda.find(kernel)
    wanted: dict[str, int | str] = {**sizes, "T": TYPES[dtype]}
    kinds = dict(zip(source.signature.template, source.signature.kinds, strict=True))

    def distance(instance: Mapping[str, int | str]) -> float:
        return sum(abs(math.log2(int(instance[name]) / size)) for name, size in sizes.items() if name in instance)

    nearest = min(source.header.instances, key=distance, default={})
    values = {**nearest, **wanted, **flags}
    return {name: bool(values[name]) if kind == "bool" else values[name] for name, kind in kinds.items()}


def launch(kernel: str, template: Mapping[str, int | str], arguments: Mapping[str, Any], device: str) -> None:
    """Launch a kernel on outputs filled with NaN, with those of the arguments that it has.

    Raises:
        LaunchError: the kernel cannot have these tiles, or they do not fit this device; says which would do.
        KernelError: it failed while it ran.
    """
    from flashviz import cuda

    source = cuda.find(kernel)
    names = [parameter.name for parameter in source.signature.parameters]
    given = {name: arguments[name] for name in names if name in arguments}
    try:
        cuda.launch(cuda.Kernel(kernel, template=dict(template)), given, device=device, poison=True)
    except cuda.KernelError as error:
        refused = re.search(r"static assertion failed(?: with)?:? *\"?([^\"\n]+)", str(error))
        if refused is None:
            raise
        sizes = [name for name in ("Br", "Bc", "D") if name in template]
        asked = ", ".join(f"{name}={template[name]}" for name in sizes)
        made = dict.fromkeys(" ".join(f"{name}={one[name]}" for name in sizes) for one in source.header.instances)
        raise cuda.LaunchError(
            f"{kernel} cannot have {asked}: {refused[1]}. Its header has {', '.join(made)}; "
            'device="numpy" records tiles of any size.'
        ) from error
