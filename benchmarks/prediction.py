"""How well a simulation at measured costs predicts a step of the demo model.

python benchmarks/prediction.py [--ranks 2] [--microbatches 8] [--steps 40] [--json]

For each schedule it runs steps, takes what actions cost from their timelines, simulates the schedule at these costs,
and prints the makespan beside the median of the measured ones. The last column is the same for costs from the odd steps
alone, against the even ones.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

import pipeloom as pl
from pipeloom.runtime.launcher import launch
from pipeloom.trainer.config import TrainConfig
from pipeloom.trainer.profiling import profile

SCHEDULES = [
    *("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"),
]


def measure(config: TrainConfig, schedule: pl.Schedule, folder: Path) -> None:
    for number, timeline in enumerate(profile(config, schedule)):
        (folder / f"{number}.json").write_text(timeline.to_json())


def predicted(timelines: Sequence[pl.Timeline]) -> float:
    return pl.simulate(timelines[0].schedule, pl.measured_costs(timelines)).makespan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, metavar="NAME")
    parser.add_argument("--json", action="store_true", help="print the times, in seconds, as JSON")
    options = parser.parse_args()
    machine = f"{platform.machine()}, {os.cpu_count()} processors, torch {torch.__version__}"
    if not options.json:
        print(f"{machine}; {options.ranks} ranks, {options.microbatches} microbatches, {options.steps} steps, in ms\n")
        print(f"{'SCHEDULE':<22} {'LEAST':>8} {'MEDIAN':>8} {'MOST':>8} {'SIMULATED':>10} {'':>6}   FROM OTHER STEPS")
    found = {}
    for name in options.schedules:
        schedule = pl.schedules.make(name, ranks=options.ranks, microbatches=options.microbatches)
        with tempfile.TemporaryDirectory() as folder:
            launch(measure, options.ranks, TrainConfig(steps=options.steps), schedule, Path(folder))
            timelines = [pl.Timeline.from_json(Path(folder) / f"{number}.json") for number in range(options.steps)]
        times = [timeline.makespan for timeline in timelines]
        simulated, others = predicted(timelines), predicted(timelines[1::2])
        found[name] = {"measured": times, "simulated": simulated, "simulated from odd steps": others}
        if not options.json:
            row = " ".join(f"{1000 * time:8.1f}" for time in (min(times), median(times), max(times)))
            error, other = simulated / median(times) - 1, others / median(times[::2]) - 1
            print(f"{name:<22} {row} {1000 * simulated:10.1f} {error:+6.1%}   {other:+16.1%}", flush=True)
    if options.json:
        print(json.dumps({"machine": machine, **found}, indent=1))


if __name__ == "__main__":
    main()
