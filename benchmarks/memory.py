"""How much memory a training step takes at most: measured, beside torch.distributed.pipelining, and as simulated.

python benchmarks/memory.py [--schedules 1F1B GPipe] [--ranks 4] [--microbatches 4 16 64] [--json]

A stage is a transformer block of width 256; a microbatch is 2 sequences of 128. Every figure is from processes of its
own: the most that a rank held during its first two steps (Linux's VmHWM) beyond what it held before. Simulated is the
most activations that the schedule holds at once, times what autograd keeps of one stage and microbatch.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from beside import TORCH, layer, loss_fn, machine, torch_schedule
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.runtime.launcher import launch

WIDTH, LENGTH, SAMPLES = 256, 128, 2
M_MMAP_THRESHOLD = -3


def held(of: str) -> int:
    """Bytes of this process: `VmRSS` now, or `VmHWM` at most since the last `forget_peak`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(of))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def kept(module: nn.Module) -> int:
    """Bytes that autograd keeps of one forward, parameters not counted."""
    parameters = {each.untyped_storage().data_ptr() for each in module.parameters()}
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        module(torch.randn(SAMPLES, LENGTH, WIDTH, requires_grad=True))
    return sum(size for pointer, size in storages.items() if pointer not in parameters)


def measure(side: str, name: str, microbatches: int, folder: str) -> None:
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)  # what is freed goes back to the system at once
    torch.manual_seed(0)
    rank = dist.get_rank()
    schedule = pl.schedules.make(name, ranks=dist.get_world_size(), microbatches=microbatches)
    stages = schedule.stages_of(rank)
    modules = {index: layer(WIDTH) for index in stages}
    sizes = kept(modules[stages[0]])
    x, y = (torch.randn(SAMPLES * microbatches, LENGTH, WIDTH) for _ in range(2))
    step: Callable[[], object]
    if side == "torch":
        their = torch_schedule(name, modules, schedule.stages, microbatches)
        target = y if schedule.stages - 1 in stages else None

        def step() -> object:
            return their.step(*([x] if 0 in stages else []), target=target, return_outputs=False)
    else:
        pipe = pl.Pipeline([pl.Stage(module, index) for index, module in modules.items()], schedule, loss_fn=loss_fn)

        def step() -> object:
            return pipe.step(*([x] if pipe.first else []), target=y if pipe.last else None, return_outputs=False)

    dist.barrier()
    before = held("VmRSS")
    forget_peak()
    for _ in range(2):
        step()
    most = held("VmHWM") - before
    simulated = pl.simulate(schedule, pl.Costs()).peak_activations[rank] * sizes
    Path(folder, f"{rank}.json").write_text(json.dumps({"measured": most, "simulated": simulated}))
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", choices=list(TORCH), default=["1F1B", "GPipe"], metavar="NAME")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--json", action="store_true", help="print bytes, by schedule, microbatches, side and rank")
    options = parser.parse_args()
    found: dict[str, dict[int, dict[str, list[float]]]] = {}
    if not options.json:
        print(f"MiB that each of {options.ranks} ranks holds at most in a step ({machine()})")
    for name in options.schedules:
        for microbatches in options.microbatches:
            row: dict[str, list[float]] = {}
            for side in ("ours", "torch"):
                with tempfile.TemporaryDirectory() as folder:
                    launch(measure, options.ranks, side, name, microbatches, folder)
                    each = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(options.ranks)]
                row[side] = [rank["measured"] for rank in each]
                row["simulated"] = [rank["simulated"] for rank in each]
            found.setdefault(name, {})[microbatches] = row
            if not options.json:
                cells = (f"{side}{''.join(f'{size / 2**20:7.0f}' for size in sizes)}" for side, sizes in row.items())
                print(f"{name:>22} m={microbatches:<4} {'   '.join(cells)}", flush=True)
    if options.json:
        print(json.dumps({"machine": machine(), "unit": "bytes", "held": found}))


if __name__ == "__main__":
    main()
