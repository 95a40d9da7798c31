"""Launches that are timed: from outputs full of NaN, in a queue where the host is slow, and errors that say what is wrong."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from flashviz import cuda
from flashviz.cuda import cpu, gpu
from flashviz.cuda.gpu import KernelError
from flashviz.cuda.timing import Timed, first_error, milliseconds, place, poison


def a_plan() -> cuda.Plan:
    Q, L = np.ones((1, 2, 8, 8), "f4"), np.ones((1, 2, 8), "f4")
    kernel = cuda.Kernel("flash_attention_2", {"Br": 4, "Bc": 4, "D": 8})
    return cuda.plan(kernel, (Q, Q.copy(), Q.copy(), Q.copy(), L, 8, 8, 0.5, 0, 2, 2))


def test_every_timed_run_on_a_gpu_starts_from_nan(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake()
    seen = []
    plan = a_plan()

    def launcher(planned: cuda.Plan) -> Any:
        def launch() -> None:
            seen.append([bool(np.isnan(planned.arguments[name]).all()) for name in ("O", "L", "Q")])
            planned.arguments["O"][...] = 1

        return launch

    monkeypatch.setattr(gpu, "launcher", launcher)
    timed = Timed(plan, "gpu")
    assert timed.run() == 1.5
    assert timed.run() == 1.5
    assert seen == [[True, True, False]] * 2
    timed.launch()
    assert seen[-1] == [False, True, False]  # to launch alone changes nothing first
    assert timed.outputs["O"] is plan.arguments["O"]


def test_a_queue_is_held_until_all_launches_are_in_it(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake()
    order: list[str] = []
    cupy = sys.modules["cupy"]
    monkeypatch.setattr(cupy, "RawKernel", lambda code, name: lambda *launch: order.append(name), raising=False)
    assert milliseconds([lambda: order.append("a"), lambda: order.append("b")], queued=True) == 1.5
    assert order == ["hold", "a", "b"]
    milliseconds([lambda: order.append("c")])
    assert order == ["hold", "a", "b", "c"]

    def fails() -> None:
        raise RuntimeError("\ncudaErrorIllegalAddress: an illegal memory access was encountered\n")

    with pytest.raises(KernelError, match="failed on the GPU: cudaErrorIllegalAddress: an illegal memory access"):
        milliseconds([fails])


def test_what_does_not_compile_is_a_kernel_error(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake()

    def refuse(plan: cuda.Plan) -> Any:
        raise ValueError('#line 1\nk.cu(12): error: static assertion failed with "Br is a multiple of 16"\n  detail\n')

    monkeypatch.setattr(gpu, "launcher", refuse)
    with pytest.raises(KernelError, match=r"^does not compile: k.cu\(12\): Br is a multiple of 16$"):
        Timed(a_plan(), "gpu")


def test_without_a_gpu_there_is_none_to_time_on(fake: Any) -> None:
    fake(count=0)
    with pytest.raises(gpu.GpuUnavailableError, match="There is no GPU here"):
        Timed(a_plan(), "gpu")


@pytest.mark.skipif(not cpu.status().usable, reason="no C++ compiler is here")
def test_on_the_processor_it_is_the_kernel_that_runs() -> None:
    plan = a_plan()
    plan.arguments["O"][...] = 7
    timed = Timed(plan, "cpu")
    assert timed.run() > 0
    np.testing.assert_allclose(plan.arguments["O"], 1, rtol=1e-6)  # V is 1 everywhere
    np.testing.assert_allclose(plan.arguments["L"], 4 + np.log(8), rtol=1e-6)


def test_arrays_are_placed_and_poisoned(fake: Any) -> None:
    fake()
    x = np.arange(6.0).reshape(2, 3).T
    for device in ("cpu", "gpu"):
        placed = place({"x": x, "n": 3, "s": np.float32(0.5)}, device)
        assert placed["x"].flags.c_contiguous
        assert (placed["x"] == x).all()
        assert (placed["n"], placed["s"]) == (3, np.float32(0.5))
    for dtype in ("f2", "f4", "f8"):
        poison(array := np.ones(3, dtype))
        assert np.isnan(array).all()
    poison(bits := np.ones(3, "u2"))
    assert bits.tolist() == [0xFFFF] * 3  # NaN, as the bits of a bfloat16


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("one line", "one line"),
        ("#error directive of a macro\nnote: so\nk.cu(3): error: expected a ;\nmore", "k.cu(3): error: expected a ;"),
        ('a.cu(9): error: static assertion failed with "too wide"', "a.cu(9): too wide"),
    ],
)
def test_the_line_that_says_what_is_wrong(text: str, line: str) -> None:
    assert first_error(text) == line
