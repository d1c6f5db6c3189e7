"""The ranks of a pipeline give each other values over its transport, so that failures are heard meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from pipeloom.runtime.transport import Transport, Tree


class Peers:
    """The ranks of a pipeline, seen from one of them: rank `rank` of `ranks`.

    All methods raise PeerFailed where a rank of the pipeline failed.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.transport: Transport | None = None
        """None where there is no other rank."""
        self.refused: Exception | None = None
        """What all ranks have refused last."""

    def refuse(self, error: Exception) -> NoReturn:
        """Raise what every rank raises, as all have gathered the same; so there is no need to tell."""
        self.refused = error
        raise error

    def gather(self, value: Tree = None) -> list[Any]:
        """What every rank says, in order of rank; every rank calls this. Plain values, as they need no GPU."""
        if self.transport is None:
            return [value]
        if self.rank:
            self.transport.send(0, value)
            said = self.transport.receive(0).wait()
            assert isinstance(said, list)
            return said
        coming = [self.transport.receive(other) for other in range(1, self.ranks)]
        said = [value, *(each.wait() for each in coming)]
        for other in range(1, self.ranks):
            self.transport.send(other, said)
        return said

    def exchange(self, ranks: Iterable[int], value: Tree) -> dict[int, Any]:
        """The `value` of each of `ranks`, which all call this."""
        others = sorted({*ranks} - {self.rank})
        if not others:
            return {self.rank: value}
        assert self.transport is not None
        coming = [self.transport.receive(other) for other in others]
        for other in others:
            self.transport.send(other, value)
        found = {other: each.wait() for other, each in zip(others, coming, strict=True)}
        self.transport.flush()
        return {self.rank: value} | found

    def share(self, source: int, ranks: Iterable[int], value: Tree) -> Any:
        """The `value` of rank `source`, on all of `ranks`, which all call this."""
        others = sorted({*ranks} - {source})
        if not others:
            return value
        assert self.transport is not None
        if self.rank != source:
            return self.transport.receive(source).wait()
        for other in others:
            self.transport.send(other, value)
        self.transport.flush()
        return value
