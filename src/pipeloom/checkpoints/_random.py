"""The states of torch's random generators on this rank: of the CPU, and of the GPU that holds its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def states(tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    """The states by the kind of device, where `tensors` are this rank's part of the model."""
    found = {"cpu": torch.random.get_rng_state()}
    if device := _gpu(tensors):
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore(states: Mapping[str, Tensor], tensors: Iterable[Tensor]) -> None:
    """Go on from `states`."""
    torch.random.set_rng_state(states["cpu"])
    device = _gpu(tensors)
    if device and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def saved_as(rank: int, kind: str) -> str:
    """The name under which the state of a rank's generator is saved."""
    return f"random.{rank}.{kind}"


def _gpu(tensors: Iterable[Tensor]) -> torch.device | None:
    return next((tensor.device for tensor in tensors if tensor.is_cuda), None)
