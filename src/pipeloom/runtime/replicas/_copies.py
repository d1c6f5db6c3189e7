"""The replicas of one stage: how its module says that there are several, and what is done about it."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.contract import _get_registry
from torch.nn.parallel import DistributedDataParallel

from pipeloom.runtime.imported import is_fsdp_module, is_fsdp_wrapper
from pipeloom.runtime.replicas._average import average, local
from pipeloom.runtime.replicas._managed import Managed


class Copies:
    """What has to be done for one stage that may have replicas.

    `module` is the stage's as the user gave it. DistributedDataParallel is taken off: its forward prepares for a
    backward that reduces by itself, and its hooks do nothing where that forward has not run.
    """

    def __init__(self, module: nn.Module) -> None:
        self._wrapper = module if isinstance(module, DistributedDataParallel) else None
        self.module: nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
        self.managed = Managed(self.module)
        self.groups: list[dist.ProcessGroup] = self.managed.process_groups()
        """The process groups whose product are the replicas; none if the module does not tell."""
        if self._wrapper is not None:
            self.groups = [self._wrapper.process_group]
        ignored = self._wrapper.parameters_to_ignore if self._wrapper is not None else ()
        managed = self.managed.parameters()
        self.plain = [
            parameter
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad and parameter not in managed and name not in ignored
        ]
        """The trainable parameters that are averaged here."""

    @property
    def count(self) -> int:
        """How many replicas the module says that there are; 0 if it does not tell."""
        return math.prod(group.size() for group in self.groups) if self.groups else 0

    def ranks(self) -> set[int]:
        """The ranks that hold replicas, as far as one group after the other tells."""
        return {rank for group in self.groups for rank in dist.get_process_group_ranks(group)}

    def problem(self, pipeline: Collection[int]) -> str | None:
        """Why a pipeline of these ranks cannot run the module as it is wrapped; None if it can."""
        for name, each in self.module.named_modules():
            where = f"its '{name}'" if name else "it"
            if isinstance(each, DistributedDataParallel):
                return f"{where} is a DistributedDataParallel; wrap the stage's whole module, not a part of it"
            if _is_legacy(each):
                return (
                    f"{where} is wrapped by {_wrapper_name(each)}, which reduces gradients by itself at moments that a "
                    "schedule cannot choose; use fully_shard, replicate or DistributedDataParallel"
                )
        if self._wrapper is not None and (self._wrapper._comm_hooks or self._wrapper.mixed_precision):
            return (
                "its DistributedDataParallel has a communication hook or mixed precision, which a pipeline does not "
                "run; leave them out, or use fully_shard or replicate with a MixedPrecisionPolicy"
            )
        inside = sorted(self.ranks() & set(pipeline) - {dist.get_rank()}) if self.groups else []
        if inside:
            return (
                f"its replicas are said to be on ranks {sorted(self.ranks())}, and of these {inside} hold other stages "
                'of this pipeline; give DistributedDataParallel process_group=mesh.get_group("dp"), or fully_shard and '
                'replicate mesh=mesh["dp"]'
            )
        return None

    def reduce(self, groups: list[dist.ProcessGroup], later: Collection[nn.Parameter]) -> None:
        """REDUCE_GRAD: gradients become their means over `groups`, except those of the parameters in `later`."""
        self.managed.reduce()
        if groups:
            average([parameter for parameter in self.plain if parameter not in later], groups)
        if self._wrapper is not None and self._wrapper.broadcast_buffers:
            for buffer in self._wrapper.modules_buffers:
                dist.broadcast(buffer, group=self._wrapper.process_group, group_src=0)

    def unequal(self, groups: list[dist.ProcessGroup]) -> str | None:
        """What is wrong if the parameters in `plain` differ between the replicas; every replica calls this."""
        held = [local(each) for each in self.plain if not each.is_meta]
        if not held or self._wrapper is not None:
            return None
        sums = torch.stack([part for each in held for part in (each.double().sum(), each.double().abs().sum())])
        both = torch.stack([sums, -sums])
        for group in groups:
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
        if torch.equal(both[0], -both[1]):
            return None
        plain = set(self.plain)
        names = [name for name, each in self.module.named_parameters() if each in plain]
        return (
            "parameters that neither DistributedDataParallel nor fully_shard nor replicate looks after differ between "
            f"its replicas (among {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}); draw them from the same "
            "seed, or have them looked after"
        )


def _is_legacy(module: nn.Module) -> bool:
    if is_fsdp_module(module):
        return False
    if is_fsdp_wrapper(module) or isinstance(module, nn.DataParallel) or "replicate" in (_get_registry(module) or ()):
        return True
    return hasattr(module, "no_sync") or hasattr(module, "unshard")


def _wrapper_name(module: nn.Module) -> str:
    if "replicate" in (_get_registry(module) or ()):
        return "the replicate that DistributedDataParallel implements"
    return f"{type(module).__module__}.{type(module).__qualname__}"
