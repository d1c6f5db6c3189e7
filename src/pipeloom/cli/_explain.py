"""`pipeloom explain`: where the idle time of a schedule comes from."""

from __future__ import annotations

from pipeloom.cli._answer import AsJson, answer, answer_json, faults
from pipeloom.cli._source import Copies, Group, Memory, Microbatches, Pieces, Ranks, Skips, StagesPerRank
from pipeloom.cli._timelines import CostsFile, HowReceived, TimelineSource, read_timelines
from pipeloom.drawing import explain as reasons
from pipeloom.drawing import explanation


def explain(
    source: TimelineSource,
    costs: CostsFile = None,
    receives: HowReceived = "eager",
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    group: Group = None,
    memory: Memory = None,
    copies: Copies = 1,
    pieces: Pieces = 1,
    skips: Skips = None,
    as_json: AsJson = False,
) -> None:
    """Explain where the idle time of a schedule comes from, in words and figures."""
    with faults(as_json):
        (timeline,) = read_timelines(
            [source],
            costs,
            receives,
            ranks=ranks,
            microbatches=microbatches,
            stages_per_rank=stages_per_rank,
            group=group,
            memory=memory,
            copies=copies,
            pieces=pieces,
            skips=skips,
        )
    if as_json:
        answer_json(reasons(timeline))
    else:
        answer(explanation(timeline))
