"""How long a training step takes: pipeloom beside torch.distributed.pipelining, in the same processes, in turn.

python benchmarks/steps.py [--stages tiny|small|block] [--ranks 2] [--microbatches 64] [--runs 7] [--json]

tiny: Linear 8x8, so that a step is nothing but the pipeline's own work.
small: eight transformer blocks of width 128 over all stages, 64 tokens, 2 samples a microbatch.
block: two transformer blocks of width 256 a stage, 128 tokens, 2 samples a microbatch.

Prints medians in milliseconds with their quartiles, on our transport and over gloo, and the ratio to torch, run by run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from beside import TORCH, layer, loss_fn, machine, torch_schedule
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.runtime.launcher import launch


def stage(kind: str, stages: int) -> nn.Module:
    if kind == "tiny":
        return nn.Linear(8, 8)
    if kind == "small":
        return nn.Sequential(*(layer(128) for _ in range(max(1, 8 // stages))))
    return nn.Sequential(layer(256), layer(256))


def batch(kind: str, microbatches: int) -> Tensor:
    shape = {"tiny": (1, 8), "small": (2, 64, 128), "block": (2, 128, 256)}[kind]
    return torch.randn(shape[0] * microbatches, *shape[1:])


def sides(kind: str, name: str, microbatches: int) -> dict[str, Callable[[], None]]:
    """One step of each side."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    schedule = pl.schedules.make(name, ranks=ranks, microbatches=microbatches)
    x, y = batch(kind, microbatches), batch(kind, microbatches)
    held = schedule.stages_of(rank)
    modules = {index: stage(kind, schedule.stages) for index in held}
    their = torch_schedule(name, modules, schedule.stages, microbatches)
    found: dict[str, Callable[[], None]] = {}
    transports: tuple[Literal["local", "torch"], ...] = ("local", "torch")
    for transport in transports:
        pipe = pl.Pipeline(
            [pl.Stage(module, index) for index, module in modules.items()],
            schedule,
            loss_fn=loss_fn,
            transport=transport,
        )

        def ours(pipe: pl.Pipeline = pipe) -> None:
            pipe.step(*([x] if pipe.first else []), target=y if pipe.last else None, return_outputs=False)

        found["ours" if transport == "local" else "ours over gloo"] = ours

    def torchs() -> None:
        first = 0 in held
        last = schedule.stages - 1 in held
        their.step(*([x] if first else []), target=y if last else None, return_outputs=False)

    return found | {"torch": torchs}


def measure(kind: str, name: str, microbatches: int, runs: int, folder: str) -> None:
    torch.manual_seed(0)
    steps = sides(kind, name, microbatches)
    times: dict[str, list[float]] = {side: [] for side in steps}
    for run in range(runs + 2):
        for side, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            if run > 1:
                times[side].append(1000 * (time.perf_counter() - start))
    if dist.get_rank() == 0:
        Path(folder, "times.json").write_text(json.dumps(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", choices=["tiny", "small", "block"], default="tiny")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--schedules", nargs="+", choices=list(TORCH), default=list(TORCH), metavar="NAME")
    parser.add_argument("--json", action="store_true", help="print the times as JSON")
    options = parser.parse_args()
    found = {}
    for name in options.schedules:
        with tempfile.TemporaryDirectory() as folder:
            launch(measure, options.ranks, options.stages, name, options.microbatches, options.runs, folder)
            found[name] = json.loads(Path(folder, "times.json").read_text())
    if options.json:
        print(json.dumps({"machine": machine(), "unit": "milliseconds a step", "times": found}))
        return
    print(f"{options.stages} stages, {options.ranks} ranks, {options.microbatches} microbatches ({machine()})")
    print("median milliseconds a step [quartiles], and the median of the ratios to torch, run by run")
    for name, times in found.items():
        cells = []
        for side, each in times.items():
            low, middle, high = statistics.quantiles(each, n=4)
            ratio = statistics.median(mine / other for mine, other in zip(each, times["torch"], strict=True))
            cells.append(
                f"{side} {middle:7.1f} [{low:.1f} {high:.1f}]" + ("" if side == "torch" else f" = {ratio:.2f}")
            )
        print(f"{name:>22}  " + "   ".join(cells), flush=True)


if __name__ == "__main__":
    main()
