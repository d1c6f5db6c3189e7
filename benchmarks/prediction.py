"""How well a simulation at measured costs predicts a step of the demo model.

python benchmarks/prediction.py [--ranks 2] [--microbatches 8] [--steps 40] [--json]

For each schedule it runs steps, takes what actions cost from their timelines, simulates the schedule at these costs,
and prints the makespan beside the median of the measured ones. The last columns are the same for costs that were taken
under another schedule with as many stages.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from pathlib import Path
from statistics import median

import torch

import pipeloom as pl
from pipeloom.runtime.launcher import launch
from pipeloom.trainer.config import TrainConfig
from pipeloom.trainer.profiling import profile

OTHERS = {
    "GPipe": "1F1B",
    "1F1B": "GPipe",
    "Interleaved1F1B": "LoopedBFS",
    "LoopedBFS": "Interleaved1F1B",
    "InterleavedZeroBubble": "DualPipeV",
    "ZBVZeroBubble": "DualPipeV",
    "DualPipeV": "ZBVZeroBubble",
}


def measure(config: TrainConfig, schedule: pl.Schedule, folder: Path) -> None:
    for number, timeline in enumerate(profile(config, schedule)):
        (folder / f"{number}.json").write_text(timeline.to_json())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", action="store_true", help="print the times, in seconds, as JSON")
    options = parser.parse_args()
    timelines: dict[str, list[pl.Timeline]] = {}
    for name in OTHERS:
        schedule = pl.schedules.make(name, ranks=options.ranks, microbatches=options.microbatches)
        with tempfile.TemporaryDirectory() as folder:
            launch(measure, options.ranks, TrainConfig(steps=options.steps), schedule, Path(folder))
            files = [Path(folder) / f"{number}.json" for number in range(options.steps)]
            timelines[name] = [pl.Timeline.from_json(file) for file in files]
    costs = {name: pl.measured_costs(found) for name, found in timelines.items()}
    found = []
    for name, other in OTHERS.items():
        schedule = timelines[name][0].schedule
        own, foreign = (pl.simulate(schedule, costs[each]).makespan for each in (name, other))
        found.append((name, [timeline.makespan for timeline in timelines[name]], own, other, foreign))
    machine = f"{platform.machine()}, {os.cpu_count()} processors, torch {torch.__version__}"
    if options.json:
        heads = ("schedule", "measured", "simulated", "other", "simulated at its costs")
        rows = [dict(zip(heads, row, strict=True)) for row in found]
        print(json.dumps({"machine": machine, "schedules": rows}, indent=1))
        return
    print(f"{machine}; {options.ranks} ranks, {options.microbatches} microbatches, {options.steps} steps, in ms\n")
    print(f"{'SCHEDULE':<22} {'LEAST':>8} {'MEDIAN':>8} {'MOST':>8} {'SIMULATED':>10} {'':>6}   AT COSTS OF")
    for name, times, own, other, foreign in found:
        usual = median(times)
        row = " ".join(f"{1000 * time:8.1f}" for time in (min(times), usual, max(times)))
        errors = f"{own / usual - 1:+6.1%}   {other:<15} {foreign / usual - 1:+6.1%}"
        print(f"{name:<22} {row} {1000 * own:10.1f} {errors}")


if __name__ == "__main__":
    main()
