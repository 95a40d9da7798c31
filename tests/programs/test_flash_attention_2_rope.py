"""FlashAttention-2 with rotated loads: the same as rotating first, in numbers, in frames, and in what crosses HBM but for the trip saved."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from programs.oracle import attention, bound

import flashviz as fv
from flashviz.checks.same import same
from flashviz.cuda import cpu, find
from flashviz.events import Move
from flashviz.programs import flash_attention_2_rope as fused
from flashviz.programs.claims import observe
from flashviz.programs.flash_attention_2 import forward


def rotated(Q, K, **options):
    """Q and K as a kernel before the attention's would write them."""
    offset = np.shape(K)[-2] - np.shape(Q)[-2]
    how = {"device": "numpy", "record": False, **options}
    return fv.rope(Q, offset=offset, **how).O, fv.rope(K, **how).O


def arrays(rng, B, Hq, Hkv, Nq, Nk, d):
    return [rng.normal(size=(B, h, n, d)).astype("float32") for h, n in ((Hq, Nq), (Hkv, Nk), (Hkv, Nk))]


@given(
    sizes=st.tuples(*[st.integers(1, 2)] * 3, *[st.integers(1, 9)] * 2, st.integers(1, 4)),
    tiles=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    causal=st.booleans(),
    base=st.sampled_from([10000.0, 100.0]),
    part=st.booleans(),
    seed=st.integers(0, 999),
)
@example((1, 1, 2, 5, 2, 4), (2, 3), True, 10000.0, True, 0)
@settings(max_examples=60)
def test_equal_to_rotating_first_and_to_the_oracle(sizes, tiles, causal, base, part, seed):
    B, Hkv, group, Nq, Nk, half = sizes
    Q, K, V = arrays(np.random.default_rng(seed), B, Hkv * group, Hkv, Nq, Nk, 2 * half)
    how = {"base": base, "rotary_dim": 2 if part else None}
    options = {"Br": tiles[0], "Bc": tiles[1], "causal": causal, "device": "numpy", "record": False}
    got = fv.flash_attention_2_rope(Q, K, V, **options, **how)
    q, k = rotated(Q, K, **how)
    first = fv.flash_attention_2(q, k, V, **options)
    assert np.array_equal(got.O, first.O)
    assert np.array_equal(got.L, first.L)
    O, _ = attention(q, k, V, causal=causal)
    assert np.abs(got.O - O).max() <= bound(q, k, V)[0]


def test_one_query_decodes_the_last_token():
    Q, K, V = arrays(np.random.default_rng(3), 1, 1, 1, 9, 9, 8)
    how = {"Br": 4, "Bc": 4, "device": "numpy", "record": False}
    whole = fv.flash_attention_2_rope(Q, K, V, causal=True, **how).O
    for n in range(9):
        one = fv.flash_attention_2_rope(Q[:, :, n : n + 1], K[:, :, : n + 1], V[:, :, : n + 1], **how).O
        assert one[0, 0, 0] == pytest.approx(whole[0, 0, n], abs=1e-6)


def test_without_the_rotation_it_is_flash_attention_2():
    """A base so large that only the first pair turns, and one row: position 0 turns nothing."""
    Q, K, V = arrays(np.random.default_rng(4), 1, 1, 1, 1, 1, 4)
    how = {"device": "numpy", "record": False}
    assert np.array_equal(fv.flash_attention_2_rope(Q, K, V, **how).L, fv.flash_attention_2(Q, K, V, **how).L)
    assert not np.array_equal(
        fv.flash_attention_2_rope(*arrays(np.random.default_rng(4), 1, 1, 1, 3, 3, 4), **how).O,
        fv.flash_attention_2(*arrays(np.random.default_rng(4), 1, 1, 1, 3, 3, 4), **how).O,
    ), "with three rows it is not"


@pytest.fixture(scope="module")
def two_by_two():
    return fv.flash_attention_2_rope(*np.random.default_rng(2).normal(size=(3, 8, 8)), device="numpy")


def test_the_frames_are_those_of_flash_attention_2_but_for_the_loads(two_by_two):
    plain = fv.flash_attention_2(*np.random.default_rng(2).normal(size=(3, 8, 8)), device="numpy").recording
    mine = two_by_two.recording
    assert mine.findings == ()
    changed = {"load Qi": "load Qi and rotate it", "load Kj, Vj": "load Kj and rotate it, load Vj"}

    def renamed(label):
        for old, new in changed.items():
            label = label[: -len(old)] + new if label.endswith(old) else label
        return label

    assert [s.label for s in mine.steps] == [renamed(s.label) for s in plain.steps]
    assert [s.actions for s in mine.steps] == [s.actions for s in plain.steps]
    assert fv.traffic(mine).transfers == fv.traffic(plain).transfers == 8


def test_the_loads_say_that_they_read_the_angles(two_by_two):
    moves = [e for e in two_by_two.recording.events if isinstance(e, Move)]
    reads = {p.dst: p.reads for e in moves for p in e.parts}
    assert reads["Qi"] == ("Q1", "cq1", "sq1")
    assert reads["Kj"] == ("K1", "ck1", "sk1")
    assert reads["Vj"] == ("V1",)
    assert two_by_two.recording.values(2, "Qi") == pytest.approx(
        rotated(*np.random.default_rng(2).normal(size=(3, 8, 8))[:2])[0][:4]
    )


@pytest.mark.parametrize(("Nq", "Nk", "causal"), [(8, 8, False), (5, 11, True), (11, 5, True)])
def test_traffic(Nq, Nk, causal):
    Q, K, V = arrays(np.random.default_rng(5), 2, 4, 2, Nq, Nk, 6)
    run = fv.flash_attention_2_rope(Q, K, V, Br=3, Bc=4, causal=causal, rotary_dim=4, device="numpy")
    assert fv.check_traffic(run) == []
    plain = fv.traffic_model("flash_attention_2", **run.recording.params)
    assert fv.traffic(run).tensors["K"].bytes_read == 4 * plain.elements["K"][0]
    assert fv.traffic_model(run, rotary_dim=6).differences(fv.traffic(run)), "other angles are seen"


def test_actions_and_sources(two_by_two):
    source = find("flash_attention_2_rope")
    assert (
        list(source.trace_ids) == list(fv.FlashAttention2Rope.action_names()) == list(fv.FlashAttention2.action_names())
    )
    python, cuda = two_by_two.recording.code
    assert [n for n, _, _ in python.lines] == ["load_q", "load_k", "load_v"], "what is FlashAttention-2's is not here"
    assert "tiles.rope(" in python.lines_of("load_k")
    assert cuda.lines_of("load_k").count("rotate_pair(") == 1


def test_shared_memory_is_flash_attention_2s():
    """Fused costs registers, and not a byte of shared memory."""
    sizes = {"Br": 32, "Bc": 16, "D": 64}
    plain = find("flash_attention_2").shared_parts(sizes)
    assert find("flash_attention_2_rope").shared_parts({**sizes, "Pairs": 32}) == plain


CASES = [  # B, Hq, Hkv, Nq, Nk, d, Br, Bc, causal, rotary_dim
    (1, 1, 1, 33, 33, 8, 16, 16, False, None),
    (2, 6, 2, 5, 70, 16, 16, 16, True, 6),
    (1, 2, 2, 70, 5, 16, 16, 16, True, None),
    (1, 2, 1, 9, 9, 4, 4, 7, True, 2),
    (1, 1, 1, 1, 1, 8, 4, 4, False, None),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_on_the_processor(case):
    if not cpu.status().usable:
        pytest.skip(cpu.status().reason)
    B, Hq, Hkv, Nq, Nk, d, Br, Bc, causal, rotary_dim = case
    Q, K, V = arrays(np.random.default_rng(Nk), B, Hq, Hkv, Nq, Nk, d)
    options = {"Br": Br, "Bc": Bc, "causal": causal, "rotary_dim": rotary_dim, "record": False}
    got = fv.flash_attention_2_rope(Q, K, V, device="cpu", **options)
    q, k = rotated(Q, K, rotary_dim=rotary_dim)
    O, L = attention(q, k, V, causal=causal)
    most_o, most_l = (2 * most for most in bound(q, k, V))  # and the rotation's own roundings
    assert got.device == "cpu"
    assert np.abs(got.O - O).max() <= most_o
    seen = ~np.isneginf(L)
    assert np.array_equal(np.isneginf(got.L), ~seen)
    assert np.abs(got.L[seen] - L[seen]).max(initial=0) <= most_l


def test_the_traced_kernel_does_what_the_program_does():
    if not cpu.status().usable:
        pytest.skip(cpu.status().reason)
    Q, K, V = arrays(np.random.default_rng(8), 1, 2, 1, 5, 7, 6)
    options = {"Br": 2, "Bc": 3, "causal": True, "rotary_dim": 4}
    traced, performed = (fv.flash_attention_2_rope(Q, K, V, device=d, **options).recording for d in ("cpu", "numpy"))
    assert (traced.source, performed.source) == ("kernel", "program")
    assert same(traced, performed) == []
    fa = fv.FlashAttention2Rope(Q, K, V, **options)
    assert observe(fa, forward, lambda: fused.launch_kernel(fa, "cpu"))[2] == [], "every access is one that is named"


def test_errors_name_the_value():
    x = np.ones((3, 4, 6))
    for options, message in (
        ({"rotary_dim": 8}, "rotary_dim=8 is more than the d=6"),
        ({"base": -1}, "base=-1"),
        ({"Br": 0}, "Br=0"),
    ):
        with pytest.raises(ValueError, match=message):
            fv.flash_attention_2_rope(*x, device="numpy", **options)
