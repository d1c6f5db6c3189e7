"""Trees: the values that stages exchange, any nesting of tuples, lists and dicts of tensors and plain values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def map_tensors(function: Callable[[Tensor], Any], value: Any, where: str = "the value") -> Any:
    """The tree `value` with `function` applied to each tensor.

    Raises:
        TypeError: something in the tree is neither a tensor nor a plain value; the message names the place.
    """
    if isinstance(value, Tensor):
        return function(value)
    kind = type(value)
    if kind is tuple:
        return tuple([map_tensors(function, item, f"{where}[{at}]") for at, item in enumerate(value)])
    if kind is list:
        return [map_tensors(function, item, f"{where}[{at}]") for at, item in enumerate(value)]
    if kind is dict:
        return {key: map_tensors(function, item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, PLAIN):
        return value
    raise TypeError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}; stages exchange tensors and plain values "
        "(None, bool, int, float, complex, str, bytes) in tuples, lists and dicts"
    )


def tensors(value: Any) -> list[Tensor]:
    """All tensors of a tree, in order."""
    found: list[Tensor] = []
    map_tensors(found.append, value)
    return found
