"""Kernel source files: found by name, read for what they declare, assembled into the one text that is compiled.

A kernel file is the only place that says how it is launched. `find` reads from it

* the header block, comment lines `// @word ...`: kernel, paper, grid, block, arch, instead, blocks, array, map, inout, default, require,
  instance, shape, tune;
* the signature of the `__global__` function that `@kernel` names;
* the shared-memory parts, lines `carve.tile<rows, columns>("name")` and `carve.vector<length>("name")`, of floats, or of a type that is
  named first, `carve.tile<half, rows, columns>("name")`, which may be a template parameter;
* the actions, lines `TRACE(name, tile);`, numbered in their order of appearance.

A file may hold several kernels: each line `// @kernel NAME` begins the lines about that one, and what stands before the first holds
for all of them unless a kernel says otherwise. `find(file)` is the first, `find(file, function)` the one named; its actions and its
shared memory are those of its own function (and of what stands outside every kernel), the compiled text is the whole file.

The assembled text has every `#include "..."` replaced by the file, with `#line` directives: CuPy's cache of compiled kernels does not
see a changed header, so a changed header must be a changed source. It holds no path of this machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from flashviz.cuda.expressions import evaluate
from flashviz.cuda.scalars import BARRIER, DTYPES, TemplateValues, size_of
from flashviz.cuda.signatures import BOUNDS, Signature, parse_signature
from flashviz.cuda.tensor_maps import MapLine, parse_map

_PACKAGE = Path(__file__).resolve().parent.parent
_SINGLE = ("paper", "grid", "block", "arch", "blocks", "instead")
_MANY = ("array", "map", "inout", "default", "require", "instance", "shape", "tune")
_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|//[^\n]*|/\*.*?\*/', re.S)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"[^\n]*$', re.M)
_TRACE = re.compile(r"^[ \t]*TRACE\(\s*(\w+)\s*,", re.M)
_GLOBAL = re.compile(rf"\b__global__\b[^{{;]*?\bvoid\b(?:\s|{BOUNDS})*\b(?!__launch_bounds__)(\w+)\s*\(")
_PART = re.compile(r'\bcarve\.(tile|vector)\s*<([^<>;]*)>\s*\(\s*"(\w+)"\s*\)')


class SourceError(ValueError):
    """A kernel file that is not there, or that does not say what it must; the message names file and line."""


@dataclass(frozen=True)
class Header:
    """What the header block says of one kernel, as written. ``arrays`` maps an argument to the names of its dimensions.

    ``inout`` names the outputs whose contents the kernel reads before it writes them. ``maps`` are the parameters that are tensor maps.
    ``arch`` is the least architecture, or with ``exact`` (`@arch 90a`) the only one; ``instead`` are kernel files for the same work that
    run elsewhere, the best first.
    """

    kernel: str
    paper: str = ""
    grid: tuple[str, ...] = ()
    block: tuple[str, ...] = ("128",)
    arch: int = 75
    exact: bool = False
    instead: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    arrays: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    maps: Mapping[str, MapLine] = field(default_factory=dict)
    inout: tuple[str, ...] = ()
    defaults: Mapping[str, str] = field(default_factory=dict)
    requires: tuple[str, ...] = ()
    instances: tuple[TemplateValues, ...] = ()
    tunes: tuple[Mapping[str, tuple[int, ...]], ...] = ()
    shapes: tuple[Mapping[str, int], ...] = ()


@dataclass(frozen=True)
class KernelSource:
    """One kernel of a file. ``actions`` maps each name to its first and last line (from 1, inclusive) in ``text``.

    ``parts`` are the extents of each part of the shared memory, ``part_types`` the types of those that are not float. ``kernels`` are all that the file describes. ``trace_ids`` numbers the actions of the whole file from 0 in their order of
    appearance; ``assembled`` is what is compiled, the same for every kernel of the file.
    """

    name: str
    path: Path
    text: str
    assembled: str
    header: Header
    signature: Signature
    actions: Mapping[str, tuple[int, int]]
    trace_ids: Mapping[str, int]
    parts: Mapping[str, tuple[str, ...]]
    kernels: tuple[str, ...] = ()
    part_types: Mapping[str, str] = field(default_factory=dict)

    def shared_parts(self, template: TemplateValues) -> dict[str, int]:
        """Bytes of each named part of the dynamic shared memory, in carving order, for these template values."""
        sizes = {}
        for name, extents in self.parts.items():
            type = self.part_types.get(name, "float")
            sizes[name] = size_of(str(template.get(type, type)))
            for extent in extents:
                sizes[name] *= int(evaluate(extent, template))
        return sizes

    def shared_bytes(self, template: TemplateValues) -> int:
        """Bytes of dynamic shared memory that one block needs, for these template values."""
        return sum(self.shared_parts(template).values())

    def targets(self, archs: Sequence[int]) -> tuple[str, ...]:
        """Of these architectures (90 for sm_90) those that the kernel is compiled for, as NVRTC names them: "90", or its only one, "90a"."""
        if self.header.exact:
            return (f"{self.header.arch}a",)
        return tuple(str(arch) for arch in archs if arch >= self.header.arch)

    @property
    def not_on_processor(self) -> str:
        """Why the processor cannot run this kernel; empty where it can."""
        if not self.header.exact:
            return ""
        instead = f" {self.header.instead[0]} does the same work there." if self.header.instead else ""
        return (
            f"{self.header.kernel} cannot be run on the processor: TMA and wgmma are instructions of Hopper GPUs "
            f"(sm_{self.header.arch}a) that nothing there emulates.{instead}"
        )

    def lines(self, action: str) -> str:
        """Text of the lines that perform ``action``."""
        first, last = self.actions[action]
        return "\n".join(self.text.splitlines()[first - 1 : last])


def folders() -> tuple[Path, ...]:
    """Where kernel files are looked for, in order: in the package as a wheel ships it, then beside the package."""
    return (_PACKAGE / "_kernels", _PACKAGE.parent / "kernels")


def find(name: str | Path, function: str = "") -> KernelSource:
    """The kernel file called ``name``: "flash_attention_2", with or without .cu, or a path to any .cu file.

    ``function`` names the kernel where the file has several; the first when not given. Its includes are looked for beside it, then in the kernels' own folder, so a reader's copy needs no headers of its own.
    Read anew at each call: an edited file is an edited kernel. Raises SourceError.
    """
    path = Path(name)
    if path.suffix != ".cu":
        path = path.with_name(path.name + ".cu")
    if path.parent == Path():
        candidates = [folder / path for folder in folders()]
        path = next((c for c in candidates if c.is_file()), path)
    if not path.is_file():
        known = sorted({p.stem for folder in folders() for p in folder.glob("*.cu")})
        raise SourceError(f"no kernel file {path.name}; there are {', '.join(known) or 'none'}.")
    return parse(path.read_text(encoding="utf-8"), path, function)


def parse(text: str, path: Path, function: str = "") -> KernelSource:
    """The kernel ``function`` (the first when not given) in ``text``, as if read from ``path``. Raises SourceError."""
    try:
        headers = parse_headers(text)
        if function and function not in headers:
            raise ValueError(f"no line `// @kernel {function}`; it describes {', '.join(headers)}")
        header = headers[function] if function else next(iter(headers.values()))
        code = blank_comments(text)
        signature = with_maps(parse_signature(code, header.kernel), header)
        code = blank_others(code, header.kernel)
    except ValueError as error:
        raise SourceError(f"{path.name}: {error}") from None
    body = assemble(text, path)
    ids = {action: number for number, action in enumerate(dict.fromkeys(_TRACE.findall(blank_comments(body))))}
    numbers = "".join(f"#define TRACE_ID_{action} {number}\n" for action, number in ids.items())
    parts, types = {}, {}
    for _, inside, name in _PART.findall(code):
        first, *rest = extents = _split(inside)
        if first in DTYPES or first == BARRIER or first in signature.template_types:
            extents, types[name] = tuple(rest), first
        parts[name] = extents
    assembled = f'{numbers}#line 1 "{path.name}"\n{body}'
    actions = action_lines(code)
    return KernelSource(
        header.kernel, path, text, assembled, header, signature, actions, ids, parts, tuple(headers), types
    )


def with_maps(signature: Signature, header: Header) -> Signature:
    """The signature with what the @map lines say of its tensor maps. Raises ValueError where the two do not agree."""
    mapped = {p.name for p in signature.parameters if p.mapped}
    if missing := sorted(mapped - set(header.maps)):
        raise ValueError(
            f"{header.kernel}: no line says what the tensor map {missing[0]} is of: `// @map {missing[0]} const T [64, D] swizzle 128`"
        )
    if extra := sorted(set(header.maps) - mapped):
        raise ValueError(
            f"{header.kernel}: @map {extra[0]}: no parameter `const __grid_constant__ TensorMap {extra[0]}`"
        )
    for line in header.maps.values():
        if line.type not in DTYPES and line.type not in signature.template_types:
            raise ValueError(f"@map {line.name}: {line.type} is no type that the launcher knows")
    parameters = (
        replace(p, type=header.maps[p.name].type, const=header.maps[p.name].const) if p.mapped else p
        for p in signature.parameters
    )
    return replace(signature, parameters=tuple(parameters))


def blank_comments(text: str) -> str:
    """``text`` with comments turned into blanks, every character elsewhere at its line and column."""

    def blank(match: re.Match[str]) -> str:
        return match[0] if match[0][0] in "\"'" else re.sub(r"[^\n]", " ", match[0])

    return _COMMENT.sub(blank, text)


def blank_others(code: str, function: str) -> str:
    """``code`` (comments already blanked) with the bodies of all kernels but ``function`` turned into blanks."""
    pieces, end = [], 0
    for match in _GLOBAL.finditer(code):
        opening = code.find("{", match.end())
        semicolon = code.find(";", match.end())
        if match[1] == function or opening < 0 or -1 < semicolon < opening:  # the one asked for, or only declared
            continue
        depth, close = 0, opening
        while close < len(code):
            depth += (code[close] == "{") - (code[close] == "}")
            close += 1
            if depth == 0:
                break
        pieces += [code[end:opening], re.sub(r"[^\n]", " ", code[opening:close])]
        end = close
    return "".join([*pieces, code[end:]])


def assemble(text: str, path: Path) -> str:
    """``text`` with its quoted includes in place, once each. Raises SourceError for one that is not found."""
    seen: set[str] = set()

    def expand(text: str, path: Path, label: str) -> str:
        def replace(match: re.Match[str]) -> str:
            wanted, line = match[1], text.count("\n", 0, match.start()) + 1
            beside = [folder / part / wanted for folder in folders() for part in ("", "include")]
            places = [path.parent / wanted, *beside]  # an edited copy of a header finds its siblings with the kernels
            found = next((p for p in places if p.is_file()), None)
            if found is None:
                raise SourceError(
                    f'{label}, line {line}: #include "{wanted}" is neither beside the file nor with the kernels.'
                )
            back = f'#line {line + 1} "{label}"'
            if found.name in seen:
                return back
            seen.add(found.name)
            inner = expand(found.read_text(encoding="utf-8"), found, found.name).rstrip("\n")
            return f'#line 1 "{found.name}"\n{inner}\n{back}'

        # Matches come from the text without comments (same offsets), so an include that is commented out stays out.
        pieces, end = [], 0
        for match in _INCLUDE.finditer(blank_comments(text)):
            pieces += [text[end : match.start()], replace(match)]
            end = match.end()
        return "".join([*pieces, text[end:]]).replace("#pragma once", "")

    return expand(text, path, path.name)


def action_lines(code: str) -> dict[str, tuple[int, int]]:
    """First and last line of each action: from its TRACE to the next, less what opens or closes a block around the two."""
    lines = code.splitlines()
    starts = [(n, found[1]) for n, line in enumerate(lines, 1) if (found := _TRACE.match(line))]
    actions: dict[str, tuple[int, int]] = {}
    for position, (first, name) in enumerate(starts):
        end = starts[position + 1][0] if position + 1 < len(starts) else len(lines) + 1
        depth, last = 0, first
        for n in range(first, end):
            line = lines[n - 1]
            depth += line.count("{") - line.count("}")
            if depth < 0:
                break
            if depth == 0 and line.strip():
                last = n
        actions.setdefault(name, (first, last))
    return actions


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
        arrays[found[1]] = _split(found[2])
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
        grid=_split(single.get("grid", "")),
        block=_split(single.get("block", "128")),
        arch=int(arch[1]),
        exact=bool(arch[2]),
        instead=_split(single.get("instead", "")),
        blocks=_split(single.get("blocks", "")),
        arrays=arrays,
        maps=maps,
        inout=tuple(name for value in many["inout"] for name in value.replace(",", " ").split()),
        defaults=defaults,
        requires=tuple(many["require"]),
        instances=tuple(_instance(value) for value in many["instance"]),
        tunes=tuple(_choices(value) for value in many["tune"]),
        shapes=tuple(_assignments(value) for value in many["shape"]),
    )


def _split(text: str) -> tuple[str, ...]:
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
