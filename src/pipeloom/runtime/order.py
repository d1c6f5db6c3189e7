"""The order in which ranks call the pipelines that they have in common.

Where one rank calls two pipelines in another order than the rest, each waits for the other, and neither pipeline sees a
mistake of its own. So all pipelines of the same ranks count their calls together.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TypeAlias

Place: TypeAlias = tuple[str, str]
"""A pipeline and a call of it, by name."""

_REMEMBERED = 64
"""How many calls are remembered; ranks are never further apart without waiting."""
_ORDERS: dict[str, Order] = {}


def order_of(group: str) -> Order:
    """That of the pipelines of one process group."""
    return _ORDERS.setdefault(group, Order())


@dataclass(slots=True)
class Order:
    """What this rank called, and what it has heard that others did, by the number of the call.

    Calls from threads other than the main one are not counted, as they may come at any time; nor is anything once a
    call has failed, as not all ranks need have made it.
    """

    _own: dict[int, Place] = field(default_factory=dict)
    _heard: defaultdict[int, dict[int, Place]] = field(default_factory=lambda: defaultdict(dict))
    _next: int = 0
    _ended: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def call(self, place: Place) -> tuple[int | None, str | None]:
        """This rank makes a call: its number, and what is wrong with it."""
        with self._lock:
            if self._ended or threading.current_thread() is not threading.main_thread():
                return None, None
            number, self._next = self._next, self._next + 1
            self._own[number] = place
            self._own.pop(number - _REMEMBERED, None)
            others = self._heard.pop(number, {}).items()
            return number, next((_wrong(place, *other) for other in others if other[1][0] != place[0]), None)

    def hear(self, rank: int, number: int, place: Place) -> tuple[str, str] | None:
        """Another rank made a call: the pipeline that this one called instead, and what is wrong."""
        with self._lock:
            if self._ended:
                return None
            own = self._own.get(number)
            if own is None:
                if number >= self._next:
                    self._heard[number][rank] = place
                return None
            return (own[0], _wrong(own, rank, place)) if own[0] != place[0] else None

    def leave(self, pipeline: str) -> None:
        """This rank closes a pipeline, and does not make the calls of it that others may be in."""
        with self._lock:
            self._ended |= any(place[0] == pipeline for heard in self._heard.values() for place in heard.values())

    def end(self) -> None:
        """A call has failed."""
        with self._lock:
            self._ended = True


def _wrong(own: Place, rank: int, other: Place) -> str:
    return (
        f"rank {rank} called {_named(other)} where this rank called {_named(own)}; "
        "all ranks call their pipelines in the same order"
    )


def _named(place: Place) -> str:
    pipeline, call = place
    return f"{call} of pipeline {pipeline.rsplit('/', 1)[-1]}"
