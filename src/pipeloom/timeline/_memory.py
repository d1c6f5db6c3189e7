"""What a rank holds in memory while its actions run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter

from pipeloom.action import BACKWARD, Action, Kind

Ran = tuple[float, float, Action]
"""An action, from its start to its end."""

Change = tuple[float, float]
"""A time, and how much more memory is held from then on."""


def activations(row: Iterable[Ran], trains: bool) -> int:
    """How many activations are held at most: one more with each F, one less at the end of its B or W."""
    last = (Kind.B, Kind.W) if trains else (Kind.F,)
    changes = (
        (start, end, int(action.kind is Kind.F), -int(action.kind in last))
        for start, end, action in row
        if action.computes
    )
    held = peak = 0.0
    for _, change in _in_time(changes):
        held += change
        peak = max(peak, held)
    return int(peak)


def memory(
    row: Iterable[Ran], table: Mapping[str, Sequence[float]], stages: Iterable[int], trains: bool, start: float
) -> list[tuple[float, float]]:
    """The memory that a rank with `stages` holds, as (time, memory from then on), from `start` on."""
    held = sum(table["weights"][stage] + table["optimizer_state"][stage] for stage in stages)
    row = sorted(row, key=itemgetter(0))  # collectives start when those before them are done, others when they can
    with_gradients: set[int] = set()

    def changes() -> Iterable[tuple[float, float, float, float]]:
        for begin, end, (stage, kind, *_) in row:
            more = less = 0.0
            if kind is Kind.F:
                more = table["activation"][stage]
                less = 0.0 if trains else more
            elif kind in BACKWARD:
                at_input = table["activation_at_I"][stage]
                less = at_input if kind is Kind.I else table["activation"][stage]
                less -= at_input if kind is Kind.W else 0.0
                if kind is not Kind.I and stage not in with_gradients:
                    with_gradients.add(stage)
                    more = table["gradients"][stage]
            elif kind is Kind.UNSHARD:
                more = table["unsharded"][stage]
            elif kind is Kind.RESHARD:
                less = table["unsharded"][stage]
            yield begin, end, more, -less

    curve = [(start, held)]
    for time, change in _in_time(changes()):
        held += change
        if time == curve[-1][0] and change > 0:
            curve[-1] = (time, held)
        else:
            curve.append((time, held))
    return curve


def _in_time(changes: Iterable[tuple[float, float, float, float]]) -> Iterable[Change]:
    """The changes at the starts and at the ends of actions, in time; of one time those of earlier actions first.

    The actions are in the order in which they start. What one releases at its end is there for the next to take.
    """
    releases: list[Change] = []
    for start, end, more, less in changes:
        if releases:
            due = sorted(release for release in releases if release[0] <= start)
            yield from due
            releases = [release for release in releases if release[0] > start]
        if more:
            yield start, more
        if less:
            releases.append((end, less))
    yield from sorted(releases)
