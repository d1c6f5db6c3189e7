"""When each action of a run started and ended: on the processor's clock, or on the GPU's."""

from __future__ import annotations

import time
from typing import Any

import torch

UNTIMED = -1
"""The number of what is no action, or notes its times by itself."""


class Times:
    """The times of one rank's actions, by their number, as `now` tells them.

    On a GPU a time is an event on the current stream, since the processor only queues the work; `seconds` waits for
    them.
    """

    def __init__(self, actions: int, device: torch.device) -> None:
        self.starts: list[Any] = [None] * (actions + 1)  # the last is for what is UNTIMED
        self.ends: list[Any] = [None] * (actions + 1)
        self.now = time.perf_counter if device.type == "cpu" else self._event
        self._device = device
        self._base: tuple[float, torch.Event] | None = None
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
            self._base = (time.perf_counter(), self._event())

    def seconds(self) -> tuple[list[float], list[float]]:
        """Starts and ends in seconds of `time.perf_counter`, which all processes of a machine share."""
        if self._base is None:
            return self.starts[:UNTIMED], self.ends[:UNTIMED]
        torch.accelerator.synchronize(self._device)
        begun, base = self._base
        starts, ends = (
            [begun + base.elapsed_time(event) / 1000 for event in events[:UNTIMED]]
            for events in (self.starts, self.ends)
        )
        return starts, ends

    def _event(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event
