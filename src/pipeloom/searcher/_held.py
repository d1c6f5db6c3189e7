"""How much memory activations take, row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeloom.action import Kind
from pipeloom.costs import Costs
from pipeloom.schedule import Schedule


def peaks(schedule: Schedule, table: Mapping[str, Sequence[float]]) -> list[float]:
    """The most memory for activations that each rank holds. The parts of a composite are held together."""
    activation, at_input = table["activation"], table["activation_at_I"]
    found = []
    for row in schedule.rows:
        held = peak = 0.0
        for cell in row:
            for stage, kind, *_ in cell.computes:
                if kind is Kind.F:
                    held += activation[stage]
            peak = max(peak, held)
            for stage, kind, *_ in cell.computes:
                if kind is Kind.I:
                    held -= at_input[stage]
                elif kind is Kind.W:
                    held -= activation[stage] - at_input[stage]
                elif kind is Kind.B:
                    held -= activation[stage]
        found.append(peak)
    return found


def rank_shares(schedule: Schedule, costs: Costs) -> list[float]:
    """The most activations that each rank holds, in what one microbatch of all its stages takes.

    That is 0 for a rank whose activations take nothing.
    """
    table = costs.table(schedule.wiring)
    whole = [sum(table["activation"][stage] for stage in schedule.stages_of(rank)) for rank in range(schedule.ranks)]
    return [peak / share if share else 0.0 for peak, share in zip(peaks(schedule, table), whole, strict=True)]
