"""What it costs to evaluate between training steps: the first call of a kind after the other kind, beside a later one.

python benchmarks/evaluation.py [--schedules 1F1B Interleaved1F1B] [--ranks 2] [--microbatches 8] [--runs 15] [--json]

Stages are transformer blocks of width 128, 64 tokens, 2 samples a microbatch. Two steps and two evaluations take turns.
`forwards` is how often the module of the first rank's first stage ran in an evaluation, later ones and first ones.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from beside import TORCH, layer, loss_fn, machine, torch_schedule
from torch import nn

import pipeloom as pl
from pipeloom.runtime.launcher import launch

CALLS = ("first step", "later step", "first eval", "later eval")


class Counted(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.forwards = inner, 0

    def forward(self, *given: Any) -> Any:
        self.forwards += 1
        return self.inner(*given)


def measure(side: str, name: str, microbatches: int, runs: int, folder: str) -> None:
    torch.manual_seed(0)
    rank = dist.get_rank()
    schedule = pl.schedules.make(name, ranks=dist.get_world_size(), microbatches=microbatches)
    stages = schedule.stages_of(rank)
    modules = {index: Counted(layer(128)) for index in stages}
    given = [torch.randn(2 * microbatches, 64, 128)] if 0 in stages else []
    target = torch.randn(2 * microbatches, 64, 128) if schedule.stages - 1 in stages else None
    train: Callable[..., object]
    evaluate: Callable[..., object]
    if side == "torch":
        their = torch_schedule(name, modules, schedule.stages, microbatches)
        train, evaluate = their.step, their.eval
    else:
        pipe = pl.Pipeline([pl.Stage(module, index) for index, module in modules.items()], schedule, loss_fn=loss_fn)
        train, evaluate = pipe.step, pipe.eval
    times: dict[str, list[float]] = {call: [] for call in CALLS}
    forwards: dict[str, list[int]] = {call: [] for call in CALLS}
    for run in range(runs + 2):
        for call in CALLS:
            before = modules[stages[0]].forwards
            dist.barrier()
            start = time.perf_counter()
            (train if "step" in call else evaluate)(*given, target=target)
            dist.barrier()
            if run > 1:
                times[call].append(1000 * (time.perf_counter() - start))
                forwards[call].append(modules[stages[0]].forwards - before)
    if rank == 0:
        found = {call: {"milliseconds": median(times[call]), "forwards": max(forwards[call])} for call in CALLS}
        Path(folder, "found.json").write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", choices=list(TORCH), default=["1F1B", "Interleaved1F1B"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print the medians as JSON")
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for name in options.schedules:
        for side in ("ours", "torch"):
            with tempfile.TemporaryDirectory() as folder:
                launch(measure, options.ranks, side, name, options.microbatches, options.runs, folder)
                found.setdefault(name, {})[side] = json.loads(Path(folder, "found.json").read_text())
    if options.json:
        print(json.dumps({"machine": machine(), "found": found}))
        return
    print(f"median milliseconds, {options.ranks} ranks, {options.microbatches} microbatches ({machine()})")
    for name, sides in found.items():
        for side, calls in sides.items():
            cells = (f"{call} {each['milliseconds']:6.1f}" for call, each in calls.items())
            counts = f"{calls['later eval']['forwards']}, {calls['first eval']['forwards']}"
            print(f"{name:>22} {side:>6}  {'   '.join(cells)}   forwards {counts}")


if __name__ == "__main__":
    main()
