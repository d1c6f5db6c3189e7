"""How two ranks connect: where one listens, the ways there, and the proof that both belong to the group.

Both ends of a connection prove that they know a secret from the store, so no stranger gets in.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import os
import secrets
import socket
import struct
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

_NONCE, _PROOF = 16, 32
_HELLO = struct.Struct(f"<I{_NONCE}s")
_SECONDS_A_HANDSHAKE = 5.0

Card: TypeAlias = dict[str, object]
"""What a rank says of itself: its machine and name, or where it listens."""


def tcp_listener(several_hosts: bool) -> socket.socket:
    """A socket that may be reached from this host alone, or from any."""
    if not several_hosts:
        return socket.create_server(("127.0.0.1", 0))
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def addresses() -> list[str]:
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


def ways(card: Card) -> list[Callable[[], socket.socket]]:
    """The ways to connect to a rank, each of which may raise OSError."""
    if "unix" in card:
        return [partial(_unix_connection, "\0" + str(card["unix"]))]
    addresses, port = card["tcp"], card["port"]
    assert isinstance(addresses, list)
    assert isinstance(port, int)
    return [partial(socket.create_connection, (each, port), timeout=_SECONDS_A_HANDSHAKE) for each in addresses]


def _unix_connection(address: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.settimeout(_SECONDS_A_HANDSHAKE)  # a rank that is stopped accepts nobody, and its queue may be full
    try:
        made.connect(address)
    except OSError:
        made.close()
        raise
    return made


def prove(made: socket.socket, secret: bytes, rank: int, other: int) -> None:
    """Show to rank `other`, at the other end, that this is `rank`, and have it show that it is of the group.

    Raises:
        OSError: it does not.
    """
    made.settimeout(_SECONDS_A_HANDSHAKE)
    mine = secrets.token_bytes(_NONCE)
    made.sendall(_HELLO.pack(rank, mine))
    theirs, proof = _exactly(made, _NONCE), _exactly(made, _PROOF)
    if not hmac.compare_digest(proof, _proof(secret, b"accept", rank, other, mine, theirs)):
        raise OSError(errno.EACCES, "what listens there does not know the secret")
    made.sendall(_proof(secret, b"connect", rank, other, mine, theirs))
    made.settimeout(None)


def accept(listener: socket.socket, secret: bytes, rank: int, size: int) -> tuple[int, socket.socket] | None:
    """Who has come to rank `rank` of `size`, and its connection; None if it was no later rank of the group."""
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
