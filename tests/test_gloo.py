"""Over torch.distributed nothing is ever received into memory of another message, however much messages change."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipeloom as pl
import processes
from models import WIDTH
from pipeloom.runtime.launcher import launch
from pipeloom.runtime.transport import Transport, Tree, _gloo, connect
from pipeloom.runtime.transport._gloo import Gloo
from pipeloom.runtime.transport._torch import TorchTransport
from test_pipeline import Side, make, square
from test_transport import assert_same

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool]


def value(chance: random.Random) -> Tree:
    """A message whose tensors are often of a size that others have, in another shape and type."""
    shape = chance.choice([(), (0,), (8,), (2, 4), (4, 2), (16,), (2, 8), (64,), (5, 1000)])
    dtype = chance.choice(DTYPES)
    tensor = torch.tensor(chance.random()) + torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    tensor = tensor.to(dtype)
    if dtype.is_floating_point and chance.random() < 0.5:
        tensor.requires_grad_()
    if chance.random() < 0.3:
        return [tensor, chance.randrange(10), {"more": (torch.full((8,), chance.random()), None)}]
    return tensor.t() if tensor.dim() == 2 and chance.random() < 0.5 else tensor


def exchange(transport: Transport, rank: int, chance: random.Random, steps: int, same: bool) -> None:
    """Steps of both ranks, which agree about everything random; with `same`, of messages that never change."""
    seed, own = chance.random(), random.Random(rank)
    for number in range(1, steps + 1):
        transport.begin(number)
        if same:
            chance.seed(seed)
        sent = [[value(chance) for _ in range(chance.randint(0, 30))] for _ in range(2)]
        ahead = chance.randint(0, 30)
        pendings = [transport.receive(1 - rank) for _ in sent[1 - rank][:ahead]]
        for each in sent[rank]:
            transport.send(1 - rank, each)
        pendings += [transport.receive(1 - rank) for _ in sent[1 - rank][ahead:]]
        order = list(range(len(pendings)))
        if own.random() < 0.5:
            own.shuffle(order)
        for index in order:
            assert_same(pendings[index].wait(), sent[1 - rank][index])
        transport.flush()


@pytest.mark.parametrize("most", [0, 1 << 20, 64 << 20])
@pytest.mark.parametrize("same", [False, True])
def test_messages_may_change_in_every_way(
    same: bool, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_gloo, "MOST_BYTES", most)

    def body(group: dist.ProcessGroup) -> None:
        transport = connect(group, "torch")
        exchange(transport, group.rank(), random.Random(1), 30, same)
        dist.barrier()
        transport.close()

    processes.run_ranks(2, body, tmp_path)


def test_what_came_in_the_last_step_is_posted_and_no_more_than_memory_allows(tmp_path: Path) -> None:
    def body(group: dist.ProcessGroup) -> None:
        transport = connect(group, "torch")
        assert isinstance(transport, TorchTransport)
        gloo = transport._carrier
        assert isinstance(gloo, Gloo)
        other = 1 - group.rank()

        def step(number: int, count: int, size: int) -> None:
            transport.begin(number)
            for _ in range(count):
                transport.send(other, torch.ones(size))
            for _ in range(count):
                assert_same(transport.receive(other).wait(), torch.ones(size))
            transport.flush()

        def posted() -> dict[tuple[int, int], int]:
            return {key: len(ahead) for key, ahead in gloo._ahead.items()}

        step(1, 5, 10)
        assert posted() == {(other, 40): 5}
        step(2, 5, 10)
        assert posted() == {(other, 40): 5}
        step(3, 2, 30)
        assert posted() == {(other, 40): 5, (other, 120): 2}
        step(4, 5, 10)
        assert posted() == {(other, 40): 5, (other, 120): 2}
        for number in range(5, 9):
            step(number, 20, 2_000_000 + number)
            assert gloo._bytes == sum(max(size, 16 << 10) * count for (_, size), count in posted().items())
            assert gloo._bytes <= 64 << 20
        step(9, 5, 10)
        dist.barrier()
        transport.close()

    processes.run_ranks(2, body, tmp_path)


class Wanders(nn.Module):
    """What it hands on changes with the numbers: shapes, types, plain values, and which tensors want a gradient."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.last = last

    def forward(self, x: Tensor, copies: int = 1, extra: Tensor | None = None, *rest: object) -> object:
        x = torch.tanh(self.linear(x)).view(copies, -1, WIDTH).mean(0)
        if extra is not None:
            x = x + 0.1 * extra.real.float().mean()
            assert rest[-1] == [f"{copies} copies", copies / 2]
        if self.last:
            return x
        copies = 1 + int(1000 * x.detach().abs().sum()) % 5
        wide = x.repeat(copies, 1)
        extras = [wide.detach(), wide.bfloat16(), wide.to(torch.complex64), wide.sum(), wide[:0].sum(0)]
        rest = (torch.empty(0, copies), torch.tensor(copies), [f"{copies} copies", copies / 2])
        return wide, copies, extras[copies - 1], *rest


def wandering(stages: int) -> list[nn.Module]:
    torch.manual_seed(3)
    return [Wanders(stage == stages - 1) for stage in range(stages)]


def pipelines_that_wander(name: str) -> None:
    side = Side(make(name, 2, 4), wandering, loss_fn=square, transport="torch")
    for index, batch in enumerate([8, 8, 12, 4, 9, 8, 8]):
        torch.manual_seed(index % 6)
        x, y = torch.randn(batch, WIDTH), torch.randn(batch, WIDTH)
        side.step(x, y)
        side.same_gradients()
        if index % 3 == 1:
            side.eval(x[:5], y[:5], microbatches=3)
    side.pipe.close()


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_stages_whose_numbers_decide_what_crosses(name: str) -> None:
    launch(pipelines_that_wander, 2, name)


def schedules_in_turn() -> None:
    """Two pipelines over the same stages, each with a transport of its own."""
    first = Side(make("1F1B", 2, 4), wandering, loss_fn=square, transport="torch")
    other = make("GPipe", 2, 8)
    stages = [pl.Stage(module, stage) for stage, module in first.own.items()]
    second = pl.Pipeline(stages, other, loss_fn=square, transport="torch")
    for index in range(6):
        torch.manual_seed(index)
        x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
        if index % 3:
            first.step(x, y)
        else:
            second.step(*([x] if second.first else []), target=y if second.last else None)
            pl.reference.step(first.whole, other, x, target=y, loss_fn=square)
        first.same_gradients()
    first.pipe.close()
    second.close()


def test_schedules_in_turn_over_the_same_stages() -> None:
    launch(schedules_in_turn, 2)
