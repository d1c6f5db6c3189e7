"""Moves tensors between ranks, behind one small interface."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist

from pipeloom.runtime.transport._interface import Pending, Plain, Transport, Tree, Watch
from pipeloom.runtime.transport._local import LocalTransport
from pipeloom.runtime.transport._torch import TorchTransport

__all__ = ["Pending", "Plain", "Transport", "Tree", "Watch", "connect"]


def connect(
    group: dist.ProcessGroup,
    transport: str = "auto",
    *,
    device: torch.device | str = "cpu",
    watch: Watch | None = None,
    pairs: Collection[tuple[int, int]] | None = None,
) -> Transport:
    """A transport between all ranks of `group`; every rank of it calls this, in the same order.

    `transport` is "local" (our own), "torch" (torch.distributed's), or "auto": our own for CPU tensors, torch's for
    GPUs. Tensors arrive on `device`. Waits end with an error when `watch` knows of a failure. `pairs` are the (sender,
    receiver) that will be used, by default all; a GPU's communicators are set up for these.
    """
    if transport not in ("auto", "local", "torch"):
        raise ValueError(f"transport is {transport!r}; it is 'auto', 'local' or 'torch'")
    device = torch.device(device)
    if transport == "torch" or (transport == "auto" and device.type != "cpu"):
        return TorchTransport(group, device, watch, pairs)
    return LocalTransport(group, device, watch)
