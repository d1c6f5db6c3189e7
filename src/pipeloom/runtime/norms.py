"""The norm of all gradients of a model that is spread over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
    """Scale the gradients in `modules`, numbered by stage, so that the norm over all `stages` is at most `max_norm`.

    The norm is taken over the parameters' own norms in the order of the model, as
    `torch.nn.utils.clip_grad_norm_` takes it over the whole model, and so is equal to it to the bit. The parameters of
    `uncounted` are scaled, but have no part in the norm; nor has a parameter that was there in an earlier stage.

    Returns:
        The norm before.
    """
    passed = {id(parameter) for parameter in uncounted}
    parameters: dict[int, list[nn.Parameter]] = {}
    for stage, module in modules.items():
        parameters[stage] = [parameter for parameter in module.parameters() if id(parameter) not in passed]
        passed.update(map(id, parameters[stage]))
    device = next((each.device for own in parameters.values() for each in own), torch.device("cpu"))
    counts = torch.zeros(stages, dtype=torch.int64, device=device)
    for stage, own in parameters.items():
        counts[stage] = len(own)
    if group:
        dist.all_reduce(counts, group=group)
    starts = [0, *counts.cumsum(0).tolist()]
    each = torch.zeros(starts[-1], dtype=torch.float32, device=device)
    for stage, own in parameters.items():
        for index, parameter in enumerate(own, start=starts[stage]):
            gradient = parameter.grad
            each[index] = (
                _ABSENT if gradient is None else torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32)
            )
    if group:
        dist.all_reduce(each, group=group)
    total: Tensor = torch.linalg.vector_norm(each[each != _ABSENT])
    every = {id(each): each for module in modules.values() for each in module.parameters() if each.grad is not None}
    nn.utils.clip_grads_with_norm_(every.values(), max_norm, total)
    return total
