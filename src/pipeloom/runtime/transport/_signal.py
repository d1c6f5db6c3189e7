"""A flag between threads that a `poll` can wait for, and a look at whether something can be read."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterable
from typing import Protocol, TypeVar


class Source(Protocol):
    """What has a descriptor."""

    def fileno(self) -> int:
        """The descriptor."""


AnySource = TypeVar("AnySource", bound=Source)


def readable(sources: Iterable[AnySource], seconds: float = 0.0) -> list[AnySource]:
    """Those of `sources` that can be read, as soon as one can, or after so long.

    `select.select` refuses descriptors above 1023.
    """
    by_descriptor = {each.fileno(): each for each in sources}
    poll = select.poll()
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    return [by_descriptor[descriptor] for descriptor, _ in poll.poll(1000 * seconds)]


class Signal:
    """Polls readable while it is raised."""

    def __init__(self) -> None:
        self._reads, self._writes = os.pipe()
        os.set_blocking(self._reads, False)
        os.set_blocking(self._writes, False)

    def fileno(self) -> int:
        return self._reads

    def set(self) -> None:
        with contextlib.suppress(BlockingIOError):  # then it has been raised often enough
            os.write(self._writes, b"!")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._reads, 1 << 16)

    def close(self) -> None:
        os.close(self._reads)
        os.close(self._writes)
