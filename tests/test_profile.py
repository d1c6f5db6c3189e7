"""From measured timelines to costs, and the commands that measure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import pipeloom as pl
from pipeloom.schedules import names

TINY = ["--layers", "3", "--d-model", "8", "--heads", "2", "--context", "6"]

COSTS = {
    "halves": pl.Costs(F=1.3, I=0.7, W=0.9, communication=0.25),
    "whole backwards": pl.Costs(F=1.3, I=0.7, W=0.9, B=1.5, communication=0.25, communication_back=0.5),
    "overlap": pl.Costs(F=1.3, I=0.7, W=0.9, communication=0.3, overlap=0.5),
}


@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("name", names())
def test_the_costs_of_a_simulation_are_found_again(name: str, costs: pl.Costs) -> None:
    schedule = pl.lower(pl.schedules.make(name, ranks=4, microbatches=8))
    timeline = pl.simulate(schedule, costs)
    found = pl.measured_costs(timeline)
    assert pl.simulate(schedule, found).makespan == pytest.approx(timeline.makespan)
    assert found.table(schedule.wiring)["F"] == pytest.approx([1.3] * schedule.stages)


def test_each_stage_has_its_own() -> None:
    schedule = pl.lower(pl.schedules.make("ZBVZeroBubble", ranks=2, microbatches=6))
    costs = pl.Costs(F=[1, 1.5, 1.25, 2], I=[1.5, 1, 2, 1.75], W=[0.5, 0.75, 1, 1.25])
    table = costs.table(schedule.wiring)
    found = pl.measured_costs(pl.simulate(schedule, costs)).table(schedule.wiring)
    for kind in "FIW":
        assert found[kind] == pytest.approx(table[kind])


def by_hand(shift: float = 0.0) -> pl.Timeline:
    """Rank 1 waits for the first message, and finds the second there."""
    schedule = pl.Schedule.from_csv("0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1F0,1RECV_F1,1F1")
    starts = [[10.0, 11.0, 11.5, 12.5], [10.0, 12.0, 15.0, 15.25]]
    ends = [[11.0, 11.5, 12.5, 13.0], [12.0, 15.0, 15.25, 18.25 + shift]]
    return pl.Timeline(schedule, starts, ends, pl.Costs(output_size=7), measured=True)


def test_sends_and_taking_in_are_part_of_an_action() -> None:
    costs = pl.measured_costs(by_hand())
    assert costs.F == (1.5, 3.25)  # 1 and a send of 0.5; 3 and 0.25 until it began, though its message was there
    assert costs.communication == (0.25, 0.25)  # sent at 11.5, taken in at 12 by what takes 0.25 for that
    assert costs.output_size == 7
    assert pl.simulate(by_hand().schedule, costs).makespan == 8.25 == by_hand().makespan


def test_of_several_timelines_the_median_counts() -> None:
    costs = pl.measured_costs([by_hand(), by_hand(100), by_hand(1)])
    assert costs.F == (1.5, 3.75)


def test_parts_that_overlap_are_fused() -> None:
    schedule = pl.lower(pl.schedules.make("DualPipeV", ranks=2, microbatches=6))
    apart = pl.measured_costs(pl.simulate(schedule, pl.Costs(F=1, I=1, W=1)))
    together = pl.measured_costs(pl.simulate(schedule, pl.Costs(F=1, I=1, W=1, overlap=0.5)))
    assert apart.fused is None
    assert isinstance(together.fused, dict)
    assert set(together.fused.values()) == {2.5}
    assert together.F == apart.F == (1, 1, 1, 1)


def test_what_never_ran_is_filled_in() -> None:
    def found(name: str, **costs: float) -> pl.Costs:
        return pl.measured_costs(pl.simulate(pl.schedules.make(name, ranks=2, microbatches=4), pl.Costs(**costs)))

    whole = found("1F1B", F=3, B=5)
    assert (whole.I, whole.W, whole.B) == ((2.5, 2.5), (2.5, 2.5), (5, 5))
    forward = pl.forward_only(pl.schedules.make("1F1B", ranks=2, microbatches=4))
    assert pl.measured_costs(pl.simulate(forward, pl.Costs(F=3))).W == (3, 3)
    mixed = pl.Schedule.from_csv("0F0,0I0,0W0,0F1,0B1\n1F0,1B0,1F1,1B1")
    assert pl.measured_costs(pl.simulate(mixed, pl.Costs(I=1, W=3, B=8))).I == (1, 2)
    halves = pl.Schedule.from_csv("0F0,0I0,0W0\n1F0,1B0")
    assert pl.measured_costs(pl.simulate(halves, pl.Costs(I=1, W=3, B=8))).B == (4, 8)


def test_copies_of_a_stage_count_together() -> None:
    schedule = pl.lower(pl.schedules.make("DualPipe", ranks=4, microbatches=8))
    costs = pl.measured_costs(pl.simulate(schedule, pl.Costs(F=[1, 2, 3, 4])))
    assert costs.table(schedule.wiring)["F"] == pytest.approx([1, 2, 3, 4] * 2)


def test_collectives_cost_what_they_took() -> None:
    schedule = pl.lower(pl.schedules.make("1F1B", ranks=2, microbatches=4), shard=True, reduce=True)
    costs = pl.measured_costs(pl.simulate(schedule, pl.Costs(unshard=0.5, reduce_grad=[0.25, 0.75])))
    assert costs.unshard == pytest.approx((0.5, 0.5))
    assert costs.reduce_grad == pytest.approx((0.25, 0.75))
    assert costs.table(schedule.wiring)["F"] == pytest.approx([1, 1])


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="got none"):
        pl.measured_costs([])
    other = pl.simulate(pl.schedules.make("GPipe", ranks=2, microbatches=4))
    with pytest.raises(ValueError, match="expected timelines of one schedule"):
        pl.measured_costs([by_hand(), other])


def run(*options: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeloom", *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_profile_writes_costs_that_other_commands_read(tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    sizes = ["1F1B", "--ranks", "2", "--microbatches", "4"]
    ended = run("profile", *sizes, *TINY, "--steps", "2", "-o", costs)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0] == "1F1B: 2 ranks, 2 stages, 4 microbatches, 2 steps"
    assert lines[2].split() == ["STAGE", "F", "I", "W", "B", "TO", "NEXT", "BACK"]
    assert lines[-2].startswith("a step, measured")
    assert lines[-1].startswith("a step, simulated")
    found = pl.Costs.from_json(costs)
    assert isinstance(found.F, tuple)
    assert all(0 < time < 10 for time in found.F)
    simulated = run("simulate", *sizes, "--costs", costs, "--json")
    assert json.loads(simulated.stdout)["makespan"] > 0


def test_profile_answers_in_json() -> None:
    ended = run("profile", "GPipe", "--ranks", "2", "--microbatches", "2", *TINY, "--steps", "1", "--json")
    answer = json.loads(ended.stdout)
    assert answer["measured"]["steps"] == 1
    assert answer["measured"]["least"] == answer["measured"]["median"] == answer["measured"]["most"]
    assert answer["simulated"] > 0
    assert len(pl.Costs.from_dict(answer["costs"]).table(pl.Wiring(2))["B"]) == 2


def test_profile_lists_every_mistake(tmp_path: Path) -> None:
    sizes = ["profile", "1F1B", "--ranks", "2", "--microbatches", "4"]
    ended = run(*sizes, "--steps", "0", "--batch-size", "3", "--d-model", "10", "-o", tmp_path)
    assert ended.returncode == 2
    assert ended.stdout == ""
    for part in ("--steps 0", "--batch-size 3", "--d-model 10", "cannot be written"):
        assert part in ended.stderr


def test_train_writes_the_timeline_of_its_last_step(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    command: list[str | Path] = [
        "train",
        *TINY,
        "--schedule",
        "1F1B",
        "--ranks",
        "2",
        "--microbatches",
        "2",
        "--data",
        text,
    ]
    for name in ("step.json", "step.svg"):
        ended = run(*command, "--steps", "2", "--eval-every", "1", "--trace", tmp_path / name)
        assert ended.returncode == 0, ended.stderr
    timeline = pl.Timeline.from_json(tmp_path / "step.json")
    assert timeline.measured
    assert timeline.schedule.trains
    assert timeline.schedule.microbatches == 2
    assert "<svg" in (tmp_path / "step.svg").read_text()
    for wrong, message in ((tmp_path / "step.gif", "must end in one of"), (tmp_path / "no" / "a.svg", "No such file")):
        ended = run(*command, "--trace", wrong)
        assert ended.returncode == 2
        assert message in ended.stderr


def test_what_cannot_be_run_is_refused_before_ranks_start() -> None:
    ended = run("profile", "Seq1F1B", "--ranks", "2", "--microbatches", "4", *TINY)
    assert (ended.returncode, ended.stdout) == (1, "")
    (line,) = ended.stderr.splitlines()
    assert "Seq1F1B cannot be run yet: it cuts sequences into 2 pieces" in line
