"""The training loop, as each rank runs it."""

from __future__ import annotations

import dataclasses
import math
import os
from contextlib import nullcontext

import torch

# Whoever makes an optimizer loads this, which takes as long as torch itself: once here, before ranks are forked.
import torch._dynamo
import torch.distributed as dist
from torch import Tensor

from pipeloom.errors import DataError
from pipeloom.runtime import Pipeline
from pipeloom.schedule import Schedule
from pipeloom.splitter import fill, split
from pipeloom.trainer import traced
from pipeloom.trainer.config import OptimizerConfig, TrainConfig
from pipeloom.trainer.corpus import Corpus
from pipeloom.trainer.gpt import GPT, loss_fn
from pipeloom.trainer.optimizer import adamw, set_rate
from pipeloom.trainer.report import Report
from pipeloom.trainer.saved import Saved
from pipeloom.trainer.verify import OneProcess


def run(config: TrainConfig, schedule: Schedule, corpus: Corpus) -> None:
    """Train as one rank of `schedule`, in a process group of as many ranks; the rank of the last stage reports.

    Raises:
        DataError: this rank's text is not that of rank 0.
        CheckpointError: the run cannot be saved, or cannot go on from what was saved.
    """
    device = torch.device("cpu")
    if dist.get_backend() == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    _refuse_another_text(corpus, device)
    with torch.device("meta"):
        model = GPT(config.model)
    stages = split(model, into=schedule)
    for stage in stages:
        fill(stage.module, config.seed, device)
    pipe = Pipeline(stages, schedule, loss_fn=loss_fn)
    reports = pipe.rank == schedule.placement[schedule.wiring.stages - 1]
    optimizer = adamw(pipe.parameters(), config.optimizer)
    size = config.sequences(schedule.microbatches)
    saved = Saved(config, corpus.digest, size)
    done = saved.load(pipe, optimizer)
    if done == config.steps:
        if reports:
            print(f"step {done}/{config.steps} was saved; there is nothing left to train", flush=True)
        pipe.close()
        return
    one_process = OneProcess(config, schedule, device) if config.verify and reports else None
    tokens = size * config.model.context
    with Report(config.steps, tokens, config.metrics, done) if reports else nullcontext() as report:
        if report:
            settings = dataclasses.asdict(config) | {"batch_size": size, "done": done}
            report.start(schedule=schedule.name, ranks=schedule.ranks, microbatches=schedule.microbatches, **settings)
        for step in range(done + 1, config.steps + 1):
            rate = learning_rate(step, config.steps, config.optimizer)
            set_rate(optimizer, rate)
            batch = corpus.batch(config.seed, step, size)
            losses = _train(pipe, batch, device)
            if config.trace and step == config.steps:
                timeline = pipe.trace()
                if timeline:
                    traced.write(timeline, config.trace)
            norm = pipe.clip_grad_norm_(config.optimizer.clip)
            optimizer.step()
            optimizer.zero_grad()
            if report:
                report.step(step, _mean(losses), rate, float(norm))
            if report and one_process:
                expected = one_process.step(batch, rate)
                equal = all(map(torch.equal, losses, expected))
                report.verified(step, _mean(losses), _mean(expected), equal=equal)
            if config.eval_every and step % config.eval_every == 0:
                for stage in stages:
                    stage.module.eval()
                losses = []
                for number in range(config.eval_batches):
                    losses += _evaluate(pipe, corpus.held_out(number, config.eval_batches, size), device)
                for stage in stages:
                    stage.module.train()
                if report:
                    report.evaluated(step, _mean(losses))
            saved.save(step, pipe, optimizer)
        if report:
            report.end()
    pipe.close()


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """The learning rate of a step, counted from 1: up in a line, then down along a cosine to a tenth at the last."""
    if step <= config.warmup:
        return config.learning_rate * step / config.warmup
    done = (step - config.warmup) / max(1, steps - config.warmup)
    return config.learning_rate * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


def _train(pipe: Pipeline, batch: tuple[Tensor, Tensor], device: torch.device) -> list[Tensor]:
    losses: list[Tensor] = []
    inputs, target = _ends(pipe, batch, device)
    pipe.step(*inputs, target=target, losses=losses, return_outputs=False)
    return losses


def _evaluate(pipe: Pipeline, batch: tuple[Tensor, Tensor], device: torch.device) -> list[Tensor]:
    losses: list[Tensor] = []
    inputs, target = _ends(pipe, batch, device)
    pipe.eval(*inputs, target=target, losses=losses, return_outputs=False)
    return losses


def _ends(
    pipe: Pipeline, batch: tuple[Tensor, Tensor], device: torch.device
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    inputs, target = batch
    return (inputs.to(device),) if pipe.first else (), target.to(device) if pipe.last else None


def _mean(losses: list[Tensor]) -> float:
    return float(torch.stack(losses).mean())


def _refuse_another_text(corpus: Corpus, device: torch.device) -> None:
    ours = torch.tensor(list(bytes.fromhex(corpus.digest)), dtype=torch.uint8, device=device)
    first = ours.clone()
    dist.broadcast(first, 0)
    if not torch.equal(ours, first):
        raise DataError(
            f"rank {dist.get_rank()} reads another text than rank 0; give every machine the same file as --data"
        )
