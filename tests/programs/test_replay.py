"""A traced kernel, on the processor, replayed: the same recording as the tile program's, the same output as the kernel's."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs.traced import CASES, Case, an_attention, change

import flashviz as fv
from flashviz import cuda
from flashviz.cuda import cpu
from flashviz.cuda.trace import Action, TracedBlock
from flashviz.events import Begin, Launch, Trace
from flashviz.programs import flash_attention_1 as fa1
from flashviz.programs import flash_attention_2 as fa2
from flashviz.programs import flash_decoding as decoding
from flashviz.programs.replay import ReplayError, most_actions, perform, replay, run_kernel
from flashviz.slots import Block

needs_compiler = pytest.mark.skipif(not cpu.status().usable, reason="no C++ compiler is here")


def bare(recording: fv.Recording) -> list[Any]:
    """Events without their times and the thread counts of launches."""
    events = [replace(e, trace=None) for e in recording.events]
    return [replace(e, threads=(0, 0, 0)) if isinstance(e, Launch) else e for e in events]


def performed(case: Case, seed: int) -> fv.Recording:
    program = case.make(np.random.default_rng(seed))
    case.loops(program)
    return program.run().recording  # type: ignore[attr-defined,no-any-return]


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=str)
@settings(max_examples=8)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_kernel_did_what_the_program_does(case: Case, seed: int) -> None:
    """Random sizes, batches, heads, causal or not."""
    program = case.make(np.random.default_rng(seed))
    _, recording = run_kernel(program, case.loops, lambda: case.launch(program), "cpu")
    expected = performed(case, seed)
    assert fv.same(recording, expected) == []
    assert (recording.source, recording.device, expected.source) == ("kernel", "cpu", "program")
    # More than the order of what depends on what: these kernels perform their actions in the program's very order.
    assert bare(recording) == bare(expected)
    assert recording.steps == expected.steps
    assert recording.findings == expected.findings


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_event_of_a_block_says_where_and_when(case: Case) -> None:
    program = case.make(np.random.default_rng(3))
    _, recording = run_kernel(program, case.loops, lambda: case.launch(program), "cpu")
    whole: dict[Any, Trace] = {}
    for event in recording.events:
        if isinstance(event, Launch):
            assert event.trace is not None
            whole[event.launch] = event.trace
        elif isinstance(event, Begin):
            assert event.trace is not None
            whole[event.launch, event.block] = event.trace
            assert whole[event.launch].start <= event.trace.start <= event.trace.end <= whole[event.launch].end
        elif event.launch >= 0:
            block, trace = whole[event.launch, event.block], event.trace
            assert trace is not None
            assert (trace.role, trace.multiprocessor) == ("", 0)
            assert block.start <= trace.start <= trace.end <= block.end
        else:
            assert event.trace is None
    launches = [whole[n] for n in range(len(recording.launches))]
    assert all(a.end <= b.start for a, b in itertools.pairwise(launches))


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_loops_say_how_large_the_buffer_must_be(case: Case) -> None:
    program = case.make(np.random.default_rng(5))
    rooms = most_actions(program, case.loops)
    assert program.r.in_block is False  # nothing was performed
    with cuda.tracing(rooms) as traces:
        case.launch(program)
    assert [trace.most for trace in traces] == rooms
    assert [trace.capacity for trace in traces] == rooms


@needs_compiler
def test_blocks_that_are_kept() -> None:
    x = np.random.default_rng(0).standard_normal((2, 12, 8), "f4")
    run = fv.flash_attention_2(x, x, x, device="cpu", record=[(0, 1, 2)])
    assert run.recording is not None
    assert run.recording.blocks() == (Block(0, 1, 2),)
    assert all(e.trace is not None for e in run.recording.events if e.launch >= 0)
    kept = fv.flash_attention_2(x, x, x, device="numpy", record=[(0, 1, 2)])
    assert fv.same(run, kept) == []


@needs_compiler
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_inputs_that_are_not_finite_are_no_difference(where: int, value: float) -> None:
    arrays = [np.random.default_rng(0).standard_normal((1, n, 8), "f4") for n in (3, 13, 13)]
    arrays[where][0, 1, 2] = value
    for run in (fv.flash_attention_2, fv.flash_attention_1):
        made = run(*arrays, device="cpu")
        np.testing.assert_array_equal(np.isnan(made.O), np.isnan(run(*arrays, device="numpy").O))


@needs_compiler
def test_a_run_on_the_processor_says_so() -> None:
    x = np.eye(4, dtype="f4")
    run = fv.flash_attention_2(x, x, x, Br=2, Bc=2, device="cpu")
    assert run.recording is not None
    assert (run.device, run.recording.device, run.recording.source) == ("cpu", "cpu", "kernel")
    assert fv.flash_attention_2(x, x, x, device="cpu", record=False).recording is None


@needs_compiler
def test_a_recording_of_a_kernel_is_saved_and_loaded(tmp_path: Path) -> None:
    x = np.eye(4, dtype="f4")
    run = fv.flash_attention_2(x, x, x, Br=2, Bc=2, device="cpu")
    fv.save(run, tmp_path / "run.json")
    assert fv.load(tmp_path / "run.json") == run.recording


@needs_compiler
def test_rows_that_the_softmax_kernel_cannot_hold_are_refused() -> None:
    x = np.ones((4200, 8), "f4")
    with pytest.raises(
        ValueError, match=r"Br=4: with Nk=4200 a block of the softmax kernel holds 2 whole rows of S.*Br=2"
    ):
        fv.standard_attention(x[:4], x, x, Br=4, Bc=64, device="cpu")


# -- kernels that name what they do not do -----------------------------------------------------------------------------


def fails(program: Any, launch: Any, loops: Any, match: str) -> None:
    with pytest.raises(ReplayError, match=match):
        run_kernel(program, loops, launch, "cpu")


@needs_compiler
@pytest.mark.parametrize(
    ("edits", "match"),
    [
        (
            [("li[r] * corr + sum", "li[r] + sum")],
            r"^O\[0, \d, \d\] is .* from the kernel and .*further apart than",
        ),
        ([("mi[r] + logf(li[r])", "mi[r] + log2f(li[r])")], r"^L\[0, 0\] is "),  # A10
        ([("? s * scale :", "? s :")], r"^O\["),
        ([("j < tiles; ++j", "j < tiles; j += 2"), ("TRACE(load_k, j)", "TRACE(load_k, j / 2)")], r"^O\["),
        ([("if (q < Nq) O", "if (q < Nq - 1) O")], r"^O\[0, 9, 0\] is nan from the kernel"),
        ([("TRACE(load_k, j)", "TRACE(load_k, j + 9)")], r"TRACE\(load_k, 9\) cannot be performed: K has tiles 0 to 3"),
        (
            [("TRACE(load_k, j)", "TRACE(load_keys, j)")],
            r"TRACE\(load_keys, 0\) is no action of FlashAttention2; it has",
        ),
        ([("TRACE(load_k, j)", "TRACE(load_k, j, i)")], r"TRACE\(load_k, 0, 0\): .*load_k takes 1 tile coord"),
        ([("TRACE(load_q, i)", "TRACE(load_q, i + 1)")], r"TRACE\(load_q, 1\): .*takes the block's own tile, 0"),
        ([("TRACE_BLOCK(b, h, i)", "TRACE_BLOCK(b, h, i + 1)")], r"block \(0, 0, 2\) .*takes the block's own tile, 2"),
    ],
    ids=lambda edits: edits[0][1] if isinstance(edits, list) else "",
)
def test_what_the_kernel_does_not_do_is_an_error(
    edits: list[tuple[str, str]], match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch, tmp_path, "flash_attention_2", *edits)
    fa = an_attention()
    fails(fa, lambda: fa2.launch_kernel(fa.a, "cpu"), fa2.forward, match)


@needs_compiler
def test_an_action_with_too_few_coordinates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, tmp_path, "flash_attention_1", ("TRACE(scores, j, i)", "TRACE(scores, j)"))
    fa = an_attention(fa1.FlashAttention1)
    fails(fa, lambda: fa1.launch_kernel(fa.a, "cpu"), fa1.forward, r"TRACE\(scores, 0\): .*scores takes 2 tile coord")


@needs_compiler
def test_a_missing_trace_block_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, tmp_path, "flash_attention_2", ("    TRACE_BLOCK(b, h, i);", ""))
    x = np.eye(4, dtype="f4")
    with pytest.raises(cuda.TraceError, match="wrote no trace"):
        fv.flash_attention_2(x, x, x, device="cpu")


def test_launches_out_of_order_are_an_error() -> None:
    q, K = np.ones((1, 8), "f4"), np.ones((8, 8), "f4")
    fd = decoding.FlashDecoding(q, K, K, splits=2)
    block = TracedBlock(Block(), 0, 0, 1, (Action("load_l", (0,), 0, 0, 1),))
    split, combine = (
        cuda.KernelTrace(name, "cpu", (1, 1, 1), (256, 1, 1), (block,)) for name in (decoding.SPLIT, decoding.COMBINE)
    )
    with pytest.raises(ReplayError, match="the second launch waits for the whole first one"):
        replay(fd, [combine, split])


def test_an_action_before_its_data_is_a_finding_and_no_crash() -> None:
    fa = an_attention()
    fa.begin(0)
    for name in ("scores", "softmax"):
        perform(fa, Action(name, (0,), 0, 0, 1), Block())
    assert [finding.slot for finding in fa.r.recording().findings][:2] == ["Qi", "Kj"]
