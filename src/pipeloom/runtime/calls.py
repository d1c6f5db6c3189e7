"""The calls of pipelines that a thread is in, and what is around them."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

from pipeloom.errors import DisagreementError, PeerFailed

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class _Thread(threading.local):
    def __init__(self) -> None:
        self.calls: list[tuple[Sequence[int], str]] = []
        """The innermost last: the ranks of each one's pipeline, and its name."""
        self.around: list[Generator[Any]] = []
        """What is around them, the innermost last."""
        self.depth = 0
        """How many times it is in a `whole_call`."""


_thread = _Thread()


def entered(ranks: Sequence[int], name: str) -> None:
    """This thread is in a call of a pipeline of these ranks, until its outermost `whole_call` ends."""
    _thread.calls.append((ranks, name))


def running(ranks: Sequence[int]) -> str | None:
    """The call of a pipeline of these ranks that this thread is in, if any."""
    return next((name for each, name in _thread.calls if each == ranks), None)


def around(
    function: Callable[_Arguments, Iterator[_Result]],
) -> Callable[_Arguments, contextlib.AbstractContextManager[_Result]]:
    """A `contextlib.contextmanager` that a `whole_call` around it ends where its `with` cannot.

    An exception from outside, as by Ctrl-C, can strike when the manager has begun and its `with` has not. Its end would
    run when nobody holds the exception any more: in the middle of whatever comes then, on any thread.
    """
    managed = contextlib.contextmanager(function)

    @functools.wraps(function)
    def make(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> contextlib.AbstractContextManager[_Result]:
        manager = managed(*args, **kwargs)
        if _thread.depth:
            _thread.around.append(manager.gen)
        return manager

    return make


def whole_call(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """`function`, a call that users make: when it ends, however that is, all that it has begun has ended.

    Where another rank is at fault the traceback ends here, as where this one waited says nothing.
    """

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        calls, managers = len(_thread.calls), len(_thread.around)
        try:
            _thread.depth += 1
            return function(*args, **kwargs)
        except BaseException as error:
            for each in reversed(_thread.around[managers:]):
                if inspect.getgeneratorstate(each) == inspect.GEN_SUSPENDED:
                    with contextlib.suppress(BaseException):
                        each.throw(error)
            if isinstance(error, (PeerFailed, DisagreementError)):
                raise error.with_traceback(None) from None
            raise
        finally:
            _thread.depth -= 1
            del _thread.calls[calls:]
            del _thread.around[managers:]

    return call
