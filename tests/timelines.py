"""Timelines of every kind, for what draws and reads them."""

import random

import pipeloom as pl
from pipeloom.schedule import rows_of


def made(name: str, ranks: int, microbatches: int) -> pl.Schedule:
    return pl.schedules.make(name, ranks=ranks, microbatches=microbatches)


def lowered() -> pl.Timeline:
    """Rows with every kind of action: composites, messages, sharding, the optimizer's step."""
    costs = pl.Costs(
        communication=0.2,
        bandwidth=10,
        output_size=2,
        unshard=0.5,
        reshard=0.1,
        reduce_grad=1,
        optimizer=1,
        overlap=0.8,
        unsharded=1,
    )
    return pl.simulate(pl.lower(made("DualPipeV", 3, 7), shard=True, reduce=True), costs)


def measured() -> pl.Timeline:
    """A run whose actions take a little longer or less, and whose ranks began at no particular time."""
    drawn = random.Random(0)
    schedule = pl.lower(made("ZBVZeroBubble", 3, 6))
    costs = pl.Costs(F=0.011, I=0.012, W=0.009, communication=0.001, bandwidth=1e6, output_size=500)
    simulated = pl.simulate(schedule, costs, receives="posted")
    starts = [[17.3 + time for time in row] for row in simulated.starts]
    ends = [[17.3 + time - drawn.uniform(0, 0.0008) for time in row] for row in simulated.ends]
    ends = [[max(pair) for pair in zip(*rows, strict=True)] for rows in zip(starts, ends, strict=True)]
    return pl.Timeline(simulated.schedule, starts, ends, costs, measured=True)


def one_action() -> pl.Timeline:
    return pl.simulate(pl.Schedule.from_rows(rows_of(["0F0"])))


def of_no_time() -> pl.Timeline:
    return pl.simulate(pl.lower(made("DualPipeV", 2, 4), reduce=True), pl.Costs(F=0, I=0, W=0))


def partly_of_no_time() -> pl.Timeline:
    return pl.simulate(made("ZBVZeroBubble", 2, 4), pl.Costs(F=[0, 1, 0, 1], W=0))


TIMELINES = {
    "DualPipeV": lambda: pl.simulate(made("DualPipeV", 4, 10)),
    "two copies": lambda: pl.simulate(made("DualPipe", 4, 8), pl.Costs(communication=0.3)),
    "pieces": lambda: pl.simulate(made("Seq1F1B", 3, 5)),
    "hand-written": lambda: pl.simulate(pl.Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"), pl.Costs(F=2)),
    "lowered": lowered,
    "skips": lambda: pl.simulate(
        pl.lower(pl.Schedule.from_rows(made("1F1B", 4, 4).rows, wiring=pl.Wiring(4, skips=((0, 2), (0, 3))))),
        pl.Costs(communication=0.5),
        receives="blocking",
    ),
    "measured": measured,
    "forward only": lambda: pl.simulate(pl.forward_only(made("1F1B", 2, 3))),
    "one action": one_action,
    "one rank": lambda: pl.simulate(made("GPipe", 1, 3)),
    "64 ranks": lambda: pl.simulate(made("1F1B", 64, 16)),
    "no time": of_no_time,
    "partly no time": partly_of_no_time,
}
