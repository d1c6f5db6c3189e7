"""Autocast and gradient scalers: as in one process, and the same decision on every rank."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import pipeloom as pl
from models import cross_entropy, text
from pipeloom.errors import DisagreementError, PipelineError
from pipeloom.runtime.launcher import launch
from test_pipeline import Side, make


def autocast(name: str) -> None:
    side = Side(make(name, 2, 4))
    for seed in range(2):
        x, y = text(8, seed=seed)
        with torch.autocast("cpu", torch.bfloat16):
            side.eval(x, y)
            side.step(x, y)
        side.same_gradients()
    side.pipe.close()


@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_autocast(name: str) -> None:
    launch(autocast, 2, name)


def scaled() -> None:
    """The middle step brings an infinity on stage 1 only: all ranks skip it, and all lower the scale."""
    side = Side(make("InterleavedZeroBubble", 2, 4))
    whole = [parameter for module in side.whole for parameter in module.parameters()]
    own = [own for _, own, _ in side.pairs()]
    mine = torch.optim.SGD(own, lr=0.1)
    reference = torch.optim.SGD(whole, lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=64.0, growth_interval=100)
    plain = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
    for seed in range(3):
        x, y = text(8, seed=seed)
        losses: list[Tensor] = []
        output = side.pipe.step(
            *([x] if side.pipe.first else []), target=y if side.pipe.last else None, losses=losses, scaler=scaler
        )
        expected: list[Tensor] = []
        result = pl.reference.step(
            side.whole, side.schedule, x, target=y, loss_fn=cross_entropy, losses=expected, scaler=plain
        )
        side.same(output, losses, result, expected)
        if seed == 1:
            for modules in (side.own, dict(enumerate(side.whole))):
                if 1 in modules:
                    gradient = next(modules[1].parameters()).grad
                    assert gradient is not None
                    gradient.fill_(float("inf"))
        for each, optimizer in ((scaler, mine), (plain, reference)):
            each.unscale_(optimizer)
        side.pipe.clip_grad_norm_(1.0)
        torch.nn.utils.clip_grad_norm_(whole, 1.0)
        for each, optimizer in ((scaler, mine), (plain, reference)):
            each.step(optimizer)
            each.update()
            optimizer.zero_grad()
        side.same_parameters()
        assert scaler.get_scale() == plain.get_scale() == (64.0 if seed == 0 else 32.0)
    side.pipe.close()


def test_all_ranks_skip_the_same_steps() -> None:
    launch(scaled, 2)


def lonely() -> None:
    side = Side(make("1F1B", dist.get_world_size(), 2))
    with pytest.raises(PipelineError, match="skips steps that other ranks take; use"):
        side.pipe.step(scaler=torch.amp.GradScaler("cpu"))
    side.pipe.close()


def test_a_scaler_of_one_rank_is_refused() -> None:
    launch(lonely, 2)


def scale_otherwise() -> None:
    side, rank = Side(make("1F1B", 2, 4)), dist.get_rank()
    x, y = text(8, seed=0)

    def step(scaler: ShardedGradScaler | None) -> None:
        side.pipe.step(*[x][: side.pipe.first], target=y if side.pipe.last else None, scaler=scaler)

    scalers = [ShardedGradScaler("cpu", init_scale=64.0), ShardedGradScaler("cpu", init_scale=32.0), None]
    for pair in itertools.combinations(scalers, 2):
        with pytest.raises(DisagreementError, match=r"scaler is '.*' on rank 0 and '.*' on rank 1"):
            step(pair[rank])
        assert all(parameter.grad is None for parameter in side.pipe.parameters())
    step([None, ShardedGradScaler("cpu", enabled=False)][rank])
    side.pipe.close()


def test_scalers_that_differ() -> None:
    launch(scale_otherwise, 2, timeout=30.0)
