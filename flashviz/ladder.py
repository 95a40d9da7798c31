"""The ladder: the kernels of chapter 06, from the chapter's first one to the machine's limit, one idea a rung.

One table, read by the programs, the autotuner, `flashviz bench` and the chapter. A rung is a kernel file; how it is launched is
said in its header and nowhere else, so a rung here only names the file, the idea and the template values that are measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Rung:
    """One kernel of a ladder.

    Args:
        name: how ``rung=`` names it, ``0`` … ``6`` or a word.
        kernel: its file in ``kernels/``, without ``.cu``.
        idea: what it changes, in a few words.
        dtype: what Q, K, V and O are, ``"float32"`` or ``"float16"``; a rung of 16 bits also takes bfloat16.
        measured: template values (without D, T and flags) that are measured for a head dimension.
        alone: head dimension and Bc of blocks that have a multiprocessor to themselves: their registers leave no room for two.
        function: the public function that runs it, where that is not ``rung=`` of the ladder's own.
    """

    name: int | str
    kernel: str
    idea: str
    dtype: str = "float32"
    measured: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    alone: tuple[tuple[int, int], ...] = ()
    function: str = ""

    @property
    def label(self) -> str:
        """``rung 3``, or its word."""
        return f"rung {self.name}" if isinstance(self.name, int) else self.name

    def each(self, d: int, Bc: int) -> int:
        """Blocks that share a multiprocessor, as :func:`flashviz.cuda.choose_splits` asks: 1 or 2."""
        return 1 if (d, Bc) in self.alone else 2


PREFILL: tuple[Rung, ...] = (
    Rung(
        0,
        "flash_attention_2",
        "as one would first write it",
        "float32",
        {64: {"Br": 64, "Bc": 64}, 128: {"Br": 64, "Bc": 32}},
    ),
    Rung(
        1,
        "flash_attention_2_warps",
        "a warp owns rows; the carries are in registers",
        measured={64: {"Br": 64, "Bc": 64, "Rows": 8}, 128: {"Br": 64, "Bc": 64, "Rows": 8}},
    ),
    Rung(
        2,
        "flash_attention_2_registers",
        "every number read from shared memory serves several products",
        measured={64: {"Br": 128, "Bc": 64, "Rows": 8}, 128: {"Br": 256, "Bc": 32, "Rows": 8}},
    ),
    Rung(
        "tf32",
        "flash_attention_2_tf32",
        "tensor cores for float32: three TF32 products",
        measured={64: {"Br": 128, "Bc": 32, "Rows": 32}, 128: {"Br": 128, "Bc": 48, "Rows": 16}},
    ),
    Rung(
        3,
        "flash_attention_2_mma",
        "16-bit inputs, tensor cores, scores stay in registers",
        "float16",
        {64: {"Br": 64, "Bc": 64}, 128: {"Br": 64, "Bc": 64}},
    ),
    Rung(
        4,
        "flash_attention_2_async",
        "copies run while the tensor cores do; no bank conflicts",
        "float16",
        {64: {"Br": 64, "Bc": 64, "Layout": 2}, 128: {"Br": 64, "Bc": 64, "Layout": 2}},
    ),
    Rung(
        5,
        "flash_attention_2_tuned",
        "more products a load, fewer instructions between them, sizes by search",
        "float16",
        {
            64: {"Br": 128, "Bc": 64, "Warps": 4, "Stages": 2},
            128: {"Br": 128, "Bc": 64, "Warps": 4, "Stages": 2},
        },
    ),
    Rung(
        6,
        "flash_attention_3",
        "on Hopper: one thread asks for tiles, warpgroups only compute",
        "float16",
        {64: {"Br": 192, "Bc": 128, "Stages": 3}, 128: {"Br": 128, "Bc": 128, "Stages": 2}},
        function="flash_attention_3",
    ),
)
DECODE: tuple[Rung, ...] = (
    Rung(
        0,
        "flash_decoding",
        "splits, as one would first write them",
        "float32",
        {64: {"Br": 1, "Bc": 64}, 128: {"Br": 1, "Bc": 32}},
    ),
    Rung(
        1,
        "flash_decoding_vectors",
        "16 bytes a load, several keys a warp in flight",
        "float16",
        {64: {"Bc": 256, "Warps": 8}, 128: {"Bc": 128, "Warps": 8}},
    ),
    Rung(
        2,
        "flash_decoding_heads",
        "the queries of a group share each key, on tensor cores",
        "float16",
        {64: {"Bc": 128, "Warps": 8}, 128: {"Bc": 128, "Warps": 8}},
        alone=((128, 128), (128, 192)),
    ),
)


def rung(name: int | str, ladder: tuple[Rung, ...] = PREFILL) -> Rung:
    """The rung of that name. Raises ValueError naming those there are.

    >>> rung(3).kernel
    'flash_attention_2_mma'
    """
    for one in ladder:
        if one.name == name and isinstance(name, type(one.name)) and not isinstance(name, bool):
            return one
    raise ValueError(f"rung={name!r} is none of {', '.join(repr(one.name) for one in ladder)}")


def rung_to_run(name: int | str, ladder: tuple[Rung, ...] = PREFILL) -> Rung:
    """The rung of that name, for the function that takes ``rung=``. Raises ValueError also where another function runs it.

    >>> rung_to_run(6)
    Traceback (most recent call last):
    ValueError: rung=6 is flash_attention_3, with a program of its own: call fv.flash_attention_3(Q, K, V, …)
    """
    found = rung(name, ladder)
    if found.function:
        raise ValueError(
            f"rung={name!r} is {found.kernel}, with a program of its own: call fv.{found.function}(Q, K, V, …)"
        )
    return found
