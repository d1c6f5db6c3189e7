"""Ranks that give each other values over the transport of the pipeline, so that failures are heard meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pipeloom.runtime.transport import Transport, Tree


def exchange(transport: Transport | None, rank: int, ranks: Iterable[int], value: Tree) -> dict[int, Any]:
    """The `value` of each of `ranks`; all of them call this, as `rank`.

    Raises:
        PeerFailed: a rank of the pipeline failed.
    """
    others = sorted({*ranks} - {rank})
    if not others:
        return {rank: value}
    assert transport is not None
    coming = [transport.receive(other) for other in others]
    for other in others:
        transport.send(other, value)
    found = {other: each.wait() for other, each in zip(others, coming, strict=True)}
    transport.flush()
    return {rank: value} | found


def share(transport: Transport | None, rank: int, source: int, ranks: Iterable[int], value: Tree) -> Any:
    """The `value` of rank `source`, on all of `ranks`; all of them call this, as `rank`."""
    others = sorted({*ranks} - {source})
    if not others:
        return value
    assert transport is not None
    if rank != source:
        return transport.receive(source).wait()
    for other in others:
        transport.send(other, value)
    transport.flush()
    return value
