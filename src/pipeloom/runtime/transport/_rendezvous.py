"""Sockets between all ranks of a group, found through the group's store.

Ranks of one host meet on Unix sockets in the abstract namespace, which leave no file, others over TCP. Both ends of a
connection prove that they know a secret from the store, so no stranger gets in.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import json
import os
import secrets
import select
import socket
import struct
import sys
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, TypeAlias

import torch.distributed as dist
from torch.distributed import DistNetworkError
from torch.distributed.distributed_c10d import PrefixStore, Store

from pipeloom.errors import PeerFailed

_MET: Counter[str] = Counter()
_SOCKETS: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""All that ranks met on."""
_NONCE, _PROOF = 16, 32
_HELLO = struct.Struct(f"<I{_NONCE}s")
_SECONDS_A_HANDSHAKE = 5.0
_SECONDS_A_LOOK = 0.5
"""How long to wait between two looks at whether a rank is still there."""

Card: TypeAlias = dict[str, object]
"""What a rank says of itself: its machine and name, or where it listens."""


class Peer(NamedTuple):
    """Another rank of the group. `same_host` is true where the socket is a Unix socket."""

    rank: int
    host: str
    socket: socket.socket
    same_host: bool


def meet(group: dist.ProcessGroup, purpose: str, *, unix: bool = True, seconds: float | None = None) -> dict[int, Peer]:
    """A blocking socket to every other rank of `group`, by rank. Every rank of the group calls this, in the same order.

    Without `unix`, ranks of one host meet over TCP as well. A rank that ends in here is noticed soon by those it has
    told its host; one that never comes cannot be told from one that is late, and is waited for `seconds` long, by
    default the time-out that the process group was made with.

    Raises:
        PeerFailed: a rank did not come in time, or ended meanwhile.
    """
    name = f"pipeloom/{purpose}/{_MET[f'{group.group_name}/{purpose}']}"
    _MET[f"{group.group_name}/{purpose}"] += 1
    base = group.get_group_store()
    store = PrefixStore(name, base)
    if seconds is None:
        seconds = base.timeout.total_seconds()  # type: ignore[attr-defined]  # the stubs do not know it
    deadline = time.monotonic() + seconds
    try:
        peers = _meet(store, group.rank(), group.size(), unix and sys.platform == "linux", deadline)
    except DistNetworkError as error:
        raise PeerFailed(
            0, f"the store of the process group, which it or the launcher keeps, is gone: {error}"
        ) from None
    _SOCKETS.update(peer.socket for peer in peers.values())
    return peers


def _meet(store: Store, rank: int, size: int, unix: bool, deadline: float) -> dict[int, Peer]:
    if rank == 0:
        store.set("secret", secrets.token_hex(32))
    with contextlib.ExitStack() as stack:
        host: dict[str, object] = {"machine": _machine(), "name": socket.gethostname()}
        listeners = []
        if unix:
            listeners.append(stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)))
            host["unix"] = f"pipeloom-{secrets.token_hex(16)}"
            listeners[-1].bind("\0" + str(host["unix"]))
            listeners[-1].listen(size)
        machine = host["machine"]
        hosts = _exchange(store, "host", rank, size, host, deadline, {})
        secret = store.get("secret")
        near = {other: each for other, each in enumerate(hosts) if unix and each["machine"] == machine}
        several = any(each["machine"] != machine for each in hosts)
        card: dict[str, object] = {}
        if not unix or several:
            listeners.append(stack.enter_context(_tcp_listener(several)))
            card = {"tcp": _addresses() if several else ["127.0.0.1"], "port": listeners[-1].getsockname()[1]}
            listeners[-1].listen(size)
        cards = _exchange(store, "card", rank, size, card, deadline, near)
        cards = [each | near.get(other, {}) for other, each in enumerate(cards)]
        names = [str(each["name"]) for each in hosts]
        peers: dict[int, Peer] = {}
        try:
            for other in range(rank):
                connected = _connect(store, cards[other], secret, rank, other, deadline, names[other])
                peers[other] = Peer(other, names[other], connected, other in near)
            while len(peers) < size - 1:
                missing = next(other for other in range(rank + 1, size) if other not in peers)
                for listener in _ready(store, listeners, deadline, missing, cards[missing], names[missing]):
                    accepted = _accept(listener, secret, rank, size)
                    if accepted is not None and accepted[0] not in peers:
                        other = accepted[0]
                        peers[other] = Peer(other, names[other], accepted[1], listener.family == socket.AF_UNIX)
        except BaseException:
            for peer in peers.values():
                peer.socket.close()
            raise
    return peers


def _exchange(
    store: Store,
    key: str,
    rank: int,
    size: int,
    mine: Card,
    deadline: float,
    near: Mapping[int, Card],
) -> list[Card]:
    """What every rank says under `key`. Those that are `near` are looked after meanwhile."""
    store.set(f"{key}/{rank}", json.dumps(mine))
    found = []
    for other in range(size):
        pause, look = 0.001, time.monotonic() + _SECONDS_A_LOOK
        while not store.check([f"{key}/{other}"]):
            now = time.monotonic()
            if now > deadline:
                raise PeerFailed(other, "it did not come in time to connect")
            if now > look:
                look = now + _SECONDS_A_LOOK
                for each, card in near.items():
                    _refuse_ended(store, each, card, str(card["name"]))
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        found.append(json.loads(store.get(f"{key}/{other}")))
    return found


def _refuse_ended(store: Store, rank: int, card: Card, host: str) -> None:
    """Raise if nothing listens any more where a rank did, though it still had to.

    The first to see that says so in the store: those that raise for it listen no more either.
    """
    refused = False
    for connect in _ways(card):
        try:
            connect().close()
            return
        except ConnectionRefusedError:
            refused = True
        except OSError:
            return
    if refused:
        rank, host = json.loads(store.compare_set("ended", "", json.dumps([rank, host])))
        time.sleep(_SECONDS_A_LOOK)  # the others read it before this rank can end, and the store with it
        raise PeerFailed(rank, "it ended while the ranks were connecting", host=host)


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


def _tcp_listener(several_hosts: bool) -> socket.socket:
    if not several_hosts:
        return socket.create_server(("127.0.0.1", 0))
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _addresses() -> list[str]:
    """The addresses under which other hosts may reach this one, the one on the way to the master first."""
    found: list[str] = []
    master = os.environ.get("MASTER_ADDR")
    if master:
        with contextlib.suppress(OSError):
            for family, kind, *_, address in socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM):
                with socket.socket(family, kind) as probe:
                    probe.connect(address)
                    found.append(probe.getsockname()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, interface in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", interface.encode())
                siocgifaddr = 0x8915
                found.append(socket.inet_ntoa(fcntl.ioctl(probe, siocgifaddr, request)[20:24]))
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
        for number, _, _, scope, *_ in map(str.split, file):
            if scope == "00":
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number)))
    return [address for address in dict.fromkeys(found) if not address.startswith("127.") and address != "::1"]


def _connect(
    store: Store, card: Card, secret: bytes, rank: int, other: int, deadline: float, host: str
) -> socket.socket:
    last: OSError = TimeoutError("timed out")
    while time.monotonic() < deadline:
        for connect in _ways(card):
            made = None
            try:
                made = connect()
                made.settimeout(_SECONDS_A_HANDSHAKE)
                _prove(made, secret, rank, other)
                made.settimeout(None)
                return made
            except OSError as error:
                if made is not None:
                    made.close()
                last = error
        _refuse_ended(store, other, card, host)
        time.sleep(0.05)
    raise PeerFailed(other, f"it cannot be reached ({last}), tried {card}", host=host)


def _ways(card: Card) -> list[Callable[[], socket.socket]]:
    """The ways to connect to a rank, each of which may raise OSError."""
    if "unix" in card:
        return [partial(_unix_connection, "\0" + str(card["unix"]))]
    addresses, port = card["tcp"], card["port"]
    assert isinstance(addresses, list)
    assert isinstance(port, int)
    return [partial(socket.create_connection, (each, port), timeout=_SECONDS_A_HANDSHAKE) for each in addresses]


def _unix_connection(address: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.connect(address)
    except OSError:
        made.close()
        raise
    return made


def _prove(made: socket.socket, secret: bytes, rank: int, other: int) -> None:
    mine = secrets.token_bytes(_NONCE)
    made.sendall(_HELLO.pack(rank, mine))
    theirs, proof = _exactly(made, _NONCE), _exactly(made, _PROOF)
    if not hmac.compare_digest(proof, _proof(secret, b"accept", rank, other, mine, theirs)):
        raise OSError(errno.EACCES, "what listens there does not know the secret")
    made.sendall(_proof(secret, b"connect", rank, other, mine, theirs))


def _accept(listener: socket.socket, secret: bytes, rank: int, size: int) -> tuple[int, socket.socket] | None:
    accepted, _ = listener.accept()
    try:
        accepted.settimeout(_SECONDS_A_HANDSHAKE)
        other, theirs = _HELLO.unpack(_exactly(accepted, _HELLO.size))
        mine = secrets.token_bytes(_NONCE)
        accepted.sendall(mine + _proof(secret, b"accept", other, rank, theirs, mine))
        proof = _exactly(accepted, _PROOF)
        if rank < other < size and hmac.compare_digest(proof, _proof(secret, b"connect", other, rank, theirs, mine)):
            accepted.settimeout(None)
            return other, accepted
    except OSError:
        pass
    accepted.close()
    return None


def _proof(secret: bytes, role: bytes, connecting: int, accepting: int, *nonces: bytes) -> bytes:
    return hmac.digest(secret, role + struct.pack("<II", connecting, accepting) + b"".join(nonces), "sha256")


def _exactly(made: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = made.recv(count - len(data))
        if not more:
            raise ConnectionResetError(errno.ECONNRESET, "the connection ended during the handshake")
        data += more
    return data


def _ready(
    store: Store, listeners: list[socket.socket], deadline: float, missing: int, card: Card, host: str
) -> list[socket.socket]:
    """The listeners at which somebody has come, when somebody has."""
    while True:
        left = max(deadline - time.monotonic(), 0)
        ready, _, _ = select.select(listeners, [], [], min(left, _SECONDS_A_LOOK))
        if ready:
            return ready
        if left <= _SECONDS_A_LOOK:
            raise PeerFailed(missing, "it did not connect in time", host=host)
        _refuse_ended(store, missing, card, host)
