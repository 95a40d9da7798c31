"""Roles: parts of a block that run beside each other, each in an order of its own, and wait for each other at barriers.

A role is written as a generator of the actions that it performs. Which role goes first is as open as on a GPU: a program whose
barriers are right gives the same numbers in every order, and one that waits for what never comes is told so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

Act = tuple[Callable[..., None], tuple[int, ...]]
"""An action and what it is given."""


class Deadlock(RuntimeError):
    """No role can go on: each waits for another. The message says what each waits for."""


class WithRoles(Protocol):
    """A program whose block has roles."""

    def missing(self, action: str, *tiles: int) -> list[str]:
        """What an action waits for that has not come yet."""


def side_by_side(program: WithRoles, roles: Mapping[str, Iterator[Act]]) -> None:
    """Perform every role's actions in that role's order. Each goes on until it has to wait; then it is the next one's turn.

    Raises:
        Deadlock: naming each role that is not done, the action it is at and what is missing.
    """
    upcoming = {role: next(acts, None) for role, acts in roles.items()}
    while any(upcoming.values()):
        idle = True
        for role, acts in roles.items():
            while (act := upcoming[role]) is not None and not program.missing(act[0].__name__, *act[1]):
                act[0](*act[1])
                upcoming[role] = next(acts, None)
                idle = False
        if idle:
            stuck = [
                f"{role} before {act[0].__name__}{act[1]} for {', '.join(program.missing(act[0].__name__, *act[1]))}"
                for role, act in upcoming.items()
                if act is not None
            ]
            raise Deadlock(f"nobody can go on: {'; '.join(stuck)}")
