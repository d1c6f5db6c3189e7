"""What it costs to plan: to make a schedule, lower it, check it and simulate it, beside torch.distributed.pipelining.

python benchmarks/planning.py [--sizes 8x64 16x256 64x1024] [--schedules ZBVZeroBubble ...] [--runs 3] [--json]

Seconds of processor time. Lowered rows have sends and receives, UNSHARD, RESHARD and REDUCE_GRAD; ours are checked as
if sends blocked, and the simulation keeps when every action ran. torch makes, validates and lowers in one call, of
which every rank makes one; its simulation knows neither sharding nor composites, so its rows are simulated without the
former, and DualPipeV's not at all. Where torch takes longer than 20 seconds it is run once.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from beside import TORCH, loss_fn, machine
from torch.distributed.pipelining import schedules as theirs

import pipeloom as pl

NAMES = ("ZBVZeroBubble", "Interleaved1F1B", "DualPipeV")
STAGES_PER_RANK = 2


def ours(name: str, ranks: int, microbatches: int) -> None:
    schedule = pl.schedules.make(name, ranks=ranks, microbatches=microbatches)
    lowered = pl.lower(schedule, shard=True, reduce=True)
    assert not pl.check(lowered)
    pl.simulate(lowered, pl.Costs(communication=0.1))


def torchs(name: str, ranks: int, microbatches: int) -> None:
    stages = ranks * STAGES_PER_RANK
    own: list[Any] = [
        SimpleNamespace(
            group=None, group_rank=0, group_size=ranks, num_stages=stages, stage_index=index, submod=torch.nn.Identity()
        )
        for index in range(STAGES_PER_RANK)
    ]
    schedule = TORCH[name](own, microbatches, loss_fn=loss_fn)
    if name != "DualPipeV":
        rows = {
            rank: [action for action in row if action.computation_type not in _SHARDING]
            for rank, row in schedule.pipeline_order_with_comms.items()
        }
        theirs._simulate_comms_compute(rows, lambda stage: schedule.stage_index_to_group_rank[stage], stages)


_SHARDING = (theirs.UNSHARD, theirs.RESHARD, theirs.REDUCE_GRAD)


def seconds(plan: Callable[[str, int, int], None], name: str, ranks: int, microbatches: int) -> float:
    start = time.process_time()
    plan(name, ranks, microbatches)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["8x64", "16x256", "64x1024"], metavar="RANKSxMICROBATCHES")
    parser.add_argument("--schedules", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print the times as JSON")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # torch's about what is deprecated
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    if not options.json:
        print(f"seconds of processor time, median of {options.runs} [least most] ({machine()})")
    for name in options.schedules:
        for size in options.sizes:
            ranks, microbatches = map(int, size.split("x"))
            times: dict[str, list[float]] = {"ours": [], "torch": []}
            for _ in range(options.runs):
                times["ours"].append(seconds(ours, name, ranks, microbatches))
                if not times["torch"] or times["torch"][0] < 20:
                    times["torch"].append(seconds(torchs, name, ranks, microbatches))
            found.setdefault(name, {})[size] = times
            if not options.json:
                cells = (
                    f"{side} {median(each):7.3f} [{min(each):.3f} {max(each):.3f}]" for side, each in times.items()
                )
                ratio = median(times["ours"]) / median(times["torch"])
                print(f"{name:>16} {size:>8}  {'  '.join(cells)}  = 1/{1 / ratio:.1f}", flush=True)
    if options.json:
        print(json.dumps({"machine": machine(), "unit": "seconds", "times": found}))


if __name__ == "__main__":
    main()
