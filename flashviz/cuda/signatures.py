"""What a kernel's source declares it takes, and the check of what it is given.

CuPy passes a Python float as a double: where the kernel declares ``float``, 0.125 arrives as 0.0 and nothing complains. So every
argument is held against the declared type before it goes anywhere:

* a number is cast to the declared type when the value survives it (0.1 to float does, rounded as any float is; 2.5 to int,
  3e9 to int and 1e300 to float do not) and refused otherwise;
* an array of another dtype is refused, never converted behind the caller's back;
* an array that is not contiguous is accepted: the launcher gives the kernel a contiguous copy, and copies outputs back.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_DTYPES = {
    "float": np.float32,
    "double": np.float64,
    "half": np.float16,
    "__half": np.float16,
    "fp16": np.float16,
    "bool": np.bool_,
    "signed char": np.int8,
    "unsigned char": np.uint8,
    "short": np.int16,
    "unsigned short": np.uint16,
    "int": np.int32,
    "unsigned": np.uint32,
    "unsigned int": np.uint32,
    "long long": np.int64,
    "unsigned long long": np.uint64,
    "size_t": np.uint64,
}


class ArgumentError(ValueError):
    """An argument that the kernel's declared parameters do not take."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a ``__global__`` function: ``const float* Q`` is Parameter("Q", "float", pointer=True, const=True)."""

    name: str
    type: str
    pointer: bool
    const: bool

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy dtype of the value, or of what the pointer points at."""
        return np.dtype(_DTYPES[self.type])

    @property
    def output(self) -> bool:
        """Whether the kernel may write through it."""
        return self.pointer and not self.const

    def __str__(self) -> str:
        return f"{'const ' if self.const else ''}{self.type}{'*' if self.pointer else ''} {self.name}"


@dataclass(frozen=True)
class Signature:
    """A ``__global__`` function as declared: its template parameters and its parameters, in order."""

    function: str
    template: tuple[str, ...]
    parameters: tuple[Parameter, ...]

    def instance(self, values: Mapping[str, int]) -> str:
        """The C++ name of one instantiation, ``flash_attention_2<32, 32, 64>``."""
        missing = [name for name in self.template if name not in values]
        extra = [name for name in values if name not in self.template]
        if missing or extra:
            wrong = [f"{name} is missing" for name in missing] + [f"{name} is not one of them" for name in extra]
            raise ArgumentError(
                f"{self.function} is a template on {', '.join(self.template) or 'nothing'}: {', '.join(wrong)}."
            )
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
                raise ArgumentError(
                    f"{self.function}: template value {name}={value!r} must be a whole number, 0 or more."
                )
        if not self.template:
            return self.function
        return f"{self.function}<{', '.join(str(int(values[name])) for name in self.template)}>"


def parse_signature(code: str, function: str) -> Signature:
    """Signature of ``function`` in ``code`` (comments already blanked). Raises ValueError when it is not there or not understood."""
    found = re.search(
        r"(?:template\s*<(?P<template>[^<>]*)>\s*)?__global__\s+(?:__launch_bounds__\s*\([^()]*\)\s*)?void\s+"
        rf"(?:__launch_bounds__\s*\([^()]*\)\s*)?{re.escape(function)}\s*\((?P<parameters>[^()]*)\)",
        code,
    )
    if not found:
        raise ValueError(f"no `__global__ void {function}(...)` in the source")
    template = []
    for piece in filter(None, (p.strip() for p in (found["template"] or "").split(","))):
        named = re.fullmatch(r"(?:int|unsigned|bool)\s+(\w+)(?:\s*=.*)?", piece)
        if not named:
            raise ValueError(f"{function}: template parameter `{piece}` is not an int, unsigned or bool")
        template.append(named[1])
    pieces = [p.strip() for p in found["parameters"].split(",")]
    return Signature(function, tuple(template), tuple(_parameter(p, function) for p in pieces if p))


def _parameter(text: str, function: str) -> Parameter:
    plain = re.sub(
        r"\b__restrict__\b|\bconst\b(?=\s*\w+$)", " ", text
    )  # a const on the pointer itself changes nothing here
    found = re.fullmatch(r"(?P<const>const\s+)?(?P<type>[\w\s]+?)\s*(?P<star>\*?)\s*(?P<name>\w+)", plain.strip())
    kind = " ".join(found["type"].split()) if found else ""
    if not found or kind not in _DTYPES:
        raise ValueError(
            f"{function}: parameter `{text}` has a type that the launcher does not know ({', '.join(_DTYPES)})"
        )
    return Parameter(found["name"], kind, bool(found["star"]), bool(found["const"]))


def is_array(value: object) -> bool:
    """Whether ``value`` is an array (NumPy or CuPy) rather than a number; a NumPy scalar is a number."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, np.generic)


def check_arguments(signature: Signature, args: Sequence[object] | Mapping[str, object]) -> dict[str, Any]:
    """``args`` by name, in declared order, each a value of exactly the declared type; arrays are passed through as they are.

    ``args`` is a sequence in declared order, or a mapping by name. Raises ArgumentError naming argument, declared type, what was
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
    if value.dtype != dtype:
        raise ArgumentError(
            f"{where} {takes}; got {value.dtype} of shape {tuple(value.shape)}. Pass {parameter.name}.astype({str(dtype)!r})."
        )
    if parameter.output and isinstance(value, np.ndarray) and not value.flags.writeable:
        raise ArgumentError(f"{where} is written by the kernel; the array given is read-only. Pass a copy of it.")
    return value


def _number(signature: Signature, parameter: Parameter, value: Any) -> Any:
    where = f"{signature.function}: argument {parameter.name} takes {parameter.type}"
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
