"""Load: everything is read and compared before the first tensor in memory changes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from pipeloom.checkpoints import _files, _model, _optimizer, _random
from pipeloom.checkpoints._agreement import Agreement
from pipeloom.checkpoints._plain import decode
from pipeloom.runtime import Pipeline


def load(
    path: str | os.PathLike[str],
    pipe: Pipeline,
    optimizer: Optimizer | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Load what `save` has saved, at any number of ranks, under any schedule and placement; every rank calls it.

    With an optimizer, training goes on where it was: the optimizer has the state and options of then, `pipe.steps` is
    the number of then, and if there are as many ranks as then, so are torch's random states. Without one on any rank,
    parameters and buffers alone are loaded.

    Args:
        path: the directory.
        pipe: the pipeline, of the same model.
        optimizer: this rank's optimizer, of the same class; None on a rank without parameters.
        group: who loads together; see `save`.

    Returns:
        The `values` that were saved.

    Raises:
        CheckpointError: on every rank, with everything that is wrong: a name is missing or too many, a shape or dtype
            is another, a file is missing, torn or damaged. Model and optimizer are as they were.
    """
    agreement = Agreement(path, "loaded", pipe, group)
    root = Path(path).absolute()
    own: dict[_model.Place, Tensor] = {}
    mine: list[Any] = [None, None]
    saved: dict[str, Any] = {}
    with agreement.attempt():
        own = _model.own_tensors(pipe)
        mine = [_model.described(own), _optimizer.outline(optimizer, own)]
    with agreement.attempt():
        saved = _files.manifest(root)
    shared = agreement.share([*mine, pipe.ties, saved.get("directory")])
    models, optimizers, ties, directories = zip(*shared, strict=True)
    with agreement.attempt():
        if len(set(directories)) > 1:
            raise ValueError("ranks found different checkpoints; all ranks need the same path, and none may save to it")
        names = _model.names(models, [tie for each in ties for tie in each], pipe.schedule.wiring.stages)
    agreement.share()
    directory = root / saved["directory"]
    damage: list[str] = []
    with agreement.attempt():
        damage += _files.damage(directory, saved["files"], agreement.rank, agreement.ranks)
    reasons = [reason for each in agreement.share(damage) for reason in each]
    reasons += _model.misfits(names.described(), saved["model"])
    training = any(optimizers)
    if training:
        reasons += _optimizer.misfits(optimizers, names, saved["optimizer"])
    agreement.refuse(reasons)
    weights: dict[str, Tensor] = {}
    state: dict[str, Tensor] = {}
    random: dict[str, Tensor] = {}
    loading = None
    with agreement.attempt():
        for place, tensor in own.items():
            like = tensor.detach() if isinstance(tensor, DTensor) else torch.empty(())
            weights.setdefault(names.saved_as[place], like.new_empty(tensor.shape, dtype=tensor.dtype))
        _files.read_tensors(directory / _files.MODEL, weights)
        if optimizer:
            loading = _optimizer.Loading(optimizer, own, names, saved["optimizer"])
            state |= loading.tensors
        if training and len(saved["random"]) == agreement.ranks:
            random = _random.states(own.values())
            kinds = random.keys() & saved["random"][agreement.rank]
            random = {kind: torch.empty_like(random[kind]) for kind in sorted(kinds)}
            state |= {_random.saved_as(agreement.rank, kind): each for kind, each in random.items()}
        _files.read_tensors(directory / _files.TRAINING, state)
    agreement.share()
    with torch.no_grad():
        for place, tensor in own.items():
            tensor.copy_(weights[names.saved_as[place]])
    if loading:
        loading.finish()
    if training:
        pipe.steps = saved["steps"]
    if random:
        _random.restore(random, own.values())
    values: dict[str, Any] = decode(saved["values"])
    return values
