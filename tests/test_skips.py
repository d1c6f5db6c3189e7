"""Values that skip stages: U-Nets and encoder-decoders on any schedule, equal to one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipeloom as pl
from models import WIDTH
from pipeloom.errors import PeerFailed, PipelineError
from pipeloom.runtime.launcher import launch
from test_pipeline import Side, square


class Down(nn.Module):
    """Passes on, and sets aside for a later stage what it made on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.linear(x))
        return x, x


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, *skips: Tensor) -> Tensor:
        result: Tensor = self.linear(torch.cat([x, sum(skips, torch.zeros_like(x))], -1))
        return result


def unet(skips: tuple[tuple[int, int], ...], stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    sources = {source for source, _ in skips}
    return [Down() if stage in sources else Up() for stage in range(stages)]


def train(name: str, skips: tuple[tuple[int, int], ...]) -> None:
    ranks = dist.get_world_size()
    plain = pl.schedules.make(name, ranks=ranks, microbatches=4)
    schedule = pl.Schedule.from_rows(plain.rows, wiring=pl.Wiring(plain.stages, skips=skips), name=name)
    side = Side(schedule, lambda stages: unet(skips, stages), loss_fn=square)
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        x, y = torch.randn(9, WIDTH, generator=generator), torch.randn(9, WIDTH, generator=generator)
        side.step(x, y)
        side.same_gradients()
        side.eval(x, y, microbatches=2)
    side.pipe.close()


@pytest.mark.parametrize("skips", [((0, 3), (1, 2 + 1)), ((0, 2), (0, 3))], ids=["to-one", "from-one"])
@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_skip_edges(name: str, skips: tuple[tuple[int, int], ...]) -> None:
    launch(train, 2, name, skips)


def once(name: str) -> None:
    """Stages 3 and 5 of rank 1 both take in what stage 0 sets aside: it crosses once a microbatch."""
    skips = ((0, 3), (0, 5))
    plain = pl.schedules.make(name, ranks=2, microbatches=4, stages_per_rank=3)
    schedule = pl.Schedule.from_rows(plain.rows, wiring=pl.Wiring(plain.stages, skips=skips), name=name)
    side = Side(schedule, lambda stages: unet(skips, stages), loss_fn=square)
    transport = side.pipe._team.peers.transport
    assert transport is not None
    sent: list[int] = []
    send = transport.send

    def counted(rank: int, value: Any) -> None:
        sent.append(value is not None)
        send(rank, value)

    transport.send = counted  # type: ignore[method-assign]
    for _ in range(2):
        x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
        dist.broadcast(x, 0)
        dist.broadcast(y, 0)
        sent.clear()
        side.step(x, y)
        side.same_gradients()
        if dist.get_rank() == 0:
            assert sent.count(0) == 4  # from stages 0, 2 and 4 to the next, and along one skip edge of two
            assert sum(sent) == 4 * 4 + 4 * 2
    side.pipe.close()


@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS"])
def test_a_value_crosses_once_to_each_rank(name: str) -> None:
    launch(once, 2, name)


def test_linear_schedules_skip_too() -> None:
    launch(train, 3, "1F1B", ((0, 2),))


class ReLUs(nn.Module):
    """Begins in place, as many a U-Net's block does."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu_()


def shared(between: bool) -> None:
    """The first stage hands its output on and sets the same tensor aside."""
    schedule = pl.Schedule.from_rows(
        pl.schedules.make("Interleaved1F1B", ranks=2, microbatches=2).rows, wiring=pl.Wiring(4, skips=((0, 3),))
    )
    modules = [Down(), nn.Identity() if between else ReLUs(), ReLUs(), Up()]
    own = [pl.Stage(modules[stage], stage) for stage in schedule.stages_of(dist.get_rank())]
    pipe = pl.Pipeline(own, schedule, loss_fn=square)
    x = torch.ones(4, WIDTH)

    def run(call: Callable[..., Tensor | None]) -> None:
        call(*([x] if pipe.first else []), target=x if pipe.last else None)
        pipe.loss()

    for call in (pipe.step, pipe.eval):
        with pytest.raises((PipelineError, PeerFailed), match=r"in place, and an earlier stage has handed on the same"):
            run(call)
    pipe.close()


@pytest.mark.parametrize("between", [False, True])
def test_changes_in_place_to_what_was_set_aside_are_refused(between: bool) -> None:
    launch(shared, 2, between)


def test_a_stage_that_feeds_a_skip_edge_returns_its_value() -> None:
    rows = pl.Schedule.from_csv("0F0,1F0,2F0,2B0,1B0,0B0", wiring=pl.Wiring(3, skips=((0, 2),)))
    pipe = pl.Pipeline([pl.Stage(nn.Linear(2, 2), stage) for stage in range(3)], rows, loss_fn=square)
    with pytest.raises(TypeError, match="stage 0 feeds a skip edge, so it returns a tuple whose last entry"):
        pipe.step(torch.ones(1, 2), target=torch.ones(1, 2))
