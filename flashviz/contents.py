"""What slots hold while an algorithm is performed: arrays, how often each was updated, and copies that are under way."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flashviz.recording import Key


class Arrival(NamedTuple):
    """A copy that will land: where, what, at which level, and where it comes from."""

    to: Key
    array: np.ndarray
    level: int
    source: Key


class Contents:
    """The content of every slot, by key: a name for a slot of the grid, (launch, block, name) for one of a block.

    An asynchronous copy lands when its group is waited for. Where a block has roles, each role waits for itself, so for every
    slot the group that filled it is kept, and for every role the groups it has waited for.
    """

    def __init__(self) -> None:
        self._arrays: dict[Key, np.ndarray] = {}
        self._levels: dict[Key, int] = {}
        self._pending: dict[str, list[Arrival]] = {}
        self._filled: dict[Key, str] = {}
        self._waited: set[tuple[str, str]] = set()

    def begin_block(self) -> None:
        """A block begins, or a launch: what belongs to the grid stays, all else is empty, and nothing is under way."""
        self._arrays = {k: v for k, v in self._arrays.items() if isinstance(k, str)}
        self._levels = {k: v for k, v in self._levels.items() if isinstance(k, str)}
        self._pending.clear()
        self._filled.clear()
        self._waited.clear()

    def get(self, key: Key) -> np.ndarray | None:
        """What a slot holds; None where nothing was written."""
        return self._arrays.get(key)

    def level(self, key: Key, default: int = 0) -> int:
        """How often it was updated."""
        return self._levels.get(key, default)

    def put(self, key: Key, array: np.ndarray | None, level: int, group: str = "") -> None:
        """A slot holds this from now on (or, with None, has only a level); ``group`` is the copy that brought it."""
        if array is not None:
            self._arrays[key] = array
        self._levels[key], self._filled[key] = level, group

    def send(self, group: str, arrivals: list[Arrival]) -> None:
        """Copies begin; they land when ``group`` is waited for."""
        self._pending.setdefault(group, []).extend(arrivals)

    def wait(self, group: str, role: str) -> None:
        """``role`` has waited for ``group``: its copies land."""
        self._waited.add((role, group))
        for arrival in self._pending.pop(group, []):
            self.put(arrival.to, arrival.array, arrival.level, group)

    def arriving(self, key: Key) -> str | None:
        """The group of a copy into a slot that is under way; None where there is none."""
        return next((group for group, moves in self._pending.items() if any(m.to == key for m in moves)), None)

    def leaving(self, key: Key) -> list[str]:
        """The groups of copies out of a slot that are under way."""
        return [group for group, moves in self._pending.items() if any(m.source == key for m in moves)]

    def unseen(self, key: Key, role: str) -> str:
        """The group that filled a slot and that ``role`` has not waited for; empty where it may read, as where there are no roles."""
        group = self._filled.get(key, "")
        return group if role and group and (role, group) not in self._waited else ""
