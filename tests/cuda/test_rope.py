"""The kernels of chapter 7: what their files say, what a launch gives them, and barriers that are needed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import fake_cupy
import numpy as np
import pytest

import flashviz as fv
from flashviz import cuda
from flashviz.cuda import cpu, find
from flashviz.cuda.sources import blank_comments

KERNELS = ("rope_rows", "rope_pairs_rows")
FILES = ("rope", "flash_attention_2_rope")


def test_actions_have_the_programs_words_in_their_order() -> None:
    for kernel in KERNELS:
        assert tuple(find("rope", kernel).actions) == fv.Rope.action_names()
    assert tuple(find("flash_attention_2_rope").actions) == fv.FlashAttention2Rope.action_names()


@pytest.mark.parametrize(("file", "count"), [("rope", 3), ("flash_attention_2_rope", 5)])
def test_each_barrier_says_what_it_protects(file: str, count: int) -> None:
    lines = [line for line in find(file).text.splitlines() if "__syncthreads()" in line]
    assert len(lines) == count
    assert all(len(line.partition("//")[2].split()) > 5 for line in lines)


def test_header() -> None:
    source = find("rope")
    assert source.kernels == KERNELS
    for kernel in KERNELS:
        header = find("rope", kernel).header
        assert header.grid == ("ceil(N / R)", "H", "B")
        assert header.paper.startswith("arXiv 2104.09864")
        assert set(header.arrays) == {"x", "cos", "sin", "O"}
        assert (len(header.instances), len(header.shapes)) == (7, 3)


@pytest.mark.parametrize("file", FILES)
def test_every_carve_is_read(file: str) -> None:
    sources = [find(file, kernel) for kernel in find(file).kernels]
    assert sum(len(s.parts) for s in sources) == blank_comments(sources[0].text).count("carve.")


def test_the_library_has_no_barrier_and_no_trace() -> None:
    """A kernel that calls it decides when its tiles are complete, and what the action is called."""
    path = find("rope").path.parent / "include" / "rope.cuh"
    code = blank_comments(path.read_text(encoding="utf-8"))
    assert "__syncthreads" not in code
    assert "TRACE" not in code


@pytest.mark.parametrize("form", ["halves", "pairs"])
def test_what_a_launch_is_given(fake: Any, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    machine = fake()
    x = np.arange(2 * 3 * 33 * 10, dtype="float32").reshape(2, 3, 33, 10)
    kernel = KERNELS[form == "pairs"]

    def launched(x: Any, cos: Any, sin: Any, O: Any, N: Any, H: Any) -> None:
        assert cos.shape == sin.shape == (33, 4)
        assert np.isnan(O).all()
        assert (N, H) == (33, 3)
        assert (N.dtype, H.dtype) == (np.int32, np.int32)
        O[...] = 2 * x

    monkeypatch.setitem(fake_cupy.KERNELS, kernel, launched)
    run = {"halves": fv.rope, "pairs": fv.rope_pairs}[form]
    made = run(x, rotary_dim=8, tile=16, device="gpu", record=False)
    (launch,) = machine.launches
    assert launch["function"] == f"{kernel}<16, 10, 4>"
    assert (launch["grid"], launch["block"]) == ((3, 3, 2), (128, 1, 1))
    assert launch["shared_mem"] == 4 * (16 * 10 + 2 * 16 * 4)
    assert made.device == "gpu"
    assert np.array_equal(made.O, 2 * x)


def test_the_fused_launch_is_given_both_tables(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = fake()
    Q, (K, V) = np.ones((5, 8), "float32"), np.ones((2, 9, 8), "float32")

    def launched(Q: Any, K: Any, V: Any, cq: Any, sq: Any, ck: Any, sk: Any, O: Any, L: Any, *numbers: Any) -> None:
        assert np.array_equal(ck[4:], cq), "the queries stand at the last five positions"
        assert np.array_equal(sk[4:], sq)
        assert numbers[:2] == (5, 9)
        O[...], L[...] = 7, 8

    monkeypatch.setitem(fake_cupy.KERNELS, "flash_attention_2_rope", launched)
    made = fv.flash_attention_2_rope(Q, K, V, Br=4, Bc=4, device="gpu", record=False)
    assert machine.launches[0]["function"] == "flash_attention_2_rope<4, 4, 8, 4>"
    assert (made.O == 7).all()
    assert (made.L == 8).all()


def test_wrong_tables_are_refused() -> None:
    x, table = np.zeros((1, 1, 4, 8), "float32"), np.zeros((4, 4), "float32")
    kernel = cuda.Kernel("rope", {"R": 4, "D": 8, "Pairs": 4})
    with pytest.raises(cuda.ArgumentError, match=r"cos is \[N, Pairs\]; got shape \(4, 3\)"):
        cuda.plan(kernel, (x, table[:, :3], table, x.copy(), 4, 1))
    wide = np.zeros((4, 5), "float32")
    with pytest.raises(cuda.ArgumentError, match=r"requires 2 \* Pairs <= D"):
        cuda.plan(cuda.Kernel("rope", {"R": 4, "D": 8, "Pairs": 5}), (x, wide, wide, x.copy(), 4, 1))


@pytest.mark.parametrize("file", FILES)
def test_the_check_finds_nothing(file: str) -> None:
    if not cpu.status().usable:
        pytest.skip(cpu.status().reason)
    report = fv.check(file)
    assert report.ok, str(report)


@pytest.mark.parametrize("barrier", range(3))
def test_every_barrier_is_needed_and_its_absence_is_found(barrier: int, tmp_path: Path) -> None:
    if not cpu.status().usable:
        pytest.skip(cpu.status().reason)
    text = find("rope").text
    at = [m.start() for m in re.finditer(re.escape("__syncthreads();"), text)][barrier]
    path = tmp_path / "rope.cu"
    path.write_text(text[:at] + text[at + 16 :])
    report = fv.check(path)
    assert {f.kind for f in report.findings} >= {"race"}
    assert {f.array for f in report.findings if f.kind == "race"} <= {"xi", "ci", "si"}


def test_a_kernel_that_turns_the_wrong_pairs_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trace names the right actions, so the replayed output is not the kernel's."""
    if not cpu.status().usable:
        pytest.skip(cpu.status().reason)
    from flashviz.programs import rope

    header = (find("rope").path.parent / "include" / "rope.cuh").read_text(encoding="utf-8")
    wrong = header.replace("b = b * cos + a * sin;\n    a = turned;", "a = turned;\n    b = b * cos + a * sin;")
    assert wrong != header, "a is overwritten before it was read"
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "rope.cuh").write_text(wrong)
    path = tmp_path / "rope.cu"
    path.write_text(find("rope").text)
    monkeypatch.setattr(rope, "FILE", str(path))
    with pytest.raises(Exception, match=r"O\[0, 0, 1, 4\] is .* from the kernel"):
        fv.rope(np.ones((2, 8)), device="cpu")
