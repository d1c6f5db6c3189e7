"""The transport over torch.distributed: gloo for CPU tensors, NCCL for GPU tensors."""

from __future__ import annotations

import contextlib
import queue
import select
import threading
from collections import deque
from collections.abc import Collection
from typing import TypeAlias

import torch
import torch.distributed as dist

from pipeloom.errors import MessageError, PipelineError
from pipeloom.runtime.transport._interface import Pending, Tree, Watch
from pipeloom.runtime.transport._local import LocalTransport
from pipeloom.runtime.transport._tree import Layout, Spec, flat, pack, read

_Works: TypeAlias = "queue.Queue[list[tuple[dist.Work, torch.Tensor]] | None]"

_MOST_BYTES = 64 << 20
"""More than this is not kept by sends that are over."""


class TorchTransport:
    """Headers go over our own transport, from processor to processor; tensors by `isend` and `irecv`.

    The header comes first, so a receive allocates what is right for this very message, and a rank that fails is noticed
    while waiting for it. A message's tensors are received before those of the next one from the same rank. With gloo
    they are tagged with the step's number, so that none of a failed step is ever received; with NCCL, which knows no
    tags, a failed step is the last.

    On GPUs each directed pair of ranks has a process group of its own, hence a communicator and a stream of its own: on
    a shared one, a send that waits for its receive would hold up others, and two ranks that send to each other first
    would wait forever. The groups are set up here, one after the other in one order everywhere, because the first use
    of each waits for the other rank. `pairs` says which are needed; by default all.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        watch: Watch | None = None,
        pairs: Collection[tuple[int, int]] | None = None,
    ) -> None:
        self._number, self._aborted = 0, False
        self._watch = watch
        self._headers = LocalTransport(group, torch.device("cpu"), watch)
        self._device = device
        self._ranks = dist.get_process_group_ranks(group)
        self._sent = _OnGpu() if device.type == "cuda" else _OnCpu()
        self._waiting: dict[int, deque[_Incoming]] = {}
        """What was posted and has no header yet."""
        self._groups: dict[tuple[int, int] | None, dist.ProcessGroup] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._rank, size = group.rank(), group.size()
        if self._stream is None:
            self._groups[None] = _private(group, self._ranks)
        else:
            everyone = [(sender, receiver) for sender in range(size) for receiver in range(size) if sender != receiver]
            for pair in sorted(everyone if pairs is None else pairs):
                if self._rank in pair:
                    self._groups[pair] = _private(group, [self._ranks[rank] for rank in pair])
                    self._set_up(*pair)
            if watch is not None:
                watch.on_failure(self.abort)

    def _set_up(self, sender: int, receiver: int) -> None:
        spec = Spec(torch.uint8, (1,), (1,), False, 1)
        if self._rank == sender:
            self._isend(receiver, spec.allocate(self._device))
        else:
            self.finish(sender, *self._irecv(sender, spec))

    def begin(self, number: int) -> None:
        if self._aborted:
            raise PipelineError(
                "a step failed, and NCCL's communicators cannot be used again after that; start the ranks again"
            )
        self._number = number
        self._headers.begin(number)
        self._sent.forget()
        self._waiting.clear()

    def abort(self) -> None:
        """Have all waits for a GPU's communication end, for good."""
        self._aborted = True
        for group in self._groups.values():
            group.abort()

    def send(self, rank: int, value: Tree) -> None:
        header, tensors = pack(value)
        self._headers.send(rank, header)
        for tensor in tensors:
            if tensor.numel():
                self._isend(rank, flat(tensor.to(self._device, copy=True)))

    def receive(self, rank: int) -> Pending:
        incoming = _Incoming(self, rank)
        waiting = self._waiting.setdefault(rank, deque())
        waiting.append(incoming)
        while waiting and self._headers.ready(rank):
            self.start_next(rank)
        return incoming

    def start_next(self, rank: int) -> None:
        """Wait for the next header from `rank`, and start to receive its tensors for the receive that was posted."""
        header = self._headers.receive(rank).wait()
        if not isinstance(header, bytes):
            raise MessageError(f"rank {rank} sent a {type(header).__name__} where a header was due")
        layout = read(header)
        incoming = self._waiting[rank].popleft()
        incoming.parts = [self._irecv(rank, spec) for spec in layout.specs]
        incoming.layout = layout

    def finish(self, rank: int, tensor: torch.Tensor, work: dist.Work | None) -> None:
        """Wait until `tensor` has been received; on a GPU, have what uses it wait."""
        try:
            if work is not None:
                work.wait()
        except RuntimeError:
            if self._watch is None:
                raise
            raise self._watch.failure(rank) from None
        if self._stream:
            tensor.record_stream(torch.cuda.current_stream(self._device))

    def flush(self) -> None:
        while not self._sent.flush(0.1):
            if self._watch is not None and select.select([self._watch], [], [], 0)[0]:
                raise self._watch.failure(self._rank)
        self._headers.flush()

    def close(self) -> None:
        self._sent.close()
        self._headers.close()
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._groups.clear()

    def _isend(self, rank: int, data: torch.Tensor) -> None:
        group = self._groups[(self._rank, rank) if self._stream else None]
        work = dist.isend(data, self._ranks[rank], group, tag=self._number)
        assert work is not None
        self._sent.add(work, data)

    def _irecv(self, rank: int, spec: Spec) -> tuple[torch.Tensor, dist.Work | None]:
        # On a stream without compute the transfer does not wait for what is queued before it.
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            tensor = spec.allocate(self._device)
            if not spec.nbytes:
                return tensor, None
            group = self._groups[(rank, self._rank) if self._stream else None]
            return tensor, dist.irecv(flat(tensor), self._ranks[rank], group, tag=self._number)


class _Incoming:
    """A receive that was posted; it has a layout once its header was read and its tensors are on their way."""

    __slots__ = ("_rank", "_transport", "layout", "parts")

    def __init__(self, transport: TorchTransport, rank: int) -> None:
        self._transport, self._rank = transport, rank
        self.layout: Layout | None = None
        self.parts: list[tuple[torch.Tensor, dist.Work | None]] = []

    def wait(self) -> Tree:
        while self.layout is None:
            self._transport.start_next(self._rank)
        for tensor, work in self.parts:
            self._transport.finish(self._rank, tensor, work)
        tensors = [
            tensor.requires_grad_() if spec.requires_grad else tensor
            for (tensor, _), spec in zip(self.parts, self.layout.specs, strict=True)
        ]
        self.parts.clear()
        return self.layout.build(tensors)


class _OnGpu:
    """Sends of a GPU that may not be over, each with what it sends."""

    def __init__(self) -> None:
        self._works: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def add(self, work: dist.Work, data: torch.Tensor) -> None:
        while self._works and self._works[0][0].is_completed():
            self._works.popleft()
        self._works.append((work, data))

    def flush(self, _: float) -> bool:
        while self._works:
            self._works.popleft()[0].wait()
        return True

    def forget(self) -> None:
        self._works.clear()

    def close(self) -> None:
        self._works.clear()


class _OnCpu:
    """The same with gloo, whose sends are over only for those who wait: here, a thread.

    It is given them at the end of a step, or when they hold much memory, as each wake-up of it takes time from compute.
    A send that fails is over as well; whoever waits for the rank at its other end says why.
    """

    def __init__(self) -> None:
        self._recent: list[tuple[dist.Work, torch.Tensor]] = []
        self._bytes = 0
        self._works: _Works | None = None

    def add(self, work: dist.Work, data: torch.Tensor) -> None:
        self._recent.append((work, data))
        self._bytes += data.nbytes
        if self._bytes > _MOST_BYTES:
            self._hand_over()

    def flush(self, seconds: float) -> bool:
        """Whether all sends are over, after so many seconds at most."""
        works = self._hand_over()
        if works is None:
            return True
        with works.all_tasks_done:
            if works.unfinished_tasks:
                works.all_tasks_done.wait(seconds)
            return not works.unfinished_tasks

    def forget(self) -> None:
        """Leave sends that nobody will receive to their thread, which ends with them or with the group."""
        if not self.flush(0):
            self.close()

    def close(self) -> None:
        works = self._hand_over()
        if works is not None:
            works.put(None)
            self._works = None

    def _hand_over(self) -> _Works | None:
        if self._recent:
            if self._works is None:
                self._works = queue.Queue()
                threading.Thread(target=_wait_for_all, args=[self._works], name="pipeloom-gloo", daemon=True).start()
            self._works.put(self._recent)
            self._recent, self._bytes = [], 0
        return self._works


def _wait_for_all(works: _Works) -> None:
    while (sent := works.get()) is not None:
        while sent:
            with contextlib.suppress(RuntimeError):
                sent[0][0].wait()
            del sent[0]
        works.task_done()


def _private(group: dist.ProcessGroup, ranks: list[int]) -> dist.ProcessGroup:
    made = dist.new_group(ranks, backend=dist.get_backend(group), use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made
