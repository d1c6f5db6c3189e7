"""The control channel between real processes: hellos, failures, and what ends a wait."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipeloom.errors import DisagreementError, PeerFailed
from pipeloom.runtime.control import Control
from pipeloom.runtime.transport import Transport, connect
from processes import run_ranks

Body = Callable[[Control, Transport], None]


def run(ranks: int, body: Body, path: Path, *, kind: str = "local", deadline: float = 30.0, **ends: int) -> None:
    """Run `body(control, transport)` on every rank; `rank1=-9` says how rank 1 ends."""

    def with_control(group: dist.ProcessGroup) -> None:
        control = Control(group, deadline=deadline)
        transport = connect(group, kind, watch=control)
        dist.barrier()
        body(control, transport)
        control.close()
        transport.close()

    run_ranks(ranks, with_control, path, statuses={int(name.removeprefix("rank")): end for name, end in ends.items()})


def begin(control: Control, transport: Transport, mode: str = "train", batch: int | None = None) -> None:
    control.begin({"mode": mode, "batch_id": batch}, {"samples": control.rank + 10})
    transport.begin(control.number)


def begin_and_receive(control: Control, transport: Transport, rank: int) -> None:
    begin(control, transport)
    transport.receive(rank).wait()


def other(control: Control) -> int:
    return 1 - control.rank


def test_a_hello_holds_what_others_ask_for(tmp_path: Path) -> None:
    def body(control: Control, transport: Transport) -> None:
        for _ in range(20):
            begin(control, transport)
            assert [control.value(rank, "samples") for rank in range(3)] == [10, 11, 12]

    run(3, body, tmp_path)


def test_nobody_waits_for_a_hello(tmp_path: Path) -> None:
    def body(control: Control, transport: Transport) -> None:
        if control.rank == 0:
            for _ in range(5):
                begin(control, transport)
            (tmp_path / "done").touch()
        else:
            while not (tmp_path / "done").exists():
                time.sleep(0.01)
            for _ in range(5):
                begin(control, transport)
                assert control.value(0, "samples") == 10

    run(2, body, tmp_path)


@pytest.mark.parametrize("kind", ["local", "torch"])
def test_a_rank_that_raises_is_named_by_all_that_wait(kind: str, tmp_path: Path) -> None:
    def body(control: Control, transport: Transport) -> None:
        if control.rank == 1:
            begin(control, transport)
            try:
                raise ValueError("no such token")
            except ValueError as error:
                control.fail(error, stage=5, microbatch=3, action="5F3", rows="rank 1: 5F2 5F3 5F4")
            return
        start = time.monotonic()
        with pytest.raises(
            PeerFailed, match=r"rank 1 on .*, stage 5, microbatch 3, in 5F3: ValueError: no such"
        ) as found:
            begin_and_receive(control, transport, 2 - control.rank)
        assert time.monotonic() - start < 20
        assert (found.value.rank, found.value.stage, found.value.microbatch) == (1, 5, 3)
        assert "Traceback (most recent call last)" in found.value.traceback
        assert "5F2 5F3 5F4" in str(found.value)

    run(3, body, tmp_path, kind=kind)


@pytest.mark.parametrize("kind", ["local", "torch"])
def test_a_rank_that_is_killed_is_named(kind: str, tmp_path: Path) -> None:
    def body(control: Control, transport: Transport) -> None:
        begin(control, transport)
        if control.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(
                PeerFailed, match=r"rank 1 on .*: its process ended or its connection was lost"
            ) as found:
                transport.receive(2 - control.rank).wait()
            assert found.value.rank == 1
        with pytest.raises(PeerFailed, match="rank 1 on"):
            begin(control, transport)

    run(3, body, tmp_path, kind=kind, rank1=-9)


def test_a_rank_that_is_killed_is_named_though_a_process_it_forked_lives_on(tmp_path: Path) -> None:
    def body(control: Control, transport: Transport) -> None:
        begin(control, transport)
        control.value(other(control), "samples")
        if control.rank == 1:
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            transport.send(0, child)
            transport.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        child_of_other = transport.receive(1).wait()
        assert isinstance(child_of_other, int)
        try:
            with pytest.raises(PeerFailed, match=r"rank 1 on .*: its process ended"):
                transport.receive(1).wait()
        finally:
            os.kill(child_of_other, signal.SIGKILL)

    run(2, body, tmp_path, deadline=600.0, rank1=-9)


SILENT = r"rank 1 on .*: nothing was heard from it for 1 s \(deadline\)"


def stop_rank_1(control: Control, transport: Transport, then: signal.Signals) -> None:
    """Rank 1 stops itself; rank 0 waits for it, and sends it a signal when it has given it up."""
    begin(control, transport)
    control.value(other(control), "samples")
    if control.rank == 1:
        transport.send(0, os.getpid())
        transport.flush()
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        stopped = transport.receive(1).wait()
        assert isinstance(stopped, int)
        try:
            with pytest.raises(PeerFailed, match=SILENT):
                transport.receive(1).wait()
        finally:
            os.kill(stopped, then)


def test_a_rank_that_is_stopped_is_named_after_the_deadline(tmp_path: Path) -> None:
    def body(control: Control, transport: Transport) -> None:
        stop_rank_1(control, transport, signal.SIGKILL)

    run(2, body, tmp_path, deadline=1.0, rank1=-9)


def test_a_rank_that_goes_on_after_the_deadline_is_told_why_the_others_do_not(tmp_path: Path) -> None:
    def body(control: Control, transport: Transport) -> None:
        stop_rank_1(control, transport, signal.SIGCONT)
        with pytest.raises(PeerFailed, match=SILENT):
            transport.receive(other(control)).wait()

    run(2, body, tmp_path, deadline=1.0)


def test_a_rank_that_leaves_while_others_need_it_is_named(tmp_path: Path) -> None:
    def body(control: Control, transport: Transport) -> None:
        begin(control, transport)
        if control.rank == 0:
            with pytest.raises(PeerFailed, match=r"rank 1 on .*: it closed its pipeline or ended while others"):
                transport.receive(1).wait()

    run(2, body, tmp_path)


def test_a_rank_may_leave_when_nobody_needs_it(tmp_path: Path) -> None:
    def body(control: Control, transport: Transport) -> None:
        begin(control, transport)
        if control.rank == 1:
            transport.send(0, torch.ones(1_000_000))
            transport.flush()
        else:
            time.sleep(0.5)
            control.check()
            assert isinstance(transport.receive(1).wait(), torch.Tensor)

    run(2, body, tmp_path)


@pytest.mark.parametrize("kind", ["local", "torch"])
def test_the_step_after_a_failed_one_is_right(kind: str, tmp_path: Path) -> None:
    """Messages of the failed step are on their way, half received or never asked for: none is ever received."""

    def body(control: Control, transport: Transport) -> None:
        peer = other(control)
        for number in range(4):
            begin(control, transport)
            for part in range(10):
                transport.send(peer, torch.full((300_000,), float(100 * number + part)))
            if control.rank == number % 2:
                transport.receive(peer).wait()
                control.fail(KeyError("token"))
            else:
                pendings = [transport.receive(peer) for _ in range(11)]
                with pytest.raises(PeerFailed, match="KeyError: 'token'") as found:
                    [pending.wait() for pending in pendings]
                control.fail(found.value)
            begin(control, transport)
            pending = transport.receive(peer)
            transport.send(peer, torch.full((3,), float(number)))
            assert torch.equal(pending.wait(), torch.full((3,), float(number)))  # type: ignore[arg-type]
            transport.flush()

    run(2, body, tmp_path, kind=kind)


def test_who_learns_late_ends_all(tmp_path: Path) -> None:
    """A rank that had finished the step may have gone on from it, so no step can follow."""

    def body(control: Control, transport: Transport) -> None:
        begin(control, transport)
        control.value(other(control), "samples")
        if control.rank == 0:
            control.fail(ValueError("late"))
        else:
            assert select.select([control], [], [], 30)[0]
        for _ in range(2):
            with pytest.raises(PeerFailed, match=r"ValueError: late(.|\n)*that rank 1 had finished by then"):
                begin_and_receive(control, transport, other(control))

    run(2, body, tmp_path)


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        (
            [("train", None), ("eval", None), ("train", None)],
            "call 1: mode is 'train' on ranks 0, 2 and 'eval' on rank 1",
        ),
        ([("train", 3), ("train", None), ("train", 4)], "call 1: batch_id is 3 on rank 0 and 4 on rank 2"),
    ],
)
def test_ranks_that_disagree_all_say_so(mine: list[tuple[str, int | None]], message: str, tmp_path: Path) -> None:
    def body(control: Control, transport: Transport) -> None:
        def step() -> None:
            begin(control, transport, *mine[control.rank])
            transport.receive((control.rank + 1) % 3).wait()

        with pytest.raises(DisagreementError, match=message) as found:
            step()
        control.fail(found.value)

    run(3, body, tmp_path)


SCRIPT = """
import subprocess
import sys
import torch, torch.distributed as dist
from pipeloom.runtime.control import Control
from pipeloom.runtime.transport import connect
store, rank, hooked = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "hooked"
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
control = Control(dist.group.WORLD)
transport = connect(dist.group.WORLD, watch=control)
dist.barrier()
control.begin({}, {})
transport.begin(control.number)
if not hooked:
    sys.excepthook = lambda *_: None
if rank == 1:
    raise OverflowError("in the training script")
transport.receive(1).wait()
"""


@pytest.mark.parametrize("hook", ["hooked", "replaced"])
def test_an_error_outside_of_steps_is_told_as_the_process_ends(tmp_path: Path, hook: str) -> None:
    """Also where somebody else has taken `sys.excepthook`, as command-line tools do."""
    hooks = ["hooked", hook]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path / "store"), str(rank), hooks[rank]],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        _, told = ranks[0].communicate(timeout=60)
        assert "rank 1 on " in told
        assert "OverflowError: in the training script" in told
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
