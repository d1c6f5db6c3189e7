"""What a step works on: what the caller gave on this rank, cut into microbatches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeloom.errors import BatchError
from pipeloom.runtime.microbatches import Handling, Weight, batch_size, split, split_keywords, weights
from pipeloom.runtime.replicas import Replicas
from pipeloom.runtime.transport import Plain
from pipeloom.schedule import Schedule

Ask = Callable[[int, str], str]
"""Asks a rank for what it knows of the batch, by name, and waits for its answer."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Where the chains of stages begin and end, one chain a copy of the model, as seen from `rank`."""

    rank: int
    first_ranks: tuple[int, ...]
    last_ranks: tuple[int, ...]

    @classmethod
    def of(cls, schedule: Schedule, rank: int) -> Ends:
        wiring, placement = schedule.wiring, schedule.placement
        begins = range(0, wiring.total, wiring.stages)
        return cls(
            rank,
            tuple(placement[stage] for stage in begins),
            tuple(placement[stage + wiring.stages - 1] for stage in begins),
        )

    @property
    def first(self) -> bool:
        return self.rank in self.first_ranks

    @property
    def last(self) -> bool:
        return self.rank in self.last_ranks

    @property
    def others(self) -> set[int]:
        """The ranks of all ends but this."""
        return {*self.first_ranks, *self.last_ranks} - {self.rank}


@dataclass(frozen=True, slots=True)
class Given:
    """What `step` or `eval` was called with on this rank."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any
    arg_mbs: Sequence[Any] | None
    kwarg_mbs: Sequence[Mapping[str, Any]] | None
    target_mbs: Sequence[Any] | None
    batch_id: Plain
    handling: Mapping[str, Handling]

    def refuse_misfits(self, ends: Ends, microbatches: int) -> None:
        """Refuse what does not belong on this rank, or is given twice."""
        if self.batch_id is not None and not isinstance(self.batch_id, (bool, int, float, complex, str, bytes)):
            raise BatchError(
                f"batch_id is a number or a text, got {type(self.batch_id).__name__} {self.batch_id!r}; "
                "of a tensor or an array, give .item()"
            )
        for name, ready, whole in (
            ("arg_mbs", self.arg_mbs, bool(self.args)),
            ("kwarg_mbs", self.kwarg_mbs, bool(self.kwargs)),
            ("target_mbs", self.target_mbs, self.target is not None),
        ):
            if ready is not None and whole:
                raise BatchError(f"{name} is given beside a whole batch; give one of the two")
            if ready is not None and len(ready) != microbatches:
                raise BatchError(f"{name} has {len(ready)} entries, and there are {microbatches} microbatches")
        inputs = bool(self.args) or self.arg_mbs is not None
        if ends.first and not inputs and not self.kwargs and self.kwarg_mbs is None:
            raise BatchError("this rank holds the first stage, and was given no inputs")
        elsewhere = f"this is rank {ends.rank}: leave them out here"
        if not ends.first and inputs:
            none = ", None too" if self.args and all(each is None for each in self.args) else ""
            raise BatchError(f"inputs go to {_held('first', ends.first_ranks)}; {elsewhere}{none}")
        if not ends.last and (self.target is not None or self.target_mbs is not None):
            raise BatchError(f"targets go to {_held('last', ends.last_ranks)}; {elsewhere}")


@dataclass(slots=True)
class Batch:
    """A batch in microbatches: one entry each, or nothing where this rank has no use for it."""

    ends: Ends
    microbatches: int
    weight: Weight
    replicas: Replicas
    arguments: Sequence[tuple[Any, ...]] = ()
    targets: Sequence[Any] = ()
    keywords: Sequence[Mapping[str, Any]] = ()
    size: int | None = None
    """How many samples the whole batch has, where this rank knows."""
    input_sizes: Sequence[int] = ()
    target_sizes: Sequence[int] = ()
    """How many samples each microbatch has; nothing where that cannot be seen."""
    name: Plain = None
    """What the caller calls this batch."""
    ask: Ask | None = None
    _weights: list[Any] | None = field(default=None)
    _sizes: Sequence[int] | None = field(default=None)

    @classmethod
    def cut(cls, given: Given, ends: Ends, microbatches: int, weight: Weight, replicas: Replicas) -> Batch:
        """Cut inputs and targets.

        Raises:
            BatchError: they do not fit, or belong on another rank.
        """
        given.refuse_misfits(ends, microbatches)
        batch = cls(ends, microbatches, weight, replicas, name=given.batch_id)
        if given.arg_mbs is not None:
            batch.arguments = [entry if isinstance(entry, tuple) else (entry,) for entry in given.arg_mbs]
        elif ends.first:
            batch.arguments = split(given.args, microbatches, "inputs")
            batch.size = batch_size(given.args)
        if given.target_mbs is not None:
            batch.targets = given.target_mbs
        elif given.target is not None:
            batch.targets = split(given.target, microbatches, "target")
            batch.size = batch_size(given.target) if batch.size is None else batch.size
        batch.input_sizes, batch.target_sizes = _sizes(batch.arguments), _sizes(batch.targets)
        if ends.first and not batch.input_sizes:
            batch.cut_keywords(given)
            batch.input_sizes = _sizes(batch._keywords_with_samples(given))
        if ends.last and batch.targets:
            batch._weights = weights(weight, microbatches, batch.target_sizes, batch.targets, replicas)
        if ends.first and ends.last:
            inputs, targets = _proportions(batch.input_sizes), _proportions(batch.target_sizes)
            if None not in (inputs, targets) and inputs != targets:
                raise BatchError(
                    f"samples is {inputs} in the inputs and {targets} in the targets, microbatch by microbatch; "
                    "give inputs and targets of one batch"
                )
        return batch

    def cut_keywords(self, given: Given) -> None:
        """Cut keyword arguments; a rank that holds neither end asks the first for the size of the batch."""
        if given.kwarg_mbs is not None:
            self.keywords = given.kwarg_mbs
        elif given.kwargs and not self.keywords:
            size = self.size
            if size is None and not self.ends.first and set(given.kwargs) - given.handling.keys() and self.ask:
                size = sum(self.sizes()) or None
            self.keywords = split_keywords(given.kwargs, self.microbatches, given.handling, size)

    def _keywords_with_samples(self, given: Given) -> list[list[Any]]:
        """Of each microbatch's keyword arguments, those that hold its samples."""
        if given.kwarg_mbs is not None:
            return [list(entry.values()) for entry in given.kwarg_mbs]
        names = [name for name in given.kwargs if given.handling.get(name) == "split"]
        return [[entry[name] for name in names] for entry in self.keywords]

    @property
    def equal(self) -> dict[str, Plain]:
        """What all must agree about that know it: which batch it is, its proportions, and whether there are targets."""
        counted = self.input_sizes if self.ends.first else self.target_sizes
        return {
            "batch_id": self.name,
            "samples": _proportions(counted),
            "targets": bool(self.targets) if self.ends.last else None,
        }

    @property
    def own(self) -> dict[str, str]:
        """What other ranks may ask this one for."""
        return {
            "sizes": " ".join(map(str, self.input_sizes)),
            "weights": " ".join(str(float(each)) for each in self._weights or ()),
        }

    def share(self, microbatch: int) -> Any:
        """What the losses of `microbatch` are multiplied with."""
        if self._weights is None:
            self._weights = self._find_weights()
        return self._weights[microbatch]

    def _find_weights(self) -> list[Any]:
        if not self.ends.last and self.ask:
            known = self.ask(self.ends.last_ranks[0], "weights").split()
            if known:
                return list(map(float, known))
        if self.weight in ("equal", "sum"):
            return weights(self.weight, self.microbatches, (), (), self.replicas)
        if callable(self.weight):
            raise BatchError("weight is a function of the target, and this step has no targets")
        return weights("samples", self.microbatches, self.sizes(), (), self.replicas)

    def sizes(self) -> Sequence[int]:
        """How many samples each microbatch has, as the inputs tell; nothing where that cannot be seen."""
        if self._sizes is None:
            self._sizes = self.input_sizes
            if not self.ends.first and self.ask:
                self._sizes = [*map(int, self.ask(self.ends.first_ranks[0], "sizes").split())]
        return self._sizes


def _held(which: str, ranks: Sequence[int]) -> str:
    """The ranks that hold a first or last stage, in words."""
    if len(ranks) == 1:
        return f"the rank of the {which} stage, {ranks[0]}"
    return f"the ranks of the {which} stages, {' and '.join(map(str, ranks))}"


def _sizes(entries: Sequence[Any]) -> list[int]:
    """How many samples each microbatch has; nothing where that cannot be seen."""
    sizes = [batch_size(entry) for entry in entries]
    return [size or 1 for size in sizes] if any(sizes) else []


def _proportions(sizes: Sequence[int]) -> str | None:
    """How the samples are spread over the microbatches, in least numbers."""
    unit = math.gcd(*sizes)
    return ":".join(str(size // unit) for size in sizes) if sizes else None
