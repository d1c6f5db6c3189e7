"""Keyed random numbers: the same for every schedule and number of ranks, also under activation checkpointing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pipeloom as pl
from models import WIDTH
from pipeloom.errors import DisagreementError, PeerFailed, PipelineError
from pipeloom.runtime.launcher import launch
from soak import BoomError
from test_pipeline import make, square

LAYERS = 8


class Noisy(nn.Module):
    """Draws random numbers in a submodule and by itself, here recomputed and there not."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x)
        return x + nn.functional.dropout(y, 0.2, self.training)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Noisy(recompute=index % 2 == 1) for index in range(LAYERS)))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, WIDTH, generator=generator), torch.randn(12, WIDTH, generator=generator)


def train(name: str, folder: Path) -> None:
    ranks = dist.get_world_size()
    schedule = make(name, ranks, 4)
    whole = model()
    stages = pl.split(whole, into=schedule)
    pipe = pl.Pipeline(stages, schedule, loss_fn=square, seed=3)
    torch.manual_seed(dist.get_rank())  # what was drawn before has no part in it
    before = torch.get_rng_state()
    losses: list[Tensor] = []
    trace: list[Tensor] = []
    for step in range(2):
        x, y = batch(step)
        pipe.step(*([x] if pipe.first else []), target=y if pipe.last else None, losses=losses)
        trace += losses
    assert torch.equal(before, torch.get_rng_state())
    gradients = {name: parameter.grad for stage in stages for name, parameter in stage.module.named_parameters()}
    torch.save({"losses": trace, "gradients": gradients}, folder / f"{name} {ranks} {dist.get_rank()}.pt")
    pipe.close()


def test_dropout_does_not_depend_on_the_cut(tmp_path: Path) -> None:
    cases = [
        ("GPipe", 1),
        ("1F1B", 2),
        ("DualPipeV", 2),
        ("InterleavedZeroBubble", 2),
        ("ZBVZeroBubble", 4),
        ("DualPipe", 4),
    ]
    whole = model()
    expected: list[Tensor] = []
    schedule = make("GPipe", 1, 4)
    for step in range(2):
        losses: list[Tensor] = []
        stage = pl.Stage(whole, 0, whole=True)
        x, y = batch(step)
        pl.reference.step([stage], schedule, x, target=y, loss_fn=square, losses=losses, seed=3, number=step)
        expected += losses
    for name, ranks in cases:
        launch(train, ranks, name, tmp_path)
        files = [torch.load(tmp_path / f"{name} {ranks} {rank}.pt") for rank in range(ranks)]
        found = next(file["losses"] for file in files if file["losses"])
        assert all(map(torch.equal, found, expected)), name
        gradients = {key: value for file in files for key, value in file["gradients"].items()}
        # Copies are added up in another order.
        same = partial(torch.allclose, atol=1e-5) if name == "DualPipe" else torch.equal
        for key, parameter in whole.named_parameters():
            assert same(gradients[key], parameter.grad), (name, key)  # type: ignore[arg-type]


def test_steps_and_microbatches_draw_other_numbers() -> None:
    ones = torch.ones(2, 64)
    pipe = pl.Pipeline([pl.Stage(nn.Dropout(0.5), 0)], make("GPipe", 1, 2), loss_fn=square, seed=1)
    first, second = (pipe.step(ones, target=ones) for _ in range(2))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, second)
    again = pl.Pipeline([pl.Stage(nn.Dropout(0.5), 0)], make("GPipe", 1, 2), loss_fn=square, seed=1)
    assert torch.equal(again.step(ones, target=ones), first)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.drop, x, use_reentrant=False)
        return x


def test_what_cannot_be_told_apart_is_refused() -> None:
    ones = torch.ones(2, 2)
    pipe = pl.Pipeline([pl.Stage(Twice(), 0)], make("GPipe", 1, 1), loss_fn=square, seed=1)
    with pytest.raises(PipelineError, match="give each use a module of its own"):
        pipe.step(ones, target=ones)


def noisy_pair() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Noisy(recompute=False) for _ in range(2)]


def fail_late_then_step() -> None:
    """Rank 0 fails in its last backward: rank 1, which has finished the step, takes it back when it hears of it."""
    rank, x = dist.get_rank(), torch.ones(8, WIDTH)
    module = noisy_pair()[rank]
    pipe = pl.Pipeline([pl.Stage(module, rank)], make("1F1B", 2, 4), loss_fn=square, seed=3)
    backwards, fails_at = itertools.count(1), 0

    def fail(*_: object) -> None:
        if next(backwards) == fails_at:
            raise BoomError

    pipe.parameters()[0].register_hook(fail)

    def step() -> None:
        pipe.step(*[x][: pipe.first], target=x if pipe.last else None)
        pipe.loss()

    step()
    for asked in range(1, 4):
        backwards, fails_at = itertools.count(1), 4 * (rank == 0)
        module.zero_grad()
        with pytest.raises((BoomError, PeerFailed)):
            step()
        with pytest.raises(PipelineError):
            pipe.loss()
        fails_at = 0
        step()
        assert pipe.steps == asked + 1
        whole = noisy_pair()
        pl.reference.step(whole, pipe.schedule, x, target=x, loss_fn=square, seed=3, number=asked)
        assert all(torch.equal(one.grad, other.grad) for one, other in both_sides(module, whole[rank]))  # type: ignore[arg-type]
    pipe.steps += rank
    with pytest.raises(DisagreementError, match="steps is 4 on rank 0 and 5 on rank 1"):
        step()
    pipe.close()


def both_sides(one: nn.Module, other: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    return zip(one.parameters(), other.parameters(), strict=True)


def test_a_step_that_failed_elsewhere_draws_nothing() -> None:
    launch(fail_late_then_step, 2, timeout=30.0)
