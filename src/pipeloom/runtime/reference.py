"""What one process computes: the numbers that a pipeline must equal.

For each microbatch this is plain autograd of the weighted loss through the whole model. The gradients are added up
stage by stage, in the order of that stage's own W or B actions, and forwards run in the order of its F actions. Of a
schedule with copies of the model, what each copy's actions bring is added up first, and then the copies in turn. On the
CPU in float32, with the same number of threads, a pipeline equals it to the bit.

A hook that runs after a gradient was added up sees that of one microbatch here, not the sum up to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.action import Kind
from pipeloom.runtime.executor import keywords_of
from pipeloom.runtime.microbatches import Handling, Weight, batch_size, merge, split, split_keywords, weights
from pipeloom.runtime.randomness import Randomness
from pipeloom.runtime.stage import Stage
from pipeloom.runtime.tape import without_autocast
from pipeloom.runtime.tree import map_tensors
from pipeloom.schedule import Schedule


def step(
    stages: Sequence[nn.Module | Stage],
    schedule: Schedule,
    *args: Any,
    loss_fn: Callable[..., Any],
    target: Any = None,
    losses: list[Tensor] | None = None,
    weight: Weight = "samples",
    handling: Mapping[str, Handling] | None = None,
    seed: int | None = None,
    number: int = 0,
    scaler: torch.amp.GradScaler | None = None,
    added: list[Tensor] | None = None,
    **kwargs: Any,
) -> Any:
    """One step of the whole model in one process; gradients add up in the parameters' `.grad`.

    Args:
        stages: the stages of the model, all of them, in order, each once even if the schedule has copies; their modules
            may be any, and share what they like.
        schedule: whose microbatches and orders are taken.
        args: the inputs of the model, a whole batch.
        loss_fn, target, losses, weight, scaler, kwargs: as for `Pipeline` and `Pipeline.step`; `handling` is the
            pipeline's `kwargs`. Keyword arguments go to every stage whose forward takes them.
        added: a list that the model's forward appends losses to which a pipeline's would hand to `add_loss`; emptied.
        seed, number: the pipeline's `seed`, and how many steps it had done before this one.

    Returns:
        The outputs for the whole batch, detached.
    """
    modules = _modules(stages, schedule)
    count = schedule.microbatches
    targets = [] if target is None else split(target, count, "target")
    inputs = split(args, count, "inputs")
    shares = weights(weight, count, [batch_size(entry) or 1 for entry in targets or inputs], targets)
    keywords = split_keywords(kwargs, count, handling or {}, batch_size(args))
    trainable = [[parameter for parameter in module.parameters() if parameter.requires_grad] for module in modules]
    flat = list(dict.fromkeys(parameter for own in trainable for parameter in own))
    held = [parameter.grad for parameter in flat]
    with _seeded(stages, seed, number) as microbatch_begins:
        extra: list[list[Tensor]] = [[] for _ in range(count)]
        outputs = _forward(modules, schedule, inputs, keywords, microbatch_begins, added, extra)
        found = [_loss(loss_fn, output, targets[index : index + 1]) for index, output in enumerate(outputs)]
        gradients: list[dict[Tensor, Tensor]] = []
        for index, loss in enumerate(found):
            for parameter in flat:
                parameter.grad = None
            weighted = [each * shares[index] for each in (loss, *extra[index]) if each.requires_grad]
            if weighted:
                microbatch_begins(index, True)
                with without_autocast():
                    torch.autograd.backward(weighted if scaler is None else list(scaler.scale(weighted)))
                if added is not None:
                    added.clear()  # of what forwards that were recomputed have added again
            gradients.append({parameter: parameter.grad for parameter in flat if parameter.grad is not None})
    for parameter, gradient in zip(flat, held, strict=True):
        parameter.grad = gradient
    orders = _orders(schedule, (Kind.B, Kind.W))
    for stage, own in enumerate(trainable):
        for parameter in own:
            brought = [
                [gradients[index].pop(parameter) for index in order if parameter in gradients[index]]
                for order in orders[stage :: len(modules)]
            ]
            for value in brought[0] if len(brought) == 1 else _sum(brought):
                parameter.grad = value if parameter.grad is None else parameter.grad + value
    if losses is not None:
        losses[:] = [loss.detach() for loss in found]
    return merge([map_tensors(Tensor.detach, output) for output in outputs])


def evaluate(
    stages: Sequence[nn.Module | Stage],
    schedule: Schedule,
    *args: Any,
    loss_fn: Callable[..., Any] | None = None,
    target: Any = None,
    losses: list[Tensor] | None = None,
    handling: Mapping[str, Handling] | None = None,
    **kwargs: Any,
) -> Any:
    """The forward of the whole model in one process, and its losses where there are targets; as `step`, no gradient."""
    modules = _modules(stages, schedule)
    count = schedule.microbatches
    keywords = split_keywords(kwargs, count, handling or {}, batch_size(args))
    with torch.no_grad():
        outputs = _forward(modules, schedule, split(args, count, "inputs"), keywords)
        if losses is not None and loss_fn is not None and target is not None:
            targets = split(target, count, "target")
            losses[:] = [_loss(loss_fn, output, targets[index : index + 1]) for index, output in enumerate(outputs)]
    return merge(outputs)


@contextmanager
def _seeded(
    stages: Sequence[nn.Module | Stage], seed: int | None, number: int
) -> Iterator[Callable[[int, bool], None]]:
    """Keyed random numbers, if there is a seed: a function to be told when a microbatch begins, or its backward."""
    if seed is None:
        yield lambda _, __: None
        return
    named = [stage if isinstance(stage, Stage) else Stage(stage, index) for index, stage in enumerate(stages)]
    randomness = Randomness(seed, named, len(named))
    try:
        with randomness.during():
            yield lambda index, backward: (randomness.backward if backward else randomness.forward)(number, index)
    finally:
        randomness.remove()


def _modules(stages: Sequence[nn.Module | Stage], schedule: Schedule) -> list[nn.Module]:
    modules = [stage.module if isinstance(stage, Stage) else stage for stage in stages]
    chain = schedule.wiring.stages
    if len(modules) != chain:
        raise ValueError(f"{schedule.name} has {chain} stages; the reference takes all of them, got {len(modules)}")
    return modules


def _orders(schedule: Schedule, kinds: Sequence[Kind]) -> list[list[int]]:
    """The microbatches of each stage, in the order of its actions of `kinds`."""
    orders: list[list[int]] = [[] for _ in range(schedule.stages)]
    for row in schedule.rows:
        for cell in row:
            for action in cell.computes:
                if action.kind in kinds:
                    orders[action.stage].append(action.microbatch)
    return orders


def _forward(
    modules: Sequence[nn.Module],
    schedule: Schedule,
    inputs: Sequence[Any],
    keywords: Sequence[Mapping[str, Any]],
    microbatch_begins: Callable[[int, bool], None] = lambda _, __: None,
    added: list[Tensor] | None = None,
    extra: Sequence[list[Tensor]] = (),
) -> list[Any]:
    wiring = schedule.wiring
    values: list[Sequence[Any]] = [inputs]
    skips: dict[int, list[Any]] = {}
    orders = _orders(schedule, (Kind.F,))
    for stage, module in enumerate(modules):
        names = keywords_of(module)
        outputs: list[Any] = [None] * len(inputs)
        for microbatch in itertools.chain(*orders[stage :: wiring.stages]):
            value = values[-1][microbatch]
            arguments = [*value] if isinstance(value, tuple) else [value]
            arguments += [skips[source][microbatch] for source in wiring.sources(stage)[1:]]
            given = {name: each for name, each in keywords[microbatch].items() if names is None or name in names}
            microbatch_begins(microbatch, False)
            outputs[microbatch] = module(*arguments, **given)
            if added:
                extra[microbatch].extend(added)
                added.clear()
        if len(wiring.targets(stage)) > 1:
            skips[stage] = [output[-1] for output in outputs]
            outputs = [output[:-1] if len(output) > 2 else output[0] for output in outputs]
        values.append(outputs)
    return list(values[-1])


def _sum(brought: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The sum over all copies of what each has brought, if any has brought something."""
    sums = [reduce(add, each) for each in brought if each]
    return [reduce(add, sums)] if sums else []


def _loss(loss_fn: Callable[..., Any], output: Any, target: Sequence[Any]) -> Tensor:
    found = loss_fn(output, *target)
    loss: Tensor = found[0] if isinstance(found, tuple) else found
    return loss
