"""Weights that stages share, against a model that shares them in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipeloom as pl
from models import TOKENS, WIDTH, Block, cross_entropy, text
from pipeloom.errors import PipelineError
from pipeloom.runtime.launcher import launch
from test_pipeline import make


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(TOKENS, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.weight)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.weight = nn.Parameter(torch.randn(TOKENS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.block(x), self.weight)


def build(stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Embed(), *(Block() for _ in range(stages - 2)), Head()]


def parameters(modules: Any) -> list[nn.Parameter]:
    return list(dict.fromkeys(parameter for module in modules for parameter in module.parameters()))


def train(name: str) -> None:
    """Three optimizer steps, each on the gradients of two batches."""
    schedule = make(name, dist.get_world_size(), 4)
    last = schedule.stages - 1
    whole = build(schedule.stages)
    whole[last].weight = whole[0].weight
    modules = build(schedule.stages)
    own = schedule.stages_of(dist.get_rank())
    pipe = pl.Pipeline([pl.Stage(modules[stage], stage) for stage in own], schedule, loss_fn=cross_entropy)
    pipe.tie("0:weight", f"{last}:weight")
    mine = torch.optim.SGD(parameters(modules[stage] for stage in own), lr=0.1)
    reference = torch.optim.SGD(parameters(whole), lr=0.1)
    for step in range(3):
        for part in range(2):
            x, y = text(8, seed=2 * step + part)
            pipe.step(*([x] if pipe.first else []), target=y if pipe.last else None)
            pl.reference.step(whole, schedule, x, target=y, loss_fn=cross_entropy)
        norm = pipe.clip_grad_norm_(0.1)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(parameters(whole), 0.1))
        for stage in own:
            for (key, one), other in zip(modules[stage].named_parameters(), whole[stage].parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad, msg=f"{stage} {key}")
        for optimizer in (mine, reference):
            optimizer.step()
            optimizer.zero_grad()
        copies = torch.zeros(2, TOKENS, WIDTH)
        for index, stage in enumerate((0, last)):
            if stage in own:
                copies[index] = modules[stage].get_parameter("weight").detach()
        dist.all_reduce(copies)
        assert torch.equal(copies[0], copies[1])
        torch.testing.assert_close(copies[0], whole[0].get_parameter("weight").detach())
    pipe.close()


@pytest.mark.parametrize("name", ["1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_tied_weights(name: str) -> None:
    launch(train, 2, name)


def misfits() -> None:
    schedule = make("1F1B", 2, 2)
    rank = dist.get_rank()
    pipe = pl.Pipeline([pl.Stage(nn.Linear(2, 2 + rank), rank)], schedule, loss_fn=cross_entropy)
    for names, says in (
        (("0:weight", "1:weight"), "differ in shape or dtype"),
        (("weight", "1:weight"), "2 stages have a parameter 'weight'; say which: '3:weight' is that of stage 3"),
        (("0:weight", "2:wait"), "no stage has a parameter '2:wait'"),
        (("0:weight",), "a tie takes two names or more"),
    ):
        with pytest.raises(PipelineError, match=says):
            pipe.tie(*names)
    pipe.close()


def test_ties_that_do_not_fit_are_refused_everywhere() -> None:
    launch(misfits, 2)


def idle() -> None:
    """The last rank holds no stage, and so knows of no ties."""
    schedule = pl.Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n\n")
    modules = build(2)
    ties = (("0:weight", "1:weight"),)
    pipe = pl.Pipeline(
        [pl.Stage(modules[stage], stage, ties=ties) for stage in schedule.stages_of(dist.get_rank())],
        schedule,
        loss_fn=cross_entropy,
    )
    x, y = text(4, seed=0)
    pipe.step(*([x] if pipe.first else []), target=y if pipe.last else None)
    assert pipe.clip_grad_norm_(1.0) > 0
    assert pipe.loss() > 0
    pipe.close()


def test_a_rank_without_stages_takes_part() -> None:
    launch(idle, 3)


def overlap() -> None:
    """Two ties, one between the first two ranks and one between the last two."""
    schedule = make("1F1B", 3, 3)
    whole = [Block() for _ in range(3)]
    rank = dist.get_rank()
    torch.manual_seed(rank)
    module = Block()
    pipe = pl.Pipeline([pl.Stage(module, rank)], schedule, loss_fn=lambda output: output.square().mean())
    pipe.tie("0:out.weight", "1:out.weight")
    pipe.tie("1:out.bias", "2:out.bias")
    for number, each in enumerate(whole):
        for name, parameter in each.named_parameters():
            value = module.get_parameter(name).detach().clone()
            dist.broadcast(value, number)
            parameter.detach().copy_(value)
    whole[1].out.weight = whole[0].out.weight
    whole[2].out.bias = whole[1].out.bias
    x = torch.randn(6, 5, WIDTH, generator=torch.Generator().manual_seed(0))
    pipe.step(*([x] if pipe.first else []))
    pl.reference.step(whole, schedule, x, loss_fn=lambda output: output.square().mean())
    for (name, one), other in zip(module.named_parameters(), whole[rank].parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)
    pipe.close()


def test_ties_between_other_ranks_each() -> None:
    launch(overlap, 3)
