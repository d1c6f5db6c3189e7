"""What a training step must leave as it is, since the pipeline could not change it as one process does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from pipeloom.errors import PipelineError
from pipeloom.runtime.replicas import local
from pipeloom.runtime.stage import Stage


class Unchanged:
    """Weights and buffers of this rank that a training step must not change, or not at every time.

    A weight that is in several places (tied, or in copies of the model) and a buffer in several stages would take on
    what one place makes of them. A weight that a hook changes when a gradient arrives would have another value in the
    forwards that the schedule runs later, and a buffer that a recomputed forward changes as well. Buffers that are not
    persistent are left to each place.

    Args:
        stages: those of this rank.
        copies: how many copies of the model the schedule has.
    """

    def __init__(self, stages: Sequence[Stage], copies: int) -> None:
        self._modules = {stage.index: stage.module for stage in stages}
        self._copies = copies
        self._elsewhere = {(stage.index, name) for stage in stages for name in _elsewhere(stage)}
        self._names = {
            each: f"'{name}' of stage {stage}"
            for stage, module in self._modules.items()
            for name, each in module.named_parameters()
        }
        self._owners = {stage: [*_owners(module)] for stage, module in self._modules.items()}
        self._versions: list[tuple[str, nn.Parameter, int]] = []
        self._buffers: dict[tuple[int, str], Tensor] = {}
        self._after_forward: dict[int, dict[str, int]] = {}

    def begin(self, several: Collection[nn.Parameter], averaged: Collection[nn.Parameter]) -> None:
        """Before a step: note the state of what is watched.

        Args:
            several: the parameters that are in several places.
            averaged: those that have replicas.

        Raises:
            PipelineError: one of these is in no stage any more.
        """
        named = [(stage, *each) for stage, module in self._modules.items() for each in module.named_parameters()]
        held = {each for *_, each in named}
        lost = [self._names.get(each, "one") for each in (*several, *averaged) if each not in held]
        if lost:
            raise PipelineError(
                f"parameters were replaced after the pipeline was made, as load_state_dict(assign=True) does: "
                f"{', '.join(sorted(set(lost))[:5])}. They are tied, or in copies of the model, or have replicas, and "
                "the pipeline holds the old ones; make a new pipeline"
            )
        self._versions = [
            (f"stage {stage} has its parameter '{name}' changed", each, each._version)
            for stage, name, each in named
            if each in several or each._post_accumulate_grad_hooks
        ]
        self._buffers = {(stage, name): local(buffer).clone() for stage, name, buffer in self._watched()}
        self._after_forward = {}

    def before_forward(self, stage: int) -> None:
        """Refuse that buffers of `stage` were changed since its last forward.

        Raises:
            PipelineError: they were.
        """
        before = self._after_forward.get(stage)
        if before is not None:
            now = self._versions_of(stage)
            changed = [name for name in now if now[name] != before.get(name)]
            if changed:
                raise PipelineError(f"buffers of stage {stage} ({', '.join(changed)}) change. {_BUFFER_AFTER_FORWARD}")

    def after_forward(self, stage: int) -> None:
        """Note the state of the buffers of `stage`."""
        if self._owners[stage]:
            self._after_forward[stage] = self._versions_of(stage)

    def refuse_changes(self, several: Collection[nn.Parameter]) -> None:
        """After a step.

        Raises:
            PipelineError: with the first that was changed.
        """
        for what, parameter, version in self._versions:
            if parameter._version != version:
                raise PipelineError(f"{what} in a training step. {_IN_PLACES if parameter in several else _IN_HOOK}")
        for stage, name, buffer in self._watched():
            before = self._buffers.get((stage, name))  # not all that writes into a tensor changes its version
            if before is None or not torch.equal(before, local(buffer)):
                reason = _BUFFER_OF_COPIES if self._copies > 1 else _BUFFER_OF_STAGES
                raise PipelineError(f"stage {stage} changes its buffer '{name}' in a training step. {reason}")
        for stage in self._modules:
            self.before_forward(stage)

    def _versions_of(self, stage: int) -> dict[str, int]:
        buffers = _persistent(self._owners[stage])
        return {name: buffer._version for name, buffer in buffers if not buffer.is_inference()}

    def _watched(self) -> Iterator[tuple[int, str, Tensor]]:
        """The buffers that no training step may change: stage, name and buffer."""
        found = [(stage, *each) for stage, owners in self._owners.items() for each in _persistent(owners)]
        holders = Counter(each for _, each in {(stage, id(buffer)) for stage, _, buffer in found})
        for stage, name, buffer in found:
            if self._copies > 1 or holders[id(buffer)] > 1 or (stage, name) in self._elsewhere:
                yield stage, name, buffer


def _owners(whole: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that have buffers which are saved, with their names and a dot."""
    for name, module in whole.named_modules():
        prefix = f"{name}." if name else ""
        if any(True for _ in _persistent([(prefix, module)])):
            yield prefix, module


def _persistent(owners: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, Tensor]]:
    for outer, module in owners:
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield outer + name, buffer


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
_BUFFER_AFTER_FORWARD = (
    "They do so after a forward has ended, as when activation checkpointing runs it again, or where another stage uses "
    "them too; what later forwards see would depend on the schedule. Keep layers with running statistics out of the "
    "checkpoint, or put them in eval mode"
)
