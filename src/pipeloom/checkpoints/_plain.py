"""Plain values as JSON, such that what is read back equals what was written: tuples, small tensors and all numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pipeloom.errors import CheckpointError


def encode(value: object, where: str) -> Any:
    """`value` as JSON can hold it: None, bool, int, float, str, and lists, tuples, mappings and tensors of such.

    Raises:
        CheckpointError: there is something else in it; `where` says in what.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        return {"tensor": value.detach().cpu().tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, tuple):
        return {"tuple": [encode(each, where) for each in value]}
    if isinstance(value, list):
        return [encode(each, where) for each in value]
    if isinstance(value, Mapping):
        return {"mapping": [[encode(key, where), encode(each, where)] for key, each in value.items()]}
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise CheckpointError(
        "", "saved", [f"{where} holds a {kind}; only None, bool, int, float, str, list, tuple, dict and tensors can be"]
    )


def decode(value: Any) -> Any:
    """The value that `encode` was given."""
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
    if "tuple" in value:
        return tuple(decode(each) for each in value["tuple"])
    return {decode(key): decode(each) for key, each in value["mapping"]}
