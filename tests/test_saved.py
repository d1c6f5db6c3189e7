"""`pipeloom train` saved, ended and gone on with: the same losses as of a run that nothing has disturbed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

DEADLINE = 120
COMMAND = [
    *(sys.executable, "-m", "pipeloom", "train", "--layers", "3", "--d-model", "8", "--heads", "2", "--context", "6"),
    *("--batch-size", "4", "--microbatches", "2", "--steps", "12", "--eval-every", "5", "--eval-batches", "1"),
]


@pytest.fixture(name="data")
def _data(tmp_path: Path) -> list[str]:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return ["--data", str(path)]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=DEADLINE, check=False)


def losses(path: Path) -> dict[tuple[str, int], float]:
    """By event and step. What is there twice, from before and after a restart, must be equal to the bit."""
    found: dict[tuple[str, int], float] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        if line["event"] in ("step", "eval"):
            assert found.setdefault((line["event"], line["step"]), line["loss"]) == line["loss"]
    return found


def starts(path: Path) -> list[int]:
    """How many steps were done at each start."""
    return [line["done"] for line in map(json.loads, path.read_text().splitlines()) if line["event"] == "start"]


def until(path: Path, lines: int, process: subprocess.Popen[str]) -> None:
    while not path.exists() or len(path.read_text().splitlines()) < lines:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def test_after_a_kill_the_losses_are_those_of_an_undisturbed_run(data: list[str], tmp_path: Path) -> None:
    options = ["--schedule", "ZBVZeroBubble", "--ranks", "2", *data]
    assert run(*options, "--json", str(tmp_path / "whole")).returncode == 0
    saves = ["--checkpoint", str(tmp_path / "saved"), "--checkpoint-every", "3"]
    command = [*COMMAND, *options, *saves, "--max-restarts", "2", "--json", str(tmp_path / "killed")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        until(tmp_path / "killed", 6, process)
        os.kill(ranks_of(process)[0], signal.SIGKILL)
        _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, errors
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert starts(tmp_path / "killed")[0] == 0
    assert starts(tmp_path / "killed")[-1] >= 3
    again = run(*options, *saves)
    assert again.returncode == 2
    assert f"--checkpoint {tmp_path}/saved holds a run already: give --resume to go on" in again.stderr
    other = run(*options, *saves, "--resume", "--seed", "1", "--clip", "2")
    assert other.returncode == 1
    assert "--seed was 0 and is 1; give the same, or save to another directory" in other.stderr
    assert "--clip was 1.0 and is 2.0" in other.stderr
    finished = run(*options, *saves, "--resume")
    assert (finished.returncode, finished.stdout) == (0, "step 12/12 was saved; there is nothing left to train\n")


def test_resumes_by_hand_after_everything_was_killed(data: list[str], tmp_path: Path) -> None:
    options = ["--schedule", "1F1B", "--ranks", "1", *data]
    saves = ["--checkpoint", str(tmp_path / "saved"), "--checkpoint-every", "2", "--resume"]
    assert run(*options, "--json", str(tmp_path / "whole")).returncode == 0
    command = [*COMMAND, *options, *saves, "--max-restarts", "1", "--json", str(tmp_path / "killed")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        until(tmp_path / "killed", 6, process)
        ranks = ranks_of(process)
        process.kill()
        process.communicate(timeout=DEADLINE)
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{rank}").exists() for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    ended = run(*options, *saves, "--json", str(tmp_path / "killed"))
    assert ended.returncode == 0, ended.stderr
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert starts(tmp_path / "killed")[1] >= 4


def test_what_cannot_be_saved_is_said_before_anything_starts(data: list[str]) -> None:
    ended = run(*data, "--resume", "--max-restarts", "-1", "--checkpoint-every", "0")
    assert ended.returncode == 2
    for part in (
        "--resume goes on from what was saved, and nothing is: give --checkpoint DIRECTORY",
        "--max-restarts -1 must be 0 or more",
        "--checkpoint-every 0 must be 1 or more",
    ):
        assert part in ended.stderr


def test_restarts_come_to_an_end(data: list[str], tmp_path: Path) -> None:
    """What fails each time is tried so often, and no more."""
    (tmp_path / "checkpoint.json").write_text("{")
    ended = run(
        *("--schedule", "1F1B", "--ranks", "2", *data, "--checkpoint-every", "1", "--max-restarts", "1"),
        *("--checkpoint", str(tmp_path), "--resume"),
    )
    assert ended.returncode == 1
    assert ended.stderr.count("rank 0: checkpoint") == 2
