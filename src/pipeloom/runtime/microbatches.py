"""A batch cut into microbatches, their weights, and their outputs put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from pipeloom.errors import BatchError
from pipeloom.runtime.tree import map_tensors, tensors

Weight = Literal["samples", "equal", "sum"] | Callable[[Any], float | Tensor]
"""How much each microbatch counts; see `weights`."""

Handling = Literal["split", "replicate"]


def batch_size(value: Any) -> int | None:
    """The first dimension of the first tensor of a tree that has one."""
    first = value[0] if type(value) is tuple and value else value
    if type(first) is Tensor and first.dim():
        return first.shape[0]
    return next((tensor.shape[0] for tensor in tensors(value) if tensor.dim() > 0), None)


def split(value: Any, microbatches: int, what: str) -> list[Any]:
    """Cut every tensor of a tree along its first dimension into `microbatches` parts, as even as can be.

    The first parts are the larger ones, as in `torch.tensor_split`; what is not a tensor goes to every microbatch.

    Raises:
        BatchError: the tensors disagree about the size of the batch, or it is smaller than `microbatches`.
    """
    size = batch_size(value)
    _refuse_lists_of_samples(value, size, what)
    if size is None:
        if tensors(value):
            raise BatchError(f"{what}: a tensor without dimensions cannot be split into {microbatches} microbatches")
        return [value] * microbatches
    if size < microbatches:
        raise BatchError(
            f"{what}: a batch of {size} cannot fill {microbatches} microbatches; "
            f"give {microbatches} samples or more, or make a schedule of at most {size} microbatches"
        )
    wrong = [tuple(tensor.shape) for tensor in tensors(value) if tensor.dim() == 0 or tensor.shape[0] != size]
    if wrong:
        raise BatchError(
            f"{what}: all tensors are split along their first dimension, which is {size} in the first one, but there "
            f"are shapes {wrong}; pass what belongs to every sample by keyword"
        )
    sizes = [size // microbatches + (index < size % microbatches) for index in range(microbatches)]
    cut = [torch.split(tensor, sizes) for tensor in tensors(value)]
    parts = []
    for index in range(microbatches):
        each = iter(cut)
        parts.append(map_tensors(partial(_next, each, index), value))
    return parts


def _refuse_lists_of_samples(value: Any, size: int | None, what: str) -> None:
    """Refuse lists that are no tensors and look as if they had an entry for each sample: they are not split."""
    if isinstance(value, dict | tuple) or (isinstance(value, list) and tensors(value)):
        for item in value.values() if isinstance(value, dict) else value:
            _refuse_lists_of_samples(item, size, what)
    elif isinstance(value, list) and (len(value) == size or (size is None and len(value) > 1)):
        raise BatchError(
            f"{what}: a list of {len(value)} that are no tensors would go to every microbatch whole. If these are "
            "samples, give ready microbatches (arg_mbs=, target_mbs=); if not, make it a tuple"
        )


def _next(cut: Iterator[Sequence[Tensor]], index: int, _: Tensor) -> Tensor:
    """Part `index` of the tensor whose turn it is."""
    return next(cut)[index]


def split_keywords(
    keywords: Mapping[str, Any], microbatches: int, handling: Mapping[str, Handling], size: int | None
) -> list[dict[str, Any]]:
    """Cut keyword arguments into one dict a microbatch.

    `handling` says "split" or "replicate" by name. Where it is silent: a tensor whose first dimension is the batch's
    `size` is split; one with no dimensions, or with a first dimension of 1, goes to every microbatch; so does
    everything that is not a tensor.

    Raises:
        BatchError: neither the rule nor `handling` decides.
    """
    cut: dict[str, list[Any]] = {}
    for name, value in keywords.items():
        how = handling.get(name) or _handling(name, value, size)
        cut[name] = split(value, microbatches, name) if how == "split" else [value] * microbatches
    return [{name: parts[index] for name, parts in cut.items()} for index in range(microbatches)]


def _handling(name: str, value: Any, size: int | None) -> Handling:
    found = {tensor.shape[0] if tensor.dim() else 1 for tensor in tensors(value)}
    if found <= {1} and size != 1:
        return "replicate"
    if found == {size}:
        return "split"
    known = f"the batch has {size}" if size is not None else "this rank does not know the size of the batch"
    raise BatchError(
        f"{name}: is it split or does it go to every microbatch? Its first dimension is "
        f"{' and '.join(map(str, sorted(found)))}, and {known}; say so with "
        f'Pipeline(..., kwargs={{"{name}": "split"}}) or "replicate"'
    )


class Across(Protocol):
    """The replicas over which microbatches are weighted."""

    count: int

    def total(self, value: float) -> float:
        """The sum of `value` over all replicas."""


def weights(
    weight: Weight,
    microbatches: int,
    sizes: Sequence[int],
    targets: Sequence[Any],
    replicas: Across | None = None,
) -> list[Any]:
    """What each microbatch's loss is multiplied with before its backward.

    * "samples": n_b / sum(n), so a loss that is a mean over samples adds up to the mean over the whole batch, also
      where microbatches are uneven; `sizes` holds the n_b, and none stand for even ones
    * "equal": 1 / microbatches
    * "sum": 1, for a loss that is a sum
    * a function c of a microbatch's target that counts, say, its valid tokens: c_b / sum(c)

    With R `replicas`, sums go over the microbatches of all of them, and all but "equal" is multiplied by R: the mean
    over replicas is then what one batch of all samples gives, also where replicas have uneven shares of it.
    """
    count, total = (1, float) if replicas is None else (replicas.count, replicas.total)
    if weight == "sum":
        return [float(count)] * microbatches
    if callable(weight):
        counts = [float(weight(target)) for target in targets]
        everything = total(sum(counts))
        if not everything > 0:
            raise BatchError(f"weight: the counts of the microbatches are {counts}; their sum must be positive")
        return [each * count / everything for each in counts]
    if weight == "samples" and sizes:
        everything = total(sum(sizes))
        return [size * count / everything for size in sizes]
    return [1.0 / microbatches] * microbatches


def refuse_unmergeable(output: Any, samples: int, what: str) -> None:
    """Refuse outputs of a microbatch of so many samples that could not be joined along the first dimension.

    Raises:
        BatchError: a tensor has samples in another dimension.
    """
    for tensor in tensors(output):
        first, *others = tensor.shape or (samples,)
        if first % samples or (first != samples > 1 and others[:1] == [samples]):
            raise BatchError(
                f"{what} has a tensor of shape {tuple(tensor.shape)} for a microbatch of {samples} samples, and "
                "outputs are put together along their first dimension; have the samples there, or say "
                "return_outputs=False"
            )


def merge(parts: Sequence[Any]) -> Any:
    """The outputs of all microbatches as one: tensors are joined along the first dimension, in microbatch order.

    Tensors without dimensions are stacked; plain values that differ become a list.
    """
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.stack(list(parts)) if first.dim() == 0 else torch.cat(list(parts))
    if isinstance(first, tuple):
        return tuple(merge(column) for column in zip(*parts, strict=True))
    if isinstance(first, list):
        return [merge(column) for column in zip(*parts, strict=True)]
    if isinstance(first, dict):
        return {key: merge([part[key] for part in parts]) for key in first}
    return first if all(part == first for part in parts) else list(parts)
