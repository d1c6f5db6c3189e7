"""A stream of bytes to a process of another host, over TCP."""

from __future__ import annotations

import ctypes
import select
import socket
from collections.abc import Sequence

from pipeloom.runtime.transport._link import Run

_BUFFER = 64 << 10
_MOST_RUNS = 1024


class Stream:
    """A connected TCP socket."""

    def __init__(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._peer = peer
        self.readable = self.hangup = peer.fileno()
        self.writable = peer.fileno(), select.POLLOUT
        self._buffer = memoryview(bytearray(_BUFFER))
        self._start = self._end = 0

    def take(self, runs: Sequence[Run]) -> int:
        try:
            return self._peer.sendmsg([_memory(source, count) for source, count in runs[:_MOST_RUNS]])
        except BlockingIOError:
            return 0

    def give(self, address: int, count: int) -> int:
        if self._start == self._end and count >= _BUFFER:
            try:
                step = self._peer.recv_into(_memory(address, count))
            except BlockingIOError:
                return 0
            if not step:
                raise ConnectionResetError("the other end closed the connection")
            return step
        step = min(count, self._end - self._start)
        _memory(address, step)[:] = self._buffer[self._start : self._start + step]
        self._start += step
        return step

    def give_bytes(self, count: int) -> bytes:
        data = bytes(self._buffer[self._start : min(self._start + count, self._end)])
        self._start += len(data)
        return data

    def refill(self) -> bool:
        if self._start < self._end:
            return True
        try:
            count = self._peer.recv_into(self._buffer)
        except BlockingIOError:
            return False
        if not count:
            raise ConnectionResetError("the other end closed the connection")
        self._start, self._end = 0, count
        return True

    def close(self) -> None:
        self._peer.close()


def _memory(source: bytes | int, count: int) -> memoryview:
    if isinstance(source, bytes):
        return memoryview(source)[:count]
    return memoryview((ctypes.c_char * count).from_address(source)).cast("B")
