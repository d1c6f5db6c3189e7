"""`pipeloom search`: what it prints and writes, what it refuses, and Ctrl-C."""

import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import pipeloom as pl
from pipeloom.cli import main

Run = Callable[..., tuple[int, str, str]]
SMALL = ("search", "--ranks", "2", "--microbatches", "4")
HARD = pl.Costs(
    F=[31, 37, 41, 43, 47, 53, 59, 61], I=[37, 31, 43, 41, 53, 47, 61, 59], W=[17, 19, 23, 29, 13, 11, 7, 5]
)


@pytest.fixture
def pipeloom(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs one command line in this process."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*args: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pipeloom", *args])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with pytest.raises(SystemExit) as exit:
            main()
        return int(exit.value.code or 0), *capsys.readouterr()

    return run


def test_what_is_found_goes_to_a_file_and_what_is_known_of_it_to_the_output(pipeloom: Run, tmp_path: Path) -> None:
    best, costs = tmp_path / "best.csv", tmp_path / "costs.json"
    costs.write_text(pl.Costs(F=2, I=2, W=2, communication=0.5).to_json())
    options = ("--placement", "linear", "--memory", "2", "--costs", str(costs), "-o", str(best))
    status, out, err = pipeloom(*SMALL, *options)
    assert status == 0
    assert out == (
        "makespan  28, of which ranks are idle 14.3% (bubble)\n"
        "span      28, of which ranks are idle 14.3% (span bubble)\n"
        "memory    2 rank shares of activations at most\n"
        "found by  InterleavedZeroBubble; no makespan is smaller\n"
    )
    assert "above the best possible" in err
    schedule = pl.Schedule.from_csv(best)
    assert pl.check(schedule, memory=2) == []
    assert pl.simulate(schedule, pl.Costs.from_json(costs)).makespan == 28


def test_without_a_file_the_rows_are_the_answer(pipeloom: Run) -> None:
    status, rows, err = pipeloom(*SMALL, "--memory", "100%")
    assert status == 0
    assert "no makespan is smaller" in err
    assert pipeloom("check", "-", stdin=rows)[0] == 0


def test_json(pipeloom: Run) -> None:
    options = ("--placement", "any", "--whole", "--objective", "span", "--memory", "4B", "--work", "0.1", "--json")
    status, out, _ = pipeloom(*SMALL, *options)
    found = json.loads(out)
    assert status == 0
    assert (found["objective"], found["ranks"], found["stages"], found["microbatches"]) == ("span", 2, 4, 4)
    assert found["bound"] <= found["span"] <= found["makespan"]
    assert found["gap"] == pytest.approx(found["span"] / found["bound"] - 1)
    assert max(found["peak_memory"]) <= 4
    schedule = pl.Schedule.from_csv("\n".join(",".join(row) for row in found["rows"]))
    assert [schedule.placement[stage] for stage in range(4)] == found["placement"]
    assert {action.kind for row in schedule.rows for cell in row for action in cell.computes} == {"F", "B"}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--memory", "0.5"], "the least that works is 1 rank share, which is 50% or 2B"),
        (["--memory", "1B"], "the least that works is 1 rank share, which is 50% or 2B"),
        (["--memory", "much"], "must be a number of rank shares"),
        (["--memory", "nan"], "must be a number of rank shares"),
        (["--memory", "-1"], "must be a number of rank shares"),
        (["--placement", "U"], "placement must be linear, loop, V, wave or any"),
        (["--objective", "beauty"], "beauty"),
        (["--seconds", "-1"], "--seconds"),
        (["--output", "/no/such/folder/best.csv"], "No such file or directory"),
    ],
)
def test_bad_usage(pipeloom: Run, args: list[str], words: str) -> None:
    status, out, err = pipeloom(*SMALL, *args)
    assert (status, out) == (2, "")
    assert words in " ".join(err.split())


def test_costs_that_do_not_fit_are_a_fault(pipeloom: Run, tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text('{"F": [1, 2, 3]}')
    status, out, err = pipeloom(*SMALL, "--costs", str(tmp_path / "costs.json"))
    assert (status, out) == (1, "")
    assert "expected 4 numbers, one a stage, got 3" in err


def test_a_refusal_leaves_no_file(pipeloom: Run, tmp_path: Path) -> None:
    assert pipeloom(*SMALL, "--memory", "0.5", "-o", str(tmp_path / "best.csv"))[0] == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["9" * 400, "none/best.csv", "."], ids=["too long", "no folder", "a folder"])
def test_an_output_that_cannot_be_written_is_refused_first(pipeloom: Run, tmp_path: Path, name: str) -> None:
    status, out, err = pipeloom("search", "--ranks", "2", "--microbatches", "2", "-o", str(tmp_path / name))
    assert (status, out) == (2, "")
    assert "cannot be written" in err
    assert "Traceback" not in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device here")
@pytest.mark.parametrize("as_json", [False, True])
def test_what_is_found_is_not_lost_where_the_output_turns_out_to_be_full(pipeloom: Run, as_json: bool) -> None:
    small = ("search", "--ranks", "2", "--microbatches", "2", "--work", "0.1", "-o", "/dev/full")
    status, out, err = pipeloom(*small, *(["--json"] if as_json else []))
    assert status == 2
    assert err.endswith(
        "pipeloom: --output /dev/full cannot be written: No space left on device; "
        "the schedule is on the standard output instead\n"
    )
    rows = "\n".join(",".join(row) for row in json.loads(out)["rows"]) if as_json else out
    assert pl.check(pl.Schedule.from_csv(rows)) == []


def test_sizes_far_beyond_any_pipeline_are_refused(pipeloom: Run) -> None:
    status, out, err = pipeloom("search", "--ranks", "1000", "--microbatches", "100000", "--work", "1")
    assert (status, out) == (2, "")
    assert err == (
        "pipeloom: search: schedules of these sizes have 200,000,000 forwards, at most 1,000,000 are searched for; "
        "search with fewer microbatches\n"
    )


@pytest.mark.parametrize(
    ("costs", "memory", "expected"),
    [
        ({}, "1", "1 rank share of"),
        ({}, "2", "2 rank shares of"),
        ({"activation": 0}, "2", "0 rank shares of"),
        ({"activation": [0, 1, 1, 1]}, "1", "1 rank share of"),
        ({"activation": [1, 0.5, 0, 0.5], "activation_at_I": [0.5, 0, 0, 0.5]}, "1", "1 rank share of"),
    ],
)
def test_memory_is_reported_in_what_it_is_limited_in(
    pipeloom: Run, tmp_path: Path, costs: dict[str, object], memory: str, expected: str
) -> None:
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    options = ("--memory", memory, "--costs", str(tmp_path / "costs.json"), "--work", "0.1")
    _, _, err = pipeloom(*SMALL, *options)
    assert f"memory    {expected} activations at most\n" in err


def test_ctrl_c_gives_the_best_so_far(tmp_path: Path) -> None:
    best, costs = tmp_path / "best.csv", tmp_path / "costs.json"
    costs.write_text(HARD.to_json())
    command = [sys.executable, "-m", "pipeloom", "search", "--ranks", "4", "--microbatches", "8", "--memory", "2.5"]
    command += ["--costs", str(costs), "--seconds", "10000", "-o", str(best), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "above the best possible" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=200)
    assert (process.returncode, "Traceback" in err) == (0, False)
    found = json.loads(out)
    assert not found["proven"]
    schedule = pl.Schedule.from_csv(best)
    assert pl.check(schedule, memory=2.5) == []
    assert pl.simulate(schedule, HARD).makespan == found["makespan"]
