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
    options = ["--schedule", "1F1B", "--ranks", "2", *data, "--checkpoint", str(tmp_path / "saved"), "--resume"]
    assert run(*options).returncode == 0
    next((tmp_path / "saved").glob("save-*/model/*.safetensors")).unlink()
    ended = run(*options, "--max-restarts", "1")
    assert ended.returncode == 1
    assert ended.stderr.count("rank 0: checkpoint") == 2
    (tmp_path / "saved" / "checkpoint.json").write_text("{")
    ended = run(*options, "--max-restarts", "1")
    assert ended.returncode == 1
    assert ended.stderr.count("is damaged: it is not what was saved") == 1


def test_a_run_with_other_options_is_refused_once_and_with_all_of_them(data: list[str], tmp_path: Path) -> None:
    saved = ["--checkpoint", str(tmp_path / "saved"), "--schedule", "1F1B", "--ranks", "1", "--eval-every", "0"]
    assert run(*saved, *data).returncode == 0
    text = tmp_path / "other.txt"
    text.write_text("another text " * 100)
    other = run(
        *(*saved, "--resume", "--data", str(text), "--ranks", "2", "--layers", "4", "--d-model", "16", "--heads", "4"),
        *("--context", "7", "--steps", "13", "--batch-size", "8", "--seed", "1", "--clip", "2", "--warmup", "3"),
        *("--learning-rate", "1", "--weight-decay", "2", "--eval-batches", "0"),
    )
    assert (other.returncode, other.stdout) == (2, "")
    where = f"in the run in --checkpoint {tmp_path}/saved; give the same, or another directory\n"
    for mistake in (
        f"--layers is 4 and was 3 {where}",
        f"--d-model is 16 and was 8 {where}",
        f"--heads is 4 and was 2 {where}",
        f"--context is 7 and was 6 {where}",
        f"--steps is 13 and was 12 {where}",
        f"--batch-size is 8 and was 4 {where}",
        f"--seed is 1 and was 0 {where}",
        f"--clip is 2.0 and was 1.0 {where}",
        f"--warmup is 3 and was 10 {where}",
        f"--learning-rate is 1.0 and was 0.001 {where}",
        f"--weight-decay is 2.0 and was 0.1 {where}",
        f"--data is another text than that of {where.removeprefix('in ')}",
        "--eval-batches 0 must be 1 or more",
    ):
        assert other.stderr.count(mistake) == 1, mistake
    assert other.stderr.count("\n") == 14
