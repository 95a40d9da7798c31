"""What `fv.check` gives: findings, each with array, element, lines and threads, as text and, in a notebook, marked in the source.

Source and names may come from strangers: everything that reaches HTML is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape

NAMES: Mapping[str, str] = {
    "race": "race",
    "unwritten": "read of what nothing wrote",
    "bounds": "out of bounds",
    "barrier": "divergent barrier",
    "blocks": "race between blocks",
    "warp": "divergent warp intrinsic",
    "wild": "wild access",
    "input": "write to an input",
    "shared": "too much shared memory",
    "crash": "crash",
    "endless": "endless loop",
    "trap": "trap",
    "pending": "copy still under way",
    "aligned": "misaligned address",
    "missing": "never written",
    "order": "depends on the order of threads",
}
_AROUND = 2  # lines shown before and after a marked one


@dataclass(frozen=True)
class Finding:
    """One fault of a kernel.

    Args:
        kind: a key of NAMES.
        array: the array or part of shared memory, empty where there is none.
        element: the element, with its indices where they are known: ``"Sij[3, 5]"``.
        lines: lines of the kernel file, from 1, that take part; ``line`` is the last to happen.
        threads: (block, thread) of each side, each an (x, y, z).
        places: where each side was: (file, line), then where the functions it was in had been called.
        sentence: what happened.
        meaning: what that means on a GPU.
        case: the first instantiation and shape that showed it.
        orders: the thread orders that showed it in that case.
    """

    kind: str
    array: str
    element: str
    lines: tuple[int, ...]
    threads: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    places: tuple[tuple[tuple[str, int], ...], ...]
    sentence: str
    meaning: str
    case: str
    orders: tuple[str, ...]

    @property
    def line(self) -> int:
        """The line where it happened, the second of two; 0 where there is none."""
        return self.lines[-1] if self.lines else 0

    def __str__(self) -> str:
        at = (
            f", line{'s' if len(set(self.lines)) > 1 else ''} {' and '.join(map(str, sorted(set(self.lines))))}"
            if self.lines
            else ""
        )
        of = f" ({self.array})" if self.array else ""
        return f"{NAMES[self.kind]}{of}{at}\n  {self.sentence}\n  {self.meaning}\n  Seen in {_listed(self.orders)} order: {self.case}"


@dataclass(frozen=True)
class Report:
    """The result of a check. Prints as text; in a notebook it shows the source with the lines marked.

    Args:
        file: name of the kernel file.
        source: its text.
        findings: what was found; empty when there is nothing to report.
        problem: why the check could not run, or not to its end; empty when it could.
        cases: instantiations and shapes that ran, each in every order of ``orders``; ``total`` is how many the file has.
        answers: for the first case with a finding, what the kernel answers in each order where nothing stops it: right, wrong,
            stops; where no kernel of that name comes with flashviz: first, same or different.
    """

    file: str
    source: str
    findings: tuple[Finding, ...]
    problem: str
    cases: tuple[str, ...]
    total: int
    orders: tuple[str, ...]
    answers: Mapping[str, str] = field(default_factory=dict)
    problem_lines: tuple[int, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the check ran to its end and has nothing to report."""
        return not self.findings and not self.problem

    @property
    def lines(self) -> tuple[int, ...]:
        """Every line that a finding names, ascending."""
        return tuple(sorted({line for finding in self.findings for line in finding.lines} | set(self.problem_lines)))

    @property
    def summary(self) -> str:
        """One line: how much ran and what came of it."""
        ran = (
            f"{len(self.cases)} of {self.total} pairs of instantiation and shape, {len(self.orders)} thread orders each"
        )
        if self.problem and not self.findings:
            return f"{self.file} could not be checked: {self.problem}"
        if self.ok:
            return f"{self.file}: nothing to report ({ran})."
        count = len(self.findings)
        rest = f" The check did not end: {self.problem}" if self.problem else ""
        return f"{self.file}: {count} finding{'s' if count > 1 else ''} ({ran}).{rest}"

    @property
    def story(self) -> str:
        """What the kernel answers when nothing stops it, in one sentence; empty where nothing was found."""
        if not self.answers:
            return ""
        by_answer: dict[str, list[str]] = {}
        for order, answer in self.answers.items():
            by_answer.setdefault(answer, []).append(order)
        if set(by_answer) == {"right"}:
            return "Without the check every one of these orders gives the right answer: luck, which another size or GPU need not have."
        words = {
            "right": "the answer is right in {} order",
            "wrong": "wrong in {} order",
            "stops": "there is no answer in {} order",
            "first": "compared with the answer in {} order",
            "same": "it is equal in {} order",
            "different": "it is different in {} order",
        }
        said = [words[answer].format(_listed(by_answer[answer])) for answer in words if answer in by_answer]
        return f"Without the check: {'; '.join(said)}."

    def __str__(self) -> str:
        numbered = [f"\n{n}. {finding}" for n, finding in enumerate(self.findings, 1)]
        return "\n".join([self.summary, *numbered, *([f"\n{self.story}"] if self.story else [])])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        marked: dict[int, list[int]] = {}
        for number, finding in enumerate(self.findings, 1):
            for line in finding.lines:
                marked.setdefault(line, []).append(number)
        for line in self.problem_lines:
            marked.setdefault(line, [])
        parts = [f"<p>{escape(self.summary).replace(chr(10), '<br>')}</p>"]
        for number, finding in enumerate(self.findings, 1):
            what = f"{NAMES[finding.kind]}{f' ({finding.array})' if finding.array else ''}"
            seen = f"Seen in {_listed(finding.orders)} order: {finding.case}"
            parts.append(
                f"<p><b>{number}. {escape(what)}</b><br>{escape(finding.sentence)}<br>{escape(finding.meaning)}<br>"
                f"<small>{escape(seen)}</small></p>"
            )
        if self.story:
            parts.append(f"<p>{escape(self.story)}</p>")
        if marked:
            parts.append(self._excerpt(marked))
        return '<div class="flashviz-check">' + "".join(parts) + "</div>"

    def _excerpt(self, marked: Mapping[int, list[int]]) -> str:
        text = self.source.splitlines()
        shown = sorted({n for line in marked for n in range(line - _AROUND, line + _AROUND + 1) if 1 <= n <= len(text)})
        rows, before = [], 0
        for n in shown:
            if before and n > before + 1:
                rows.append('<span style="opacity:.5">     ⋮</span>')
            before = n
            code = escape(text[n - 1]) or " "
            if n in marked:
                note = "".join(f" ◄ {number}" for number in marked[n]) or " ◄"
                rows.append(f'<mark style="background:#f2b84b55;color:inherit">{n:5d}  {code}<b>{note}</b></mark>')
            else:
                rows.append(f"{n:5d}  {code}")
        return f'<pre style="line-height:1.35">{chr(10).join(rows)}</pre>'


def _listed(words: tuple[str, ...] | list[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else "no"
