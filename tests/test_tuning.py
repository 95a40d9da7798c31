"""The autotuner: only right results have a time, what cannot run is skipped with its reason, and a result is kept for what it depends on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashviz as fv
from flashviz import tuning
from flashviz.cuda import cpu, gpu, kept
from flashviz.cuda.gpu import GpuStatus, KernelError
from flashviz.measurements import Measured
from flashviz.programs.device import DeviceError
from flashviz.tuning import AutotuneError, Candidate, Tuned, _key, autotune
from flashviz.view.tuning import autotune_plot

needs_compiler = pytest.mark.skipif(not cpu.status().usable, reason="no C++ compiler is here")

# Case A18: one candidate writes the rows [0, N / 2), one the rest, one all of them; and one asks for 300 KB of shared memory.
HALVES = """// @kernel halves
// @grid   1
// @block  32
// @array  x [N]
// @array  y [N]
#include "include/shared.cuh"

template <int First, int End, int Floats>
__global__ void halves(const float* x, float* y, int N) {
    SharedCarver carve;
    const auto room = carve.vector<Floats>("room");
    room[0] = 2.f;
    for (int n = N * First / 2 + threadIdx.x; n < N * End / 2; n += blockDim.x) y[n] = 2.f * x[n];
}
"""
A, B, C, WHOLE = (
    {"First": 0, "End": 1, "Floats": 1},
    {"First": 1, "End": 2, "Floats": 1},
    {"First": 0, "End": 2, "Floats": 76_800},
    {"First": 0, "End": 2, "Floats": 4},
)
ATTENTION = {"Nq": 11, "Nk": 11, "causal": 1, "Hq": 2, "Hkv": 2}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own for results; compiled kernels stay where they are. And no time of this machine decides anything."""
    monkeypatch.setattr(tuning, "SLOWER", 1e9)
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr(kept, "cache_folder", lambda part: folder)
    return folder


@pytest.fixture
def halves(tmp_path: Path) -> Path:
    path = tmp_path / "halves.cu"
    path.write_text(HALVES)
    return path


def doubled(x: np.ndarray) -> Callable[[Mapping[str, Any]], str]:
    def check(outputs: Mapping[str, Any]) -> str:
        wrong = int((outputs["y"] != 2 * x).sum())  # NaN differs from everything
        return f"{wrong} of {x.size} are wrong" if wrong else ""

    return check


def tune(path: Path, candidates: Any, N: int = 100, **options: Any) -> Tuned:
    x = np.arange(N, dtype="f4")
    args = {"x": x, "y": 2 * x, "N": N}  # one output for all, and right before anything runs
    options = {"check": doubled(x), "device": "cpu", "progress": False, "repeat": 3, **options}
    return autotune(path, args, candidates, **options)


@needs_compiler
def test_halves_are_rejected_and_what_does_not_fit_is_skipped(halves: Path) -> None:
    found = tune(halves, [A, B, C, WHOLE])
    assert found.best == WHOLE
    best, *others = found.candidates
    assert (best.runs, best.reason, best.milliseconds is not None) == (3, "", True)
    assert [(one.values, one.skipped) for one in others] == [(A, False), (B, False), (C, True)]
    assert [one.reason for one in others[:2]] == ["50 of 100 are wrong"] * 2
    assert "needs 307,200 bytes of shared memory a block; an H100 allows 232,448" in others[2].reason
    assert all(one.milliseconds is None for one in others)
    said = str(found).splitlines()
    assert said[0].startswith("halves, N=100, on this machine's processor (no GPU), 20")
    assert said[1].endswith(" ms")
    assert [line.split("  ")[-1].partition(":")[0].strip() for line in said[2:]] == ["rejected", "rejected", "skipped"]
    with pytest.raises(AutotuneError, match=r"No candidate runs and is right. halves.*\n.*\n.*\n.*300|307,200"):
        tune(halves, [A, B, C])


@needs_compiler
def test_a_choice_is_kept_for_its_shape_source_and_candidates(halves: Path, cache: Path) -> None:
    first = tune(halves, [A, WHOLE])
    assert not first.cached
    again = tune(halves, [A, WHOLE])
    assert again.cached
    assert replace(again, cached=False) == first
    assert not tune(halves, [A, WHOLE], refresh=True).cached
    assert not tune(halves, [A, WHOLE], N=102).cached
    assert not tune(halves, [B, WHOLE]).cached
    halves.write_text(HALVES.replace("2.f * x[n]", "x[n] + x[n]"))
    assert not tune(halves, [A, WHOLE]).cached
    files = list(cache.iterdir())
    assert sorted({file.suffix for file in files}) == [".json"]  # nothing half written is left
    for file in files:
        file.write_text('{"key": 1, "result"')
    assert not tune(halves, [A, WHOLE]).cached


def test_a_choice_is_kept_for_its_gpu_and_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    source, x = fv.cuda.find("flash_attention_2"), np.ones((1, 1, 8, 8), "f4")
    found = GpuStatus(True, "", device="A", arch="sm_90", driver="13.0", runtime="13.0", nvrtc="13.0", cupy="14")

    def key(status: GpuStatus, device: str = "gpu") -> str:
        monkeypatch.setattr(gpu, "_status", status)
        return json.dumps(_key(source, {"Q": x, "causal": 1}, [{"Br": 4}], device, None))

    others = [{"device": "B"}, {"driver": "13.1"}, {"nvrtc": "13.1"}, {"multiprocessors": 7}, {"arch": "sm_80"}]
    keys = [key(found), *(key(replace(found, **other)) for other in others), key(found, "cpu")]
    assert len(set(keys)) == len(keys)
    assert key(found) == keys[0]


@needs_compiler
def test_a_run_that_goes_wrong_later_is_rejected(halves: Path) -> None:
    calls: list[int] = []

    def check(outputs: Mapping[str, Any]) -> str:
        calls.append(len(calls))
        return "now it is wrong" if len(calls) == 6 else ""  # 2 at first, then two rounds of 2: the last of these

    found = tune(halves, [A, WHOLE], check=check, repeat=2)
    assert len(calls) == 6
    assert [(one.reason, one.milliseconds is None) for one in found.candidates] == [
        ("", False),
        ("now it is wrong", True),
    ]


@needs_compiler
def test_a_run_that_fails_later_is_rejected(halves: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []

    def run(self: Any) -> float:
        runs.append(self.plan.instance)
        if len(runs) == 4:
            raise KernelError("\nit ran into a wall\n")
        return 1.0 + len(runs)

    monkeypatch.setattr(tuning.Timed, "run", run)
    found = tune(halves, [A, WHOLE], check=lambda outputs: "", repeat=2)
    assert len(runs) == 5  # the one that failed has no more turns
    right, failed = found.candidates
    assert (right.reason, right.runs, failed.reason, failed.milliseconds) == ("", 2, "it ran into a wall", None)


@needs_compiler
def test_what_is_much_slower_takes_no_more_turns(halves: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {0: 10.0, 1: 17.0, 2: 15.0}  # milliseconds of each candidate
    monkeypatch.setattr(tuning, "SLOWER", 1.6)
    monkeypatch.setattr(tuning.Timed, "run", lambda self: taken[int(self.plan.instance[-2]) - 4])
    candidates = [{**WHOLE, "Floats": 4 + n} for n in taken]
    found = tune(halves, candidates, check=lambda outputs: "", repeat=4)
    assert [(one.milliseconds, one.runs) for one in found.candidates] == [(10.0, 4), (15.0, 4), (17.0, 1)]
    assert found.best == candidates[0]


@needs_compiler
def test_outputs_start_as_nan_in_every_run(halves: Path) -> None:
    seen: list[bool] = []

    def check(outputs: Mapping[str, Any]) -> str:
        seen.append(bool(np.isnan(outputs["y"][50:]).all()))
        outputs["y"][:] = 1
        return ""

    tune(halves, [A], check=check, repeat=3)
    assert seen == [True] * 4


@needs_compiler
@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (("", ""), ""),
        (("j < tiles; ++j", "j + 1 < tiles; ++j"), "O is off by"),
        (("if (q < Nq) O[", "if (q < Nq - 1) O["), "16 of the 176 elements of O are NaN"),
        (("L[q] = mi[r] + logf(li[r])", "L[q] = mi[r]"), "L is off by"),
        (("ago >= 0 && ", ""), "O is off by"),
        (("for (int c = 0; c < Bc; ++c) o +=", "int; for (int c = 0; c < Bc; ++c) o +="), "does not compile"),
    ],
)
def test_attention_is_held_against_float64(tmp_path: Path, change: tuple[str, str], wrong: str) -> None:
    text = fv.cuda.find("flash_attention_2").text
    assert change[0] in text
    path = tmp_path / "mine.cu"
    path.write_text(text.replace(*change))
    rng = np.random.default_rng(0)
    args = {name: rng.standard_normal((1, 2, 11, 8), "f4") for name in "QKV"} | ATTENTION
    if not wrong:
        found = autotune(path, args, {"Br": [4, 8], "Bc": [4]}, device="cpu", progress=False, repeat=1)
        assert found.best.keys() == {"Br", "Bc", "D"}
        assert [one.reason for one in found.candidates] == ["", ""]
        assert autotune(path, args, device="cpu", progress=False, repeat=1).best == {
            "Br": 4,
            "Bc": 4,
            "D": 8,
        }  # its @instance
        return
    with pytest.raises(AutotuneError, match=wrong):
        autotune(path, args, {"Br": [4], "Bc": [4]}, device="cpu", progress=False, repeat=1)


@needs_compiler
def test_progress_goes_to_whoever_asked(halves: Path, capsys: Any) -> None:
    told: list[tuple[int, int, str]] = []
    tune(halves, [A, WHOLE], progress=lambda *step: told.append(step))
    assert told[0] == (0, 3, "First=0 End=1 Floats=1")
    assert told[-1] == (3, 3, "")
    assert [step[0] for step in told] == sorted(step[0] for step in told)
    assert capsys.readouterr().err == ""
    tune(halves, [B, WHOLE], progress=True)
    last = capsys.readouterr().err.split("\r")[-1]
    assert last.rstrip() == f"halves [{'#' * 24}] 3/3"


def test_without_a_gpu_it_says_what_can_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_status", GpuStatus(False, "There is no GPU here."))
    x = np.ones((1, 1, 8, 8), "f4")
    args = {"Q": x, "K": x, "V": x}
    with pytest.raises(DeviceError, match=r'There is no GPU here\. device="cpu" tries and checks the candidates'):
        autotune("flash_attention_2", args)
    stored = Measured("autotune_flash_attention_2", "one X1 with 7 multiprocessors, 2026-01-02", {})
    monkeypatch.setattr("flashviz.tuning.measured", lambda name: stored if name == stored.name else None)
    with pytest.raises(
        DeviceError, match=r"fv.measured\('autotune_flash_attention_2'\)\) shows what was found on one X1"
    ):
        autotune("flash_attention_2", args)


def test_what_cannot_be_checked_or_tried_is_refused(halves: Path) -> None:
    if not cpu.status().usable:
        pytest.skip("no C++ compiler is here")
    with pytest.raises(ValueError, match="halves is not called with Q, K and V: say with check="):
        tune(halves, [WHOLE], check=None)
    with pytest.raises(ValueError, match="halves has no @tune and no @instance lines"):
        tune(halves, None)
    with pytest.raises(ValueError, match='device="numpy" runs no kernel'):
        tune(halves, [WHOLE], device="numpy")


def test_the_picture_has_a_bar_for_each_time_and_a_reason_for_the_others() -> None:
    candidates = [Candidate({"Br": 2**n}, 1.0 + n, 7) for n in range(5)]
    candidates += [
        Candidate({"Br": 1024}, reason="needs 9 bytes", skipped=True),
        Candidate({"Br": 3}, reason="O is off"),
    ]
    found = Tuned("kernel", "one X1", {"N": 8}, {"D": 64}, tuple(candidates))
    axes = found.picture().axes[0]
    assert [bar.get_width() for bar in axes.patches] == [1, 2, 3, 4, 5]
    assert [label.get_text() for label in axes.get_yticklabels()][-2:] == ["Br=1024", "Br=3"]
    texts = [text.get_text().strip() for text in axes.texts]
    assert texts[-2:] == ["skipped: needs 9 bytes", "rejected: O is off"]
    assert axes.get_title(loc="left") == "kernel, on one X1"
    few = autotune_plot(found, most=3).axes[0]
    assert len(few.patches) == 2
    assert "4 more are not drawn" in few.get_xlabel()
