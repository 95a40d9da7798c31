"""The kernels of chapter 2: what their files say, and what a launch gives them, with a CuPy made of NumPy."""

from __future__ import annotations

import re
from typing import Any

import fake_cupy
import numpy as np
import pytest
from programs.oracle import attention, bound

import flashviz as fv
from flashviz import cuda
from flashviz.cuda import cpu, sources
from flashviz.programs.flash_attention_1 import FlashAttention1
from flashviz.programs.standard_attention import KERNELS, StandardAttention

FILES = ("flash_attention_1", "standard_attention")


@pytest.mark.parametrize(
    ("file", "program"), [("flash_attention_1", FlashAttention1), ("standard_attention", StandardAttention)]
)
def test_actions_have_the_programs_words_in_their_order(file: str, program: Any) -> None:
    source = cuda.find(file)
    assert list(source.trace_ids) == list(program.action_names())
    loops = dict(zip(*[iter(program.loop)] * 2, strict=True)).values()
    for name, variables in re.findall(r"TRACE\((\w+), ([^)]*)\);", source.text):
        code = getattr(program, name).__wrapped__.__code__
        given = code.co_varnames[1 : code.co_argcount]  # the loops an action is in; else its block's row block, or 0
        assert variables.split(", ") == list(given) or (not given and variables in ("i", "0")), name
        assert set(given) <= set(loops)


@pytest.mark.parametrize(("file", "count"), [("flash_attention_1", 4), ("standard_attention", 4)])
def test_each_barrier_says_what_it_protects(file: str, count: int) -> None:
    lines = [line for line in cuda.find(file).text.splitlines() if "__syncthreads()" in line]
    assert len(lines) == count
    assert all(len(line.partition("//")[2].split()) > 5 for line in lines)


@pytest.mark.parametrize("file", FILES)
def test_every_carve_is_read(file: str) -> None:
    found = [cuda.find(file, function) for function in cuda.find(file).kernels]
    carves = sources.blank_comments(found[0].text).count("carve.")
    assert carves == sum(len(source.parts) for source in found)


def test_shared_bytes_are_those_of_the_slots() -> None:
    x = np.ones((64, 16))
    slots = FlashAttention1(x, x, x, Br=16, Bc=32).r.recording().slots
    on_chip = {s.name: s.nbytes for s in slots if not s.shared_by_grid}
    assert cuda.find("flash_attention_1").shared_parts({"Br": 16, "Bc": 32, "D": 16}) == on_chip


def arrays(*shape: int) -> list[Any]:
    return list(np.random.default_rng(0).standard_normal((3, *shape), dtype=np.float32))


def test_flash_attention_1_on_a_gpu(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """m and l come back from the kernel and L is made of them; all three outputs start as NaN."""
    machine = fake()
    Q, K, V = arrays(2, 3, 33, 8)

    def kernel(Q: Any, K: Any, V: Any, O: Any, m: Any, l: Any, *numbers: Any) -> None:
        assert all(np.isnan(x).all() for x in (O, m, l))
        O[...], m[...], l[...] = 7, np.arange(33), 2
        m[..., 0], l[..., 0] = -np.inf, 0
        assert [type(n) for n in numbers] == [np.int32, np.int32, np.float32, *[np.int32] * 5]
        assert numbers[:2] == (33, 33)
        assert numbers[3:] == (1, 3, 3, 33, 0)

    monkeypatch.setitem(fake_cupy.KERNELS, "flash_attention_1", kernel)
    run = fv.flash_attention_1(Q, K, V, Br=16, Bc=16, causal=True, device="gpu", record=False)
    assert run.device == "gpu"
    assert (run.O == 7).all()
    assert np.isneginf(run.L[..., 0]).all()
    assert run.L[1, 2, 1:] == pytest.approx(np.arange(1, 33) + np.log(2))
    (launched,) = machine.launches
    assert launched["function"] == "flash_attention_1<16, 16, 8>"
    assert (launched["grid"], launched["block"]) == ((3, 2, 1), (256, 1, 1))
    assert run.recording is None


def test_standard_attention_on_a_gpu(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three launches, S and P handed from one to the next."""
    machine = fake()
    Q, K, V = arrays(1, 2, 33, 8)

    def scores(Q: Any, K: Any, S: Any, *numbers: Any) -> None:
        assert np.isnan(S).all()
        S[...] = Q @ K.swapaxes(-1, -2) * numbers[2]

    def softmax(S: Any, P: Any, *numbers: Any) -> None:
        assert np.isnan(P).all()
        P[...] = np.exp(S) / np.exp(S).sum(-1, keepdims=True)

    def values(P: Any, V: Any, O: Any, *numbers: Any) -> None:
        assert np.isnan(O).all()
        O[...] = P @ V

    for name, kernel in zip(KERNELS, (scores, softmax, values), strict=True):
        monkeypatch.setitem(fake_cupy.KERNELS, name, kernel)
    run = fv.standard_attention(Q, K, V, Br=16, Bc=16, device="gpu", record=False)
    want = fv.standard_attention(Q, K, V, Br=16, Bc=16, device="numpy", record=False)
    assert run.device == "gpu"
    np.testing.assert_allclose(run.O, want.O, atol=1e-5)
    np.testing.assert_allclose(run.L, want.L, atol=1e-5)
    assert [launched["function"] for launched in machine.launches] == [
        *("standard_scores<16, 16, 8>", "standard_softmax<16, 64>", "standard_values<16, 16, 8>"),
    ]
    assert [launched["grid"] for launched in machine.launches] == [(3, 2, 1)] * 3
    assert [launched["block"][0] for launched in machine.launches] == [256, 128, 256]


def test_rows_longer_than_the_softmax_holds_are_refused() -> None:
    S = np.zeros((1, 1, 3, 65), np.float32)
    kernel = cuda.Kernel("standard_attention", {"Br": 4, "Keys": 64}, function="standard_softmax")
    with pytest.raises(cuda.ArgumentError, match="requires Nk <= Keys; got Keys=64, Nk=65"):
        cuda.plan(kernel, (S, S.copy(), 3, 65, 1))


CASES = [  # B, Hq, Hkv, Nq, Nk, d, Br, Bc, causal
    (1, 1, 1, 33, 33, 8, 16, 16, False),
    (2, 6, 2, 5, 70, 16, 16, 16, True),
    (1, 2, 2, 70, 5, 16, 16, 16, True),
    (1, 2, 1, 9, 9, 3, 4, 7, True),
    (1, 1, 1, 5, 2, 8, 2, 4, True),
    (1, 1, 1, 1, 1, 8, 4, 4, False),
    (1, 1, 1, 4, 300, 8, 32, 32, False),
]


@pytest.mark.parametrize("algorithm", [fv.flash_attention_1, fv.standard_attention])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernels_on_the_processor(algorithm: Any, case: tuple[Any, ...]) -> None:
    if not cpu.status().usable:
        pytest.skip(cpu.status().reason)
    B, Hq, Hkv, Nq, Nk, d, Br, Bc, causal = case
    rng = np.random.default_rng(Nk)
    Q, K, V = (rng.standard_normal((B, h, n, d), dtype="float32") for h, n in ((Hq, Nq), (Hkv, Nk), (Hkv, Nk)))
    got = algorithm(Q, K, V, Br=Br, Bc=Bc, causal=causal, record=False, device="cpu")
    O, L = attention(Q, K, V, causal=causal)
    most_o, most_l = bound(Q, K, V)
    assert got.device == "cpu"
    assert np.abs(got.O - O).max() <= most_o
    assert np.array_equal(np.isneginf(got.L), np.isneginf(L))
    seen = ~np.isneginf(L)
    assert np.abs(got.L[seen] - L[seen]).max() <= most_l
    if Nk == 1:
        assert np.array_equal(got.O, np.broadcast_to(V, got.O.shape))


def test_what_the_kernel_leaves_in_hbm_is_what_the_program_leaves() -> None:
    if not cpu.status().usable:
        pytest.skip(cpu.status().reason)
    Q, K, V = arrays(1, 1, 10, 8)
    O, m, l = np.empty((1, 1, 10, 8), "f4"), np.empty((1, 1, 10), "f4"), np.empty((1, 1, 10), "f4")
    kernel = cuda.Kernel("flash_attention_1", {"Br": 4, "Bc": 4, "D": 8})
    cuda.launch(kernel, (Q, K, V, O, m, l, 10, 10, 1 / np.sqrt(8), 0, 1, 1), device="cpu", poison=True)
    recording = fv.flash_attention_1(Q, K, V, device="numpy").recording
    assert recording is not None
    for i in range(3):
        for name, array in (("O", O), ("m", m), ("l", l)):
            want = recording.values(-1, f"{name}{i}")
            np.testing.assert_allclose(array[0, 0, 4 * i : 4 * i + 4], want, rtol=1e-5, atol=1e-6)
