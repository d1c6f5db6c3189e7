"""The examples run as they are, and give the same numbers under any schedule."""

from __future__ import annotations

import os
import runpy
import socket
import sys
import traceback
from pathlib import Path

import pytest
import torch
import torch._dynamo

import pipeloom as pl
from pipeloom.runtime.control import leave

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_the_hand_written_schedule_is_right() -> None:
    assert pl.check(pl.Schedule.from_csv(EXAMPLES / "hand_written.csv")) == []


def test_a_users_own_script_trains_alike_under_two_schedules(capfd: pytest.CaptureFixture[str]) -> None:
    losses = []
    for arguments in ([], [str(EXAMPLES / "hand_written.csv")]):
        start_as_torchrun_does(EXAMPLES / "train_gpt.py", arguments, ranks=4)
        said = [line.rsplit(" ", 1) for line in capfd.readouterr().out.splitlines()]
        assert [label for label, _ in said][8:11] == ["step 9: loss", "eval 10: loss", "step 11: loss"]
        losses.append([float(loss) for _, loss in said])
    assert losses[0] == pytest.approx(losses[1], abs=0.01)
    assert losses[0][-1] < losses[0][0] - 1


def start_as_torchrun_does(script: Path, arguments: list[str], ranks: int) -> None:
    """Run `script` on some ranks; forked, for torch is imported here already."""
    torch.set_num_threads(1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in world.items()}}
            status = 1
            try:
                sys.argv = [str(script), *arguments]
                runpy.run_path(str(script), run_name="__main__")
                leave()  # as a process does that ends by itself
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * ranks
