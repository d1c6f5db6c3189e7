"""Breaks a random rank at a random action of a random schedule, over and over, and looks at what the others say.

python tests/soak.py [--times 200] [--seed 0]

A rank raises, is killed or is stopped, over our own transport or gloo. Each time every other rank must raise an error
that names it, soon, and where the rank only raised and all caught it, the next step must be right. Nothing may stay
behind: no process, no shared memory, no socket.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipeloom as pl
from models import WIDTH
from pipeloom.errors import PeerFailed
from processes import run_ranks

SOON = 2.0
"""Seconds within which everybody must have heard of a failure, once they wait."""
SILENT = 3.0
"""The deadline of a pipeline whose rank is stopped, in seconds."""
NAMES = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]

How = Literal["raise in a stage", "raise in the loss", "raise in a hook", "raise between steps", "kill", "stop"]


@dataclass(frozen=True)
class Case:
    """One break: in step 1 of 3, `rank` fails at its `at`-th forward (or backward hook, or loss)."""

    name: str
    ranks: int
    microbatches: int
    transport: Literal["local", "torch"]
    how: How
    rank: int
    at: int


def case(seed: int) -> Case:
    chance = random.Random(seed)
    ranks = chance.choice([2, 2, 3])
    name = chance.choice(NAMES)
    microbatches = chance.randint(2, 7)
    how: How = chance.choice(list(How.__args__))  # type: ignore[attr-defined]
    transport: Literal["local", "torch"] = chance.choice(["local", "torch"])
    if how == "stop":
        transport = "local"  # over gloo silence ends with the group's own time-out
    schedule = pl.schedules.make(name, ranks=ranks, microbatches=microbatches)
    rank = schedule.placement[schedule.stages - 1] if how == "raise in the loss" else chance.randrange(ranks)
    return Case(name, ranks, microbatches, transport, how, rank, chance.randrange(microbatches))


class BoomError(ArithmeticError):
    """What a broken rank raises."""


class Breaks(nn.Module):
    """A stage that does what the case says, when it says."""

    def __init__(self, how: How | None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.how = how
        self.left: int | None = None
        """How many more forwards go well; None for all."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                if self.how == "raise in a hook" and x.requires_grad:
                    x.register_hook(_boom)
                else:
                    do_break(self.how)
        return x


def _boom(*_: object) -> Tensor:
    raise BoomError("out of luck")


def do_break(how: How | None) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        _boom()


def modules(stages: int, how: How | None = None) -> list[Breaks]:
    torch.manual_seed(0)
    return [Breaks(how) for _ in range(stages)]


def work(broken: Case, group: dist.ProcessGroup, folder: Path) -> None:
    """What each rank does: a step, the broken step, and a step that is right again where one can be."""
    rank = group.rank()
    schedule = pl.schedules.make(broken.name, ranks=broken.ranks, microbatches=broken.microbatches)
    mine = rank == broken.rank
    held = schedule.stages_of(rank)
    own = {
        stage: each
        for stage, each in enumerate(modules(schedule.stages, broken.how if mine else None))
        if stage in held
    }
    losses_left: list[int] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if losses_left:
            losses_left[0] -= 1
            if losses_left[0] < 0:
                losses_left.clear()
                _boom()
        return (output - target).square().mean()

    pipe = pl.Pipeline(
        [pl.Stage(module, stage) for stage, module in own.items()],
        schedule,
        loss_fn=loss_fn,
        transport=broken.transport,
        deadline=SILENT if broken.how == "stop" else 30.0,
    )
    x = torch.randn(2 * broken.microbatches, WIDTH, generator=torch.Generator().manual_seed(1))

    def step() -> None:
        pipe.step(*([x] if pipe.first else []), target=x if pipe.last else None, return_outputs=False)
        pipe.loss()  # waits for all, so that a failure belongs to this step on every rank

    step()
    for module in own.values():
        module.zero_grad()
    dist.barrier()
    start = time.monotonic()
    said: dict[str, Any] = {}
    try:
        if mine and broken.how == "raise between steps":
            _boom()
        if mine and broken.how == "raise in the loss":
            losses_left.append(broken.at)
        elif mine:
            own[held[0]].left = broken.at
        step()
    except BoomError:
        if broken.how == "raise between steps":
            raise
        said = {"raised": True}
    except PeerFailed as error:
        said = {"rank": error.rank, "cause": error.cause, "text": str(error)}
    said["seconds"] = time.monotonic() - start
    said["clean"] = all(parameter.grad is None for module in own.values() for parameter in module.parameters())
    (folder / f"said{rank}").write_text(json.dumps(said))
    if broken.how.startswith("raise in") and broken.transport == "local":
        step()
        whole = modules(schedule.stages)
        pl.reference.step(whole, schedule, x, target=x, loss_fn=lambda one, other: (one - other).square().mean())
        for stage, module in own.items():
            for one, other in zip(module.parameters(), whole[stage].parameters(), strict=True):
                assert one.grad is not None
                assert other.grad is not None
                assert torch.equal(one.grad, other.grad)
        pipe.close()


def run(broken: Case) -> list[str]:
    """What went wrong; nothing, if all is well."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ends = {"kill": {broken.rank: -signal.SIGKILL}, "stop": {broken.rank: -signal.SIGKILL}}.get(broken.how, {})
        if broken.how == "raise between steps":
            ends = {broken.rank: 1}
        wrong = []
        stopped = broken.rank if broken.how == "stop" else None
        try:
            run_ranks(
                broken.ranks,
                lambda group: work(broken, group, folder),
                folder,
                statuses=ends,
                seconds=60,
                forget=stopped,
            )
        except BaseException as error:
            wrong.append(str(error))
        for rank in range(broken.ranks):
            if rank == broken.rank:
                continue
            file = folder / f"said{rank}"
            said = json.loads(file.read_text()) if file.exists() else {}
            limit = SOON + (SILENT if broken.how == "stop" else 0)
            if said.get("rank") != broken.rank:
                wrong.append(f"rank {rank} did not name rank {broken.rank}: {said}")
            elif said["seconds"] > limit:
                wrong.append(f"rank {rank} heard after {said['seconds']:.1f} s: {said}")
            elif not said["clean"]:
                wrong.append(f"rank {rank} holds gradients of the failed step")
            elif broken.how.startswith("raise") and "out of luck" not in said["cause"]:
                wrong.append(f"rank {rank} does not know the cause: {said}")
        return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    failed = 0
    for seed in range(options.seed, options.seed + options.times):
        broken = case(seed)
        wrong = run(broken)
        failed += bool(wrong)
        print(f"{seed}: {asdict(broken)}: {'; '.join(wrong) or 'well'}", flush=True)
    print(f"{options.times - failed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
