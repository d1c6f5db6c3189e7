"""A small GPT on text, under any schedule, in a script of one's own.

torchrun --nproc-per-node 4 examples/train_gpt.py
torchrun --nproc-per-node 4 examples/train_gpt.py examples/hand_written.csv
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipeloom as pl

STEPS, BATCH, LENGTH, WIDTH, BLOCKS = 20, 20, 64, 64, 8


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        embedded: Tensor = self.tokens(x) + self.positions.weight
        return embedded


class Block(nn.TransformerEncoderLayer):
    def __init__(self) -> None:
        super().__init__(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # its mask is its own
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        return super().forward(x, src_mask=mask, is_causal=True)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def main() -> None:
    dist.init_process_group("gloo")
    if len(sys.argv) > 1:
        schedule = pl.Schedule.from_csv(Path(sys.argv[1]))
    else:
        schedule = pl.schedules.make("DualPipeV", ranks=dist.get_world_size(), microbatches=10)

    torch.manual_seed(0)  # every rank builds the same model and keeps its own stages of it
    stages = pl.split(GPT(), into=schedule)
    pipe = pl.Pipeline(stages, schedule, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)

    text = torch.tensor(list(b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("a*.py")))))
    for step in range(1, STEPS + 1):
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1))
        batch = text[starts + torch.arange(LENGTH + 1)]
        inputs = (
            [batch[:, :-1]] if pipe.first else []
        )  # the first stage's rank has the inputs, the last one's the targets
        target = batch[:, 1:] if pipe.last else None
        losses: list[Tensor] = []
        if step % 10:
            pipe.step(*inputs, target=target, losses=losses, return_outputs=False)
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        else:
            pipe.eval(*inputs, target=target, losses=losses, return_outputs=False)
        if pipe.last:
            print(f"{'step' if step % 10 else 'eval'} {step}: loss {torch.stack(losses).mean():.4f}", flush=True)
    dist.destroy_process_group()


main()
