"""A pipeline: stages, a schedule and a loss, trained by `step` and measured by `eval`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from pipeloom import schedules
from pipeloom.action import BACKWARD, Kind
from pipeloom.errors import BatchError, PipelineError
from pipeloom.passes import forward_only, lower
from pipeloom.runtime import norms
from pipeloom.runtime.executor import Batch, Program, Run
from pipeloom.runtime.microbatches import (
    Handling,
    Weight,
    batch_size,
    merge,
    split,
    split_keywords,
    weights,
)
from pipeloom.runtime.randomness import Randomness
from pipeloom.runtime.stage import Stage
from pipeloom.runtime.ties import Ties
from pipeloom.runtime.transport import connect
from pipeloom.schedule import Schedule


class Pipeline:
    """Trains and evaluates the stages of a model under a schedule.

    Every rank of `group` builds the pipeline with its own stages and the same schedule, and calls the same methods in
    the same order.

    Args:
        stages: this rank's stages, as `pipeloom.split` makes them or by hand.
        schedule: a schedule, or the name of one together with `microbatches` (and `stages_per_rank` where there is a
            choice: as many as this rank holds). Rows without sends are lowered; rows with sends run as they stand.
        loss_fn: called as loss_fn(output, target), or loss_fn(output) in a step without targets. Returns a loss of one
            element, or a tuple that begins with it. Only the rank of the last stage uses it.
        group: the ranks of this pipeline, in order; by default all.
        weight: how much each microbatch counts: "samples" (for losses that are means), "equal", "sum", or a function
            of a microbatch's target that counts, say, its valid tokens. See `pipeloom.runtime.microbatches.weights`.
        seed: where random numbers, as of dropout, come from in a step: they are keyed by this, the number of the step
            and of the microbatch and the layer, so that they are the same for every schedule and number of ranks; see
            `pipeloom.runtime.randomness`. By default they are drawn as they come.
        kwargs: "split" or "replicate" for keyword arguments whose handling does not follow from their shape.
        transport: "auto", "local" or "torch".

    Raises:
        ScheduleError: the schedule is wrong; with every problem.
        PipelineError: stages and schedule do not fit each other.
    """

    def __init__(
        self,
        stages: Iterable[Stage],
        schedule: Schedule | str,
        *,
        loss_fn: Callable[..., Any] | None = None,
        microbatches: int | None = None,
        group: dist.ProcessGroup | None = None,
        weight: Weight = "samples",
        seed: int | None = None,
        kwargs: Mapping[str, Handling] | None = None,
        transport: Literal["auto", "local", "torch"] = "auto",
    ) -> None:
        stages = list(stages)
        self._modules = _modules(stages)
        self._group = group or dist.group.WORLD if dist.is_initialized() else None
        """The ranks of this pipeline; None where there is no other."""
        self.rank, ranks = (self._group.rank(), self._group.size()) if self._group else (0, 1)
        self.schedule = _lowered(schedule, ranks, microbatches, len(self._modules))
        _refuse_misfits(self.schedule, self.rank, ranks, self._modules)
        self._loss_fn = loss_fn
        self._weight: Weight = weight
        self._handling = dict(kwargs or {})
        self._registered: dict[Kind, Callable[..., None]] = {}
        self._programs: dict[int | None, Program] = {}
        self._device = _device(self._modules.values())
        self._transport = connect(self._group, transport, device=self._device) if self._group and ranks > 1 else None
        self._randomness = Randomness(seed, stages) if seed is not None else None
        self.steps = 0
        """How many steps are done; it keys random numbers where there is a `seed`."""
        self._ties = Ties(self._modules, self._group, self._device)
        self._ties.add_all(sorted({names for stage in stages for names in stage.ties}))
        self._run: Run | None = None
        self._loss: Tensor | None = None
        self._failed_with_gradients = False

    @property
    def first(self) -> bool:
        """Whether this rank holds a first stage, and so passes the inputs."""
        return any(map(self.schedule.wiring.first, self._modules))

    @property
    def last(self) -> bool:
        """Whether this rank holds a last stage, and so has targets, losses and outputs."""
        return any(map(self.schedule.wiring.last, self._modules))

    @property
    def modules(self) -> Mapping[int, nn.Module]:
        """The modules of this rank's stages, by the number of the stage."""
        return self._modules

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks of this pipeline; None where there is no other."""
        return self._group

    @property
    def ties(self) -> tuple[tuple[str, ...], ...]:
        """The names of parameters that are one weight, a tuple a weight; see `tie`."""
        return tuple(self._ties.names)

    @property
    def microbatch(self) -> int:
        """The number of the microbatch whose forward is running, to be read inside a stage's forward."""
        if self._run is None or self._run.microbatch is None:
            raise PipelineError("pipe.microbatch is known inside a stage's forward only")
        return self._run.microbatch

    def register(self, kind: str, function: Callable[..., None]) -> None:
        """Let `function` do what actions of `kind` do, from the next step on.

        For "OVERLAP_F_B" it is called with the parts of the composite, for "F", "B", "I" or "W" with the one part; see
        `pipeloom.runtime.overlap.Part`.
        """
        if kind not in (Kind.OVERLAP_F_B, Kind.F, *BACKWARD):
            raise PipelineError(f"register: functions are for OVERLAP_F_B, F, B, I and W, got {kind!r}")
        self._registered[Kind(kind)] = function
        self._programs.clear()

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        scaler: torch.amp.GradScaler | None = None,
        arg_mbs: Sequence[Any] | None = None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Forward and backward of one batch; gradients add up in the parameters' `.grad`.

        Args:
            args: the inputs of the model, a whole batch; on the first stage's rank only.
            target: what the loss is taken against, a whole batch; on the last stage's rank only.
            losses: a list that is emptied and filled with each microbatch's own loss, detached, in microbatch order.
            return_outputs: whether outputs are kept and returned.
            scaler: what scales the loss where gradients are of low precision. Ranks must skip the same optimizer
                steps, so with several ranks it is a `torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler`.
            arg_mbs: ready inputs instead of `args`: one entry a microbatch, a tuple of arguments or a single one.
            kwarg_mbs: ready keyword arguments instead of `kwargs`: one dict a microbatch.
            target_mbs: ready targets instead of `target`: one entry a microbatch.
            kwargs: keyword arguments of the stages on this rank; each stage is given those that its forward takes.

        Returns:
            The outputs of the model for the whole batch, detached, on the last stage's rank; None elsewhere.

        Raises:
            PipelineError: gradients are off, there is no loss, or gradients of a failed step are still held.
            BatchError: the batch does not fit the schedule.
        """
        if not torch.is_grad_enabled():
            raise PipelineError(
                "step needs gradients, and they are off here (torch.no_grad); call eval for the loss alone"
            )
        if not self.schedule.trains:
            raise PipelineError(
                f"{self.schedule.name} has no backward actions; call eval, or make a schedule that trains"
            )
        if self.last and self._loss_fn is None:
            raise PipelineError("step needs a loss: Pipeline(..., loss_fn=...)")
        if scaler is not None and self._group and not isinstance(scaler, ShardedGradScaler):
            raise PipelineError(
                "a gradient scaler of one rank skips steps that other ranks take; use "
                "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler with this pipeline's process group"
            )
        self._refuse_leftovers()
        batch = self._batch(self.schedule.microbatches, args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs)
        parameters = [parameter for module in self._modules.values() for parameter in module.parameters()]
        empty = [parameter for parameter in parameters if parameter.grad is None]
        if scaler is not None:
            scaler.scale(torch.ones((), device=self._device))  # it must know its device on every rank
        self._ties.begin()
        try:
            with self._randomness.during() if self._randomness else nullcontext():
                output = self._walk(None, batch, losses, train=True, keep=return_outputs, scaler=scaler)
            self._ties.finish()
        except BaseException:
            self._ties.abort()
            for parameter in empty:
                parameter.grad = None
            self._failed_with_gradients = len(empty) < len(parameters)
            raise
        self.steps += 1
        return output

    def tie(self, *names: str) -> None:
        """Make the parameters of these names one weight, whichever stages and ranks hold them; every rank calls it.

        All copies take on the value of the first. From then on a step adds up the gradients of all copies, so that
        each holds the whole gradient, and the copies stay equal to the bit; norms count the weight once.
        `pipeloom.split` ties what the whole model shares by itself.

        Args:
            names: the parameters' names in the whole model, or "3:weight" for the weight of stage 3.

        Raises:
            PipelineError: a name is nowhere or in several stages, or shapes differ.
        """
        self._ties.add(names)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        microbatches: int | None = None,
        return_outputs: bool = True,
        arg_mbs: Sequence[Any] | None = None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Forward of one batch, and its loss where there are targets; never a gradient.

        Takes what `step` takes. The batch may have another size, and be cut into another number of `microbatches`.
        Gradients that are held and the state of random numbers stay as they are; so do the modules' modes, which are
        yours to choose (`module.eval()`).
        """
        ready = next((mbs for mbs in (arg_mbs, kwarg_mbs, target_mbs) if mbs is not None), None)
        count = microbatches or (len(ready) if ready is not None else self.schedule.microbatches)
        batch = self._batch(count, args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs)
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices):
            return self._walk(count, batch, losses, train=False, keep=return_outputs)

    def loss(self) -> Tensor:
        """The weighted loss of the last `step` or `eval`, on every rank; every rank calls it."""
        if self._run is None:
            raise PipelineError("there is no loss before the first step")
        source = self.schedule.placement[self.schedule.wiring.stages - 1]
        value = self._loss if self._loss is not None else torch.zeros(())
        value = value.to(device=self._device, dtype=torch.float32)
        if self._group:
            dist.broadcast(value, group=self._group, group_src=source)
        return value

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients of the model so that their norm is at most `max_norm`; every rank calls it.

        Returns:
            The norm before, over all stages: that of the parameters' own norms in the order of the model.
        """
        return norms.clip_grad_norm_(
            self._modules, self.schedule.stages, max_norm, self._group, uncounted=self._ties.uncounted()
        )

    def close(self) -> None:
        """Let go of the transport; every rank calls it."""
        if self._transport is not None:
            self._transport.close()

    def _batch(
        self,
        microbatches: int,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Any,
        arg_mbs: Sequence[Any] | None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None,
        target_mbs: Sequence[Any] | None,
    ) -> Batch:
        for name, ready, whole in (
            ("arg_mbs", arg_mbs, bool(args)),
            ("kwarg_mbs", kwarg_mbs, bool(kwargs)),
            ("target_mbs", target_mbs, target is not None),
        ):
            if ready is not None and whole:
                raise BatchError(f"{name} is given beside a whole batch; give one of the two")
            if ready is not None and len(ready) != microbatches:
                raise BatchError(f"{name} has {len(ready)} entries, and there are {microbatches} microbatches")
        if self.first and not args and arg_mbs is None and not kwargs and kwarg_mbs is None:
            raise BatchError("this rank holds the first stage, and was given no inputs")
        if not self.first and (args or arg_mbs is not None):
            raise BatchError(
                f"inputs go to the rank of the first stage, {self.schedule.placement[0]}; this is rank {self.rank}"
            )
        if not self.last and (target is not None or target_mbs is not None):
            last = self.schedule.placement[self.schedule.wiring.stages - 1]
            raise BatchError(f"targets go to the rank of the last stage, {last}; this is rank {self.rank}")
        size = batch_size(args) if args else batch_size(target)
        arguments: Sequence[Any] = ()
        if arg_mbs is not None:
            arguments = [entry if isinstance(entry, tuple) else (entry,) for entry in arg_mbs]
        elif self.first:
            arguments = split(args, microbatches, "inputs")
        keywords = kwarg_mbs if kwarg_mbs is not None else split_keywords(kwargs, microbatches, self._handling, size)
        self._refuse_unknown_keywords(keywords)
        targets: Sequence[Any] = ()
        if target_mbs is not None:
            targets = target_mbs
        elif target is not None:
            targets = split(target, microbatches, "target")
        counted = targets or arguments
        sizes = [batch_size(entry) or 1 for entry in counted] if counted else None
        shares = weights(self._weight, microbatches, sizes, targets) if self.last else []
        return Batch(arguments, keywords if kwargs or kwarg_mbs else (), targets, shares)

    def _refuse_unknown_keywords(self, keywords: Sequence[Mapping[str, Any]]) -> None:
        accepts = self._program(None).accepts.values()
        if any(names is None for names in accepts):
            return
        known = frozenset[str]().union(*(names for names in accepts if names is not None))
        unknown = sorted({name for entry in keywords for name in entry} - known)
        if unknown:
            raise BatchError(
                f"no stage on rank {self.rank} takes {', '.join(unknown)}; they take {', '.join(sorted(known))}"
            )

    def _program(self, microbatches: int | None) -> Program:
        """The rows of this rank, compiled: those of the schedule, or for evaluation with so many microbatches."""
        if microbatches not in self._programs:
            schedule = self.schedule if microbatches is None else forward_only(self.schedule, microbatches).checked()
            self._programs[microbatches] = Program(
                schedule, self.rank, self._modules, self._loss_fn, self._registered, self._randomness
            )
        return self._programs[microbatches]

    def _walk(
        self,
        microbatches: int | None,
        batch: Batch,
        losses: list[Tensor] | None,
        *,
        train: bool,
        keep: bool,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Any:
        program = self._program(microbatches)
        run = self._run = Run(program, self._transport, batch, self.steps, train=train, keep=keep, scaler=scaler)
        self._loss = None
        run.walk()
        order = range(program.schedule.microbatches)
        if len(set(run.sizes.values())) > 1 and self._weight == "samples" and train:
            raise BatchError(
                f"microbatches have {[run.sizes[index] for index in order]} samples, and without targets the rank of "
                'the last stage cannot weight them in time; pass target, or choose weight="equal" or "sum"'
            )
        if losses is not None:
            losses[:] = [run.losses[index] for index in order if index in run.losses]
        if run.losses:
            self._loss = torch.stack([run.losses[index] * batch.weights[index] for index in order]).sum()
        return merge([run.outputs[index] for index in order]) if run.outputs else None

    def _refuse_leftovers(self) -> None:
        if not self._failed_with_gradients:
            return
        parameters = (parameter for module in self._modules.values() for parameter in module.parameters())
        if any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in parameters):
            raise PipelineError(
                "a step failed while gradients of earlier steps were held, and they may hold parts of it; "
                "clear them first: optimizer.zero_grad()"
            )
        self._failed_with_gradients = False


def _modules(stages: Iterable[Stage]) -> dict[int, nn.Module]:
    modules: dict[int, nn.Module] = {}
    for stage in stages:
        if stage.index in modules:
            raise PipelineError(
                f"stage {stage.index} is given twice; each stage is one module with a number of its own"
            )
        modules[stage.index] = stage.module
    return dict(sorted(modules.items()))


def _lowered(schedule: Schedule | str, ranks: int, microbatches: int | None, stages: int) -> Schedule:
    if isinstance(schedule, str):
        if microbatches is None:
            raise PipelineError(f'a schedule by name needs its size: Pipeline(..., "{schedule}", microbatches=...)')
        recipe = schedules.find(schedule)
        fixed = recipe.least_stages_per_rank == recipe.most_stages_per_rank
        schedule = recipe.make(ranks, microbatches, None if fixed else stages)
    elif microbatches not in (None, schedule.microbatches):
        raise PipelineError(
            f"microbatches={microbatches}, but {schedule.name} has {schedule.microbatches}; leave it out"
        )
    schedule.checked()
    return schedule if schedule.communicates or ranks == 1 else lower(schedule).checked()


def _refuse_misfits(schedule: Schedule, rank: int, ranks: int, modules: Mapping[int, nn.Module]) -> None:
    if schedule.ranks != ranks:
        idle = [each for each, row in enumerate(schedule.rows) if not row]
        blank = f" (ranks {idle} have no actions: a blank line of a text is a rank)" if idle else ""
        raise PipelineError(
            f"{schedule.name} has {schedule.ranks} ranks{blank}, and the group has {ranks}; "
            "start as many ranks as the schedule has rows"
        )
    held = schedule.stages_of(rank)
    if tuple(modules) != held:
        raise PipelineError(
            f"{schedule.name} places stages {list(held)} on rank {rank}, which was given {list(modules)}; "
            "pipeloom.split(model, into=schedule) makes the right ones"
        )
    if schedule.wiring.copies > 1 or schedule.wiring.pieces > 1:
        raise PipelineError(f"{schedule.name}: copies and pieces can be checked and priced, but not run yet")
    wrapped = [index for index, module in modules.items() if _reduces_by_itself(module)]
    if wrapped:
        raise PipelineError(
            f"stages {wrapped} are replicated or sharded (DistributedDataParallel, fully_shard), which a pipeline "
            "cannot reduce yet; give the plain modules"
        )


def _reduces_by_itself(module: nn.Module) -> bool:
    return any(
        isinstance(each, nn.parallel.DistributedDataParallel) or hasattr(each, "unshard") for each in module.modules()
    )


def _device(modules: Iterable[nn.Module]) -> torch.device:
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            return tensor.device
    return torch.device("cpu")
