"""What a failed step leaves in the gradients: nothing, or a refusal to go on."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from pipeloom.errors import PipelineError
from pipeloom.runtime.replicas import Replicas, local


class Leftovers:
    """Undoes steps that failed.

    A gradient that was None before the step is None again. One that was held from earlier steps may hold parts of the
    failed one, so then no step is taken until all are cleared.
    """

    def __init__(self, modules: Iterable[nn.Module], replicas: Replicas) -> None:
        self._modules = list(modules)
        self._replicas = replicas
        self._empty: list[nn.Parameter] = []
        self._spoilt = False
        self._after: list[tuple[nn.Parameter, int]] = []
        """The trained parameters and their versions when the last step or evaluation was done."""

    def begin(self) -> None:
        """A step begins."""
        self._empty = [parameter for parameter in self._parameters() if parameter.grad is None]

    def done(self) -> None:
        """A step or an evaluation is done, as far as this rank knows."""
        self._after = [(each, each._version) for each in self._parameters() if each.requires_grad]

    def used(self) -> bool:
        """Whether weights have changed since the last call was done."""
        return any(parameter._version != version for parameter, version in self._after)

    def undo(self) -> None:
        """The last step that began has failed, here or elsewhere."""
        self._replicas.abort_step()
        for parameter in self._empty:
            parameter.grad = None
        self._empty = []
        self._spoilt = any(parameter.grad is not None for parameter in self._parameters())

    def refuse(self) -> None:
        """Refuse a step on spoilt gradients."""
        if not self._spoilt:
            return
        held = any(each.grad is not None and bool(local(each.grad).any()) for each in self._parameters())
        if held or self._replicas.lost:
            raise PipelineError(
                "a step failed while gradients of earlier steps were held, and they may hold parts of it; "
                "clear them first: optimizer.zero_grad()"
            )
        self._spoilt = False

    def _parameters(self) -> Iterable[nn.Parameter]:
        return (parameter for module in self._modules for parameter in module.parameters())
