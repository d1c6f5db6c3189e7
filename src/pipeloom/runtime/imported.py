"""Whether something is of a type that takes torch half a second to import, told without importing it.

As long as nobody has imported the module that defines a type, nothing is of that type.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    return isinstance(value, _type("torch.distributed.tensor", "DTensor"))


def is_fsdp_module(value: object) -> TypeGuard[FSDPModule]:
    """Whether `fully_shard` or `replicate` looks after a module."""
    return isinstance(value, _type("torch.distributed.fsdp", "FSDPModule"))


def is_fsdp_wrapper(value: object) -> TypeGuard[FullyShardedDataParallel]:
    """Whether a module is wrapped in the first FSDP."""
    return isinstance(value, _type("torch.distributed.fsdp", "FullyShardedDataParallel"))


def is_sharded_scaler(value: object) -> TypeGuard[ShardedGradScaler]:
    return isinstance(value, _type("torch.distributed.fsdp.sharded_grad_scaler", "ShardedGradScaler"))


def _type(module: str, name: str) -> Any:
    """The type, or the empty tuple, of which nothing is an instance: also while its module is being imported."""
    return getattr(sys.modules.get(module), name, ())
