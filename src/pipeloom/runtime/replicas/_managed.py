"""What `fully_shard` and `replicate` manage inside a stage: the rows say when, and this has it done."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeloom.runtime.imported import is_fsdp_module

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

_SHARDS, _REPLICATES = "shard_process_group", "replicate_process_group"
"""What a mesh has whose ranks hold parts of the parameters, or all of them."""


class Managed:
    """The parameters of one stage's `module` that FSDP manages.

    FSDP gathers, drops and reduces by itself, in hooks of forward and backward. During a walk it is told not to;
    between two walks the weights are sharded. Gradients collect in the gathered weights until they are reduced, over
    several steps if need be. FSDP cannot see that such a gradient is to be forgotten; so the sharded weight, which the
    optimizer knows, has zeros for it, and when somebody clears these it is forgotten.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = [each for each in module.modules() if is_fsdp_module(each)]
        self._states: list[FSDPState] = list(dict.fromkeys(each._get_fsdp_state() for each in self._modules))
        self._handles: list[object] = []
        self._kept: list[_Kept] = []
        """Gradients of earlier steps that are not reduced."""
        self._lost: list[_Kept] = []
        """Those that were forgotten since a step failed on top of them."""

    def __bool__(self) -> bool:
        return bool(self._modules)

    def process_groups(self) -> list[dist.ProcessGroup]:
        """The groups whose product are the replicas; those of the parameters that have the most."""
        return max((_process_groups(group) for group in self._groups()), key=_size, default=[])

    def parameters(self) -> set[nn.Parameter]:
        """The parameters as the optimizer knows them."""
        return {param.sharded_param for param in self._params()}

    def begin(self) -> None:
        """Before a walk: weights are sharded, and FSDP does nothing of its own accord."""
        for state in self._states:
            state._lazy_init()
            state._comm_ctx.post_forward_order.clear()
        for group in self._groups():
            group._post_forward_indices.clear()
        self._set(reduces=False)
        for module in self._modules:
            module.reshard()

    def forget_cleared(self) -> None:
        """Before a step: forget gradients that wait for being reduced and were cleared since."""
        for kept in self._kept:
            if kept.cleared():
                _forget(kept.param)
        self._kept = [kept for kept in self._kept if not kept.cleared()]

    def gather(self) -> None:
        """UNSHARD: begin to gather the weights."""
        self._handles = [module.unshard(async_op=True) for module in self._modules]

    def gathered(self) -> None:
        """Wait until the weights are there."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.wait()  # type: ignore[attr-defined]  # async_op gives one

    def drop(self) -> None:
        """RESHARD: let go of the gathered weights."""
        self.gathered()
        for module in self._modules:
            module.reshard()

    def accumulate(self) -> None:
        """After a W: add gradients up in the type in which they are reduced, where it is not that of the weights.

        After a whole backward FSDP does so itself.
        """
        for param in self._params():
            if param.reduce_dtype is not None:
                param.accumulate_unsharded_grad_if_needed()
                param.to_accumulated_grad_if_needed()

    def reduce(self) -> None:
        """REDUCE_GRAD: the mean of the gradients over replicas is added to the sharded weights' own."""
        self._fill_in_unused()
        self._kept = []
        self._set(reduces=True)
        for state in self._states:
            if state._is_root:
                state._root_post_backward_final_callback()

    def keep(self) -> None:
        """After a step that does not reduce: something stands for its gradients in the sharded weights."""
        self._kept = []
        for param in self._params():
            if _has_gradient(param):
                sharded = param.sharded_param
                if sharded.grad is None:
                    sharded.grad = torch.zeros_like(sharded)
                self._kept.append(_Kept(param, sharded.grad, sharded.grad._version))

    def abort(self) -> None:
        """After a walk that failed: nothing is under way, and weights are sharded."""
        self._handles = []
        for group in self._groups():
            if group.device.type == "cpu":
                group._all_gather_result = None  # waiting for it might take for ever
        for state in self._states:
            if state._is_root:
                state._reset_iter_state()

    def forget(self) -> None:
        """Forget the gradients that are not reduced."""
        self._lost, self._kept = self._kept, []
        for param in self._params():
            _forget(param)

    @property
    def lost(self) -> bool:
        """Whether gradients of earlier steps were forgotten, and nobody has cleared what stands for them since."""
        return any(not kept.cleared() for kept in self._lost)

    def _set(self, *, reduces: bool) -> None:
        for module in self._modules:
            module.set_is_last_backward(reduces)
            module.set_requires_gradient_sync(reduces, recurse=False)
            module.set_reshard_after_backward(False, recurse=False)
            if all(hasattr(group.mesh_info, _SHARDS) for group in module._get_fsdp_state()._fsdp_param_groups):
                module.set_reshard_after_forward(False, recurse=False)

    def _groups(self) -> Iterator[FSDPParamGroup]:
        for state in self._states:
            yield from state._fsdp_param_groups

    def _params(self) -> Iterator[FSDPParam]:
        for group in self._groups():
            yield from group.fsdp_params

    def _fill_in_unused(self) -> None:
        """Where only some replicas have a gradient, the others get zeros, so that all reduce the same ones."""
        for group in self._groups():
            params = [param for param in group.fsdp_params if param.sharded_param.requires_grad]
            if not params:
                continue
            present = [_has_gradient(param) for param in params]
            anywhere = torch.tensor(present, dtype=torch.int32, device=group.device)
            for each in _process_groups(group):
                dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=each)
            if not all(present):
                for param, has, used in zip(params, present, anywhere.tolist(), strict=True):
                    if used and not has:
                        param.unsharded_param.grad = torch.zeros_like(param.unsharded_param)


class _Kept(NamedTuple):
    """A gradient that is not reduced: the parameter, what stands for it in the sharded one, and that one's version."""

    param: FSDPParam
    stand_in: Tensor
    version: int

    def cleared(self) -> bool:
        return self.param.sharded_param.grad is not self.stand_in or self.stand_in._version != self.version


def _process_groups(group: FSDPParamGroup) -> list[dist.ProcessGroup]:
    mesh = group.mesh_info
    return [getattr(mesh, name) for name in (_SHARDS, _REPLICATES) if hasattr(mesh, name)]


def _size(groups: list[dist.ProcessGroup]) -> int:
    size = 1
    for group in groups:
        size *= group.size()
    return size


def _has_gradient(param: FSDPParam) -> bool:
    if param.unsharded_accumulated_grad is not None:
        return True
    return hasattr(param, "_unsharded_param") and param._unsharded_param.grad is not None


def _forget(param: FSDPParam) -> None:
    param.unsharded_accumulated_grad = None
    if hasattr(param, "_unsharded_param"):
        param._unsharded_param.grad = None
