"""Random numbers that do not depend on how a model is cut: keyed by seed, step, microbatch and layer."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from pipeloom.errors import PipelineError
from pipeloom.runtime.calls import around
from pipeloom.runtime.stage import Stage


class Randomness:
    """Seeds torch's generators anew whenever a module of one of `stages` begins its forward.

    The seed follows from `seed`, the number of the step, the microbatch, the name of the module and how many times it
    has been called for this microbatch. So dropout is the same whatever the schedule and the number of ranks, as long
    as modules have the names of the whole model, which `pipeloom.split` gives them; the modules of a stage that was
    made by hand are named by the number of the stage and their name within it. Copies of a stage are named alike: of
    the model, `chain` stages are one copy.
    """

    def __init__(self, seed: int, stages: Iterable[Stage], chain: int) -> None:
        self._seed = seed
        self._now: tuple[int, int] | None = None
        self._recomputes = False
        self._calls: Counter[tuple[int, str]] = Counter()
        self._hooks: list[RemovableHandle] = []
        names: dict[nn.Module, str] = {}
        for stage in stages:
            for inner, module in stage.module.named_modules():
                names.setdefault(module, inner if stage.whole else f"{stage.index % chain}:{inner}")
        for module, name in names.items():
            self._hooks.append(module.register_forward_pre_hook(self._hook(name)))

    def remove(self) -> None:
        """Leave the modules as they were."""
        for hook in self._hooks:
            hook.remove()

    @around
    def during(self) -> Iterator[None]:
        """What runs within draws keyed numbers; afterwards the generators are as they were before."""
        self._calls.clear()
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        try:
            with torch.random.fork_rng(devices):
                yield
        finally:
            self._now = None

    def forward(self, step: int, microbatch: int) -> None:
        """From here on forwards are those of `microbatch`."""
        self._now, self._recomputes = (step, microbatch), False

    def backward(self, step: int, microbatch: int) -> None:
        """From here on forwards are recomputed ones, for the backward of `microbatch`."""
        self._now, self._recomputes = (step, microbatch), True

    def _hook(self, name: str) -> Callable[..., None]:
        def reseed(*_: object) -> None:
            if self._now is None:
                return
            step, microbatch = self._now
            call = (microbatch, name)
            if self._recomputes and self._calls[call] > 1:
                raise PipelineError(
                    f"'{name}' runs {self._calls[call]} times a microbatch and is recomputed by activation "
                    "checkpointing, so its random numbers cannot be told apart; leave seed= out, or give each use a "
                    "module of its own"
                )
            count = 0 if self._recomputes else self._calls[call]
            if not self._recomputes:
                self._calls[call] += 1
            key = f"{self._seed} {step} {microbatch} {count} {name}".encode()
            seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
            torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which is slow where there is no GPU
            if torch.cuda.is_initialized():
                torch.cuda.manual_seed_all(seed)

        return reseed
