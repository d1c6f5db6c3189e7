"""Where the idle time of a timeline comes from, in words and figures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pipeloom.drawing._figures import Times, headline, title
from pipeloom.drawing._palette import WORDS
from pipeloom.timeline import Cause, Idle, Timeline

_Key = TypeVar("_Key")

_LONGEST = 5
_STEPS = 6

_WHEN = {"start": "before their first action", "middle": "between their actions", "end": "after their last action"}


def explain(timeline: Timeline) -> dict[str, Any]:
    """Where the idle time comes from, as plain values.

    `idle` is the idle time of all ranks together; `when` parts it by whether a rank had not begun, was at work or was
    done, and `waiting_for` by what was going on meanwhile in the chain of events that ended each stretch; what that was
    spent on is in `spent_on`, by rank, stage and kind. `critical_path` parts the makespan, `longest` holds the longest
    stretches, each with its chain, latest first.
    """
    idles = [idle for rank in range(timeline.schedule.ranks) for idle in timeline.idles(rank)]
    when = dict.fromkeys(_WHEN, 0.0)
    waiting: defaultdict[str, float] = defaultdict(float)
    spent: defaultdict[tuple[int, int, str], float] = defaultdict(float)
    reached: set[int] = set()
    for idle in idles:
        first = idle.rank not in reached
        reached.add(idle.rank)
        began = "start" if first and idle.start == timeline.start else "middle"
        when["end" if idle.before is None else began] += _length(idle)
        for cause in timeline.why(idle):
            waiting[cause.what] += _length(cause)
            if cause.what in ("compute", "shard"):
                event = timeline.events[cause.event]
                assert event.action is not None
                spent[event.rank, event.action.stage, str(event.action.kind)] += _length(cause)
    longest = sorted(idles, key=lambda idle: (-_length(idle), idle.rank, idle.start))[:_LONGEST]
    return {
        "name": timeline.schedule.name,
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "idle": sum(timeline.idle),
        "when": when,
        "waiting_for": _most_first(waiting),
        "spent_on": [
            {"rank": rank, "stage": stage, "kind": kind, "time": time}
            for (rank, stage, kind), time in _most_first(spent).items()
        ],
        "critical_path": _along(timeline),
        "longest": [
            {
                "rank": idle.rank,
                "start": idle.start - timeline.start,
                "end": idle.end - timeline.start,
                "before": None if idle.before is None else _text(timeline, idle.before),
                "chain": [
                    {
                        "what": cause.what,
                        "rank": timeline.events[cause.event].rank,
                        "action": _text(timeline, cause.event),
                        "start": cause.start - timeline.start,
                        "end": cause.end - timeline.start,
                    }
                    for cause in timeline.why(idle)
                ],
            }
            for idle in longest
        ],
    }


def _along(timeline: Timeline) -> dict[str, float]:
    """What the makespan is spent on along the critical path."""
    path = timeline.critical_path
    if not path:
        return {}
    found: defaultdict[str, float] = defaultdict(float)
    last = timeline.events[path[-1]]
    found[timeline.causes.what(last.number)] += last.end - last.start
    for cause in timeline.causes.back(last.number, timeline.start):
        found[cause.what] += _length(cause)
    return _most_first(found)


def explanation(timeline: Timeline) -> str:
    """The same for people."""
    times = Times([timeline])
    found = explain(timeline)
    total = found["idle"]
    lines = [title(timeline), headline(timeline, times), ""]
    if not any(timeline.idles(rank) for rank in range(timeline.schedule.ranks)):
        return "\n".join([*lines, "No rank is ever idle."])
    everything = timeline.makespan * timeline.schedule.ranks
    lines.append(f"Ranks are idle {times(total)} of {times(everything)}, all together:")
    lines += _shares(((words, found["when"][key]) for key, words in _WHEN.items()), total, times)
    lines += ["", "What went on meanwhile, in the chain of actions that they waited for:"]
    lines += _shares(((_WAITING[what], time) for what, time in found["waiting_for"].items()), total, times)
    spent = found["spent_on"][:_STEPS]
    if spent:
        lines += ["", "The computing and the collectives that were waited for most:"]
        named = ((f"rank {each['rank']}, stage {each['stage']}: {WORDS[each['kind']]}", each["time"]) for each in spent)
        lines += _shares(named, total, times)
    path = ((_WAITING[what], time) for what, time in found["critical_path"].items())
    lines += ["", "What makes the makespan what it is, along the critical path:"]
    lines += _shares(path, timeline.makespan, times)
    lines += ["", "The longest stretches of idle time:"]
    for idle in found["longest"]:
        lines += _stretch(idle, times)
    return "\n".join(lines)


_WAITING = {
    "compute": "computing",
    "communication": "messages on their way",
    "shard": "gathering weights and reducing gradients",
    "optimizer": "the optimizer's step",
    "overhead": "nothing that the timeline knows of",
}


def _shares(named: Iterable[tuple[str, float]], total: float, times: Times) -> list[str]:
    rows = [(words, times(time), f"{time / total:.1%}" if total else "") for words, time in named if time]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)] if rows else []
    return [f"  {words:<{widths[0]}}  {time:>{widths[1]}}  {share:>{widths[2]}}" for words, time, share in rows]


def _stretch(idle: dict[str, Any], times: Times) -> list[str]:
    ended = f"until {idle['before']}" if idle["before"] else "with nothing left to do while others are at work"
    length = times(idle["end"] - idle["start"])
    chain = [
        f"{step['action']} on rank {step['rank']}" + _REMARKS.get(step["what"], "") for step in idle["chain"][:_STEPS]
    ]
    if len(idle["chain"]) > _STEPS:
        chain.append(f"{len(idle['chain']) - _STEPS} more")
    lines = [f"  rank {idle['rank']} is idle {length}, from {times(idle['start'])} to {times(idle['end'])}, {ended}"]
    return lines + ([f"    meanwhile, latest first: {', '.join(chain)}"] if chain else [])


_REMARKS = {"communication": ": on its way", "overhead": " began late"}


def _most_first(found: Mapping[_Key, float]) -> dict[_Key, float]:
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _length(stretch: Idle | Cause) -> float:
    return stretch.end - stretch.start


def _text(timeline: Timeline, event: int) -> str:
    action = timeline.events[event].action
    return "optimizer" if action is None else str(action)
