"""Starts the ranks of one machine under torch's elastic agent, which starts all of them again when one has failed."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import traceback
from collections.abc import Callable
from typing import TypeVarTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.rendezvous import rendezvous

from pipeloom.errors import PipeloomError, RankFailed
from pipeloom.runtime.control import leave
from pipeloom.runtime.launcher import end_with

Args = TypeVarTuple("Args")


def launch_with_restarts(
    function: Callable[[*Args], object], ranks: int, *args: *Args, backend: str, max_restarts: int
) -> None:
    """Run `function(*args)` in `ranks` new processes that form a process group, as `launch` does, until all return.

    When a rank fails, all are ended and started again, `max_restarts` times at most; they find out by
    TORCHELASTIC_RESTART_COUNT in their environment.

    Raises:
        RankFailed: a rank failed, and there were no restarts left.
        KeyboardInterrupt: Ctrl-C.
    """
    if sys.platform == "linux" and backend == "gloo":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=secrets.token_hex(8),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=max_restarts,
        monitor_interval=0.1,
        start_method="fork",
    )
    try:
        elastic_launch(config, _be_rank)(os.getpid(), ranks, backend, lambda: function(*args))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise RankFailed(rank, failure.exitcode) from None
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + error.sigval) from None


def join(backend: str) -> None:
    """Form a process group with the ranks that an agent has started beside this one."""
    store, rank, ranks = next(rendezvous("env://"))
    # The agent's store may hold addresses of ranks that were there before a restart.
    store = PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)


def _be_rank(agent: int, ranks: int, backend: str, run: Callable[[], object]) -> None:
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the agent alone answers it
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        end_with(agent)
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
        join(backend)
        run()
        leave()
        dist.destroy_process_group()
        status = 0
    except PipeloomError as error:
        print(f"rank {os.environ['RANK']}: {error}", file=sys.stderr)
        leave(error)
    except BaseException as error:
        print(f"rank {os.environ['RANK']}:\n{traceback.format_exc()}", end="", file=sys.stderr)
        leave(error)
    if status:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
