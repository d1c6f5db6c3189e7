"""A stage: a piece of the model and its number in the chain."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from pipeloom.errors import PipelineError


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """A piece of the model, `module`, that is number `index` in the chain of stages.

    What the module returns is what the next stage is called with: a tuple becomes its positional arguments, anything
    else its one argument. A stage holds nothing but these two, so several pipelines may share it.
    """

    module: nn.Module
    index: int
    whole: bool = False
    """Whether the module's names are those of the whole model, as `pipeloom.split` makes them."""
    ties: tuple[tuple[str, ...], ...] = ()
    """Names of parameters that are one weight of the model, all ties of the model; see `Pipeline.tie`."""
    shared: tuple[tuple[str, ...], ...] = ()
    """Names of buffers that are one buffer of the model, all of the model."""

    def __post_init__(self) -> None:
        if not isinstance(self.module, nn.Module):
            raise PipelineError(
                f"Stage: module is an nn.Module, got a {type(self.module).__name__}; wrap a function in one"
            )
        if isinstance(self.index, bool) or not isinstance(self.index, int) or self.index < 0:
            raise PipelineError(f"Stage: index is the stage's number, counted from 0, got {self.index!r}")
