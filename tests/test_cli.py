"""The command line: arguments in; output, errors and exit status out."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from pipeloom import schedules
from pipeloom.cli import main

GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
STUCK = "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n"


class Result(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Result]


@pytest.fixture
def pipeloom(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs one command line in this process, which is many times faster than in one of its own."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*args: str, stdin: str | bytes = "") -> Result:
        monkeypatch.setattr(sys, "argv", ["pipeloom", *args])
        data = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        with pytest.raises(SystemExit) as exit:
            main()
        return Result(int(exit.value.code or 0), *capsys.readouterr())

    return run


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture
def good(tmp_path: Path) -> str:
    path = tmp_path / "good.csv"
    path.write_text(GOOD)
    return str(path)


def test_list(pipeloom: Run) -> None:
    result = pipeloom("list")
    assert (result.returncode, result.stderr) == (0, "")
    assert tuple(line.split()[0] for line in result.stdout.splitlines()) == ("NAME", *schedules.names())


def test_list_in_json(pipeloom: Run) -> None:
    entries = json.loads(pipeloom("list", "--json").stdout)
    assert entries[0]["name"] == "GPipe"
    assert {entry["placement"] for entry in entries} >= {"linear", "loop", "V"}


def test_list_as_a_table(pipeloom: Run) -> None:
    result = pipeloom("list", "--table", "--ranks", "3", "--microbatches", "4")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in result.stdout.splitlines()]
    assert (result.returncode, result.stderr) == (0, "")
    assert {len(row) for row in rows} == {8}
    assert rows[0][0] == "schedule"
    found = {row[0]: row[3:6] for row in rows[2:]}
    assert tuple(found) == schedules.names()
    assert found["GPipe"] == ["33.3%", "33.3%", "4"]
    assert found["DualPipe"] == ["", "", ""]


def test_show_draws_time_from_left_to_right(pipeloom: Run) -> None:
    result = pipeloom("show", "1f1b", "--ranks", "2", "--microbatches", "2")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == (
        "1F1B: 2 ranks, 2 stages, 2 microbatches\n"
        "\n"
        "slot     0   1   2   3   4   5   6   7   8\n"
        "rank 0 | 0F0 0F1 .   .   0B0---- .   0B1----\n"
        "rank 1 | .   1F0 1B0---- 1F1 1B1---- .   .\n"
        "\n"
        "makespan 9, bubble 33.3%, with F = I = W = 1, B = 2 and messages free\n"
    )


def test_show_joins_what_runs_as_one(pipeloom: Run) -> None:
    result = pipeloom("show", "DualPipeV", "--ranks", "1", "--microbatches", "2")
    assert "1F1&0B0----" in result.stdout
    assert "'&' joins what runs as one action" in result.stdout


@pytest.mark.parametrize(
    ("name", "microbatches", "makespan"),
    [("GPipe", 8, 3 * (8 + 3)), ("1F1B", 8, 3 * (8 + 3)), ("ZBVZeroBubble", 8, 6 * 8 + 3), ("Interleaved1F1B", 8, 57)],
)
def test_show_knows_the_published_makespans(pipeloom: Run, name: str, microbatches: int, makespan: int) -> None:
    result = pipeloom("show", name, "--ranks", "4", "--microbatches", str(microbatches), "--json")
    answer = json.loads(result.stdout)
    assert answer["makespan"] == makespan
    work = 3 * microbatches * answer["stages"]
    assert answer["bubble"] == pytest.approx(1 - work / (4 * makespan))


def test_show_of_lowered_rows_says_what_it_hides(pipeloom: Run) -> None:
    lowered = pipeloom("lower", "1F1B", "--ranks", "2", "--microbatches", "2").stdout
    shown = pipeloom("show", "-", stdin=lowered)
    assert "makespan 9," in shown.stdout
    assert "not shown, since free here: 8 actions of sending, receiving, sharding or reducing\n" in shown.stdout


def test_check_a_good_schedule(pipeloom: Run, good: str) -> None:
    result = pipeloom("check", good)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"{good} is right: 2 ranks, 2 stages, 2 microbatches\n"
    assert json.loads(pipeloom("check", good, "--json").stdout) == {"name": good, "ok": True, "problems": []}


def test_check_reads_standard_input(pipeloom: Run) -> None:
    assert pipeloom("check", "-", stdin=GOOD).stdout.startswith("standard input is right")
    assert pipeloom("check", "-", stdin="0F0").stdout == "standard input is right: 1 rank, 1 stage, 1 microbatch\n"
    assert pipeloom("check", "-", stdin="").returncode == 1


def test_check_prints_every_mistake_of_a_text(pipeloom: Run, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("0F0,0F0x,0B0\n1F0,1Q0,1B-1\n")
    result = pipeloom("check", str(path))
    assert (result.returncode, result.stderr) == (1, "")
    for place in ("bad.csv:1:2", "bad.csv:2:2", "bad.csv:2:3"):
        assert place in result.stdout
    answer = json.loads(pipeloom("check", str(path), "--json").stdout)
    assert answer["ok"] is False
    assert len(answer["problems"]) == 3
    assert answer["problems"][0]["code"] == "not-an-action"


def test_check_prints_a_circle_of_waiting(pipeloom: Run) -> None:
    result = pipeloom("check", "-", stdin=STUCK)
    assert result.returncode == 1
    assert "1F1" in result.stdout
    assert "0B0" in result.stdout


@pytest.mark.parametrize("command", ["show", "lower"])
def test_faults_go_to_standard_error(pipeloom: Run, command: str) -> None:
    result = pipeloom(command, "-", stdin=STUCK)
    assert (result.returncode, result.stdout) == (1, "")
    result = pipeloom(command, "-", "--json", stdin=STUCK)
    assert (result.returncode, result.stderr) == (1, "")
    assert json.loads(result.stdout)["ok"] is False


def test_lower_prints_what_check_accepts(pipeloom: Run, tmp_path: Path) -> None:
    args = ("lower", "ZBVZeroBubble", "--ranks", "2", "--microbatches", "4")
    plain = pipeloom(*args)
    assert (plain.returncode, plain.stderr) == (0, "")
    assert "SEND_F" in plain.stdout
    path = tmp_path / "lowered.csv"
    written = pipeloom(*args, "--output", str(path))
    assert (written.returncode, written.stdout, written.stderr) == (0, "", "")
    assert path.read_text() == plain.stdout
    assert pipeloom(*args, "--output", "-") == plain
    rows = json.loads(pipeloom(*args, "--json").stdout)["rows"]
    assert "".join(",".join(row) + "\n" for row in rows) == plain.stdout
    sharded = pipeloom(*args, "--shard", "--reduce").stdout
    assert "UNSHARD" in sharded
    assert "REDUCE_GRAD" in sharded
    for text in (plain.stdout, sharded):
        assert pipeloom("check", "-", stdin=text).returncode == 0


def test_a_name_wins_over_a_file_of_that_name(pipeloom: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "1F1B").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    assert pipeloom("check", "1F1B").returncode == 2
    assert pipeloom("check", "./1F1B").returncode == 0


def test_a_file_may_be_given_the_sizes_it_has(pipeloom: Run, good: str) -> None:
    assert pipeloom("check", good, "--ranks", "2", "--microbatches", "2").returncode == 0


def test_choices_of_a_named_schedule(pipeloom: Run) -> None:
    sizes = ("--ranks", "4", "--microbatches", "8")
    assert pipeloom("check", "GIS", *sizes, "--group", "4").returncode == 0
    assert pipeloom("check", "ControllableMemory", *sizes, "--memory", "3").returncode == 0
    assert "8 microbatches in 4 pieces" in pipeloom("check", "Seq1F1B", *sizes, "--pieces", "4").stdout
    for option in ("--group", "--memory", "--pieces"):
        refused = pipeloom("check", "GPipe", *sizes, option, "2")
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "GPipe" in refused.stderr


def test_wiring_of_a_file(pipeloom: Run) -> None:
    skip = "0F0,0B0\n1F0,1B0\n2F0,2B0\n"
    assert pipeloom("check", "-", "--skip", "0:2", stdin=skip).returncode == 0
    copies = "0F0,3F1,0B0,3B1\n1F0,2F1,1B0,2B1\n"
    assert pipeloom("check", "-", "--copies", "2", stdin=copies).returncode == 0
    assert pipeloom("check", "-", stdin=copies).returncode == 1
    pieces = "0F0,0F1,0B1,0B0\n"
    assert pipeloom("check", "-", "--pieces", "2", stdin=pieces).returncode == 0
    assert pipeloom("check", "-", "--pieces", "2", stdin="0F0,0F1,0B0,0B1\n").returncode == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["draw-nothing"], "No such command"),
        (["show"], "Missing argument 'SCHEDULE'"),
        (["show", "1F1B"], "--ranks 4 --microbatches 8"),
        (["show", "1F1B", "--ranks", "4"], "--ranks 4 --microbatches 8"),
        (["show", "1F1B", "--ranks", "0", "--microbatches", "8"], "greater than or equal to 1"),
        (["show", "1F1B", "--ranks", "-3", "--microbatches", "8"], "greater than or equal to 1"),
        (["show", "1F1B", "--ranks", "four", "--microbatches", "8"], "valid integer"),
        (["show", "1F1B", "--ranks", "4.5", "--microbatches", "8"], "valid integer"),
        (["show", "1F1B", "--ranks", "9" * 30, "--microbatches", "8"], "forwards or more"),
        (["show", "1F1B", "--ranks", "9" * 5000, "--microbatches", "8"], "--ranks"),
        (["show", "1F1B", "--ranks", "1000", "--microbatches", "1000000"], "forwards or more"),
        (["show", "1F1B", "--ranks", "4", "--microbatches", "8", "--stages-per-rank", "3"], "must be 1, got 3"),
        (["show", "LoopedBSF", "--ranks", "4", "--microbatches", "8"], "did you mean LoopedBFS"),
        (["show", "no/such/file.csv"], "there is no file"),
        (["show", ""], "there is no file"),
        (["show", "/"], "a directory"),
        (["show", "/dev/zero"], "no file"),
        (["show", "nul\udcffname"], "there is no file"),
        (["show", "1F1B", "--ranks", "2", "--microbatches", "2", "--copies", "2"], "a wiring of its own"),
        (["show", "1F1B", "--ranks", "2", "--microbatches", "2", "--skip", "0:2"], "a wiring of its own"),
        (["check", "GOOD", "--ranks", "3"], "has 2"),
        (["check", "GOOD", "--microbatches", "3"], "has 2"),
        (["check", "GOOD", "--stages-per-rank", "1"], "--stages-per-rank"),
        (["check", "GOOD", "--group", "1"], "--group"),
        (["check", "GOOD", "--memory", "1"], "--memory"),
        (["check", "1F1B", "--ranks", "2", "--microbatches", "2", "--memory", "lots"], "valid number"),
        (["check", "ControllableMemory", "--ranks", "2", "--microbatches", "2", "--memory", "nan"], "memory"),
        (["check", "ControllableMemory", "--ranks", "2", "--microbatches", "2", "--memory", "-1"], "memory"),
        (["check", "GOOD", "--copies", "3"], "not 3 equal copies"),
        (["check", "GOOD", "--pieces", "0"], "greater than or equal to 1"),
        (["check", "GOOD", "--skip", "0-1"], "as 0:3"),
        (["check", "GOOD", "--skip", "0:1"], "neighbours are wired already"),
        (["check", "GOOD", "--skip", "0:99999999999"], "as 0:3"),
        (["check", "GOOD", "more"], "unexpected extra argument"),
        (["lower", "GOOD", "--ahead", "-1"], "greater than or equal to 0"),
        (["lower", "GOOD", "--output", "/no/such/folder/x.csv"], "No such file or directory"),
        (["lower", "GOOD", "--output", "/"], "directory"),
        (["list", "1F1B"], "unexpected extra argument"),
        (["list", "--table"], "--table needs --ranks and --microbatches"),
        (["list", "--ranks", "4"], "they need --table"),
        (["list", "--table", "--ranks", "4", "--microbatches", "4", "--json"], "leave out --json"),
    ],
)
def test_bad_usage(pipeloom: Run, args: list[str], words: str, good: str) -> None:
    result = pipeloom(*[good if arg == "GOOD" else arg for arg in args])
    assert (result.returncode, result.stdout) == (2, "")
    assert words in one_line(result.stderr)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\n\n\n",
        b"# nothing\n",
        b"\x00\x01\x02",
        b"\xff\xfe0F0",
        b"0F99999999999999999999\n",
        b"-1F0\n",
        b"0F-1\n",
        b"F0\n",
        b"0F\n",
        b"0f0\n",
        b"(0F0;0B0\n",
        b"(0F0)OVERLAP_F_B\n",
        "0F0,0B0\u2603\n".encode(),
        b"0F0 0B0\n",
        b"0F0;0B0\n",
        b"0F0,0F0,0B0\n",
        b"0F0,0B0,0B0\n",
        b"0B0,0F0\n",
        b"0F0\n0B0\n",
        b"0F0,0F2,0B0,0B2\n",
        b"1F0,1B0\n",
        b"0F0,0I0\n",
        b"0F0,0W0,0I0\n",
        b"0F0,0SEND_F0,0B0\n1F0,1B0\n",
        b"0UNSHARD,0F0,0B0\n",
        b"999999F999999\n",
    ],
)
@pytest.mark.parametrize("command", ["check", "show", "lower"])
def test_wrong_texts(pipeloom: Run, command: str, text: bytes) -> None:
    result = pipeloom(command, "-", stdin=text)
    report = result.stdout if command == "check" else result.stderr
    assert result.returncode == 1
    assert "problem" in report


def test_an_unreadable_answer_is_no_traceback() -> None:
    command = f"{sys.executable} -m pipeloom show GPipe --ranks 16 --microbatches 400"
    closed = subprocess.run(["bash", "-c", f"{command} | head -n 1"], capture_output=True, text=True, timeout=120)
    assert (closed.stdout, closed.stderr) == ("GPipe: 16 ranks, 16 stages, 400 microbatches\n", "")
    for args in ("show GPipe --ranks 16 --microbatches 400", "--help", "-h", "--version", "show --help", "list"):
        command = f"{sys.executable} -m pipeloom {args} >/dev/full"
        full = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
        assert full.returncode == 2
        assert full.stderr == "pipeloom: the answer cannot be written: No space left on device\n"


def test_closed_streams_are_no_traceback() -> None:
    command = f"{sys.executable} -m pipeloom check - <&- >&-"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (1, "")


def test_version(pipeloom: Run) -> None:
    assert pipeloom("--version").stdout.startswith("pipeloom 0.")
