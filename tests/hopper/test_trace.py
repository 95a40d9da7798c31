"""FlashAttention-3 as traced: each role names what it does, in the order of its loops, and replaying it gives the kernel's numbers."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hopper.machine import Machine

import flashviz as fv
from flashviz import cuda
from flashviz.cuda import cpu
from flashviz.cuda.trace import DEFINE, KernelTrace
from flashviz.programs.flash_attention_3 import one_by_one, roles
from flashviz.programs.replay import ReplayError, check_outputs, most_actions, replay

if not cpu.status().usable or sys.platform != "linux":
    pytest.skip("needs Linux and a C++ compiler: apt-get install g++", allow_module_level=True)

SIZES = {64: {"Br": 192, "Bc": 128, "stages": 3, "consumers": 3}, 128: {"Br": 128, "Bc": 128, "stages": 2}}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine("flash_attention_3", tmp_path_factory.mktemp("traced"), defines=(DEFINE,))


def traced(
    machine: Machine, Nq: int, Nk: int, d: int, causal: bool, heads: int = 1, multiprocessors: int = 2
) -> tuple[fv.FlashAttention3, KernelTrace, tuple[np.ndarray, np.ndarray]]:
    """The program for a launch, what the launch wrote down, and its O and L."""
    rng = np.random.default_rng(Nq)
    Q, K, V = (rng.standard_normal((1, h, n, d)).astype("f2") for h, n in ((heads, Nq), (1, Nk), (1, Nk)))
    O, L = np.full(Q.shape, np.nan, np.float16), np.full(Q.shape[:3], np.nan, np.float32)
    sizes = SIZES[d]
    template = {"T": "half", "D": d, "Br": sizes["Br"], "Bc": 128, "Causal": int(causal), "Stages": sizes["stages"]}
    given = {"Q": Q, "K": K, "V": V, "O": O, "L": L, "Nq": Nq, "Nk": Nk, "Hq": heads, "Hkv": 1}
    machine.launch(cuda.Kernel("flash_attention_3", template), given, multiprocessors=multiprocessors)
    fa = fv.FlashAttention3(Q, K, V, **sizes, causal=causal, multiprocessors=multiprocessors, keep_values=0)
    return fa, machine.traces[0], (O.astype("f4"), L)


CASES = [
    (300, 300, 64, True, 1, 2),
    (700, 520, 64, True, 1, 1),  # rows and whole row blocks that see no key
    (1, 1, 128, False, 1, 1),  # a consumer without rows
    (300, 200, 128, False, 2, 3),
    (250, 400, 128, True, 2, 1),
]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_each_role_does_what_the_program_says_and_gives_the_same_numbers(
    machine: Machine, case: tuple[Any, ...], late: bool
) -> None:
    machine.late, machine.seed = late, case[0]
    fa, trace, outputs = traced(machine, *case)
    assert len(trace.blocks) == fa.grid
    for number, block in enumerate(trace.blocks):
        fa.begin(number)
        loops = {role: [(act.__name__, tiles) for act, tiles in acts] for role, acts in roles(fa).items()}
        named: dict[str, list[Any]] = {}
        for action in block.actions:
            named.setdefault(action.role, []).append((action.name, fa.arguments(action)))
        assert named == loops
        assert block.block == fv.Block(0, 0, number)
    assert most_actions(fa, one_by_one)[0] >= max(
        sum(a.role == role for a in block.actions) for block in trace.blocks for role in ("producer", "consumer 1")
    )
    again = fv.FlashAttention3(fa.a.Q, fa.a.K, fa.a.V, **SIZES[case[2]], causal=case[3], multiprocessors=case[5])
    replay(again, [trace])
    result = again.run()
    check_outputs(again, outputs, result)
    assert result.recording.findings == ()
    timed = [e for e in result.recording.events if e.trace is not None and e.trace.role]
    assert {e.trace.role for e in timed} == {"producer", *(f"consumer {w}" for w in again.consumers)}
    assert all(0 < e.trace.start < e.trace.end for e in timed)


def test_a_consumer_passes_over_tiles_that_its_rows_do_not_see(machine: Machine) -> None:
    """Of the last tile, only the first consumer of 64 rows."""
    _, trace, _ = traced(machine, 384, 384, 64, True, multiprocessors=1)
    passed = {(a.role, a.tiles) for a in trace.blocks[0].actions if a.name == "skip"}
    assert passed == {("consumer 1", (0, 1)), ("consumer 2", (0, 1)), ("consumer 1", (1, 2))}


def test_tracing_changes_no_bit(machine: Machine, tmp_path: Path) -> None:
    plain = Machine("flash_attention_3", tmp_path)
    _, _, (O, L) = traced(machine, *CASES[0])
    plain.traces = machine.traces
    _, _, (O2, L2) = traced(plain, *CASES[0])
    assert np.array_equal(O, O2)
    assert np.array_equal(L, L2)


def test_a_role_that_names_what_it_did_not_do_is_refused(machine: Machine) -> None:
    fa, trace, _ = traced(machine, *CASES[3])
    first = trace.blocks[0]

    def told(keep: Any) -> list[KernelTrace]:
        return [replace(trace, blocks=(replace(first, actions=tuple(filter(keep, first.actions))),))]

    with pytest.raises(ReplayError, match=r"nobody can go on: .*consumer 1 before scores"):
        replay(fa, told(lambda action: action.name != "load_k"))
    fa, *_ = traced(machine, *CASES[3])
    lie = replace(first, actions=(replace(first.actions[0], tiles=(0, 9)), *first.actions[1:]))
    with pytest.raises(ReplayError, match=r"tile j=9 of row block i=0"):
        replay(fa, [replace(trace, blocks=(lie,))])
