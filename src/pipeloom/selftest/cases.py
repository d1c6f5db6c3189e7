"""The cases, a kind of fault each."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from pipeloom.selftest import models
from pipeloom.selftest.bench import Bench, trains
from pipeloom.selftest.case import Case
from pipeloom.selftest.models import each
from pipeloom.selftest.uses import (
    changing_shapes,
    compiled,
    failed_step,
    few_microbatches,
    full_batch,
    hooked,
    keywords,
    loss_and_more,
    no_target,
    ready_lists,
    several_steps,
    skips,
    summed,
    tied,
    valid_targets,
)
from pipeloom.selftest.wrong import (
    another_batch,
    another_call,
    missing_backward,
    odd_edge,
    plain_scaler,
    swapped_receives,
    without_gradients,
)


def _frozen(stages: int, first: int, last: int) -> list[nn.Module]:
    """Layers of which those from `first` to `last` are frozen, as in a slice of the stages."""
    modules = each(models.linear)(stages)
    for module in modules[first : last or stages]:
        module.requires_grad_(False)
    return modules


def _few_parameters(stages: int) -> list[nn.Module]:
    return [models.Plus() if stage % 2 else module for stage, module in enumerate(each(models.linear)(stages))]


def _tokens(bench: Bench) -> None:
    full_batch(bench, weight=valid_targets)


def _sum(bench: Bench) -> None:
    full_batch(bench, loss_fn=summed, weight="sum")


CASES = (
    Case("plain", trains(each(models.Block)), "transformer blocks, uneven microbatches, clipping, evaluation between"),
    Case("several-steps", several_steps, "gradients of three steps before the optimizer's"),
    Case("frozen-first", trains(partial(_frozen, first=0, last=1)), "a frozen first stage"),
    Case("frozen-middle", trains(partial(_frozen, first=1, last=-1)), "frozen stages in the middle"),
    Case("frozen-last", trains(partial(_frozen, first=-1, last=0)), "a frozen last stage"),
    Case("frozen-parts", trains(each(models.LowRank)), "frozen layers with low-rank additions in each stage"),
    Case("no-parameters", trains(_few_parameters), "stages, and ranks, without parameters"),
    Case("many-uses", trains(each(models.ManyUses)), "a weight used many times in a stage"),
    Case("tied", tied, "one weight in the first stage and the last", equal="within rounding"),
    Case("added-losses", trains(each(models.Adds)), "losses that stages add, on some microbatches only"),
    Case(
        "unused-outputs",
        trains(each(models.Unused), loss_fn=models.first_of_two),
        "outputs that nobody uses, weights that only some microbatches use",
    ),
    Case("custom-function", trains(each(models.Custom)), "custom autograd functions, run once"),
    Case("checkpoint", trains(each(lambda _: models.Checkpointed(reentrant=False))), "bodies recomputed once"),
    Case(
        "checkpoint-reentrant",
        trains(each(lambda stage: models.Checkpointed(reentrant=stage > 0))),
        "the same by the reentrant kind",
    ),
    Case("hooks", hooked, "hooks run once, and what they keep never changes"),
    Case(
        "views",
        trains(each(models.Slices), loss_fn=models.last_slice),
        "views, slices and operations in place at an edge",
    ),
    Case("in-place", trains(each(models.InPlace)), "stages that begin with an operation in place on their input"),
    Case("batch-norm", trains(each(models.Normalised)), "buffers: one forward a microbatch, in the first step too"),
    Case("dropout", trains(each(models.Noisy), seed=3), "seed=: random numbers as in one process"),
    Case(
        "autocast",
        trains(each(models.Block), around=lambda: torch.autocast("cpu", torch.bfloat16)),
        "mixed precision",
    ),
    Case("dtypes", trains(each(models.Precise)), "weights in double precision, and complex ones"),
    Case("compiled", compiled, "stages behind torch.compile", equal="within rounding"),
    Case(
        "twice",
        trains(each(lambda stage: models.Twice(stage, in_place=False)), loss_fn=models.first_of_two),
        "one tensor handed on twice",
    ),
    Case("edges", trains(models.trees), "dicts, None, text, bf16, complex and empty tensors between stages"),
    Case("skips", skips, "values that skip stages"),
    Case("keywords", keywords, "keyword arguments: split, replicated, ready"),
    Case("ready-lists", ready_lists, "ready microbatches of different lengths"),
    Case("shapes", changing_shapes, "shapes that change from step to step"),
    Case("no-target", no_target, "a loss without a target"),
    Case("loss-and-more", loss_and_more, "a loss that returns a tuple, a target that is a dict"),
    Case("full-batch", full_batch, "uneven microbatches are the batch taken at once", equal="within rounding"),
    Case("tokens", _tokens, "the same, weighted by a function that counts", equal="within rounding"),
    Case("sum", _sum, 'the same for a loss that is a sum, weight="sum"', equal="within rounding"),
    Case("few-microbatches", few_microbatches, "one microbatch, two, and many"),
    Case("failed-step", failed_step, "every rank hears of a failed step, and the next one is right"),
    Case("without-gradients", without_gradients, "a step where gradients are off", refused="call eval"),
    Case("another-batch", another_batch, "inputs and targets of two batches", refused="samples is"),
    Case("another-call", another_call, "one rank evaluates, the others step", refused="call is"),
    Case("plain-scaler", plain_scaler, "a gradient scaler of one rank", refused="ShardedGradScaler"),
    Case("odd-edge", odd_edge, "a value that cannot cross an edge", refused="stages exchange"),
    Case(
        "shared-memory",
        trains(each(lambda stage: models.Twice(stage, in_place=True)), loss_fn=models.first_of_two),
        "one tensor handed on twice, and changed in place",
        refused="handed on the same memory twice",
    ),
    Case("missing-backward", missing_backward, "rows that lack a backward", refused="missing]"),
    Case("swapped-receives", swapped_receives, "two receives in the wrong order", refused="[receive-"),
)
