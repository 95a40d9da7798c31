"""`fv.bench`: what it times is right, what cannot run has a reason, and without a GPU stored figures are shown as what they are."""

from __future__ import annotations

import contextlib
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashviz as fv
from flashviz import benchmark, cli, ladder
from flashviz.benchmark import Bench, bench, measure
from flashviz.contenders import Case, Contender, contenders, time_all
from flashviz.cuda import cpu, gpu
from flashviz.cuda.gpu import GpuStatus
from flashviz.measurements import Measured, measured
from flashviz.programs.device import DeviceError
from flashviz.view.ladder import ladder_plot

needs_compiler = pytest.mark.skipif(not cpu.status().usable, reason="no C++ compiler is here")
WIDE = Case("prefill", 4, 32, 32, 4096, 64)


def row(name: str, rate: float, case: Case, rung: Any = 0, dtype: str = "float16") -> dict[str, Any]:
    size = 2 if dtype == "float16" else 4
    base = {**vars(case), "name": name, "rung": rung, "dtype": dtype, "idea": "it is fast"}
    ms = case.flop / rate / 1e9
    numbers = {"flop": case.flop, "bytes": case.bytes(size), "ms": ms, "TFLOP/s": rate}
    return {**base, **numbers, "TB/s": case.bytes(size) / ms / 1e9}


DECODE = Case("decode", 1, 16, 16, 65_536, 128)
FIGURES = {
    "gpu": "NVIDIA X1",
    "multiprocessors": 7,
    "date": "2026-01-02",
    "note": "It rained.",
    "copy TB/s": 4.0,
    "rates": {"float32": 50.0, "float16": 700.0},
    "rows": [
        row("rung 0", 2.5, WIDE, dtype="float32"),
        row("rung 5", 340.0, WIDE, 5),
        row("rung 6", 610.0, WIDE, 6),
        row("PyTorch flash", 300.0, WIDE, None),
        {**vars(WIDE), "name": "rung 4", "rung": 4, "dtype": "float16", "reason": "flash_x needs sm_80 or newer"},
        row("rung 1", 3.9, DECODE, 1),
    ],
}


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> Measured:
    """Figures are stored, and there is no GPU."""
    kept = Measured("ladder", "one X1 with 7 multiprocessors, 2026-01-02", FIGURES)
    monkeypatch.setattr(gpu, "_status", GpuStatus(False, "There is no GPU here."))
    monkeypatch.setattr(benchmark, "measured", lambda name: kept if name == "ladder" else None)
    return kept


# -- what is timed -----------------------------------------------------------------------------------------------------


def test_operations_and_bytes_of_a_case() -> None:
    assert WIDE.flop == 4 * 4 * 32 * 4096**2 * 64
    assert WIDE.bytes(2) == 2 * 4 * (4 * 32 * 4096 * 64)
    assert Case("prefill", 1, 1, 1, 3, 2, causal=True).flop == 4 * 6 * 2
    grouped = Case("decode", 2, 8, 2, 100, 64)
    assert (grouped.Nq, grouped.flop) == (1, 4 * 2 * 8 * 100 * 64)
    assert grouped.bytes(2) == 2 * 64 * 2 * 2 * (8 + 2 * 100)


@needs_compiler
@pytest.mark.parametrize(
    "case",
    [Case("prefill", 1, 2, 1, 20, 16), Case("prefill", 1, 1, 1, 32, 16, True), Case("decode", 1, 4, 2, 70, 64)],
    ids=lambda case: f"{case.ladder} d={case.d}",
)
def test_every_rung_is_right_or_says_why_it_does_not_run(case: Case) -> None:
    rows = measure(case, "cpu", repeat=1)
    rungs = ladder.PREFILL if case.ladder == "prefill" else ladder.DECODE
    assert {r["name"] for r in rows} == {rung.label for rung in rungs}
    for found in rows:
        assert not found.get("wrong"), found["reason"]
        if "reason" in found:
            assert found["reason"] == f"{found['kernel']} has no @instance for d={case.d}"
        else:
            assert 0 <= found["error"] <= 1
            assert found["ms min"] <= found["ms"] <= found["ms max"]
    assert sum("ms" in found for found in rows) >= 3


@needs_compiler
def test_a_wrong_kernel_has_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = fv.cuda.find("flash_attention_2").text
    (tmp_path / "late.cu").write_text(text.replace("j < tiles; ++j", "j + 1 < tiles; ++j"))
    (tmp_path / "broken.cu").write_text(text.replace("carve.tile<Br, D>", "carve.tyle<Br, D>"))
    values = {8: {"Br": 4, "Bc": 4}}
    rungs = [ladder.Rung(n, str(tmp_path / f"{n}.cu"), "", "float32", values) for n in ("late", "broken")]
    monkeypatch.setattr(ladder, "PREFILL", (*rungs, ladder.Rung(0, "flash_attention_2", "", "float32", values)))
    late, broken, right = measure(Case("prefill", 1, 1, 1, 9, 8), "cpu", repeat=1)
    assert late["wrong"]
    assert late["reason"].startswith("wrong: O is off by")
    assert "does not compile" in broken["reason"]
    assert "ms" in right
    assert "ms" not in late
    found = Bench("here", {**FIGURES, "rows": [late, broken, right]})
    assert found.wrong == [late]
    assert "wrong: O is off by" in str(found)


def test_a_result_that_goes_wrong_while_it_is_timed_has_no_time() -> None:
    calls: list[int] = []

    def check() -> Any:
        return types.SimpleNamespace(wrong="" if len(calls) < 4 else "it is off", error=0.5)

    one = Contender("one", {"flop": 1.0, "bytes": 1.0}, [lambda: calls.append(1)], check)
    failing = Contender("two", {"flop": 1.0, "bytes": 1.0}, [lambda: {}["no"]])  # type: ignore[index]
    rows = time_all([one, failing], repeat=3, rest=0, device="cpu", queued=False)
    assert len(calls) == 5  # once before, three times, once after
    assert (rows[0]["reason"], rows[0]["wrong"], "ms" in rows[0]) == ("wrong: it is off", True, False)
    assert (rows[1]["reason"], "wrong" in rows[1]) == ("'no'", False)


def test_one_that_fails_while_it_is_timed_does_not_stop_the_others() -> None:
    calls: list[int] = []

    def fails_later() -> None:
        calls.append(1)
        if len(calls) > 2:
            raise RuntimeError("it fell over")

    both = [Contender(name, {"flop": 1.0, "bytes": 1.0}, [work]) for name, work in (("a", fails_later), ("b", list))]
    first, second = time_all(both, repeat=3, rest=0, device="cpu", queued=False)
    assert (first["reason"], "ms" in first, "ms" in second) == ("it fell over", False, True)


class FakeTorch:
    """PyTorch's attention as `contenders` calls it, in NumPy; a backend called WRONG is wrong, one called NONE does not run."""

    def __init__(self) -> None:
        self.backend = ""
        self.nn = types.SimpleNamespace(functional=types.SimpleNamespace(scaled_dot_product_attention=self.attend))
        names = ("EFFICIENT_ATTENTION", "FLASH_ATTENTION", "CUDNN_ATTENTION")
        self.SDPBackend = types.SimpleNamespace(**{name: name for name in names})

    def from_dlpack(self, x: np.ndarray) -> np.ndarray:
        return x

    @contextlib.contextmanager
    def sdpa_kernel(self, backends: list[str]) -> Iterator[None]:
        (self.backend,) = backends
        yield

    def attend(self, q: Any, k: Any, v: Any, is_causal: bool, enable_gqa: bool) -> Any:
        if self.backend == "CUDNN_ATTENTION":
            raise RuntimeError("No available kernel.")
        assert enable_gqa == (q.shape[1] != k.shape[1])
        k, v = (np.repeat(x, q.shape[1] // x.shape[1], 1).astype("f8") for x in (k, v))
        s = q.astype("f8") @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        if is_causal and self.backend != "FLASH_ATTENTION":
            s[..., np.triu(np.ones(s.shape[-2:], bool), 1)] = -np.inf
        p = np.exp(s - s.max(-1, keepdims=True))
        out = (p / p.sum(-1, keepdims=True) @ v).astype(q.dtype)
        return types.SimpleNamespace(contiguous=lambda: out)


@pytest.mark.parametrize("causal", [False, True])
def test_peers_are_checked_like_ours(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch.nn.attention", torch)
    case = Case("prefill", 1, 4, 2, 16, 16, causal)
    rungs = [ladder.Rung(0, "none", ""), ladder.Rung(3, "none", "", "float16")]  # ours do not run here
    found = list(contenders(case, rungs, "cpu", torch))
    rows = {row["name"]: row for row in time_all(found, 1, 0, "cpu", False)}
    assert rows["rung 0"]["reason"].startswith("no kernel file none.cu")
    assert set(rows) == {"rung 0", "rung 3", "PyTorch memory-efficient", "PyTorch flash", "PyTorch cuDNN"}
    assert "ms" in rows["PyTorch memory-efficient"]
    assert rows["PyTorch memory-efficient"]["rung"] is None
    assert rows["PyTorch cuDNN"]["reason"] == "No available kernel."
    flash = rows["PyTorch flash"]
    assert (bool(flash.get("wrong")), "ms" in flash) == (causal, not causal)  # it forgets the mask


# -- what is shown -----------------------------------------------------------------------------------------------------


def test_on_a_gpu_everything_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    usable = GpuStatus(True, "", device="NVIDIA X2", arch="sm_90", multiprocessors=9)
    pool = types.SimpleNamespace(free_all_blocks=lambda: None)
    monkeypatch.setattr(gpu, "_status", usable)
    monkeypatch.setattr(gpu, "library", lambda: types.SimpleNamespace(get_default_memory_pool=lambda: pool))
    monkeypatch.setattr(benchmark, "copy_rate", lambda: 3.0)
    monkeypatch.setattr(benchmark, "product_rate", lambda dtype: {"float16": 500.0}.get(dtype))
    monkeypatch.setattr(benchmark, "_torch", lambda: None)
    monkeypatch.setattr(benchmark, "measure", lambda case, torch: [row("rung 0", 1.0, case)])
    found = bench(quick=True)
    assert found.stored == ""
    assert found.where.startswith("one X2 with 9 multiprocessors, 20")
    assert len(found.rows) == len(benchmark.QUICK)
    assert "copy 3.00 TB/s (read plus written), matrix product float16 500 TFLOP/s." in str(found)
    assert "1/4  prefill: B = 4, 32 heads, N = 4096, d = 64" in capsys.readouterr().err
    assert len(bench(progress=False).rows) == len(benchmark.CASES)
    assert capsys.readouterr().err == ""


def test_without_a_gpu_stored_figures_are_shown_as_such(stored: Measured, tmp_path: Path) -> None:
    found = bench()
    lines = str(found).splitlines()
    assert lines[0] == "There is no GPU here. These are stored figures."
    assert lines[1].startswith("Measured on one X1 with 7 multiprocessors, 2026-01-02: copy 4.00 TB/s")
    assert lines[2] == "It rained."
    assert "prefill: B = 4, 32 heads, N = 4096, d = 64" in lines
    assert any(
        line.split() == ["rung", "4", "float16", "–", "flash_x", "needs", "sm_80", "or", "newer"] for line in lines
    )
    assert any(line.endswith("340.0  it is fast") for line in lines)
    assert any(line.split()[:3] == ["rung", "6", "float16"] and line.endswith("610.0  it is fast") for line in lines)
    found.save(tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text()) == FIGURES
    found.save(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")
    with pytest.raises(ValueError, match=r"a.txt: a name ends in one of .json, .png"):
        found.save(tmp_path / "a.txt")


def test_with_nothing_to_show_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_status", GpuStatus(False, "CuPy is not installed.", "pip install cupy"))
    monkeypatch.setattr(benchmark, "measured", lambda name: None)
    with pytest.raises(DeviceError, match=r"CuPy is not installed. To add it: pip install cupy. And no figures"):
        bench()


def test_the_command(stored: Measured, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "a.png"
    assert cli.main(["bench", "--quick", "-o", str(out), "-o", str(tmp_path / "b.json")]) == 0
    said = capsys.readouterr().out
    assert "These are stored figures." in said
    assert said.endswith(f"written: {out}\nwritten: {tmp_path / 'b.json'}\n")
    assert out.read_bytes().startswith(b"\x89PNG")
    assert cli.main(["bench", "-o", "a.gif"]) == 2
    assert "a name ends in one of .json, .png, .svg, .pdf" in capsys.readouterr().err
    wrong = Bench("here", {**FIGURES, "rows": [{**FIGURES["rows"][4], "wrong": True}]})  # type: ignore[index]
    monkeypatch.setattr(benchmark, "bench", lambda quick: wrong)
    assert cli.main(["bench"]) == 1


def test_the_chart_puts_every_rung_under_its_roof(stored: Measured) -> None:
    figure = ladder_plot(stored, d=64)
    roofline, prefill, decode = figure.axes
    names = [text.get_text().strip() for text in roofline.texts]
    assert {"rung 0", "rung 5", "rung 6", "flash", "copy 4.00 TB/s", "float16 700 TFLOP/s"} <= set(names)
    points = {tuple(line.get_data()[i][0] for i in (0, 1)) for line in roofline.lines if len(line.get_xdata()) == 1}
    prefills = {(1024.0, 2.5), (2048.0, 340.0), (2048.0, 300.0), (2048.0, 610.0)}
    assert points == prefills | {(DECODE.flop / DECODE.bytes(2), 3.9)}
    roof = next(line for line in roofline.lines if line.get_gid() == "roof")
    assert max(roof.get_ydata()) == 700
    assert roof.get_ydata()[0] == pytest.approx(4.0 * roof.get_xdata()[0])
    assert [label.get_text() for label in prefill.get_yticklabels()] == [
        "rung 0, float32",
        "PyTorch flash, float16",
        "rung 5, float16",
        "rung 6, float16",
    ]
    assert [bar.get_width() for bar in prefill.patches] == pytest.approx([2.5, 300, 340, 610])
    assert decode.get_xlabel() == "TB/s"
    assert figure.get_suptitle() == "Measured on one X1 with 7 multiprocessors, 2026-01-02"
    alone = ladder_plot(Bench("x", {**FIGURES, "rates": {"float16": None}, "rows": FIGURES["rows"][-1:]}))  # type: ignore[index]
    assert [text.get_text() for text in alone.axes[1].texts] == ["not measured"]


def test_the_stored_figures_are_of_every_rung_and_none_is_beyond_its_roof() -> None:
    found = measured("ladder")
    assert found is not None
    assert (
        len({r["kernel"] for r in found.rows if "kernel" in r} & {r.kernel for r in ladder.PREFILL + ladder.DECODE})
        >= 10
    )
    assert not [r for r in found.rows if r.get("wrong")]
    for r in found.rows:
        if "ms" in r:
            assert r["error"] <= 1
            assert r["TB/s"] == pytest.approx(r["bytes"] / r["ms"] / 1e9, rel=1e-5)
            assert r["TFLOP/s"] < found.data["rates"]["float16"]
    assert len(ladder_plot(found).axes) == 3
