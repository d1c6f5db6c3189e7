"""The transport over torch.distributed: gloo for CPU tensors, NCCL for GPU tensors."""

from __future__ import annotations

from collections import deque
from functools import partial

import torch
import torch.distributed as dist

from pipeloom.runtime.transport._interface import Pending, Tree
from pipeloom.runtime.transport._posted import Posted
from pipeloom.runtime.transport._tree import flat, pack, read

_FIRST = 512
_HEADER, _PAYLOAD = 1, 2


class TorchTransport:
    """Sends by `isend`, receives by `irecv`, in a private group.

    All of one message is received before any of the next one from the same rank is, so backends without tags will do.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._device = device
        ranks = dist.get_process_group_ranks(group)
        private = dist.new_group(ranks, use_local_synchronization=True)
        assert isinstance(private, dist.ProcessGroup)
        self._group: dist.ProcessGroup | None = private
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._posted: dict[int, Posted] = {}

    def send(self, rank: int, value: Tree) -> None:
        header, tensors = pack(value)
        head = len(header).to_bytes(4, "little") + header
        first, rest = head[:_FIRST].ljust(_FIRST, b"\0"), head[_FIRST:]
        for part in (first, rest):
            if part:
                data = torch.frombuffer(bytearray(part), dtype=torch.uint8)
                self._isend(rank, data.to(self._device), _HEADER)
        for tensor in tensors:
            if tensor.numel():
                self._isend(rank, flat(tensor.to(self._device, copy=True)), _PAYLOAD)

    def receive(self, rank: int) -> Pending:
        posted = self._posted.get(rank)
        if posted is None:
            posted = self._posted[rank] = Posted(partial(self._receive, rank))
        return posted.post()

    def flush(self) -> None:
        while self._sent:
            self._sent.popleft()[0].wait()

    def close(self) -> None:
        if self._group is not None:
            self.flush()
            dist.destroy_process_group(self._group)
            self._group = None

    def _isend(self, rank: int, data: torch.Tensor, tag: int) -> None:
        work = dist.isend(data, group=self._group, group_dst=rank, tag=tag)
        assert work is not None
        self._sent.append((work, data))
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()

    def _irecv(self, rank: int, data: torch.Tensor, tag: int) -> None:
        work = dist.irecv(data, group=self._group, group_src=rank, tag=tag)
        assert work is not None
        work.wait()

    def _receive(self, rank: int) -> Tree:
        first = torch.empty(_FIRST, dtype=torch.uint8, device=self._device)
        self._irecv(rank, first, _HEADER)
        head = bytes(first.tolist())
        length = int.from_bytes(head[:4], "little")
        if length > _FIRST - 4:
            rest = torch.empty(length - (_FIRST - 4), dtype=torch.uint8, device=self._device)
            self._irecv(rank, rest, _HEADER)
            head += bytes(rest.tolist())
        layout = read(head[4 : 4 + length])
        tensors = []
        for spec in layout.specs:
            tensor = spec.allocate(self._device)
            if spec.nbytes:
                self._irecv(rank, flat(tensor), _PAYLOAD)
            tensors.append(tensor.requires_grad_(spec.requires_grad))
        return layout.build(tensors)
