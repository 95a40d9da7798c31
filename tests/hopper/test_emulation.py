"""The Hopper kernels' own source on the processor, against NumPy: copies come late and in any order, products early or at the last moment."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hopper.machine import Machine
from programs.oracle import attention

from flashviz import cuda
from flashviz.cuda import cpu
from flashviz.cuda.sources import find

if not cpu.status().usable or sys.platform != "linux":
    pytest.skip("needs Linux and a C++ compiler: apt-get install g++", allow_module_level=True)

SIZES = {64: {"Br": 192, "Bc": 128, "Stages": 3}, 128: {"Br": 128, "Bc": 128, "Stages": 2}}


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """benchmarks/gpu_hopper_steps.py, which launches in the emulation what it launches on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
        yield importlib.import_module("gpu_hopper_steps")


@pytest.mark.parametrize("late", [False, True])
def test_the_steps_are_exact(script: ModuleType, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine("hopper_steps", tmp_path)
    machine.late = late
    monkeypatch.setattr(
        script, "cuda", types.SimpleNamespace(Kernel=cuda.Kernel, find=cuda.find, launch=machine.launch)
    )
    report = script.part_steps(print)
    assert report == {"cases": 16, "failures": []}


@pytest.fixture(scope="module")
def attend(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine("flash_attention_3", tmp_path_factory.mktemp("attention"))


def launch(
    machine: Machine, Q: np.ndarray, K: np.ndarray, V: np.ndarray, causal: bool, multiprocessors: int = 3, **more: float
) -> tuple[np.ndarray, np.ndarray]:
    """O and L, which were full of NaN before."""
    O, L = np.full(Q.shape, np.nan, np.float16), np.full(Q.shape[:3], np.nan, np.float32)
    template = {"T": "half", "D": Q.shape[3], "Causal": int(causal), **SIZES[Q.shape[3]]}
    sizes = {"Nq": Q.shape[2], "Nk": K.shape[2], "Hq": Q.shape[1], "Hkv": K.shape[1]}
    given = {"Q": Q, "K": K, "V": V, "O": O, "L": L, **sizes, **more}
    machine.launch(cuda.Kernel("flash_attention_3", template), given, multiprocessors=multiprocessors)
    return O, L


def check(
    machine: Machine,
    rng: np.random.Generator,
    Nq: int,
    Nk: int,
    D: int,
    causal: bool,
    kind: str = "",
    scale: float | None = None,
    **sizes: int,
) -> None:
    """One launch against float64, within what rounding P and O to half does, 2^-11 of the largest V each."""
    B, Hq, Hkv = sizes.get("B", 1), sizes.get("Hq", 2), sizes.get("Hkv", 1)
    q, k, v = (rng.standard_normal((B, h, n, D)) for h, n in ((Hq, Nq), (Hkv, Nk), (Hkv, Nk)))
    if kind == "steep":
        q *= 8
    if kind == "rising":  # the largest score is in the last tile
        q[..., 0], k[..., :1] = 3, 0.05 * np.arange(Nk)[:, None]
    Q, K, V = (x.astype(np.float16) for x in (q, k, v))
    more = {} if scale is None else {"scale": scale}
    O, L = launch(machine, Q, K, V, causal, sizes.get("multiprocessors", 3), **more)
    want_O, want_L = attention(Q, K, V, scale=1 / np.sqrt(D) if scale is None else scale, causal=causal)
    assert not np.isnan(O).any()
    assert (np.isneginf(L) == np.isneginf(want_L)).all()
    assert np.abs(O - want_O).max() <= 2.0**-10 * np.abs(V).max()
    seen = ~np.isneginf(want_L)
    assert (np.abs(L[seen] - want_L[seen]) <= 2.0**-17 * np.maximum(1, np.abs(want_L[seen]))).all()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("Nq", "Nk", "D", "causal", "kind"),
    [
        (1, 1, 64, False, ""),
        (300, 564, 128, True, ""),  # a tile that only the lower half of a row block sees
        (700, 300, 64, True, ""),  # rows and whole row blocks that see no key
        (400, 400, 64, True, "rising"),
        (260, 130, 128, False, "steep"),
    ],
)
def test_attention(attend: Machine, Nq: int, Nk: int, D: int, causal: bool, kind: str, late: bool) -> None:
    attend.late, attend.seed = late, Nq + Nk
    check(attend, np.random.default_rng(Nq), Nq, Nk, D, causal, kind)


@pytest.mark.parametrize("scale", [0.0, -0.2, 0.5])
def test_any_scale(attend: Machine, scale: float) -> None:
    check(attend, np.random.default_rng(5), 200, 300, 64, True, scale=scale)
    check(attend, np.random.default_rng(6), 300, 200, 128, True, scale=scale)


def test_a_nan_stays_in_its_row_and_ends(attend: Machine) -> None:
    rng = np.random.default_rng(7)
    Q, K, V = (rng.standard_normal((1, 1, 200, 64)).astype(np.float16) for _ in range(3))
    Q[0, 0, 5, 3] = np.nan
    O, L = launch(attend, Q, K, V, True)
    assert np.flatnonzero(np.isnan(L)).tolist() == [5]
    assert np.flatnonzero(np.isnan(O).any(-1)).tolist() == [5]


def random_check(machine: Machine, seed: int) -> None:
    rng = np.random.default_rng(seed)
    machine.late, machine.seed = bool(rng.integers(2)), seed
    Hkv = int(rng.integers(1, 3))
    sizes = {
        "B": int(rng.integers(1, 3)),
        "Hkv": Hkv,
        "Hq": Hkv * int(rng.integers(1, 4)),
        "multiprocessors": int(rng.integers(1, 5)),
    }
    Nq, Nk = (int(rng.integers(1, 600 if rng.random() < 0.6 else 70)) for _ in range(2))
    kind = ("", "", "steep", "rising")[rng.integers(4)]
    check(machine, rng, Nq, Nk, int(rng.choice((64, 128))), bool(rng.integers(2)), kind, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_attention_at_random_sizes(attend: Machine, seed: int) -> None:
    random_check(attend, seed)


FAULTS = {
    "scores before K is there": ("k_full[ahead.slot].wait(ahead.parity ^ (l[0] + l[1] < 0.f));", ""),
    "the first two scores before K is there": ("k_full[ahead.slot].wait(ahead.parity);", ""),
    "values before V is there": (
        "        v_full[before.slot].wait(before.parity);\n        wgmma_fence",
        "        wgmma_fence",
    ),
    "the last values before V is there": (
        "    v_full[before.slot].wait(before.parity);\n    wgmma_keep",
        "    wgmma_keep",
    ),
    "nobody says that there is no next tile": ("k_full[kv.slot].arrive();", ""),
    "scores before Q is there": ("q_full[q.slot * Consumers + w].wait(q.parity);", ""),
    "K loaded over one that is read": (
        "k_empty[kv.slot].wait(kv.parity ^ 1);\n            k_full",
        "k_full",
    ),
    "V loaded over one that is read": ("v_empty[kv.slot].wait(kv.parity ^ 1);", ""),
    "Q loaded over O that is not stored yet": (
        "        tma_store_wait();\n        q_empty",
        "        q_empty",
    ),
    "a Q buffer that is never given back": ("owed = true;", ""),
    "O stored before all threads have written it": ("named_barrier_wait(8 + w, 128);                        //", "//"),
    "O stored where there are no rows": (" && first + 64 * w >= 0", ""),
    "V given back before the product has read it": (
        "        wgmma_wait<0>();\n        wgmma_keep(o);\n        done_with(v_empty[before.slot]);",
        "        done_with(v_empty[before.slot]);\n        wgmma_wait<0>();\n        wgmma_keep(o);",
    ),
    "scores read while they are computed": ("wgmma_wait<1>();", "wgmma_wait<2>();"),
    "a slot too few in the ring for tiles that are skipped": ("(Br - 64 + Bc - 1) / Bc + 2 <= Stages", "true"),
    "the last store is not waited for": ("    if (t == 0) tma_store_wait();  //", "    //"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str, tmp_path: Path) -> None:
    old, new = FAULTS[fault]
    assert find("flash_attention_3").assembled.count(old) == 1
    machine = Machine("flash_attention_3", tmp_path, lambda source: source.replace(old, new))
    with pytest.raises(AssertionError):  # an EmulationError is one
        many_random_checks(machine)


def many_random_checks(machine: Machine) -> None:
    for seed in range(60):
        random_check(machine, seed)
