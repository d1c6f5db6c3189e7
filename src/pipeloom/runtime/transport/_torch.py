"""The transport over torch.distributed: gloo for CPU tensors, NCCL for GPU tensors."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection

import torch
import torch.distributed as dist

from pipeloom.errors import PipelineError
from pipeloom.runtime.transport._carrier import Carrier, Part
from pipeloom.runtime.transport._gloo import Gloo
from pipeloom.runtime.transport._interface import IN_A_MESSAGE, Pending, Tree, Watch
from pipeloom.runtime.transport._local import LocalTransport
from pipeloom.runtime.transport._nccl import Nccl
from pipeloom.runtime.transport._signal import readable
from pipeloom.runtime.transport._tree import Layout, pack


class TorchTransport:
    """Headers go over our own transport, `local`, from processor to processor; tensors over torch.distributed.

    Between ranks that are not among `pairs`, (sender, receiver), tensors go over our own as well. On GPUs each pair
    takes a communicator and its memory.

    So what a message holds is what its own header says, and a rank that fails is noticed while waiting for it. The
    header leaves after the tensors: when it has come, they are on their way. A message of a failed step is received
    like any other, and dropped.
    """

    def __init__(
        self,
        local: LocalTransport,
        group: dist.ProcessGroup,
        device: torch.device,
        watch: Watch | None = None,
        pairs: Collection[tuple[int, int]] | None = None,
    ) -> None:
        self._watch, self._rank, self._pairs = watch, group.rank(), pairs
        self._aborted = False
        self._between = False
        """Whether tensors and their header are being parted or brought together, or receives posted ahead."""
        self._headers = local
        self._waiting: defaultdict[int, deque[_Incoming]] = defaultdict(deque)
        """What was posted and has no header yet."""
        self._coming: set[_Incoming] = set()
        """What has a header and was not waited for."""
        self._carrier: Carrier = (
            Gloo(group, local.name) if device.type == "cpu" else Nccl(group, local.name, device, pairs)
        )
        if watch is not None and device.type != "cpu":
            watch.on_failure(self.abort)

    def begin(self, number: int, about: int = 0) -> None:
        if self._aborted or self._between:
            raise PipelineError(IN_A_MESSAGE)
        self._headers.begin(number, about)
        self._between = True
        for incoming in self._coming:
            self._carrier.drop(incoming.parts)
        self._coming.clear()
        self._waiting.clear()
        self._carrier.begin()
        self._between = False

    def abort(self) -> None:
        """Have all waits for a GPU's communication end, for good."""
        self._aborted = True
        self._carrier.abort()

    def _apart(self, sender: int, receiver: int) -> bool:
        """Whether tensors from `sender` to `receiver` travel apart from their header."""
        return self._pairs is None or (sender, receiver) in self._pairs

    def send(self, rank: int, value: Tree) -> None:
        if not self._apart(self._rank, rank):
            self._headers.send(rank, value)
            return
        header, tensors = pack(value)
        self._between = True
        try:
            self._carrier.send(rank, tensors)
        except RuntimeError as error:
            raise self._failure(rank, error) from error
        self._headers.connections[rank].send(header, ())
        self._between = False

    def receive(self, rank: int) -> Pending:
        if not self._apart(rank, self._rank):
            return self._headers.receive(rank)
        incoming = _Incoming(self, rank)
        waiting = self._waiting[rank]
        waiting.append(incoming)
        while waiting and self._headers.connections[rank].ready():
            self.start_next(rank)
        return incoming

    def start_next(self, rank: int) -> None:
        """Wait for the next header from `rank`, and have its tensors received for the receive that was posted."""
        current, layout = self._headers.connections[rank].head()
        self._between = True
        try:
            parts = self._carrier.receive(rank, layout.specs)
        except RuntimeError as error:
            raise self._failure(rank, error) from error
        if current:
            incoming = self._waiting[rank].popleft()
            incoming.layout, incoming.parts = layout, parts
            self._coming.add(incoming)
        else:
            self._carrier.drop(parts)
        self._between = False

    def finish(self, rank: int, incoming: _Incoming) -> None:
        """Wait for what is coming from `rank`."""
        try:
            for part in incoming.parts:
                self._carrier.finish(part)
        except RuntimeError as error:
            raise self._failure(rank, error) from error
        self._coming.discard(incoming)

    def _failure(self, rank: int, error: RuntimeError) -> Exception:
        return error if self._watch is None else self._watch.failure(rank)

    def flush(self) -> None:
        while not self._flushed():
            if self._watch is not None and readable([self._watch]):
                raise self._watch.failure(self._rank)
        self._headers.flush()

    def _flushed(self) -> bool:
        self._between = True
        done = self._carrier.flush(0.1)
        self._between = False
        return done

    def close(self) -> None:
        self._carrier.close()
        self._headers.close()


class _Incoming:
    """A receive that was posted; it has a layout once its header was read and its tensors are on their way."""

    __slots__ = ("_rank", "_transport", "layout", "parts")

    def __init__(self, transport: TorchTransport, rank: int) -> None:
        self._transport, self._rank = transport, rank
        self.layout: Layout | None = None
        self.parts: list[Part] = []

    def wait(self) -> Tree:
        while self.layout is None:
            self._transport.start_next(self._rank)
        self._transport.finish(self._rank, self)
        tensors = [
            tensor.requires_grad_() if spec.requires_grad else tensor
            for (tensor, _), spec in zip(self.parts, self.layout.specs, strict=True)
        ]
        self.parts = []
        return self.layout.build(tensors)
