"""What dividing a backward costs: I and W beside B, ours and torch.distributed.pipelining's, in turn in one process.

python benchmarks/backward.py [--runs 60] [--json]

linear: Linear 8x8. block: a transformer block of width 128, 64 tokens, 2 samples.
many: 24 blocks of width 32, 8 tokens, 2 samples, where the engine's own work counts more than the arithmetic.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any

import torch
from beside import machine
from torch import Tensor, nn
from torch.distributed.pipelining import _backward as theirs

from pipeloom.runtime.tape import Tape

PARTS = ("B", "I", "W")


class Block(nn.Module):
    """A transformer block as GPTs have it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        q, k, v = self.attend(self.before(x)).view(samples, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.join(y.transpose(1, 2).reshape(samples, length, width))
        found: Tensor = x + self.narrow(nn.functional.gelu(self.widen(self.between(x))))
        return found


STAGES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(8, 8), (4, 8)),
    "block": (Block(128), (2, 64, 128)),
    "many": (nn.Sequential(*(Block(32) for _ in range(24))), (2, 8, 32)),
}


def ours(module: nn.Module, x: Tensor, *, split: bool) -> list[float]:
    tape = Tape()
    output = module(tape.enter(x))
    tape.leave(output)
    gradients = [torch.ones_like(output)]
    times = [time.perf_counter()]
    if split:
        tape.inputs(gradients)
        times.append(time.perf_counter())
        tape.weights()
    else:
        tape.whole(gradients)
    return [*times, time.perf_counter()]


def torchs(module: nn.Module, x: Tensor, *, split: bool) -> list[float]:
    output = module(x)
    gradients = [torch.ones_like(output)]
    times = [time.perf_counter()]
    if split:
        _, groups = theirs.stage_backward_input([output], gradients, [x], module.parameters())
        times.append(time.perf_counter())
        theirs.stage_backward_weight(module.parameters(), groups)
    else:
        theirs.stage_backward([output], gradients, [x])
    return [*times, time.perf_counter()]


def measure(name: str, runs: int) -> dict[str, dict[str, float]]:
    """Median microseconds of B, I and W of each side."""
    module, shape = STAGES[name]
    times: dict[str, dict[str, list[float]]] = {"ours": {part: [] for part in PARTS}, "torch": {p: [] for p in PARTS}}
    for run in range(runs + 10):
        for side, backward in (("ours", ours), ("torch", torchs)):
            whole, split = (
                backward(module, torch.randn(shape).requires_grad_(), split=split) for split in (False, True)
            )
            if run >= 10:
                for part, start, end in zip(PARTS, [whole[0], *split], [whole[1], *split[1:]], strict=False):
                    times[side][part].append(1e6 * (end - start))
    return {side: {part: median(each) for part, each in parts.items()} for side, parts in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--json", action="store_true", help="print the medians as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {name: measure(name, options.runs) for name in STAGES}
    if options.json:
        print(json.dumps({"machine": machine(), "unit": "microseconds", "times": found}))
        return
    print(f"median microseconds, one thread ({machine()})")
    for name, sides in found.items():
        for side, parts in sides.items():
            ratio = (parts["I"] + parts["W"]) / parts["B"]
            print(f"{name:>8} {side:>6}  " + "  ".join(f"{p} {t:7.0f}" for p, t in parts.items()) + f"  = {ratio:.2f}")


if __name__ == "__main__":
    main()
