"""What an algorithm should move, by formula, to hold against what a recording says it moved."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flashviz.checks import models
from flashviz.checks.traffic import Traffic, traffic
from flashviz.recording import Recording


@dataclass(frozen=True)
class Model:
    """Elements that cross HBM, by tensor: ``{name: (read, written)}``. Prints as a table.

    Args:
        algorithm: whose formula.
        elements: by tensor.
        itemsizes: bytes of an element by tensor, 4 where not named.
    """

    algorithm: str
    elements: Mapping[str, tuple[int, int]]
    itemsizes: Mapping[str, int] = field(default_factory=dict)

    def bytes_of(self, tensor: str) -> tuple[int, int]:
        """Bytes of a tensor that are read and written."""
        read, written = self.elements.get(tensor, (0, 0))
        size = self.itemsizes.get(tensor, 4)
        return size * read, size * written

    @property
    def bytes_read(self) -> int:
        """Bytes out of HBM."""
        return sum(self.bytes_of(name)[0] for name in self.elements)

    @property
    def bytes_written(self) -> int:
        """Bytes into HBM."""
        return sum(self.bytes_of(name)[1] for name in self.elements)

    def differences(self, counted: Traffic) -> list[str]:
        """Where a count and the formula differ, a line for each tensor and direction; empty where they agree."""
        out = []
        for name in dict.fromkeys([*self.elements, *counted.tensors]):
            want = self.bytes_of(name)
            found = counted.tensors.get(name)
            have = (found.bytes_read, found.bytes_written) if found else (0, 0)
            for way, a, b in zip(("read", "written"), want, have, strict=True):
                if a != b:
                    out.append(f"{name}: {b:,} bytes {way}, the formula says {a:,}")
        return out

    def __str__(self) -> str:
        rows = [("tensor", "bytes read", "bytes written")]
        for name in self.elements:
            read, written = self.bytes_of(name)
            rows.append((name, f"{read:,}", f"{written:,}"))
        rows.append(("all", f"{self.bytes_read:,}", f"{self.bytes_written:,}"))
        widths = [max(len(row[n]) for row in rows) for n in range(3)]
        lines = [f"{a:{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows]
        return "\n".join([f"{self.algorithm}, by formula", *lines])

    __repr__ = __str__


def traffic_model(algorithm: Any, **params: Any) -> Model:
    """What an algorithm moves across HBM, by formula.

    Args:
        algorithm: its name (``"flash_attention_2"``), or a run or recording, whose name and sizes are taken.
        params: sizes and options, as in ``run.params``: Nq, Nk, d, Br, Bc, causal, B, Hq, Hkv, …; they replace a run's.

    Raises:
        ValueError: there is no formula of that name, or a size that it needs is missing.

    >>> traffic_model("flash_attention_2", Nq=8, Nk=8, d=4, Br=4, Bc=4)
    flash_attention_2, by formula
    tensor  bytes read  bytes written
    Q              128              0
    K              256              0
    V              256              0
    O                0            128
    L                0             32
    all            640            160
    """
    if not isinstance(algorithm, str):
        recording: Recording | None = algorithm if isinstance(algorithm, Recording) else algorithm.recording
        params = {**(recording.params if recording is not None else algorithm.params), **params}
        algorithm = recording.algorithm if recording is not None else algorithm.algorithm
    known = sorted(m.name for m in pkgutil.iter_modules(models.__path__))
    if algorithm not in known:
        raise ValueError(f"no formula for {algorithm!r}; there are {', '.join(known)}")
    module = importlib.import_module(f"{models.__name__}.{algorithm}")
    try:
        elements = module.model(params)
    except KeyError as missing:
        raise ValueError(f"the formula of {algorithm} needs {missing.args[0]}=") from None
    sizes = getattr(module, "itemsizes", None)
    return Model(algorithm, elements, sizes(params) if sizes else {})


def check_traffic(run: Any) -> list[str]:
    """Where a run's count and its formula differ; an empty list where they agree."""
    return traffic_model(run).differences(traffic(run))
