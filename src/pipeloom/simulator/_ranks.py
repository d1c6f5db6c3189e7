"""What each rank of a schedule can do, what each action needs, and how long it takes, on flat numbers."""

from __future__ import annotations

from pipeloom.action import Kind
from pipeloom.costs import Costs
from pipeloom.dependencies import Dependencies
from pipeloom.schedule import Schedule

Entry = tuple[float, tuple[tuple[int, float], ...], int, int]
"""A compute action of a stage: its time; for each value that it needs the number of the value for microbatch 0 and how
long it travels; the numbers of the values that it makes (the second is -1, or that of the weights' gradient for B)."""

Edge = int | tuple[int, int]
"""An edge at one of its stages: that stage on the chain; the stage and the far end where it skips."""


class Link:
    """One edge between two ranks in one direction. `number` is that of its message for microbatch 0."""

    __slots__ = ("latency", "number", "pair", "receiver", "sender", "time", "value")

    def __init__(self, number: int, value: int, sender: int, receiver: int, latency: float, time: float) -> None:
        self.number, self.value, self.latency, self.time = number, value, latency, time
        self.sender, self.receiver, self.pair = sender, receiver, (sender, receiver)


class Rank:
    """What a rank can do, by stage, and how far it is."""

    __slots__ = ("at", "clock", "collective", "compute", "ends", "held", "receives", "sends", "starts")

    def __init__(self) -> None:
        self.compute: dict[Kind, dict[int, Entry]] = {kind: {} for kind in (Kind.F, Kind.I, Kind.W, Kind.B)}
        self.sends: dict[Kind, dict[Edge, Link]] = {Kind.SEND_F: {}, Kind.SEND_B: {}}
        self.receives: dict[Kind, dict[Edge, Link]] = {Kind.RECV_F: {}, Kind.RECV_B: {}}
        self.starts: list[float] = []
        self.ends: list[float] = []
        self.at = 0
        """The cell that comes next."""
        self.clock = 0.0
        self.collective = 0.0
        """When the last collective is done."""
        self.held = -1
        """The message that a blocking receive waits for."""


def wire(schedule: Schedule, values: Dependencies, table: dict[str, list[float]], costs: Costs) -> list[Rank]:
    """The ranks of a schedule, with what each can do.

    Messages are numbered like the values of their stages, behind all values, each edge with a width of its own.

    Raises:
        LookupError: a stage is on no rank.
    """
    placement = schedule.placement
    communicates = schedule.communicates
    ranks = [Rank() for _ in schedule.rows]
    back = costs.bandwidth if costs.bandwidth_back is None else costs.bandwidth_back
    links = 0

    def need(source: int, target: int, forward: bool) -> tuple[int, float]:
        """What the receiving end of an edge from stage `source` to stage `target` waits for, and for how long."""
        nonlocal links
        maker, user = (source, target) if forward else (target, source)
        value = (values.output if forward else values.gradient)[maker]
        sender, receiver = placement[maker], placement[user]
        if sender == receiver:
            return value, 0.0
        latency = table["communication" if forward else "communication_back"][source]
        if not communicates:
            return value, latency
        time = table["output_size" if forward else "gradient_size"][source] / (costs.bandwidth if forward else back)
        number = values.size + links * values.width - values.first[source]
        links += 1
        link = Link(number, value, sender, receiver, latency, time)
        skips = target != source + 1
        ranks[sender].sends[Kind.SEND_F if forward else Kind.SEND_B][(maker, user) if skips else maker] = link
        ranks[receiver].receives[Kind.RECV_F if forward else Kind.RECV_B][(user, maker) if skips else user] = link
        return number, 0.0

    for stage in range(schedule.stages):
        output, gradient, weight = values.output[stage], values.gradient[stage], values.weight[stage]
        inputs = tuple(need(source, stage, True) for source in values.sources[stage])
        gradients = ((output, 0.0), *(need(stage, target, False) for target in values.targets[stage]))
        compute = ranks[placement[stage]].compute
        compute[Kind.F][stage] = (table["F"][stage], inputs, output, -1)
        compute[Kind.I][stage] = (table["I"][stage], gradients, gradient, -1)
        compute[Kind.B][stage] = (table["B"][stage], gradients, gradient, weight)
        compute[Kind.W][stage] = (table["W"][stage], ((gradient, 0.0),), weight, -1)
    return ranks
