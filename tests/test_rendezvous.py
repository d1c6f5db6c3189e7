"""Ranks find each other, on one host or several, and nobody else gets in."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import DistStoreError

import pipeloom as pl
from pipeloom.errors import PeerFailed
from pipeloom.runtime.control import Control
from pipeloom.runtime.transport import _rendezvous, connect
from pipeloom.runtime.transport._handshake import Card, accept, prove
from pipeloom.runtime.transport._rendezvous import meet, unique
from processes import run_ranks

SECRET = b"the secret of the store"


def meet_a(connecting: Callable[[socket.socket], None]) -> tuple[int, socket.socket] | None:
    """What rank 0 of 3 makes of a connection on which `connecting` runs."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as other:
        other.connect(listener.getsockname())
        thread = threading.Thread(target=connecting, args=[other])
        thread.start()
        try:
            return accept(listener, SECRET, 0, 3)
        finally:
            thread.join()


def refused(other: socket.socket, secret: bytes) -> None:
    with pytest.raises(OSError, match=r"does not know the secret"):
        prove(other, secret, 2, 0)
    other.close()


def test_who_knows_the_secret_gets_in() -> None:
    met = meet_a(lambda other: prove(other, SECRET, 2, 0))
    assert met is not None
    met[1].close()
    assert met[0] == 2


@pytest.mark.parametrize(
    "stranger",
    [
        lambda other: refused(other, b"a guess"),
        lambda other: other.close(),
        lambda other: other.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + bytes(32)),
        lambda other: prove(other, SECRET, 0, 0),
        lambda other: prove(other, SECRET, 7, 0),
    ],
    ids=["another secret", "nothing", "another protocol", "this very rank", "no rank of the group"],
)
def test_strangers_do_not_get_in(stranger: Callable[[socket.socket], None]) -> None:
    assert meet_a(stranger) is None


@pytest.mark.parametrize("unix", [{0, 1, 2, 3}, set(), {0, 1, 3}, {2, 3}, {1}])
def test_all_ranks_meet(unix: set[int], tmp_path: Path) -> None:
    def body(group: dist.ProcessGroup) -> None:
        for _ in range(2):
            peers = meet(group, unique(group, "test"), unix=group.rank() in unix)
            assert sorted(peers) == [rank for rank in range(4) if rank != group.rank()]
            for rank, peer in peers.items():
                assert peer.same_host == ({rank, group.rank()} <= unix)
                peer.socket.sendall(bytes([group.rank(), rank]))
            for rank, peer in peers.items():
                assert peer.socket.recv(2, socket.MSG_WAITALL) == bytes([rank, group.rank()])
            if not unix:
                assert {peer.socket.getsockname()[0] for peer in peers.values()} == {"127.0.0.1"}

    run_ranks(4, body, tmp_path)


@pytest.mark.parametrize("left", range(0, 20, 2))
def test_a_rank_without_descriptors_says_so(left: int, tmp_path: Path) -> None:
    def body(group: dist.ProcessGroup) -> None:
        taken: list[int] = []
        if group.rank() == 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.dup(0))
            for each in taken[:left]:
                os.close(each)
        own = pytest.raises((OSError, DistStoreError), match="Too many open files")
        others = pytest.raises(PeerFailed, match=r"^rank 1")
        with own if group.rank() == 1 else others:
            pl.Pipeline([pl.Stage(nn.Identity(), group.rank())], "1F1B", microbatches=2, group=group)
        for each in taken[left:]:
            os.close(each)

    run_ranks(3, body, tmp_path, seconds=30)


@pytest.mark.parametrize(
    ("dead", "key", "unix"),
    [
        (0, "card", True),
        (1, "card", True),
        (2, "card", True),
        (2, "host", True),
        (0, "card", False),
        (2, "card", False),
    ],
)
def test_a_rank_that_ends_while_connecting_is_named(
    dead: int, key: str, unix: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed when it knows where the others listen or, with "host", before it has said where it does."""
    said = _rendezvous._said

    def body(group: dist.ProcessGroup) -> None:
        def then_end(store: Any, asked: str, *rest: Any) -> list[Card]:
            found = said(store, asked, *rest)
            if asked == key and group.rank() == dead:
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        monkeypatch.setattr(_rendezvous, "_said", then_end)
        start = time.monotonic()
        with pytest.raises(PeerFailed, match="ended while the ranks were connecting") as found:
            meet(group, unique(group, "test"), unix=unix, seconds=40)
        assert found.value.rank == dead
        assert time.monotonic() - start < 20

    run_ranks(3, body, tmp_path, statuses={dead: -signal.SIGKILL})


@pytest.mark.parametrize(
    ("dead", "named"),
    [([0], "rank 0"), ([1], "rank 1"), ([3], "rank 3"), ([1, 3], "rank 1.*one of ranks 1, 3")],
)
def test_a_rank_that_ends_before_it_comes_is_named(dead: list[int], named: str, tmp_path: Path) -> None:
    def body(group: dist.ProcessGroup) -> None:
        store = group.get_group_store()
        store.set(f"initialised {group.rank()}", "")
        if group.rank() in dead:
            store.wait([f"initialised {rank}" for rank in range(4)])
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerFailed, match=f"{named}.* ended before it had connected"):
            meet(group, unique(group, "test"))

    run_ranks(4, body, tmp_path, statuses=dict.fromkeys(dead, -signal.SIGKILL))


def test_a_failure_that_is_known_ends_the_wait(tmp_path: Path) -> None:
    def body(group: dist.ProcessGroup) -> None:
        control = Control(group)
        if group.rank() == 1:
            control.fail_for_good(ValueError("of rank 1"))
        else:
            with pytest.raises(PeerFailed, match="of rank 1"):
                meet(group, unique(group, "test"), watch=control)
        dist.barrier()
        control.close()

    run_ranks(3, body, tmp_path)


def test_a_rank_that_never_comes_is_named_after_the_deadline(tmp_path: Path) -> None:
    def body(group: dist.ProcessGroup) -> None:
        if group.rank() != 1:
            with pytest.raises(PeerFailed, match=r"rank 1.*did not come in time"):
                meet(group, unique(group, "test"), seconds=0.2)

    run_ranks(3, body, tmp_path)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two network namespaces with addresses of their own, each as good as a host."""
    names = [f"pipeloom-test-{os.getpid()}-{index}" for index in range(2)]
    commands = [f"netns add {name}" for name in names]
    commands += [f"link add veth netns {names[0]} type veth peer name veth netns {names[1]}"]
    for index, name in enumerate(names):
        commands += [f"-n {name} addr add 10.213.7.{index + 1}/24 dev veth", f"-n {name} link set veth up"]
    try:
        for command in commands:
            if shutil.which("ip") is None or subprocess.run(["ip", *command.split()], capture_output=True).returncode:
                pytest.skip("this machine does not let us make network namespaces")
        yield names
    finally:
        if shutil.which("ip") is not None:
            for name in names:
                subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def move_to(host: str) -> None:
    clone_newnet = 0x40000000
    with open(f"/run/netns/{host}") as namespace:
        assert ctypes.CDLL(None).setns(namespace.fileno(), clone_newnet) == 0


def test_ranks_of_several_hosts_meet_over_tcp(hosts: list[str], tmp_path: Path) -> None:
    """Ranks 0 and 1 are on one host and share memory, rank 2 is on another."""

    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        move_to(hosts[rank // 2])
        control = Control(group)
        transport = connect(group, "local", watch=control)
        for number in range(3):
            control.begin({}, {})
            transport.begin(control.number)
            for other in {0, 1, 2} - {rank}:
                transport.send(other, torch.full((3_000_000,), float(rank + number)))
            for other in {0, 1, 2} - {rank}:
                received = transport.receive(other).wait()
                assert isinstance(received, torch.Tensor)
                assert torch.equal(received, torch.full((3_000_000,), float(other + number)))
            transport.flush()
        dist.barrier()
        if rank == 2:
            os.kill(os.getpid(), 9)
        with pytest.raises(PeerFailed, match=r"rank 2 on .*: its process ended"):
            transport.receive(1 - rank).wait()
        transport.close()
        control.close()

    run_ranks(3, body, tmp_path, statuses={2: -9})
