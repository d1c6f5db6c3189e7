"""What carries the tensors of messages, whose headers travel apart from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist

from pipeloom.runtime.transport._tree import Spec

Part: TypeAlias = tuple[torch.Tensor, dist.Work | None]
"""A tensor on its way, and what ends with its arrival."""


class Carrier(Protocol):
    """Moves dense tensors between ranks over torch.distributed."""

    def begin(self) -> None:
        """A step begins; nobody waits any more for the sends of one that failed."""

    def send(self, rank: int, tensors: Sequence[torch.Tensor]) -> None:
        """Send a copy of the tensors of one message.

        Raises:
            RuntimeError: the backend says that it cannot reach the rank.
        """

    def receive(self, rank: int, specs: Sequence[Spec]) -> list[Part]:
        """Receive the tensors of the next message from `rank`, whose header has come."""

    def finish(self, part: Part) -> None:
        """Wait until a part has arrived; on a GPU, have the current stream wait.

        Raises:
            RuntimeError: the backend says that it will not.
        """

    def drop(self, parts: Sequence[Part]) -> None:
        """Let parts arrive that nobody waits for."""

    def flush(self, seconds: float) -> bool:
        """Whether all sends of this step are over, after so many seconds at most."""

    def abort(self) -> None:
        """Have all waits end, for good, where that takes a call."""

    def close(self) -> None:
        """Let go of the groups."""


def private(group: dist.ProcessGroup, ranks: list[int]) -> dist.ProcessGroup:
    """A group of these ranks of the world, with the backend of `group`. They call this in the same order."""
    made = dist.new_group(ranks, backend=dist.get_backend(group), use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made
