"""What can be chosen about a training run, and what makes no sense."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pipeloom.trainer.text import HELD_OUT

_LARGEST_SEED = 2**32 - 1
"""Steps draw from seeds derived from it, and those have 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The sizes of the GPT."""

    layers: int = 8
    """How many transformer blocks there are."""
    d_model: int = 128
    """How many features a position has."""
    heads: int = 4
    """How many heads attention has; they share the features equally."""
    context: int = 64
    """How many bytes the model sees at most."""

    def mistakes(self) -> Iterator[str]:
        """What is wrong with these sizes, one message a mistake."""
        yield from _outside("--layers", self.layers, 10_000)
        yield from _outside("--context", self.context, 1_000_000)
        yield from _outside("--d-model", self.d_model, 100_000)
        yield from _outside("--heads", self.heads, self.d_model)
        if self.heads > 0 and self.d_model > 0:
            yield from _no_multiple("--d-model", self.d_model, "--heads", self.heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """How AdamW is run."""

    learning_rate: float = 1e-3
    """The learning rate after warm-up; from there it falls along a cosine to a tenth."""
    warmup: int = 10
    """Over how many steps the learning rate rises to its full value."""
    weight_decay: float = 0.1
    """How much of a weight, times the learning rate, a step takes away; biases and norms are left out."""
    clip: float = 1.0
    """The norm to which the gradient of the whole model is clipped."""

    def mistakes(self) -> Iterator[str]:
        """What is wrong with these numbers, one message a mistake."""
        yield from _below("--warmup", self.warmup, 0)
        yield from _below("--weight-decay", self.weight_decay, 0)
        for option, value in (("--learning-rate", self.learning_rate), ("--clip", self.clip)):
            if not 0 < value < float("inf"):
                yield f"{option} {value} must be above 0 and finite"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One training run, apart from its schedule."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The sizes of the model."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """How the weights are updated."""
    steps: int = 100
    """How many steps to train."""
    batch_size: int | None = None
    """How many sequences a step takes; by default 4 a microbatch."""
    eval_every: int = 20
    """After how many steps, each time, to evaluate on held-out text; 0: never."""
    eval_batches: int = 4
    """How many batches of held-out text an evaluation takes."""
    data: Path | None = None
    """The text to train on; by default the sources of Python's standard library."""
    metrics: str | None = None
    """The file that gets the metrics as JSON lines; "-" is the standard output."""
    seed: int = 0
    """What the initial weights and the order of the text are drawn from."""
    verify: bool = False
    """Whether the rank with the last stage trains the whole model beside the pipeline and compares losses."""
    trace: Path | None = None
    """The file that gets the timeline of the last step, in the format that its ending says."""
    checkpoint: Path | None = None
    """The directory that the run is saved to, each time in place of the time before; by default nowhere."""
    checkpoint_every: int = 20
    """After how many steps, each time, to save; the last step is always saved."""
    resume: bool = False
    """Whether to go on from what the directory holds, if it holds anything yet."""
    max_restarts: int = 0
    """How often to start the ranks again after one has failed, and go on from what was saved last."""

    def mistakes(self, microbatches: int | None, text: int | None) -> list[str]:
        """Everything that is wrong with this run, one message a mistake.

        Args:
            microbatches: how many microbatches its schedule has, and
            text: how many bytes its text has; None where that is not known.
        """
        found = [*self.model.mistakes(), *self.optimizer.mistakes()]
        found += _below("--steps", self.steps, 1)
        found += _below("--eval-every", self.eval_every, 0)
        found += _below("--eval-batches", self.eval_batches, 1)
        if not 0 <= self.seed <= _LARGEST_SEED:
            found.append(f"--seed {self.seed} must be 0 to {_LARGEST_SEED:,}")
        found += _below("--checkpoint-every", self.checkpoint_every, 1)
        found += _below("--max-restarts", self.max_restarts, 0)
        if self.checkpoint is None:
            for option, given in (("--resume", self.resume), ("--max-restarts", self.max_restarts > 0)):
                if given:
                    found.append(f"{option} goes on from what was saved, and nothing is: give --checkpoint DIRECTORY")
        if self.verify:
            for option, given in (("--resume", self.resume), ("--max-restarts", self.max_restarts > 0)):
                if given:
                    found.append(f"{option}: --verify compares a run from its first step on; give one of the two")
        if self.batch_size is not None:
            found += _below("--batch-size", self.batch_size, 1)
            if microbatches and self.batch_size > 0:
                found += _no_multiple("--batch-size", self.batch_size, "--microbatches", microbatches)
        needed = self.model.context + 1
        if text is not None and text // HELD_OUT < needed:
            found.append(
                f"--data has {text} bytes: the last tenth, {text // HELD_OUT}, is held out and must hold --context "
                f"{self.model.context} + 1 = {needed}; take {HELD_OUT * needed} bytes or more, or a smaller --context"
            )
        return found

    def sequences(self, microbatches: int) -> int:
        """How many sequences a step takes."""
        return 4 * microbatches if self.batch_size is None else self.batch_size


def _below(option: str, value: float, least: int) -> Iterator[str]:
    if not value >= least:
        yield f"{option} {value} must be {least} or more"


def _outside(option: str, value: int, most: int) -> Iterator[str]:
    if not 1 <= value <= max(most, 1):
        yield f"{option} {value} must be 1 to {max(most, 1):,}"


def _no_multiple(option: str, value: int, of: str, unit: int) -> Iterator[str]:
    whole, rest = divmod(value, unit)
    if rest:
        choices = " or ".join(str(unit * times) for times in (whole, whole + 1) if times)
        yield f"{option} {value} must be a multiple of {of} {unit}: {value} = {unit} x {whole} + {rest}; take {choices}"
