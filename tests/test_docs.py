"""What the documents show is what happens."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pipeloom as pl
from pipeloom.runtime.launcher import launch

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "text.md").read_text()
SCHEDULES = re.findall(r"```csv\n(.*?)```", TEXT, re.DOTALL)


def pipeloom(command: str, cwd: Path) -> str:
    args = [sys.executable, "-m", "pipeloom", *shlex.split(command)]
    return subprocess.run(args, capture_output=True, text=True, timeout=120, cwd=cwd).stdout.rstrip()


def transcript(document: str, command: str) -> str:
    """What a document shows behind `$ pipeloom command`."""
    shown = re.search(rf"^    \$ pipeloom {re.escape(command)}\n((?:    .*\n|\n)*)", document, re.MULTILINE)
    assert shown is not None
    return re.sub(r"^    ", "", shown[1], flags=re.MULTILINE).rstrip()


@pytest.mark.parametrize("text", SCHEDULES, ids=range(len(SCHEDULES)))
def test_schedules_in_the_text_page_are_right(text: str) -> None:
    assert pl.check(pl.Schedule.from_csv(text)) == []


def test_mistakes_in_the_text_page(tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text("0F0,0Q1,0B0\n1F0,1F1,1B,1B1\n")
    assert pipeloom("check bad.csv", tmp_path) == transcript(TEXT, "check bad.csv")


@pytest.mark.parametrize(
    "command",
    ["compare 1F1B ZBVZeroBubble DualPipeV --ranks 4 --microbatches 8", "explain GPipe --ranks 2 --microbatches 2"],
)
def test_what_the_pictures_page_shows(command: str, tmp_path: Path) -> None:
    assert pipeloom(command, tmp_path) == transcript((ROOT / "docs" / "pictures.md").read_text(), command)


def test_the_table_of_the_schedules_page(tmp_path: Path) -> None:
    table = pipeloom("list --table --ranks 8 --microbatches 32", tmp_path)
    assert table.count("\n") == 1 + len(pl.schedules.names())
    assert f"\n{table}\n" in (ROOT / "docs" / "schedules.md").read_text()


def test_what_the_search_page_shows(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "search.md").read_text()
    layers = re.search(r"^    \{\n(?:    .*\n)*?    \}\n", page, re.MULTILINE)
    assert layers is not None
    (tmp_path / "layers.json").write_text(layers[0])
    for command in (
        "split --costs layers.json --stages 4",
        "search --ranks 4 --microbatches 8 --placement linear --memory 3 --work 10 -o best.csv",
    ):
        assert pipeloom(command, tmp_path) == transcript(page, command)


def test_readme(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    command = "show 1F1B --ranks 4 --microbatches 4"
    assert pipeloom(command, tmp_path) == transcript(readme, command)
    schedule = pl.schedules.make("1F1B", ranks=4, microbatches=4)
    assert "".join(f"    {line}\n" for line in schedule.to_csv().splitlines()) in readme


def _train(code: str) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(8)))
    batches = [(torch.randn(20, 4), torch.randint(4, (20,)))]
    # One write a line, so that the lines of four ranks do not run into each other.
    exec(code, {"model": model, "batches": batches, "print": lambda value: os.write(1, f"{value}\n".encode())})


def test_the_training_script_of_the_readme_runs(capfd: pytest.CaptureFixture[str]) -> None:
    readme = (ROOT / "README.md").read_text()
    script = re.search(r"^    import torch.*\n((?:    .*\n|\n)*)", readme, re.MULTILINE)
    assert script is not None
    code = re.sub(r"^    ", "", script[0], flags=re.MULTILINE)
    assert 'dist.init_process_group("gloo")' in code
    launch(_train, 4, code.replace('dist.init_process_group("gloo")', ""))
    losses = capfd.readouterr().out.split()
    assert len(losses) == 4
    assert len(set(losses)) == 1


@pytest.mark.parametrize(
    "document", sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.name
)
def test_links_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
        assert (document.parent / link).exists(), link
