"""Receives that were posted, met in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pipeloom.runtime.transport._interface import Tree


class Posted:
    """The receives posted from one rank. `receive` blocks for the next message from it."""

    def __init__(self, receive: Callable[[], Tree]) -> None:
        self._receive = receive
        self._waiting: deque[_Pending] = deque()

    def post(self) -> _Pending:
        pending = _Pending(self)
        self._waiting.append(pending)
        return pending

    def forget(self) -> None:
        self._waiting.clear()

    def receive_until(self, pending: _Pending) -> None:
        while not pending.done:
            value = self._receive()
            first = self._waiting.popleft()
            first.value, first.done = value, True


class _Pending:
    __slots__ = ("_posted", "done", "value")

    def __init__(self, posted: Posted) -> None:
        self._posted = posted
        self.value: Tree = None
        self.done = False

    def wait(self) -> Tree:
        if not self.done:
            self._posted.receive_until(self)
        value, self.value = self.value, None
        return value
