"""Messages to and from one rank, over a link."""

from __future__ import annotations

import contextlib
import ctypes
import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from pipeloom.errors import MessageError, PeerFailed, PipeloomError
from pipeloom.runtime.transport._interface import Tree, Watch
from pipeloom.runtime.transport._link import Link, Run
from pipeloom.runtime.transport._posted import Posted
from pipeloom.runtime.transport._rendezvous import Peer
from pipeloom.runtime.transport._signal import Signal, readable
from pipeloom.runtime.transport._tree import LARGEST_HEADER, Layout, Spec, read

_CPU = torch.device("cpu")
_BLOCK = 64
"""A message is the number of its call, what that is about, and the length of its header, 4 bytes each, the header,
zeros up to a multiple of this, and the tensors."""
_CALL = 8


class Connection:
    """Sends from the calling thread what the link takes at once, and the rest from `sender`'s."""

    def __init__(self, peer: Peer, link: Link, sender: Sender, device: torch.device, watch: Watch | None) -> None:
        self.link = link
        self.posted = Posted(self._receive)
        self._rank, self._host = peer.rank, peer.host
        self._sender, self._device, self._watch = sender, device, watch
        self._number, self._call = 0, bytes(_CALL)
        self._left: deque[_Left] = deque()
        self._first = self._got = b""
        self._unread = 0
        """How many bytes of the tensors of the current message are still to come."""
        self._broken = False
        self.torn = False
        """Whether what is known of the stream may be untrue. It is so while bytes are moved, and stays so if that is
        broken off from outside, as by Ctrl-C."""
        self._poll = select.poll()
        self._poll.register(link.hangup, 0)
        self._poll.register(link.readable, select.POLLIN)
        if watch is not None:
            self._poll.register(watch.fileno(), select.POLLIN)

    def begin(self, number: int, about: int) -> None:
        self._number, self._call = number, number.to_bytes(4, "little") + about.to_bytes(4, "little")
        self.posted.forget()

    def send(self, header: bytes, tensors: Sequence[torch.Tensor]) -> None:
        head = self._call + _framed(header)
        runs: list[Run] = [(head, len(head))]
        total = len(head)
        tensors = [tensor if tensor.is_cpu else tensor.cpu() for tensor in tensors]
        for tensor in tensors:
            nbytes = tensor.nbytes
            runs.append((tensor.data_ptr(), nbytes))
            total += nbytes
        taken = 0
        self.torn = True
        if not self._left:
            try:
                taken = self.link.take(runs)
            except OSError:
                self._broken = True
        if self._broken:
            raise self._failure()
        if taken < total:
            self._left.append(_Left(self._number, runs, taken, total - taken))
            self._sender.add(self)
        self.torn = False

    def drain(self) -> bool:
        """Send more of what is left, on the sender's thread; whether nothing is left."""
        try:
            while self._left:
                left = self._left[0]
                left.at += self.link.take([(left.address + left.at, left.nbytes - left.at)])
                if left.at < left.nbytes:
                    return False
                self._left.popleft()
        except OSError:
            self.hung_up()
        return True

    def hung_up(self) -> None:
        self._broken = True
        self._left.clear()

    def flush(self) -> None:
        while not self._sender.wait_for(self._has_left, 0.1):
            if self._watch is not None and readable([self._watch]):
                raise self._failure()
        if self._broken:
            raise self._failure()

    def ready(self) -> bool:
        """Whether the next message of this call has begun to arrive."""
        if self._unread:
            return False
        if not self._first:
            self.torn = True
            with contextlib.suppress(OSError):  # whoever waits will hear of it
                if any(fd == self.link.readable for fd, _ in self._poll.poll(0)):
                    self.link.refill()
            self._got += self.link.give_bytes(_BLOCK - len(self._got))
            if len(self._got) == _BLOCK:
                self._first, self._got = self._got, b""
            self.torn = False
        return self._first[:_CALL] == self._call

    def _has_left(self) -> bool:
        """Whether all of this call has; what an earlier one left behind does not matter."""
        return not self._left or self._left[-1].number < self._number

    def head(self) -> tuple[bool, Layout]:
        """Whether the next message is of this call, or left from an earlier one, and its layout. It waits for these,
        and may be called again after that ended in an error."""
        self.torn = True
        try:
            found = self._head()
        except PipeloomError:
            self.torn = False
            raise
        self.torn = False
        return found

    def _head(self) -> tuple[bool, Layout]:
        self._skip()
        if not self._first:
            self._first = self._get(_BLOCK)
        call = self._first[:_CALL]
        if call != self._call and int.from_bytes(call[:4], "little") >= self._number:  # that rank does something else
            raise self._failure()
        layout = self._read_header(self._first[_CALL:])
        self._first = b""
        return call == self._call, layout

    def _receive(self) -> Tree:
        """The next message of this call. A receive that ended in an error is taken up where it was."""
        self.torn = True
        try:
            while True:
                current, layout = self._head()
                self._unread = layout.nbytes
                if current:
                    break
            tensors = [self._receive_tensor(spec) for spec in layout.specs]
        except PipeloomError:
            self.torn = False
            raise
        self.torn = False
        return layout.build(tensors)

    def _read_header(self, first: bytes) -> Layout:
        layout = _of_one_block(first)
        if layout is None:
            length = int.from_bytes(first[:4], "little")
            if length > LARGEST_HEADER:
                raise MessageError(f"rank {self._rank} announces a header of {length} bytes, over {LARGEST_HEADER}")
            layout = read((first + self._get(_padded(length) - _BLOCK))[4 : 4 + length])
        return layout

    def _receive_tensor(self, spec: Spec) -> torch.Tensor:
        self.torn = False
        tensor = spec.allocate(_CPU)
        self.torn = True
        self._fill(tensor.data_ptr(), spec.nbytes)
        if self._device.type != "cpu":
            tensor = tensor.to(self._device)
        return tensor.requires_grad_() if spec.requires_grad else tensor

    def _get(self, count: int) -> bytes:
        data = self._got + self.link.give_bytes(count - len(self._got))
        while len(data) < count:
            self._got = data
            self._wait()
            data += self.link.give_bytes(count - len(data))
        self._got = b""
        return data

    def _fill(self, address: int, count: int) -> None:
        while count:
            try:
                given = self.link.give(address, count)
            except OSError:
                raise self._failure() from None
            address += given
            count -= given
            self._unread -= given
            if not given:
                self._wait()

    def _skip(self) -> None:
        """Read past the rest of a message that nobody wants any more."""
        if self._unread:
            unwanted = torch.empty(min(self._unread, 1 << 20), dtype=torch.uint8)
            while self._unread:
                self._fill(unwanted.data_ptr(), min(self._unread, unwanted.nbytes))

    def _wait(self) -> None:
        """Wait for something to arrive. What has come counts, also beside a failure: it was sent before."""
        try:
            if self.link.refill():
                return
            self.torn = False
            self._poll.poll()
            self.torn = True
            if self.link.refill():
                return
        except OSError:
            pass
        raise self._failure()

    def _failure(self) -> PipeloomError:
        if self._watch is not None:
            return self._watch.failure(self._rank)
        return PeerFailed(self._rank, "its connection ended", host=self._host)


def _padded(length: int) -> int:
    return -(-(_CALL + 4 + length) // _BLOCK) * _BLOCK


def _frame(header: bytes) -> bytes:
    return (len(header).to_bytes(4, "little") + header).ljust(_padded(len(header)) - _CALL, b"\0")


_frame_remembered = lru_cache(maxsize=1024)(_frame)


def _framed(header: bytes) -> bytes:
    return _frame_remembered(header) if len(header) <= 4096 else _frame(header)


@lru_cache(maxsize=1024)
def _of_one_block(first: bytes) -> Layout | None:
    """What the header in a message's first block describes, or None if it goes on."""
    length = int.from_bytes(first[:4], "little")
    return read(first[4 : 4 + length]) if length <= _BLOCK - _CALL - 4 else None


class _Left:
    """A copy of what a link did not take."""

    __slots__ = ("_buffer", "address", "at", "nbytes", "number")

    def __init__(self, number: int, runs: Sequence[Run], skip: int, nbytes: int) -> None:
        self.number = number
        self._buffer = torch.empty(nbytes, dtype=torch.uint8)
        self.address, self.at, self.nbytes = self._buffer.data_ptr(), 0, nbytes
        to = self.address
        for source, count in runs:
            if skip < count:
                rest = count - skip
                ctypes.memmove(to, source + skip if isinstance(source, int) else source[skip:], rest)
                to += rest
            skip = max(skip - count, 0)


class Sender:
    """A thread that sends what links did not take at once. It starts when there is something, and sleeps otherwise."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()  # entered instead of the condition, in whose code Ctrl-C could leave it locked
        self._changed = threading.Condition(self._lock)
        self._added: set[Connection] = set()
        self._closed = False
        self._wake = Signal()

    def add(self, connection: Connection) -> None:
        with self._lock:
            self._added.add(connection)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pipeloom-sender", daemon=True)
                self._thread.start()
        self._wake.set()

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until `condition`, which changes as links take what is left, or for so long."""
        with self._lock:
            return self._changed.wait_for(condition, seconds)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        self._wake.close()

    def _run(self) -> None:
        busy: set[Connection] = set()
        while True:
            with self._lock:
                if self._closed:
                    return
                busy |= self._added
                self._added.clear()
            busy = {connection for connection in busy if not connection.drain()}
            with self._lock:
                self._changed.notify_all()
            poll = select.poll()
            poll.register(self._wake, select.POLLIN)
            ends = {}
            for connection in busy:
                fd, events = connection.link.writable
                ends[connection.link.hangup] = connection
                poll.register(connection.link.hangup, 0)
                poll.register(fd, events)
            for fd, events in poll.poll():
                if fd == self._wake.fileno():
                    self._wake.clear()
                elif fd in ends and events & (select.POLLHUP | select.POLLERR):
                    ends[fd].hung_up()
