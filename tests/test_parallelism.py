"""The demo model under some kinds of parallelism, all from one checkpoint, against one process."""

from __future__ import annotations

from pipeloom.trainer.parallelism import STEPS, TOLERANCE, Case, Outcome, cases, run
from pipeloom.trainer.text import read_text


def test_losses_are_those_of_one_process() -> None:
    one_process, *others = run(
        [
            cases()[0],
            Case("FSDP", 2, 1, 2, "InterleavedZeroBubble"),
            Case("DDP", 2, 1, 2, "DualPipeV"),
            Case("DDP", 2, 1, 2, "DualPipe"),
        ],
        read_text(None),
    )
    assert (one_process.parallelism, len(one_process.losses)) == ("one process", STEPS)
    assert [each.parallelism for each in others] == ["FSDP 2 x PP 2", "DDP 2 x PP 2", "DDP 2 x PP 2"]
    assert [bool(each.refusal) or each.equals(one_process) for each in others] == [True] * 3


def test_equal_is_up_to_rounding() -> None:
    one = Outcome("one process", "GPipe", [5.0, 4.0], 3.0)
    assert one.equals(Outcome("", "", [5.0, 4.0 + TOLERANCE / 2], 3.0))
    assert not one.equals(Outcome("", "", [5.0, 4.0 + 2 * TOLERANCE], 3.0))
    assert not one.equals(Outcome("", "", [5.0, 4.0], float("nan")))


def test_the_table_has_every_kind() -> None:
    assert dict.fromkeys(case.name for case in cases()) == dict.fromkeys(
        ["one process", "FSDP 2", "FSDP 2 x TP 2 x PP 2", "FSDP 2 x PP 4", "DDP 2 x PP 2"]
    )
