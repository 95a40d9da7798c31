"""The Hopper kernels, as far as no GPU is needed: the order of work on the processor, machine code by NVRTC, launches that are refused."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashviz import cuda
from flashviz.cuda import cpu
from flashviz.cuda.machine_code import sections
from flashviz.cuda.nvrtc import Nvrtc, NvrtcMissingError

ROOT = Path(__file__).resolve().parents[2]

# -- the order of work -------------------------------------------------------------------------------------------------

WALK = """// @kernel walked
// @block  32
// @inout  seen, load
#include "include/walk.cuh"
template <int Br, int Bc, bool Causal>
__global__ void walked(int* seen, int* load, int Nq, int Nk, int heads, int row_blocks, int most) {
    if (threadIdx.x) return;
    for (Walk<Br, Bc, Causal> at(Nq, Nk, heads); at.more; at.next()) {
        seen[(at.head * row_blocks + at.i) * most + at.j] += 1;
        load[blockIdx.x] += 1;
    }
}
"""

ONE_TURN = """// @kernel one_turn
// @block  32
// @inout  found
#include "include/walk.cuh"
template <int Br, int Bc>
__global__ void one_turn(int* found, int Nq, int turn) {
    if (threadIdx.x) return;
    Walk<Br, Bc, false> at(Nq, 1, 40000);
    at.turn = turn;
    at.next_rows();
    found[2 * blockIdx.x] = at.head;
    found[2 * blockIdx.x + 1] = at.i;
}
"""


@pytest.mark.skipif(not cpu.status().usable, reason="no C++ compiler is here: pip install ziglang")
@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 900), st.integers(1, 900), st.integers(1, 5), st.integers(1, 9), st.sampled_from([(128, 64), (192, 128)]), st.booleans()
)  # fmt: skip
def test_every_tile_is_walked_once(
    tmp_path_factory: pytest.TempPathFactory,
    Nq: int,
    Nk: int,
    heads: int,
    blocks: int,
    size: tuple[int, int],
    causal: bool,
) -> None:
    path = tmp_path_factory.getbasetemp() / "walked.cu"
    if not path.exists():
        path.write_text(WALK)
    (Br, Bc), rows = size, -(-Nq // size[0])
    most = -(-Nk // Bc)
    seen, load = np.zeros((heads, rows, most), np.int32), np.zeros(blocks, np.int32)
    kernel = cuda.Kernel(path, {"Br": Br, "Bc": Bc, "Causal": causal}, grid=(blocks,))
    cuda.launch(kernel, (seen, load, Nq, Nk, heads, rows, most), device="cpu")
    ends = -(-Nq // 64) * 64 - np.arange(rows)[::-1] * Br  # the last row block ends with the last 64 rows
    keys = np.clip(ends + Nk - Nq, 0, Nk) if causal else np.full(rows, Nk)
    tiles = np.maximum(1, -(-keys // Bc))
    assert (seen == (np.arange(most) < tiles[:, None])).all()
    if causal:  # a long and a short one together: no block has more than its share of pairs, the heaviest ones at worst
        heaviest = (tiles + tiles[::-1]).max()
        assert load.max() <= -(-rows * heads // (2 * blocks)) * heaviest
    assert load.sum() == heads * tiles.sum()


@pytest.mark.skipif(not cpu.status().usable, reason="no C++ compiler is here: pip install ziglang")
@pytest.mark.parametrize("rows", [1, 3, 7, 1000, 65_535])
def test_row_blocks_are_counted_off_without_dividing(tmp_path: Path, rows: int) -> None:
    """The quotient by way of 2^32 / rows is right for the last of many, too: each block writes the head and row block of its only turn."""
    path = tmp_path / "one_turn.cu"
    path.write_text(ONE_TURN)
    turn = rows * 30_000 // 80  # to a head number that needs 15 bits
    found = np.zeros((80, 2), np.int32)
    kernel = cuda.Kernel(path, {"Br": 64, "Bc": 64}, grid=(80,))
    cuda.launch(kernel, (found, 64 * rows, turn), device="cpu")
    assert (found == np.stack(np.divmod(80 * turn + np.arange(80), rows), 1)).all()


# -- what the compiler makes of them -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    try:
        return Nvrtc()
    except NvrtcMissingError as error:
        pytest.skip(str(error))


def log_of(nvrtc: Nvrtc, source: Any, code: str) -> str:
    instances = [source.signature.instance(values) for values in source.header.instances]
    compiled = nvrtc.compile(code, instances, "90a")
    assert compiled.ok, compiled.problems
    return compiled.log


@pytest.mark.parametrize("function", ["hopper_scores", "hopper_values"])
def test_products_of_the_steps_are_not_serialized(nvrtc: Nvrtc, function: str) -> None:
    source = cuda.find("hopper_steps", function)
    assert "serialized" not in log_of(nvrtc, source, source.assembled)


def test_products_run_beside_the_softmax(nvrtc: Nvrtc) -> None:
    """The assembler makes products wait for each other, and says so, where it cannot tell who uses which registers."""
    source = cuda.find("flash_attention_3")
    assert "serialized" not in log_of(nvrtc, source, source.assembled)
    started = "        wgmma_fence();\n        wgmma_values<T, Bc, D>(o, p, v_part(before.slot));\n        pass_turn();"
    assert source.assembled.count(started) == 1
    branched = source.assembled.replace(started, f"        if (lane != Nk) {{\n{started}\n        }}")
    assert "serialized" in log_of(nvrtc, source, branched)  # so the test can fail


LOOP = re.compile(r"WH{4,8}WH{8}Wx{64,72}W")


def order(cubin: bytes) -> str:
    """The machine code's order in letters: W waits for products or makes ready for them, H a product, x an exponential, in one function."""
    (code,) = sections(cubin).values()
    kinds = {0x1C5: "W", 0x1F0: "H", 0x108: "x"}
    words = (int.from_bytes(code[n : n + 2], "little") & 0x1FF for n in range(0, len(code), 16))
    return "".join(kinds.get(word, "") for word in words)


@pytest.mark.parametrize("values", [{"Br": 192, "D": 64, "Stages": 3}, {"Br": 128, "D": 128, "Stages": 2}])
@pytest.mark.parametrize("causal", [0, 1])
def test_the_exponentials_stay_between_the_two_waits(nvrtc: Nvrtc, values: dict[str, int], causal: int) -> None:
    """In the loop: both products, the wait for the scores, all exponentials, and only then the wait for the values."""
    source = cuda.find("flash_attention_3")
    instance = source.signature.instance({"T": "half", "Bc": 128, "Causal": causal, **values})
    assert LOOP.search(order(nvrtc.compile(source.assembled, [instance], "90a").cubin))


def test_without_the_question_they_do_not(nvrtc: Nvrtc) -> None:
    """What the sign of l in the wait for K is there for; so the test above can fail."""
    source = cuda.find("flash_attention_3")
    asked = "ahead.parity ^ (l[0] + l[1] < 0.f)"
    assert source.assembled.count(asked) == 1
    unasked = source.assembled.replace(asked, "ahead.parity")
    found = nvrtc.compile(unasked, ["flash_attention_3<half, 192, 128, 64, 0, 3>"], "90a")
    assert not LOOP.search(order(found.cubin))


# -- launches ----------------------------------------------------------------------------------------------------------


def plan(Nq: int, Nk: int, D: int = 64, Hq: int = 4, Hkv: int = 2, **more: Any) -> cuda.Plan:
    causal = more.pop("Causal", 1)
    template = {
        "T": "half",
        "Br": 192 if D == 64 else 128,
        "Bc": 128,
        "D": D,
        "Causal": causal,
        "Stages": 3 if D == 64 else 2,
    }
    Q, K = np.zeros((3, Hq, Nq, D), np.float16), np.zeros((3, Hkv, Nk, D), np.float16)
    given = {"Q": Q, "K": K, "V": K.copy(), "O": Q.copy(), "L": np.zeros((3, Hq, Nq), np.float32)}
    return cuda.plan(
        cuda.Kernel("flash_attention_3", template), {**given, "Nq": Nq, "Nk": Nk, "Hq": Hq, "Hkv": Hkv, **more}
    )


def test_a_launch_has_at_most_a_block_a_multiprocessor() -> None:
    assert plan(200, 300).grid == (12, 1, 1)  # two row blocks a head are one pair
    assert plan(200, 300, Causal=0).grid == (24, 1, 1)
    assert plan(4000, 300).grid == (
        126,
        1,
        1,
    )  # an odd number of row blocks a head: the middle ones of two heads are a pair
    assert plan(9000, 300).grid == (132, 1, 1)
    assert (plan(200, 300).block, plan(200, 300, D=128).block) == ((512, 1, 1), (384, 1, 1))
    assert plan(200, 300).arguments["heads"] == 12
    assert plan(200, 300).arguments["scale"] == np.float32(0.125)
    maps = plan(200, 300, D=128).maps
    assert {name: found.box for name, found in maps.items()} == {
        "Q": (64, 64, 2, 1), "K": (64, 128, 2, 1), "V": (64, 128, 2, 1), "O": (64, 64, 2, 1)
    }  # fmt: skip
    assert (maps["Q"].sizes, maps["K"].sizes) == ((64, 200, 2, 12), (64, 300, 2, 6))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"Hq": 4, "Hkv": 3}, "requires Hq % Hkv == 0"),
        ({"heads": 5}, "requires heads == B"),
    ],
)
def test_arguments_that_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(cuda.ArgumentError) as caught:
        plan(20, 30, **change)
    assert words in str(caught.value)


# -- what is checked on a GPU ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """benchmarks/gpu_hopper_steps.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("gpu_hopper_steps")


def test_every_step_is_checked(script: ModuleType) -> None:
    assert set(script.STEPS) == set(cuda.find("hopper_steps").kernels)


@pytest.mark.parametrize(("rows", "columns"), [(16, 64), (32, 128), (64, 256)])
def test_how_a_tile_lies(script: ModuleType, rows: int, columns: int) -> None:
    """As `swizzled` of hopper.cuh says it: chunk c of row r of a panel at c ^ (r % 8). No swizzle: row after row."""
    tile = np.arange(rows * columns).reshape(rows, columns)
    r, c = np.indices(tile.shape)
    place = c // 64 * rows * 64 + r * 64 + (c // 8 % 8 ^ r % 8) * 8 + c % 8
    assert (script.as_it_lies(tile, 128).reshape(-1)[place] == tile).all()
    assert (script.as_it_lies(tile, 0) == tile).all()
    for swizzle in (
        32,
        64,
        128,
    ):  # eight rows of one chunk of 16 bytes touch as many groups of banks as the pattern has
        lies = script.as_it_lies(tile, swizzle).reshape(-1)
        where = np.empty(tile.size, int)
        where[lies] = np.arange(tile.size)
        assert len({int(where[row * columns]) // 8 % 8 for row in range(8)}) == 8
