"""Gives a module on the meta device its weights: the same ones whether it is the whole model or a stage of it."""

from __future__ import annotations

import zlib

import torch
from torch import nn

from pipeloom.errors import SplitError
from pipeloom.splitter._ties import ties_of


def fill(module: nn.Module, seed: int, device: torch.device | str = "cpu") -> None:
    """Move `module` from the meta device to `device` and initialise it with `reset_parameters()` of each module in it.

    Each module draws from a random generator seeded with `seed` and the module's own name, so that a layer gets the
    same weights in a stage as in the whole model, on any rank and whatever else is there; inner modules go first. The
    random state of the caller stays as it is.

    Args:
        module: a stage's module or a whole model.
        seed: any integer.
        device: where the weights are to live.

    Raises:
        SplitError: a parameter or buffer was written by no `reset_parameters()`. To load a state dict instead, call
            `module.to_empty(device=...)` and `module.load_state_dict(...)`.
    """
    kind = type(module).__name__
    ties = ties_of(module)
    module.to_empty(device=device)
    for first, *others in ties:
        for other in others:
            owner, _, name = other.rpartition(".")
            setattr(module.get_submodule(owner), name, module.get_parameter(first))
    before = {name: (tensor, tensor._version) for name, tensor in _tensors(module).items()}
    with torch.random.fork_rng(), torch.no_grad():
        for name, inner in reversed(list(module.named_modules())):
            private = isinstance(inner, nn.MultiheadAttention | nn.Transformer)  # torch's name differs in these
            reset = getattr(inner, "_reset_parameters" if private else "reset_parameters", None)
            if reset is not None:
                torch.manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
                reset()
    after = _tensors(module)
    untouched = [
        name for name, (tensor, version) in before.items() if after[name] is tensor and tensor._version == version
    ]
    if untouched:
        raise SplitError(
            kind,
            [f"'{name}' is not initialised by any reset_parameters(); give its module one" for name in untouched],
            cannot="filled",
        )


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())
