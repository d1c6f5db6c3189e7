"""Small models for the tests, each cut into stages."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 16
TOKENS = 11
LENGTH = 6


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int = WIDTH, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width)) * self.scale
        result: Tensor = x + self.mlp(x)
        return result


class Checkpointed(nn.Module):
    """`inner` under activation checkpointing; `bodies` counts how often it ran."""

    def __init__(self, inner: nn.Module, *, reentrant: bool = False) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant
        self.bodies = 0

    def body(self, x: Tensor) -> Tensor:
        self.bodies += 1
        result: Tensor = self.inner(x)
        return result

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.body, x, use_reentrant=self.reentrant)
        return result


class Tokens(nn.Module):
    """Token and position embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(TOKENS, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.token(tokens)
        return embedded + self.position[: tokens.shape[1]]


def gpt(stages: int, seed: int = 0) -> list[nn.Module]:
    """A small language model in `stages` stages: embedding, blocks, head, spread over them."""
    torch.manual_seed(seed)
    blocks: list[nn.Module] = [Block() for _ in range(stages)]
    blocks[0] = nn.Sequential(Tokens(), blocks[0])
    blocks[-1] = nn.Sequential(blocks[-1], nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS))
    return blocks


def text(batch: int, seed: int, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Tokens and the tokens that follow them."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(TOKENS, (batch, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten())
