"""What a run says while it goes: progress on the standard error, results on the standard output, metrics to a file."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack
from datetime import timedelta
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from pipeloom._base import READER_LEFT
from pipeloom.errors import PipeloomError, counted

_PAUSE = 5.0
"""Seconds between two lines of progress where there is no terminal for a bar."""


class Report:
    """The voice of the rank that holds the loss. A context manager.

    Args:
        steps: how many steps the run has.
        tokens: how many tokens a step has.
        metrics: the file that gets a JSON object a line; "-" is the standard output, in place of the results.
        done: how many steps were done when the run was saved that goes on now; what the file holds is kept then.
    """

    def __init__(self, steps: int, tokens: int, metrics: str | None, done: int = 0) -> None:
        self._steps, self._tokens, self._metrics, self._done = steps, tokens, metrics, done
        self._open = ExitStack()
        self._lines: TextIO | None = None
        self._status = ""
        self._loss = float("nan")
        self._training = 0.0
        self._terminal = Console(stderr=True).is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            console=Console(stderr=True),
            disable=not self._terminal,
            redirect_stdout=sys.stdout.isatty(),
        )

    def __enter__(self) -> Self:
        if self._metrics == "-":
            self._lines = sys.stdout
        elif self._metrics is not None:
            self._lines = self._open.enter_context(open(self._metrics, "a" if self._done else "w", encoding="utf-8"))
        self._open.enter_context(self._progress)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def start(self, **values: object) -> None:
        """Say what is about to run, and start the clock."""
        self._write("start", **values)
        self._bar = self._progress.add_task("", total=self._steps)
        self._began = self._since = self._said = time.perf_counter()

    def step(self, step: int, loss: float, rate: float, norm: float) -> None:
        """Tell of a training step that has just ended."""
        seconds = self._lap()
        self._training += seconds
        self._loss = loss
        speed = self._tokens / seconds
        left = timedelta(seconds=round((self._since - self._began) / (step - self._done) * (self._steps - step)))
        self._status = f"{speed:,.0f} tokens/s  {left} left"
        line = f"step {step}/{self._steps}  loss {loss:.4f}  {self._status}"
        self._progress.update(self._bar, completed=step, description=line)
        if not self._terminal and self._since - self._said >= _PAUSE:
            self._said = self._since
            print(line, file=sys.stderr, flush=True)
        self._write(
            "step",
            step=step,
            loss=loss,
            learning_rate=rate,
            gradient_norm=norm,
            seconds=seconds,
            tokens_per_second=speed,
        )

    def verified(self, step: int, loss: float, expected: float, *, equal: bool) -> None:
        """Tell of the same step in one process: whether the losses of all microbatches were equal to the bit."""
        seconds = self._lap()
        says = "equal to the bit" if equal else "NOT equal"
        self._say(f"step {step}/{self._steps}  loss {loss:.8f}  one process {expected:.8f}  {says}")
        self._write("verify", step=step, loss=loss, one_process=expected, equal=equal, seconds=seconds)

    def evaluated(self, step: int, loss: float) -> None:
        """Tell of an evaluation that has just ended."""
        seconds = self._lap()
        self._say(f"step {step}/{self._steps}  loss {self._loss:.4f}  held-out loss {loss:.4f}  {self._status}")
        self._write("eval", step=step, loss=loss, seconds=seconds)

    def end(self) -> None:
        """Say what came of it all."""
        steps = self._steps - self._done
        speed = steps * self._tokens / self._training
        self._say(f"trained {counted(steps, 'step')} in {self._training:.1f} s, {speed:,.0f} tokens/s")
        self._write("end", steps=steps, loss=self._loss, seconds=self._training, tokens_per_second=speed)

    def _lap(self) -> float:
        before, self._since = self._since, time.perf_counter()
        return self._since - before

    def _say(self, text: str) -> None:
        if self._metrics != "-":
            _print(text, sys.stdout)

    def _write(self, event: str, **values: object) -> None:
        if self._lines is not None:
            _print(json.dumps({"event": event, **values}, default=str), self._lines)


def _print(line: str, file: TextIO) -> None:
    try:
        print(line, file=file, flush=True)
    except OSError as error:
        # What is still buffered would be written, and fail, once more when the file is closed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
        if isinstance(error, BrokenPipeError):
            os._exit(READER_LEFT)  # at once, so that no other rank hears of an error to tell of
        raise PipeloomError(f"the results cannot be written: {error.strerror}") from None
