"""What is asked of NCCL, recorded in its place: there need be no GPU."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pipeloom as pl
import processes
from models import WIDTH
from pipeloom.runtime.team import _pairs
from pipeloom.runtime.transport import _nccl, _torch
from pipeloom.runtime.transport._tree import Spec
from test_pipeline import square

SIZE = 4


class Recorded:
    """One backend of a pair, as one of them sees it."""

    def __init__(self, asked: list[Any], pair: tuple[int, int]) -> None:
        self.asked, self.pair = asked, pair

    def send(self, tensors: list[torch.Tensor], rank: int, _: int) -> FakeWork:
        self.asked.append(("send", self.pair[rank], self.pair, tensors[0].nbytes))
        return FakeWork()

    def recv(self, tensors: list[torch.Tensor], rank: int, _: int) -> FakeWork:
        self.asked.append(("receive", self.pair[rank], self.pair, tensors[0].nbytes))
        return FakeWork()


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


def without_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU has and a processor has not."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: "side")
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "compute")
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)


def record(rank: int, monkeypatch: pytest.MonkeyPatch, pairs: list[tuple[int, int]] | None = None) -> list[Any]:
    """What one rank asks for, at set-up and in a step in which every rank sends to every other before it receives."""
    asked: list[Any] = []

    def private(_: object, __: str, pair: tuple[int, int], ___: torch.device) -> Recorded:
        asked.append(("group", pair))
        return Recorded(asked, pair)

    def refused(*_: object) -> None:
        raise AssertionError("the processor waits for the GPU")

    without_streams(monkeypatch)
    monkeypatch.setattr(_nccl, "private", private)
    monkeypatch.setattr(torch.cuda, "synchronize", refused)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, stream: asked.append(("recorded", stream)))
    for name in ("item", "cpu", "tolist", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, refused)
    nccl = _nccl.Nccl(FakeGroup(rank), "", torch.device("cpu"), pairs)  # type: ignore[arg-type]
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


@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble", "DualPipe"])
def test_pairs_meet_and_carry_a_pipeline(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gloo for NCCL, which can do all that is asked of it: ranks of a pair find each other, however many pairs
    each is in, and messages of a pipeline arrive in the order in which they are asked for."""
    without_streams(monkeypatch)
    schedule = pl.schedules.make(name, ranks=4, microbatches=8)
    pairs = _pairs(schedule)
    monkeypatch.setattr(_torch, "Gloo", lambda group, name: _nccl.Nccl(group, name, torch.device("cpu"), pairs))
    monkeypatch.setattr(_nccl.Nccl, "close", lambda self: self._groups.clear())  # gloo knows no shutdown

    def body(group: dist.ProcessGroup) -> None:
        modules = [nn.Linear(WIDTH, WIDTH) for _ in range(schedule.wiring.stages)]
        for module in modules:
            nn.init.eye_(module.weight)
        whole = copy.deepcopy(modules)
        x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
        dist.broadcast(x, 0)
        dist.broadcast(y, 0)
        own = [pl.Stage(modules[index % len(modules)], index) for index in schedule.stages_of(group.rank())]
        for _ in range(2):
            pipe = pl.Pipeline(own, schedule, loss_fn=square, transport="torch")
            for _ in range(2):
                pipe.step(*([x] if pipe.first else []), target=y if pipe.last else None)
            pipe.clip_grad_norm_(1e9)
            pipe.close()
        for _ in range(4):
            pl.reference.step(whole, schedule, x, loss_fn=square, target=y)
        for stage in own:
            for mine, other in zip(
                stage.module.parameters(), whole[stage.index % len(whole)].parameters(), strict=True
            ):
                assert torch.equal(mine.grad, other.grad)  # type: ignore[arg-type]  # both have one

    processes.run_ranks(4, body, tmp_path)
