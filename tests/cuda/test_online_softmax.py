"""kernels/online_softmax.cu: what it declares, what a launch is given, and its numbers on the processor."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashviz as fv
from flashviz import cuda
from flashviz.cuda import cpu, find
from flashviz.cuda.sources import blank_comments

FORMS = ("safe", "online", "fused")
TEXT = find("online_softmax").text


def body(function: str) -> str:
    """A kernel's own lines."""
    code = blank_comments(TEXT)
    start = re.search(rf"__global__ void {function}\(", code)
    assert start is not None
    return code[start.end() :].partition("\n}")[0]


def test_actions_have_the_programs_words_in_their_order() -> None:
    for form in FORMS:
        assert tuple(find("online_softmax", f"{form}_softmax").actions) == fv.OnlineSoftmax.action_names()


@pytest.mark.parametrize("form", FORMS)
def test_each_kernel_calls_the_actions_that_the_program_performs(form: str) -> None:
    names = "|".join(fv.OnlineSoftmax.action_names())
    called = re.findall(rf"^ *({names})(?:<|\()", body(f"{form}_softmax"), re.M)
    V = np.ones((2, 1)) if form == "fused" else None
    recording = fv.online_softmax([0.0, 1.0], V, tile=2, form=form, device="numpy").recording
    assert recording is not None
    assert called == [action for step in recording.steps for action in step.actions]


def test_each_barrier_says_what_it_protects() -> None:
    lines = [line for line in TEXT.splitlines() if "__syncthreads()" in line]
    assert len(lines) == 4
    assert all(len(line.partition("//")[2].split()) > 5 for line in lines)


def test_header() -> None:
    source = find("online_softmax")
    assert source.kernels == ("safe_softmax", "online_softmax", "fused_softmax")
    for form in FORMS:
        header = find("online_softmax", f"{form}_softmax").header
        assert header.grid == ("R",)
        assert header.arch == 75
        assert header.paper.startswith("arXiv 1805.02867, Algorithm")
        assert set(header.arrays) == ({"x", "V", "o"} if form == "fused" else {"x", "y"})
        assert len(header.instances) == 4
        assert len(header.shapes) == 3


def test_every_carve_is_read() -> None:
    sources = [find("online_softmax", f"{form}_softmax") for form in FORMS]
    assert sum(len(s.parts) for s in sources) == blank_comments(TEXT).count("carve.")
    assert sources[0].shared_bytes({"Tile": 4}) == 4 * (3 * 4 + 2)
    assert sources[2].shared_bytes({"Tile": 64, "D": 64}) == 4 * (3 * 64 + 64 * 64 + 4 + 64)


@pytest.mark.parametrize("form", FORMS)
def test_what_a_launch_is_given(fake: Any, form: str) -> None:
    machine = fake()
    x, V = np.ones((3, 40), "float32"), np.ones((40, 8), "float32")
    fused = form == "fused"
    made = fv.online_softmax(x, V if fused else None, form=form, tile=16, device="gpu", record=False)
    (launch,) = machine.launches
    assert launch["function"] == ("fused_softmax<16, 8>" if fused else f"{form}_softmax<16>")
    assert (launch["grid"], launch["block"]) == ((3, 1, 1), (32, 1, 1))
    assert launch["shared_mem"] == find("online_softmax", f"{form}_softmax").shared_bytes(
        {"Tile": 16, "D": 8} if fused else {"Tile": 16}
    )
    assert launch["args"][-1].dtype == np.int32
    out = made.o if fused else made.y
    assert out.shape == ((3, 8) if fused else (3, 40))
    assert np.isnan(out).all(), "the fake computes nothing: what is not written is seen"
    assert made.device == "gpu"


@pytest.mark.parametrize("form", FORMS)
def test_what_the_kernel_names_is_what_the_program_does(form: str) -> None:
    if not cpu.status().usable:
        pytest.skip(cpu.status().reason)
    rng = np.random.default_rng(3)
    x, V = rng.standard_normal((2, 10)), rng.standard_normal((10, 3)) if form == "fused" else None
    traced = fv.online_softmax(x, V, form=form, device="cpu").recording
    performed = fv.online_softmax(x, V, form=form, device="numpy").recording
    assert (traced.source, performed.source) == ("kernel", "program")
    assert [(s.label, s.caption, s.actions) for s in traced.steps] == [
        (s.label, s.caption, s.actions) for s in performed.steps
    ]


def test_a_tile_that_does_not_fit_names_one_that_does() -> None:
    x, V, o = np.zeros((1, 1024), "float32"), np.zeros((1024, 128), "float32"), np.zeros((1, 128), "float32")
    kernel = cuda.Kernel("online_softmax", {"Tile": 1024, "D": 128}, function="fused_softmax")
    with pytest.raises(cuda.LaunchError, match=r"needs 537,104 bytes of shared memory a block.*Tile=256 fits"):
        cuda.plan(kernel, (x, V, o, 1024))


def softmax(x: Any) -> Any:
    s = x.astype(float)
    m = s.max(-1, keepdims=True)
    e = np.exp(s - np.where(np.isneginf(m), 0, m))
    total = e.sum(-1, keepdims=True)
    return e / np.where(total == 0, 1, total)


CASES = [(1, 12, 4), (3, 33, 33), (2, 1, 4), (5, 100, 33), (2, 257, 256), (3, 7, 1), (4, 64, 64)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernels_on_the_processor(case: tuple[int, int, int]) -> None:
    if not cpu.status().usable:
        pytest.skip(cpu.status().reason)
    R, N, tile = case
    rng = np.random.default_rng(N)
    x = (rng.standard_normal((R, N)) * 5).astype("float32")
    x[0, : N // 2] = -np.inf
    x[1:2] = -np.inf if N > 1 else 1
    x[2:3] *= 1000
    V = rng.standard_normal((N, 5), dtype="float32")
    options: dict[str, Any] = {"tile": tile, "device": "cpu", "record": False}
    for form in ("safe", "online"):
        got = fv.online_softmax(x, form=form, **options)
        assert got.device == "cpu"
        assert np.abs(got.y - softmax(x)).max() < 1e-6
        assert np.abs(got.y - fv.online_softmax(x, form=form, tile=tile, device="numpy", record=False).y).max() < 1e-6
    o = fv.online_softmax(x, V, **options).o
    assert np.abs(o - softmax(x) @ V).max() < 2e-6
    if N == 1:
        assert np.array_equal(o, np.broadcast_to(V[0], o.shape))


@pytest.mark.parametrize("barrier", [None, *range(4)])
def test_every_barrier_is_needed_and_its_absence_is_found(barrier: int | None, tmp_path: Path) -> None:
    if not cpu.status().usable:
        pytest.skip(cpu.status().reason)
    at = [m.start() for m in re.finditer(re.escape("__syncthreads();"), TEXT)]
    text = TEXT if barrier is None else TEXT[: at[barrier]] + TEXT[at[barrier] + 16 :]
    path = tmp_path / "online_softmax.cu"
    path.write_text(text)
    x, V = (np.random.default_rng(1).standard_normal(s, dtype="float32") for s in ((1, 12), (12, 5)))
    found = []
    for form in FORMS:
        template = {"Tile": 4, "D": 5} if form == "fused" else {"Tile": 4}
        out = np.empty((1, 5 if form == "fused" else 12), "float32")
        args = (x, V, out, 12) if form == "fused" else (x, out, 12)
        plan = cuda.plan(cuda.Kernel(path, template, function=f"{form}_softmax", block=32), args)
        outcome, _ = cpu.launch_once(cpu.compile_plan(plan, check=True), plan, check=True, poison=True)
        found.append(bool(outcome.fault))
    assert found == ([False] * 3 if barrier is None else [barrier < 3, barrier < 3, True])
