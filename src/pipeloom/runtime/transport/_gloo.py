"""Tensors over gloo.

A send whose receive was posted before costs little; one that must wait for its receive wakes up threads on both ends,
and keeps them from each other's locks. So as many receives stay posted from each rank as came from it in the last step,
before any header tells what comes. What is posted fits whatever arrives in it: tensors are tagged with their size, and
those of one size from one rank arrive in the order of their headers. What nothing came for waits for the next step.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import Counter, deque
from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist

from pipeloom.runtime.transport._carrier import Part, private
from pipeloom.runtime.transport._tree import Spec, flat

_Work: TypeAlias = tuple[dist.Work, torch.Tensor]
_Lots: TypeAlias = "queue.SimpleQueue[tuple[list[_Work], threading.Lock] | None]"

MOST_BYTES = 64 << 20
"""More than this is neither kept by sends that are over, nor posted ahead."""
LEAST_BYTES = 16 << 10
"""What a receive that is posted ahead counts for at least."""
LARGEST_TAG = 1 << 30
"""The tag of all larger tensors. They are more than what is posted ahead."""

_Key: TypeAlias = tuple[int, int]
"""The rank that a tensor comes from, and its size in bytes."""
_CPU = torch.device("cpu")


class Gloo:
    """The tensors of one pipeline, in a group of its own."""

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        self._rank = group.rank()
        self._groups = {
            up: private(group, f"{name}/{'up' if up else 'down'}", range(group.size()), _CPU) for up in (True, False)
        }
        """By whether tensors go to a higher rank."""
        self._pending = _Pending()
        self._ahead: dict[_Key, deque[Part]] = {}
        """Receives that no header has come for, in order."""
        self._bytes = 0
        """What they count for."""
        self._last: Counter[_Key] = Counter()
        self._came: Counter[_Key] = Counter()
        """How many tensors came in the last step, and in this one."""

    def begin(self) -> None:
        self._came.clear()
        self._pending.forget()

    def send(self, rank: int, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.numel():
                copy = tensor.detach().to(_CPU, copy=True)
                data = copy if copy.is_contiguous() else flat(copy)
                group = self._groups[self._rank < rank]
                self._pending.add(group.send([data], rank, _tag(copy.nbytes)), copy)

    def receive(self, rank: int, specs: Sequence[Spec]) -> list[Part]:
        parts: list[Part] = []
        for spec in specs:
            if not spec.nbytes:
                parts.append((spec.allocate(_CPU), None))
                continue
            key = rank, spec.nbytes
            self._came[key] += 1
            memory, work = self._take(key)
            tensor = torch.empty(0, dtype=spec.dtype)
            parts.append((tensor.set_(memory.untyped_storage(), 0, spec.shape, spec.strides), work))
            self._post_ahead(key, min(self._last[key] - self._came[key], len(self._ahead.get(key, ())) + 1))
        return parts

    def finish(self, part: Part) -> None:
        _, work = part
        if work is not None:
            work.wait()

    def drop(self, parts: Sequence[Part]) -> None:
        for tensor, work in parts:
            if work is not None:
                self._pending.add(work, tensor)

    def flush(self, seconds: float) -> bool:
        if self._came:
            self._last, self._came = self._came, Counter()
            for key, count in self._last.items():
                self._post_ahead(key, count)
        return self._pending.flush(seconds)

    def abort(self) -> None:
        """A wait for a rank that has ended ends by itself, and one for another rank is for what that has sent."""

    def close(self) -> None:
        self._pending.close()
        self._ahead.clear()
        self._groups.clear()

    def _take(self, key: _Key) -> Part:
        ahead = self._ahead.get(key)
        if not ahead:
            return self._post(key)
        self._bytes -= max(key[1], LEAST_BYTES)
        part = ahead.popleft()
        if not ahead:
            del self._ahead[key]
        return part

    def _post_ahead(self, key: _Key, count: int) -> None:
        """Have so many receives posted, as far as memory allows."""
        cost = max(key[1], LEAST_BYTES)
        ahead = self._ahead.get(key, ())
        for _ in range(count - len(ahead)):
            if self._bytes + cost > MOST_BYTES:
                return
            self._ahead.setdefault(key, deque()).append(self._post(key))
            self._bytes += cost

    def _post(self, key: _Key) -> Part:
        rank, nbytes = key
        memory = torch.empty(nbytes, dtype=torch.uint8)
        group = self._groups[rank < self._rank]
        return memory, group.recv([memory], rank, _tag(nbytes))


def _tag(nbytes: int) -> int:
    return min(nbytes, LARGEST_TAG)


class _Pending:
    """Sends and dropped receives that may not be over, each with its memory. Over gloo they are over only for those who
    wait: here, a thread.

    It is given them at the end of a step, or when they hold much memory, as each wake-up of it takes time from compute.
    One that fails is over as well; whoever waits for the rank at its other end says why. What an exception from outside
    breaks off here holds no lock: neither do a `SimpleQueue` nor a lock have any of Python's code in them.
    """

    def __init__(self) -> None:
        self._recent: list[_Work] = []
        self._bytes = 0
        self._lots: _Lots | None = None
        self._over = threading.Lock()
        """Held until the last works that were handed over are over."""

    def add(self, work: dist.Work, data: torch.Tensor) -> None:
        self._recent.append((work, data))
        self._bytes += data.nbytes
        if self._bytes > MOST_BYTES:
            self._hand_over()

    def flush(self, seconds: float) -> bool:
        self._hand_over()
        over = self._over.acquire(timeout=seconds)
        if over:
            self._over.release()
        return over

    def forget(self) -> None:
        """Leave what is not over to its thread, which ends with it or with the group."""
        if not self.flush(0):
            self.close()

    def close(self) -> None:
        self._hand_over()
        if self._lots is not None:
            self._lots.put(None)
            self._lots, self._over = None, threading.Lock()

    def _hand_over(self) -> None:
        if self._recent:
            if self._lots is None:
                self._lots = queue.SimpleQueue()
                threading.Thread(target=_wait_for_all, args=[self._lots], name="pipeloom-gloo", daemon=True).start()
            self._over = threading.Lock()
            self._over.acquire()
            self._lots.put((self._recent, self._over))
            self._recent, self._bytes = [], 0


def _wait_for_all(lots: _Lots) -> None:
    while (lot := lots.get()) is not None:
        works, over = lot
        while works:
            with contextlib.suppress(RuntimeError):
                works[0][0].wait()
            del works[0]
        over.release()
