"""Starts ranks as forked processes for tests, and looks at how each of them ended."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipeloom.runtime.control import leave

Body = Callable[[dist.ProcessGroup], None]


def run_ranks(
    ranks: int,
    body: Body,
    path: Path,
    *,
    statuses: Mapping[int, int] | None = None,
    seconds: float = 60,
    forget: int | None = None,
) -> None:
    """Run `body(group)` in `ranks` forked processes.

    Fails with the tracebacks of those that raised, unless `statuses` says how they end; none of them outlives this.
    Rank `forget` is not waited for, as it stops itself; it is killed once the others have ended.
    """
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_child, args=(rank, ranks, body, path), daemon=True) for rank in range(ranks)]
    expected = dict.fromkeys(range(ranks), 0) | dict(statuses or {})
    try:
        for child in children:
            child.start()
        deadline = time.monotonic() + seconds
        for rank, child in enumerate(children):
            if rank != forget:
                child.join(max(deadline - time.monotonic(), 0))
        if forget is not None:
            children[forget].kill()
            children[forget].join()
        found = {rank: child.exitcode for rank, child in enumerate(children)}
        if found != expected:
            texts = [error.read_text() for error in sorted(path.glob("error*"))]
            pytest.fail("\n".join([f"ranks ended with {found}, expected {expected}", *texts]))
    finally:
        for child in children:
            child.kill()
            child.join()


def _child(rank: int, ranks: int, body: Body, path: Path) -> None:
    status = 1
    try:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=ranks)
        group = dist.group.WORLD
        assert group is not None
        body(group)
        status = 0
    except BaseException as error:
        leave(error)
        (path / f"error{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
    finally:
        os._exit(status)
