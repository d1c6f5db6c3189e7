"""`pipeloom selftest`: right pipelines are equal, wrong ones are found, and nothing hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeloom.runtime.batch import Batch
from pipeloom.runtime.edges import Edge, Edges
from pipeloom.runtime.tape import Tape
from pipeloom.schedules import make
from pipeloom.selftest import CASES, Case, Outcome, run, table
from pipeloom.selftest.bench import Bench

BY_NAME = {case.name: case for case in CASES}
SCHEDULE = make("ZBVZeroBubble", ranks=2, microbatches=4)
PART = [
    "plain",
    "frozen-first",
    "tied",
    "added-losses",
    "hooks",
    "views",
    "compiled",
    "dtypes",
    "twice",
    "edges",
    "skips",
    "failed-step",
]
REFUSED = [case.name for case in CASES if case.refused]


def kinds(outcomes: list[Outcome]) -> dict[str, str]:
    return {outcome.case: outcome.kind for outcome in outcomes}


def test_a_part_of_the_matrix() -> None:
    outcomes = list(run(SCHEDULE, [BY_NAME[name] for name in [*PART, *REFUSED]]))
    assert kinds(outcomes) == dict.fromkeys(PART, "equal") | dict.fromkeys(REFUSED, "refused"), outcomes
    for outcome in outcomes:
        assert BY_NAME[outcome.case].refused in outcome.reason


def test_copies_of_the_model() -> None:
    cases = [BY_NAME[name] for name in [*PART, "checkpoint", "batch-norm"] if name not in ("skips", "compiled")]
    outcomes = kinds(list(run(make("DualPipe", ranks=2, microbatches=4), cases)))
    assert outcomes == dict.fromkeys((case.name for case in cases), "equal") | {"batch-norm": "refused"}


def test_what_cannot_be_run_yet_is_refused() -> None:
    (outcome,) = run(make("Seq1F1B", ranks=2, microbatches=4), [BY_NAME["plain"]])
    assert outcome.kind == "refused"
    assert "a stage keeps no keys and values from piece to piece" in outcome.reason


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(CASES)


def test_a_pipeline_that_computes_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Batch, "share", lambda _, __: 1.0)  # every microbatch counts as if it were alone
    (outcome,) = run(SCHEDULE, [BY_NAME["plain"]])
    assert outcome.kind == "failed"
    assert "differs from one process" in outcome.reason


def test_a_pipeline_that_forgets_a_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tape, "weights", lambda _: None)
    (outcome,) = run(SCHEDULE, [BY_NAME["frozen-parts"]])
    assert outcome.kind == "failed"
    assert "gradient" in outcome.reason


def test_a_pipeline_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def loses(self: Edges, edge: Edge, peer: int) -> None:  # noqa: ARG001
        self.take(edge)

    monkeypatch.setattr(Edges, "send", loses)
    (outcome,) = run(SCHEDULE, [BY_NAME["plain"]], deadline=4)
    assert outcome.kind == "failed"
    assert "ended with exit status 1" in outcome.reason


def _dies(bench: Bench) -> None:
    if bench.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.barrier()


def _raises(bench: Bench) -> None:
    if bench.rank == 1:
        raise ZeroDivisionError("a fault")
    torch.distributed.barrier()


def test_what_fails_does_not_touch_what_follows() -> None:
    good = BY_NAME["several-steps"]
    cases = [
        Case("dies", _dies, ""),
        good,
        Case("raises", _raises, ""),
        Case("goes on", good.body, "", refused="never"),
    ]
    outcomes = {outcome.case: outcome for outcome in run(make("1F1B", ranks=2, microbatches=2), cases)}
    assert kinds(list(outcomes.values())) == {
        "dies": "failed",
        "several-steps": "equal",
        "raises": "failed",
        "goes on": "failed",
    }
    assert "a fault" in outcomes["raises"].reason
    assert "must be refused with 'never'" in outcomes["goes on"].reason


def test_the_table() -> None:
    cases = [Case("one", _dies, "the first"), Case("two", _dies, "the second", refused="no")]
    outcomes = [
        Outcome("A", "one", "equal"),
        Outcome("A", "two", "refused", "A: no, not\nthis"),
        Outcome("B", "one", "failed", "a fault"),
        Outcome("B", "two", "refused", "B: no, not this"),
    ]
    assert table(cases, outcomes).splitlines() == [
        "   1  A",
        "   2  B",
        "",
        "       1    2",
        "one    =   F1   the first; to the bit",
        "two   r2   r2   the second",
        "",
        "   =  equal to one process",
        "  F1  failed: a fault",
        "  r2  refused: no, not this",
        "",
        "1 equal, 2 refused, 1 failed",
    ]


def selftest(*options: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeloom", "selftest", *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_takes_files_and_answers_in_json(tmp_path: Path) -> None:
    text = tmp_path / "mine.csv"
    text.write_text("0F0,2F0,2I0,0F1,2F1,2W0,0B0,2B1,0I1,0W1\n1F0,1I0,1F1,1W0,1B1\n")
    ended = selftest("--schedule", text, "--case", "plain", "--case", "few-microbatches", "--json")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["ok"]
    assert [(cell["schedule"], cell["case"], cell["outcome"], cell["equal"]) for cell in found["cells"]] == [
        (str(text), "plain", "equal", "to the bit"),
        (str(text), "few-microbatches", "refused", None),
    ]
    assert f"{text}: plain" in ended.stderr


def test_unknown_cases_are_bad_usage() -> None:
    ended = selftest("--case", "nonesuch")
    assert ended.returncode == 2
    assert "no case is called nonesuch; there are plain, " in ended.stderr
