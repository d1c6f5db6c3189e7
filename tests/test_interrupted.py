"""Calls that an exception from outside breaks off anywhere, as Ctrl-C does: what follows is right, or refused."""

from __future__ import annotations

import copy
import itertools
import random
import signal
from datetime import timedelta
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

import pipeloom as pl
from pipeloom.errors import PipeloomError
from pipeloom.runtime.launcher import launch
from test_pipeline import square

WIDTH = 64


class Interrupted(Exception):  # noqa: N818 - it stands for KeyboardInterrupt
    pass


def train(transport: Literal["local", "torch"], rounds: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = dist.get_rank()
    schedule = pl.schedules.make("1F1B", ranks=2, microbatches=4)
    modules = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]
    whole = copy.deepcopy(modules)
    x = torch.randn(8, WIDTH)
    pl.reference.step(whole, schedule, x, target=x, loss_fn=square)
    expected = [parameter.grad for parameter in whole[rank].parameters()]
    armed = False

    def interrupt(*_: object) -> None:
        if armed:
            raise Interrupted

    signal.signal(signal.SIGALRM, interrupt)
    chance = random.Random(rank)
    pipe: pl.Pipeline | None = None
    store, attempts = _get_default_store(), itertools.count()

    def attempt(seconds: float) -> bool:
        """A step that is interrupted after so long, if at all; whether it was done on both ranks."""
        nonlocal armed
        assert pipe is not None
        try:
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, seconds)
                pipe.step(*[x][: pipe.first], target=x if pipe.last else None)
                pipe.loss()
            finally:
                armed = False  # a signal that another thread took may still come
            done = True
        except (Interrupted, PipeloomError, RuntimeError):  # the last if it struck in a condition of Python's
            done = False
        number = next(attempts)
        store.set(f"{number} of rank {rank}", str(done))
        of_other = f"{number} of rank {1 - rank}"
        try:
            store.wait([of_other], timedelta(seconds=2))
        except RuntimeError:
            pipe.close()  # what struck between two calls here leaves the other rank in the second, until it is told
        both = store.get(of_other) == b"True" and done
        if both:
            found = [parameter.grad for parameter in modules[rank].parameters()]
            assert all(map(torch.equal, found, expected))  # type: ignore[arg-type]
        modules[rank].zero_grad()
        return both

    for number in range(rounds):
        if pipe is None:
            pipe = pl.Pipeline([pl.Stage(modules[rank], rank)], schedule, loss_fn=square, transport=transport)
        attempt(chance.uniform(0.0003, 0.006) if number % 2 == rank else 0)
        if not attempt(0):
            pipe.close()
            pipe = None
    if pipe is not None:
        pipe.close()
    dist.barrier()  # rank 0 keeps the store


@pytest.mark.timeout(240)
@pytest.mark.parametrize("transport", ["local", "torch"])
def test_what_follows_an_interrupted_call_is_right_or_refused(transport: Literal["local", "torch"]) -> None:
    launch(train, 2, transport, 60, timeout=60.0)
