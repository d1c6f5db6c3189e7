"""`pipeloom train`: a real model on real text, from the command to the numbers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeloom.schedules import make
from pipeloom.splitter import fill, split
from pipeloom.trainer.config import ModelConfig, OptimizerConfig, TrainConfig
from pipeloom.trainer.corpus import Corpus
from pipeloom.trainer.gpt import GPT, loss_fn
from pipeloom.trainer.text import read_text
from pipeloom.trainer.training import learning_rate

DEADLINE = 120
TINY = ModelConfig(layers=3, d_model=8, heads=2, context=6)
COMMAND = [
    *(sys.executable, "-m", "pipeloom", "train", "--layers", "3", "--d-model", "8", "--heads", "2", "--context", "6"),
    *("--batch-size", "4", "--microbatches", "2"),
]


@pytest.fixture(name="text")
def _text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return path


def run(*options: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, options)],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env=os.environ | environment,
        check=False,
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_trains_and_evaluates_alike_on_one_rank_and_on_two(text: Path, tmp_path: Path) -> None:
    csv = tmp_path / "mine.csv"
    csv.write_text("# stages 0 and 2 on rank 0\n0F0,2F0,2I0,0F1,2F1,2W0,0B0,2B1,0I1,0W1\n1F0,1I0,1F1,1W0,1B1\n")
    options: list[str | Path] = ["--data", text, "--steps", "4", "--eval-every", "2", "--json"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    runs = {
        "one": run("--schedule", "gpipe", *options, tmp_path / "one", **world),  # as torchrun would start it
        "two": run("--schedule", csv, "--ranks", "2", *options, tmp_path / "two"),
    }
    for ended in runs.values():
        assert ended.returncode == 0, ended.stderr
        results = ended.stdout.splitlines()
        assert [line.split("  ")[0] for line in results] == ["step 2/4", "step 4/4", results[2]]
        assert results[2].startswith("trained 4 steps in ")
    one, two = lines(tmp_path / "one"), lines(tmp_path / "two")
    assert [line["event"] for line in two] == ["start", "step", "step", "eval", "step", "step", "eval", "end"]
    assert (two[0]["ranks"], two[0]["microbatches"], two[0]["batch_size"]) == (2, 2, 4)
    assert (two[0]["data"], two[0]["trace"], two[0]["checkpoint"]) == (str(text), None, None)
    assert two[0]["model"] == {"layers": 3, "d_model": 8, "heads": 2, "context": 6}
    for alone, together in zip(one, two, strict=True):
        if "loss" in alone:
            assert together["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        if "gradient_norm" in alone:
            assert together["gradient_norm"] == pytest.approx(alone["gradient_norm"], rel=1e-5)
    assert one[-2]["loss"] < one[3]["loss"] < 5.6


@pytest.mark.parametrize("name", ["ZBVZeroBubble", "DualPipe"])
def test_verify_compares_every_step_with_one_process(name: str, text: Path, tmp_path: Path) -> None:
    options: list[str | Path] = [
        "--schedule",
        name,
        "--ranks",
        "2",
        "--data",
        text,
        "--steps",
        "4",
        "--eval-every",
        "2",
    ]
    ended = run(*options, "--verify", "--json", tmp_path / "metrics")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("  equal to the bit\n") == 4
    found = lines(tmp_path / "metrics")
    verified = [line for line in found if line["event"] == "verify"]
    assert [line["step"] for line in verified] == [1, 2, 3, 4]
    assert all(line["equal"] and line["loss"] == line["one_process"] for line in verified)
    assert [line["loss"] for line in found if line["event"] == "step"] == [line["loss"] for line in verified]


@pytest.fixture(name="running")
def _running(text: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A run on two ranks that is under way, and the processes of its ranks."""
    command = [*COMMAND, "--schedule", "1F1B", "--ranks", "2", "--data", str(text), "--steps", "1000000", "--json", "-"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        events = [json.loads(process.stdout.readline())["event"] for _ in range(3)]
        assert events == ["start", "step", "step"]
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        yield process, list(map(int, children.split()))
        process.kill()


def test_ctrl_c_ends_every_rank_quietly(running: tuple[subprocess.Popen[str], list[int]]) -> None:
    process, ranks = running
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130
    assert all(line.startswith("step ") for line in error.splitlines())
    assert len(ranks) == 2
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


def test_a_rank_that_dies_ends_all(running: tuple[subprocess.Popen[str], list[int]]) -> None:
    process, ranks = running
    os.kill(ranks[0], signal.SIGKILL)
    _, error = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    assert "rank 0 was killed by signal 9" in error or "rank 1 ended with exit status 1" in error
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


def test_every_mistake_is_named_at_once(tmp_path: Path) -> None:
    ended = run(
        *("--schedule", "nonesuch", "--batch-size", "0", "--heads", "3", "--clip", "nan", "--steps", "0"),
        *("--data", tmp_path / "no.txt", "--json", tmp_path / "no" / "x"),
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    for part in (
        "nonesuch",
        f"--data {tmp_path}/no.txt cannot be read: No such file or directory",
        f"--json {tmp_path}/no/x cannot be written",
        "--batch-size 0 must be 1 or more",
        "--d-model 8 must be a multiple of --heads 3: 8 = 3 x 2 + 2; take 6 or 9",
        "--clip nan must be above 0 and finite",
        "--steps 0 must be 1 or more",
    ):
        assert part in ended.stderr


def test_a_wrong_schedule_is_refused_before_anything_starts(tmp_path: Path) -> None:
    csv = tmp_path / "wrong.csv"
    csv.write_text("0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n")
    ended = run("--schedule", csv)
    assert ended.returncode == 1
    assert "stage 0" in ended.stderr
    csv.write_text("0F0,0F1\n1F0,1F1\n")
    assert "has no backward actions" in run("--schedule", csv).stderr


def test_a_file_may_have_copies_of_the_model(text: Path, tmp_path: Path) -> None:
    csv = tmp_path / "chimera.csv"
    csv.write_text(make("Chimera", ranks=2, microbatches=4).to_csv())
    options: list[str | Path] = ["--schedule", csv, "--data", text, "--steps", "2", "--batch-size", "8", "--verify"]
    options += ["--microbatches", "4"]
    ended = run(*options, "--copies", "2")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("  equal to the bit\n") == 2
    assert run(*options).returncode == 1  # as one chain of four stages it lacks microbatches


def test_a_schedule_that_cannot_be_run_is_refused_once(text: Path) -> None:
    name = "Seq1F1B"
    ended = run("--schedule", name, "--ranks", "2", "--microbatches", "4", "--batch-size", "16", "--data", text)
    assert (ended.returncode, ended.stdout) == (1, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"pipeloom: {name}")
    assert "DualPipeV" in line


def test_paths_and_seeds_that_cannot_be_used_are_refused_at_the_start(text: Path) -> None:
    ended = run("--data", "/dev/zero", "--checkpoint", text, "--seed", str(2**32))
    assert ended.returncode == 2
    for part in (
        "--data /dev/zero is no regular file",
        f"--checkpoint {text} is a file; give a directory",
        "--seed 4294967296 must be 0 to 4,294,967,295",
    ):
        assert part in ended.stderr
    assert f"--checkpoint {text}/below cannot be made" in run("--checkpoint", text / "below").stderr


def test_the_largest_seed_trains(text: Path) -> None:
    options = ("--schedule", "1F1B", "--ranks", "2", "--steps", "1", "--eval-every", "0")
    ended = run(*options, "--data", text, "--seed", str(2**32 - 1))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("trained 1 step in ")


@pytest.mark.parametrize("options", [[], ["--json", "-"]])
def test_a_reader_that_leaves_ends_every_rank_quietly(options: list[str], text: Path) -> None:
    command = [*COMMAND, "--schedule", "1F1B", "--ranks", "2", "--eval-every", "1", "--data", str(text), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
        assert process.wait(DEADLINE) == 141


def test_a_full_disk_is_said_without_a_traceback(text: Path) -> None:
    options = ["--schedule", "1F1B", "--ranks", "2", "--eval-every", "1", "--data", str(text), "--json", "/dev/full"]
    ended = run(*options)
    assert ended.returncode == 1
    assert "the results cannot be written: No space left on device" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_torchrun_must_start_as_many_ranks_as_the_schedule_has() -> None:
    ended = run("--schedule", "1F1B", "--ranks", "4", WORLD_SIZE="2", RANK="0")
    assert ended.returncode == 2
    assert "1F1B has 4 ranks, but torchrun started 2" in ended.stderr


@pytest.mark.parametrize(
    ("config", "messages"),
    [
        (TrainConfig(), []),
        (
            TrainConfig(batch_size=21),
            ["--batch-size 21 must be a multiple of --microbatches 10: 21 = 10 x 2 + 1; take 20 or 30"],
        ),
        (
            TrainConfig(batch_size=7),
            ["--batch-size 7 must be a multiple of --microbatches 10: 7 = 10 x 0 + 7; take 10"],
        ),
        (
            TrainConfig(model=ModelConfig(context=2000)),
            [
                "--data has 20000 bytes: the last tenth, 2000, is held out and must hold --context 2000 + 1 = 2001; "
                "take 20010 bytes or more, or a smaller --context"
            ],
        ),
        (
            TrainConfig(verify=True, checkpoint=Path("saved"), resume=True),
            ["--resume: --verify compares a run from its first step on; give one of the two"],
        ),
        (
            TrainConfig(model=ModelConfig(layers=0, heads=0)),
            ["--layers 0 must be 1 to 10,000", "--heads 0 must be 1 to 128"],
        ),
        (
            TrainConfig(optimizer=OptimizerConfig(learning_rate=0, warmup=-1)),
            ["--warmup -1 must be 0 or more", "--learning-rate 0 must be above 0 and finite"],
        ),
    ],
)
def test_mistakes(config: TrainConfig, messages: list[str]) -> None:
    assert config.mistakes(microbatches=10, text=20000) == messages


def test_learning_rate_rises_and_falls() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup=4)
    rates = [learning_rate(step, 24, config) for step in range(1, 25)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[13] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1)
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert learning_rate(1, 1, OptimizerConfig(learning_rate=1.0, warmup=0)) == pytest.approx(0.1)


def test_batches_follow_from_seed_and_step() -> None:
    corpus = Corpus(bytes(range(200)), 8)
    inputs, targets = corpus.batch(seed=1, step=2, size=50)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert inputs.shape == targets.shape == (50, 8)
    assert (targets - inputs == 1).all()
    assert targets.max() < 180
    assert torch.equal(corpus.batch(1, 2, 50)[0], inputs)
    assert not torch.equal(corpus.batch(1, 3, 50)[0], inputs)
    assert not torch.equal(corpus.batch(2, 2, 50)[0], inputs)


def test_searches_for_a_schedule_and_trains_under_it(text: Path, tmp_path: Path) -> None:
    options: list[str | Path] = ["--data", text, "--ranks", "2", "--steps", "2", "--eval-every", "0", "--json"]
    searched = run("--schedule", "search", "--memory", "1.5", *options, tmp_path / "searched")
    assert searched.returncode == 0, searched.stderr
    for word in ("5 steps of ZBVZeroBubble were measured", "makespan", "best possible", "instead of ZBVZeroBubble"):
        assert word in searched.stderr
    by_name = run("--schedule", "GPipe", *options, tmp_path / "by name")
    assert by_name.returncode == 0, by_name.stderr
    first, second = lines(tmp_path / "searched"), lines(tmp_path / "by name")
    assert first[0]["schedule"] == "found"
    assert [line["loss"] for line in first[1:]] == pytest.approx([line["loss"] for line in second[1:]], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--schedule", "search", "--memory", "0.5"), "the least that works is 1 rank share"),
        (("--schedule", "search", "--memory", "16e9B"), "how big activations are is not measured"),
        (("--schedule", "GPipe", "--memory", "2"), "--memory goes with --schedule search"),
    ],
)
def test_refuses_a_memory_that_cannot_be(options: tuple[str, ...], words: str) -> None:
    refused = run(*options)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert words in refused.stderr


def test_held_out_text_is_never_trained_on() -> None:
    corpus = Corpus(bytes(range(200)), 8)
    batches = [corpus.held_out(number, 3, 2) for number in range(3)]
    inputs, targets = (torch.cat(part) for part in zip(*batches, strict=True))
    assert [inputs.min().item(), targets.max().item()] == [180, 199]
    assert (targets - inputs == 1).all()


def test_the_default_text_is_the_same_each_time() -> None:
    text = read_text(None)
    assert len(text) > 1_000_000
    assert text == read_text(None)


def test_the_model_does_not_look_ahead() -> None:
    model = GPT(TINY)
    first = torch.randint(256, (2, 6))
    second = first.clone()
    second[:, 4:] = (second[:, 4:] + 1) % 256
    assert torch.equal(model(first)[:, :4], model(second)[:, :4])
    assert loss_fn(model(first), second).shape == ()


def test_weights_do_not_depend_on_the_split() -> None:
    whole, part = GPT(TINY), GPT(TINY)
    fill(whole, seed=5)
    schedule = make("ZBVZeroBubble", ranks=2, microbatches=4)
    found: dict[str, torch.Tensor] = {}
    for rank in range(2):
        for stage in split(part, schedule, rank=rank):
            fill(stage.module, seed=5)
            found |= stage.module.state_dict()
    assert found.keys() == whole.state_dict().keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in whole.state_dict().items())
