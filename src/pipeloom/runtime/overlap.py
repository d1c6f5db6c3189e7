"""Parts: the actions of a composite, as a function registered for it sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import nn
from torch.autograd.graph import GradientEdge

from pipeloom.action import Action, Kind
from pipeloom.runtime.split_backward import Gradients
from pipeloom.runtime.tape import Tape


class Running(Protocol):
    """What a part needs of the run that it is in; see `pipeloom.runtime.executor.Run`."""

    part: Action | None

    def module(self, stage: int) -> nn.Module: ...
    def begin_forward(self, stage: int, microbatch: int) -> tuple[Tape, tuple[Any, ...], Mapping[str, Any]]: ...
    def end_forward(self, stage: int, microbatch: int, tape: Tape, output: Any) -> None: ...
    def begin_backward(self, stage: int, microbatch: int) -> Gradients: ...
    def end_backward(self, stage: int, microbatch: int, gradients: Gradients) -> None: ...
    def tape(self, stage: int, microbatch: int) -> Tape: ...
    def drop_tape(self, stage: int, microbatch: int) -> None: ...
    def run(self, action: Action) -> None: ...


class Part:
    """One action that a registered function is to do.

    Either call it, and it runs as it would have by itself. Or do its work and close it with `finish`: then `module`,
    `inputs`, `keywords` (F) or `outputs` and `output_gradients` (B, I) say what there is to do. `notes` is a dict for
    your own use, the same in the F and the backward of one stage and microbatch.
    """

    def __init__(
        self, run: Running, action: Action, after: Callable[[], None], function: Callable[[Part], None] | None
    ) -> None:
        self.action = action
        self.finished = False
        self._run = run
        self._after = after
        self._function = function
        self._begun: tuple[Tape, tuple[Any, ...], Any] | None = None
        self._gradients: Gradients | None = None

    @property
    def stage(self) -> int:
        return self.action.stage

    @property
    def microbatch(self) -> int:
        return self.action.microbatch

    @property
    def module(self) -> nn.Module:
        """The stage's module."""
        return self._run.module(self.stage)

    @property
    def inputs(self) -> Sequence[Any]:
        """F: the positional arguments of the module. Backward: its inputs that want a gradient, as leaves."""
        return self._begin()[1] if self.action.kind is Kind.F else self._tape.leaves

    @property
    def keywords(self) -> dict[str, Any]:
        """F: the keyword arguments of the module."""
        return dict(self._begin()[2])

    @property
    def outputs(self) -> Sequence[GradientEdge]:
        """Backward: where it starts, in order: the edges of the graph at outputs that want a gradient, then at losses;
        `torch.autograd.backward` and `grad` take them in place of tensors."""
        return self._tape.roots

    @property
    def output_gradients(self) -> Gradients:
        """Backward: the gradient of each of `outputs`; None for one that nobody used."""
        if self._gradients is None:
            self._gradients = self._run.begin_backward(self.stage, self.microbatch)
        return self._gradients

    @property
    def notes(self) -> dict[str, Any]:
        return self._tape.notes

    def __call__(self) -> None:
        """Run the action as it would have run by itself: by the function registered for its kind, if there is one."""
        self._open("called")
        self._run.part = self.action
        if self._function is not None:
            function, self._function = self._function, None
            function(self)
            return
        if self._begun is not None or self._gradients is not None:
            raise RuntimeError(f"{self.action}: its inputs have been taken, so close it with finish(...)")
        self._run.run(self.action)
        self._close()

    def finish(self, result: Any = None) -> None:
        """Close the action with its result.

        Args:
            result: F: what the module returned. B, I: the gradients of `inputs`, in order. W: nothing.
        """
        self._open("finished")
        kind = self.action.kind
        if kind is Kind.F:
            self._run.end_forward(self.stage, self.microbatch, self._begin()[0], result)
        elif kind is not Kind.W:
            if result is None or len(result) != len(self.inputs):
                found = "none" if result is None else str(len(result))
                raise ValueError(
                    f"{self.action}: finish takes the gradients of its {len(self.inputs)} inputs, got {found}"
                )
            self._run.end_backward(self.stage, self.microbatch, list(result))
        if kind in (Kind.B, Kind.W):
            self._run.drop_tape(self.stage, self.microbatch)
        self._close()

    @property
    def _tape(self) -> Tape:
        return self._begin()[0] if self.action.kind is Kind.F else self._run.tape(self.stage, self.microbatch)

    def _begin(self) -> tuple[Tape, tuple[Any, ...], Any]:
        if self._begun is None:
            self._begun = self._run.begin_forward(self.stage, self.microbatch)
        return self._begun

    def _open(self, what: str) -> None:
        if self.finished:
            raise RuntimeError(f"{self.action} is {what} twice")

    def _close(self) -> None:
        self.finished = True
        self._run.part = None
        self._after()
