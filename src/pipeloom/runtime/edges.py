"""Values on their way from stage to stage, within one rank and between ranks, while one step runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from pipeloom.runtime.dtensors import Meshes
from pipeloom.runtime.transport import Pending, Transport
from pipeloom.runtime.tree import map_tensors

Edge = tuple[int, int, int]
"""From stage, to stage, microbatch."""


class _Coming(NamedTuple):
    value: Pending
    number: int
    also: Sequence[Edge]


class _Again(NamedTuple):
    value: Pending
    first: Edge


class Edges:
    """What came or goes along each edge of this rank's stages.

    Args:
        transport: to the other ranks; None where there is none.
        meshes: on which DTensors cross.
        arrived: called with the number of a receive as its value arrives.
    """

    def __init__(self, transport: Transport | None, meshes: Meshes, arrived: Callable[[int], None]) -> None:
        self._transport, self._meshes, self._arrived = transport, meshes, arrived
        self._values: dict[Edge, Any] = {}
        """A value, or one that is on its way."""
        self._repeated: dict[Edge, Any] = {}
        """Values that came once for several stages, for those that have not taken theirs."""

    def put(self, edge: Edge, value: Any) -> None:
        """`value` is to go along `edge`: to a stage of this rank, or away with `send`."""
        self._values[edge] = value

    def take(self, edge: Edge) -> Any:
        """The value that came along `edge`, waiting for it if it comes from another rank."""
        value = self._values.pop(edge)
        if isinstance(value, _Coming):
            return self._come(value)
        if not isinstance(value, _Again):
            return value
        value.value.wait()
        if edge not in self._repeated:
            self._values[value.first] = self._come(self._values[value.first])
        return self._repeated.pop(edge)

    def send(self, edge: Edge, peer: int) -> None:
        """Send the value of `edge` to rank `peer`."""
        assert self._transport is not None
        self._transport.send(peer, self._meshes.flat(self._values.pop(edge)))

    def send_again(self, edge: Edge, peer: int) -> None:
        """Say that the value of `edge` has gone to this rank already, along another edge."""
        assert self._transport is not None
        del self._values[edge]
        self._transport.send(peer, None)

    def receive(self, edge: Edge, peer: int, number: int, also: Sequence[Edge]) -> None:
        """Post a receive, which has this number; the value is that of the edges `also` too."""
        assert self._transport is not None
        self._values[edge] = _Coming(self._transport.receive(peer), number, also)

    def receive_again(self, edge: Edge, peer: int, first: Edge) -> None:
        """Post the receive of what says that the value has come along `first`."""
        assert self._transport is not None
        self._values[edge] = _Again(self._transport.receive(peer), first)

    def flush(self) -> None:
        """Wait until all that was sent has left."""
        if self._transport is not None:
            self._transport.flush()

    def _come(self, coming: _Coming) -> Any:
        found = coming.value.wait()
        self._arrived(coming.number)
        found = self._meshes.whole(found)
        for other in coming.also:  # before the first stage that takes it can change it in place
            self._repeated[other] = map_tensors(_copy, found)
        return found


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
