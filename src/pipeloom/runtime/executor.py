"""The executor: walks one rank's rows for one step.

The rows are compiled once, to calls that a `Run` makes in order. A `Run` holds what one step needs and nothing else
does: inputs and targets, values on their way, tapes of forwards whose backward is to come.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeloom.action import COMMUNICATION, COMPUTE, SENDS, Action, Kind
from pipeloom.runtime.batch import Batch
from pipeloom.runtime.overlap import Part
from pipeloom.runtime.randomness import Randomness
from pipeloom.runtime.replicas import Replicas
from pipeloom.runtime.split_backward import Gradients
from pipeloom.runtime.tape import Tape
from pipeloom.runtime.transport import Pending, Transport
from pipeloom.runtime.tree import map_tensors, tensors
from pipeloom.schedule import Schedule

Call = Callable[["Run"], None]
Edge = tuple[int, int, int]
"""From stage, to stage, microbatch."""


@dataclass(slots=True)
class Program:
    """The rows of one rank of a lowered schedule, compiled to calls."""

    schedule: Schedule
    rank: int
    modules: Mapping[int, nn.Module]
    loss_fn: Callable[..., Any] | None
    registered: Mapping[Kind, Callable[..., None]]
    randomness: Randomness | None
    replicas: Replicas
    calls: list[tuple[Call, Action]] = field(init=False)
    accepts: dict[int, frozenset[str] | None] = field(init=False)
    """The keyword arguments that each stage's forward takes; None for any."""

    def __post_init__(self) -> None:
        self.accepts = {stage: keywords_of(module) for stage, module in self.modules.items()}
        row = self.schedule.rows[self.rank]
        self.calls = []
        coming: set[int] = set()
        at = 0
        while at < len(row):
            cell = row[at]
            at += 1
            for stage in dict.fromkeys(action.stage for action in cell.computes if action.stage in coming):
                coming.remove(stage)
                self.calls.append((partial(_call, function=partial(self.replicas.gathered, stage)), cell))
            if cell.kind is Kind.UNSHARD and self.replicas.sharded(cell.stage):
                coming.add(cell.stage)
            if cell.kind in self.registered or cell.parts:
                sends: list[tuple[int, Call]] = []
                while at < len(row) and (maker := _maker(row[at], cell)) is not None:
                    sends.append((maker, self._compile(row[at])))
                    at += 1
                self.calls.append((partial(Run.parts, cell=cell, sends=sends), cell))
            else:
                self.calls.append((self._compile(cell), cell))

    def _compile(self, cell: Action) -> Call:
        if cell.kind in COMPUTE:
            return partial(_COMPUTE[cell.kind], stage=cell.stage, microbatch=cell.microbatch)
        if cell.kind in COMMUNICATION:
            edge = self._edge(cell)
            if cell.kind in SENDS:
                return partial(Run.send, edge=edge, peer=self.schedule.placement[edge[1]])
            return partial(Run.receive, edge=edge, peer=self.schedule.placement[edge[0]])
        if cell.kind is Kind.REDUCE_GRAD:
            return partial(Run.reduce, stage=cell.stage)
        if not self.replicas.sharded(cell.stage):
            return _nothing
        gathers = cell.kind is Kind.UNSHARD
        return partial(_call, function=partial(self.replicas.gather if gathers else self.replicas.drop, cell.stage))

    def _edge(self, cell: Action) -> Edge:
        """The edge that a send or receive serves: its far end is named, or the neighbour on the chain."""
        forward = cell.kind in (Kind.SEND_F, Kind.RECV_F)
        sends = cell.kind in SENDS
        far = cell.far if cell.far >= 0 else cell.stage + (1 if forward == sends else -1)
        return (cell.stage, far, cell.microbatch) if sends else (far, cell.stage, cell.microbatch)


def _nothing(_: Run) -> None:
    """UNSHARD and RESHARD of a module that is not sharded."""


def _call(_: Run, function: Callable[[], None]) -> None:
    function()


def _maker(send: Action, cell: Action) -> int | None:
    """Which of the actions in `cell` produces what `send` carries; None if none does."""
    if send.kind not in SENDS:
        return None
    makers = (Kind.F,) if send.kind is Kind.SEND_F else (Kind.B, Kind.I)
    for index, part in enumerate(cell.computes):
        if part.stage == send.stage and part.microbatch == send.microbatch and part.kind in makers:
            return index
    return None


def keywords_of(module: nn.Module) -> frozenset[str] | None:
    """The keyword arguments that a module takes; None for any."""
    parameters = inspect.signature(module.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(
        parameter.name
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY)
    )


@dataclass(frozen=True, slots=True)
class _Coming:
    value: Pending


class Run:
    """One walk over the rows of a rank."""

    def __init__(
        self,
        program: Program,
        transport: Transport | None,
        batch: Batch,
        step: int,
        *,
        train: bool,
        keep: bool,
        reduce: bool = True,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.program = program
        self.batch = batch
        self.train = train
        self.losses: dict[int, Tensor] = {}
        self.outputs: dict[int, Any] = {}
        self.microbatch: int | None = None
        """The microbatch whose forward is running."""
        self.action: Action | None = None
        """The cell that is running."""
        self._keep = keep
        self._reduce = reduce
        self._scaler = scaler
        self._step = step
        self._randomness = program.randomness if train else None
        self._transport = transport
        self._wiring = program.schedule.wiring
        self._placement = program.schedule.placement
        self._values: dict[Edge, Any] = {}
        """What came or goes along an edge: a value, or a `Pending` one."""
        self._tapes: dict[tuple[int, int], Tape] = {}
        self._added: list[Tensor] = []

    def walk(self) -> None:
        """Run every action of the row, in order.

        Whatever an action raises goes on to the caller, with a note that says which action it was.
        """
        try:
            for call, action in self.program.calls:
                self.action = action
                call(self)
            if self._transport is not None:
                self._transport.flush()
        except BaseException as error:
            error.add_note(f"in {self.action} on rank {self.program.rank} of {self.program.schedule.name}")
            raise

    def reduce(self, stage: int) -> None:
        """Average the gradients of a stage over its replicas, unless this step leaves it to a later one."""
        if self._reduce:
            self.program.replicas.reduce(stage)

    def send(self, edge: Edge, peer: int) -> None:
        assert self._transport is not None
        self._transport.send(peer, self._values.pop(edge))

    def receive(self, edge: Edge, peer: int) -> None:
        assert self._transport is not None
        self._values[edge] = _Coming(self._transport.receive(peer))

    def _take(self, edge: Edge) -> Any:
        value = self._values.pop(edge)
        return value.value.wait() if isinstance(value, _Coming) else value

    def forward(self, stage: int, microbatch: int) -> None:
        tape, arguments, keywords = self.begin_forward(stage, microbatch)
        output = self.program.modules[stage](*arguments, **keywords)
        self.end_forward(stage, microbatch, tape, output)

    def begin_forward(self, stage: int, microbatch: int) -> tuple[Tape, tuple[Any, ...], Mapping[str, Any]]:
        """What the stage's module is to be called with, and the tape that its inputs are on."""
        tape = Tape()
        self.microbatch = microbatch
        if self._randomness:
            self._randomness.forward(self._step, microbatch)
        if self._wiring.first(stage):
            arguments = self.batch.arguments[microbatch]
        else:
            taken: list[Any] = []
            for source in self._wiring.sources(stage):
                value = self._take((source, stage, microbatch))
                if self.train:
                    value = map_tensors(tape.enter, value)
                    tape.taken.append(len(tape.leaves))
                on_chain = source == stage - 1
                taken += value if on_chain and isinstance(value, tuple) else [value]
            arguments = tuple(taken)
        return tape, arguments, self._keywords(stage, microbatch)

    def _keywords(self, stage: int, microbatch: int) -> Mapping[str, Any]:
        if not self.batch.keywords:
            return {}
        accepted = self.program.accepts[stage]
        given = self.batch.keywords[microbatch]
        return given if accepted is None else {name: given[name] for name in given if name in accepted}

    def add_loss(self, value: Tensor) -> None:
        """Let the backward of the running forward begin at `value` too."""
        if self.train and value.requires_grad:
            assert self.microbatch is not None
            self._added.append(self._weighted(value, self.microbatch))

    def _weighted(self, loss: Tensor, microbatch: int) -> Tensor:
        weighted: Tensor = loss * self.batch.share(microbatch)
        return weighted if self._scaler is None else self._scaler.scale(weighted)

    def end_forward(self, stage: int, microbatch: int, tape: Tape, output: Any) -> None:
        """Take the stage's output: on to the next stages or, at the end of the chain, into the loss."""
        self.microbatch = None
        if self._wiring.last(stage):
            self._finish(stage, microbatch, tape, output)
        else:
            chain, skip = self._outward(stage, output)
            for target in self._wiring.targets(stage):
                self._values[stage, target, microbatch] = map_tensors(_cut, chain if target == stage + 1 else skip)
            if self.train:
                skipping = [tensor for tensor in tensors(skip) if tensor.requires_grad]
                tape.roots = skipping + [tensor for tensor in tensors(chain) if tensor.requires_grad]
        if self.train:
            tape.roots += self._added
            tape.added, self._added = len(self._added), []
            self._tapes[stage, microbatch] = tape

    def _outward(self, stage: int, output: Any) -> tuple[Any, Any]:
        """What goes to the next stage, and what goes along the skip edges that begin at this one."""
        map_tensors(_cut, output, f"the output of stage {stage}")
        if len(self._wiring.targets(stage)) == 1:
            return output, None
        if not isinstance(output, tuple) or len(output) < 2:
            raise TypeError(
                f"stage {stage} feeds a skip edge, so it returns a tuple whose last entry is the value for that edge; "
                f"it returned {f'a tuple of {len(output)}' if isinstance(output, tuple) else type(output).__name__}"
            )
        *chain, skip = output
        return (tuple(chain) if len(chain) > 1 else chain[0]), skip

    def _finish(self, stage: int, microbatch: int, tape: Tape, output: Any) -> None:
        loss_fn = self.program.loss_fn
        if loss_fn is not None and (self.train or self.batch.targets):
            found = loss_fn(output, self.batch.targets[microbatch]) if self.batch.targets else loss_fn(output)
            loss = found[0] if isinstance(found, tuple) else found
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
                raise TypeError(f"loss_fn returned {kind}; it returns a loss of one element, or (loss, anything)")
            if isinstance(loss, DTensor):
                loss = loss.full_tensor()
            self.losses[microbatch] = loss.detach()
            if self.train and loss.requires_grad:
                tape.roots = [self._weighted(loss, microbatch)]
        if self._keep:
            self.outputs[microbatch] = map_tensors(Tensor.detach, output, f"the output of stage {stage}")

    def begin_backward(self, stage: int, microbatch: int) -> Gradients:
        """The gradients of the stage's outputs: one for each root of its tape."""
        if self._randomness:
            self._randomness.backward(self._step, microbatch)
        tape = self._tapes[stage, microbatch]
        if self._wiring.last(stage):
            return [torch.ones_like(root) for root in tape.roots]
        chain, *skips = [self._take((target, stage, microbatch)) for target in self._wiring.targets(stage)]
        # Added up as the engine would: it runs the latest stage first, and the chain last.
        ones = [torch.ones_like(root) for root in tape.roots[len(tape.roots) - tape.added :]]
        return [*_add_up(reversed(skips)), *chain, *ones]

    def end_backward(self, stage: int, microbatch: int, gradients: Gradients) -> None:
        """Hand the gradients of the stage's inputs to the stages they came from."""
        start = 0
        for source, end in zip(self._wiring.sources(stage), self._tapes[stage, microbatch].taken, strict=True):
            self._values[stage, source, microbatch] = gradients[start:end]
            start = end

    def module(self, stage: int) -> nn.Module:
        """The module of a stage."""
        return self.program.modules[stage]

    def tape(self, stage: int, microbatch: int) -> Tape:
        """What the backward of a stage needs of its forward."""
        return self._tapes[stage, microbatch]

    def backward(self, stage: int, microbatch: int) -> None:
        gradients = self.begin_backward(stage, microbatch)
        self.end_backward(stage, microbatch, self._tapes[stage, microbatch].whole(gradients))
        self.drop_tape(stage, microbatch)

    def backward_inputs(self, stage: int, microbatch: int) -> None:
        gradients = self.begin_backward(stage, microbatch)
        self.end_backward(stage, microbatch, self._tapes[stage, microbatch].inputs(gradients))

    def backward_weights(self, stage: int, microbatch: int) -> None:
        if self._randomness:
            self._randomness.backward(self._step, microbatch)
        self._tapes.pop((stage, microbatch)).weights()

    def drop_tape(self, stage: int, microbatch: int) -> None:
        """Let go of what the backward needed."""
        del self._tapes[stage, microbatch]

    def run(self, action: Action) -> None:
        """Run one compute action as it is."""
        _COMPUTE[action.kind](self, action.stage, action.microbatch)

    def parts(self, cell: Action, sends: Sequence[tuple[int, Call]]) -> None:
        """Run a composite, or an action whose kind has a function of its own.

        `sends` follow the cell in the row, each with the part that it waits for. They leave in that order, and as
        soon as the part is done.
        """
        waiting = deque(sends)

        def send() -> None:
            while waiting and parts[waiting[0][0]].finished:
                waiting.popleft()[1](self)

        registered = self.program.registered
        parts = [Part(self, part, send, registered.get(part.kind)) for part in cell.computes]
        function = registered.get(cell.kind) if cell.parts else None
        if function is None:
            for part in parts:
                part()
        else:
            function(*parts)
        unfinished = [str(part.action) for part in parts if not part.finished]
        if unfinished:
            raise RuntimeError(
                f"the function registered for {cell.kind} left {', '.join(unfinished)} open; "
                "call each part, or close it with finish(...)"
            )


_COMPUTE: dict[Kind, Callable[..., None]] = {
    Kind.F: Run.forward,
    Kind.B: Run.backward,
    Kind.I: Run.backward_inputs,
    Kind.W: Run.backward_weights,
}


def _cut(tensor: Tensor) -> Tensor:
    """`tensor` without its graph, which still says whether a gradient is wanted for it."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _add_up(gradients: Iterable[Gradients]) -> Gradients:
    """The sums of several gradients of the same tensors, added in turn."""
    sums: Gradients = []
    for each in gradients:
        sums = [_add(*pair) for pair in zip(sums, each, strict=True)] if sums else each
    return sums


def _add(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other
