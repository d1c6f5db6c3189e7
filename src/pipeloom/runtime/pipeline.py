"""A pipeline: stages, a schedule and a loss, trained by `step` and measured by `eval`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeloom.action import BACKWARD, Kind
from pipeloom.errors import BatchError, PipelineError
from pipeloom.passes import forward_only
from pipeloom.runtime import norms
from pipeloom.runtime.batch import Batch, Ends, Given
from pipeloom.runtime.calls import around, whole_call
from pipeloom.runtime.dtensors import Meshes
from pipeloom.runtime.executor import Run, Work
from pipeloom.runtime.fitting import (
    device_of,
    digest,
    lowered,
    made,
    modules_of,
    refuse_misfits,
    refuse_options,
    refuse_unknown_keywords,
    stages_of,
)
from pipeloom.runtime.imported import is_sharded_scaler
from pipeloom.runtime.leftovers import Leftovers
from pipeloom.runtime.microbatches import Handling, Weight, merge
from pipeloom.runtime.program import Program
from pipeloom.runtime.randomness import Randomness
from pipeloom.runtime.replicas import Replicas
from pipeloom.runtime.stage import Stage
from pipeloom.runtime.team import Place, Team
from pipeloom.runtime.ties import Ties
from pipeloom.runtime.times import Times
from pipeloom.runtime.tracing import trace
from pipeloom.runtime.transport import Plain
from pipeloom.runtime.unchanged import Unchanged
from pipeloom.schedule import Schedule
from pipeloom.timeline import Timeline


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
        transport: "local", our own between processors; "torch", that of torch.distributed; or "auto", which chooses by
            the device of the stages.
        deadline: seconds of silence after which a rank counts as failed.

    Raises:
        ScheduleError: the schedule is wrong; with every problem.
        PipelineError: stages and schedule do not fit each other.
    """

    @whole_call
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
        deadline: float = 30.0,
    ) -> None:
        refuse_options(loss_fn, weight, seed, kwargs or {}, transport, deadline)
        self._group = group or dist.group.WORLD if dist.is_initialized() else None
        """The ranks of this pipeline; None where there is no other."""
        self._loss_fn = loss_fn
        self._weight: Weight = weight
        self._handling = dict(kwargs or {})
        self._registered: dict[Kind, Callable[..., None]] = {}
        self._programs: dict[int | None, Program] = {}
        self.steps = 0
        """How many steps are done; it keys random numbers where there is a `seed`."""
        self._counted = False
        """Whether the last call was a step, which is among them."""
        self._run: Run | None = None
        self._failed = False
        self._times: Times | None = None
        self._team = Team(self._group, deadline)
        peers = self._team.peers
        self.rank = peers.rank
        agreed = {"call": "Pipeline", "transport": transport, "seed": str(seed), "weight": _name(weight)}
        with self._team.making():
            given = stages_of(stages)
            held = modules_of(given)
            chosen = made(schedule, peers.ranks, microbatches, len(given))
            refuse_misfits(chosen, self.rank, peers.ranks, held)
            self._device = device_of(held.values())
            self._team.connect(agreed, self._device)
            self._replicas = Replicas(given, self._group, peers, self._device)
            self._modules = modules_of(self._replicas.stages)
            self._meshes = Meshes(self._modules.values())
            self.schedule = lowered(chosen, peers.ranks, self._replicas)
            self._replicas.refuse_misfits(self.schedule)
            self._ends = Ends.of(self.schedule, self.rank)
            self._digest = digest(self.schedule)
            self._team.carry(transport, self.schedule, self._device)
            stages = self._replicas.stages
            self._randomness = Randomness(seed, stages, self.schedule.wiring.stages) if seed is not None else None
            self._leftovers = Leftovers(self._modules.values(), self._replicas)
            self._team.ask(self._leftovers.used, self._where)
            self._unchanged = Unchanged(stages, self.schedule.wiring.copies)
            self._ties = Ties(self._modules, self.schedule, peers)
            self._ties.add_all(sorted({names for stage in stages for names in stage.ties}))
            self._replicas.later = self._ties.parameters()

    @property
    def first(self) -> bool:
        """Whether this rank holds the first stage, or a copy of it, and so passes the inputs."""
        return self._ends.first

    @property
    def last(self) -> bool:
        """Whether this rank holds the last stage, or a copy of it, and so has targets, losses and outputs."""
        return self._ends.last

    @property
    def modules(self) -> Mapping[int, nn.Module]:
        """The modules of this rank's stages, by the number of the stage."""
        return self._modules

    def parameters(self) -> list[nn.Parameter]:
        """This rank's parameters, each once, in the order of its stages: what its optimizer takes.

        A weight that two stages of this rank share is in the modules of both, and an optimizer that were given it twice
        would change it twice.
        """
        return list(dict.fromkeys(each for module in self._modules.values() for each in module.parameters()))

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
        """The number of the microbatch whose forward is running, or runs again, to be read inside a stage's forward."""
        found = self._run.microbatch if self._run is not None else None
        if found is None:
            raise PipelineError("pipe.microbatch is known inside a stage's forward only")
        return found

    def register(self, kind: str, function: Callable[..., None]) -> None:
        """Let `function` do what actions of `kind` do, from the next step on.

        For "OVERLAP_F_B" it is called with the parts of the composite, for "F", "B", "I" or "W" with the one part; see
        `pipeloom.runtime.overlap.Part`.
        """
        if kind not in (Kind.OVERLAP_F_B, Kind.F, *BACKWARD):
            raise PipelineError(f"register: functions are for OVERLAP_F_B, F, B, I and W, got {kind!r}")
        if not callable(function):
            raise PipelineError(f"register: {kind} takes a function of its parts, got {function!r}")
        self._registered[Kind(kind)] = function
        self._programs.clear()

    @whole_call
    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        reduce: bool = True,
        batch_id: Plain = None,
        scaler: torch.amp.GradScaler | None = None,
        arg_mbs: Sequence[Any] | None = None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Forward and backward of one batch; gradients add up in the parameters' `.grad`.

        Args:
            args: the inputs of the model, a whole batch; on the first stage's rank only, and on that of every copy of
                it.
            target: what the loss is taken against, a whole batch; on the last stage's rank only, and on that of every
                copy of it.
            losses: a list that is emptied and filled with each microbatch's own loss, detached, in microbatch order.
            return_outputs: whether outputs are kept and returned.
            batch_id: what this batch is called, a number or a text; where both ends say it, it must be the same.
            reduce: whether gradients are averaged over replicas, where there are any; if not, they wait for the next
                step that does it.
            scaler: what scales the loss where gradients are of low precision. Ranks must skip the same optimizer
                steps, so with several ranks it is a `torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler`.
            arg_mbs: ready inputs instead of `args`: one entry a microbatch, a tuple of arguments or a single one.
            kwarg_mbs: ready keyword arguments instead of `kwargs`: one dict a microbatch.
            target_mbs: ready targets instead of `target`: one entry a microbatch.
            kwargs: keyword arguments of the stages on this rank; each stage is given those that its forward takes.

        Returns:
            The outputs of the model for the whole batch, detached, on the last stage's rank and on that of every copy
            of it; None elsewhere.

        Raises:
            PipelineError: gradients are off, there is no loss, or gradients of a failed step are still held.
            BatchError: the batch does not fit the schedule.
            PeerFailed: another rank failed; it says which, where and why. Afterwards gradients that were None are None
                again, and the next step may succeed.
            DisagreementError: ranks call different things, or hold different batches.
        """
        given = Given(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs, batch_id, self._handling)
        count = self.schedule.microbatches
        agreed: dict[str, Plain] = {"reduce": reduce, "scaler": _scale(scaler)}
        with self._together("step", count, given, partial(self._refuse_step, scaler), **agreed) as batch:
            output = self._train(batch, losses, scaler, keep=return_outputs, reduce=reduce)
        self.steps += 1
        self._counted = True
        return output

    def _refuse_step(self, scaler: torch.amp.GradScaler | None) -> None:
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
        if scaler is not None and self._group and not is_sharded_scaler(scaler):
            raise PipelineError(
                "a gradient scaler of one rank skips steps that other ranks take; use "
                "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler over all ranks that train this model"
            )
        self._leftovers.refuse()
        self._replicas.refuse_out_of_step()

    def _train(
        self,
        batch: Batch,
        losses: list[Tensor] | None,
        scaler: torch.amp.GradScaler | None,
        *,
        keep: bool,
        reduce: bool,
    ) -> Any:
        self._replicas.begin_step()
        self._leftovers.begin()
        if scaler is not None:
            scaler.scale(torch.ones((), device=self._device))  # it must know its device on every rank
        several = self._ties.parameters()
        self._unchanged.begin(several, self._replicas.averaged())
        self._ties.begin()
        try:
            with self._randomness.during() if self._randomness else nullcontext():
                output = self._walk(None, batch, losses, train=True, keep=keep, reduce=reduce, scaler=scaler)
            self._unchanged.refuse_changes(several)
            self._ties.finish()
            self._replicas.finish_step(reduce=reduce)
        except BaseException:
            self._ties.abort()
            self._leftovers.undo()
            raise
        return output

    @whole_call
    def gather(self, call: str, value: Plain = None) -> list[Any]:
        """What every rank says, in the order of ranks; every rank calls this, and `call` says what for.

        Raises:
            PeerFailed: a rank of the pipeline failed.
            DisagreementError: ranks call different things.
        """
        with self._after_step(call):
            return self._team.peers.gather(value)

    @around
    def _gathering(self, call: str, **agreed: Plain) -> Iterator[None]:
        """Around a call for what the last step has left; if that failed elsewhere, it fails here too."""
        self._team.refuse_closed()
        self._team.refuse_inside(call)
        if self._run is None and not self._failed:
            raise PipelineError(f"{call} is for after a step or an evaluation, and there was none")
        if self._failed:  # all ranks know that, or are about to
            raise PipelineError("the last step failed, so it has no loss, norm or timeline; take another step first")
        with self._after_step(call, **agreed):
            yield

    @around
    def _after_step(self, call: str, **agreed: Plain) -> Iterator[None]:
        """Around a call of all ranks; if it fails, so may have the step before it, whose gradients are forgotten."""
        with self._team.calling(call):
            try:
                with self._team.gathering(call, **agreed):
                    yield
            except BaseException:
                self._failed = True
                self._leftovers.undo()
                if self._counted and self._team.step_failed():
                    self.steps -= 1
                    self._counted = False
                raise

    @around
    def _together(
        self, call: str, microbatches: int, given: Given, refuse: Callable[[], None], **agreed: Plain
    ) -> Iterator[Batch]:
        agreed |= {"call": call, "microbatches": microbatches, "schedule": self._digest}
        agreed |= {"steps": self.steps if self._randomness else None}
        with self._team.calling(call):
            self._run, self._failed, self._counted = None, True, False
            try:
                with self._team.together(agreed, given, microbatches, self._weight, self._replicas, refuse) as batch:
                    batch.cut_keywords(given)
                    refuse_unknown_keywords(batch.keywords, self._modules, self.rank)
                    yield batch
                self._failed = False
                self._leftovers.done()
            except BaseException:
                self._replicas.fell_out()
                raise

    def _where(self) -> Place | None:
        run = self._run
        return run.place if run is not None else None

    @whole_call
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
        with self._after_step("tie", names=" ".join(names)):
            self._ties.add(names)
        self._replicas.later = self._ties.parameters()

    @whole_call
    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        microbatches: int | None = None,
        return_outputs: bool = True,
        batch_id: Plain = None,
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
        given = Given(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs, batch_id, self._handling)
        devices = [self._device] if self._device.type == "cuda" else []
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices),
            self._together("eval", count, given, partial(self._refuse_eval, microbatches)) as batch,
        ):
            return self._walk(count, batch, losses, train=False, keep=return_outputs)

    def _refuse_eval(self, microbatches: object) -> None:
        if microbatches is not None and (not isinstance(microbatches, int) or microbatches < 1):
            raise BatchError(
                f"microbatches is a whole number, 1 or more, or None for the schedule's, got {microbatches!r}"
            )
        self._replicas.refuse_out_of_step()

    def add_loss(self, value: Tensor) -> None:
        """Add a loss from inside a stage's forward, such as one that balances experts.

        It is weighted as the microbatch's own loss is, and its gradient flows into everything that `value` was made
        of, on this stage and those before it. `losses` and `loss()` do not contain it. A forward that activation
        checkpointing runs again does not add it again.

        Raises:
            PipelineError: this is not inside a stage's forward, or where no gradient can flow from.
        """
        if self._run is None or self._run.microbatch is None:
            raise PipelineError("pipe.add_loss is for the inside of a stage's forward")
        self._run.add_loss(value)

    @whole_call
    def loss(self) -> Tensor:
        """The weighted loss of the last `step` or `eval`, over all replicas, on every rank; every rank calls it.

        Raises:
            PipelineError: there is none, since the evaluation had no targets or there is no `loss_fn`.
        """
        source = self._ends.last_ranks[0]
        with self._gathering("loss"):
            assert self._run is not None
            value = self._run.loss().to(device=self._device, dtype=torch.float32)
            if self.rank == source:
                self._replicas.mean_(value)
            found = self._team.peers.gather(value.item() if self._run.losses else None)[source]
        if found is None:
            raise PipelineError("the last call had no targets or no loss_fn, so there is no loss")
        return value.new_tensor(found)

    @whole_call
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients of the model so that their norm is at most `max_norm`; every rank calls it.

        Returns:
            The norm before, over all stages: that of the parameters' own norms in the order of the model.

        Raises:
            PipelineError: the gradients of the last step are not averaged over replicas yet.
        """
        if self._replicas.unreduced:
            raise PipelineError(
                "the last step left gradients that are not averaged over replicas, so they have no norm yet; "
                "clip after a step with reduce=True"
            )
        with self._gathering("clip_grad_norm_", max_norm=float(max_norm)):
            return norms.clip_grad_norm_(
                self._modules,
                self.schedule.wiring.stages,
                max_norm,
                self._team.peers,
                uncounted=self._ties.uncounted(),
            )

    @whole_call
    def trace(self) -> Timeline | None:
        """When each action of the last `step` or `eval` ran, of all ranks; every rank calls it.

        Times are in seconds; see `pipeloom.runtime.tracing` for how the clocks of machines are brought together.

        Returns:
            The timeline on rank 0 of the group; None elsewhere.
        """
        with self._gathering("trace"):
            assert self._run is not None
            assert self._times is not None
            return trace(self._run.work.schedule, self._times, self._team.peers)

    def close(self) -> None:
        """Let go of the connections to the other ranks; every rank calls it."""
        self._team.refuse_inside("close")
        self._team.close()

    def _program(self, microbatches: int | None) -> Program:
        """The rows of this rank, compiled: those of the schedule, or for evaluation with so many microbatches."""
        if microbatches not in self._programs:
            schedule = self.schedule if microbatches is None else forward_only(self.schedule, microbatches).checked()
            self._programs[microbatches] = Program(
                Work(
                    schedule,
                    self.rank,
                    self._modules,
                    self._loss_fn,
                    self._registered,
                    self._randomness,
                    self._replicas,
                    self._meshes,
                    self._unchanged,
                )
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
        reduce: bool = True,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Any:
        program = self._program(microbatches)
        run = self._run = Run(
            program.work,
            self._team.peers.transport,
            batch,
            self.steps,
            train=train,
            keep=keep,
            reduce=reduce,
            scaler=scaler,
        )
        self._replicas.begin()
        try:
            times = self._times = Times(program.actions, self._device)
            run.walk(program.steps, times)
            self._team.exchange(run)
            self._team.settle()
        except BaseException:
            self._replicas.abort()
            raise
        order = range(program.work.schedule.microbatches)
        if losses is not None:
            losses[:] = [run.losses[index] for index in order if index in run.losses]
        return merge([run.outputs[index] for index in order]) if run.outputs else None


def _name(weight: Weight) -> str:
    return weight if isinstance(weight, str) else "a function"


def _scale(scaler: torch.amp.GradScaler | None) -> str:
    return f"at {scaler.get_scale()}" if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled() else "off"
