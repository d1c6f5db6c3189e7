"""Ranks tell each other what they have and what went wrong, so that all go on or none."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist

from pipeloom.errors import CheckpointError, DisagreementError, PipeloomError
from pipeloom.runtime.pipeline import Pipeline


class Agreement:
    """The ranks that save or load one checkpoint together.

    Args:
        path: the checkpoint.
        doing: what is done with it.
        pipe: the pipeline, whose ranks do it.
        group: they and the ranks of other pipelines, if these do it too.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        doing: Literal["saved", "loaded"],
        pipe: Pipeline,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._path, self._doing, self._pipe = os.fspath(path), doing, pipe
        self._group = group if group is not pipe.group else None
        everyone = group or pipe.group
        self.rank, self.ranks = (everyone.rank(), everyone.size()) if everyone else (0, 1)
        self._mistakes: list[str] = []

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Keep what fails inside for the next `share`, in which every rank takes part whatever happened here."""
        try:
            yield
        except CheckpointError as error:
            self._mistakes += error.reasons
        except OSError as error:
            self._mistakes.append(f"rank {self.rank}: {error}")
        except PipeloomError as error:
            self._mistakes.append(str(error))
        except Exception as error:
            self._mistakes.append(f"rank {self.rank}: {type(error).__name__}: {error}")

    def share(self, value: object = None) -> list[Any]:
        """`value` of every rank, in order; every rank calls this. Values are what JSON can hold.

        Raises:
            CheckpointError: an attempt of some rank has failed; with all that failed, the same on every rank.
        """
        try:
            shared = [json.loads(each) for each in self._gather(json.dumps([self._mistakes, value]))]
        except DisagreementError:
            raise
        except RuntimeError as error:
            raise CheckpointError(self._path, self._doing, [f"another rank has gone: {error}"]) from error
        self.refuse(mistake for mistakes, _ in shared for mistake in mistakes)
        return [each for _, each in shared]

    def refuse(self, reasons: Iterable[str]) -> None:
        """Raise CheckpointError if there are any `reasons`, which are the same on every rank."""
        found = list(dict.fromkeys(reasons))
        if found:
            raise CheckpointError(self._path, self._doing, found)

    def _gather(self, text: str) -> list[str]:
        said = self._pipe.gather(f"a checkpoint is {self._doing}", text)
        if not self._group:
            return said
        device = torch.device("cpu")
        if dist.get_backend(self._group) == dist.Backend.NCCL:
            device = torch.device("cuda", torch.cuda.current_device())
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
        sizes = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(self.ranks)]
        dist.all_gather(sizes, torch.tensor(len(data), device=device), group=self._group)
        counts = [int(size) for size in sizes]
        padded = torch.zeros(max(counts), dtype=torch.uint8, device=device)
        padded[: len(data)] = data
        texts = [torch.empty_like(padded) for _ in range(self.ranks)]
        dist.all_gather(texts, padded, group=self._group)
        return [bytes(text[:count].tolist()).decode() for text, count in zip(texts, counts, strict=True)]
