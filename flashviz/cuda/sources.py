"""Kernel source files: found by name, read for what they declare, assembled into the one text that is compiled.

A kernel file is the only place that says how it is launched. `find` reads from it

* the header block, comment lines `// @word ...`: kernel, paper, grid, block, arch, instead, blocks, roles, array, map, inout, default, require,
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
from flashviz.cuda.headers import Header, parse_headers, split
from flashviz.cuda.scalars import BARRIER, DTYPES, TemplateValues, size_of
from flashviz.cuda.signatures import BOUNDS, Signature, parse_signature

_PACKAGE = Path(__file__).resolve().parent.parent
_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|//[^\n]*|/\*.*?\*/', re.S)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"[^\n]*$', re.M)
_TRACE = re.compile(r"^[ \t]*TRACE\(\s*(\w+)\s*,", re.M)
_GLOBAL = re.compile(rf"\b__global__\b[^{{;]*?\bvoid\b(?:\s|{BOUNDS})*\b(?!__launch_bounds__)(\w+)\s*\(")
_PART = re.compile(r'\bcarve\.(tile|vector)\s*<([^<>;]*)>\s*\(\s*"(\w+)"\s*\)')


class SourceError(ValueError):
    """A kernel file that is not there, or that does not say what it must; the message names file and line."""


@dataclass(frozen=True)
class KernelSource:
    """One kernel of a file. ``actions`` maps each name to its first and last line (from 1, inclusive) in ``text``, those where it stands
    first; ``places`` are all of them, for a kernel that names an action twice: a tile is loaded before the loop, and more inside it.

    ``parts`` are the extents of each part of the shared memory, ``part_types`` the types of those that are not float. ``kernels`` are all
    that the file describes. ``trace_ids`` numbers the actions of the whole file from 0 in their order of appearance; ``assembled`` is what
    is compiled, the same for every kernel of the file.
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
    places: tuple[tuple[str, int, int], ...] = ()

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
        first, *rest = extents = split(inside)
        if first in DTYPES or first == BARRIER or first in signature.template_types:
            extents, types[name] = tuple(rest), first
        parts[name] = extents
    assembled = f'{numbers}#line 1 "{path.name}"\n{body}'
    places = action_places(code)
    actions = {name: (first, last) for name, first, last in reversed(places)}
    actions = {name: actions[name] for name, _, _ in places}
    return KernelSource(
        header.kernel, path, text, assembled, header, signature, actions, ids, parts, tuple(headers), types, places
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


def action_places(code: str) -> tuple[tuple[str, int, int], ...]:
    """Each TRACE line's action with its first and last line: from there to the next, less what opens or closes a block around the two."""
    lines = code.splitlines()
    starts = [(n, found[1]) for n, line in enumerate(lines, 1) if (found := _TRACE.match(line))]
    places = []
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
        places.append((name, first, last))
    return tuple(places)
