"""What a kernel's source declares it takes, and the check of what it is given.

CuPy passes a Python float as a double: where the kernel declares ``float``, 0.125 arrives as 0.0 and nothing complains. So every
argument is held against the declared type before it goes anywhere:

* a number is cast to the declared type when the value survives it (0.1 to float does, rounded as any float is; 2.5 to int,
  3e9 to int and 1e300 to float do not) and refused otherwise;
* an array of another dtype is refused, never converted behind the caller's back;
* an array that is not contiguous is accepted: the launcher gives the kernel a contiguous copy, and copies outputs back.

Where the declaration says `T`, a template parameter, the type is that of the instantiation: `Signature.resolved` puts it in.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flashviz.cuda.scalars import BFLOAT16, DTYPES, TemplateValues, dtype_of, is_bfloat16

TENSOR_MAP = "TensorMap"
"""The type of a parameter that is an array for the copy engine; a structure in kernels/include/hopper.cuh."""


class ArgumentError(ValueError):
    """An argument that the kernel's declared parameters do not take."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a ``__global__`` function: ``const float* Q`` is Parameter("Q", "float", pointer=True, const=True).

    ``type`` may be a template parameter, ``T``: see ``Signature.resolved``. An array that the kernel gets as a tensor map is a pointer that
    is ``mapped``: what its elements are, and whether it is const, stands in the header (see ``flashviz.cuda.tensor_maps``).
    """

    name: str
    type: str
    pointer: bool
    const: bool
    mapped: bool = False

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy dtype of the value, or of what the pointer points at."""
        return dtype_of(self.type)

    @property
    def output(self) -> bool:
        """Whether the kernel may write through it."""
        return self.pointer and not self.const

    def __str__(self) -> str:
        return f"{'const ' if self.const else ''}{self.type}{'*' if self.pointer else ''} {self.name}"


@dataclass(frozen=True)
class Signature:
    """A ``__global__`` function as declared: its template parameters and its parameters, in order.

    ``kinds`` says of each template parameter what it is: "int", "unsigned", "bool", or "typename".
    """

    function: str
    template: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    kinds: tuple[str, ...] = ()

    @property
    def template_types(self) -> tuple[str, ...]:
        """The template parameters that are types."""
        return tuple(n for n, kind in zip(self.template, self.kinds, strict=False) if kind == "typename")

    def resolved(self, values: TemplateValues) -> Signature:
        """The signature of one instantiation: ``const T* Q`` becomes ``const half* Q`` where T is half."""
        types = {name: str(values[name]) for name in self.template_types}
        return replace(self, parameters=tuple(replace(p, type=types.get(p.type, p.type)) for p in self.parameters))

    def instance(self, values: TemplateValues) -> str:
        """The C++ name of one instantiation, ``flash_attention_2<32, 32, 64>``. Raises ArgumentError."""
        missing = [name for name in self.template if name not in values]
        extra = [name for name in values if name not in self.template]
        if missing or extra:
            wrong = [f"{name} is missing" for name in missing] + [f"{name} is not one of them" for name in extra]
            raise ArgumentError(
                f"{self.function} is a template on {', '.join(self.template) or 'nothing'}: {', '.join(wrong)}."
            )
        if not self.template:
            return self.function
        kinds = self.kinds or ("int",) * len(self.template)
        said = (
            _template_value(self.function, name, kind, values[name])
            for name, kind in zip(self.template, kinds, strict=True)
        )
        return f"{self.function}<{', '.join(said)}>"


def _template_value(function: str, name: str, kind: str, value: object) -> str:
    where = f"{function}: template value {name}={value!r}"
    if kind == "typename":
        if value not in DTYPES:
            raise ArgumentError(f"{where} must be the name of a type: {', '.join(DTYPES)}.")
        return str(value)
    if kind == "bool":
        if not isinstance(value, (bool, int, np.integer, np.bool_)) or value not in (0, 1):
            raise ArgumentError(f"{where} must be 0 or 1.")
    elif isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        raise ArgumentError(f"{where} must be a whole number, 0 or more.")
    return str(int(value))


BOUNDS = r"__launch_bounds__\s*\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
"""A launch bound in the source, with parentheses in it up to two deep: `__launch_bounds__(32 * (Br / 16), 2)`."""


def parse_signature(code: str, function: str) -> Signature:
    """Signature of ``function`` in ``code`` (comments already blanked). Raises ValueError when it is not there or not understood."""
    found = re.search(
        rf"(?:template\s*<(?P<template>[^<>]*)>\s*)?__global__\s+(?:{BOUNDS}\s*)?void\s+(?:{BOUNDS}\s*)?"
        rf"{re.escape(function)}\s*\((?P<parameters>[^()]*)\)",
        code,
    )
    if not found:
        raise ValueError(f"no `__global__ void {function}(...)` in the source")
    template = []
    for piece in filter(None, (p.strip() for p in (found["template"] or "").split(","))):
        named = re.fullmatch(r"(int|unsigned|bool|typename|class)\s+(\w+)(?:\s*=.*)?", piece, re.S)
        if not named:
            raise ValueError(f"{function}: template parameter `{piece}` is not an int, unsigned, bool or typename")
        template.append((named[2], "typename" if named[1] == "class" else named[1]))
    types = [name for name, kind in template if kind == "typename"]
    parameters = tuple(_parameter(p.strip(), function, types) for p in found["parameters"].split(",") if p.strip())
    return Signature(function, tuple(n for n, _ in template), parameters, tuple(kind for _, kind in template))


def _parameter(text: str, function: str, types: Sequence[str]) -> Parameter:
    if mapped := re.fullmatch(rf"const\s+__grid_constant__\s+(?:const\s+)?{TENSOR_MAP}\s+(\w+)", text.strip()):
        return Parameter(mapped[1], TENSOR_MAP, pointer=True, const=True, mapped=True)
    plain = re.sub(
        r"\b__restrict__\b|\bconst\b(?=\s*\w+$)", " ", text
    )  # a const on the pointer itself changes nothing here
    found = re.fullmatch(r"(?P<const>const\s+)?(?P<type>[\w\s]+?)\s*(?P<star>\*?)\s*(?P<name>\w+)", plain.strip())
    kind = " ".join(found["type"].split()) if found else ""
    if not found or (kind not in DTYPES and kind not in types):
        raise ValueError(
            f"{function}: parameter `{text}` has a type that the launcher does not know ({', '.join((*types, *DTYPES))})"
        )
    return Parameter(found["name"], kind, bool(found["star"]), bool(found["const"]))


def is_array(value: object) -> bool:
    """Whether ``value`` is an array (NumPy or CuPy) rather than a number; a NumPy scalar is a number."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, np.generic)


def check_arguments(signature: Signature, args: Sequence[object] | Mapping[str, object]) -> dict[str, Any]:
    """``args`` by name, in declared order, each a value of exactly the declared type; arrays are passed through as they are.

    ``args`` is a sequence in declared order, or a mapping by name; the signature is that of an instantiation (``resolved``). An array of a
    bfloat16 dtype comes back as its bits, a view as uint16 of the same memory. Raises ArgumentError naming argument, declared type, what was
    given and the fix.
    """
    names = [p.name for p in signature.parameters]
    if isinstance(args, Mapping):
        missing, extra = [n for n in names if n not in args], [n for n in args if n not in names]
        if missing or extra:
            wrong = [f"{n} is missing" for n in missing] + [f"{n} is not one of them" for n in extra]
            raise ArgumentError(f"{signature.function}({', '.join(names)}): {', '.join(wrong)}.")
        given = [args[n] for n in names]
    else:
        given = list(args)
        if len(given) != len(names):
            raise ArgumentError(
                f"{signature.function} takes {len(names)} arguments ({', '.join(names)}); {len(given)} were given."
            )
    return {
        p.name: _array(signature, p, value) if p.pointer else _number(signature, p, value)
        for p, value in zip(signature.parameters, given, strict=True)
    }


def _array(signature: Signature, parameter: Parameter, value: Any) -> Any:
    where, dtype = f"{signature.function}: argument {parameter.name}", parameter.dtype
    takes = f"takes {parameter.type}*, an array of {dtype}"
    if not is_array(value):
        raise ArgumentError(f"{where} {takes}; got {_describe(value)}. Pass a NumPy or CuPy array.")
    if parameter.type in BFLOAT16:
        if is_bfloat16(value):
            value = value.view(np.uint16)
        elif value.dtype != dtype:
            raise ArgumentError(
                f"{where} takes bfloat16*, an array of bfloat16 (of the package ml_dtypes) or of their bits, uint16; got {value.dtype} "
                f"of shape {tuple(value.shape)}. Pass flashviz.to_bfloat16({parameter.name})."
            )
    elif value.dtype != dtype:
        raise ArgumentError(
            f"{where} {takes}; got {value.dtype} of shape {tuple(value.shape)}. Pass {parameter.name}.astype({str(dtype)!r})."
        )
    if parameter.output and isinstance(value, np.ndarray) and not value.flags.writeable:
        raise ArgumentError(f"{where} is written by the kernel; the array given is read-only. Pass a copy of it.")
    return value


def _number(signature: Signature, parameter: Parameter, value: Any) -> Any:
    where = f"{signature.function}: argument {parameter.name} takes {parameter.type}"
    if parameter.type in BFLOAT16:
        raise ArgumentError(
            f"{where}, by value, which NumPy has no type for. Declare a float, or pass an array of one."
        )
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if not isinstance(value, (int, float, np.integer, np.floating, np.bool_)):
        raise ArgumentError(f"{where}; got {_describe(value)}. Pass a number.")
    dtype = parameter.dtype
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            cast = dtype.type(value)
        if math.isinf(cast) and not math.isinf(value):
            raise ArgumentError(f"{where}; {value!r} is beyond its range (largest is {np.finfo(dtype).max:.3g}).")
        if isinstance(value, (int, np.integer)) and int(cast) != int(value):
            raise ArgumentError(
                f"{where}; the whole number {value} would arrive as {int(cast)}. Pass a float if that is meant."
            )
        return cast
    if isinstance(value, (float, np.floating)) and not float(value).is_integer():
        raise ArgumentError(f"{where}; {value!r} is not a whole number.")
    whole = int(value)
    low, high = (0, 1) if dtype.kind == "b" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    if not low <= whole <= high:
        raise ArgumentError(f"{where}, {low:,} to {high:,}; {whole:,} is out of its range.")
    return dtype.type(whole)


def _describe(value: object) -> str:
    if is_array(value):
        return f"an array of {value.dtype}, shape {tuple(value.shape)}"  # type: ignore[attr-defined]
    return "None" if value is None else f"{type(value).__name__} {value!r}"
