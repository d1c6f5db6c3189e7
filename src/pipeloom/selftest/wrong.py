"""Ways to use a pipeline wrongly, each of which every rank must refuse: the bodies of cases."""

from __future__ import annotations

import torch

from pipeloom.action import Action, Kind
from pipeloom.passes import lower
from pipeloom.selftest import models
from pipeloom.selftest.bench import Bench, numbers
from pipeloom.selftest.models import each


def without_gradients(bench: Bench) -> None:
    """A step under no_grad."""
    pair = bench.pair(each(models.linear))
    with torch.no_grad():
        pair.step(*pair.batch(0))


def another_batch(bench: Bench) -> None:
    """Inputs of one size, targets of another, and a loss that would not mind."""
    pair = bench.pair(each(models.linear), loss_fn=lambda output, target: (output.mean() - target.mean()).square())
    size = 2 * bench.schedule.microbatches
    pair.step(numbers(size, 0), numbers(size + 1, 1))


def another_call(bench: Bench) -> None:
    """Rank 0 evaluates, the others train."""
    pair = bench.pair(each(models.linear))
    x, y = pair.batch(0)
    call = pair.pipe.eval if bench.rank == 0 else pair.pipe.step
    call(*pair.inputs(x), target=pair.target(y))


def plain_scaler(bench: Bench) -> None:
    """A scaler that would let some ranks skip steps that others take."""
    pair = bench.pair(each(models.linear))
    x, y = pair.batch(0)
    pair.pipe.step(*pair.inputs(x), target=pair.target(y), scaler=torch.amp.GradScaler("cpu"))


def odd_edge(bench: Bench) -> None:
    """The first stage returns a set."""
    pair = bench.pair(lambda stages: [models.Odd(0), *each(models.linear)(stages)[1:]])
    x, y = pair.batch(0)
    pair.pipe.step(*pair.inputs(x), target=pair.target(y))


def missing_backward(bench: Bench) -> None:
    """The last backward of rank 0 is left out of its row."""
    first, *others = bench.schedule.rows
    at = max(index for index, cell in enumerate(first) if any(part.kind in "BW" for part in cell.computes))
    rows = [(*first[:at], *first[at + 1 :]), *others]
    bench.pair(each(models.linear), schedule=bench.schedule.with_rows(rows))


def swapped_receives(bench: Bench) -> None:
    """Two receives of one rank from one other change places."""
    lowered = bench.schedule if bench.schedule.communicates else lower(bench.schedule)
    rows = [list(row) for row in lowered.rows]
    for row in rows:
        receives = [index for index, cell in enumerate(row) if _receives_activation(cell)]
        if len(receives) > 1 and row[receives[0]].stage == row[receives[1]].stage:
            one, other = receives[:2]
            row[one], row[other] = row[other], row[one]
            break
    bench.pair(each(models.linear), schedule=lowered.with_rows(rows))


def _receives_activation(cell: Action) -> bool:
    return cell.kind is Kind.RECV_F
