"""Starts the ranks of one machine: torch is imported once, in this process, and every rank is forked from it.

Nothing is pickled: a rank gets its function and arguments by being a copy of this process.
"""

from __future__ import annotations

import ctypes
import datetime
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from types import FrameType
from typing import NoReturn, TypeVarTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from pipeloom.errors import PeerFailed, PipeloomError, RankFailed
from pipeloom.runtime.control import leave

Args = TypeVarTuple("Args")

_GRACE = 2.0
"""Seconds that ranks have between being asked to end and being killed."""

_HEARD = 113
"""How a rank ends, among ourselves, whose error was that another rank failed."""

_POLL = 0.01
"""Seconds between two looks at whether a rank has ended."""


def launch(
    function: Callable[[*Args], object], ranks: int, *args: *Args, backend: str = "gloo", timeout: float = 1800.0
) -> None:
    """Run `function(*args)` in `ranks` new processes that form a process group, and wait until all have returned.

    Each rank finds `torch.distributed` initialised over loopback, and its number there. The cores are shared out among
    the ranks as threads, at least one each. However this ends, no rank is left behind: the first to fail ends all, and
    so do Ctrl-C and SIGTERM here; on Linux the ranks end with this process even if it is killed. What this process has
    imported the ranks need not; the first optimizer, for one, loads `torch._dynamo`, which takes a second.

    Args:
        function: what each rank runs.
        ranks: how many ranks.
        args: what `function` is called with.
        backend: the backend of the process group.
        timeout: seconds after which an operation of the process group gives up.

    Raises:
        RankFailed: a rank raised (its error is on stderr by then), exited with another status than 0, or was killed.
        KeyboardInterrupt: Ctrl-C.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    sys.stdout.flush()
    sys.stderr.flush()
    children: dict[int, int] = {}
    parent = os.getpid()
    on_terminate = signal.signal(signal.SIGTERM, _exit_on_terminate)
    try:
        _end_pool()
        # No signal may strike a rank while it still looks like this process.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            for rank in range(ranks):
                with warnings.catch_warnings():
                    # Python 3.12 and later warn of threads; those that importing torch brings stand a fork.
                    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
                    child = os.fork()
                if child == 0:
                    _be_rank(parent, mask, rank, ranks, listener, backend, timeout, lambda: function(*args))
                children[child] = rank
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        listener.close()
        while children:
            for child in list(children):
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    rank, code = children.pop(child), os.waitstatus_to_exitcode(status)
                    if code:
                        raise RankFailed(*_first(children, rank, code))
            time.sleep(_POLL)
    finally:
        listener.close()
        _end(list(children))
        signal.signal(signal.SIGTERM, on_terminate)


def _end_pool() -> None:
    """End the threads with which torch computes here, for they do not survive a fork; the next computation starts new
    ones. A rank that counted on them would hang."""
    omp_pause_hard = 2
    openmp = ctypes.CDLL(torch._C.__file__)  # what torch is linked with is looked through too
    if hasattr(openmp, "omp_pause_resource_all"):
        openmp.omp_pause_resource_all(omp_pause_hard)


def _first(children: dict[int, int], rank: int, code: int) -> tuple[int, int]:
    """Which rank failed, and how: the first that has not only heard of it, and chose its status or was killed."""
    ended = {rank: code}
    time.sleep(20 * _POLL)
    for child in list(children):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            ended[children.pop(child)] = os.waitstatus_to_exitcode(status)
    failed = {each: found for each, found in ended.items() if found}
    rank = min(failed, key=lambda each: {1: 1, _HEARD: 2}.get(failed[each], 0))
    return rank, 1 if failed[rank] == _HEARD else failed[rank]


def under_torchrun() -> bool:
    """Whether somebody else, such as torchrun, has started this process as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _be_rank(
    parent: int,
    mask: set[int],
    rank: int,
    ranks: int,
    listener: socket.socket,
    backend: str,
    timeout: float,
    run: Callable[[], object],
) -> NoReturn:
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent alone answers it
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        end_with(parent)
        os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
        _join(rank, ranks, listener, backend, datetime.timedelta(seconds=timeout))
        run()
        leave()
        if dist.is_initialized():  # `run` may have seen to it
            dist.destroy_process_group()
        status = 0
    except PipeloomError as error:
        print(f"rank {rank}: {error}", file=sys.stderr)
        leave(error)
        status = _HEARD if isinstance(error, PeerFailed) else 1
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        leave(error if status else None)
    except BaseException as error:
        print(f"rank {rank}:\n{traceback.format_exc()}", end="", file=sys.stderr)
        leave(error)
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)


def _join(rank: int, ranks: int, listener: socket.socket, backend: str, timeout: datetime.timedelta) -> None:
    host, port = listener.getsockname()
    if rank == 0:  # the socket that listens already is handed over, so that nobody comes too early
        descriptor = listener.detach()
        store = TCPStore(
            host, port, ranks, is_master=True, timeout=timeout, master_listen_fd=descriptor, wait_for_workers=False
        )
    else:
        listener.close()
        store = TCPStore(host, port, ranks, is_master=False, timeout=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)


def end_with(parent: int) -> None:
    """Have the system kill this process when its parent is gone, where the system can."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _end(children: list[int]) -> None:
    for child in children:
        os.kill(child, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE
    while children and time.monotonic() < deadline:
        children = [child for child in children if not os.waitpid(child, os.WNOHANG)[0]]
        time.sleep(_POLL)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _exit_on_terminate(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)
