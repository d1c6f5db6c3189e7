"""Parameters and buffers that a model uses under several names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from torch import Tensor, nn


def ties_of(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The names of each parameter that has more than one, in the order of the model."""
    return _names(model.named_parameters(remove_duplicate=False))


def shared_buffers_of(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The names of each buffer that has more than one, in the order of the model."""
    return _names(model.named_buffers(remove_duplicate=False))


def _names(named: Iterable[tuple[str, Tensor]]) -> tuple[tuple[str, ...], ...]:
    names: dict[int, list[str]] = defaultdict(list)
    for name, tensor in named:
        names[id(tensor)].append(name)
    return tuple(tuple(same) for same in names.values() if len(same) > 1)
