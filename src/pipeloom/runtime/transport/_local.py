"""Our own transport: shared memory between the ranks of a host, TCP between hosts."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pipeloom.errors import PeerFailed, PipelineError
from pipeloom.runtime.transport import _ring
from pipeloom.runtime.transport._connection import Connection, Sender
from pipeloom.runtime.transport._interface import IN_A_MESSAGE, Pending, Tree, Watch
from pipeloom.runtime.transport._rendezvous import meet
from pipeloom.runtime.transport._stream import Stream
from pipeloom.runtime.transport._tree import pack


class LocalTransport:
    """Needs nothing but the group's store. Tensors on a GPU go through the host's memory."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        name: str,
        device: torch.device,
        watch: Watch | None = None,
        *,
        rings: bool = True,
    ) -> None:
        self.name = name
        self._sender = Sender()
        self.connections: dict[int, Connection] = {}
        rank = group.rank()
        for other, peer in sorted(meet(group, name, unix=rings and _ring.available(), watch=watch).items()):
            try:
                link = _ring.Ring(peer.socket, creates=rank < other) if peer.same_host else Stream(peer.socket)
            except ConnectionError as error:
                raise PeerFailed(other, f"it ended before it could share memory ({error})", host=peer.host) from None
            self.connections[other] = Connection(peer, link, self._sender, device, watch)

    def begin(self, number: int, about: int = 0) -> None:
        if any(connection.torn for connection in self.connections.values()):
            raise PipelineError(IN_A_MESSAGE)
        for connection in self.connections.values():
            connection.begin(number, about)

    def send(self, rank: int, value: Tree) -> None:
        self.connections[rank].send(*pack(value))

    def receive(self, rank: int) -> Pending:
        return self.connections[rank].posted.post()

    def flush(self) -> None:
        for connection in self.connections.values():
            connection.flush()

    def close(self) -> None:
        self._sender.close()
        for connection in self.connections.values():
            connection.link.close()
        self.connections = {}
