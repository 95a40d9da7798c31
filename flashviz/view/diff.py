"""What one kernel says otherwise than another: the lines of an action, or of the whole file, gone and new, as HTML and as text."""

from __future__ import annotations

import difflib
import html
from dataclasses import dataclass
from typing import Any

from flashviz.events import Source
from flashviz.recording import as_recording
from flashviz.view.palette import GROUND, HUES, TEXT

CONTEXT = 3
"""Lines that both have are shown up to this many from one that changes."""
STYLES = {
    "-": f"background:#fee2e2;color:{TEXT}",
    "+": f"background:#dcfce7;color:{TEXT}",
    " ": f"color:{TEXT}",
    "@": f"color:{HUES['m'].outline}",
}


@dataclass(frozen=True)
class CodeDiff:
    """Lines of two sources, in order, each with a mark: ``-`` gone, ``+`` new, a blank where both have it, ``@`` for a place in the file."""

    old: str
    new: str
    lines: tuple[tuple[str, str], ...]

    @property
    def gone(self) -> int:
        """Lines that only the first has."""
        return sum(mark == "-" for mark, _ in self.lines)

    @property
    def added(self) -> int:
        """Lines that only the second has."""
        return sum(mark == "+" for mark, _ in self.lines)

    def __str__(self) -> str:
        return "\n".join(f"{mark} {line}".rstrip() for mark, line in self.lines)

    def __repr__(self) -> str:
        return f"CodeDiff({self.old} → {self.new}: {self.gone} lines gone, {self.added} new)"

    def _repr_html_(self) -> str:
        head = f"<b>{html.escape(self.old)} → {html.escape(self.new)}</b>: {self.gone} lines gone, {self.added} new"
        rows = [
            f'<div style="{STYLES[mark]};white-space:pre;min-width:max-content">{mark if mark in "-+" else " "} {html.escape(line) or " "}</div>'
            for mark, line in self.lines
        ]
        box = f"background:{GROUND};color:{TEXT};border:1px solid #d4d4d8;border-radius:4px;padding:6px 8px;overflow-x:auto"
        font = "font:11.5px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace"
        return f'<div style="{box}"><div style="font:13px sans-serif;margin-bottom:4px">{head}</div><div style="{font}">{"".join(rows)}</div></div>'


def code_diff(old: Any, new: Any, *actions: str) -> CodeDiff:
    """What changes from one kernel to the next.

    Args:
        old, new: runs or recordings, whose kernels are meant, or :class:`flashviz.events.Source`.
        actions: whose lines to compare; the whole files when not given. Comments of their own lines count as lines.

    Raises:
        KeyError: a kernel does not name that action. ValueError: a recording without a kernel's text.

    >>> a = Source("cuda", "a.cu", "TRACE(load_k, j);\\nload();\\n__syncthreads();", (("load_k", 1, 3),))
    >>> b = Source("cuda", "b.cu", "TRACE(load_k, j);\\nload_ahead();", (("load_k", 1, 2),))
    >>> code_diff(a, b, "load_k")
    CodeDiff(a.cu → b.cu: 2 lines gone, 1 new)
    >>> print(code_diff(a, b, "load_k"))
    @ load_k
      TRACE(load_k, j);
    - load();
    - __syncthreads();
    + load_ahead();
    """
    one, two = _kernel(old), _kernel(new)
    lines: list[tuple[str, str]] = []
    if not actions:
        lines += _compare(one.text.split("\n"), two.text.split("\n"))
    for action in actions:
        lines.append(("@", action))
        lines += _compare(*(_dedent(source.lines_of(action).split("\n")) for source in (one, two)))
    return CodeDiff(one.name, two.name, tuple(lines))


def _kernel(of: Any) -> Source:
    if isinstance(of, Source):
        return of
    found = [source for source in as_recording(of).code if source.language == "cuda"]
    if not found:
        raise ValueError("this recording brings no kernel's text along")
    return found[-1]


def _dedent(lines: list[str]) -> list[str]:
    while lines and not lines[-1].strip():
        lines = lines[:-1]
    own = [line for line in lines if line.strip() and not line.startswith("#")]  # a directive stands at the margin
    margin = min((len(line) - len(line.lstrip()) for line in own), default=0)
    return [(line if line.startswith("#") else line[margin:]).rstrip() for line in lines]


def _compare(a: list[str], b: list[str]) -> list[tuple[str, str]]:
    out: list[tuple[str, str]] = []
    for group in difflib.SequenceMatcher(None, a, b, autojunk=False).get_grouped_opcodes(CONTEXT):
        if group[0][1] > 0:
            out.append(("@", f"… line {group[0][1] + 1}, now {group[0][3] + 1}"))
        for kind, a1, a2, b1, b2 in group:
            if kind == "equal":
                out += [(" ", line) for line in a[a1:a2]]
            else:
                out += [("-", line) for line in a[a1:a2]] + [("+", line) for line in b[b1:b2]]
    return out
