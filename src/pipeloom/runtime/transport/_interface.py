"""What the executor asks of a transport."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

import torch

from pipeloom.errors import PipeloomError

Plain: TypeAlias = bool | int | float | complex | str | bytes | None
Tree: TypeAlias = (
    "torch.Tensor | Plain | Sequence[Tree] | Mapping[str, Tree] | Mapping[int, Tree] | Mapping[str | int, Tree]"
)
"""What crosses an edge: lists, tuples and dicts, nested at will, of tensors and plain values."""

IN_A_MESSAGE = (
    "a call was broken off in the middle of a message, as by Ctrl-C or a signal, and what was in flight cannot be told "
    "apart after that; make a new pipeline or, on GPUs, start the ranks again"
)
"""Why no call can follow."""


class Pending(Protocol):
    """A receive that was posted."""

    def wait(self) -> Tree:
        """The value, in tensors that nothing else refers to, each requiring a gradient if its original did.

        Raises:
            PeerFailed: a rank of the pipeline failed, so the value may never come.
        """


class Transport(Protocol):
    """Moves values between the ranks of one pipeline. A rank is counted within the pipeline's group.

    The k-th send to a rank meets the k-th receive from it. One thread uses a transport.
    """

    def begin(self, number: int, about: int = 0) -> None:
        """A call of all ranks begins, whose number is the same on all and larger than any before.

        What is left of earlier calls that failed is forgotten, and none of it is received; nor is what a rank sends
        in this one when it is `about` something else there.

        Raises:
            PipelineError: no call can succeed after one that failed.
        """

    def send(self, rank: int, value: Tree) -> None:
        """Send `value`, detached. Returns after a copy at most: its tensors may be dropped or overwritten then.

        Raises:
            MessageError: `value` holds something that cannot cross; nothing was sent.
            PeerFailed: a rank of the pipeline failed.
        """

    def receive(self, rank: int) -> Pending:
        """Post the next receive from `rank`. Never blocks."""

    def flush(self) -> None:
        """Wait until all that was sent has left, as at the end of a step."""

    def close(self) -> None:
        """Let go of everything; what was not flushed may be lost. A second call does nothing."""


class Watch(Protocol):
    """Knows of failures anywhere in the pipeline."""

    def fileno(self) -> int:
        """A descriptor that polls readable once a failure is known."""

    def on_failure(self, call: Callable[[], None]) -> None:
        """Have `call` called, on another thread, each time a failure becomes known."""

    def failure(self, rank: int) -> PipeloomError:
        """The error to raise: what failed or, if a moment from now nothing is known, that `rank`'s connection ended."""
