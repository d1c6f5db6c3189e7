"""Means over replicas, in flat buffers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from pipeloom.runtime.imported import is_dtensor

_BUCKET = 1 << 24
"""A buffer is closed once it holds so many numbers."""


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, which may be a DTensor; a view of it."""
    tensor = tensor.detach()
    if is_dtensor(tensor):
        tensor = tensor.to_local()
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def average(parameters: Iterable[nn.Parameter], groups: Sequence[dist.ProcessGroup]) -> None:
    """Make the gradient of each parameter its mean over the ranks of `groups`, the product of which are the replicas.

    A gradient that is absent on some replicas counts as zeros there; one that is absent on all stays so. All ranks call
    this with the same parameters in the same order.
    """
    count = math.prod(group.size() for group in groups)
    for bucket in _buckets(parameters):
        pieces = [local(each) if each.grad is None else local(each.grad) for each in bucket]
        present = [each.grad is not None for each in bucket]
        flat = torch.cat(
            [
                *(
                    piece.flatten() if has else torch.zeros_like(piece).flatten()
                    for piece, has in zip(pieces, present, strict=True)
                ),
                torch.tensor(present, dtype=pieces[0].dtype, device=pieces[0].device),
            ]
        )
        for group in groups:
            dist.all_reduce(flat, group=group)
        means = (flat[: -len(bucket)] / count).split([piece.numel() for piece in pieces])
        anywhere = present if all(present) else (flat[-len(bucket) :] != 0).tolist()
        for each, mean, used in zip(bucket, means, anywhere, strict=True):
            if not used:
                continue
            if each.grad is None:
                each.grad = torch.zeros_like(each)
            gradient = local(each.grad)
            gradient.copy_(mean.view_as(gradient))


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """The parameters in lists of one dtype and device, none much larger than `_BUCKET`."""
    kinds = sorted(parameters, key=_kind)
    for _, same in groupby(kinds, key=_kind):
        bucket: list[nn.Parameter] = []
        for parameter in same:
            bucket.append(parameter)
            if sum(local(each).numel() for each in bucket) >= _BUCKET:
                yield bucket
                bucket = []
        if bucket:
            yield bucket


def _kind(parameter: nn.Parameter) -> str:
    return f"{parameter.dtype} {parameter.device}"
