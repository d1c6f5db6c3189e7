"""Failures of whole pipelines: everybody hears of them, soon, and the next step is right."""

from __future__ import annotations

import os
import signal
import time
import traceback
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipeloom as pl
from models import WIDTH
from pipeloom.errors import PeerFailed, PipelineError, RankFailed
from pipeloom.runtime.launcher import launch
from processes import run_ranks
from soak import BoomError, case, run
from test_pipeline import make, square

SEEDS = int(os.environ.get("PIPELOOM_BREAKS", "8"))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_random_break(seed: int) -> None:
    """More of these: python tests/soak.py."""
    start = int(os.environ.get("PIPELOOM_BREAKS_SEED", str(os.getpid() * 1000)))
    broken = case(start + seed)
    wrong = run(broken)
    assert not wrong, f"seed {start + seed}: {broken}: {wrong}"


class Late(nn.Module):
    """Raises in the last backward of its second step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = self.linear(x)
        if self.calls == 4:
            result.register_hook(_raise)
        return result


def _raise(_: Tensor) -> Tensor:
    raise BoomError("too late")


def test_a_step_that_failed_after_some_had_finished_it_ends_all(tmp_path: Path) -> None:
    """Parameters may differ by then, so nothing goes on as if they were equal."""

    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        module = Late() if rank == 0 else nn.Linear(WIDTH, WIDTH)
        pipe = pl.Pipeline([pl.Stage(module, rank)], make("1F1B", 2, 2), loss_fn=square)
        x = torch.ones(4, WIDTH)

        def step() -> None:
            pipe.step(*([x] if pipe.first else []), target=x if pipe.last else None)

        step()
        if rank == 0:
            with pytest.raises(BoomError):
                step()
        else:
            step()
        for _ in range(2):
            module.zero_grad()
            with pytest.raises(PeerFailed, match=r"too late(.|\n)*rank 1 had finished by then") as caught:
                step()
            assert "no step can follow" in str(caught.value)

    run_ranks(2, body, tmp_path)


def test_losses_wait_for_all_and_so_hear_of_it(tmp_path: Path) -> None:
    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        module = Late() if rank == 0 else nn.Linear(WIDTH, WIDTH)
        pipe = pl.Pipeline([pl.Stage(module, rank)], make("1F1B", 2, 2), loss_fn=square)
        x = torch.ones(4, WIDTH)

        def step() -> None:
            pipe.step(*([x] if pipe.first else []), target=x if pipe.last else None)
            pipe.clip_grad_norm_(1.0)

        step()
        module.zero_grad()
        with pytest.raises(BoomError if rank == 0 else PeerFailed, match="too late"):
            step()
        assert all(parameter.grad is None for parameter in module.parameters())
        step()
        assert all(parameter.grad is not None for parameter in module.parameters())
        pipe.close()

    run_ranks(2, body, tmp_path)


class Armed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.armed = False

    def forward(self, x: Tensor) -> Tensor:
        if self.armed:
            raise BoomError
        result: Tensor = self.linear(x)
        return result


def asks_after_a_failure(name: str, transport: Literal["local", "torch"], ask: str) -> None:
    schedule = make(name, 2, 4)
    rank = dist.get_rank()
    own = {stage: Armed() for stage in schedule.stages_of(rank)}
    stages = [pl.Stage(module, stage) for stage, module in own.items()]
    pipe = pl.Pipeline(stages, schedule, loss_fn=square, transport=transport)
    x = torch.ones(8, WIDTH)

    def step() -> None:
        pipe.step(*([x] if pipe.first else []), target=x if pipe.last else None)

    asked = {"loss": pipe.loss, "norm": lambda: pipe.clip_grad_norm_(1.0), "trace": pipe.trace}[ask]
    for _ in range(3):
        for module in own.values():
            module.zero_grad()
        if 1 in own:
            own[1].armed = True
        with pytest.raises((BoomError, PeerFailed)):
            step()
        for _ in range(2):
            with pytest.raises(PipelineError, match="the last step failed, so it has no loss, norm or timeline"):
                asked()
        if 1 in own:
            own[1].armed = False
        step()
        asked()
    pipe.close()


@pytest.mark.parametrize("ask", ["loss", "norm", "trace"])
@pytest.mark.parametrize("transport", ["local", "torch"])
@pytest.mark.parametrize("name", ["1F1B", "DualPipe"])
def test_what_is_asked_of_a_failed_step_is_refused_at_once(
    name: str, transport: Literal["local", "torch"], ask: str
) -> None:
    launch(asks_after_a_failure, 2, name, transport, ask, timeout=20.0)


class Ends(nn.Module):
    """Kills or stops its process in a forward that takes long."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            time.sleep(1.5)
            os.kill(os.getpid(), self.number)
        return x * 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_what_a_rank_was_last_doing_is_known(number: signal.Signals, tmp_path: Path) -> None:
    def body(group: dist.ProcessGroup) -> None:
        module = Ends(number) if group.rank() == 1 else nn.Linear(WIDTH, WIDTH)
        pipe = pl.Pipeline([pl.Stage(module, group.rank())], make("1F1B", 3, 4), loss_fn=square, deadline=3)
        with pytest.raises(PeerFailed, match=r"^rank 1 .* when it was last heard of, [\d.]+ s before, it was in 1F2\n"):
            pipe.step(*[torch.ones(8, WIDTH)][: pipe.first], target=torch.ones(8, WIDTH) if pipe.last else None)

    ended = {1: -signal.SIGKILL}
    run_ranks(3, body, tmp_path, statuses=ended, seconds=30, forget=1 if number == signal.SIGSTOP else None)


def test_an_error_shows_a_few_rows_only(tmp_path: Path) -> None:
    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        module = Late() if rank == 0 else nn.Linear(WIDTH, WIDTH)
        pipe = pl.Pipeline([pl.Stage(module, rank)], make("GPipe", 2, 32), loss_fn=square)
        x = torch.ones(32, WIDTH)

        def step() -> None:
            pipe.step(*([x] if pipe.first else []), target=x if pipe.last else None)
            pipe.loss()

        with pytest.raises(BoomError if rank == 0 else PeerFailed) as caught:
            step()
        if rank == 1:
            assert isinstance(caught.value, PeerFailed)
            assert (caught.value.rank, caught.value.stage, caught.value.microbatch) == (0, 0, 3)
            assert caught.value.action == "0B3"
            assert "[0B3]" in caught.value.rows
            assert len(caught.value.rows.splitlines()) <= 3
            assert len(str(caught.value).splitlines()) < 20
            assert "test_failures.py" in caught.value.traceback
            assert os.path.join("pipeloom", "runtime", "executor.py") not in caught.value.traceback
            assert len(traceback.extract_tb(caught.value.__traceback__)) < 6

    run_ranks(2, body, tmp_path)


def raise_on_rank_2() -> None:
    rank = dist.get_rank()
    module = Armed()
    module.armed = rank == 2
    pipe = pl.Pipeline([pl.Stage(module, rank)], make("1F1B", 4, 4), loss_fn=square)
    x = torch.ones(4, WIDTH)
    pipe.step(*([x] if pipe.first else []), target=x if pipe.last else None)


def test_the_launcher_names_the_rank_that_failed_and_none_that_heard_of_it() -> None:
    for _ in range(3):
        with pytest.raises(RankFailed) as caught:
            launch(raise_on_rank_2, 4)
        assert (caught.value.rank, caught.value.status) == (2, 1)
