"""A flag between threads that a `poll` can wait for."""

from __future__ import annotations

import contextlib
import os


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
