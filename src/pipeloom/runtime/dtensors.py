"""DTensors on their way from stage to stage: what crosses is this rank's part and how the whole is laid out.

Ranks of a mesh that differ in their place in the pipeline alone have parts of the same layout, on a mesh of the same
name: "tp" of the sender and "tp" of the receiver. So the layout crosses in words, and the receiver takes its own mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pipeloom.errors import MessageError
from pipeloom.runtime.imported import is_dtensor
from pipeloom.runtime.replicas import local
from pipeloom.runtime.tree import map_tensors

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

_MARK = "\0dtensor"
"""The key by which a dict on the wire stands for a DTensor."""


class Meshes:
    """The meshes that the parameters of this rank's stages are on."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._meshes = list(
            dict.fromkeys(
                parameter.device_mesh
                for module in modules
                for parameter in module.parameters()
                if is_dtensor(parameter)
            )
        )

    def flat(self, value: Any) -> Any:
        """The tree `value` with something plain for each DTensor.

        Raises:
            MessageError: a placement has no words.
        """
        return value if type(value) is Tensor else map_tensors(_flat, value)

    def whole(self, value: Any) -> Any:
        """The tree that `flat` was called with at the other end, its DTensors on meshes of this rank.

        Raises:
            MessageError: there is no such mesh.
        """
        match value:
            case Tensor():
                return value
            case {"\0dtensor": [names, placements, shape, stride, part]}:
                return _whole(self._find(names), placements, shape, stride, part)
            case dict():
                return {key: self.whole(item) for key, item in value.items()}
            case list() | tuple():
                return type(value)(map(self.whole, value))
        return value

    def _find(self, names: list[str]) -> DeviceMesh:
        for mesh in self._meshes:
            known = mesh.mesh_dim_names or ()
            if known == tuple(names):
                return mesh
            if set(names) <= set(known):
                return mesh[tuple(names)]
        found = ", ".join(str(mesh.mesh_dim_names) for mesh in self._meshes) or "none"
        raise MessageError(
            f"a DTensor on a mesh named {tuple(names)} came to a stage whose parameters are on no such mesh (found "
            f"{found}); parallelize a module of this stage over it, or send a plain tensor: output.to_local()"
        )


def _flat(tensor: Tensor) -> Tensor | Mapping[str, Any]:
    if not is_dtensor(tensor):
        return tensor
    names = tensor.device_mesh.mesh_dim_names
    if names is None:
        raise MessageError("a DTensor crosses on a mesh whose dimensions have names only: mesh_dim_names=(...)")
    placements = [_words(each) for each in tensor.placements]
    part = local(tensor).requires_grad_(tensor.requires_grad)
    return {_MARK: [list(names), placements, list(tensor.shape), list(tensor.stride()), part]}


def _whole(mesh: DeviceMesh, placements: list[str], shape: list[int], stride: list[int], part: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    whole = DTensor.from_local(
        part.detach(),
        mesh,
        [_placement(words) for words in placements],
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(stride),
    )
    return whole.requires_grad_(part.requires_grad)


def _words(placement: Placement) -> str:
    from torch.distributed.tensor import Partial, Replicate, Shard

    if type(placement) is Shard:
        return f"shard {placement.dim}"
    if type(placement) is Replicate:
        return "replicate"
    if type(placement) is Partial:
        return f"partial {placement.reduce_op}"
    raise MessageError(f"a DTensor with placement {placement} cannot cross to another rank; redistribute it first")


def _placement(words: str) -> Placement:
    from torch.distributed.tensor import Partial, Replicate, Shard

    match words.split():
        case ["shard", dimension]:
            return Shard(int(dimension))
        case ["replicate"]:
            return Replicate()
        case ["partial", operation]:
            return Partial(operation)
    raise MessageError(f"a message's DTensor has an unknown placement {words!r}")
