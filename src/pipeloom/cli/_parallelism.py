"""`pipeloom parallelism`: data and tensor parallelism inside the pipeline against one process, on this machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from pipeloom.cli._answer import FAULT, AsJson, answer, answer_json
from pipeloom.trainer.text import read_text

if TYPE_CHECKING:
    from pipeloom.trainer.parallelism import Outcome


def parallelism(as_json: AsJson = False) -> None:
    """Train the demo model under each kind of parallelism, all from one checkpoint, and show the losses side by side.

    Up to eight ranks are started on this machine at once. Losses must be those of one process, up to rounding; if any
    are not, the exit status is 1.
    """
    from pipeloom.trainer.parallelism import STEPS, cases, run

    found: list[Outcome] = []
    heads = ["PARALLELISM", "SCHEDULE", *(f"STEP {step}" for step in range(1, STEPS + 1)), "EVALUATION", ""]
    if not as_json:
        answer(_line(heads))
    for outcome in run(cases(), read_text(None)):
        found.append(outcome)
        if not as_json:
            answer(_row(outcome, found[0]))
    if as_json:
        answer_json([asdict(outcome) | {"equal": outcome.equals(found[0])} for outcome in found])
    if not all(outcome.refusal or outcome.equals(found[0]) for outcome in found):
        raise typer.Exit(FAULT)


def _row(outcome: Outcome, one_process: Outcome) -> str:
    if outcome.refusal:
        return _line([outcome.parallelism, outcome.schedule, f"refused: {outcome.refusal}"])
    verdict = "" if outcome is one_process else "equal" if outcome.equals(one_process) else "DIFFERS"
    values = [f"{value:.5f}" for value in (*outcome.losses, outcome.evaluation)]
    return _line([outcome.parallelism, outcome.schedule, *values, verdict])


def _line(cells: list[str]) -> str:
    first, second, *rest = cells
    return f"{first:<20}  {second:<22}  {'  '.join(f'{cell:>10}' for cell in rest)}".rstrip()
