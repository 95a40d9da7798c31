"""Arithmetic written in a kernel's source (shared-memory parts, grid, requirements), evaluated without running code.

Only numbers, names, + - * / // %, comparisons, the functions ceil, min, max, sqrt and sizeof(TYPE) exist; all else is a ValueError.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from flashviz.cuda.scalars import size_of

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"ceil": math.ceil, "min": min, "max": max, "sqrt": math.sqrt}


def evaluate(expression: str, names: Mapping[str, float | str]) -> float:
    """Value of ``expression`` with ``names`` filled in.

    >>> evaluate("ceil(Nq / Br)", {"Nq": 33, "Br": 32})
    2
    >>> evaluate("Br * sizeof(T)", {"Br": 64, "T": "half"})
    128

    A name may stand for a type, in ``sizeof`` only. Raises ValueError for a name that is not given and for anything that is not arithmetic.
    """

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.Name(id=name):
                if name not in names:
                    raise ValueError(
                        f"{expression!r}: {name} has no value; known are {', '.join(sorted(names)) or 'none'}"
                    )
                if isinstance(names[name], str):
                    raise ValueError(f"{expression!r}: {name} is a type, {names[name]}, and no number")
                return names[name]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return _BINARY[type(op)](value(left), value(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
                return _COMPARE[type(op)](value(left), value(right))
            case ast.Call(func=ast.Name(id="sizeof"), args=[ast.Name(id=name)], keywords=[]):
                return size_of(str(names.get(name, name)))
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
                return _FUNCTIONS[name](*map(value, args))
        raise ValueError(f"{expression!r}: {ast.unparse(node)} is not arithmetic that a kernel's header may use")

    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except SyntaxError as error:
        raise ValueError(f"{expression!r} is not an expression: {error.msg}") from None
    try:
        return value(tree.body)  # type: ignore[no-any-return]
    except ZeroDivisionError:
        raise ValueError(f"{expression!r} divides by zero with {dict(names)}") from None
