"""How long a message takes from one rank to another: our transports beside torch.distributed over gloo.

python benchmarks/messages.py [--json]

Prints the median time one way, which is half of a round trip of `send`, `receive` and `wait` between two processes, and
its ratio to gloo's plain `send` and `recv` of a tensor whose shape both ends know.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from pipeloom.runtime.transport import Transport, connect
from pipeloom.runtime.transport._local import LocalTransport
from pipeloom.runtime.transport._rendezvous import unique

SIZES = {"32 B": 8, "4 KiB": 1 << 10, "64 KiB": 1 << 14, "1 MiB": 1 << 18, "16 MiB": 1 << 22}
KINDS = {"local": "shared memory", "tcp": "TCP loopback", "torch": "transport over gloo", "gloo": "plain gloo"}


def round_trip(
    kind: str, group: dist.ProcessGroup
) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[], None]]:
    """A function that sends a tensor to the other rank and receives one, in the order of the rank, and one to close."""
    rank = group.rank()
    if kind == "gloo":

        def plain(value: torch.Tensor) -> torch.Tensor:
            received = torch.empty_like(value)
            for sends in (rank == 0, rank == 1):
                if sends:
                    dist.send(value, 1 - rank)
                else:
                    dist.recv(received, 1 - rank)
            return received

        return plain, lambda: None
    transport: Transport
    if kind == "tcp":
        transport = LocalTransport(group, unique(group, kind), torch.device("cpu"), rings=False)
    else:
        transport = connect(group, kind)

    def ours(value: torch.Tensor) -> torch.Tensor:
        if rank == 0:
            transport.send(1, value)
        received = transport.receive(1 - rank).wait()
        if rank == 1:
            transport.send(0, value)
        assert isinstance(received, torch.Tensor)
        return received

    def close() -> None:
        transport.flush()
        dist.barrier()
        transport.close()

    return ours, close


def run(rank: int, store: str, results: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    for kind in KINDS:
        trip, close = round_trip(kind, group)
        for size, count in SIZES.items():
            value = torch.ones(count)
            times = []
            for _ in range(2000 if count < 1 << 16 else 200 if count < 1 << 20 else 30):
                start = time.perf_counter()
                trip(value)
                times.append((time.perf_counter() - start) / 2)
            if rank == 0:
                results.send((kind, size, statistics.median(times[len(times) // 10 :]) * 1e6))
        close()
    dist.destroy_process_group()


def measure() -> dict[str, dict[str, float]]:
    """Microseconds one way, by kind and size."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    found: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=run, args=(rank, f"{folder}/store", sender), daemon=True) for rank in range(2)]
        for process in ranks:
            process.start()
        sender.close()
        for _ in range(len(KINDS) * len(SIZES)):
            kind, size, microseconds = receiver.recv()
            found[kind][size] = microseconds
        for process in ranks:
            process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    arguments = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    found = measure()
    machine = f"{platform.machine()}, {os.cpu_count()} processors, torch {torch.__version__}"
    if arguments.json:
        print(json.dumps({"machine": machine, "unit": "microseconds one way, median", "kinds": found}))
        return
    print(f"microseconds one way, median, and the ratio to plain gloo ({machine})")
    print(f"{'':20}" + "".join(f"{size:>18}" for size in SIZES))
    for kind, name in KINDS.items():
        cells = [f"{found[kind][size]:9.1f} ({found[kind][size] / found['gloo'][size]:5.2f})" for size in SIZES]
        print(f"{name:20}" + "".join(f"{cell:>18}" for cell in cells))


if __name__ == "__main__":
    main()
