"""`fv.check`: what it reports and how, what it cannot see, and the command."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import flashviz as fv
from flashviz import cli
from flashviz.checks import kernels
from flashviz.checks.kernel_cases import Case, make_cases, make_plan
from flashviz.checks.kernel_report import NAMES, Report
from flashviz.checks.kernels import check
from flashviz.cuda import cpu, find
from flashviz.cuda.cpu_faults import MEANING
from flashviz.cuda.cpu_results import KINDS

pytestmark = pytest.mark.skipif(not cpu.status().usable, reason="no C++ compiler is here: pip install ziglang")

HEADER = "// @kernel k\n// @grid 2\n// @block 64\n// @array x [64]\n// @array y [128]\n"
LINE = 9  # of the body's first line


def kernel(body: str, before: str = "", header: str = HEADER) -> str:
    return f"{header}{before}\n__global__ void k(const float* x, float* y) {{\nconst int t = threadIdx.x, i = blockIdx.x * 64 + t;\n{body}\n}}\n"


def faults(body: str, before: str = "", **options: Any) -> Report:
    return check(kernel(body, before), **{"answers": False, "seconds": 2, **options})


# ---- what is found, kind by kind ----


@pytest.mark.parametrize(
    ("kind", "array", "body", "words"),
    [
        ("race", "s", "__shared__ float s[64]; s[t] = t; y[i] = s[63 - t];", r"s\[\d+\]: thread \d+ (reads|writes) it at line 9 and thread \d+ (writes|reads) it at line 9, with no barrier between \(block \("),
        ("race", "y", "y[i] = 0; y[64 * blockIdx.x] = t;", r"y\[0\]: thread"),
        ("race", "s", "__shared__ int s; if (t == 0) s = 0; __syncthreads();\natomicAdd(&s, 1); y[i] = s;", "with no barrier between"),
        ("race", "s", "__shared__ float s[64]; s[t] = t; y[i] = s[t / 32 * 32 + 31 - t % 32];", "with no barrier between"),
        ("unwritten", "s", "__shared__ float s[64]; if (t < 60) s[t] = 1; __syncthreads(); y[i] = s[t];", r"s\[60\]: thread 60 reads it at line 9, and nothing has written it"),
        ("unwritten", "y", "y[i] += 1;", r"y\[0\]: thread 0 reads it"),
        ("bounds", "x", "y[i] = x[t + 1];", r"x\[64\]: thread 63 reads past its end, x\[63\], at line 9"),
        ("bounds", "x", "y[i] = x[t - 1];", r"x\[-1\]: thread 0 reads before its start, at line 9"),
        ("bounds", "y", "y[i] = 1; if (i == 127) y[i + 40] = 1;", r"y\[167\]: thread 63 writes past its end"),
        ("bounds", "s", "__shared__ float s[64]; s[t] = 0; s[t + 1] = 0; y[i] = 0;", r"s\[64\]: thread 63 writes"),
        ("bounds", "b", "__shared__ float a[8], b[64]; b[t] = a[0] = 0; if (t == 0) b[-1] = 0; y[i] = 0;", r"b\[-1\]: thread 0 writes before its start"),
        ("barrier", "", "if (t < 3) __syncthreads(); y[i] = 0;", "thread 0 waits at the barrier of line 9, which 61 of 64 threads have ended without reaching, thread 3 among them"),
        ("barrier", "", "if (t < 3) __syncthreads();\nelse __syncthreads();\ny[i] = 0;", "thread 0 waits at the barrier of line 9 and thread 3 at that of line 10"),
        ("blocks", "y", "y[t] = 1;", r"y\[0\]: block \(0, 0, 0\) writes it at line 9 and block \(1, 0, 0\) writes it at line 9"),
        ("blocks", "y", "if (blockIdx.x == 0) y[i] = 1; else y[i] = y[t];", r"block \(0, 0, 0\) writes it at line 9 and block \(1, 0, 0\) reads it"),
        ("warp", "__shfl_sync", "if (t % 2) y[i] = __shfl_sync(~0u, x[t], 0); else y[i] = 0;\n__syncthreads();", "mask 0xffffffff names lanes that wait elsewhere"),
        ("warp", "__shfl_sync", "if (t % 2) return;\ny[i] = __shfl_sync(~0u, x[t], 1);", "asks for the value of lane 1, which takes no part"),
        ("warp", "__ballot_sync", "y[i] = __ballot_sync(0xfffffffe, 1);", "leaves out lane 0"),
        ("wild", "", "y[i] = *(const float*)(16);", "thread 0 reads memory that belongs to no array, at line 9"),
        ("wild", "", "y[i] = x[t + (1LL << 33)];", "belongs to no array"),
        ("input", "x", "((float*)x)[t] = 0; y[i] = 0;", r"x\[0\]: thread 0 writes it at line 9, and the kernel declares x const"),
        ("shared", "s", "__shared__ float s[20000]; s[t] = 0; y[i] = s[t];", "s needs 80,000 bytes; static shared memory ends at 49,152"),
        ("crash", "", "y[i] = 64 / (int)blockIdx.x;", "a whole number divided by zero"),
        ("crash", "", "float big[300000]; for (int n = 0; n < 300000; ++n) big[n] = x[n % 64];\ny[i] = big[t];", "more local memory than a thread has here"),
        ("endless", "", "while (x[0] < 1e9f) y[i] = 0;", "still running at the time limit; thread 0 was at line 9"),
        ("endless", "", "while (true) __syncthreads();", "was at line 9"),
        ("trap", "", "y[i] = 0; if (t == 5) __trap();", "thread 5 stopped at line 9: __trap"),
        ("trap", "", "assert(t < 60); y[i] = 0;", r"thread 60 stopped at line 9: assert\(t < 60\)"),
        ("missing", "y", "if (t) y[i] = 0;", r"2 of the 128 elements of y are never written; y\[0\] is the first"),
        ("order", "y", "__shared__ float s; if (t == 0) s = 0; __syncthreads(); atomicAdd(&s, 1e8f / (1 + t)); __syncthreads(); y[i] = s;", r"y\[0\] is .* with the threads in forward order and .* in \w+ order"),
    ],
)  # fmt: skip
def test_kinds(kind: str, array: str, body: str, words: str) -> None:
    report = faults(body)
    assert report.problem == ""
    found = [finding for finding in report.findings if finding.kind == kind]
    assert found, report
    assert all(finding.array == array for finding in found)
    assert any(re.search(words, finding.sentence) for finding in found), report
    assert found[0].meaning == MEANING[kind]
    if kind not in ("missing", "order"):
        entry = (
            {LINE - 2} if "local memory" in words else set()
        )  # a frame that is too large fails where the function begins
        assert set(found[0].lines) <= {LINE, LINE + 1} | entry
        assert found[0].lines
        assert found[0].threads


def test_every_kind_has_words() -> None:
    assert set(NAMES) == set(MEANING) == {*KINDS[1:], "missing", "order"}


def test_a_clean_kernel() -> None:
    body = "__shared__ float s[64]; s[t] = x[t]; __syncthreads(); y[i] = s[63 - t] + __shfl_xor_sync(~0u, x[t], 1);"
    report = faults(body)
    assert report.ok
    assert report.findings == ()
    assert (
        str(report) == "kernel.cu: nothing to report (1 of 1 pairs of instantiation and shape, 3 thread orders each)."
    )
    assert report.story == ""


def test_a_warp_that_synchronises_has_no_race() -> None:
    body = "__shared__ float s[64]; s[t] = x[t];%s y[i] = s[t ^ 1];"
    assert faults(body % " __syncwarp();").ok
    assert faults(body % "").findings[0].kind == "race"
    across = "__shared__ float s[64]; s[t] = x[t]; __syncwarp(); y[i] = s[t ^ 32];"
    assert faults(across).findings[0].kind == "race"


def test_reads_by_many_threads_and_then_a_write() -> None:
    body = "__shared__ float s[64]; s[t] = x[t]; __syncthreads(); float sum = 0; for (int n = 0; n < 64; ++n) sum += s[n];\n%s\ns[t] = sum; y[i] = s[t];"
    (race,) = faults(body % "").findings
    assert (race.kind, set(race.lines)) == ("race", {9, 11})
    assert faults(body % "__syncthreads();").ok


def test_narrow_accesses_are_bytes() -> None:
    body = "__shared__ unsigned char s[64]; s[t] = t; %s y[i] = s[63 - t];"
    assert faults(body % "__syncthreads();").ok
    (race, *_) = faults(body % "").findings
    assert (race.kind, race.array) == ("race", "s")


def test_a_function_names_where_it_was_called() -> None:
    before = "template <int N>\n__device__ float second(const float* s, int t) {\n    return s[(t + 1) % N];\n}\n"
    (race, *_) = faults("__shared__ float s[64]; s[t] = x[t];\ny[i] = second<64>(s, t);", before).findings
    assert {place for places in race.places for place in places} == {
        ("kernel.cu", 8),
        ("kernel.cu", 14),
        ("kernel.cu", 13),
    }
    assert "line 8 (called at line 14)" in race.sentence


def test_parts_and_arrays_have_indices(tmp_path: Path) -> None:
    text = find("flash_attention_2").text.replace("Sij[r][c] = seen", "if (r != 2) Sij[r][c] = seen")
    found = check(text, answers=False).findings
    assert any(re.match(r"Sij\[2, 0\]$", finding.element) for finding in found)
    assert any(finding.element == "O[0, 0, 34, 0]" for finding in check(find("flash_attention_2").text.replace("if (q < Nq) O", "O"), answers=False).findings) is False  # past the end has no index  # fmt: skip


# ---- question 15: why does it still give the right answer? ----


def test_the_report_says_which_order_gives_the_right_answer() -> None:
    text = find("flash_attention_2").text
    line = next(line for line in text.splitlines() if line.strip().startswith("__syncthreads();  // Sij holds"))
    report = check(text.replace(line, ""))
    assert {finding.kind for finding in report.findings} == {"race"}
    assert report.answers == {"forward": "right", "reverse": "wrong", "random": "wrong"}
    assert report.story == "Without the check: the answer is right in forward order; wrong in reverse and random order."
    assert report.story in str(report)
    unknown = check(kernel("__shared__ int s; s = t; __syncthreads(); y[i] = s;"))
    assert unknown.answers["forward"] == "first"
    assert unknown.answers["reverse"] == "different"


def test_orders_of_a_finding() -> None:
    body = "__shared__ float s[64]; if (t == 0) s[0] = 1;\nif (t == 1) s[0] = 2;\ny[i] = 0;"
    (race,) = faults(body).findings
    assert race.orders == ("forward", "reverse", "random")
    (race,) = faults(body, orders=("reverse",)).findings
    assert race.orders == ("reverse",)
    assert race.lines == (10, 9)
    with pytest.raises(ValueError, match="'up' is none of forward, reverse, random"):
        faults(body, orders=("up",))


# ---- what cannot run ----


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("nothing_here", "no kernel file nothing_here.cu"),
        ("__global__ void k() {}\n", "no line `// @kernel NAME`"),
        (kernel("y[i] = nothing;"), r"it does not compile\.\nkernel.cu, line 9: "),
        (kernel("y[i] = 0;", header=HEADER.replace("// @array y [128]\n", "")), r"no line says how large y is: `// @array y \[N, ...\]`"),
        (kernel("y[i] = 0;", header=HEADER.replace("[128]", "[N]")), "@array y: .*N has no value.*Give it in a @shape line"),
        (kernel("y[i] = 0;").replace("__global__", "template <int A> __global__"), "`// @instance A=...`"),
        (kernel("y[i] = 0;", header=HEADER + "// @require 1 == 2\n"), "no @instance goes with a @shape"),
        (kernel("y[i] = 0;").replace("float* y)", "float* y, int n)"), "the parameter n has no value: `// @shape n=...`"),
        (kernel("y[i] = 0;", header=HEADER.replace("@block 64", "@block 2000")), "2,000 threads"),
    ],
)  # fmt: skip
def test_a_problem_is_said_calmly(source: str, words: str) -> None:
    report = check(source)
    assert not report.ok
    assert report.findings == ()
    assert re.search(words, report.problem), report.problem
    assert "Traceback" not in str(report)
    assert str(report).startswith(f"{report.file} could not be checked: ")


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashviz.cuda.cpu_build.find_compiler", lambda: None)
    assert 'pip install "flashviz[cpu]"' in check("flash_attention_2").problem


def test_the_time_limit_of_the_whole_check() -> None:
    report = check(kernel("while (true) y[i] = x[0];"), seconds=100, limit=4)
    assert report.problem == "it was still running after 4 s."


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_worker_that_dies_is_a_finding() -> None:
    body = "y[i] = 0; if (t == 3) kill(getpid(), SIGKILL);"
    report = check(kernel(body, "#include <signal.h>\n#include <unistd.h>"), answers=False)
    assert [finding.kind for finding in report.findings] == ["crash"]
    assert "SIGKILL" in report.findings[0].sentence


def test_what_a_kernel_prints_does_no_harm() -> None:
    assert faults('printf("{\\"end\\": true}\\n"); y[i] = 0;').ok


# ---- cases ----


def test_cases_come_from_the_header() -> None:
    cases, total = make_cases(find("flash_attention_2").path)
    header = find("flash_attention_2").header
    assert total == len(header.instances) * len(header.shapes)
    assert len(cases) == 2 * len(header.shapes)
    assert cases[0] == Case("flash_attention_2", header.instances[0], header.shapes[0])
    every, same = make_cases(find("flash_attention_2").path, everything=True)
    assert len(every) == same == total
    mine, _ = make_cases(find("flash_attention_2").path, shapes=[{"B": 1, "Hq": 3, "Hkv": 2, "Nq": 1, "Nk": 1, "causal": 0}, {**header.shapes[0], "Nq": 7}])  # fmt: skip
    assert [case.shape["Nq"] for case in mine] == [7, 7]  # 3 heads do not group over 2


def test_defaults_that_follow_from_each_other(tmp_path: Path) -> None:
    path = tmp_path / "k.cu"
    path.write_text(
        "// @kernel k\n// @grid 1\n// @array y [M]\n// @default M = 2 * N\n// @default N = n + 1\n// @shape n=4\n// @require M == 10\n"
        "__global__ void k(float* y, int n, int N, int M) {}\n"
    )
    ((case,), _) = make_cases(path)
    assert make_plan(path, case).arguments["y"].shape == (10,)


def test_an_array_that_is_read_first(tmp_path: Path) -> None:
    header = HEADER + "// @inout y\n"
    assert check(kernel("y[i] *= 2;", header=header)).ok
    assert check(kernel("y[i] *= 2;")).findings[0].kind == "unwritten"


def test_one_kernel_of_several() -> None:
    assert len(check("online_softmax", "safe_softmax").cases) == 6
    assert "no line `// @kernel nothing`" in check("online_softmax", "nothing").problem


# ---- the limits: what the module's docstring says it cannot see ----


@pytest.mark.parametrize(
    ("what", "body"),
    [
        ("a size that no @shape has", "y[i] = 0; if (gridDim.x > 2) y[1000] = 0;"),
        ("local arrays", "volatile float acc[4]; acc[t % 4] = 0; acc[4 + t % 2] = x[t]; y[i] = acc[4];"),
        ("a row's end inside an array", "y[i] = x[(t / 8) * 8 + (t % 8 + 1) % 64 - (t == 63)];"),
        ("a wrong result", "y[i] = x[t] + 1; // meant: 2 * x"),
    ],
)  # fmt: skip
def test_what_it_does_not_see(what: str, body: str) -> None:
    assert faults(body).ok, what


def test_what_it_reports_all_the_same() -> None:
    """Equal values, shuffles as barriers, and partial masks: reported although a reader may mean it."""
    assert faults("__shared__ int s; s = 1; __syncthreads(); y[i] = s;").findings[0].kind == "race"
    shuffled = "__shared__ float s[64]; s[t] = x[t]; __shfl_sync(~0u, x[t], 0); y[i] = s[t ^ 1];"
    assert faults(shuffled).findings[0].kind == "race"
    partial = (
        "__shared__ float s[64]; if (t % 32 < 16) { s[t] = x[t]; __syncwarp(0xffff); y[i] = s[t ^ 1]; } else y[i] = 0;"
    )
    assert faults(partial).findings[0].kind == "race"
    spinning = "if (blockIdx.x == 0) { while (atomicAdd(y + 64, 0.f) < 1e9f); }\ny[i] = 1;"
    assert (
        check(kernel(spinning, header=HEADER + "// @inout y\n"), answers=False, seconds=1).findings[0].kind == "endless"
    )


def test_the_limits_are_written_down() -> None:
    text = kernels.__doc__ or ""
    for words in (
        "local arrays are not looked at",
        "no @shape has",
        "the same value",
        "partial masks",
        "wrong result",
        "spinning",
        "Windows",
    ):
        assert words in text


# ---- text, HTML and the command ----


class Tags(HTMLParser):
    """Which tags a text holds."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_the_html_marks_the_lines_and_escapes_everything() -> None:
    evil = '</pre><script>alert("x")</script><img src=x onerror=alert(1)>'
    source = kernel(
        f"__shared__ float s[64]; s[t] = 1; /* {evil} */\ny[i] = s[63 - t]; assert(\"<b onclick=1>\"[0] != 'q');"
    )
    shown = check(source)._repr_html_()
    parser = Tags()
    parser.feed(shown)
    assert parser.tags == {"div", "p", "b", "br", "small", "pre", "span", "mark"} - ({"span"} - parser.tags)
    assert parser.attributes <= {"class", "style"}
    assert html.escape(evil) in shown
    marked = re.findall(r"<mark[^>]*> *(\d+) ", shown)
    assert marked == ["9", "10"]
    named = check(kernel("y[i] = 0;").replace("@kernel k", "@kernel <script>"))._repr_html_()
    assert "<script" not in named


def test_the_problem_is_marked_too() -> None:
    assert re.findall(r"<mark[^>]*> *(\d+) ", check(kernel("int a;\ny[i] = a b;"))._repr_html_()) == ["10"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clean, faulty = tmp_path / "clean.cu", tmp_path / "faulty.cu"
    clean.write_text(kernel("y[i] = x[t];"))
    faulty.write_text(kernel("y[i] = x[t + 1];"))
    assert cli.main(["check", str(clean)]) == 0
    assert "clean.cu: nothing to report" in capsys.readouterr().out
    assert cli.main(["check", str(faulty)]) == 1
    printed = capsys.readouterr().out
    assert "out of bounds (x), line 9" in printed
    assert str(tmp_path) not in printed
    assert cli.main(["check", str(tmp_path / "absent.cu")]) == 2
    assert "no kernel file absent.cu" in capsys.readouterr().out
    assert cli.main(["check", "online_softmax", "--function", "safe_softmax", "--shape", "R=1 N=5"]) == 0
    assert "2 of 4 pairs" in capsys.readouterr().out
    assert cli.main(["check", str(clean), "--shape", "N"]) == 2


def test_the_command_as_a_process(tmp_path: Path) -> None:
    (tmp_path / "mine.cu").write_text(kernel("y[t] = x[t];"))
    done = subprocess.run(
        [sys.executable, "-m", "flashviz", "check", "mine.cu"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "race between blocks (y), line 9" in done.stdout
    assert done.stderr == ""


def test_a_file_is_checked_with_the_headers_beside_it(tmp_path: Path) -> None:
    (tmp_path / "mine.cuh").write_text("__device__ float of(const float* x, int n) { return x[n + 1]; }\n")
    path = tmp_path / "mine.cu"
    path.write_text(kernel("y[i] = of(x, t);", '#include "mine.cuh"'))
    (finding,) = check(path).findings
    assert finding.sentence.startswith(
        "x[64]: thread 63 reads past its end, x[63], at line 1 of mine.cuh (called at line 9)"
    )
    assert finding.lines == (9,)


def test_public_names() -> None:
    assert fv.check is check
    json.dumps([finding.lines for finding in fv.check(kernel("y[i] = x[t];")).findings])
