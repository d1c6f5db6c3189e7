"""Sockets between all ranks of a group, found through the group's store.

Ranks of one host meet on Unix sockets in the abstract namespace, which leave no file, others over TCP.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import sys
import time
import uuid
import weakref
from collections import Counter
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError
from torch.distributed.distributed_c10d import PrefixStore, Store

from pipeloom.errors import PeerFailed
from pipeloom.runtime.transport._handshake import Card, accept, addresses, prove, tcp_listener, ways
from pipeloom.runtime.transport._interface import Watch
from pipeloom.runtime.transport._signal import readable

_NAMES: Counter[tuple[str, str]] = Counter()
_SOCKETS: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""All that ranks met on."""
_SECONDS_A_LOOK = 0.4
"""How long to wait between two looks at whether a rank is still there."""


class Peer(NamedTuple):
    """Another rank of the group. `same_host` is true where the socket is a Unix socket."""

    rank: int
    host: str
    socket: socket.socket
    same_host: bool


def unique(group: dist.ProcessGroup, purpose: str) -> str:
    """A name that nothing else of this group has; every rank of the group calls this, in the same order."""
    key = group.group_name, purpose
    _NAMES[key] += 1
    return f"pipeloom/{purpose}/{_NAMES[key]}"


def meet(
    group: dist.ProcessGroup,
    name: str,
    *,
    unix: bool = True,
    seconds: float | None = None,
    watch: Watch | None = None,
) -> dict[int, Peer]:
    """A blocking socket to every other rank of `group`, by rank. Every rank calls this, with one name that is new.

    Without `unix`, ranks of one host meet over TCP as well. A rank that ends in here is noticed soon by those it has
    told its host. What else has failed `watch` says; where there is none yet, and the group has gloo, gloo notices a
    rank that ends before it has come. One that never comes cannot be told from one that is late, and is waited for
    `seconds` long, by default the time-out that the process group was made with.

    Raises:
        PeerFailed: a rank did not come in time, or ended meanwhile.
    """
    base = group.get_group_store()
    store = PrefixStore(name, base)
    if seconds is None:
        seconds = base.timeout.total_seconds()  # type: ignore[attr-defined]  # the stubs do not know it
    lookout = _Lookout(store, group, watch, time.monotonic() + seconds)
    try:
        peers = _meet(store, group.rank(), group.size(), unix and sys.platform == "linux", lookout)
    except DistNetworkError as error:
        raise PeerFailed(
            0, f"the store of the process group, which it or the launcher keeps, is gone: {error}"
        ) from None
    except OSError as error:
        lookout.say(group.rank(), f"it cannot connect: {error}", socket.gethostname())
        raise
    lookout.all_came()
    _SOCKETS.update(peer.socket for peer in peers.values())
    return peers


class _Lookout:
    """Looks whether ranks that are waited for may still come."""

    def __init__(self, store: Store, group: dist.ProcessGroup, watch: Watch | None, deadline: float) -> None:
        self.near: dict[int, Card] = {}
        """What ranks of this host have said of where they listen."""
        self.deadline = deadline
        self._store, self._group, self._watch = store, group, watch
        self._next = 0.0
        self._arrival: dist.Work | None = None
        """Over when all ranks have said where they are, broken off when one ends before."""

    def arrive(self) -> None:
        """This rank has said where it is."""
        if self._watch is None and "cpu:gloo" in dist.get_backend_config(self._group):
            self._arrival = dist.all_reduce(torch.zeros(1), group=self._group, async_op=True)

    def look(self, missing: int) -> None:
        """Called again and again while `missing` is waited for.

        Raises:
            PeerFailed: a rank has ended, or failed.
        """
        if self._watch is not None and readable([self._watch]):
            raise self._watch.failure(missing)
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _SECONDS_A_LOOK
        if self._store.check(["ended"]):
            self._raise(missing, "")
        for rank, card in self.near.items():
            self.refuse_ended(rank, card)
        if self._broken_off():
            time.sleep(_SECONDS_A_LOOK)  # those that are here say so meanwhile
            away = [rank for rank in range(self._group.size()) if not self._store.check([f"host/{rank}"])]
            if len(away) == 1:
                self._raise(away[0], "it ended before it had connected")
            if away:
                self._raise(away[0], f"one of ranks {', '.join(map(str, away))} ended before it had connected")

    def refuse_ended(self, rank: int, card: Card) -> None:
        """Raise if nothing listens any more where `rank` did, though it still had to."""
        refused = False
        for connect in ways(card):
            try:
                connect().close()
                return
            except ConnectionRefusedError:
                refused = True
            except OSError:
                return
        if refused:
            self._raise(rank, "it ended while the ranks were connecting", str(card["name"]))

    def all_came(self) -> None:
        if self._arrival is not None:
            with contextlib.suppress(RuntimeError):  # who has ended since is noticed where it is waited for
                self._arrival.wait()

    def _broken_off(self) -> bool:
        if self._arrival is None or not self._arrival.is_completed():
            return False
        try:
            self._arrival.wait()
        except RuntimeError:
            return True
        return False

    def say(self, rank: int, cause: str, host: str) -> list[Any]:
        """Say why nobody need wait, unless somebody has, as those that say so listen no more either; what was said."""
        said: list[Any] = json.loads(self._store.compare_set("ended", "", json.dumps([rank, cause, host])))
        return said

    def _raise(self, rank: int, cause: str, host: str = "") -> NoReturn:
        rank, cause, host = self.say(rank, cause, host)
        time.sleep(_SECONDS_A_LOOK)  # the others read it before this rank can end, and the store with it
        raise PeerFailed(rank, cause, host=host)


def _meet(store: Store, rank: int, size: int, unix: bool, lookout: _Lookout) -> dict[int, Peer]:
    if rank == 0:
        store.set("secret", secrets.token_hex(32))
    with contextlib.ExitStack() as stack:
        host: Card = {"machine": _machine(), "name": socket.gethostname()}
        listeners = []
        if unix:
            listeners.append(stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)))
            host["unix"] = f"pipeloom-{secrets.token_hex(16)}"
            listeners[-1].bind("\0" + str(host["unix"]))
            listeners[-1].listen(size)
        machine = host["machine"]
        store.set(f"host/{rank}", json.dumps(host))
        lookout.arrive()
        hosts = _said(store, "host", size, lookout)
        secret = store.get("secret")
        near = {
            other: each for other, each in enumerate(hosts) if unix and "unix" in each and each["machine"] == machine
        }
        lookout.near = near
        several = any(each["machine"] != machine for each in hosts)
        card: Card = {}
        if len(near) < size:
            listeners.append(stack.enter_context(tcp_listener(several)))
            card = {"tcp": addresses() if several else ["127.0.0.1"], "port": listeners[-1].getsockname()[1]}
            listeners[-1].listen(size)
        store.set(f"card/{rank}", json.dumps(card))
        said = _said(store, "card", size, lookout)
        cards = [{"name": each["name"]} | said[other] | near.get(other, {}) for other, each in enumerate(hosts)]
        lookout.near = {}
        peers: dict[int, Peer] = {}
        try:
            for other in range(rank):
                connected = _connect(cards[other], secret, rank, other, lookout)
                peers[other] = Peer(other, str(cards[other]["name"]), connected, other in near)
            while len(peers) < size - 1:
                missing = next(other for other in range(rank + 1, size) if other not in peers)
                for listener in _ready(listeners, missing, cards[missing], lookout):
                    accepted = accept(listener, secret, rank, size)
                    if accepted is not None and accepted[0] not in peers:
                        other = accepted[0]
                        near_by = listener.family == socket.AF_UNIX
                        peers[other] = Peer(other, str(cards[other]["name"]), accepted[1], near_by)
        except BaseException:
            for peer in peers.values():
                peer.socket.close()
            raise
    return peers


def _said(store: Store, key: str, size: int, lookout: _Lookout) -> list[Card]:
    """What every rank says under `key`."""
    found = []
    for other in range(size):
        pause = 0.001
        while not store.check([f"{key}/{other}"]):
            if time.monotonic() > lookout.deadline:
                raise PeerFailed(other, "it did not come in time to connect")
            lookout.look(other)
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        found.append(json.loads(store.get(f"{key}/{other}")))
    return found


def _machine() -> str:
    """Equal on two ranks if and only if they share a loopback device: one kernel, one network namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return f"{socket.gethostname()}/{uuid.getnode()}"


def _close_in_child() -> None:
    """A process that this one forks, say to load data, must not keep connections open when this one is gone."""
    for each in list(_SOCKETS):
        each.close()


os.register_at_fork(after_in_child=_close_in_child)


def _connect(card: Card, secret: bytes, rank: int, other: int, lookout: _Lookout) -> socket.socket:
    last: OSError = TimeoutError("timed out")
    while time.monotonic() < lookout.deadline:
        for connect in ways(card):
            made = None
            try:
                made = connect()
                prove(made, secret, rank, other)
                return made
            except OSError as error:
                if made is not None:
                    made.close()
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise
                last = error
        lookout.look(other)
        lookout.refuse_ended(other, card)
        time.sleep(0.05)
    raise PeerFailed(other, f"it cannot be reached ({last}), tried {card}", host=str(card["name"]))


def _ready(listeners: list[socket.socket], missing: int, card: Card, lookout: _Lookout) -> list[socket.socket]:
    """The listeners at which somebody has come, when somebody has."""
    while True:
        left = max(lookout.deadline - time.monotonic(), 0)
        ready = readable(listeners, min(left, _SECONDS_A_LOOK))
        if ready:
            return ready
        if left <= _SECONDS_A_LOOK:
            raise PeerFailed(missing, "it did not connect in time", host=str(card["name"]))
        lookout.look(missing)
        lookout.refuse_ended(missing, card)
