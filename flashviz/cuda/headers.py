"""The header block of a kernel file, comment lines `// @word ...`, read: how a kernel is launched, compiled and checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from flashviz.cuda.scalars import DTYPES, TemplateValues
from flashviz.cuda.tensor_maps import MapLine, parse_map

_SINGLE = ("paper", "grid", "block", "arch", "blocks", "instead", "roles")
_MANY = ("array", "map", "inout", "default", "require", "instance", "shape", "tune")


@dataclass(frozen=True)
class Header:
    """What the header block says of one kernel, as written. ``arrays`` maps an argument to the names of its dimensions.

    ``inout`` names the outputs whose contents the kernel reads before it writes them. ``maps`` are the parameters that are tensor maps.
    ``arch`` is the least architecture, or with ``exact`` (`@arch 90a`) the only one; ``instead`` are kernel files for the same work that
    run elsewhere, the best first. ``roles`` names what the warps of a block do beside each other, for traces.
    """

    kernel: str
    paper: str = ""
    grid: tuple[str, ...] = ()
    block: tuple[str, ...] = ("128",)
    arch: int = 75
    exact: bool = False
    instead: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    arrays: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    maps: Mapping[str, MapLine] = field(default_factory=dict)
    inout: tuple[str, ...] = ()
    defaults: Mapping[str, str] = field(default_factory=dict)
    requires: tuple[str, ...] = ()
    instances: tuple[TemplateValues, ...] = ()
    tunes: tuple[Mapping[str, tuple[int, ...]], ...] = ()
    shapes: tuple[Mapping[str, int], ...] = ()


def parse_headers(text: str) -> dict[str, Header]:
    """What the header block of a kernel file says of each of its kernels, in its order. Raises ValueError naming the line."""
    common: list[tuple[str, str]] = []
    sections: dict[str, list[tuple[str, str]]] = {}
    lines = common
    for number, line in enumerate(text.splitlines(), 1):
        found = re.match(r"\s*//\s*@(\w+)\s*(.*?)\s*$", line)
        if not found:
            continue
        word, value = found.groups()
        if word == "kernel" and value in sections:
            raise ValueError(f"line {number}: @kernel {value} stands twice")
        if word == "kernel":
            lines = sections.setdefault(value, [])
        elif word not in _SINGLE + _MANY:
            raise ValueError(f"line {number}: @{word} is none of {', '.join(('kernel', *_SINGLE, *_MANY))}")
        elif word in _SINGLE and word in dict(lines):
            raise ValueError(f"line {number}: @{word} stands twice")
        else:
            lines.append((word, value))
    if not sections:
        raise ValueError("no line `// @kernel NAME` says which function is launched")
    return {name: _header(name, common, own) for name, own in sections.items()}


def _header(kernel: str, common: list[tuple[str, str]], own: list[tuple[str, str]]) -> Header:
    """One kernel's header: its own lines, and those for all kernels of the words that it does not use."""
    used = {word for word, _ in own}
    lines = [line for line in common if line[0] not in used] + own
    single = {word: value for word, value in lines if word in _SINGLE}
    many = {word: [value for w, value in lines if w == word] for word in _MANY}
    arrays = {}
    for value in many["array"]:
        found = re.fullmatch(r"(\w+)\s*\[([\w\s,]+)\]", value)
        if not found:
            raise ValueError(f"@array {value}: expected a name and its dimensions, like `Q [B, H, N, D]`")
        arrays[found[1]] = split(found[2])
    maps = {line.name: line for line in map(parse_map, many["map"])}
    arch = re.fullmatch(r"(\d+)(a?)", single.get("arch", "75"))
    if not arch:
        raise ValueError(
            f"@arch {single['arch']}: expected a number, like 80, or 90a for a kernel that runs on that one only"
        )
    defaults = {}
    for value in many["default"]:
        name, _, expression = value.partition("=")
        defaults[name.strip()] = expression.strip()
    return Header(
        kernel=kernel,
        paper=single.get("paper", ""),
        grid=split(single.get("grid", "")),
        block=split(single.get("block", "128")),
        arch=int(arch[1]),
        exact=bool(arch[2]),
        instead=split(single.get("instead", "")),
        blocks=split(single.get("blocks", "")),
        roles=split(single.get("roles", "")),
        arrays=arrays,
        maps=maps,
        inout=tuple(name for value in many["inout"] for name in value.replace(",", " ").split()),
        defaults=defaults,
        requires=tuple(many["require"]),
        instances=tuple(_instance(value) for value in many["instance"]),
        tunes=tuple(_choices(value) for value in many["tune"]),
        shapes=tuple(_assignments(value) for value in many["shape"]),
    )


def split(text: str) -> tuple[str, ...]:
    """Split at commas outside parentheses."""
    pieces, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += character
    return tuple(piece.strip() for piece in pieces if piece.strip())


def _choices(text: str) -> dict[str, tuple[int, ...]]:
    """``Br=64,128 Bc=32`` as a dict of what is tried for each name."""
    try:
        pairs = (piece.split("=") for piece in text.split())
        return {name: tuple(int(value) for value in values.split(",")) for name, values in pairs}
    except ValueError:
        raise ValueError(f"@tune {text}: expected NAME=NUMBER,NUMBER,..., separated by blanks") from None


def _instance(text: str) -> dict[str, int | str]:
    """``T=half Br=32`` as a dict."""
    types = dict(re.findall(r"\b(\w+)=([A-Za-z_]\w*)(?!\S)", text))
    for name, type in types.items():
        if type not in DTYPES:
            raise ValueError(f"`{text}`: {name}={type} is neither a whole number nor a type ({', '.join(DTYPES)})")
    numbers = _assignments(" ".join(piece for piece in text.split() if piece.partition("=")[0] not in types))
    return {piece.partition("=")[0]: {**types, **numbers}[piece.partition("=")[0]] for piece in text.split()}


def _assignments(text: str) -> dict[str, int]:
    """``Br=32 Bc=32`` as a dict."""
    try:
        return {name: int(value) for name, value in (piece.split("=") for piece in text.split())}
    except ValueError:
        raise ValueError(f"`{text}`: expected NAME=NUMBER, separated by blanks") from None
