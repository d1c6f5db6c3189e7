"""A small GPT over bytes: pre-norm blocks, learned positions, no dropout. Its forward is a plain chain of layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn

from pipeloom.trainer.config import ModelConfig

BYTES = 256


class Embedding(nn.Module):
    """Bytes, (batch, length), into features with their positions, (batch, length, d_model)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTES, config.d_model)
        self.positions = nn.Embedding(config.context, config.d_model)

    def reset_parameters(self) -> None:
        """Draw small weights, as GPT-2 does."""
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[-1], device=tokens.device)
        result: Tensor = self.tokens(tokens) + self.positions(positions)
        return result


class Block(nn.Module):
    """Causal attention and a perceptron, each behind a norm and added to what came in: (batch, length, d_model)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.d_model
        self.heads, self.depth = config.heads, config.layers
        self.norm_1 = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.perceptron_in = nn.Linear(width, 4 * width)
        self.perceptron_out = nn.Linear(4 * width, width)

    def reset_parameters(self) -> None:
        """Draw small weights, those that end a residual branch the smaller the deeper the model, as GPT-2 does."""
        for linear in (self.attention_in, self.attention_out, self.perceptron_in, self.perceptron_out):
            ends_branch = linear is self.attention_out or linear is self.perceptron_out
            nn.init.normal_(linear.weight, std=0.02 / (2 * self.depth) ** 0.5 if ends_branch else 0.02)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.attention_in(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.perceptron_out(F.gelu(self.perceptron_in(self.norm_2(x))))
        return result


class Head(nn.Linear):
    """Features, (batch, length, d_model), into logits, (batch, length, 256)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.d_model, BYTES, bias=False)

    def reset_parameters(self) -> None:
        """Draw small weights, so that all bytes are about equally likely at first."""
        nn.init.normal_(self.weight, std=0.02)


class GPT(nn.Module):
    """Bytes, (batch, length), into logits of the byte that follows each, (batch, length, 256)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.d_model)
        self.head = Head(config)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(self.norm(x))
        return result


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    """The mean cross entropy, in nats a byte, of `logits`, (batch, length, 256), against `target`, (batch, length)."""
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())
