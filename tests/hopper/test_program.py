"""fv.flash_attention_3 launches its kernel, here in the emulation: types, sizes, and the program's own numbers beside it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hopper.machine import Machine

import flashviz as fv
from flashviz import cuda
from flashviz.cuda import cpu, gpu

if not cpu.status().usable or sys.platform != "linux":
    pytest.skip("needs Linux and a C++ compiler: apt-get install g++", allow_module_level=True)


@pytest.fixture
def hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A Hopper GPU with three multiprocessors, as far as the program can tell; what it was asked to launch."""
    machine = Machine("flash_attention_3", tmp_path)
    asked: list[dict[str, Any]] = []

    def launch(kernel: cuda.Kernel, args: dict[str, Any], **how: Any) -> None:
        asked.append({"template": kernel.template, **how})
        for name in ("O", "L"):
            args[name][...] = np.nan if args[name].dtype != np.uint16 else 0x7FC0
        machine.launch(kernel, args)

    monkeypatch.setattr(cuda, "launch", launch)
    monkeypatch.setattr(gpu, "status", lambda: gpu.GpuStatus(True, "", arch="sm_90", multiprocessors=3))
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


def test_auto_takes_the_gpu_where_the_kernel_takes_the_call(
    hopper: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.random.default_rng(3).standard_normal((200, 64), "f4")
    sizes: dict[str, Any] = {"Br": 192, "Bc": 128, "stages": 3}
    assert fv.flash_attention_3(x, x, x, **sizes, record=False).device == "gpu"
    assert fv.flash_attention_3(x, x, x, **sizes, consumers=2, record=False).device == "numpy"
    assert fv.flash_attention_3(x, x, x, **sizes).device == "numpy"  # its recording is that of the program
    monkeypatch.setattr(gpu, "status", lambda: gpu.GpuStatus(True, "", arch="sm_100"))
    assert fv.flash_attention_3(x, x, x, **sizes, record=False).device == "numpy"
