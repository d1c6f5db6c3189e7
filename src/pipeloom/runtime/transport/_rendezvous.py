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
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from pipeloom.errors import PeerFailed

_MET: Counter[str] = Counter()
_SOCKETS: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""All that ranks met on."""
_NONCE, _PROOF = 16, 32
_HELLO = struct.Struct(f"<I{_NONCE}s")
_SECONDS_A_HANDSHAKE = 5.0


class Peer(NamedTuple):
    """Another rank of the group. `same_host` is true where the socket is a Unix socket."""

    rank: int
    host: str
    socket: socket.socket
    same_host: bool


def meet(group: dist.ProcessGroup, purpose: str, *, unix: bool = True, seconds: float = 300.0) -> dict[int, Peer]:
    """A blocking socket to every other rank of `group`, by rank. Every rank of the group calls this, in the same order.

    Without `unix`, ranks of one host meet over TCP as well.

    Raises:
        PeerFailed: a rank did not come within `seconds`.
    """
    rank, size = group.rank(), group.size()
    unix = unix and sys.platform == "linux"
    name = f"pipeloom/{purpose}/{_MET[f'{group.group_name}/{purpose}']}"
    _MET[f"{group.group_name}/{purpose}"] += 1
    store = PrefixStore(name, group.get_group_store())
    if rank == 0:
        store.set("secret", secrets.token_hex(32))
    hosts = _exchange(store, "host", rank, size, {"machine": _machine(), "name": socket.gethostname()})
    secret = store.get("secret")
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        card: dict[str, object] = {}
        listeners = []
        machines = [host["machine"] for host in hosts]
        several = len(set(machines)) > 1
        if unix and machines.count(machines[rank]) > 1:
            listeners.append(stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)))
            card["unix"] = f"pipeloom-{secrets.token_hex(16)}"
            listeners[-1].bind("\0" + str(card["unix"]))
        if not unix or several:
            listeners.append(stack.enter_context(_tcp_listener(several)))
            card["tcp"] = _addresses() if several else ["127.0.0.1"]
            card["port"] = listeners[-1].getsockname()[1]
        for listener in listeners:
            listener.listen(size)
        cards = _exchange(store, "card", rank, size, card)
        peers: dict[int, Peer] = {}
        try:
            for other in range(rank):
                same = unix and machines[other] == machines[rank]
                connected = _connect(cards[other], same, secret, rank, other, deadline, str(hosts[other]["name"]))
                peers[other] = Peer(other, str(hosts[other]["name"]), connected, same)
            while len(peers) < size - 1:
                missing = next(other for other in range(rank + 1, size) if other not in peers)
                for listener in _ready(listeners, deadline, missing, str(hosts[missing]["name"])):
                    accepted = _accept(listener, secret, rank, size)
                    if accepted is not None and accepted[0] not in peers:
                        other = accepted[0]
                        same = listener.family == socket.AF_UNIX
                        peers[other] = Peer(other, str(hosts[other]["name"]), accepted[1], same)
        except BaseException:
            for peer in peers.values():
                peer.socket.close()
            raise
    _SOCKETS.update(peer.socket for peer in peers.values())
    return peers


def _exchange(store: Store, key: str, rank: int, size: int, mine: Mapping[str, object]) -> list[dict[str, object]]:
    store.set(f"{key}/{rank}", json.dumps(mine))
    return [json.loads(store.get(f"{key}/{other}")) for other in range(size)]


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
    card: dict[str, object], same: bool, secret: bytes, rank: int, other: int, deadline: float, host: str
) -> socket.socket:
    last: OSError = TimeoutError("timed out")
    while time.monotonic() < deadline:
        for made in _attempts(card, same):
            try:
                made.settimeout(_SECONDS_A_HANDSHAKE)
                _prove(made, secret, rank, other)
                made.settimeout(None)
                return made
            except OSError as error:
                made.close()
                last = error
        time.sleep(0.05)
    raise PeerFailed(other, f"it cannot be reached ({last}), tried {card}", host=host)


def _attempts(card: dict[str, object], same: bool) -> Iterator[socket.socket]:
    if same:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.connect("\0" + str(card["unix"]))
        yield made
        return
    addresses, port = card["tcp"], card["port"]
    assert isinstance(addresses, list)
    assert isinstance(port, int)
    for address in addresses:
        with contextlib.suppress(OSError):
            yield socket.create_connection((address, port), timeout=_SECONDS_A_HANDSHAKE)


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


def _ready(listeners: list[socket.socket], deadline: float, missing: int, host: str) -> list[socket.socket]:
    ready, _, _ = select.select(listeners, [], [], max(deadline - time.monotonic(), 0))
    if not ready:
        raise PeerFailed(missing, "it did not connect in time", host=host)
    return ready
