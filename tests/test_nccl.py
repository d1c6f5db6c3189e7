"""What is asked of NCCL, recorded in its place: there need be no GPU."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeloom.runtime.transport import _nccl
from pipeloom.runtime.transport._tree import Spec

SIZE = 4


class FakeGroup:
    """A group of SIZE ranks, as one of them sees it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return SIZE


class FakeWork:
    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return False


def record(rank: int, monkeypatch: pytest.MonkeyPatch, pairs: list[tuple[int, int]] | None = None) -> list[Any]:
    """What one rank asks for, at set-up and in a step in which every rank sends to every other before it receives."""
    asked: list[Any] = []

    def private(_: object, ranks: list[int]) -> tuple[int, ...]:
        asked.append(("group", tuple(ranks)))
        return tuple(ranks)

    def isend(data: torch.Tensor, to: int, group: object) -> FakeWork:
        asked.append(("send", to, group, data.nbytes))
        return FakeWork()

    def irecv(data: torch.Tensor, source: int, group: object) -> FakeWork:
        asked.append(("receive", source, group, data.nbytes))
        return FakeWork()

    def refused(*_: object) -> None:
        raise AssertionError("the processor waits for the GPU")

    monkeypatch.setattr(_nccl, "private", private)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: list(range(SIZE)))
    monkeypatch.setattr(dist, "isend", isend)
    monkeypatch.setattr(dist, "irecv", irecv)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: "side")
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "compute")
    monkeypatch.setattr(torch.cuda, "synchronize", refused)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, stream: asked.append(("recorded", stream)))
    for name in ("item", "cpu", "tolist", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, refused)
    nccl = _nccl.Nccl(FakeGroup(rank), torch.device("cpu"), pairs)  # type: ignore[arg-type]
    asked.append("set up")
    spec = Spec(torch.float32, (2, 3), (3, 1), True, 24)
    for _ in range(2):
        nccl.begin()
        others = [other for other in range(SIZE) if other != rank and (pairs is None or (rank, other) in pairs)]
        for other in others:
            nccl.send(other, [torch.ones(2, 3), torch.empty(0)])
        for other in others:
            for part in nccl.receive(other, [spec]):
                nccl.finish(part)
        assert nccl.flush(0.1)
    return asked


def test_both_ends_of_a_directed_pair_do_the_same_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [record(rank, monkeypatch) for rank in range(SIZE)]
    for sender in range(SIZE):
        for receiver in set(range(SIZE)) - {sender}:
            pair = (sender, receiver)
            sends = [each for each in asked[sender] if each[0] == "send" and each[2] == pair]
            receives = [each for each in asked[receiver] if each[0] == "receive" and each[2] == pair]
            assert [nbytes for *_, nbytes in sends] == [nbytes for *_, nbytes in receives] == [1, 24, 24]
            assert {to for _, to, *_ in sends} == {receiver}
            assert {source for _, source, *_ in receives} == {sender}


def test_set_up_never_waits_in_a_circle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first use of a group waits for the other rank, so all ranks come to their groups in one order."""
    orders = []
    for rank in range(SIZE):
        asked = record(rank, monkeypatch)
        orders.append([each[1] for each in asked[: asked.index("set up")] if each[0] == "group"])
    left = [list(order) for order in orders]
    while any(left):
        ready = next(pair for order in left for pair in order[:1] if all(left[rank][:1] == [pair] for rank in pair))
        for rank in ready:
            left[rank].pop(0)


def test_what_is_received_on_the_side_is_kept_until_compute_has_used_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = record(0, monkeypatch, [(0, 1), (1, 0)])
    assert [each[1] for each in asked if each[0] == "group"] == [(0, 1), (1, 0)]
    received = asked[asked.index("set up") :]
    assert received.count(("recorded", "compute")) >= 2
