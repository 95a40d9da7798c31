"""The script that records stored traces, on a CuPy made of NumPy whose traced launches run on the processor."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashviz as fv
from flashviz import cuda
from flashviz.cuda import cpu
from flashviz.cuda.trace_files import code_of, read_traces, write_traces
from flashviz.programs import stored as stored_runs

pytestmark = pytest.mark.skipif(not cpu.status().usable, reason="no C++ compiler is here")


@pytest.fixture(scope="module")
def script(root: Path) -> Any:
    spec = importlib.util.spec_from_file_location("gpu_trace", root / "benchmarks" / "gpu_trace.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_trace"] = module
    spec.loader.exec_module(module)
    return module


def small(case: Any) -> Any:
    """A case with as many heads, and few rows."""
    least = 16 if "rung" in case.options else 4  # what a tensor core multiplies
    limits = {"Nq": 10, "Nk": 24, "N": 20, "R": 3, "d": max(8, least), "D": 8 if case.sizes.get("D") else 0}
    sizes = {name: min(size, limits.get(name, size)) for name, size in case.sizes.items()}
    options = {name: min(v, least) if name in ("Br", "Bc", "tile") else v for name, v in case.options.items()}
    return replace(case, sizes=sizes, options=options)


@pytest.fixture
def run(script: Any, fake: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """``run(names)`` runs the script on small cases; the folder that it writes."""
    monkeypatch.setattr(script, "CASES", tuple(map(small, script.CASES)))
    monkeypatch.setattr(script, "COSTS", ())

    def call(*names: str) -> Path:
        fake()
        assert script.main(["--out", str(tmp_path), "--cases", ",".join(names)]) == 0
        return tmp_path

    return call


def test_traces_are_recorded_stored_and_replayed(run: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    names = ["flash_attention_1", "flash_attention_2_causal", "flash_attention_2_async", "flash_decoding_32"]
    names += ["fused_softmax", "rope"]
    folder = run(*names)
    said = capsys.readouterr().out
    assert "All checks passed" in said
    assert said.rstrip().endswith("s.")
    monkeypatch.setattr(stored_runs, "FOLDER", folder)
    assert stored_runs.stored_names() == tuple(sorted(names))
    for name in names:
        recording = fv.stored(name)
        assert (recording.source, recording.device) == ("kernel", "gpu")
        assert str(recording.params["stored"]).startswith("Fake GPU, driver for CUDA 13.0, 20")
        assert recording.params["multiprocessors"] == 132
        _, about = read_traces(folder / f"{name}.npz")
        assert about["error"] <= about["bound"]
        assert len(fv.timeline(recording, -1).axes) == 1
    fa = fv.stored("flash_attention_2_causal")
    rng = np.random.default_rng(0)
    Q, K, V = (rng.standard_normal((1, 8, n, 8), "f4") for n in (10, 24, 24))
    assert fv.same(fa, fv.flash_attention_2(Q, K, V, causal=True, device="numpy")) == []
    with pytest.raises(
        ValueError,
        match=r"no stored trace 'fa2'; there are flash_attention_1, flash_attention_2_async, flash_attention_2_causal, ",
    ):
        fv.stored("fa2")
    report = json.loads((folder / "gpu_trace.json").read_text())
    assert [case["case"] for case in report["cases"]] == names
    assert all(0 < case["busy"] <= 1 and case["multiprocessors"] == 1 for case in report["cases"])
    assert {case["blocks"] for case in report["cases"] if case["case"] == "flash_decoding_32"} == {32 * 4 + 4}


def test_what_tracing_costs_is_measured(script: Any, fake: Any) -> None:
    fake()
    row = script.cost(script.attention(1, 12, 12, 8), 4, 4, causal=True, rounds=2, repeat=1)
    assert (row["kernel"], row["off ms"], row["cost"]) == ("B=1 H=1 N=12 d=8 Br=4 Bc=4 causal", 1.5, 0)


def test_a_case_that_fails_leaves_no_file(run: Any, script: Any, monkeypatch: pytest.MonkeyPatch, fake: Any) -> None:
    folder = run("flash_attention_2")
    assert (folder / "flash_attention_2.npz").exists()
    monkeypatch.setattr(script, "same", lambda a, b: ["not the same"])
    assert script.main(["--out", str(folder), "--cases", "flash_attention_2"]) == 1
    assert not (folder / "flash_attention_2.npz").exists()
    assert "AssertionError: not the same" in (folder / "gpu_trace.md").read_text()


def test_without_a_gpu_nothing_is_recorded(script: Any, fake: Any, tmp_path: Path, capsys: Any) -> None:
    fake(count=0)
    assert script.main(["--out", str(tmp_path)]) == 0
    assert "No traces are recorded: There is no GPU here." in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_stored_traces_are_small_and_say_where_they_come_from() -> None:
    for name in stored_runs.stored_names():
        path = stored_runs.FOLDER / f"{name}.npz"
        assert path.stat().st_size < 200_000
        traces, about = read_traces(path)
        assert {"gpu", "driver", "date", "sizes", "options", "seed", "algorithm", "multiprocessors"} <= set(about)
        now = code_of(about["file"], [trace.kernel for trace in traces])
        assert about["code"] == now, f"{name}: the kernel has changed; benchmarks/gpu_trace.py records it anew on a GPU"
        assert all(trace.device == "gpu" for trace in traces)
        recording = fv.stored(name)
        assert recording.device == "gpu"
        assert fv.same(recording, _performed(about)) == []


def test_a_trace_is_of_code_and_not_of_comments(tmp_path: Path) -> None:
    text = cuda.find("flash_attention_2").text
    digests = []
    for name, changed in (("same", text), ("said", f"// more\n{text}"), ("done", text.replace("++j", "j += 1"))):
        assert (changed != text) == (name != "same")
        (tmp_path / f"{name}.cu").write_text(changed)
        (tmp_path / "include").mkdir(exist_ok=True)
        for header in cuda.find("flash_attention_2").path.parent.glob("include/*.cuh"):
            (tmp_path / "include" / header.name).write_text(header.read_text())
        digests.append(code_of(str(tmp_path / f"{name}.cu"), ["flash_attention_2"]))
    assert digests[0] == digests[1] != digests[2]


def _performed(about: dict[str, Any]) -> fv.Recording:
    import importlib

    program: Any = stored_runs.example(about["algorithm"], about["sizes"], about["options"], about["seed"])
    module = importlib.import_module(f"flashviz.programs.{about['algorithm']}")
    loops = module.LOOPS[program.form] if hasattr(module, "LOOPS") else module.forward
    loops(program)
    recording: fv.Recording = program.run().recording
    return recording


def test_a_block_that_moved_is_not_stored(tmp_path: Path) -> None:
    from flashviz.cuda.trace import Action, KernelTrace, TracedBlock
    from flashviz.slots import Block

    actions = tuple(Action("load_q", (0,), n, n, n + 1) for n in range(2))
    trace = KernelTrace("k", "gpu", (1, 1, 1), (1, 1, 1), (TracedBlock(Block(), 0, 0, 2, actions),))
    with pytest.raises(ValueError, match=r"block \(0, 0, 0\) ran on multiprocessors \[0, 1\]: record it again"):
        write_traces(tmp_path / "a.npz", [trace], {})
