"""Parameters that a model uses under several names."""

from __future__ import annotations

from collections import defaultdict

from torch import nn


def ties_of(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The names of each parameter that has more than one, in the order of the model."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return tuple(tuple(same) for same in names.values() if len(same) > 1)
