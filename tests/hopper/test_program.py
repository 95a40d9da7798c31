"""fv.flash_attention_3 launches its kernel, here in the emulation: types, sizes, and the program's own numbers beside it."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hopper.machine import Machine

import flashviz as fv
from flashviz import cuda
from flashviz.cuda import cpu, gpu
from flashviz.cuda.trace import DEFINE, watched
from flashviz.programs.stored import load_trace

if not cpu.status().usable or sys.platform != "linux":
    pytest.skip("needs Linux and a C++ compiler: apt-get install g++", allow_module_level=True)


@pytest.fixture
def hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A Hopper GPU with three multiprocessors, as far as the program can tell; what it was asked to launch."""
    (tmp_path / "traced").mkdir()
    machine = Machine("flash_attention_3", tmp_path)
    traced = Machine("flash_attention_3", tmp_path / "traced", defines=(DEFINE,))
    asked: list[dict[str, Any]] = []

    def launch(kernel: cuda.Kernel, args: dict[str, Any], **how: Any) -> None:
        asked.append({"template": kernel.template, **how})
        for name in ("O", "L"):
            args[name][...] = np.nan if args[name].dtype != np.uint16 else 0x7FC0
        watch = watched()
        (traced if watch else machine).launch(kernel, args)
        if watch:
            watch.traces.append(traced.traces[0])

    monkeypatch.setattr(cuda, "launch", launch)
    for module in (gpu, cuda):
        monkeypatch.setattr(module, "status", lambda: gpu.GpuStatus(True, "", arch="sm_90", multiprocessors=3))
    return asked


def test_the_kernel_and_the_program_agree(hopper: list[dict[str, Any]]) -> None:
    rng = np.random.default_rng(3)
    for dtype, d, Br, stages, name in (("float16", 64, 192, 3, "half"), ("bfloat16", 128, 128, 2, "bfloat16")):
        Q, K, V = (rng.standard_normal((1, h, n, d), "f4") for h, n in ((2, 300), (1, 333), (1, 333)))
        given: dict[str, Any] = {"Br": Br, "Bc": 128, "stages": stages, "dtype": dtype, "causal": True, "record": False}
        run = fv.flash_attention_3(Q, K, V, **given, device="gpu")
        want = fv.flash_attention_3(Q, K, V, **given, multiprocessors=3, device="numpy")
        assert (run.device, run.recording, run.O.shape, run.O.dtype) == ("gpu", None, Q.shape, np.float32)
        assert np.abs(run.O - want.O).max() <= fv.FlashAttention3(Q, K, V, **given).bound()
        assert np.abs(run.L - want.L).max() < 1e-4
        template = {"T": name, "Br": Br, "Bc": 128, "D": d, "Causal": True, "Stages": stages}
        assert hopper[-1] == {"template": template, "device": "gpu", "poison": True}


def test_a_recording_is_of_what_the_kernel_did(hopper: list[dict[str, Any]]) -> None:
    rng = np.random.default_rng(4)
    Q, K, V = (rng.standard_normal((h, n, 64), "f4") for h, n in ((2, 400), (1, 300), (1, 300)))
    sizes: dict[str, Any] = {"Br": 192, "Bc": 128, "stages": 3, "causal": True}
    run = fv.flash_attention_3(Q, K, V, **sizes, device="gpu")
    want = fv.flash_attention_3(Q, K, V, **sizes, multiprocessors=3, device="numpy")
    assert run.recording is not None
    assert (run.device, run.recording.source, run.recording.params["multiprocessors"]) == ("gpu", "kernel", 3)
    assert fv.same(run, want) == []
    assert [s.label for s in run.recording.steps] == [s.label for s in want.recording.steps]
    assert run.recording.findings == ()
    figure = fv.timeline(run)
    ticks = [t.get_text() for t in figure.axes[0].get_yticklabels()]
    assert ticks == [
        *("0 · producer", "consumer 1", "consumer 2", "consumer 3"),
        *("1 · producer", "consumer 1", "consumer 2", "consumer 3"),
        *("2 · producer", "consumer 1", "consumer 2", "consumer 3"),
    ]


def test_the_script_that_stores_traces(
    hopper: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    script = importlib.import_module("gpu_trace")
    (case,) = (case for case in script.CASES if case.name == "flash_attention_3")
    small = replace(case, sizes={**case.sizes, "Hq": 2, "Hkv": 1, "Nq": 500, "Nk": 300})
    machine = {"gpu": "emulated", "driver": "none", "date": "today", "multiprocessors": 3}
    row = script.record(small, machine, tmp_path)
    assert (row["blocks"], row["multiprocessors"]) == (3, 3)
    assert row["error"] <= row["bound"]
    recording = load_trace(tmp_path / "flash_attention_3.npz")
    assert {e.trace.role for e in recording.events if e.trace} >= {"producer", "consumer 1", "consumer 2", "consumer 3"}
    assert recording.findings == ()
    assert len(fv.timeline(recording, 20).axes) == 1


def test_auto_takes_the_gpu_where_the_kernel_takes_the_call(
    hopper: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.random.default_rng(3).standard_normal((200, 64), "f4")
    sizes: dict[str, Any] = {"Br": 192, "Bc": 128, "stages": 3}
    assert fv.flash_attention_3(x, x, x, **sizes, record=False).device == "gpu"
    assert fv.flash_attention_3(x, x, x, **sizes, consumers=2, record=False).device == "numpy"
    monkeypatch.setattr(gpu, "status", lambda: gpu.GpuStatus(True, "", arch="sm_100"))
    assert fv.flash_attention_3(x, x, x, **sizes, record=False).device == "numpy"
