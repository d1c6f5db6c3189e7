"""The norm of all gradients of a model that is spread over ranks."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeloom.runtime.imported import is_dtensor
from pipeloom.runtime.peers import Peers
from pipeloom.runtime.replicas import local

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_ABSENT = -1.0
"""Stands for the norm of a parameter without a gradient."""


def clip_grad_norm_(
    modules: Mapping[int, nn.Module],
    stages: int,
    max_norm: float,
    peers: Peers,
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
    own: dict[int, array[float]] = {}
    device = torch.device("cpu")
    for stage, module in modules.items():
        parameters = list(module.parameters())
        device = next((each.device for each in parameters), device)
        counted = [each for each in parameters if id(each) not in passed]
        if stage < stages and counted:
            passed.update(map(id, counted))
            own[stage] = _norms(counted, device)
    everywhere: dict[int, array[float]] = {}
    for each in peers.gather({stage: (found.typecode, found.tobytes()) for stage, found in own.items()}):
        everywhere |= {stage: array(*found) for stage, found in each.items()}
    double = any(found.typecode == "d" for found in everywhere.values())
    norms = torch.tensor(
        [norm for _, found in sorted(everywhere.items()) for norm in found if norm != _ABSENT],
        dtype=torch.float64 if double else torch.float32,
        device=device,
    )
    total: Tensor = torch.linalg.vector_norm(norms)
    every = {id(each): each for module in modules.values() for each in module.parameters()}
    gradients = [local(each.grad) for each in every.values() if each.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, (max_norm / (total + 1e-6)).clamp(max=1.0))
    return total


def _norms(parameters: Sequence[nn.Parameter], device: torch.device) -> array[float]:
    """The norm of each parameter's gradient: of the whole, where a mesh of ranks holds it in parts."""
    double = any(each.dtype in (torch.float64, torch.complex128) for each in parameters)
    found = torch.full((len(parameters),), _ABSENT, dtype=torch.float64 if double else torch.float32, device=device)
    spread: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
    for index, parameter in enumerate(parameters):
        if parameter.grad is None:
            continue
        if is_dtensor(parameter.grad):
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
    return array("d" if double else "f", found.tolist())


def _without_partial_sums(gradient: DTensor) -> DTensor:
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if each.is_partial() else each for each in gradient.placements]
    return gradient if tuple(placements) == gradient.placements else gradient.redistribute(placements=placements)


def _holders(gradient: DTensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups whose product are the ranks that hold parts of a gradient."""
    mesh = gradient.device_mesh
    sharded = [dimension for dimension, each in enumerate(gradient.placements) if not each.is_replicate()]
    return tuple(mesh.get_group(dimension) for dimension in sharded if mesh.size(dimension) > 1)
