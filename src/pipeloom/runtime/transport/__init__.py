"""Moves tensors between ranks, behind one small interface."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist

from pipeloom.runtime.transport._interface import Pending, Plain, Transport, Tree, Watch
from pipeloom.runtime.transport._local import LocalTransport
from pipeloom.runtime.transport._rendezvous import unique
from pipeloom.runtime.transport._torch import TorchTransport

__all__ = [
    "LocalTransport",
    "Pending",
    "Plain",
    "TorchTransport",
    "Transport",
    "Tree",
    "Watch",
    "connect",
    "over_torch",
]


def over_torch(transport: str, device: torch.device) -> bool:
    """Whether tensors go over torch.distributed.

    `transport` is "local" (our own), "torch" (torch.distributed's), or "auto": our own for CPU tensors, torch's for
    GPUs.
    """
    if transport not in ("auto", "local", "torch"):
        raise ValueError(f"transport is {transport!r}; it is 'auto', 'local' or 'torch'")
    return transport == "torch" or (transport == "auto" and device.type != "cpu")


def connect(
    group: dist.ProcessGroup,
    transport: str = "auto",
    *,
    device: torch.device | str = "cpu",
    watch: Watch | None = None,
    pairs: Collection[tuple[int, int]] | None = None,
) -> Transport:
    """A transport between all ranks of `group`; every rank of it calls this, in the same order.

    Tensors arrive on `device`. Waits end with an error when `watch` knows of a failure. `pairs` are the (sender,
    receiver) between which tensors go over torch.distributed, by default all.
    """
    device = torch.device(device)
    over = over_torch(transport, device)
    local = LocalTransport(group, unique(group, "transport"), device, watch)
    return TorchTransport(local, group, device, watch, pairs) if over else local
