"""Ways to use a pipeline that take more than to train a model: the bodies of cases."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeloom.errors import PeerFailed, PipelineError
from pipeloom.selftest import models
from pipeloom.selftest.bench import Bench, Pair, Unequal, numbers, train
from pipeloom.selftest.models import WIDTH, each, square


def several_steps(bench: Bench) -> None:
    """The gradients of three batches add up; then the same again after the optimizer's step."""
    pair = bench.pair(each(models.linear))
    for index in range(6):
        pair.step(*pair.batch(index))
        if index % 3 == 2:
            pair.clip(1.0)
            pair.update()


def tied(bench: Bench) -> None:
    """One weight in the first stage and the last: the copies stay equal to the bit."""
    pair = bench.pair(each(models.Weight), exact=False)
    last = bench.schedule.wiring.stages - 1
    pair.whole[last].weight = pair.whole[0].weight
    pair.pipe.tie("0:weight", f"{last}:weight")
    train(pair)
    pair.update()
    copies = torch.zeros(2, WIDTH, WIDTH)
    for index, stage in enumerate((0, last)):
        if stage in pair.own:
            copies[index] = pair.own[stage].get_parameter("weight").detach()
    dist.all_reduce(copies)
    if not torch.equal(copies[0], copies[1]):
        raise Unequal("the copies of a tied weight differ from each other")


def hooked(bench: Bench) -> None:
    """What hooks and stages keep is never written to later."""
    pair = bench.pair(each(models.Hooked))
    train(pair)
    for stage, module in pair.own.items():
        assert isinstance(module, models.Hooked)
        for now, before in module.kept:
            pair.same(f"a tensor that stage {stage} kept", now.detach(), before)


def compiled(bench: Bench) -> None:
    """Stages behind torch.compile, whose graphs are opaque; this backend needs no C++ compiler."""
    build = each(models.linear)
    train(bench.pair(lambda stages: [_compile(module) for module in build(stages)], exact=False))


def _compile(module: nn.Module) -> nn.Module:
    found: nn.Module = torch.compile(module, backend="aot_eager", dynamic=True)  # type: ignore[assignment]  # it is one
    return found


def skips(bench: Bench) -> None:
    """A U-Net: two values skip stages, to one stage."""
    plain = bench.schedule
    last = plain.wiring.stages - 1
    if last < 2:
        raise PipelineError(f"an edge that skips a stage needs three stages, and {plain.name} has {last + 1}")
    edges = ((0, last), (1, last)) if last > 2 else ((0, last),)
    wired = dataclasses.replace(plain, wiring=dataclasses.replace(plain.wiring, skips=edges))
    sources = {source for source, _ in edges}
    train(bench.pair(each(lambda stage: models.Down() if stage in sources else models.Up()), schedule=wired))


def keywords(bench: Bench) -> None:
    """Keyword arguments that are split, replicated by their shape and by name, and ready."""
    pair = bench.pair(each(models.Masked), kwargs={"table": "replicate"})
    x, y = pair.batch(0)
    mask = numbers(len(x), 2)
    for table in (numbers(1, 3), numbers(WIDTH, 4, 1)[:1], torch.tensor(0.5)):
        given: dict[str, Any] = {"mask": mask, "table": table, "scale": 0.5, "flag": "on"}
        pair.step(x, y, **given)
        pair.eval(x, y, **given)
    parts = mask.tensor_split(bench.schedule.microbatches)
    losses: list[Tensor] = []
    ready = [{**given, "mask": part} for part in parts]
    output = pair.pipe.step(*pair.inputs(x), target=pair.target(y), losses=losses, kwarg_mbs=ready)
    pair.follow(output, losses, x, y, **given)


def ready_lists(bench: Bench) -> None:
    """Microbatches of different lengths, each weighted by its samples."""
    pair = bench.pair(each(models.linear), loss_fn=_pooled, exact=False)
    count = bench.schedule.microbatches
    inputs = [numbers(2, seed, 3 + seed % 3, WIDTH) for seed in range(count)]
    targets = [numbers(2, seed + 100) for seed in range(count)]
    losses: list[Tensor] = []
    pair.pipe.step(
        arg_mbs=inputs if pair.pipe.first else None,
        target_mbs=targets if pair.pipe.last else None,
        losses=losses,
        return_outputs=False,
    )
    expected = [_pooled(nn.Sequential(*pair.whole)(x), y) for x, y in zip(inputs, targets, strict=True)]
    torch.stack(expected).mean().backward()
    for index, loss in enumerate(losses):
        pair.same(f"loss {index}", loss, expected[index].detach())
    pair.same_gradients()


def _pooled(output: Tensor, target: Tensor) -> Tensor:
    return square(output.mean(1), target)


def changing_shapes(bench: Bench) -> None:
    """Batch and length change from step to step, and evaluations have shapes of their own."""
    pair = bench.pair(each(models.linear), loss_fn=_pooled)
    count = bench.schedule.microbatches
    for seed, (more, length) in enumerate([(0, 5), (2, 3), (0, 5), (count + 1, 2)]):
        x, y = numbers(count + more, seed, length, WIDTH), numbers(count + more, seed + 10)
        pair.step(x, y)
        pair.eval(x[:3], y[:3], microbatches=min(3, len(x)))


def no_target(bench: Bench) -> None:
    """Uneven microbatches whose weights only the first rank knows."""
    pair = bench.pair(each(models.linear), loss_fn=lambda output: output.square().mean())
    for seed in range(2):
        pair.step(pair.batch(seed)[0])
    if not torch.isfinite(pair.pipe.loss()):
        raise Unequal("the loss is not finite")


def loss_and_more(bench: Bench) -> None:
    """A loss function that returns metrics too, and takes its target as a dict."""

    def loss_fn(output: Tensor, target: dict[str, Any]) -> tuple[Tensor, dict[str, float]]:
        return square(output, target["y"]), {"largest": float(output.detach().max())}

    pair = bench.pair(each(models.linear), loss_fn=loss_fn)
    for seed in range(2):
        x, y = pair.batch(seed)
        pair.step(x, {"y": y, "name": "a batch"})
        pair.eval(x, {"y": y, "name": "a batch"})


def summed(output: Tensor, target: Tensor) -> Tensor:
    """The sum of squared errors."""
    return (output - target).square().sum()


def valid_targets(target: Tensor) -> Tensor:
    """How many entries of a target count."""
    return (target > 0).sum()


def _valid_only(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square()[target > 0].mean()


def full_batch(bench: Bench, loss_fn: Callable[..., Any] | None = None, weight: Any = "samples") -> None:
    """Microbatches of any sizes have the loss and the gradients of the batch taken at once."""
    loss_fn = loss_fn or (_valid_only if callable(weight) else square)
    pair = bench.pair(each(models.linear), loss_fn=loss_fn, weight=weight, exact=False)
    x, y = pair.batch(0)
    pair.step(x, y)
    for module in pair.whole:
        module.zero_grad()
    loss = loss_fn(nn.Sequential(*pair.whole)(x), y)
    loss.backward()
    pair.same("the loss", pair.pipe.loss(), loss.detach())
    pair.same_gradients()


def few_microbatches(bench: Bench) -> None:
    """Fewer microbatches than stages or ranks, and more than twice the ranks."""
    if bench.resize is None:
        raise PipelineError(f"{bench.schedule.name} is a text, and has as many microbatches as it has")
    for microbatches in (1, 2, 2 * bench.schedule.ranks + 1):
        pair = bench.pair(each(models.linear), schedule=bench.resize(microbatches))
        pair.step(*pair.batch(microbatches))
        pair.eval(*pair.batch(0))


def failed_step(bench: Bench) -> None:
    """A stage raises in the middle of a step: all hear of it, nothing of it remains, and the next step is right."""
    pair = bench.pair(each(models.Breaks))
    for broken in (bench.schedule.stages - 1, 0):
        _fail(pair, broken)
        pair.step(*pair.batch(0))
        pair.update()


def _fail(pair: Pair, broken: int) -> None:
    x, y = pair.batch(1)
    if broken in pair.own:
        pair.own[broken].breaks = True  # type: ignore[assignment]  # a plain attribute
    try:
        pair.pipe.step(*pair.inputs(x), target=pair.target(y))
        pair.pipe.loss()  # waits for all, so that everybody hears of it in this step
    except (ArithmeticError, PeerFailed) as error:
        if "out of luck" not in str(error):
            raise
        if isinstance(error, PeerFailed) and error.stage != broken:
            raise Unequal(f"stage {broken} failed, and this rank heard of stage {error.stage}") from error
    else:
        raise Unequal(f"stage {broken} failed, and this rank heard nothing of it")
    if broken in pair.own:
        pair.own[broken].breaks = False  # type: ignore[assignment]  # a plain attribute
    if any(parameter.grad is not None for parameter in pair.parameters(list(pair.own.values()))):
        raise Unequal("gradients of a failed step remain")
