"""The executor: walks one rank's rows for one step.

The rows are compiled once (`pipeloom.runtime.program`), to calls that a `Run` makes in order. A `Run` holds what one
step needs and nothing else does: inputs and targets, values on their way, tapes of forwards whose backward is to come.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import profiler

from pipeloom.action import Action, Kind
from pipeloom.errors import PipelineError
from pipeloom.runtime.batch import Batch
from pipeloom.runtime.dtensors import Meshes
from pipeloom.runtime.edges import Edges
from pipeloom.runtime.imported import is_dtensor
from pipeloom.runtime.microbatches import refuse_unmergeable
from pipeloom.runtime.overlap import Part
from pipeloom.runtime.randomness import Randomness
from pipeloom.runtime.replicas import Replicas
from pipeloom.runtime.sharing import marked, refuse_changes, share_memory, unmarked, versions
from pipeloom.runtime.split_backward import Gradients
from pipeloom.runtime.tape import Tape
from pipeloom.runtime.times import Times
from pipeloom.runtime.transport import Transport
from pipeloom.runtime.tree import map_tensors, tensors
from pipeloom.runtime.unchanged import Unchanged
from pipeloom.schedule import Schedule

Call = Callable[["Run"], None]


class Step(NamedTuple):
    """One call of a run: what it does, the cell that it stands for, and the number of the action."""

    call: Call
    cell: Action
    number: int


@dataclass(frozen=True, slots=True)
class Work:
    """What the runs of one rank have in common."""

    schedule: Schedule
    rank: int
    modules: Mapping[int, nn.Module]
    loss_fn: Callable[..., Any] | None
    registered: Mapping[Kind, Callable[..., None]]
    randomness: Randomness | None
    replicas: Replicas
    meshes: Meshes
    unchanged: Unchanged


@lru_cache(maxsize=1024)
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


class Run:
    """One walk over the rows of a rank."""

    def __init__(
        self,
        work: Work,
        transport: Transport | None,
        batch: Batch,
        step: int,
        *,
        train: bool,
        keep: bool,
        reduce: bool = True,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.work = work
        self.batch = batch
        self.train = train
        self.losses: dict[int, Tensor] = {}
        self.outputs: dict[int, Any] = {}
        self._forward: int | None = None
        """The microbatch whose forward is running."""
        self._backward: int | None = None
        """The microbatch whose backward is running, or ran last."""
        self.cell: Action | None = None
        """The cell that is running."""
        self.part: Action | None = None
        """The part of a composite that is running, if that is known."""
        self.number = 0
        """The number of the action that is running."""
        self._ready: Any = None
        """When the running action had its inputs."""
        self._times: Times
        self._keep = keep
        self._reduce = reduce
        self._scaler = scaler
        self._step = step
        self._randomness = work.randomness if train else None
        self.edges = Edges(transport, work.meshes, self._arrive)
        wiring = work.schedule.wiring
        self._sources = {stage: wiring.sources(stage) for stage in work.modules}
        self._targets = {stage: wiring.targets(stage) for stage in work.modules}
        self._tapes: dict[tuple[int, int], Tape] = {}
        self._added: list[Tensor] = []

    def walk(self, steps: Sequence[Step], times: Times) -> None:
        """Make every call, in order, and note in `times` when each action ran.

        While PyTorch's profiler records, each action bears its cell's name there. Whatever an action raises goes on
        to the caller, with a note that says which action it was.
        """
        self._times = times
        now = times.now
        if profiler._is_profiler_enabled:
            steps = [_recorded(step) for step in steps]
        try:
            for call, self.cell, self.number in steps:
                self._ready = now()
                call(self)
                times.starts[self.number] = self._ready
                times.ends[self.number] = now()
            self.edges.flush()
        except BaseException as error:
            error.add_note(f"in {self.cell} on rank {self.work.rank} of {self.work.schedule.name}")
            raise
        self.cell = None

    @property
    def place(self) -> tuple[Schedule, Action, Action | None] | None:
        """What this run has come to: its schedule, the cell, and which action of it is at work, if that is known."""
        cell = self.cell  # another thread may ask
        return (self.work.schedule, cell, self.part if cell.parts else cell) if cell is not None else None

    def reduce(self, stage: int) -> None:
        """Average the gradients of a stage over its replicas, unless this step leaves it to a later one."""
        if self._reduce:
            self.work.replicas.reduce(stage)

    def _arrive(self, number: int) -> None:
        """The receive of this number has brought what the running action waited for."""
        self._ready = self._times.ends[number] = self._times.now()

    def forward(self, stage: int, microbatch: int) -> None:
        tape, arguments, keywords = self.begin_forward(stage, microbatch)
        output = self.work.modules[stage](*arguments, **keywords)
        self.end_forward(stage, microbatch, tape, output)

    def begin_forward(self, stage: int, microbatch: int) -> tuple[Tape, tuple[Any, ...], Mapping[str, Any]]:
        """What the stage's module is to be called with, and the tape that its inputs are on."""
        if self.train:
            self.work.unchanged.before_forward(stage)
        tape = Tape()
        self._forward = microbatch
        if self._randomness:
            self._randomness.forward(self._step, microbatch)
        sources = self._sources[stage]
        if not sources:
            arguments = self.batch.arguments[microbatch]
        else:
            taken: list[Any] = []
            for source in sources:
                value, shared = unmarked(self.edges.take((source, stage, microbatch)))
                if self.train:
                    value = map_tensors(tape.enter, value)
                    tape.taken.append(len(tape.leaves))
                if shared:
                    tape.watched += versions(value)
                on_chain = source == stage - 1
                taken += value if on_chain and isinstance(value, tuple) else [value]
            arguments = tuple(taken)
        return tape, arguments, self._keywords(stage, microbatch)

    def _keywords(self, stage: int, microbatch: int) -> Mapping[str, Any]:
        if not self.batch.keywords:
            return {}
        accepted = keywords_of(self.work.modules[stage])
        given = self.batch.keywords[microbatch]
        return given if accepted is None else {name: given[name] for name in given if name in accepted}

    @property
    def microbatch(self) -> int | None:
        """The microbatch whose forward is running, also if it is recomputed for its backward."""
        return self._backward if _in_backward() else self._forward

    def add_loss(self, value: Tensor) -> None:
        """Let the backward of the running forward begin at `value` too; a recomputed one has done so before."""
        if not self.train or _in_backward():
            return
        if not torch.is_grad_enabled():
            raise PipelineError(
                "pipe.add_loss is called where gradients are off, as inside checkpoint(..., use_reentrant=True), so "
                "that the loss would be left out; use use_reentrant=False, or call it outside"
            )
        if value.numel() != 1:
            raise PipelineError(f"pipe.add_loss takes a loss of one element, got shape {tuple(value.shape)}")
        if value.requires_grad:
            self._added.append(value)

    def loss(self) -> Tensor:
        """The loss of the whole batch, where this rank has it; zero elsewhere."""
        if not self.losses:
            return torch.zeros(())
        shares = {index: self.batch.share(index) for index in sorted(self.losses)}
        counted = [self.losses[index] * share for index, share in shares.items() if share]  # the mean of nothing is NaN
        return torch.stack(counted).sum() if counted else torch.zeros(())

    def _lose(self, tape: Tape, loss: Tensor, microbatch: int) -> None:
        scaled: Tensor = loss if self._scaler is None else self._scaler.scale(loss)
        tape.lose(scaled, self.batch.share(microbatch))

    def end_forward(self, stage: int, microbatch: int, tape: Tape, output: Any) -> None:
        """Take the stage's output: on to the next stages or, at the end of the chain, into the loss."""
        self._forward = None
        watched, tape.watched = tape.watched, []
        refuse_changes(stage, watched)
        targets = self._targets[stage]
        if not targets:
            self._finish(stage, microbatch, tape, output)
        else:
            chain, skip = self._outward(stage, output)
            values = [map_tensors(_cut, chain if target == stage + 1 else skip) for target in targets]
            shared = share_memory(values, watched)
            for target, value in zip(targets, values, strict=True):
                self.edges.put((stage, target, microbatch), marked(value) if shared else value)
            if self.train:
                for tensor in (*tensors(skip), *tensors(chain)):
                    tape.leave(tensor)
        if self.train:
            for loss in self._added:
                self._lose(tape, loss, microbatch)
            self._added = []
            self._tapes[stage, microbatch] = tape
            self.work.unchanged.after_forward(stage)

    def _outward(self, stage: int, output: Any) -> tuple[Any, Any]:
        """What goes to the next stage, and what goes along the skip edges that begin at this one."""
        if type(output) is not Tensor:
            map_tensors(_cut, output, f"the output of stage {stage}")  # refuses what cannot cross
        if len(self._targets[stage]) == 1:
            return output, None
        if not isinstance(output, tuple) or len(output) < 2:
            raise TypeError(
                f"stage {stage} feeds a skip edge, so it returns a tuple whose last entry is the value for that edge; "
                f"it returned {f'a tuple of {len(output)}' if isinstance(output, tuple) else type(output).__name__}"
            )
        *chain, skip = output
        return (tuple(chain) if len(chain) > 1 else chain[0]), skip

    def _finish(self, stage: int, microbatch: int, tape: Tape, output: Any) -> None:
        loss_fn = self.work.loss_fn
        if loss_fn is not None and (self.train or self.batch.targets):
            try:
                found = loss_fn(output, self.batch.targets[microbatch]) if self.batch.targets else loss_fn(output)
            except TypeError as error:
                if not self.batch.targets:
                    error.add_note("there is no target in this call, so loss_fn was called with the output alone")
                raise
            loss = found[0] if isinstance(found, tuple) else found
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
                raise TypeError(f"loss_fn returned {kind}; it returns a loss of one element, or (loss, anything)")
            if is_dtensor(loss):
                loss = loss.full_tensor()
            if self.train and not loss.requires_grad and any(each.requires_grad for each in tensors(output)):
                raise TypeError("loss_fn returned a loss that no gradient flows from; leave out detach() and no_grad")
            self.losses[microbatch] = loss.detach()
            if self.train and loss.requires_grad:
                self._lose(tape, loss, microbatch)
        if self._keep:
            if sizes := self.batch.sizes():
                refuse_unmergeable(output, sizes[microbatch], f"the output of stage {stage}")
            self.outputs[microbatch] = map_tensors(Tensor.detach, output, f"the output of stage {stage}")

    def begin_backward(self, stage: int, microbatch: int) -> Gradients:
        """The gradients of the stage's outputs: one for each root of its tape."""
        self._backward = microbatch
        if self._randomness:
            self._randomness.backward(self._step, microbatch)
        tape = self._tapes[stage, microbatch]
        targets = self._targets[stage]
        if not targets:
            return list(tape.shares)
        chain, *skips = [self.edges.take((target, stage, microbatch)) for target in targets]
        # Added up as the engine would: it runs the latest stage first, and the chain last.
        return [*_add_up(reversed(skips)), *chain, *tape.shares]

    def end_backward(self, stage: int, microbatch: int, gradients: Gradients) -> None:
        """Hand the gradients of the stage's inputs to the stages they came from."""
        start = 0
        for source, end in zip(self._sources[stage], self._tapes[stage, microbatch].taken, strict=True):
            self.edges.put((stage, source, microbatch), gradients[start:end])
            start = end

    def module(self, stage: int) -> nn.Module:
        """The module of a stage."""
        return self.work.modules[stage]

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
        self._backward = microbatch
        if self._randomness:
            self._randomness.backward(self._step, microbatch)
        self._tapes.pop((stage, microbatch)).weights()
        self.work.replicas.accumulate(stage)

    def drop_tape(self, stage: int, microbatch: int) -> None:
        """Let go of what the backward needed."""
        del self._tapes[stage, microbatch]

    def run(self, action: Action) -> None:
        """Run one compute action as it is."""
        COMPUTING[action.kind](self, action.stage, action.microbatch)

    def parts(self, cell: Action, sends: Sequence[tuple[int, Step]], first: int) -> None:
        """Run a composite, or an action whose kind has a function of its own.

        `sends` follow the cell in the row, each after the part that it waits for. They leave in that order, and as soon
        as the part is done. `first` is the number of the first part.
        """
        recorded = profiler._is_profiler_enabled
        waiting = deque((maker, _recorded(step) if recorded else step) for maker, step in sends)
        times = self._times

        def done(index: int) -> None:
            times.ends[first + index] = times.now()
            while waiting and parts[waiting[0][0]].finished:
                _, send = waiting.popleft()
                times.starts[send.number] = times.now()
                send.call(self)
                times.ends[send.number] = times.now()

        registered = self.work.registered
        parts = [
            Part(self, part, partial(done, index), registered.get(part.kind))
            for index, part in enumerate(cell.computes)
        ]
        function = registered.get(cell.kind) if cell.parts else None
        if function is None:
            for index, part in enumerate(parts):
                self._ready = times.now()
                with _name(part.action) if recorded else nullcontext():
                    part()
                times.starts[first + index] = self._ready
        else:
            times.starts[first : first + len(parts)] = [times.now()] * len(parts)
            function(*parts)
        unfinished = [str(part.action) for part in parts if not part.finished]
        if unfinished:
            raise RuntimeError(
                f"the function registered for {cell.kind} left {', '.join(unfinished)} open; "
                "call each part, or close it with finish(...)"
            )


COMPUTING: dict[Kind, Callable[..., None]] = {
    Kind.F: Run.forward,
    Kind.B: Run.backward,
    Kind.I: Run.backward_inputs,
    Kind.W: Run.backward_weights,
}


def _name(action: Action) -> profiler.record_function:
    """The action's name for the profiler, which would take a bare `2F0` for a C++ symbol, and write F0."""
    return profiler.record_function(f"pipeloom::{action}")


def _recorded(step: Step) -> Step:
    def call(run: Run) -> None:
        with _name(step.cell):
            step.call(run)

    return step._replace(call=call)


def _in_backward() -> bool:
    """Whether autograd's engine is at work in this thread, as it is around a forward that is recomputed."""
    return torch._C._current_graph_task_id() != -1


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
