"""How small makespan and span can be at best, by arithmetic alone."""

from __future__ import annotations

import math

from pipeloom.searcher._task import ROUNDING, Task


def lower_bound(task: Task) -> float:
    """A number that no schedule for `task` can be below.

    A rank works, and it idles. From its first forward until the first gradient is back it can run only as many forwards
    as it has room for. From the start of its last forward on it can run only the backwards of what it then holds, while
    that forward's microbatch goes down the pipeline and up again. Where a rank cannot hold all microbatches at once,
    the two stretches are apart and their idle times add up.

    Before its last gradient leaves, a rank has run all forwards, all gradients for inputs, and the W's without which
    it had not had the room; before its last forward, all other forwards, and the backwards without which it had not had
    the room. A rank before it starts earlier by the way of the first microbatch, and ends later by the way of the last
    one.

    A whole backward that is shorter than its parts counts in their place. Where composites overlap, only the way of one
    microbatch is sure; where their times were measured, nothing is.
    """
    if task.costs.fused is not None:
        return 0.0
    if task.costs.overlap:
        firsts = [0] if task.objective == "makespan" else [stages[0] for stages in task.stages_of if stages]
        return max(_down(task, first) + _up(task, first) + task.least_weights[first] for first in firsts)
    ranks = [_Rank(task, stages) for stages in task.stages_of if stages]
    bounds = [rank.span + (rank.way if task.objective == "makespan" else 0.0) for rank in ranks]
    for first in [0] if task.objective == "makespan" else [rank.stages[0] for rank in ranks]:
        for rank in ranks:
            if rank.stages[0] >= first:
                there_and_back = _between(task, first, rank.stages[0])
                bounds.append(there_and_back + rank.until_last_gradient + task.least_weights[first])
                there = _down(task, first) - _down(task, rank.stages[0])
                bounds.append(there + rank.until_last_forward + _up(task, first) + task.least_weights[first])
    return max(bounds)


def least_period(task: Task) -> float:
    """How long each microbatch takes at least where every rank does the same again and again.

    A rank works that long for a microbatch; and what its stages hold of it, until it has been down the pipeline and up
    again, fills a part of its memory for that long.
    """
    found = 0.0
    activation = task.table["activation"]
    for room, stages in zip(task.room, task.stages_of, strict=True):
        work = sum(task.table["F"][s] + task.backward[s] + task.weights[s] for s in stages)
        # a part of it may be released at I, just before the W
        held = sum(
            activation[s] * (_down(task, s) + _up(task, s)) for s in stages if not task.table["activation_at_I"][s]
        )
        found = max(found, work, held / room if room else 0.0)
    return found


class _Rank:
    """What holds for one rank: the least span, and the least time from its first start to its last gradient.

    `until_last_forward` goes on until the microbatch of that forward is at the end of the pipeline.
    """

    def __init__(self, task: Task, stages: list[int]) -> None:
        self.stages = stages
        first, last = stages[0], stages[-1]
        forward, backward, weights = task.table["F"], task.least_backward, task.least_weights
        microbatches, total = task.microbatches, task.microbatches * len(stages)
        both = [forward[stage] + backward[stage] for stage in stages]
        held = _most_held(task, stages, total)

        filled = _most([forward[stage] for stage in stages], microbatches, held) + backward[last]
        idle_first = max(0.0, _down(task, first) + _up(task, last) - filled)
        emptied = forward[last] + _most([backward[stage] + weights[stage] for stage in stages], microbatches, held)
        idle_last = max(0.0, _down(task, last) + _up(task, first) + weights[first] - emptied)
        idle = idle_first + idle_last if total > held else max(idle_first, idle_last)

        self.way = sum(forward[stage] + task.forward_latency[stage] for stage in range(first))
        work = microbatches * sum(both)
        self.span = max(
            work + microbatches * sum(weights[stage] for stage in stages) + idle,
            _down(task, first) + _up(task, first) + weights[first],
        )
        forced = -_most([-weights[stage] for stage in stages], microbatches, total - held)
        self.until_last_gradient = work + forced + idle_first
        forced = -_most([-backward[stage] - weights[stage] for stage in stages], microbatches, total - held)
        forwards = microbatches * sum(forward[stage] for stage in stages) - forward[last]
        begun = forwards + forced + (idle_first if total > held else 0.0)
        if len(stages) == 1 and total > held:
            turns = _in_turns(task, first, held)
            begun = max(begun, turns)
            self.span = max(self.span, turns + _down(task, first) + _up(task, first) + weights[first])
        self.until_last_forward = begun + _down(task, last)


def _in_turns(task: Task, stage: int, held: int) -> float:
    """How long at least from the first start to the last forward's on a rank of one stage with room for `held`.

    With room for h, forward i + h starts no sooner than forward i's microbatch is through. So after k such ways, at
    most k * h forwards have started and (k - 1) * h + 1 microbatches are through, and what the last forward waits for
    beyond that is still to be run, but for a part of one action.
    """
    forward, backward, weights = task.table["F"][stage], task.least_backward[stage], task.least_weights[stage]
    ways, over = divmod(task.microbatches - 1, held)
    way = _down(task, stage) + _up(task, stage) + weights
    if not forward:
        return ways * way
    gradients = max(0, over - math.floor(weights / forward * (1 + ROUNDING)))
    left = over * (forward + weights) + gradients * backward - max(backward, weights)
    return ways * way + max(0.0, left)


def _most_held(task: Task, stages: list[int], total: int) -> int:
    """How many activations the rank with these stages has room for, of `total`."""
    smallest = min(task.table["activation"][stage] - task.table["activation_at_I"][stage] for stage in stages)
    if smallest <= 0:
        return total
    room = task.room[task.placement[stages[0]]]
    return min(total, math.floor(room / smallest * (1 + ROUNDING) + ROUNDING))


def _between(task: Task, first: int, second: int) -> float:
    """How long the way forward from one stage to a later one takes, and the way backward; the later one left out."""
    return sum(
        task.table["F"][stage] + task.forward_latency[stage] + task.least_backward[stage] + task.backward_latency[stage]
        for stage in range(first, second)
    )


def _down(task: Task, stage: int) -> float:
    """How long a microbatch takes forward from `stage` to the end."""
    last = task.stages - 1
    return sum(task.table["F"][at] + (task.forward_latency[at] if at < last else 0.0) for at in range(stage, last + 1))


def _up(task: Task, stage: int) -> float:
    """How long a microbatch takes backward from the end to `stage`, that stage included."""
    return sum(task.least_backward[at] + task.backward_latency[at] for at in range(stage, task.stages))


def _most(times: list[float], microbatches: int, count: int) -> float:
    """The largest sum of `count` times, each of which there is once a microbatch."""
    found = 0.0
    for time in sorted(times, reverse=True):
        taken = min(count, microbatches)
        found += taken * time
        count -= taken
    return found
