"""What a training step must leave as it is, since the pipeline could not change it as one process does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from pipeloom.errors import PipelineError
from pipeloom.runtime.replicas import local
from pipeloom.runtime.stage import Stage


class Unchanged:
    """Weights and buffers that no forward and no backward of a training step may change.

    A weight that is in several places (tied, or in copies of the model) and a buffer in several stages would take on
    what one place makes of them. A weight that a hook changes when a gradient arrives would have another value in the
    forwards that the schedule runs later. Buffers that are not persistent are left to each place.

    Args:
        stages: those of this rank.
        copies: how many copies of the model the schedule has.
    """

    def __init__(self, stages: Sequence[Stage], copies: int) -> None:
        self._modules = {stage.index: stage.module for stage in stages}
        self._copies = copies
        self._elsewhere = {(stage.index, name) for stage in stages for name in _elsewhere(stage)}
        self._versions: list[tuple[str, nn.Parameter, int]] = []
        self._buffers: dict[tuple[int, str], Tensor] = {}

    def begin(self, several: Collection[nn.Parameter]) -> None:
        """Before a step: note the state of what is watched; the parameters in `several` are in several places."""
        self._versions = [
            (f"stage {stage} has its parameter '{name}' changed", each, each._version)
            for stage, module in self._modules.items()
            for name, each in module.named_parameters()
            if each in several or each._post_accumulate_grad_hooks
        ]
        self._buffers = {place: buffer.clone() for place, buffer in self._watched()}

    def refuse_changes(self, several: Collection[nn.Parameter]) -> None:
        """After a step.

        Raises:
            PipelineError: with the first that was changed.
        """
        for what, parameter, version in self._versions:
            if parameter._version != version:
                raise PipelineError(f"{what} in a training step. {_IN_PLACES if parameter in several else _IN_HOOK}")
        for (stage, name), buffer in self._watched():
            before = self._buffers.get((stage, name))  # not all that writes into a tensor changes its version
            if before is None or not torch.equal(before, buffer):
                reason = _BUFFER_OF_COPIES if self._copies > 1 else _BUFFER_OF_STAGES
                raise PipelineError(f"stage {stage} changes its buffer '{name}' in a training step. {reason}")

    def _watched(self) -> Iterator[tuple[tuple[int, str], Tensor]]:
        """The buffers that are watched, detached, with their stages and names."""
        found = [
            (stage, f"{outer}.{name}".removeprefix("."), buffer)
            for stage, whole in self._modules.items()
            for outer, module in whole.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        ]
        holders = Counter(each for _, each in {(stage, id(buffer)) for stage, _, buffer in found})
        for stage, name, buffer in found:
            if self._copies > 1 or holders[id(buffer)] > 1 or (stage, name) in self._elsewhere:
                yield (stage, name), local(buffer)


def _elsewhere(stage: Stage) -> Iterator[str]:
    """The names of buffers of a stage that other stages have too."""
    own = {name for name, _ in stage.module.named_buffers(remove_duplicate=False)}
    for same in stage.shared:
        if not own.issuperset(same):
            yield from own.intersection(same)


_IN_PLACES = (
    "The weight is in several places, tied or in copies of the model, and each sees some of the changes only, so that "
    "they would no longer be equal. Change weights after the step; nn.Embedding(max_norm=...) changes them in its "
    "forward, so leave max_norm out"
)
_IN_HOOK = (
    "A hook of the parameter changes it as its gradient arrives, while other microbatches are under way, and what "
    "these see would depend on the schedule. Take the optimizer's step after pipe.step()"
)
_BUFFER_OF_COPIES = (
    "The schedule runs several copies of the model, and each sees some of the microbatches only, so that none can have "
    "the value of one process. Use a normalisation without running statistics, put the module in eval mode, make the "
    "buffer one that is not persistent (each copy then has its own), or train under a schedule with one copy, such as "
    "DualPipeV"
)
_BUFFER_OF_STAGES = (
    "Another stage uses the same buffer, and none would have the value of one process. Give each layer a module of its "
    "own, use a normalisation without running statistics, or put the module in eval mode"
)
