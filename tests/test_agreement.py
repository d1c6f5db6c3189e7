"""Ranks that make different pipelines or different calls: everybody hears of it at once, and may go on."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipeloom as pl
from models import WIDTH
from pipeloom.action import Kind
from pipeloom.errors import CheckpointError, DisagreementError, PeerFailed, PipelineError
from pipeloom.runtime.launcher import launch
from pipeloom.runtime.overlap import Part
from soak import BoomError
from test_pipeline import make, square

RANKS = 3


class Pair(nn.Module):
    """Two weights that could be one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.other(self.linear(x))
        return result


def pipeline(name: str = "1F1B", ranks: int = RANKS, **options: Any) -> pl.Pipeline:
    schedule = make(name, ranks, 4)
    stages = [pl.Stage(Pair(), stage) for stage in schedule.stages_of(dist.get_rank())]
    return pl.Pipeline(stages, schedule, loss_fn=square, **options)


def run(pipe: pl.Pipeline, call: Callable[..., Any]) -> None:
    x = torch.ones(8, WIDTH)
    call(*([x] if pipe.first else []), target=x if pipe.last else None)


def calls(pipe: pl.Pipeline, folder: Path) -> dict[str, Callable[[], object]]:
    """All calls that every rank makes."""
    return {
        "step": lambda: run(pipe, pipe.step),
        "eval": lambda: run(pipe, pipe.eval),
        "loss": pipe.loss,
        "clip_grad_norm_": lambda: pipe.clip_grad_norm_(1.0),
        "trace": pipe.trace,
        "tie": lambda: pipe.tie("0:linear.weight", "0:other.weight"),
        "save": lambda: pl.save(folder / "checkpoint", pipe),
        "load": lambda: pl.load(folder / "checkpoint", pipe),
    }


def both(one: Callable[[], object], other: Callable[[], object]) -> None:
    one()
    other()


def call_another(one: str, folder: Path, transport: Literal["local", "torch"]) -> None:
    """Rank 1 makes every call in which another is due, and the next step is right every time."""
    pipe = pipeline(transport=transport)
    every = calls(pipe, folder)
    for another in every:
        if another == one:
            continue
        every["step"]()
        mine = every[another if dist.get_rank() == 1 else one]
        dist.barrier()  # all ranks are named where all come within a moment
        with pytest.raises(DisagreementError, match=r"call is '.*' on ranks 0, 2 and '.*' on rank 1"):
            both(mine, pipe.loss)
        for module in pipe.modules.values():
            module.zero_grad()
    every["step"]()
    pipe.close()


@pytest.mark.parametrize("transport", ["local", "torch"])
@pytest.mark.parametrize("one", ["step", "eval", "loss", "clip_grad_norm_", "trace", "tie", "save", "load"])
def test_calls_that_differ(one: str, transport: Literal["local", "torch"], tmp_path: Path) -> None:
    launch(call_another, RANKS, one, tmp_path, transport, timeout=30.0)


def tie_others() -> None:
    pipe = pipeline()
    with pytest.raises(DisagreementError, match=r"names is '0:linear.weight 0:other.weight' on ranks 0, 2 and "):
        pipe.tie(*(f"{int(dist.get_rank() == 1)}:{name}.weight" for name in ("linear", "other")))
    with pytest.raises(PipelineError, match="no stage has a parameter '9:weight'"):
        pipe.tie("9:weight", "0:linear.weight")
    run(pipe, pipe.step)
    pipe.close()


def test_ties_that_differ() -> None:
    launch(tie_others, RANKS, timeout=30.0)


def make_others() -> None:
    rank = dist.get_rank()
    options: dict[str, tuple[Any, Any]] = {
        "transport": ("local", "torch"),
        "seed": (1, None),
        "weight": ("samples", "equal"),
    }
    for name, values in options.items():
        with pytest.raises(DisagreementError, match=f"{name} is '"):
            pipeline(**{name: values[rank == 1]})
    pipe = pipeline()
    run(pipe, pipe.step)
    pipe.close()


def test_options_that_differ() -> None:
    launch(make_others, RANKS, timeout=30.0)


def refused_on_one() -> None:
    """What one rank alone is refused, the others hear; what all are refused, each says itself."""
    rank = dist.get_rank()
    mistakes: dict[str, Callable[[], object]] = {
        "places stages": lambda: pl.Pipeline([pl.Stage(Pair(), 7)], make("1F1B", RANKS, 4)),
        "is given twice": lambda: pl.Pipeline([pl.Stage(Pair(), 1)] * 2, make("1F1B", RANKS, 4)),
        "boom": lambda: pl.Pipeline(boom(), make("1F1B", RANKS, 4)),
    }
    for text, mistake in mistakes.items():
        for wrong in ([1], range(RANKS)):
            expected = (PipelineError, BoomError) if rank in wrong else PeerFailed
            with pytest.raises(expected, match=text):
                mistake() if rank in wrong else pipeline()
    pipe = pipeline()
    run(pipe, pipe.step)
    pipe.close()


def boom() -> Iterator[pl.Stage]:
    yield pl.Stage(Pair(), dist.get_rank())
    raise BoomError("boom")


def test_a_pipeline_that_one_rank_cannot_make() -> None:
    launch(refused_on_one, RANKS, timeout=30.0)


def one_after_another(transport: Literal["local", "torch"]) -> None:
    """Pipelines that were closed and some that were not, in any order."""
    open_ones = []
    for keep in (False, True, False, False, True, False):
        pipe = pipeline(transport=transport)
        run(pipe, pipe.step)
        if keep:
            open_ones.append(pipe)
        else:
            pipe.close()
    for pipe in open_ones:
        run(pipe, pipe.step)
        pipe.close()


@pytest.mark.parametrize("transport", ["local", "torch"])
def test_pipelines_one_after_another(transport: Literal["local", "torch"]) -> None:
    launch(one_after_another, RANKS, transport, timeout=30.0)


def leave_out() -> None:
    """Rank 1 closes its pipeline while the others are in a call of it; then all go on with another one."""
    for call in (pl.Pipeline.loss, pl.Pipeline.trace, lambda pipe: run(pipe, pipe.step)):
        pipe = pipeline()
        run(pipe, pipe.step)
        if dist.get_rank() == 1:
            time.sleep(0.1)
        else:
            with pytest.raises(PeerFailed, match=r"rank 1 on .*: it closed its pipeline"):
                call(pipe)
        pipe.close()


def test_a_call_that_a_rank_leaves_out_ends_with_its_pipeline() -> None:
    launch(leave_out, RANKS, timeout=30.0)


def cross(transport: Literal["local", "torch"], name: str) -> None:
    """Rank 1 calls two pipelines in another order than the rest."""
    one, other = pipeline(name, transport=transport), pipeline(name, transport=transport)
    for pipe in (one, other, other, one):
        run(pipe, pipe.step)
    turned = [other, one] if dist.get_rank() == 1 else [one, other]
    with pytest.raises(DisagreementError, match="all ranks call their pipelines in the same order"):
        run(turned[0], turned[0].step)
    for pipe in turned:
        pipe.close()


@pytest.mark.parametrize("transport", ["local", "torch"])
@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_pipelines_that_are_called_in_different_orders(transport: Literal["local", "torch"], name: str) -> None:
    launch(cross, RANKS, transport, name, timeout=30.0)


def make_another(first: bool) -> None:
    """Rank 1 makes a pipeline where the others step, or the other way round."""
    pipe = pipeline()
    run(pipe, pipe.step)
    if (dist.get_rank() == 1) is first:
        with pytest.raises((DisagreementError, PeerFailed), match=r"order|before it had connected|is gone"):
            pipeline()
    else:
        with pytest.raises(DisagreementError, match=r"Pipeline of pipeline 2 .* all ranks call their pipelines in the"):
            run(pipe, pipe.step)


@pytest.mark.parametrize("first", [True, False])
def test_a_pipeline_that_is_made_where_others_step(first: bool) -> None:
    launch(make_another, RANKS, first, timeout=30.0)


def in_threads() -> None:
    """Two pipelines, each in a thread of its own, at whatever pace."""
    pipes = [pipeline(), pipeline()]

    def train(pipe: pl.Pipeline) -> None:
        for _ in range(20):
            run(pipe, pipe.step)
            done.append(pipe.loss())

    done: list[Tensor] = []
    threads = [threading.Thread(target=train, args=[pipe]) for pipe in (pipes if dist.get_rank() else pipes[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 40


def test_pipelines_in_threads() -> None:
    launch(in_threads, RANKS, timeout=30.0)


def in_two_threads(folder: Path) -> None:
    """While one thread is in a step another one makes each other call of the same pipeline."""
    pipe = pipeline()
    others = calls(pipe, folder) | {"close": pipe.close}
    refused: list[str] = []

    def call(name: str) -> None:
        with pytest.raises((PipelineError, CheckpointError), match="another thread is in a call of this pipeline"):
            others[name]()
        refused.append(name)

    def call_all(*_: object) -> None:
        for name in others:
            thread = threading.Thread(target=call, args=[name])
            thread.start()
            thread.join()

    for module in pipe.modules.values():
        module.register_forward_hook(call_all)
    for _ in range(2):
        run(pipe, pipe.step)
    assert refused == [*others] * 4 * 2
    pipe.close()


def test_two_threads_in_one_pipeline(tmp_path: Path) -> None:
    launch(in_two_threads, RANKS, tmp_path, timeout=30.0)


class Breaks(nn.Module):
    """Raises in one of its forwards, or in the backward of it."""

    def __init__(self, number: int, kind: Kind) -> None:
        super().__init__()
        self.pair, self.number, self.kind, self.calls = Pair(), number, kind, 0

    def forward(self, x: Tensor) -> Tensor:
        number, self.calls = self.calls, self.calls + 1
        result: Tensor = self.pair(x)
        if number == self.number:
            if self.kind is Kind.F:
                raise BoomError
            result.register_hook(self._raise)
        return result

    def _raise(self, _: Tensor) -> Tensor:
        raise BoomError


def in_turn(one: Part, other: Part) -> None:
    other()
    one()


def break_a_part(stage: int, kind: Kind, registered: bool) -> None:
    schedule = make("DualPipeV", 4, 8)
    held = schedule.stages_of(dist.get_rank())
    row = schedule.rows[schedule.placement[stage]]
    cell, part = next((cell, each) for cell in row for each in cell.parts if (each.stage, each.kind) == (stage, kind))
    forwards = [
        each.microbatch for every in row for each in every.computes if (each.stage, each.kind) == (stage, Kind.F)
    ]
    modules = {each: Breaks(forwards.index(part.microbatch), kind) if each == stage else Pair() for each in held}
    pipe = pl.Pipeline([pl.Stage(module, each) for each, module in modules.items()], schedule, loss_fn=square)
    if registered:
        pipe.register("OVERLAP_F_B", in_turn)
    with pytest.raises(BoomError if stage in held else PeerFailed) as caught:
        run(pipe, pipe.step)
    if stage not in held:
        assert isinstance(caught.value, PeerFailed)
        assert (caught.value.stage, caught.value.microbatch) == (stage, part.microbatch)
        assert caught.value.action == str(cell)


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("stage", [1, 6])
@pytest.mark.parametrize("kind", [Kind.F, Kind.B])
def test_the_part_of_a_composite_that_failed_is_named(stage: int, kind: Kind, registered: bool) -> None:
    launch(break_a_part, 4, stage, kind, registered, timeout=30.0)


def ask_otherwise() -> None:
    pipe = pipeline()
    with pytest.raises(DisagreementError, match=r"reduce is True on ranks 0, 2 and False on rank 1"):
        run(pipe, partial(pipe.step, reduce=dist.get_rank() != 1))
    run(pipe, pipe.step)
    with pytest.raises(DisagreementError, match=r"max_norm is 1\.0 on ranks 0, 2 and 2\.0 on rank 1"):
        pipe.clip_grad_norm_(2.0 if dist.get_rank() == 1 else 1.0)
    run(pipe, pipe.step)
    assert pipe.clip_grad_norm_(1) > 0
    pipe.close()


def test_settings_of_calls_that_differ() -> None:
    launch(ask_otherwise, RANKS, timeout=30.0)


def call_inside(folder: Path, transport: Literal["local", "torch"]) -> None:
    """A hook of one rank makes each call in the middle of a step; all hear of it, and the next step is right."""
    pipe, other = pipeline(transport=transport), pipeline(transport=transport)
    inside: dict[str, Callable[[], object]] = {
        **calls(pipe, folder),
        "another's eval": lambda: run(other, other.eval),
        "Pipeline": pipeline,
        "close": pipe.close,
    }
    due: list[Callable[[], object]] = []
    for module in pipe.modules.values():
        module.register_forward_hook(lambda *_: due.pop()() if due else None)
    for call in inside.values():
        due += [call] if dist.get_rank() == 1 else []
        with pytest.raises(
            (PipelineError, PeerFailed, CheckpointError), match=r"is called from inside step|another rank"
        ):
            both(lambda: run(pipe, pipe.step), pipe.loss)
        for module in pipe.modules.values():
            module.zero_grad()
        run(pipe, pipe.step)
    pipe.close()
    other.close()


@pytest.mark.parametrize("transport", ["local", "torch"])
def test_calls_inside_calls(transport: Literal["local", "torch"], tmp_path: Path) -> None:
    launch(call_inside, RANKS, tmp_path, transport, timeout=30.0)


def fail_late(folder: Path) -> None:
    """Rank 0 fails in its last backward; the others have finished the step, and hear of it in the call after it."""
    pipe = pipeline()
    every = calls(pipe, folder) | {"gather": lambda: pipe.gather("here")}
    backwards = itertools.count(1)
    fails_at = 0

    def fail(*_: object) -> None:
        if next(backwards) == fails_at:
            raise BoomError

    pipe.parameters()[0].register_hook(fail)
    run(pipe, pipe.step)
    every["save"]()
    expected = [parameter.grad for parameter in pipe.parameters()]
    for call in (call for name, call in every.items() if name not in ("step", "eval")):  # no step can follow these
        for module in pipe.modules.values():
            module.zero_grad()
        backwards, fails_at = itertools.count(1), 4 * (dist.get_rank() == 0)
        with pytest.raises((BoomError, PeerFailed, CheckpointError)):
            both(lambda: run(pipe, pipe.step), call)
        fails_at = 0
        assert all(parameter.grad is None for parameter in pipe.parameters())
        run(pipe, pipe.step)
        assert all(map(torch.equal, [parameter.grad for parameter in pipe.parameters()], expected))  # type: ignore[arg-type]
    pipe.close()


def test_a_failure_that_is_heard_of_in_the_next_call_leaves_no_gradients(tmp_path: Path) -> None:
    launch(fail_late, RANKS, tmp_path, timeout=30.0)


def use_too_early(call: str, folder: Path) -> None:
    """Rank 0 fails in its last backward, and the others hear of it after their optimizer's step: nobody goes on."""
    pipe = pipeline()
    every = calls(pipe, folder) | {"gather": lambda: pipe.gather("here")}
    backwards = itertools.count(1)

    def fail(*_: object) -> None:
        if dist.get_rank() == 0 and next(backwards) == 4:
            raise BoomError

    pipe.parameters()[0].register_hook(fail)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)

    def step() -> None:
        run(pipe, pipe.step)
        optimizer.step()
        optimizer.zero_grad()
        every[call]()

    with pytest.raises((BoomError, PeerFailed, CheckpointError)):
        step()
    for again in (step, lambda: run(pipe, pipe.eval), lambda: pipe.gather("there")):
        with pytest.raises((PipelineError, PeerFailed), match="no step can follow"):
            both(again, every["loss"])
    pipe.close()


@pytest.mark.parametrize("call", ["loss", "clip_grad_norm_", "gather", "save"])
def test_a_failure_that_is_heard_of_after_the_optimizers_step_is_the_last(call: str, tmp_path: Path) -> None:
    launch(use_too_early, RANKS, call, tmp_path, timeout=30.0)


def evaluate_before_using() -> None:
    """An evaluation that fails elsewhere changes no weights, whatever the optimizer did before it."""
    pipe = pipeline()
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    run(pipe, pipe.step)
    optimizer.step()
    optimizer.zero_grad()
    forwards = itertools.count(1)

    def fail(*_: object) -> None:
        if dist.get_rank() == RANKS - 1 and next(forwards) == 4:
            raise BoomError

    next(iter(pipe.modules.values())).register_forward_hook(fail)
    with pytest.raises((BoomError, PeerFailed)):
        both(lambda: run(pipe, pipe.eval), pipe.loss)
    run(pipe, pipe.step)
    assert pipe.loss() > 0
    pipe.close()


def test_an_evaluation_that_failed_elsewhere_is_not_the_last_call() -> None:
    launch(evaluate_before_using, RANKS, timeout=30.0)
