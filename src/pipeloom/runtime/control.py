"""The control channel: who is in which call with what, and who failed.

Every rank of a pipeline has a connection to every other, served by a thread of its own. At the start of a call, such as
a step, each says hello to all with what must be equal everywhere and what others may ask for; nobody waits for a hello
unless to use a value in it. A rank that fails tells all; one whose connection ends without a goodbye, or from which
nothing is heard past a deadline, has failed as well. Whoever waits for a message then raises, with the name of the rank
that failed.

Calls are numbered by each rank, and a failure belongs to the number of a call. A rank that is still in an earlier call
finishes that first. After a step that failed on all ranks the next may succeed; so it may where some had finished it,
but have only gathered since. If one has begun another step meanwhile, none can.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TypeAlias

import torch.distributed as dist

from pipeloom.errors import DisagreementError, PeerFailed, PipeloomError
from pipeloom.runtime.failure import cause, shortened_traceback
from pipeloom.runtime.lines import BYE, Lines, Message
from pipeloom.runtime.order import Order, Place, order_of
from pipeloom.runtime.transport._interface import Plain
from pipeloom.runtime.transport._rendezvous import unique
from pipeloom.runtime.transport._signal import Signal

Fields: TypeAlias = Mapping[str, Plain]

_LONGEST_TEXT = 20_000
_TELLING = 1.0
"""Seconds that a failing rank stays to tell the others, and that one which lost a connection waits to be told why."""
_LEFT = "it closed its pipeline or ended while others still needed it"
_ENDED = "its process ended or its connection was lost"


@dataclass(slots=True)
class _Failure:
    """`number` is the call it belongs to; None if no later one can succeed. `heard` if another rank told all of it."""

    number: int | None
    error: Fields
    heard: bool = False

    def make(self) -> PeerFailed | DisagreementError:
        if "disagreement" in self.error:
            return DisagreementError(str(self.error["disagreement"]))
        return PeerFailed(**self.error)  # type: ignore[arg-type]  # these are its arguments


class Control:
    """The control channel of one pipeline; every rank of `group` makes one, in the same order.

    Args:
        group: the ranks of the pipeline.
        deadline: seconds of silence after which a rank counts as failed. A rank is silent while it is stopped, its
            machine cannot be reached, or one call keeps Python from running its other threads.
    """

    def __init__(self, group: dist.ProcessGroup, *, deadline: float = 30.0) -> None:
        self.rank = group.rank()
        self.host = socket.gethostname()
        self.name = unique(group, "pipeline")
        """What tells this pipeline from others of these ranks."""
        self._order = order_of(group.group_name)
        self._announce()
        self._lines = Lines(group, f"{self.name}/control", deadline, self._beat, self._hear, self._lose)
        self.used: Callable[[], bool] = lambda: False
        """Whether this rank has changed its weights since its last step was done."""
        self.doing: Callable[[], str] = lambda: "making the pipeline"
        """What this rank is doing; called on the thread of this channel."""
        self._doings: dict[int, tuple[float, str]] = {}
        """When a rank last said what it was doing, and that."""
        self._lock, self._changed = self._lines.lock, self._lines.changed
        self.number = self._step = self._settled = 0  # calls are numbered from 1
        self._raised = self._ringing = self._closed = False
        self._failures: list[_Failure] = []
        self._calls: list[Callable[[], None]] = []
        self._hellos: dict[int, dict[int, tuple[Fields, Fields]]] = {}
        self._alarm = Signal()
        self._lines.start()
        _OPEN.add(self)

    def _announce(self) -> None:
        """Say on the other pipelines of these ranks that this one is being made, as it has no connections yet."""
        place = self.name, "Pipeline"
        number, crossed = self._order.call(place)
        for other in list(_OPEN):
            if other._order is self._order and number is not None:
                other._lines.say({"kind": "making", "order": number, "place": list(place)})
        if crossed is not None:
            raise DisagreementError(crossed)

    def begin(self, equal: Fields, own: Fields, *, step: bool = True) -> None:
        """Enter the next call and say so to all. Does not wait for anybody.

        Args:
            equal: what must be the same on every rank that knows it; None where this one does not.
            own: what others may ask this rank for.
            step: whether ranks may differ if this call follows one that failed elsewhere; if not, it only gathers what
                that one has left.

        Raises:
            PeerFailed: a rank failed, and this one has not raised for it yet, or no call can succeed any more.
            DisagreementError: likewise, as ranks disagree.
        """
        with self._lock:
            if self._raised:
                self._settle()
            self.number += 1
            if step:
                self._step = self.number
            self._hellos = {number: said for number, said in self._hellos.items() if number >= self.number}
            self._hellos.setdefault(self.number, {})[self.rank] = (equal, own)
            order, crossed = self._order.call((self.name, str(equal.get("call"))))
            hello = {"kind": "hello", "number": self.number, "order": order, "equal": dict(equal), "own": dict(own)}
            self._lines.say(hello)
            self._compare()
            if crossed is not None:
                self._add(_Failure(self.number, {"disagreement": crossed}))
            self._ring()
            late = self._known()
        if late is not None:
            error = self.failure(self.rank)
            self.fail(error)
            raise error

    def _settle(self) -> None:
        """Go on after a failure, with a number that follows it on all ranks.

        One that had finished the failed call may be in the next, but no further, as that needs all ranks.
        """
        numbers = [each.number for each in self._failures if each.number is not None]
        self.number = self._settled = min(numbers, default=self.number) + 1
        self._raised = False
        self._failures = [each for each in self._failures if each.number is None or each.number > self._settled]

    def _torn(self, failure: _Failure) -> _Failure:
        """What a failure becomes of a step that was finished here: what followed may have made ranks differ."""
        reason = (
            f"this was in a step that rank {self.rank} had finished by then, so that it may hold other parameters now "
            "than the ranks that failed; no step can follow. Load a checkpoint into a new "
            "pipeline. To hear of a failure before you use the gradients, call pipe.loss() or clip_grad_norm_ after "
            "each step"
        )
        key = "disagreement" if "disagreement" in failure.error else "cause"
        torn = _Failure(None, {**failure.error, key: f"{failure.error[key]!s}; {reason}"})
        self._failures.remove(failure)
        self._fail(torn)
        return torn

    def value(self, rank: int, name: str) -> Plain:
        """What `rank` said as `name` in this call's hello, waiting for it if need be.

        Raises:
            PeerFailed: a rank failed, or `rank` left.
            DisagreementError: ranks disagree.
        """
        with self._lock:
            while rank not in self._hellos[self.number]:
                if self._known() is not None or self._lines.ended(rank):
                    raise self.failure(rank)
                self._changed.wait()
            said = self._hellos[self.number][rank][1]
            if name not in said:  # that rank is in another call
                raise self.failure(rank)
            return said[name]

    def heard(self) -> bool:
        """Whether a failure is known or, if not, becomes so in a moment."""
        with self._lock:
            return self._changed.wait_for(lambda: self._known() is not None, _TELLING)

    def step_failed(self) -> bool:
        """Whether the last step is known to have failed."""
        with self._lock:
            return any(each.number == self._step for each in self._failures)

    def check(self) -> None:
        """Raise if it is known that this call failed elsewhere."""
        if self._ringing:
            raise self.failure(self.rank)

    def fail(
        self,
        error: BaseException,
        *,
        stage: int | None = None,
        microbatch: int | None = None,
        action: str | None = None,
        rows: str = "",
    ) -> None:
        """Tell every rank that this call failed here. An error that came from another rank is passed on as it is.

        Args:
            error: what was raised.
            stage: the stage that was at work.
            microbatch: the microbatch it worked on.
            action: the action, as the schedule writes it.
            rows: a few rows of the schedule around the action.
        """
        with self._lock:
            known = self._known()
            if isinstance(error, PeerFailed | DisagreementError) and known is not None:
                if known.heard and (known.number is None or known.number >= self._step):
                    return
                told = known.error
            else:
                told = self._describe(error, stage, microbatch, action, rows)
            self._fail(_Failure(self.number, told))

    def fail_for_good(self, error: BaseException) -> None:
        """Tell every rank that this one ends because of `error`, so that no later call can succeed either."""
        with self._lock:
            self._fail(_Failure(None, self._describe(error, None, None, None, "")))

    def fileno(self) -> int:
        """Polls readable while it is known that the call failed."""
        return self._alarm.fileno()

    def on_failure(self, call: Callable[[], None]) -> None:
        """Have `call` called, mostly on the thread of this channel, each time a failure becomes known."""
        self._calls.append(call)

    def failure(self, rank: int) -> PeerFailed | DisagreementError:
        """The error to raise: what failed or, if a moment from now nothing is known, that `rank`'s connection ended."""
        with self._lock:
            self.heard()
            self._order.end()
            known = self._known()
            if known is None:
                known = self._lose(rank, _LEFT if self._lines.left(rank) else _ENDED)
            if known.number is not None and (
                known.number < self._step or (known.number == self._step < self.number and self.used())
            ):
                known = self._torn(known)
            if "disagreement" in known.error and not known.heard:
                # Once all have said hello, all say the same.
                self._changed.wait_for(lambda: len(self._hellos[self.number]) > len(self._lines), _TELLING / 2)
                known.error = {"disagreement": self._disagreement() or known.error["disagreement"]}
            self._raised = True
            return known.make()

    def close(self) -> None:
        """Say goodbye and let go of everything. A second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._lines.say(BYE)
            self._lines.wait_until_said(_TELLING)
            self._closed = True
        self._order.leave(self.name)
        self._lines.close()
        _OPEN.discard(self)
        self._alarm.close()

    def _known(self) -> _Failure | None:
        """The failure that concerns the call this rank is in."""
        return next((each for each in self._failures if each.number is None or each.number <= self.number), None)

    def _add(self, failure: _Failure) -> _Failure:
        if failure.number is None or failure.number > self._settled:
            self._failures.append(failure)
            self._ring()
            self._changed.notify_all()
        return failure

    def _ring(self) -> None:
        known = self._known() is not None
        if known and not self._ringing:
            self._alarm.set()
            for call in self._calls:
                call()
        elif self._ringing and not known:
            self._alarm.clear()
        self._ringing = known

    def _fail(self, failure: _Failure) -> None:
        if self._closed:
            return
        self._raised = True
        self._order.end()
        self._add(failure)
        self._lines.say({"kind": "failed", "number": failure.number, "error": failure.error})
        self._lines.wait_until_said(_TELLING)

    def _describe(
        self, error: BaseException, stage: int | None, microbatch: int | None, action: str | None, rows: str
    ) -> Fields:
        if isinstance(error, PeerFailed):
            return error.fields
        if isinstance(error, DisagreementError):
            return {"disagreement": str(error)}
        refusal = isinstance(error, PipeloomError)  # it says all there is to say
        return {
            "rank": self.rank,
            "cause": cause(error)[:_LONGEST_TEXT],
            "host": self.host,
            "stage": stage,
            "microbatch": microbatch,
            "action": action,
            "rows": rows,
            "traceback": "" if refusal else shortened_traceback(error)[-_LONGEST_TEXT:],
        }

    def _compare(self) -> None:
        """Look whether ranks disagree about this call."""
        said = self._disagreement()
        if said is not None:
            self._add(_Failure(self.number, {"disagreement": said}))

    def _disagreement(self) -> str | None:
        said = sorted(self._hellos.get(self.number, {}).items())
        for name in said[0][1][0] if said else ():
            ranks: dict[Plain, list[int]] = {}
            for rank, (equal, _) in said:
                if equal.get(name) is not None:
                    ranks.setdefault(equal[name], []).append(rank)
            if len(ranks) > 1:
                found = [
                    f"{value!r} on rank{'s' * (len(on) > 1)} {', '.join(map(str, on))}" for value, on in ranks.items()
                ]
                return (
                    f"call {self.number}: {name} is {' and '.join(found)}; "
                    "all ranks of a pipeline make the same calls with the same settings"
                )
        return None

    def _hear(self, rank: int, message: Message) -> None:
        if message["kind"] == "hello":
            self._hellos.setdefault(message["number"], {})[rank] = (message["equal"], message["own"])
            self._hear_of(rank, f"at the beginning of {message['equal'].get('call')}")
            self._compare()
            self._hear_order(rank, message["order"], (self.name, str(message["equal"].get("call"))))
        elif message["kind"] == "beat":
            self._hear_of(rank, str(message["doing"]))
        elif message["kind"] == "making":
            self._hear_order(rank, message["order"], tuple(message["place"]))
        elif message["kind"] == "failed":
            self._add(_Failure(message["number"], message["error"], heard=True))
        elif message["kind"] == "lost":  # others go on without this rank
            self._add(_Failure(None, {"rank": self.rank, "cause": message["cause"], "host": self.host}))

    def _hear_order(self, rank: int, number: int | None, place: Place) -> None:
        crossed = self._order.hear(rank, number, place) if number is not None else None
        if crossed is not None:  # on a thread of its own, as that of the other pipeline may be about to come here
            threading.Thread(target=_disagree, args=[self._order, *crossed], daemon=True).start()

    def _hear_of(self, rank: int, doing: str) -> None:
        self._doings[rank] = time.monotonic(), doing

    def _beat(self) -> Message:
        return {"kind": "beat", "doing": self.doing()}

    def _lose(self, rank: int, cause: str) -> _Failure:
        if rank in self._doings:
            when, doing = self._doings[rank]
            cause += f"; when it was last heard of, {time.monotonic() - when:.1f} s before, it was {doing}"
        return self._add(_Failure(None, {"rank": rank, "cause": cause, "host": self._lines.host(rank)}))


def _disagree(order: Order, name: str, wrong: str) -> None:
    """End the call that the pipeline of this name is in."""
    for control in list(_OPEN):
        if control._order is order and control.name == name:
            with control._lock:
                control._add(_Failure(control.number, {"disagreement": wrong}))


_OPEN: weakref.WeakSet[Control] = weakref.WeakSet()


def leave(error: BaseException | None = None) -> None:
    """Say goodbye on every open channel as this process ends or, given what ends it, say that.

    Runs by itself where a process ends as Python does, by an uncaught exception or without one; whoever ends it by
    other means, as `os._exit`, calls this before.
    """
    for control in list(_OPEN):
        if error is not None:
            control.fail_for_good(error)
        control.close()


def _leave_by_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    leave(error)
    _hook(kind, error, trace)


def _leave_at_exit() -> None:
    leave(getattr(sys, "last_value", None))  # what ended this process, where another hook has taken ours out


_hook, sys.excepthook = sys.excepthook, _leave_by_exception
atexit.register(_leave_at_exit)
os.register_at_fork(after_in_child=_OPEN.clear)
