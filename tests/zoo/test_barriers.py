"""A16: in every kernel, each `__syncthreads()` deleted in turn is reported, mostly as a race, with the right lines."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from zoo.oracles import files, kernels

from flashviz.checks.kernels import check
from flashviz.cuda import cpu, find
from flashviz.cuda.sources import blank_comments, folders

if not cpu.status().usable:
    pytest.skip("no C++ compiler is here: pip install ziglang", allow_module_level=True)

BARRIER = re.compile(r"__syncthreads\(\);")
FUNCTION = re.compile(r"^(?:__global__|__device__|template)\b", re.M)


def barriers(file: str) -> list[int]:
    """Lines of the barriers of a kernel file, from 1."""
    code = blank_comments(find(file).text)
    return [code.count("\n", 0, match.start()) + 1 for match in BARRIER.finditer(code)]


def every_barrier() -> list[tuple[str, int]]:
    return [(file, number) for file in files() for number in range(len(barriers(file)))]


def without(file: str, line: int) -> str:
    lines = find(file).text.splitlines()
    assert BARRIER.search(lines[line - 1])
    lines[line - 1] = BARRIER.sub(";", lines[line - 1])
    return "\n".join(lines)


def region_before(file: str, number: int) -> tuple[int, int]:
    """The lines that this barrier closes: from the barrier before it, in the same function. In a helper, the whole function."""
    code, lines = blank_comments(find(file).text), barriers(file)
    starts = [code.count("\n", 0, match.start()) + 1 for match in FUNCTION.finditer(code)]
    line = lines[number]
    begin = max(start for start in starts if start < line)
    end = min([start for start in starts if start > line], default=len(code.splitlines()) + 1)
    head = "\n".join(code.splitlines()[begin - 1 : line])
    if "__global__" not in head:
        return begin, end
    return max([begin, *(other for other in lines if begin < other < line)]), line


def deleting_is_caught(file: str, number: int, tmp_path: Path) -> None:
    line = barriers(file)[number]
    path = tmp_path / f"{file}.cu"
    path.write_text(without(file, line), encoding="utf-8")
    report = check(path, answers=False)
    assert report.problem == ""
    if "cp_async_16" in find(file).text:
        # A copy is issued on one side of a barrier and read on the other side of the next.
        late = [finding for finding in report.findings if finding.kind in ("race", "pending")]
        assert late, report
        for finding in late:
            assert finding.array in find(file, finding.case.split("<")[0].split(" ")[0]).parts, finding
        return
    races = [finding for finding in report.findings if finding.kind == "race"]
    assert races, report
    first, last = region_before(file, number)
    helper = last > line
    for race in races:
        inside = [any(first <= at <= last for _, at in places) for places in race.places]
        # One of the two is what the barrier closed, the other is not. A helper's barrier also closes what was done before its call.
        assert any(inside) or (helper and min(race.lines) < line < max(race.lines)), (line, race)
        assert helper or not all(inside), (line, race)
        assert race.array in find(file, race.case.split("<")[0].split(" ")[0]).parts, race


@pytest.mark.parametrize("number", range(len(barriers("flash_attention_2"))))
def test_deleting_a_barrier_is_caught(number: int, tmp_path: Path) -> None:
    deleting_is_caught("flash_attention_2", number, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("file", "number"), [pair for pair in every_barrier() if pair[0] != "flash_attention_2"])
def test_deleting_any_barrier_is_caught(file: str, number: int, tmp_path: Path) -> None:
    deleting_is_caught(file, number, tmp_path)


def headers() -> list[tuple[Path, int]]:
    """Every barrier in a header: the file and the barrier's line."""
    found = []
    for header in sorted(path for folder in folders() for path in (folder / "include").glob("*.cuh")):
        code = blank_comments(header.read_text(encoding="utf-8"))
        found += [(header, code.count("\n", 0, match.start()) + 1) for match in BARRIER.finditer(code)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("header", "line"), headers(), ids=lambda value: getattr(value, "name", str(value)))
def test_deleting_a_headers_barrier_is_caught(header: Path, line: int, tmp_path: Path) -> None:
    """In one of the kernels that include it, with the header named among the places."""
    shutil.copytree(header.parent, tmp_path / "include")
    lines = header.read_text(encoding="utf-8").splitlines()
    lines[line - 1] = BARRIER.sub(";", lines[line - 1])
    (tmp_path / "include" / header.name).write_text("\n".join(lines), encoding="utf-8")
    said = []
    for file in files():
        if f'#line 1 "{header.name}"' not in find(file).assembled:
            continue
        path = tmp_path / f"{file}.cu"
        path.write_text(find(file).text, encoding="utf-8")
        report = check(path, answers=False)
        said.append(str(report))
        assert report.problem == ""
        for finding in report.findings:
            # What a block has not written before it counts itself done is found where another reads it.
            between = finding.kind == "blocks" and "atomicInc" in "\n".join(lines)
            if between or (
                finding.kind == "race" and any(name == header.name for places in finding.places for name, _ in places)
            ):
                return
    raise AssertionError((header.name, line, said))


def test_the_barriers_are_found() -> None:
    assert len(every_barrier()) >= 20
    assert {file for file, _ in every_barrier()} == {file for file, _ in kernels()}
