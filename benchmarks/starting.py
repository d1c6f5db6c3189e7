"""How long after the start of a program all its ranks are ready: under our launcher, and torch's under torchrun.

python benchmarks/starting.py [--ranks 4] [--runs 5] [--json]

Prints seconds, and how many imports of torch that is. A rank is ready once it has a process group and its pipeline of
one layer a stage; "with an optimizer" it makes an AdamW besides, which loads `torch._dynamo`: in our program before
ranks start, as docs/training.md has it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from statistics import median
from typing import Any

KINDS = ("import torch", "ours", "torchrun", "ours with an optimizer", "torchrun with an optimizer")


def ours(ranks: int, optimizer: bool) -> None:
    import torch
    import torch.distributed as dist

    import pipeloom as pl
    from pipeloom.runtime.launcher import launch

    if optimizer:
        import torch._dynamo

    def rank() -> None:
        layer = a_layer(optimizer)
        loss_fn = torch.nn.functional.mse_loss
        pipe = pl.Pipeline([pl.Stage(layer, dist.get_rank())], "1F1B", microbatches=8, loss_fn=loss_fn)
        say_ready()
        pipe.close()

    launch(rank, ranks)


def theirs(ranks: int, optimizer: bool) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    dist.init_process_group("gloo")
    stage = PipelineStage(a_layer(optimizer), dist.get_rank(), ranks, torch.device("cpu"))
    Schedule1F1B(stage, 8, loss_fn=torch.nn.functional.mse_loss)
    say_ready()
    dist.destroy_process_group()


def a_layer(optimizer: bool) -> Any:
    import torch

    layer = torch.nn.Linear(8, 8)
    if optimizer:
        torch.optim.AdamW(layer.parameters())
    return layer


def say_ready() -> None:
    sys.stdout.write(f"{time.time()}\n")
    sys.stdout.flush()


def seconds(kind: str, ranks: int) -> float:
    """From the start of a program to the moment at which the last rank says that it is ready."""
    if kind == "import torch":
        command = [sys.executable, "-c", "import torch, time; print(time.time())"]
    else:
        runner = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if "torchrun" in kind else []
        command = [sys.executable, *runner, __file__, "--ranks", str(ranks), "--be", kind]
    start = time.time()
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    return max(map(float, said.split())) - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--be", choices=KINDS[1:], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be:
        (theirs if "torchrun" in options.be else ours)(options.ranks, "optimizer" in options.be)
        return
    runs = [{kind: seconds(kind, options.ranks) for kind in KINDS} for _ in range(options.runs)]
    found = {kind: median(run[kind] for run in runs) for kind in KINDS}
    rows = {kind: {"seconds": it, "imports": it / found["import torch"]} for kind, it in found.items()}
    if options.json:
        print(json.dumps({"ranks": options.ranks, "kinds": rows}))
        return
    for kind, row in rows.items():
        print(f"{kind:<28} {row['seconds']:6.2f} s {row['imports']:6.2f} imports of torch")


if __name__ == "__main__":
    main()
