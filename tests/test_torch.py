"""PyTorch's pipelining as the other side of the text: it reads what we write, and we read what it writes."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import _Action

from pipeloom import Action, Schedule, lower
from pipeloom.errors import ActionError
from pipeloom.schedules import make
from strategies import actions, schedules, unfinished

RUNTIME: Any = torch_schedules._PipelineScheduleRuntime
TORCH: dict[str, Any] = {
    "GPipe": torch_schedules.ScheduleGPipe,
    "1F1B": torch_schedules.Schedule1F1B,
    "Interleaved1F1B": torch_schedules.ScheduleInterleaved1F1B,
    "LoopedBFS": torch_schedules.ScheduleLoopedBFS,
    "InterleavedZeroBubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": torch_schedules.ScheduleZBVZeroBubble,
    "DualPipeV": torch_schedules.ScheduleDualPipeV,
}


def torch_stages(ranks: int, stages: int, on_rank: int) -> list[Any]:
    """As much of a rank's stages as PyTorch's schedules look at when they are built."""
    return [
        SimpleNamespace(
            num_stages=stages,
            group_size=ranks,
            group_rank=0,
            stage_index=index,
            is_first=index == 0,
            is_last=index == stages - 1,
            has_backward=False,
            submod=nn.Identity(),
        )
        for index in range(on_rank)
    ]


def torch_runtime(schedule: Schedule) -> Any:
    """PyTorch's runtime for hand-written schedules, of the sizes of `schedule`."""
    return RUNTIME(torch_stages(schedule.ranks, schedule.stages, 1), schedule.microbatches)


def texts(rows: Any) -> list[list[str]]:
    """Every cell as text; PyTorch's blank cells left out."""
    return [[str(cell) for cell in row if cell is not None] for row in rows]


@given(actions().filter(lambda action: action.far < 0))
def test_torch_reads_and_writes_every_action_as_we_do(action: Action) -> None:
    theirs = _Action.from_str(str(action))
    assert theirs is not None
    assert str(theirs) == str(action)
    assert theirs.computation_type.value == action.kind
    assert Action.parse(str(theirs)) == action


@pytest.mark.parametrize(("text", "taken_as"), [("0F0x", "0F0"), ("0F-1", "0F"), ("00F01", "0F1"), ("0F0>3", "0F0")])
def test_we_refuse_what_torch_reads_halfway(text: str, taken_as: str) -> None:
    assert str(_Action.from_str(text)) == taken_as
    with pytest.raises(ActionError):
        Action.parse(text)


@pytest.mark.parametrize("name", [name for name in TORCH if name != "1F1B"])
def test_orders_equal_those_of_torch(name: str) -> None:
    for ranks, microbatches in product((1, 2, 3, 4), (1, 2, 4, 6, 7, 8, 9, 12)):
        schedule = make(name, ranks=ranks, microbatches=microbatches)
        if torch_takes(name, ranks, microbatches):
            assert texts(schedule.rows) == texts(torch_order(name, schedule))


def torch_takes(name: str, ranks: int, microbatches: int) -> bool:
    """Whether PyTorch builds the schedule for these sizes, which it refuses for some."""
    if name == "DualPipeV":
        return microbatches >= 2 * ranks
    if name.startswith("Interleaved"):
        return microbatches % max(1, microbatches // ranks) == 0
    return True


def torch_order(name: str, schedule: Schedule) -> list[list[Any]]:
    """PyTorch's compute-only rows; the reductions that it adds for some schedules are left out."""
    stages = torch_stages(schedule.ranks, schedule.stages, schedule.stages // schedule.ranks)
    if schedule.stages == schedule.ranks:
        order = TORCH[name](stages[0], schedule.microbatches, loss_fn=lambda output, _: output)._get_pipeline_order()
    else:
        order = TORCH[name](stages, schedule.microbatches).pipeline_order
    rows = (order[rank] for rank in range(schedule.ranks))
    return [[cell for cell in row if cell is None or cell.is_compute_op] for row in rows]


@pytest.mark.parametrize("name", TORCH)
def test_csv_to_torch_and_back(name: str, tmp_path: Path) -> None:
    schedule = make(name, ranks=4, microbatches=8)
    ours, theirs = tmp_path / "ours.csv", tmp_path / "theirs.csv"
    ours.write_text(schedule.to_csv())
    runtime = torch_runtime(schedule)
    runtime._load_csv(str(ours), format="compute_only")
    assert texts(runtime.pipeline_order.values()) == texts(schedule.rows)
    assert runtime.stage_index_to_group_rank == schedule.placement
    runtime._dump_csv(str(theirs), format="compute_only")
    assert Schedule.from_csv(theirs) == schedule


@pytest.mark.parametrize("name", TORCH)
def test_csv_with_communication_to_torch_and_back(name: str, tmp_path: Path) -> None:
    schedule = make(name, ranks=4, microbatches=8)
    compute, theirs, ours = tmp_path / "compute.csv", tmp_path / "theirs.csv", tmp_path / "ours.csv"
    compute.write_text(schedule.to_csv())
    lowered = torch_runtime(schedule)
    lowered._load_csv(str(compute), format="compute_only")
    lowered._dump_csv(str(theirs), format="compute_comms")

    read = Schedule.from_csv(theirs)
    assert read.communicates
    assert read.shards
    assert read.placement == schedule.placement
    assert texts(read.rows) == texts(lowered.pipeline_order_with_comms.values())

    ours.write_text(read.to_csv())
    runtime = torch_runtime(schedule)
    runtime._load_csv(str(ours), format="compute_comms")
    assert runtime.pipeline_order_with_comms == lowered.pipeline_order_with_comms


@pytest.mark.parametrize("name", TORCH)
def test_torch_reads_what_we_lower(name: str, tmp_path: Path) -> None:
    lowered = lower(make(name, ranks=4, microbatches=8), shard=True, reduce=True)
    path = tmp_path / "ours.csv"
    path.write_text(lowered.to_csv())
    runtime = torch_runtime(lowered)
    runtime._load_csv(str(path), format="compute_comms")
    assert texts(runtime.pipeline_order_with_comms.values()) == texts(lowered.rows)


@pytest.mark.parametrize("name", [name for name in TORCH if name != "DualPipeV"])
def test_torch_simulates_what_we_lower_to_its_end(name: str, tmp_path: Path) -> None:
    """PyTorch's simulator knows no composites; it refuses rows that cannot go on."""
    lowered = lower(make(name, ranks=4, microbatches=8))
    path = tmp_path / "ours.csv"
    path.write_text(lowered.to_csv())
    runtime = torch_runtime(lowered)
    runtime._load_csv(str(path), format="compute_comms")
    assert texts(runtime._simulate().values()) == texts(lowered.rows)


def test_blank_cells_that_torch_writes_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "blanks.csv"
    runtime = torch_runtime(make("LoopedBFS", ranks=2, microbatches=1))
    runtime.pipeline_order = {
        0: [_Action.from_str("0F0"), None, None, _Action.from_str("0B0")],
        1: [None, _Action.from_str("1F0"), _Action.from_str("1B0"), None],
        2: [None],
        3: [],
    }
    runtime._dump_csv(str(path), format="compute_only")
    assert path.read_bytes() == b'0F0,,,0B0\r\n,1F0,1B0,\r\n""\r\n\r\n'
    assert Schedule.from_csv(path).to_csv() == "0F0,0B0\n1F0,1B0\n\n\n"


@given(schedule=schedules(overlap=0.0))
def test_torch_accepts_any_valid_schedule_that_fills_every_rank(
    schedule: Schedule, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if not schedule.trains or not all(schedule.rows):
        return
    path = tmp_path_factory.mktemp("torch") / "ours.csv"
    path.write_text(schedule.to_csv())
    runtime = torch_runtime(schedule)
    runtime._load_csv(str(path))
    assert texts(runtime.pipeline_order.values()) == texts(schedule.rows)


@given(st.text(alphabet="0123FBIW", max_size=8))
def test_what_we_read_torch_reads_alike(text: str) -> None:
    try:
        ours = Action.parse(text)
    except ActionError:
        return
    assert str(_Action.from_str(text)) == str(ours)


def test_torch_starts_the_last_row_of_1f1b_too_late() -> None:
    schedule = make("1F1B", ranks=4, microbatches=8)
    theirs = texts(torch_order("1F1B", schedule))
    assert theirs[:3] == texts(schedule.rows[:3])
    assert theirs[3][0] != "3F0"
    assert [str(cell) for cell in schedule.rows[3][:4]] == ["3F0", "3B0", "3F1", "3B1"]
    assert unfinished(Schedule.from_csv("\n".join(map(",".join, theirs))))
