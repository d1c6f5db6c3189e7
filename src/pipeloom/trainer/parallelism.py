"""The demo model under every kind of parallelism, all from one checkpoint, against one process."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from pipeloom import schedules
from pipeloom.checkpoints import load, save
from pipeloom.errors import PipelineError
from pipeloom.runtime import Pipeline
from pipeloom.runtime.launcher import launch
from pipeloom.splitter import fill, split
from pipeloom.trainer.config import ModelConfig
from pipeloom.trainer.corpus import Corpus
from pipeloom.trainer.gpt import GPT, Block, loss_fn

MODEL = ModelConfig(layers=8, d_model=32, heads=2, context=16)
MICROBATCHES = 8
SEQUENCES = 16
"""How many sequences a step takes, over all replicas."""
STEPS = 3
TOLERANCE = 1e-4
"""The largest difference of two losses that rounding explains, in nats."""


@dataclass(frozen=True, slots=True)
class Case:
    """Replicas ("FSDP" or "DDP", or none), tensor parallel ranks, ranks of the pipeline, and its schedule."""

    kind: str
    data: int
    tensor: int
    ranks: int
    schedule: str

    @property
    def name(self) -> str:
        sizes = [(self.kind, self.data), ("TP", self.tensor), ("PP", self.ranks)]
        return " x ".join(f"{word} {size}" for word, size in sizes if size > 1) or "one process"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a case: the loss of each step and of an evaluation after them, or why it was refused."""

    parallelism: str
    schedule: str
    losses: list[float]
    evaluation: float | None
    refusal: str = ""

    def equals(self, other: Outcome) -> bool:
        """Whether the losses differ by rounding alone."""
        own, others = [*self.losses, self.evaluation], [*other.losses, other.evaluation]
        return all(
            one is not None and two is not None and abs(one - two) <= TOLERANCE
            for one, two in zip(own, others, strict=True)
        )


def cases() -> list[Case]:
    """All cases; the first is one process."""
    sharded = (
        "1F1B", "Interleaved1F1B", "GPipe", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV",
        "DualPipe",
    )  # fmt: skip
    return [
        Case("", 1, 1, 1, "GPipe"),
        Case("FSDP", 2, 1, 1, "GPipe"),
        Case("FSDP", 2, 2, 2, "1F1B"),
        *(Case("FSDP", 2, 1, 4, name) for name in sharded),
        *(Case("DDP", 2, 1, 2, name) for name in schedules.names()),
    ]


def run(chosen: Sequence[Case], text: bytes) -> Iterator[Outcome]:
    """Run cases on processes of this machine, as soon as asked for; the first of them saves what all others load."""
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint, answers = Path(scratch, "checkpoint"), Path(scratch, "answers")
        for (data, tensor, ranks), same in groupby(chosen, key=lambda case: (case.data, case.tensor, case.ranks)):
            launch(_ranks, data * tensor * ranks, list(same), text, checkpoint, answers)
            for line in answers.read_text().splitlines():
                yield Outcome(**json.loads(line))
            answers.unlink()


def _ranks(same: Sequence[Case], text: bytes, checkpoint: Path, answers: Path) -> None:
    # FSDP warns of views because of a hook that gathers weights; here the rows do that.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    sizes = (same[0].data, same[0].ranks, same[0].tensor)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "pp", "tp"))
    for case in same:
        outcome = _outcome(case, mesh, Corpus(text, MODEL.context), checkpoint)
        if dist.get_rank() == 0:
            with answers.open("a") as file:
                print(json.dumps(asdict(outcome)), file=file)


def _outcome(case: Case, mesh: DeviceMesh, corpus: Corpus, checkpoint: Path) -> Outcome:
    schedule = schedules.make(case.schedule, ranks=case.ranks, microbatches=MICROBATCHES)
    with torch.device("meta"):
        model = GPT(MODEL)
    stages = []
    try:
        for stage in split(model, into=schedule, rank=mesh.get_local_rank("pp")):
            fill(stage.module, seed=dist.get_rank())
            stages.append(replace(stage, module=_wrapped(case, stage.module, mesh)))
        pipe = Pipeline(stages, schedule, loss_fn=loss_fn, group=mesh.get_group("pp"))
    except PipelineError as error:
        return Outcome(case.name, case.schedule, [], None, str(error))
    if case.name == "one process":
        save(checkpoint, pipe)
    else:
        load(checkpoint, pipe, group=dist.group.WORLD)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1.0)  # unlike Adam, it shows a gradient of the wrong size
    losses = []
    for step in range(STEPS):
        inputs, target = _share(pipe, mesh, *corpus.batch(0, step, SEQUENCES))
        pipe.step(*inputs, target=target, return_outputs=False)
        losses.append(float(pipe.loss()))
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    inputs, target = _share(pipe, mesh, *corpus.held_out(0, 1, SEQUENCES))
    pipe.eval(*inputs, target=target, return_outputs=False)
    evaluation = float(pipe.loss())
    pipe.close()
    return Outcome(case.name, case.schedule, losses, evaluation)


def _wrapped(case: Case, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    blocks = [each for each in module.modules() if isinstance(each, Block)]
    if case.tensor > 1:
        for block in blocks:
            # Queries, keys and values come out of one linear layer, so its output is put together again.
            plan = {
                "attention_in": ColwiseParallel(output_layouts=Replicate()),
                "attention_out": RowwiseParallel(input_layouts=Replicate()),
                "perceptron_in": ColwiseParallel(),
                "perceptron_out": RowwiseParallel(),
            }
            parallelize_module(block, mesh["tp"], plan)
    if case.kind == "FSDP":
        for each in (*blocks, module):
            fully_shard(each, mesh=mesh["dp"])
    return DistributedDataParallel(module, process_group=mesh.get_group("dp")) if case.kind == "DDP" else module


def _share(
    pipe: Pipeline, mesh: DeviceMesh, inputs: Tensor, target: Tensor
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """What this rank passes of a batch: its replica's part, at the ends of the pipeline."""
    replica, replicas = mesh.get_local_rank("dp"), mesh["dp"].size()
    own = [each.tensor_split(replicas)[replica] for each in (inputs, target)]
    return (own[0],) if pipe.first else (), own[1] if pipe.last else None
