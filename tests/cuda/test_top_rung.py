"""The ladder's last rung in `fv.bench`: planned and launched as its kernel's header says where a GPU is a Hopper, else a row that says why not."""

from __future__ import annotations

import re
import types
from typing import Any

import numpy as np
import pytest
from programs import oracle

from flashviz import benchmark, contenders, ladder
from flashviz.benchmark import table
from flashviz.checks.attention import Attention
from flashviz.contenders import Case, of_rung, time_all
from flashviz.cuda import gpu
from flashviz.cuda.tensor_maps import Layout, TensorMapError

TOP = ladder.PREFILL[-1]
CASES = [Case("prefill", 2, 4, 2, 300, 64), Case("prefill", 1, 2, 1, 260, 128, True)]


class OnGpu:
    """An array of a GPU, as far as a launch looks at one; ``host`` are its numbers."""

    def __init__(self, host: np.ndarray) -> None:
        self.host, self.shape, self.dtype, self.flags = (
            host,
            host.shape,
            host.dtype,
            types.SimpleNamespace(c_contiguous=True),
        )
        self.data = types.SimpleNamespace(ptr=host.ctypes.data)

    def fill(self, value: float) -> None:
        self.host.fill(value)


class Hopper:
    """A GPU of compute capability 9.0 that computes what flash_attention_3 does of what its launch hands over, causal by its template."""

    def __init__(self, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.machine = fake(capability=(9, 0))
        self.arrays: dict[int, np.ndarray] = {}
        self.forgets = ""
        monkeypatch.setattr(gpu.library(), "empty", lambda shape, dtype: self.array(np.zeros(shape, dtype)))
        monkeypatch.setattr(gpu, "encode", self.encode)
        monkeypatch.setitem(__import__("fake_cupy").KERNELS, "flash_attention_3", self.compute)

    def array(self, host: np.ndarray) -> OnGpu:
        self.arrays[host.ctypes.data] = host
        return OnGpu(host)

    def encode(self, name: str, layout: Layout, pointer: int) -> tuple[Layout, np.ndarray]:
        return layout, self.arrays[pointer]

    def compute(
        self, Q: Any, K: Any, V: Any, O: Any, L: Any, Nq: Any, Nk: Any, scale: Any, Hq: Any, *others: Any
    ) -> None:
        given = re.fullmatch(
            r"flash_attention_3<half, (\d+), \d+, \d+, (\w+), \d+>", self.machine.launches[-1]["function"]
        )
        assert given is not None
        assert [layout.box[1] for layout, _ in (Q, K, V, O)] == [64, 128, 128, 64]
        causal = given[2] in ("1", "true") and self.forgets != "causal"
        found, logs = oracle.attention(*(x.astype("f4") for _, x in (Q, K, V)), causal=causal, scale=float(scale))
        O[1][...], L.host[...] = found, logs


@pytest.fixture
def hopper(fake: Any, monkeypatch: pytest.MonkeyPatch) -> Hopper:
    return Hopper(fake, monkeypatch)


def contender(hopper: Hopper, case: Case, rung: ladder.Rung = TOP) -> Any:
    rng = np.random.default_rng(4)
    shapes = [(case.B, h, case.N, case.d) for h in (case.Hq, case.Hkv, case.Hkv)]
    host = [rng.standard_normal(shape).astype("f2") for shape in shapes]
    right = Attention(*host, scale=case.d**-0.5, causal=case.causal)
    problem: Any = types.SimpleNamespace(check=lambda O, L: right.check(O.host, L.host))
    made = of_rung(rung, case, [tuple(map(hopper.array, host))], problem, "gpu")
    made.row |= {**vars(case), "dtype": "float16", "flop": case.flop, "bytes": case.bytes(2)}
    return made


@pytest.mark.parametrize("case", CASES, ids=["64", "128 causal"])
def test_on_a_hopper_gpu_it_is_launched_checked_and_timed(hopper: Hopper, case: Case) -> None:
    (row,) = time_all([contender(hopper, case)], 2, 0, "gpu", False)
    assert row["name"] == "rung 6"
    assert "reason" not in row
    assert row["values"] == TOP.measured[case.d]
    assert (row["ms"], row["TFLOP/s"]) == (1.5, case.flop / 1.5 / 1e9)
    assert 0 < row["error"] <= 1
    values = TOP.measured[case.d]
    name = f"flash_attention_3<half, {values['Br']}, 128, {case.d}, {int(case.causal)}, {values['Stages']}>"
    assert {launch["function"] for launch in hopper.machine.launches} == {name}
    assert hopper.machine.launches[0]["block"] == (2 * values["Br"] + 128, 1, 1)
    assert "-arch=sm_90a" in hopper.machine.modules[-1]["options"]
    assert table([row])[1].split()[:5] == ["rung", "6", "float16", "1.5000", f"{row['TFLOP/s']:.1f}"]


def test_there_its_wrong_result_has_no_time(hopper: Hopper) -> None:
    hopper.forgets = "causal"
    (row,) = time_all([contender(hopper, CASES[1])], 2, 0, "gpu", False)
    assert row["wrong"]
    assert row["reason"].startswith("wrong: O is off by")
    assert "ms" not in row


def test_a_driver_without_tensor_maps_is_said_to_be_one(hopper: Hopper, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(*_: Any) -> None:
        raise TensorMapError("libcuda.so.1 is not here or too old for tensor maps, which came with CUDA 12.0: it")

    monkeypatch.setattr(gpu, "encode", encode)
    with pytest.raises(gpu.KernelError, match=r"^libcuda.so.1 is not here or too old for tensor maps"):
        contender(hopper, CASES[0])


@pytest.mark.parametrize(
    ("capability", "instead"),
    [((7, 5), "flash_attention_2 does"), ((8, 9), "flash_attention_2_tuned does"), ((10, 0), "flash_attention_2_tuned does")],
)  # fmt: skip
def test_on_another_gpu_its_row_says_what_runs_there(
    fake: Any, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], instead: str
) -> None:
    machine = fake(capability=capability)
    monkeypatch.setattr(
        gpu.library(), "get_default_memory_pool", lambda: types.SimpleNamespace(free_all_blocks=list), raising=False
    )
    monkeypatch.setattr(ladder, "PREFILL", (TOP,))
    monkeypatch.setattr(
        contenders, "inputs", lambda case, *_: [(np.zeros((case.B, case.Hq, case.N, case.d), "f2"),) * 3]
    )
    for name, value in (("copy_rate", 3.0), ("product_rate", 500.0), ("_torch", None)):
        monkeypatch.setattr(benchmark, name, lambda *_, value=value: value)
    found = benchmark.bench(cases=[Case("prefill", 1, 1, 1, 200, d) for d in (64, 128)], progress=False)
    arch = f"{capability[0]}{capability[1]}"
    why = f"flash_attention_3 runs on sm_90a alone (Hopper: TMA, wgmma); this GPU is sm_{arch}. {instead} the same work there."
    assert [(row["name"], row["reason"], "ms" in row) for row in found.rows] == [("rung 6", why, False)] * 2
    assert str(found).count(f"rung 6                    float16           –            {why}") == 2
    assert found.wrong == []
    assert [text.get_text() for text in found.picture().axes[1].texts] == ["not measured"]
    assert machine.launches == []


def test_on_the_processor_its_row_says_why_not() -> None:
    (one,) = contenders.contenders(Case("prefill", 1, 1, 1, 20, 64), [TOP], "cpu")
    assert re.search(r"processor", one.row["reason"])
    assert one.row["reason"].startswith("flash_attention_3")
    assert one.launches == ()
