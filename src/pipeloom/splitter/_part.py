"""A model with only some of its modules and tensors in it, each under the name that it has in the whole model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import copy

from torch import nn


def part_of(
    model: nn.Module, modules: Mapping[str, nn.Module], tensors: Collection[str], prefix: str = ""
) -> nn.Module:
    """A shallow copy of `model` with `modules` in it and nothing else that holds weights; `model` stays as it is.

    Args:
        model: the whole model.
        modules: what to put in, by dotted name: modules of the model, or others in their place.
        tensors: the dotted names of parameters and buffers to keep that are in none of `modules`.
        prefix: the dotted name of `model` within the whole, with a dot behind it.
    """
    part: nn.Module = object.__new__(type(model))
    # Whoever hooks into one part, as fully_shard does, must not be in the others.
    part.__dict__ = {name: copy(value) if "_hooks" in name else value for name, value in model.__dict__.items()}
    for kind in ("_parameters", "_buffers"):
        kept = {
            name: tensor for name, tensor in getattr(model, kind).items() if tensor is None or prefix + name in tensors
        }
        part.__dict__[kind] = kept
    children: dict[str, nn.Module | None] = {}
    for name, child in model._modules.items():
        path = prefix + name
        if child is None or path in modules:
            children[name] = modules.get(path)
        elif any(kept.startswith(path + ".") for kept in (*modules, *tensors)):
            children[name] = part_of(child, modules, tensors, path + ".")
    part.__dict__["_modules"] = children
    return part
