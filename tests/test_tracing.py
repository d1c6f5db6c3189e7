"""Measured timelines of real runs."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pipeloom as pl
from models import WIDTH, cross_entropy, gpt, text
from pipeloom.errors import PipelineError
from pipeloom.runtime.launcher import launch
from pipeloom.runtime.tracing import _offset
from pipeloom.runtime.transport import connect
from test_pipeline import COPIES, SCHEDULES, make


def traced(name: str) -> None:
    schedule = make(name, 2, 4)
    modules = gpt(schedule.wiring.stages) * schedule.wiring.copies
    stages = [pl.Stage(modules[stage], stage) for stage in schedule.stages_of(dist.get_rank())]
    pipe = pl.Pipeline(stages, schedule, loss_fn=cross_entropy)
    x, y = text(8, seed=0)
    for number in range(3):
        call = pipe.eval if number == 1 else pipe.step
        call(*([x] if pipe.first else []), target=y if pipe.last else None)
        timeline = pipe.trace()
        if dist.get_rank():
            assert timeline is None
            continue
        assert timeline is not None
        assert timeline.measured
        assert 0 < timeline.makespan < 60
        ran = [str(event.action) for event in timeline.events]
        assert len(ran) == len(set(ran))
        assert any("B" in action or "W" in action for action in ran) == (number != 1)
        for event in timeline.events:
            assert 0 <= event.start <= event.end, event
            for earlier in timeline.inputs(event.number):
                before = timeline.events[earlier]
                if event.action is not None and event.action.computes:
                    assert before.start <= event.start, (before, event)
        for rank in range(2):  # in the order of the row
            own = [event for event in timeline.events if event.rank == rank and event.stream == "compute"]
            assert all(one.end <= other.start for one, other in pairwise(own))
            for idle in timeline.idles(rank):
                assert idle.end > idle.start
        assert pl.Timeline.from_json(timeline.to_json()).makespan == timeline.makespan
    pipe.close()


@pytest.mark.parametrize("name", [*SCHEDULES, *COPIES])
def test_what_really_ran(name: str) -> None:
    launch(traced, 2, name)


def profiled() -> None:
    schedule = make("DualPipeV", 2, 4)
    modules = gpt(schedule.stages)
    stages = [pl.Stage(modules[stage], stage) for stage in schedule.stages_of(dist.get_rank())]
    pipe = pl.Pipeline(stages, schedule, loss_fn=cross_entropy)
    x, y = text(8, seed=0)
    arguments = [x] if pipe.first else []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        pipe.step(*arguments, target=y if pipe.last else None)
    row = pl.lower(schedule).rows[dist.get_rank()]
    names = Counter(event.name for event in profile.events())
    for cell in row:
        assert names[f"pipeloom::{cell}"] == 1, cell
        for part in cell.parts:
            assert names[f"pipeloom::{part}"] == 1, (cell, part)
    pipe.close()


def test_the_profiler_shows_each_action_by_name() -> None:
    launch(profiled, 2)


def test_there_is_none_before_the_first_step() -> None:
    pipe = pl.Pipeline([pl.Stage(nn.Linear(WIDTH, 1), 0)], make("GPipe", 1, 2))
    with pytest.raises(PipelineError, match="trace is for after a step or an evaluation, and there was none"):
        pipe.trace()


def clocks() -> None:
    """Two ranks of one machine share a clock, which the exchange finds within its error."""
    group = dist.group.WORLD
    assert group is not None
    transport = connect(group)
    transport.begin(1)
    if group.rank() == 0:
        offset, error = _offset(transport, 1)
        assert 0 < error < 1
        assert abs(offset) <= error
    else:
        for _ in range(16):
            transport.receive(0).wait()
            transport.send(0, time.perf_counter())
    transport.flush()
    dist.barrier()
    transport.close()


def test_clocks_of_other_machines_are_brought_in() -> None:
    launch(clocks, 2)
