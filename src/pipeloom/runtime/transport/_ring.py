"""A stream of bytes to another process of this host, through shared memory.

Each direction is a ring with two eventfds: the writer adds to the first how many bytes it put in, the reader adds to
the second how many it took out. So there is no position in shared memory to disagree about, the kernel's own locks
order the bytes on any processor, and to wait is to poll.

A writer that finds its ring empty begins again at the start, so that a ring takes no more memory than was on its way at
once, and small messages stay in the processor's cache. It counts these rewinds in shared memory, before it tells of the
bytes that follow; a reader looks there when bytes come after all before were given back, as at no other time there can
have been a rewind.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import select
import socket
from collections.abc import Sequence

from pipeloom.runtime.transport._link import Run

RING = 64 << 20
"""Bytes of one direction. Memory is taken only as it is used."""
REWIND = 256 << 10
"""From here on a writer looks whether it can begin again."""
CHUNK = 1 << 20
"""After so many bytes the reader is told, so that it copies while the writer does."""

_SIZE = 2 * RING + mmap.PAGESIZE


def available() -> bool:
    """Whether this system has what rings are made of."""
    try:
        os.close(_memory())
        os.close(_event())
    except (AttributeError, OSError):
        return False
    return True


def _memory() -> int:
    memory = os.memfd_create("pipeloom", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, _SIZE)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return memory


def _event() -> int:
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


class Ring:
    """Both directions between this process and the one at the other end of a connected Unix socket.

    One of them `creates` the memory. The socket stays open only so that the end of the other process is seen.
    """

    def __init__(self, peer: socket.socket, *, creates: bool) -> None:
        self._peer = peer
        self.hangup = peer.fileno()
        if creates:
            fds = [_memory(), *(_event() for _ in range(4))]
            socket.send_fds(peer, [b"r"], fds)
        else:
            _, fds, flags, _ = socket.recv_fds(peer, 1, 5, socket.MSG_CMSG_CLOEXEC)
            if flags & socket.MSG_CTRUNC:
                for each in fds:
                    os.close(each)
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            if len(fds) != 5:
                raise ConnectionResetError("the other end closed before it shared its memory")
        memory, *self._events = fds
        self._map = mmap.mmap(memory, _SIZE)
        os.close(memory)
        first, second = self._events[:2], self._events[2:]
        (self._put, self._space), (self.readable, self._taken) = (first, second) if creates else (second, first)
        self._anchor = ctypes.c_char.from_buffer(self._map)
        start = ctypes.addressof(self._anchor)
        self._out, self._in = (start, start + RING) if creates else (start + RING, start)
        self._write_at = self._read_at = 0
        self._free, self._filled, self._owed = RING, 0, 0
        one, other = (ctypes.c_uint64.from_buffer(self._map, 2 * RING + 64 * index) for index in range(2))
        self._rewinds, self._their_rewinds = (one, other) if creates else (other, one)
        self._rewinds_seen = 0

    @property
    def writable(self) -> tuple[int, int]:
        return self._space, select.POLLIN

    def take(self, runs: Sequence[Run]) -> int:
        if self._write_at >= REWIND and self._look_for_space() == RING:
            self._write_at = 0
            self._rewinds.value += 1
        total = untold = 0
        for source, count in runs:
            done = 0
            while done < count:
                step = count - done
                if step > CHUNK:
                    step = CHUNK
                if step > self._free and step > self._look_for_space():
                    step = self._free
                if step > RING - self._write_at:
                    step = RING - self._write_at
                if not step:
                    break
                rest = source if not done else source + done if isinstance(source, int) else source[done:]
                ctypes.memmove(self._out + self._write_at, rest, step)
                self._write_at = (self._write_at + step) % RING
                self._free -= step
                done += step
                untold += step
                if untold >= CHUNK:
                    os.eventfd_write(self._put, untold)
                    untold = 0
            total += done
            if done < count:
                break
        if untold:
            os.eventfd_write(self._put, untold)
        return total

    def _look_for_space(self) -> int:
        try:  # noqa: SIM105 - suppress() would take longer than the read
            self._free += os.eventfd_read(self._space)
        except BlockingIOError:
            pass
        return self._free

    def give(self, address: int, count: int) -> int:
        step = min(count, self._filled, RING - self._read_at)
        ctypes.memmove(address, self._in + self._read_at, step)
        self._advance(step)
        return step

    def give_bytes(self, count: int) -> bytes:
        step = min(count, self._filled, RING - self._read_at)
        data = ctypes.string_at(self._in + self._read_at, step)
        self._advance(step)
        return data

    def _advance(self, step: int) -> None:
        self._read_at = (self._read_at + step) % RING
        self._filled -= step
        self._owed += step
        if self._owed >= RING // 4 or (self._owed >= REWIND // 2 and not self._filled):
            os.eventfd_write(self._taken, self._owed)
            self._owed = 0

    def refill(self) -> bool:
        all_given_back = not self._filled and not self._owed
        try:
            self._filled += os.eventfd_read(self.readable)
        except BlockingIOError:
            return self._filled > 0
        if all_given_back and self._rewinds_seen != self._their_rewinds.value:
            self._rewinds_seen = self._their_rewinds.value
            self._read_at = 0
        return True

    def close(self) -> None:
        del self._anchor, self._rewinds, self._their_rewinds
        self._map.close()
        for event in self._events:
            os.close(event)
        self._peer.close()
