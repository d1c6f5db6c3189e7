"""Small messages between all ranks of a group, each from and to each, served by a thread of their own."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch.distributed as dist

from pipeloom.errors import MessageError
from pipeloom.runtime.transport._interface import Tree
from pipeloom.runtime.transport._rendezvous import Peer, meet
from pipeloom.runtime.transport._signal import Signal
from pipeloom.runtime.transport._tree import pack, read

Message: TypeAlias = Mapping[str, Any]

BYE: Message = {"kind": "bye"}
_SECONDS_A_BEAT = 0.5
_LARGEST_MESSAGE = 1 << 20


@dataclass(slots=True)
class _Line:
    """The connection to one other rank. `left` once it said goodbye, `ended` once nothing more comes."""

    peer: Peer
    heard: float
    received: bytearray = field(default_factory=bytearray)
    leaving: bytearray = field(default_factory=bytearray)
    left: bool = False
    ended: bool = False
    torn: bool = False
    """Whether nobody knows how much of `leaving` has left: while it is sent, and after that was broken off."""


class Lines:
    """The connections of this rank.

    Args:
        group: the ranks.
        name: under which they meet.
        deadline: seconds of silence after which a rank counts as lost.
        beat: what is said every now and then, so that others know of this rank.
        hear: called with a rank and its message. A message is a dict of plain values with a "kind".
        lose: called with a rank and the reason, when it is lost without having said goodbye.

    All are called with `lock` held, and whoever waits for `changed` is notified afterwards.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        name: str,
        deadline: float,
        beat: Callable[[], Message],
        hear: Callable[[int, Message], None],
        lose: Callable[[int, str], object],
    ) -> None:
        # What is entered is the lock: that of a condition is Python code, and Ctrl-C in it could leave it locked.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._deadline, self._beat, self._hear, self._lose = deadline, beat, hear, lose
        now = time.monotonic()
        self._lines = {rank: _Line(peer, now) for rank, peer in meet(group, name).items()}
        for line in self._lines.values():
            line.peer.socket.setblocking(False)
        self._wake = Signal()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="pipeloom-control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def __len__(self) -> int:
        """How many other ranks there are."""
        return len(self._lines)

    def host(self, rank: int) -> str:
        return self._lines[rank].peer.host

    def ended(self, rank: int) -> bool:
        """Whether nothing more can come from `rank`."""
        return self._lines[rank].ended

    def left(self, rank: int) -> bool:
        """Whether `rank` said goodbye."""
        return self._lines[rank].left

    def say(self, message: Message) -> None:
        """Send `message` to all. Never blocks."""
        data = _framed(message)
        with self.lock:
            for line in self._lines.values():
                self._add(line, data)
            if any(line.leaving for line in self._lines.values()):
                self._wake.set()

    def wait_until_said(self, seconds: float) -> None:
        """Wait until all that was said has left, for so many seconds at most."""
        with self.lock:
            self.changed.wait_for(
                lambda: not any(line.leaving and not line.ended for line in self._lines.values()), seconds
            )

    def close(self) -> None:
        with self.lock:
            self._closed = True
        self._wake.set()
        self._thread.join()
        for line in self._lines.values():
            line.peer.socket.close()
        self._wake.close()

    def _add(self, line: _Line, data: bytes) -> None:
        if not line.ended:
            line.leaving += data
            self._push(line)

    def _push(self, line: _Line) -> None:
        if line.torn:
            with contextlib.suppress(OSError):
                line.peer.socket.shutdown(socket.SHUT_RDWR)
            self._end(line, "a message to it was broken off in the middle, as by Ctrl-C or a signal")
            return
        line.torn = True
        with contextlib.suppress(OSError):
            while line.leaving:
                del line.leaving[: line.peer.socket.send(line.leaving)]
        line.torn = False

    def _run(self) -> None:
        awake = said = time.monotonic()
        beat = min(_SECONDS_A_BEAT, self._deadline / 4)
        lines = {line.peer.socket.fileno(): line for line in self._lines.values()}
        while True:
            poll = select.poll()
            poll.register(self._wake, select.POLLIN)
            with self.lock:
                for fd, line in lines.items():
                    if not line.ended:
                        poll.register(fd, select.POLLIN | (select.POLLOUT if line.leaving else 0))
            ready = poll.poll(max(said + beat - time.monotonic(), 0) * 1000)
            with self.lock:
                if self._closed:
                    return
                now = time.monotonic()
                if now - awake > self._deadline / 2:  # it was this process that slept
                    for line in lines.values():
                        line.heard = now
                awake = now
                for fd, _ in ready:
                    if fd == self._wake.fileno():
                        self._wake.clear()
                    else:
                        self._serve(lines[fd], now)
                if now - said >= beat:
                    self.say(self._beat())
                    said = now
                self._look_for_silence(now)
                self.changed.notify_all()

    def _serve(self, line: _Line, now: float) -> None:
        self._push(line)
        try:
            data = line.peer.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        line.heard = now
        line.received += data
        try:
            while (message := _next(line.received)) is not None:
                if message["kind"] == "bye":
                    line.left = True
                else:
                    self._hear(line.peer.rank, message)
        except (MessageError, TypeError, LookupError) as error:
            self._end(line, f"what it sent on the control channel cannot be read: {error}")
        if not data:
            self._end(line, "its process ended or its connection was lost")

    def _look_for_silence(self, now: float) -> None:
        for line in self._lines.values():
            if now - line.heard > self._deadline and not line.left:
                reason = (
                    f"nothing was heard from it for {self._deadline:g} s (deadline): it was stopped, is out of reach, "
                    "or one call kept Python from running other threads"
                )
                self._add(line, _framed({"kind": "lost", "cause": reason}))
                self._end(line, reason)

    def _end(self, line: _Line, reason: str) -> None:
        if not line.ended:
            line.ended = True
            if not line.left:
                self._lose(line.peer.rank, reason)


def _framed(message: Message) -> bytes:
    header, tensors = pack(message)
    if tensors:
        raise MessageError(f"a tensor in a message of plain values: {message}")
    return len(header).to_bytes(4, "little") + header


def _next(received: bytearray) -> Message | None:
    """Take the first message out of `received`, if it is whole."""
    length = int.from_bytes(received[:4], "little") if len(received) >= 4 else 0
    if length > _LARGEST_MESSAGE:
        raise MessageError(f"a message of {length} bytes")
    if len(received) < max(4 + length, 5):
        return None
    message: Tree = read(bytes(received[4 : 4 + length])).build(())
    del received[: 4 + length]
    if not isinstance(message, dict):
        raise MessageError(f"a {type(message).__name__} where a dict was due")
    return message
