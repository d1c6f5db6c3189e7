"""Cuts a chain of layers into stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch.distributed as dist
from torch import nn

from pipeloom.errors import SplitError
from pipeloom.runtime.stage import Stage
from pipeloom.schedule import Schedule
from pipeloom.splitter._layers import Layer, layers_of, outward
from pipeloom.splitter._part import part_of
from pipeloom.splitter._ties import shared_buffers_of, ties_of


def split(model: nn.Module, into: Schedule, cuts: Sequence[str] | None = None, rank: int | None = None) -> list[Stage]:
    """Cut `model` into the stages of a schedule, and return those of this rank.

    The model must be a chain of layers: a `Sequential`, or any module whose forward does nothing but pass a value from
    one layer to the next (a `ModuleList` with things before and after it, say), which is verified; or one that lists
    its layers in a method `pipeline_layers()`. Every layer lands in one stage. A stage's module is a part of the model:
    its state-dict keys are those of the whole model, it shares its weights with `model`, and has no other layers in it.

    Without `cuts` the stages are balanced by parameters: the sum of the squares of the stages' parameter counts is the
    least possible, which for equal blocks means equal numbers of them, as nearly as can be. With fewer layers than
    stages, the last stages are identities.

    A parameter that several layers share stays one weight, wherever they land: the stages tell the pipeline, which ties
    the copies (see `Pipeline.tie`).

    Args:
        model: the whole model; it may be on the meta device (see `fill`).
        into: the schedule, of which the number of stages and their placement are used.
        cuts: the names of the layers with which stages 1, 2, ... begin, one fewer than there are stages, such as
            `["blocks.2", "blocks.5"]`. The name of a module that holds several layers stands for the first of them; a
            name given twice makes an identity stage.
        rank: whose stages to return; by default this process's rank in `torch.distributed`.

    Raises:
        SplitError: with every reason why this model, schedule and cuts do not go together.
    """
    name = type(model).__name__
    if into.wiring.skips:
        reason = (
            "the schedule has skip edges, and a chain of layers feeds its neighbours alone; make each Stage by hand"
        )
        raise SplitError(name, [reason])
    rank = _rank(name, into, rank)
    layers = layers_of(model)
    count = into.wiring.stages
    starts = _starts(name, layers, cuts, count) if cuts is not None else _balanced(_parameters(model, layers), count)
    pieces = [layers[start:end] for start, end in pairwise([*starts, len(layers)])]
    ties, shared = ties_of(model), shared_buffers_of(model)
    return [
        Stage(_module(model, pieces, stage % count), stage, whole=True, ties=ties, shared=shared)
        for stage in into.stages_of(rank)
    ]


def _rank(name: str, into: Schedule, rank: int | None) -> int:
    if rank is None:
        if not dist.is_initialized():
            raise SplitError(
                name, ["this process has no rank yet; call torch.distributed.init_process_group() first or give rank="]
            )
        rank = dist.get_rank()
    if not 0 <= rank < into.ranks:
        raise SplitError(name, [f"rank {rank} has no row in '{into.name}', which has {into.ranks} ranks; give rank="])
    return rank


def _parameters(model: nn.Module, layers: list[Layer]) -> list[int]:
    home = {member: index for index, layer in enumerate(layers) for member in layer.members}
    counts = [0] * len(layers)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        counts[next(home[outer] for outer in outward(name) if outer in home)] += parameter.numel()
    return counts


def _starts(name: str, layers: list[Layer], cuts: Sequence[str], count: int) -> list[int]:
    reasons = []
    if len(cuts) != count - 1:
        reasons.append(f"{count} stages need {count - 1} cuts, got {len(cuts)}: {list(cuts)}")
    starts = [0]
    for cut in cuts:
        found = next(
            (i for i, layer in enumerate(layers) if any(cut in outward(member) for member in layer.members)), None
        )
        if found is None:
            known = ", ".join(layer.members[0] for layer in layers)
            reasons.append(f"cut '{cut}' names no layer; the layers are {known}")
        elif found < starts[-1]:
            reasons.append(f"cut '{cut}' comes before the cut in front of it; cuts go in the order of the layers")
        else:
            starts.append(found)
    if reasons:
        raise SplitError(name, reasons)
    return starts


def _balanced(weights: Sequence[int], count: int) -> list[int]:
    """Where each of `count` stages starts so that the squares of their weights add up to the least."""
    sums = [0, *accumulate(weight + 1 for weight in weights)]  # + 1: a layer without parameters takes time too
    layers = len(weights)
    filled = min(count, layers)
    best: list[float] = [0, *[math.inf] * layers]  # the cost of the stages so far, by the layer before which they end
    begins = [[0] * (layers + 1)]  # where the last of them begins
    for stage in range(1, filled + 1):
        cost: list[float] = [math.inf] * (layers + 1)
        begin = [layers] * (layers + 1)
        latest = layers - 1
        for end in range(layers, stage - 1, -1):
            # A stage begins no earlier than with one stage fewer, and no later than with one layer more (Knuth).
            starts = range(max(stage - 1, begins[-1][end]), min(end - 1, latest) + 1)
            cost[end], begin[end] = min((best[start] + (sums[end] - sums[start]) ** 2, start) for start in starts)
            latest = begin[end]
        best = cost
        begins.append(begin)
    found = [layers] * (count - filled + 1)
    for begin in reversed(begins[1:]):
        found.insert(0, begin[found[0]])
    return found[:-1]


class _Part(nn.Module):
    """What makes a part of a model a stage: it runs its own layers and no others.

    They are looked up by name at each call, so that a layer may be wrapped or replaced after the split. A tuple between
    two layers is one value, also where the layers are in two stages: it goes there as the one item of another tuple.
    """

    _steps: tuple[tuple[str, bool], ...]
    _begins: bool
    _ends: bool

    def forward(self, *inputs: object) -> object:
        value: object = inputs[0] if len(inputs) == 1 else inputs
        for index, (name, method) in enumerate(self._steps):
            step = getattr(self, name) if method else self.get_submodule(name)
            value = step(*inputs) if index == 0 and self._begins else step(value)
        return (value,) if isinstance(value, tuple) and not self._ends else value


def _module(model: nn.Module, pieces: list[list[Layer]], position: int) -> nn.Module:
    layers = pieces[position]
    inner = dict(model.named_modules(remove_duplicate=False))
    members = [member for layer in layers for member in layer.members]
    part = part_of(
        model,
        {member: inner[member] for member in members if member in inner},
        {member for member in members if member not in inner},
    )
    part.__class__ = type(f"{type(model).__name__}Stage", (_Part, type(model)), {"__module__": __name__})
    part.__dict__ |= {
        "_steps": tuple((layer.name, layer.method) for layer in layers),
        "_begins": position == 0,
        "_ends": position == len(pieces) - 1,
    }
    return part
