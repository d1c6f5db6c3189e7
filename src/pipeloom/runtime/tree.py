"""Trees: the values that stages exchange, any nesting of tuples, lists and dicts of tensors and plain values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


Place = str | tuple["Place", object]
"""What a value is called: a name, or the place of what holds it and its index or key there."""


def map_tensors(function: Callable[[Tensor], Any], value: Any, where: Place = "the value") -> Any:
    """The tree `value` with `function` applied to each tensor.

    Raises:
        TypeError: something in the tree is neither a tensor nor a plain value; the message names the place.
    """
    kind = type(value)
    if kind is Tensor or isinstance(value, Tensor):
        return function(value)
    if kind is tuple:
        return tuple([map_tensors(function, item, (where, at)) for at, item in enumerate(value)])
    if kind is list:
        return [map_tensors(function, item, (where, at)) for at, item in enumerate(value)]
    if kind is dict:
        return {key: map_tensors(function, item, (where, key)) for key, item in value.items()}
    if isinstance(value, PLAIN):
        return value
    raise TypeError(
        f"{_name(where)} is a {kind.__module__}.{kind.__qualname__}; stages exchange tensors and plain values "
        "(None, bool, int, float, complex, str, bytes) in tuples, lists and dicts"
    )


def _name(place: Place) -> str:
    return place if isinstance(place, str) else f"{_name(place[0])}[{place[1]!r}]"


def tensors(value: Any) -> list[Tensor]:
    """All tensors of a tree, in order."""
    found: list[Tensor] = []
    map_tensors(found.append, value)
    return found
