"""Tensors over NCCL, which knows no tags: what is received is what was sent, in order, or the communicator is lost.

So a receive is posted when its header has come, which the sender's processor sends when it has queued the tensors, not
when its GPU has come to them. Here as well nothing waits for a GPU but another GPU's work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist

from pipeloom.runtime.transport._carrier import Backend, Part, private
from pipeloom.runtime.transport._tree import Spec, flat


class Nccl:
    """Each directed pair of ranks has a process group of its own, hence a communicator and a stream of its own: on a
    shared one, a send that waits for its receive would hold up others, and two ranks that send to each other first
    would wait forever. The groups are set up here, one after the other in one order everywhere, because the first use
    of each waits for the other rank. `pairs` says which (sender, receiver) are needed; by default all.
    """

    def __init__(
        self, group: dist.ProcessGroup, name: str, device: torch.device, pairs: Collection[tuple[int, int]] | None
    ) -> None:
        self._device = device
        self._rank, size = group.rank(), group.size()
        self._stream = torch.cuda.Stream(device)
        self._sent: deque[Part] = deque()
        self._groups: dict[tuple[int, int], Backend] = {}
        everyone = [(sender, receiver) for sender in range(size) for receiver in range(size) if sender != receiver]
        for pair in sorted(everyone if pairs is None else pairs):
            if self._rank in pair:
                self._groups[pair] = private(group, f"{name}/{pair[0]} to {pair[1]}", pair, device)
                self._set_up(*pair)

    def _set_up(self, sender: int, receiver: int) -> None:
        spec = Spec(torch.uint8, (1,), (1,), False, 1)
        if self._rank == sender:
            self.send(receiver, [spec.allocate(self._device)])
        else:
            self.finish(self._irecv(sender, spec))

    def begin(self) -> None:
        self._sent.clear()

    def send(self, rank: int, tensors: Sequence[torch.Tensor]) -> None:
        while self._sent and self._ended(self._sent[0]):
            self._sent.popleft()
        for tensor in tensors:
            if tensor.numel():
                copy = tensor.detach().to(self._device, copy=True)
                work = self._groups[self._rank, rank].send([flat(copy)], 1, 0)
                self._sent.append((copy, work))

    def receive(self, rank: int, specs: Sequence[Spec]) -> list[Part]:
        return [self._irecv(rank, spec) for spec in specs]

    def finish(self, part: Part) -> None:
        tensor, work = part
        if work is not None:
            work.wait()
        tensor.record_stream(torch.cuda.current_stream(self._device))

    def drop(self, parts: Sequence[Part]) -> None:
        """No step follows one that failed, so nothing is left to do."""

    def flush(self, seconds: float) -> bool:  # noqa: ARG002 - the streams wait, not this thread
        while self._sent:
            self.finish(self._sent.popleft())
        return True

    def abort(self) -> None:
        for group in self._groups.values():
            group.abort()

    def close(self) -> None:
        self._sent.clear()
        for group in self._groups.values():
            group.shutdown()
        self._groups.clear()

    def _irecv(self, rank: int, spec: Spec) -> Part:
        # On a stream without compute the transfer does not wait for what is queued before it.
        with torch.cuda.stream(self._stream):
            tensor = spec.allocate(self._device)
            if not spec.nbytes:
                return tensor, None
            return tensor, self._groups[rank, self._rank].recv([flat(tensor)], 0, 0)

    def _ended(self, part: Part) -> bool:
        _, work = part
        return work is None or work.is_completed()
