"""Starting ranks: all are there, and none stays behind, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipeloom.errors import PipeloomError, RankFailed
from pipeloom.runtime import launcher
from pipeloom.runtime.launcher import launch


@pytest.fixture(autouse=True)
def _no_child_stays() -> Iterator[None]:
    yield
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_every_rank_runs_and_they_are_connected(tmp_path: Path) -> None:
    def work(base: float) -> None:
        total = torch.tensor([base + dist.get_rank()])
        dist.all_reduce(total)
        found = (dist.get_world_size(), total.item(), int(os.environ["LOCAL_RANK"]), torch.get_num_threads())
        (tmp_path / str(dist.get_rank())).write_text(repr(found))

    launch(work, 3, 10.0)
    threads = max(1, len(os.sched_getaffinity(0)) // 3)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        str(rank): repr((3, 33.0, rank, threads)) for rank in range(3)
    }


def test_a_function_may_destroy_its_process_group() -> None:
    launch(dist.destroy_process_group, 2)


def test_ranks_compute_with_threads_after_their_parent_did() -> None:
    program = (
        "import signal, sys, torch\n"
        "from pipeloom.runtime.launcher import launch\n"
        "def compute():\n"
        "    torch.set_num_threads(2)\n"
        "    signal.alarm(60)\n"
        "    torch.nn.functional.layer_norm(torch.ones(4000, 256), (256,))\n"
        "    torch.ones(300, 300) @ torch.ones(300, 300)\n"
        "for _ in range(2):\n"
        "    compute()\n"
        "    launch(compute, 2)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_rank_that_raises_ends_all(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("on purpose")
        time.sleep(60)

    with pytest.raises(RankFailed, match="rank 1 ended with exit status 1") as caught:
        launch(work, 3)
    assert (caught.value.rank, caught.value.status) == (1, 1)
    error = capfd.readouterr().err
    assert error.startswith("rank 1:\nTraceback")
    assert error.endswith("ZeroDivisionError: on purpose\n")


def test_a_refusal_is_printed_without_a_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        raise PipeloomError("not like this")

    with pytest.raises(RankFailed):
        launch(work, 1)
    assert capfd.readouterr().err == "rank 0: not like this\n"


def test_a_rank_that_is_killed_ends_all() -> None:
    def work() -> None:
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(RankFailed, match="rank 0 was killed by signal 9"):
        launch(work, 2)


def test_a_rank_that_exits_with_a_status_ends_all() -> None:
    def work() -> None:
        if dist.get_rank() == 1:
            sys.exit(3)
        time.sleep(60)

    with pytest.raises(RankFailed, match="rank 1 ended with exit status 3"):
        launch(work, 2)


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_to_the_parent_ends_all(
    number: signal.Signals, error: type[BaseException], capfd: pytest.CaptureFixture[str]
) -> None:
    def work() -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            os.kill(os.getppid(), number)
        time.sleep(60)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(error):
        launch(work, 2)
    assert capfd.readouterr().err == ""
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_rank_that_will_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        dist.barrier()
        if dist.get_rank() == 0:
            raise SystemExit(1)
        time.sleep(60)

    monkeypatch.setattr(launcher, "_GRACE", 0.1)
    with pytest.raises(RankFailed):
        launch(work, 2)


def test_ranks_end_with_a_parent_that_is_killed() -> None:
    program = """
import os, time
import torch.distributed as dist
from pipeloom.runtime.launcher import launch

def work():
    dist.barrier()
    os.write(1, f"{os.getpid()}\\n".encode())  # in one piece, as two ranks share the pipe
    time.sleep(60)

launch(work, 2)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        ranks = [int(parent.stdout.readline()) for _ in range(2)]
        parent.kill()
    deadline = time.monotonic() + 30
    while any(map(_lives, ranks)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
