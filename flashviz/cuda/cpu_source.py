"""What is done to text on the way to the processor: to the assembled source before the compiler reads it, to the assembly that it writes.

What the preprocessor cannot say is rewritten: ``__shared__`` declarations and device globals. For checking, the `.loc` directives of the
assembly become a table of addresses and lines.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from flashviz.cuda.sources import blank_comments

_SHARED = re.compile(
    r"(?P<extern>extern\s+)?__shared__\s+(?:(?:alignas|__align__)\s*\([^)]*\)\s*)?"
    r"(?P<type>(?:const\s+|volatile\s+)*(?:unsigned\s+|signed\s+|long\s+)*[\w:]+(?:<[^;<>]*>)?)\s+(?P<names>[^;={}()]+);"
)
_DECLARATOR = re.compile(r"\s*(\w+)\s*((?:\[[^\]]*\]\s*)*)\Z")
_GLOBAL = re.compile(
    r"\b(?:__device__|__constant__)(?=\s(?![^(){};=]*\b(?:const|constexpr|inline|operator)\b)[^(){};=]*[;={])"
)


class HostCompileError(RuntimeError):
    """The kernel does not compile for the processor. ``problems`` are (file, line, message), as the compiler names them."""

    def __init__(self, message: str, problems: Sequence[tuple[str, int, str]] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


def rewrite_shared(assembled: str) -> str:
    """``assembled`` with each ``__shared__`` declaration turned into an array that the runtime names, fences and fills.

    >>> rewrite_shared("__shared__ float S[4][Bc + 1], m;")
    'auto& S = fv::shared<float[4][Bc + 1]>("S", __FILE__, __LINE__); auto& m = fv::shared<float>("m", __FILE__, __LINE__);'
    """
    code = blank_comments(assembled)
    pieces, end = [], 0
    for match in _SHARED.finditer(code):
        declared = []
        for name in match["names"].split(","):
            found = _DECLARATOR.match(name)
            if not found:
                line = code.count("\n", 0, match.start()) + 1
                raise HostCompileError(
                    f"line {line} of the assembled source: `{match[0]}` is a __shared__ declaration that the processor cannot read."
                )
            variable, extents = found[1], " ".join(found[2].split())
            if match["extern"]:
                declared.append(f"static {match['type']}* const {variable} = ({match['type']}*)fv::arena;")
            else:
                declared.append(
                    f'auto& {variable} = fv::shared<{match["type"]}{extents}>("{variable}", __FILE__, __LINE__);'
                )
        newlines = "\n" * match[0].count("\n")
        pieces += [assembled[end : match.start()], " ".join(declared) + newlines]
        end = match.end()
    return "".join([*pieces, assembled[end:]])


def mark_globals(assembled: str) -> str:
    """``assembled`` with its device globals in a section of their own, so that the runtime finds them (Linux only).

    >>> mark_globals("__device__ int x[4]; __device__ int f(int x = 1) { return x; }")
    '__device__ __attribute__((section("fv_globals"))) int x[4]; __device__ int f(int x = 1) { return x; }'
    """
    code = blank_comments(assembled)
    pieces, end = [], 0
    for match in _GLOBAL.finditer(code):
        pieces += [assembled[end : match.end()], ' __attribute__((section("fv_globals")))']
        end = match.end()
    return "".join([*pieces, assembled[end:]])


def with_line_table(assembly: str) -> str:
    """``assembly`` with a label at every `.loc` and a table of them, ``fv_lines``: address, number of the file, line; the names follow.

    The last entry of the table is zero. ``fv_files`` is text, one name a line, in the order of the numbers that the table uses.
    """
    files: dict[str, int] = {}
    numbers: dict[str, int] = {}
    out: list[str] = []
    entries: list[tuple[str, int, str]] = []
    mac = sys.platform == "darwin"
    prefix, local = ("_", "Lfv_loc") if mac else ("", ".Lfv_loc")
    for line in assembly.splitlines():
        out.append(line)
        words = line.split(None, 4)
        if len(words) > 2 and words[0] == ".file" and words[1].isdigit():
            name = re.findall(r'"([^"]*)"', line)[-1]
            numbers[words[1]] = files.setdefault(name.replace("\\", "/").rsplit("/", 1)[-1], len(files))
        elif len(words) > 2 and words[0] == ".loc" and words[1] in numbers:
            label = f"{local}{len(entries)}"
            out.append(f"{label}:")
            entries.append((label, numbers[words[1]], words[2]))
        elif words and words[0] in (".cfi_endproc", ".seh_endproc"):  # what follows has no line until the next .loc
            label = f"{local}{len(entries)}"
            out.append(f"{label}:")
            entries.append((label, 0, "0"))
    section = "__DATA,__data" if mac else ".data" if sys.platform == "win32" else '.data,"aw"'
    out += [f"\t.section {section}", "\t.p2align 3", f"\t.globl {prefix}fv_lines", f"{prefix}fv_lines:"]
    for label, number, at in entries:
        out += [f"\t.quad {label}", f"\t.long {number}", f"\t.long {at}"]
    out += ["\t.quad 0", "\t.quad 0", f"\t.globl {prefix}fv_files", f"{prefix}fv_files:"]
    out += [f'\t.asciz "{chr(92)}n"' if not files else '\t.asciz "' + "\\n".join(files) + '"', ""]
    return "\n".join(out)
