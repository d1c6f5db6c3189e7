"""Batches of sequences, drawn from the bytes of a text."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeloom.trainer.text import HELD_OUT, digest


class Corpus:
    """The bytes of a text: the first nine tenths to train on, the last tenth held out.

    Every rank draws the same batches: a batch follows from the seed and the step alone.

    Args:
        text: the bytes.
        context: the length of a sequence.
    """

    def __init__(self, text: bytes, context: int) -> None:
        held_out = len(text) // HELD_OUT
        self.context = context
        self.digest = digest(text)
        whole = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._train, self._held_out = whole[:-held_out], whole[-held_out:]

    def batch(self, seed: int, step: int, size: int) -> tuple[Tensor, Tensor]:
        """The inputs and targets of a training step, (size, context) each: sequences from anywhere in the text."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self._train) - self.context, (size,), generator=generator)
        return self._sequences(self._train, starts)

    def held_out(self, number: int, count: int, size: int) -> tuple[Tensor, Tensor]:
        """Batch `number` of the `count` that an evaluation takes: always the same sequences, spread evenly."""
        last = len(self._held_out) - self.context - 1
        starts = torch.linspace(0, last, count * size, dtype=torch.float64).long()[number * size : (number + 1) * size]
        return self._sequences(self._held_out, starts)

    def _sequences(self, text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        windows = text[starts[:, None] + torch.arange(self.context + 1)].long()
        return windows[:, :-1], windows[:, 1:]
