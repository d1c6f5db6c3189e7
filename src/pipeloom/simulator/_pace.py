"""How the parts of a composite that run as one share their time."""

from __future__ import annotations

from pipeloom.action import Action
from pipeloom.costs import Costs


def pace(parts: tuple[Action, ...], times: list[float], costs: Costs) -> tuple[float, float]:
    """The share of a part that is done before the next one begins, and by how much all are stretched."""
    fused = costs.fused
    if fused is not None and not isinstance(fused, float):
        fused = fused.get(";".join(f"{part.stage}{part.kind}" for part in parts))
    if fused is None:
        return 1.0 - (costs.overlap or 0.0), 1.0
    in_turn, at_once = sum(times), max(times)
    if fused >= in_turn:
        return 1.0, fused / in_turn if in_turn else 1.0
    if fused <= at_once:
        return 0.0, fused / at_once
    # each part begins when the share of all before it is done, and none may end later than the composite
    shares, before = [], 0.0
    for time in times:
        if before:
            shares.append((fused - time) / before)
        before += time
    return min(shares), 1.0
