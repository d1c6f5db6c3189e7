"""What a run says while it goes: a bar on the standard error, results on the standard output, metrics as JSON lines."""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class Report:
    """The voice of the rank that holds the loss. A context manager.

    Args:
        steps: how many steps the run has.
        tokens: how many tokens a step has.
        metrics: the file that gets a JSON object a line; "-" is the standard output, in place of the results.
    """

    def __init__(self, steps: int, tokens: int, metrics: str | None) -> None:
        self._steps, self._tokens, self._metrics = steps, tokens, metrics
        self._open = ExitStack()
        self._lines: TextIO | None = None
        self._since = time.perf_counter()
        self._trained = 0.0
        self._loss = float("nan")
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[speed]} tokens/s"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            disable=not console.is_terminal,
            redirect_stdout=sys.stdout.isatty(),
        )

    def __enter__(self) -> Self:
        if self._metrics == "-":
            self._lines = sys.stdout
        elif self._metrics is not None:
            self._lines = self._open.enter_context(open(self._metrics, "w", encoding="utf-8", buffering=1))
        self._open.enter_context(self._progress)
        self._task = self._progress.add_task("train", total=self._steps, loss="-", speed="-")
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def start(self, **values: object) -> None:
        """Say what is about to run."""
        self._write("start", **values)
        self._since = time.perf_counter()

    def step(self, step: int, loss: float, rate: float, norm: float) -> None:
        """Tell of a training step that has just ended."""
        seconds = time.perf_counter() - self._since
        self._since += seconds
        self._trained += seconds
        self._loss = loss
        speed = self._tokens / seconds
        self._progress.update(self._task, completed=step, loss=f"{loss:.4f}", speed=f"{speed:,.0f}")
        self._write(
            "step",
            step=step,
            loss=loss,
            learning_rate=rate,
            gradient_norm=norm,
            seconds=seconds,
            tokens_per_second=speed,
        )

    def evaluated(self, step: int, loss: float) -> None:
        """Tell of an evaluation that has just ended."""
        seconds = time.perf_counter() - self._since
        self._since += seconds
        self._say(f"step {step:>{len(str(self._steps))}}  loss {self._loss:.4f}  held-out loss {loss:.4f}")
        self._write("eval", step=step, loss=loss, seconds=seconds)

    def end(self) -> None:
        """Say what came of it all."""
        speed = self._steps * self._tokens / self._trained
        self._say(f"{self._steps} steps in {self._trained:.1f} s, {speed:,.0f} tokens/s, last loss {self._loss:.4f}")
        self._write("end", steps=self._steps, loss=self._loss, seconds=self._trained, tokens_per_second=speed)

    def _say(self, text: str) -> None:
        if self._metrics != "-":
            print(text, flush=True)

    def _write(self, event: str, **values: object) -> None:
        if self._lines is not None:
            print(json.dumps({"event": event, **values}), file=self._lines, flush=True)
