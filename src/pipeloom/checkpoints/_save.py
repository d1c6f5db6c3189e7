"""Save: every rank writes what it is the first to have, and one small file is replaced when all have."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from pipeloom.checkpoints import _files, _model, _optimizer, _random
from pipeloom.checkpoints._agreement import Agreement
from pipeloom.checkpoints._plain import encode
from pipeloom.runtime import Pipeline


def save(
    path: str | os.PathLike[str],
    pipe: Pipeline,
    optimizer: Optimizer | None = None,
    *,
    values: Mapping[str, object] | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Save a model in training to the directory `path`, in place of what was saved there before; every rank calls it.

    Parameters and buffers are saved under the names of the whole model, optimizer state by the names of parameters, a
    tied weight once, together with the number of steps done and torch's random states. Until all is written, and after
    a kill at any moment, `path` holds what was saved before.

    Args:
        path: a directory that every rank reaches under this path; it is made where there is none.
        pipe: the pipeline.
        optimizer: this rank's optimizer; None on a rank without parameters, or on all for the model alone.
        values: plain values that `load` is to return, such as the state of a scheduler; the same on every rank. None,
            bool, int, float, str, list, tuple, dict and tensors are plain.
        group: who saves together, where others than the ranks of `pipe` hold parts of the model: with data-parallel
            replicas, the ranks of all of them.

    Raises:
        CheckpointError: on every rank, if any cannot save its part; what was saved before is as it was.
    """
    agreement = Agreement(path, "saved", pipe, group)
    root = Path(path).absolute()
    own: dict[_model.Place, Tensor] = {}
    mine: list[Any] = []
    with agreement.attempt():
        own = _model.own_tensors(pipe)
        mine = [_model.described(own), _optimizer.described(optimizer, own), encode(dict(values or {}), "values")]
    random = _random.states(own.values())
    shared = agreement.share([*mine, pipe.ties, pipe.steps, sorted(random), f"save-{secrets.token_hex(16)}"])
    models, optimizers, kept, ties, steps, generators, directories = zip(*shared, strict=True)
    directory: str = directories[0]
    with agreement.attempt():
        names = _model.names(models, [tie for each in ties for tie in each], pipe.schedule.wiring.stages)
        whole, holders = _optimizer.merged(optimizers, names)
        if differing := [rank for rank, each in enumerate(kept) if each != kept[0]]:
            raise ValueError(f"values differ between rank 0 and ranks {differing}; give the same on every rank")
    agreement.share()
    agreement.refuse(_model.missing_shards(models))
    rank, ranks = agreement.rank, agreement.ranks
    held = {names.saved_as[place]: tensor for place, tensor in own.items() if place[0] < names.chain}
    parts = {
        _files.MODEL: {
            name: tensor for name, tensor in held.items() if _model.writes(tensor, names.holder[name], rank)
        },
        _files.TRAINING: _optimizer.to_write(optimizer, own, names, holders, rank)
        | {_random.saved_as(rank, kind): state for kind, state in random.items()},
    }
    content = {
        "model": names.described(),
        "optimizer": whole,
        "steps": steps[0],
        "random": generators,
        "values": kept[0],
    }
    with ExitStack() as saving:
        with agreement.attempt():
            if rank == 0:
                saving.enter_context(_files.saving(root, directory))
        agreement.share()
        written: dict[str, Any] = {}
        with agreement.attempt():
            for folder, tensors in parts.items():
                written |= _files.write(root / directory, folder, tensors, rank + 1, ranks)
            if rank == 0 and not names.sharded:
                written |= _files.write_index(root / directory, _files.MODEL, names.holder, ranks)
        for each in agreement.share(written):
            written |= each
        with agreement.attempt():
            if rank == 0:
                _files.commit(root, directory, {**content, "files": written})
        agreement.share()
