"""kernels/flash_decoding.cu: what it declares, what a launch is given, and its numbers on the processor."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from programs.oracle import attention, bound

import flashviz as fv
from flashviz import cuda
from flashviz.cuda import ArgumentError, cpu, find
from flashviz.cuda.sources import blank_comments

SPLIT, COMBINE = "flash_decoding_split", "flash_decoding_combine"


def test_actions_have_the_programs_words_in_their_order() -> None:
    actions = [name for function in (SPLIT, COMBINE) for name in find("flash_decoding", function).actions]
    assert tuple(actions) == fv.FlashDecoding.action_names()
    assert len(set(actions)) == len(actions)


def test_each_barrier_says_what_it_protects() -> None:
    lines = [line for line in find("flash_decoding").text.splitlines() if "__syncthreads()" in line]
    assert len(lines) == 7
    assert all(len(line.partition("//")[2].split()) > 5 for line in lines)


@pytest.mark.parametrize("values", [{"Br": 1, "Bc": 64, "D": 128}, {"Br": 15, "Bc": 32, "D": 64}])
def test_shared_bytes_of_the_split_kernel(values: dict[str, int]) -> None:
    Br, Bc, D = values.values()
    parts = find("flash_decoding", SPLIT).shared_parts(values)
    floats = {"q": Br * D, "Kj": Bc * (D + 1), "Vj": Bc * D, "o": Br * D, "Sj": Br * Bc, "m": Br, "l": Br}
    assert parts == {name: 4 * n for name, n in floats.items()}


def test_shared_bytes_of_the_combine_kernel() -> None:
    parts = find("flash_decoding", COMBINE).shared_parts({"Splits": 5, "Br": 15, "D": 64})
    floats = {"ls": 75, "w": 75, "os": 15 * 64, "o": 15 * 64, "m": 15, "l": 15}
    assert parts == {name: 4 * n for name, n in floats.items()}


def test_every_carve_is_read() -> None:
    for function in (SPLIT, COMBINE):
        assert len(find("flash_decoding", function).parts) in (6, 7)
    assert blank_comments(find("flash_decoding").text).count("carve.") == 13


def test_what_both_launches_are_given(fake: Any) -> None:
    machine = fake()
    q, K = np.ones((2, 6, 3, 8), "float32"), np.ones((2, 2, 20, 8), "float32")
    made = fv.flash_decoding(q, K, K, splits=3, Bc=4, causal=True, scale=0.5, device="gpu")
    split, combine = machine.launches
    assert (split["function"], split["grid"], split["block"]) == (f"{SPLIT}<9, 4, 8>", (3, 2, 2), (256, 1, 1))
    assert (combine["function"], combine["grid"]) == (f"{COMBINE}<3, 9, 8>", (1, 2, 2))
    numbers = split["args"][5:]
    assert [n.item() for n in numbers] == [3, 20, 0.5, 1, 6, 2, 3, 20, 0]
    assert [n.dtype for n in numbers] == [np.int32, np.int32, np.float32, *[np.int32] * 6]
    assert [n.item() for n in combine["args"][4:]] == [3, 6, 2]
    assert split["args"][3].shape == (3, 2, 6, 3, 8)
    assert split["args"][4].shape == (3, 2, 6, 3)
    assert all(machine.poisoned)
    assert made.device == "gpu"
    assert made.recording.source == "kernel"
    assert fv.check_traffic(made) == []


def test_rows_that_do_not_fit_the_block_are_refused() -> None:
    q, K, Os, Ls = (np.zeros(s, "float32") for s in ((1, 8, 1, 8), (1, 2, 4, 8), (2, 1, 8, 1, 8), (2, 1, 8, 1)))
    kernel = cuda.Kernel("flash_decoding", {"Br": 3, "Bc": 4, "D": 8}, function=SPLIT)
    with pytest.raises(ArgumentError, match=r"requires Hq / Hkv \* Nq <= Br; got .*Br=3"):
        cuda.plan(kernel, (q, K, K, Os, Ls, 1, 4, 1.0, 0, 8, 2, 2))


CASES = [  # B, Hq, Hkv, Nq, Nk, splits, Bc, causal
    (1, 1, 1, 1, 257, 2, 32, False),
    (2, 3, 3, 5, 257, 2, 32, True),
    (2, 6, 2, 2, 70, 4, 16, True),
    (1, 2, 2, 5, 3, 5, 4, True),
    (1, 1, 1, 1, 5, 4, 2, False),
    (1, 4, 1, 1, 1, 8, 4, False),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernels_on_the_processor(case: tuple[Any, ...]) -> None:
    if not cpu.status().usable:
        pytest.skip(cpu.status().reason)
    B, Hq, Hkv, Nq, Nk, splits, Bc, causal = case
    rng = np.random.default_rng(Nk)
    q, K, V = (rng.standard_normal((B, h, n, 16), dtype="float32") for h, n in ((Hq, Nq), (Hkv, Nk), (Hkv, Nk)))
    options = {"splits": splits, "Bc": Bc, "causal": causal, "record": False}
    got = fv.flash_decoding(q, K, V, **options, device="cpu")
    O, L = attention(q, K, V, causal=causal)
    most_o, most_l = bound(q, K, V)
    assert got.device == "cpu"
    assert np.abs(got.O - O).max() <= most_o
    assert np.array_equal(np.isneginf(got.L), np.isneginf(L))
    seen = ~np.isneginf(L)
    assert np.abs(got.L[seen] - L[seen]).max() <= most_l
    if Nk == 1:
        assert np.array_equal(got.O, np.broadcast_to(V, got.O.shape))


def test_partial_answers_of_the_kernel_are_the_programs() -> None:
    if not cpu.status().usable:
        pytest.skip(cpu.status().reason)
    rng = np.random.default_rng(5)
    q, K, V = (rng.standard_normal((1, 1, n, 8), dtype="float32") for n in (1, 14, 14))
    recording = fv.flash_decoding(q, K, V, splits=5, Bc=4, device="numpy").recording
    Os, Ls = np.empty((5, 1, 1, 1, 8), "float32"), np.empty((5, 1, 1, 1), "float32")
    kernel = cuda.Kernel("flash_decoding", {"Br": 1, "Bc": 4, "D": 8}, function=SPLIT)
    args = (q, K, V, Os, Ls, 1, 14, 1 / math.sqrt(8), 0, 1, 1, 5)
    cuda.launch(kernel, args, device="cpu", poison=True)
    for s in range(5):
        assert np.abs(Os[s, 0, 0] - recording.values(-1, f"Os{s}")).max() < 1e-6
        want = recording.values(-1, f"Ls{s}")
        assert np.isneginf(want) == np.isneginf(Ls[s, 0, 0])
        assert np.isneginf(want) or abs(Ls[s, 0, 0, 0] - want[0]) < 1e-6
