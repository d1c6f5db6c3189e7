"""What carries bytes to another process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

Run: TypeAlias = tuple[bytes | int, int]
"""Bytes to send: a bytes object or an address, and how many."""


class Link(Protocol):
    """A stream of bytes each way. Nothing here blocks."""

    def take(self, runs: Sequence[Run]) -> int:
        """Send as much of `runs` as there is space for; how many bytes that was."""

    def give(self, address: int, count: int) -> int:
        """Put at most `count` received bytes at `address`; how many that was."""

    def give_bytes(self, count: int) -> bytes:
        """At most `count` received bytes."""

    def refill(self) -> bool:
        """Look for what was received, after `readable` became so; whether there is something to give.

        Raises:
            ConnectionError: the other end is gone.
        """

    @property
    def readable(self) -> int:
        """A descriptor that polls readable when there may be more to give."""

    @property
    def writable(self) -> tuple[int, int]:
        """A descriptor and the poll events on it that mean there may be space."""

    @property
    def hangup(self) -> int:
        """A descriptor that polls as hung up when the other end is gone."""

    def close(self) -> None:
        """Let go of everything."""
