"""The norm of all gradients of a model that is spread over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from pipeloom.runtime.replicas import local

_ABSENT = -1.0
"""Stands for the norm of a parameter without a gradient."""


def clip_grad_norm_(
    modules: Mapping[int, nn.Module],
    stages: int,
    max_norm: float,
    group: dist.ProcessGroup | None,
    *,
    uncounted: Iterable[nn.Parameter],
) -> Tensor:
    """Scale the gradients in `modules`, numbered by stage, so that the norm over `stages` is at most `max_norm`.

    Stages numbered `stages` or more are copies of those below, and not counted again.

    The norm is taken over the parameters' own norms in the order of the model, as
    `torch.nn.utils.clip_grad_norm_` takes it over the whole model, and so is equal to it to the bit. The parameters of
    `uncounted` are scaled, but have no part in the norm; nor has a parameter that was there in an earlier stage.

    Returns:
        The norm before.
    """
    passed = {id(parameter) for parameter in uncounted}
    parameters: dict[int, list[nn.Parameter]] = {}
    for stage, module in modules.items():
        if stage < stages:
            parameters[stage] = [parameter for parameter in module.parameters() if id(parameter) not in passed]
            passed.update(map(id, parameters[stage]))
    device = next((each.device for module in modules.values() for each in module.parameters()), torch.device("cpu"))
    counts = torch.zeros(stages + 1, dtype=torch.int64, device=device)
    for stage, own in parameters.items():
        counts[stage] = len(own)
        counts[-1] += sum(each.dtype in (torch.float64, torch.complex128) for each in own)
    if group:
        dist.all_reduce(counts, group=group)
    *lengths, double = counts.tolist()
    starts = [0, *accumulate(lengths)]
    each = torch.zeros(starts[-1], dtype=torch.float64 if double else torch.float32, device=device)
    for stage, own in parameters.items():
        each[starts[stage] : starts[stage + 1]] = _norms(own, each)
    if group:
        dist.all_reduce(each, group=group)
    total: Tensor = torch.linalg.vector_norm(each[each != _ABSENT])
    every = {id(each): each for module in modules.values() for each in module.parameters()}
    gradients = [local(each.grad) for each in every.values() if each.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, (max_norm / (total + 1e-6)).clamp(max=1.0))
    return total


def _norms(parameters: Sequence[nn.Parameter], like: Tensor) -> Tensor:
    """The norm of each parameter's gradient: of the whole, where a mesh of ranks holds it in parts."""
    found = like.new_full((len(parameters),), _ABSENT)
    spread: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
    for index, parameter in enumerate(parameters):
        if parameter.grad is None:
            continue
        if isinstance(parameter.grad, DTensor):
            parameter.grad = gradient = _without_partial_sums(parameter.grad)
            if groups := _holders(gradient):
                spread.setdefault(groups, []).append(index)
        own = local(parameter.grad)
        found[index] = torch.linalg.vector_norm(own, dtype=torch.float32 if own.dtype.itemsize < 4 else None)
    for groups, indices in spread.items():
        squares = found[indices].square()
        for group in groups:
            dist.all_reduce(squares, group=group)
        found[indices] = squares.sqrt()
    return found


def _without_partial_sums(gradient: DTensor) -> DTensor:
    placements = [Replicate() if each.is_partial() else each for each in gradient.placements]
    return gradient if tuple(placements) == gradient.placements else gradient.redistribute(placements=placements)


def _holders(gradient: DTensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups whose product are the ranks that hold parts of a gradient."""
    mesh = gradient.device_mesh
    sharded = [dimension for dimension, each in enumerate(gradient.placements) if not each.is_replicate()]
    return tuple(mesh.get_group(dimension) for dimension in sharded if mesh.size(dimension) > 1)
