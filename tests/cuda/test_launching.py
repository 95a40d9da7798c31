from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashviz.cuda import ArgumentError, Kernel, LaunchError, Limits, find, plan
from flashviz.cuda.launching import fitting_blocks

SMALL = Limits(shared_bytes=101_376, arch=86)


def arguments(B: int = 2, Hq: int = 4, Hkv: int = 2, Nq: int = 65, Nk: int = 70, D: int = 64) -> dict[str, Any]:
    q, k = np.zeros((B, Hq, Nq, D), np.float32), np.zeros((B, Hkv, Nk, D), np.float32)
    L = np.zeros((B, Hq, Nq), np.float32)
    sizes = {"Nq": Nq, "Nk": Nk, "scale": 0.125, "causal": False, "Hq": Hq, "Hkv": Hkv}
    return {"Q": q, "K": k, "V": k.copy(), "O": q.copy(), "L": L, **sizes}


def kernel(Br: int = 32, Bc: int = 32, D: int = 64, **how: Any) -> Kernel:
    return Kernel("flash_attention_2", {"Br": Br, "Bc": Bc, "D": D}, **how)


def test_all_comes_from_the_kernel_file() -> None:
    planned = plan(kernel(), arguments())
    assert planned.instance == "flash_attention_2<32, 32, 64>"
    assert planned.grid == (3, 4, 2)
    assert planned.block == (512, 1, 1)
    assert planned.shared_bytes == find("flash_attention_2").shared_bytes({"Br": 32, "Bc": 32, "D": 64}) == 37_120
    assert planned.outputs == ("O", "L")
    assert plan(kernel(4, 4), arguments()).block == (32, 1, 1)


def test_a_sequence_and_a_mapping_are_alike() -> None:
    given = arguments()
    by_name, in_order = (plan(kernel(), how).arguments for how in (given, list(given.values())))
    assert list(by_name.items())[5:] == list(in_order.items())[5:]
    assert list(by_name)[: len(given)] == list(given)


def test_what_is_left_out_has_the_headers_default() -> None:
    given = arguments()
    known = plan(kernel(), given).arguments
    assert (known["kv_len"], known["window"]) == (70, 0)
    assert all(isinstance(known[name], np.int32) for name in ("kv_len", "window"))
    some = plan(kernel(), {**given, "kv_len": 5}).arguments
    assert (some["kv_len"], some["window"]) == (5, 0)
    assert plan(kernel(), [*given.values(), 5]).arguments["kv_len"] == 5
    scaled = plan(kernel(), {n: v for n, v in given.items() if n != "scale"}).arguments
    assert scaled["scale"] == np.float32(1 / 8)
    with pytest.raises(ArgumentError, match="Hkv is missing"):
        plan(kernel(), {n: v for n, v in given.items() if n != "Hkv"})
    with pytest.raises(ArgumentError, match=r"takes 13 arguments .*; 10 were given"):
        plan(kernel(), list(given.values())[:-1])
    with pytest.raises(ArgumentError, match="requires kv_len <= Nk; got Nk=70, kv_len=71"):
        plan(kernel(), {**given, "kv_len": 71})


def test_what_is_given_wins() -> None:
    planned = plan(kernel(grid=(1,), block=(16, 2), shared_bytes=99), arguments())
    assert (planned.grid, planned.block, planned.shared_bytes) == ((1, 1, 1), (16, 2, 1), 99)


def test_one_kernel_of_several_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "two.cu"
    path.write_text(
        "// @kernel one\n// @grid N\n__global__ void one(float* x, int N) {}\n"
        "// @kernel two\n// @grid ceil(N / 2)\n// @block 64\n__global__ void two(float* x, int N) {}\n"
    )
    first, second = (plan(Kernel(path, function=name), (np.zeros(5, np.float32), 5)) for name in ("", "two"))
    assert (first.instance, first.grid, first.block) == ("one", (5, 1, 1), (128, 1, 1))
    assert (second.instance, second.grid, second.block) == ("two", (3, 1, 1), (64, 1, 1))


def test_leading_dimensions_of_one_may_be_left_out() -> None:
    given = arguments(1, 1, 1)
    flat = {n: v.reshape(v.shape[2:]) if isinstance(v, np.ndarray) else v for n, v in given.items()}
    assert plan(kernel(), flat).grid == (3, 1, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"Nq": 66}, r"argument Q is \[B, Hq, Nq, D\]; got shape \(2, 4, 65, 64\), Nq=65, but argument Nq=66"),
        ({"Hkv": 4}, r"argument K .*Hkv=2, but argument Hkv=4"),
        ({"V": np.zeros((2, 2, 69, 64), np.float32)}, "argument V .*Nk=69, but argument Nk=70"),
        ({"K": np.zeros((1, 2, 70, 64), np.float32)}, "argument K .*B=1, but B=2 in argument Q"),
        ({"L": np.zeros((1, 2, 4, 65), np.float32)}, r"argument L is \[B, Hq, Nq\]; got 4 dimensions"),
    ],
)
def test_shapes_that_disagree(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        plan(kernel(), {**arguments(), **changes})


def test_the_template_holds_for_shapes_too() -> None:
    with pytest.raises(ArgumentError, match=r"argument Q .*D=64, but template value D=32"):
        plan(kernel(D=32), arguments())


def test_heads_that_do_not_group() -> None:
    with pytest.raises(ArgumentError, match="requires Hq % Hkv == 0; got Hq=3, Hkv=2"):
        plan(kernel(), arguments(Hq=3))


def test_too_much_shared_memory_names_a_block_size_that_fits() -> None:
    """C03: the message of the style guide, word for word."""
    with pytest.raises(LaunchError) as caught:
        plan(kernel(64, 64, 128), arguments(D=128), SMALL)
    assert str(caught.value) == (
        "Br=64, Bc=64, d=128 needs 147,968 bytes of shared memory a block; this GPU allows 101,376; "
        "Br=32, Bc=32 fits (69,888)."
    )


@pytest.mark.parametrize("sizes", [(64, 64, 64), (32, 32, 128), (64, 64, 128), (128, 16, 96), (8, 256, 40)])
@pytest.mark.parametrize("allowed", [49_152, 65_536, 101_376, 166_912, 232_448])
def test_the_size_named_fits_and_none_larger_does(sizes: tuple[int, int, int], allowed: int) -> None:
    source = find("flash_attention_2")
    template = dict(zip(("Br", "Bc", "D"), sizes, strict=True))
    best = fitting_blocks(source, template, allowed)
    assert best is not None
    assert source.shared_bytes(best) <= allowed
    if source.shared_bytes(template) <= allowed:
        assert best == template
    for Br, Bc in ((2 * best["Br"], best["Bc"]), (best["Br"], 2 * best["Bc"])):
        if Br <= template["Br"] and Bc <= template["Bc"]:
            assert source.shared_bytes({"Br": Br, "Bc": Bc, "D": template["D"]}) > allowed


def test_nothing_fits() -> None:
    with pytest.raises(LaunchError, match="no block size of flash_attention_2 fits"):
        plan(kernel(D=64), arguments(), Limits(shared_bytes=100))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"grid": (1, 65_536, 1)}, r"65,536 blocks in y \(Hq\); this GPU allows 65,535"),
        ({"grid": (1, 1, 65_536)}, r"65,536 blocks in z \(B\)"),
        ({"grid": (2**31, 1, 1)}, "2,147,483,648 blocks in x .*allows 2,147,483,647"),
        ({"grid": (0, 1, 1)}, "has no blocks"),
        ({"block": 1025}, "1,025 threads; this GPU allows 1 to 1,024"),
        ({"block": (1, 1, 65)}, "at most 64 of them in z"),
        ({"block": 0}, "0 threads"),
        ({"block": (1, 1, 1, 1)}, "1 to 3 extents"),
    ],
)
def test_grid_and_block_limits(how: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        plan(kernel(**how), arguments())


def test_a_gpu_that_is_too_old() -> None:
    with pytest.raises(LaunchError, match="needs sm_75 or newer; this GPU is sm_60"):
        plan(kernel(), arguments(), Limits(arch=60))


def test_no_rows() -> None:
    with pytest.raises(LaunchError, match="nothing to compute in x"):
        plan(kernel(), arguments(Nq=0))
