from pathlib import Path

import pytest

from flashviz.cuda import sources
from flashviz.cuda.sources import SourceError, find, parse
from flashviz.programs.device import kernel_source

NAMES = ["load_q", "load_k", "load_v", "scores", "softmax", "accumulate", "store_o"]
MINIMAL = """// @kernel f
// @grid N
#include "include/trace.cuh"
template <int D>
__global__ void f(float* x, int N) {
    TRACE(load, 0);
    x[0] = 1; // TRACE(comment, 0);
    for (int j = 0; j < N; ++j) {
        TRACE(work, j);
        if (j) {
            x[j] = 2;
        }
        __syncthreads();

    }

    TRACE(store, 0);
    x[N] = 3;
}
"""


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "trace.cuh").write_text("#pragma once\n#define TRACE(action, tile) ((void)0)\n")
    (tmp_path / "f.cu").write_text(MINIMAL)
    return tmp_path / "f.cu"


def test_actions_have_the_programs_words_in_their_order() -> None:
    source = find("flash_attention_2")
    assert list(source.actions) == NAMES
    assert source.trace_ids == {name: n for n, name in enumerate(NAMES)}


def test_actions_lines_start_at_trace_and_do_not_overlap() -> None:
    source = find("flash_attention_2.cu")
    lines = source.text.splitlines()
    end = 0
    for name, (first, last) in source.actions.items():
        assert lines[first - 1].strip().startswith(f"TRACE({name}, ")
        assert end < first < last
        text = source.lines(name)
        assert text.count("{") == text.count("}"), name
        assert text.count("TRACE(") == 1
        assert lines[last - 1].strip()
        end = last


def test_each_barrier_says_what_it_protects() -> None:
    lines = [line for line in find("flash_attention_2").text.splitlines() if "__syncthreads()" in line]
    assert len(lines) == 5
    assert all(len(line.partition("//")[2].split()) > 5 for line in lines)


def test_action_lines_leave_out_loops_braces_blanks_and_comments(minimal: Path) -> None:
    assert find(minimal).actions == {"load": (6, 7), "work": (9, 13), "store": (17, 18)}


def test_assembled_holds_headers_once_with_line_directives_and_no_path(minimal: Path) -> None:
    source = find("flash_attention_2")
    assert '#include "' not in source.assembled
    assert source.assembled.count("struct SharedCarver {") == 1
    for name in ("flash_attention_2.cu", "numbers.cuh", "shared.cuh", "trace.cuh"):
        assert f'#line 1 "{name}"' in source.assembled
    assert str(source.path.parent) not in source.assembled
    first = next(n for n, line in enumerate(source.text.splitlines(), 1) if line.startswith("#include"))
    assert f'#line {first + 1} "flash_attention_2.cu"' in source.assembled
    for n, name in enumerate(NAMES):
        assert f"#define TRACE_ID_{name} {n}\n" in source.assembled


def test_a_changed_header_is_a_changed_source(minimal: Path) -> None:
    before = find(minimal).assembled
    header = minimal.parent / "include" / "trace.cuh"
    header.write_text(header.read_text() + "#define OTHER 1\n")
    assert find(minimal).assembled != before


def test_the_same_file_elsewhere_is_the_same_source(tmp_path: Path) -> None:
    source = find("flash_attention_2")
    (tmp_path / "flash_attention_2.cu").write_text(source.text)
    assert find(tmp_path / "flash_attention_2.cu").assembled == source.assembled


def test_an_edited_copy_of_a_header_finds_its_siblings(tmp_path: Path) -> None:
    source = find("attention_library")
    (tmp_path / "include").mkdir()
    header = (source.path.parent / "include" / "attention.cuh").read_text()
    (tmp_path / "include" / "attention.cuh").write_text(header)
    (tmp_path / "attention_library.cu").write_text(source.text)
    assert find(tmp_path / "attention_library.cu").assembled == source.assembled


def test_an_include_that_is_commented_out_stays_out(minimal: Path) -> None:
    text = MINIMAL.replace("#include", '// #include "nowhere.cuh"\n/* #include "nowhere.cuh" */\n#include')
    assert "nowhere.cuh" in parse(text, minimal).assembled


def test_a_missing_include_names_file_and_line(minimal: Path) -> None:
    with pytest.raises(SourceError, match=r'f.cu, line 3: #include "gone.cuh"'):
        parse(MINIMAL.replace("include/trace.cuh", "gone.cuh"), minimal)


def test_the_wheels_folder_is_looked_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_PACKAGE", tmp_path / "flashviz")
    for folder, word in (("flashviz/_kernels", "wheel"), ("kernels", "tree")):
        (tmp_path / folder).mkdir(parents=True)
        text = f"// @kernel g\n// @paper {word}\n__global__ void g(float* x) {{}}\n"
        (tmp_path / folder / "g.cu").write_text(text)
    assert find("g").header.paper == "wheel"
    (tmp_path / "flashviz/_kernels/g.cu").unlink()
    assert find("g").header.paper == "tree"


def test_an_unknown_kernel_names_those_there_are() -> None:
    with pytest.raises(SourceError, match=r"no kernel file flash_attention_9.cu; there are .*flash_attention_2"):
        find("flash_attention_9")


def test_header() -> None:
    header = find("flash_attention_2").header
    assert header.kernel == "flash_attention_2"
    assert header.grid == ("ceil(Nq / Br)", "Hq", "B")
    assert header.blocks == ("Br", "Bc")
    assert header.arch == 75
    assert header.arrays["K"] == ("B", "Hkv", "Nk", "D")
    assert header.defaults == {"scale": "1 / sqrt(D)", "kv_len": "Nk", "window": "0"}
    assert {"Br": 64, "Bc": 64, "D": 128} in header.instances
    assert all({"B", "Hq", "Hkv", "Nq", "Nk", "causal"} == set(s) - {"kv_len", "window"} for s in header.shapes)
    assert any(s["Nq"] > s["Nk"] and s["causal"] for s in header.shapes), "a row block that sees no key"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("// @grdi N", "line 1: @grdi is none of"),
        ("// @kernel f", "line 2: @kernel f stands twice"),
        ("// @kernel f\n// @arch 75\n// @arch 80", "line 3: @arch stands twice"),
        ("// @instance D=x", "D=x is neither a whole number nor a type .float, double"),
        ("// @instance D", "expected NAME=NUMBER"),
        ("// @shape N=half", "expected NAME=NUMBER"),
        ("// @array x", "expected a name and its dimensions"),
    ],
)
def test_a_header_that_is_not_understood(minimal: Path, line: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        parse(f"{line}\n{MINIMAL}", minimal)


def test_a_file_without_header(minimal: Path) -> None:
    with pytest.raises(SourceError, match=r"f.cu: no line `// @kernel NAME`"):
        parse(MINIMAL.replace("@kernel", "kernel"), minimal)
    with pytest.raises(SourceError, match="no `__global__ void g"):
        parse(MINIMAL.replace("@kernel f", "@kernel g"), minimal)


SEVERAL = """// @arch 80
// @array x [N]
// @kernel first
// @grid N
// @instance D=8
// @kernel second
// @grid 1
// @arch 90
// @array y [M]
#include "include/shared.cuh"
#include "include/trace.cuh"
__device__ void helper() { SharedCarver carve; const auto both = carve.vector<3>("both"); }
template <int D>
__global__ void first(float* x, int N) {
    SharedCarver carve;
    const auto a = carve.vector<D>("a");
    TRACE(load, 0);
    for (int j = 0; j < N; ++j) { x[j] = 1; }
    TRACE(store, 0);
    x[N] = 3;
}

__global__ void declared(float* x);

// @shape M=3
__global__ __launch_bounds__(256) void second(const float* y, int M) {
    SharedCarver carve;
    const auto b = carve.tile<2, 4>("b");
    TRACE(combine, 0);
    if (M) { b[0][0] = y[0]; }
    TRACE(store, 0);
    __syncthreads();
}
"""


def test_several_kernels_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "several.cu"
    path.write_text(SEVERAL)
    first, second = find(path), find(path, "second")
    assert find(path, "first") == first
    assert first.kernels == second.kernels == ("first", "second")
    assert (first.name, second.name) == (first.signature.function, second.signature.function) == ("first", "second")
    assert first.signature.template == ("D",)
    assert [str(p) for p in second.signature.parameters] == ["const float* y", "int M"]
    assert (first.header.grid, second.header.grid) == (("N",), ("1",))
    assert (first.header.arch, second.header.arch) == (80, 90), "its own line before the common one"
    assert (first.header.arrays, second.header.arrays) == ({"x": ("N",)}, {"y": ("M",)})
    assert (first.header.instances, second.header.instances) == (({"D": 8},), ())
    assert second.header.shapes == ({"M": 3},), "also a line right above the function"
    assert (first.parts, second.parts) == ({"both": ("3",), "a": ("D",)}, {"both": ("3",), "b": ("2", "4")})
    assert first.actions == {"load": (17, 18), "store": (19, 20)}
    assert second.actions == {"combine": (29, 30), "store": (31, 32)}
    assert first.trace_ids == second.trace_ids == {"load": 0, "store": 1, "combine": 2}
    assert first.assembled == second.assembled


def test_a_kernel_that_the_file_does_not_describe(tmp_path: Path) -> None:
    path = tmp_path / "several.cu"
    path.write_text(SEVERAL)
    with pytest.raises(SourceError, match=r"several.cu: no line `// @kernel third`; it describes first, second"):
        find(path, "third")


def test_a_recording_carries_the_actions_of_the_kernels_it_ran(tmp_path: Path) -> None:
    path = tmp_path / "several.cu"
    path.write_text(SEVERAL)
    assert kernel_source(str(path)).lines == (("load", 17, 18), ("store", 19, 20), ("combine", 29, 30))
    assert kernel_source(str(path), "second").lines == (("combine", 29, 30), ("store", 31, 32))


@pytest.mark.parametrize(
    ("Br", "Bc", "D", "size"), [(64, 64, 128, 147_968), (32, 32, 128, 69_888), (64, 64, 64, 82_432), (4, 4, 8, 608)]
)
def test_shared_bytes_are_those_of_the_slots(Br: int, Bc: int, D: int, size: int) -> None:
    source = find("flash_attention_2")
    parts = source.shared_parts({"Br": Br, "Bc": Bc, "D": D})
    floats = {"Qi": Br * D, "Kj": Bc * D, "Vj": Bc * D, "Oi": Br * D, "Sij": Br * Bc, "mi": Br, "li": Br}
    assert parts == {name: 4 * n for name, n in floats.items()}
    assert source.shared_bytes({"Br": Br, "Bc": Bc, "D": D}) == size


def test_every_carve_is_read() -> None:
    source = find("flash_attention_2")
    assert sources.blank_comments(source.text).count("carve.") == len(source.parts)
