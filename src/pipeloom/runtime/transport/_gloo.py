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

_Works: TypeAlias = "queue.Queue[list[tuple[dist.Work, torch.Tensor]] | None]"

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
        self._up, self._down = (private(group, f"{name}/{way}", range(group.size()), _CPU) for way in ("up", "down"))
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
                group = self._up if self._rank < rank else self._down
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
        del self._up, self._down

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
        group = self._up if rank < self._rank else self._down
        return memory, group.recv([memory], rank, _tag(nbytes))


def _tag(nbytes: int) -> int:
    return min(nbytes, LARGEST_TAG)


class _Pending:
    """Sends and dropped receives that may not be over, each with its memory. Over gloo they are over only for those who
    wait: here, a thread.

    It is given them at the end of a step, or when they hold much memory, as each wake-up of it takes time from compute.
    One that fails is over as well; whoever waits for the rank at its other end says why.
    """

    def __init__(self) -> None:
        self._recent: list[tuple[dist.Work, torch.Tensor]] = []
        self._bytes = 0
        self._works: _Works | None = None

    def add(self, work: dist.Work, data: torch.Tensor) -> None:
        self._recent.append((work, data))
        self._bytes += data.nbytes
        if self._bytes > MOST_BYTES:
            self._hand_over()

    def flush(self, seconds: float) -> bool:
        works = self._hand_over()
        if works is None:
            return True
        with works.all_tasks_done:
            if works.unfinished_tasks:
                works.all_tasks_done.wait(seconds)
            return not works.unfinished_tasks

    def forget(self) -> None:
        """Leave what is not over to its thread, which ends with it or with the group."""
        if not self.flush(0):
            self.close()

    def close(self) -> None:
        works = self._hand_over()
        if works is not None:
            works.put(None)
            self._works = None

    def _hand_over(self) -> _Works | None:
        if self._recent:
            if self._works is None:
                self._works = queue.Queue()
                threading.Thread(target=_wait_for_all, args=[self._works], name="pipeloom-gloo", daemon=True).start()
            self._works.put(self._recent)
            self._recent, self._bytes = [], 0
        return self._works


def _wait_for_all(works: _Works) -> None:
    while (sent := works.get()) is not None:
        while sent:
            with contextlib.suppress(RuntimeError):
                sent[0][0].wait()
            del sent[0]
        works.task_done()
