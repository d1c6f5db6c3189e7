"""Values that share memory: in one process a change in place to one shows in the other, across ranks it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipeloom.errors import PipelineError
from pipeloom.runtime.replicas import local
from pipeloom.runtime.tree import tensors

_MARK = "pipeloom: shares memory"


def share_memory(values: Sequence[Any], watched: Sequence[tuple[Tensor, int]]) -> bool:
    """Whether any two tensors of these trees lie in the same storage, or one in that of a watched one."""
    found = [tensor for value in values for tensor in tensors(value)]
    if len(found) < 2 and not watched:
        return False
    storages = _storages(found)
    return len(set(storages)) < len(storages) or not set(storages).isdisjoint(_storages([each for each, _ in watched]))


def _storages(found: Sequence[Tensor]) -> list[int]:
    plain = [tensor for tensor in map(local, found) if tensor.layout is torch.strided and tensor.numel()]
    return [tensor.untyped_storage().data_ptr() for tensor in plain]


def marked(value: Any) -> Any:
    """`value` as one that must not be changed in place, to go along an edge."""
    return {_MARK: value}


def unmarked(value: Any) -> tuple[Any, bool]:
    """A value that came along an edge, and whether it was marked."""
    return (value[_MARK], True) if type(value) is dict and _MARK in value else (value, False)


def versions(value: Any) -> list[tuple[Tensor, int]]:
    """The tensors of a tree, and how often each has been changed in place."""
    return [(tensor, tensor._version) for tensor in tensors(value) if not tensor.is_inference()]


def refuse_changes(stage: int, watched: Sequence[tuple[Tensor, int]]) -> None:
    """Refuse that `stage` has changed one of its inputs.

    Raises:
        PipelineError: a version is another than it was.
    """
    for tensor, version in watched:
        if tensor._version != version:
            raise PipelineError(
                f"stage {stage} changes an input of shape {tuple(tensor.shape)} in place, and an earlier stage has "
                "handed on the same memory twice, so that in one process the other value would change too; return a "
                "clone() there, or leave out the operation in place"
            )
