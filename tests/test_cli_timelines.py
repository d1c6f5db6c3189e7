"""The sub-commands that price, draw, compare and explain."""

import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import pipeloom as pl
from pipeloom.cli import main
from timelines import measured

Run = Callable[..., tuple[int, str, str]]
SIZES = ("--ranks", "2", "--microbatches", "3")


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


def test_simulate(pipeloom: Run) -> None:
    status, out, err = pipeloom("simulate", "1F1B", *SIZES)
    assert (status, err) == (0, "")
    assert out == (
        "1F1B: 2 ranks, 2 stages, 3 microbatches\n"
        "\n"
        "makespan  12, of which ranks are idle 25.0% (bubble)\n"
        "span      12, of which ranks are idle 25.0% (span bubble)\n"
        "messages  6, of size 0 all together\n"
        "\n"
        "RANK  BUSY  IDLE         PEAK ACTIVATIONS  PEAK MEMORY\n"
        "   0     9     3  25.0%                 2            2\n"
        "   1     9     3  25.0%                 1            1\n"
    )


def test_choices_of_a_named_schedule(pipeloom: Run) -> None:
    sizes = ("--ranks", "8", "--microbatches", "32")
    of = {
        options: json.loads(pipeloom("simulate", *options, *sizes, "--json")[1])
        for options in (
            ("GIS", "--group", "4"),
            ("GIS", "--group", "8"),
            ("ControllableMemory", "--memory", "4"),
            ("Seq1F1B", "--pieces", "4"),
        )
    }
    assert [found["makespan"] for found in of.values()] == [210, 206, 215, 96 * 4 + 7 * 3]
    assert pipeloom("explain", "GIS", "--group", "4", *sizes)[0] == 0
    assert pipeloom("draw", "GIS", "--group", "4", *sizes, "--json")[0] == 0
    assert pipeloom("compare", "GIS", "--group", "4", *sizes, "--json")[0] == 0
    assert pipeloom("simulate", "1F1B", "--group", "4", *sizes)[0] == 2


def test_simulate_with_costs_in_json(pipeloom: Run, tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text(pl.Costs(F=2, output_size=3).to_json())
    status, out, _ = pipeloom("simulate", "1F1B", *SIZES, "--costs", str(tmp_path / "costs.json"), "--json")
    found = json.loads(out)
    assert status == 0
    assert (found["makespan"], found["messages"], found["volume"]) == (16, 6, 18)
    assert found["peak_activations"] == [2, 1]


def test_what_simulate_writes_is_read_again(pipeloom: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "timeline.json")
    assert pipeloom("simulate", "GPipe", *SIZES, "--output", path)[0] == 0
    assert pl.Timeline.from_json(path).makespan == 12
    assert pipeloom("simulate", path)[1] == pipeloom("simulate", "GPipe", *SIZES)[1]


def test_draw_on_a_pipe_is_plain(pipeloom: Run) -> None:
    status, out, err = pipeloom("draw", "1F1B", *SIZES)
    assert (status, err) == (0, "")
    assert "\x1b" not in out
    assert out.splitlines()[3].startswith("rank 0 F0---")


@pytest.mark.parametrize("command", ["show", "draw"])
@pytest.mark.parametrize(
    ("environment", "colours"),
    [
        ({"TERM": "dumb"}, False),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, False),
        ({"TERM": "xterm-256color"}, True),
        ({"TERM": "xterm", "COLORTERM": ""}, True),
    ],
)
def test_colours_are_for_terminals_that_have_them(command: str, environment: dict[str, str], colours: bool) -> None:
    master, terminal = pty.openpty()
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLORTERM")}
    arguments = [sys.executable, "-m", "pipeloom", command, "1F1B", *SIZES]
    with subprocess.Popen(arguments, stdout=terminal, env={**kept, **environment}) as process:
        os.close(terminal)
        written = b""
        with suppress(OSError):  # the end of a terminal
            while data := os.read(master, 65536):
                written += data
    os.close(master)
    assert process.returncode == 0
    assert (b"\x1b" in written) is colours


@pytest.mark.parametrize("ending", ["svg", "html", "txt", "json", "perfetto-trace"])
def test_draw_to_a_file(pipeloom: Run, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"picture.{ending}"
    assert pipeloom("draw", "1F1B", "GPipe", *SIZES, "-o", str(path), "--memory", "2") == (0, "", "")
    assert path.stat().st_size > 0


def test_draw_does_not_write_over_what_it_draws(pipeloom: Run, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    pipeloom("simulate", "1F1B", *SIZES, "-o", str(path))
    before = path.read_bytes()
    status, _, err = pipeloom("draw", str(path), "-o", str(path))
    assert status == 2
    assert "is what is to be drawn, and would be lost; give another name" in " ".join(err.split())
    assert path.read_bytes() == before


def test_draw_from_the_standard_input(pipeloom: Run) -> None:
    status, out, _ = pipeloom("draw", "-", "--json", stdin="0F0,0B0\n1F0,1B0\n")
    assert status == 0
    assert [each["makespan"] for each in json.loads(out)] == [6]


def test_compare(pipeloom: Run, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(measured().to_json())
    mine = tmp_path / "mine.csv"
    mine.write_text("0F0,0B0\n1F0,1B0\n")
    status, out, err = pipeloom("compare", "1F1B", "ZBVZeroBubble", str(mine), *SIZES, "-o", str(tmp_path / "all.svg"))
    assert (status, err) == (0, "")
    heads, first, second, third, _, note = out.splitlines()
    assert heads.split("  ")[0] == "SCHEDULE"
    assert first.split()[:4] == ["1F1B", "12", "25.0%", "12"]
    assert second.split()[0] == "ZBVZeroBubble"
    assert third.split()[:2] == [str(mine), "6"]
    assert note == "simulated with F = I = W = 1 for a rank's share of the model, and messages free"
    assert (tmp_path / "all.svg").read_text().count("<title>") == 1
    _, out, _ = pipeloom("compare", str(tmp_path / "run.json"), "--json")
    assert [each["measured"] for each in json.loads(out)] == [True]


def test_options_that_fit_nothing_given(pipeloom: Run, tmp_path: Path) -> None:
    mine = tmp_path / "rows.txt"
    mine.write_text("0F0,0B0\n1F0,1B0\n")
    for args in ((str(mine), "--ranks", "3"), ("1F1B", *SIZES, "--copies", "2"), (str(mine), "--stages-per-rank", "2")):
        assert pipeloom("compare", *args)[0] == 2
    assert pipeloom("compare", str(mine), "gpipe", "--ranks", "3", "--microbatches", "2")[0] == 0
    assert pipeloom("compare", "-", "-")[0] == 2
    (tmp_path / "run.json").write_text(measured().to_json())
    status, _, err = pipeloom("compare", str(tmp_path / "run.json"), "1F1B", *SIZES)
    assert (status, "give --costs, in seconds too" in err) == (2, True)


def test_options_that_a_timeline_cannot_take_are_refused(pipeloom: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "run.json")
    (tmp_path / "run.json").write_text(pl.simulate(pl.schedules.make("1F1B", ranks=2, microbatches=3)).to_json())
    (tmp_path / "costs.json").write_text("{}")
    choices = [("--ranks", "3"), ("--microbatches", "2"), ("--stages-per-rank", "1"), ("--group", "2")]
    choices += [("--copies", "2"), ("--pieces", "2"), ("--skip", "0:2"), ("--receives", "blocking")]
    choices += [("--costs", str(tmp_path / "costs.json"))]
    for command in ("simulate", "draw", "compare", "explain"):
        for choice in [*choices, *([("--memory", "2")] if command in ("simulate", "explain") else [])]:
            status, out, err = pipeloom(command, path, *choice)
            assert (status, out) == (2, ""), (command, choice)
            assert err.startswith(f"pipeloom: {choice[0]} cannot be applied to {path}: ")
    _, _, err = pipeloom("simulate", path, *choices[0], *choices[-2], *choices[-1])
    assert err.startswith("pipeloom: --costs and --receives and --ranks cannot be applied to ")


def test_compare_says_by_what_costs_each_is_simulated(pipeloom: Run, tmp_path: Path) -> None:
    schedule = pl.schedules.make("DualPipeV", ranks=2, microbatches=3)
    of_a_stage, dear = str(tmp_path / "plain.json"), str(tmp_path / "dear.json")
    Path(of_a_stage).write_text(pl.simulate(schedule).to_json())
    Path(dear).write_text(pl.simulate(schedule, pl.Costs(F=5, activation=[1, 2, 3, 4])).to_json())
    (tmp_path / "run.json").write_text(measured().to_json())

    def note(*args: str) -> str:
        status, out, _ = pipeloom("compare", *args)
        assert status == 0
        return out.partition("\n\n")[2]

    share = "simulated with F = I = W = 1 for a rank's share of the model, and messages free\n"
    stage = "simulated with F = I = W = 1 for a stage, and messages free\n"
    own = "simulated with F = I = W = 1 for a stage, but F = 5.0, activation = [1.0, 2.0, 3.0, 4.0]\n"
    differ = "the costs differ, so the times do not compare:\n"
    assert note("DualPipeV", "1F1B", *SIZES) == share
    assert note(of_a_stage, of_a_stage) == stage
    assert note(dear, dear) == own
    assert note(of_a_stage, "1F1B", *SIZES) == f"{differ}  DualPipeV  {stage}  1F1B       {share}"
    assert note(of_a_stage, dear) == f"{differ}  DualPipeV  {stage}  DualPipeV  {own}"
    assert note(str(tmp_path / "run.json"), str(tmp_path / "run.json")) == note(dear) == ""


def test_schedules_of_one_model_take_the_same_work(pipeloom: Run) -> None:
    _, out, _ = pipeloom("compare", *pl.schedules.names(), "--ranks", "4", "--microbatches", "8", "--json")
    assert {round(sum(each["busy"]), 6) for each in json.loads(out)} == {4 * 8 * 3}


def test_explain(pipeloom: Run) -> None:
    status, out, err = pipeloom("explain", "GPipe", *SIZES)
    assert (status, err) == (0, "")
    assert "Ranks are idle 6 of 24, all together:" in out
    _, out, _ = pipeloom("explain", "GPipe", *SIZES, "--json")
    assert json.loads(out)["when"] == {"start": 1, "middle": 3, "end": 2}


@pytest.mark.parametrize("command", ["simulate", "draw", "compare", "explain"])
def test_what_is_wrong_is_said(pipeloom: Run, tmp_path: Path, command: str) -> None:
    stuck = tmp_path / "stuck.csv"
    stuck.write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    status, out, err = pipeloom(command, str(stuck))
    assert (status, out) == (1, "")
    assert "circle" in err
    (tmp_path / "costs.json").write_text('{"F": -1}')
    status, _, err = pipeloom(command, "1F1B", *SIZES, "--costs", str(tmp_path / "costs.json"))
    assert status == 1
    assert "expected a number, 0 or more, got -1" in err
    status, _, err = pipeloom(command, "1F1B")
    assert status == 2
    assert "1F1B needs its sizes" in err
    (tmp_path / "broken.json").write_text("{}")
    status, _, err = pipeloom(command, str(tmp_path / "broken.json"))
    assert status == 1
    assert "ranks" in err


def test_search_names_the_file_of_costs_and_takes_minus_for_the_standard_output(
    pipeloom: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    search = ("search", "--ranks", "1", "--microbatches", "1", "--seconds", "0")
    status, out, err = pipeloom(*search, "--costs", "missing.json")
    assert (status, out) == (2, "")
    assert err.startswith("pipeloom: --costs 'missing.json' cannot be read: No such file")
    Path("costs.json").write_text('{"F": [1, 2, 3]}')
    status, out, err = pipeloom(*search, "--costs", "costs.json")
    assert (status, out) == (1, "")
    assert "costs.json: F: expected 2 numbers, one a stage, got 3" in err
    assert pipeloom(*search, "-o", "-")[:2] == pipeloom(*search)[:2]
    assert not Path("-").exists()


@pytest.mark.parametrize("command", ["simulate", "draw", "compare", "explain", "split"])
def test_files_that_cannot_be_read_are_bad_usage(pipeloom: Run, tmp_path: Path, command: str) -> None:
    missing = str(tmp_path / "missing.json")
    for costs in (missing, '{"F": 2}', str(tmp_path)):
        status, out, err = pipeloom(command, "1F1B", *SIZES, "--costs", costs)
        assert (status, out) == (2, "")
        assert err.startswith(f"pipeloom: --costs '{costs}' ")
        assert err.endswith("; name a file\n")
    if command != "split":
        status, out, err = pipeloom(command, missing)
        assert (status, out) == (2, "")
        assert f"'{missing}' cannot be read: No such file" in err


@pytest.mark.parametrize("command", ["simulate", "draw", "compare", "explain"])
def test_costs_that_do_not_fit_are_said_with_their_file(pipeloom: Run, tmp_path: Path, command: str) -> None:
    path = tmp_path / "costs.json"
    for text, expected in (
        ('{"F": [1, 2, 3], "W": [1]}', ("F: expected 2 numbers", "W: expected 2 numbers")),
        ('{"activation_at_I": 2, "Q": 1, "F": -1}', ("activation_at_I: I releases 2.0", "'Q' is not a cost", "F: ")),
        ('{"F": 1e308}', ("the times of this schedule add up to more",)),
    ):
        path.write_text(text)
        status, out, err = pipeloom(command, "1F1B", *SIZES, "--costs", str(path))
        assert (status, out) == (1, "")
        assert err.startswith(f"pipeloom: {path}: {len(expected)} problem")
        assert all(f"{path}: {words}" in err for words in expected)


def test_only_lower_writes_a_file_called_minus_to_the_standard_output(
    pipeloom: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "layers.json").write_text('{"layers": [{"name": "a", "F": 1}, {"name": "b", "F": 1}]}')
    for command in (
        ("simulate", "1F1B", *SIZES),
        ("draw", "1F1B", *SIZES),
        ("compare", "1F1B", *SIZES),
        ("split", "1F1B", *SIZES, "--costs", "layers.json"),
        ("profile", "1F1B", *SIZES),
    ):
        status, out, err = pipeloom(*command, "-o", "-")
        assert (status, out) == (2, "")
        assert "'-'" in err or "--output -:" in err
    assert [path.name for path in tmp_path.iterdir()] == ["layers.json"]


def test_pictures_that_cannot_be_written(pipeloom: Run, tmp_path: Path) -> None:
    status, _, err = pipeloom("draw", "1F1B", *SIZES, "-o", str(tmp_path / "picture.gif"))
    assert (status, "must end in one of" in err) == (2, True)
    status, _, err = pipeloom("simulate", "1F1B", *SIZES, "-o", str(tmp_path / "no" / "where.json"))
    assert (status, "cannot be written" in err) == (2, True)
