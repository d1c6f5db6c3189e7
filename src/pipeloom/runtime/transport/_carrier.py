"""What carries the tensors of messages, whose headers travel apart from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from pipeloom.runtime.transport._tree import Spec

Part: TypeAlias = tuple[torch.Tensor, dist.Work | None]
"""A tensor on its way, and what ends with its arrival."""


class Backend(Protocol):
    """What torch.distributed calls a backend: some ranks, numbered from 0, and how tensors go between them."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> dist.Work: ...
    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> dist.Work: ...
    def abort(self) -> None: ...
    def shutdown(self) -> None: ...


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


def private(group: dist.ProcessGroup, name: str, ranks: Sequence[int], device: torch.device) -> Backend:
    """What connects these `ranks` of `group`, and nobody else uses: gloo for CPU tensors, NCCL for GPU tensors.

    Each of the ranks calls this, with one name that is new; a rank is counted by its place in `ranks` there. These are
    none of the groups that torch.distributed knows, as `dist.new_group(use_local_synchronization=True)` names them by
    how many groups a process has. Where ranks have made different numbers of them, or one was destroyed, ranks that
    should meet wait for each other under different names, or find what another group has left under theirs.
    """
    base = group.get_group_store()
    store = PrefixStore(name, base)
    rank = ranks.index(group.rank())
    timeout = base.timeout  # type: ignore[attr-defined]  # the stubs do not know it
    if device.type == "cpu":
        return cast(Backend, dist.ProcessGroupGloo(store, rank, len(ranks), timeout))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return cast(Backend, dist.ProcessGroupNCCL(store, rank, len(ranks), options))
