"""Damaged schedules, costs and command lines: an answer or a refusal, in the time and memory that their size explains.

python tests/fuzz.py texts|costs|commands [--times 10000] [--seed 0]

Each try gets 20 seconds, and all together half a gigabyte more than the program has when it starts.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pipeloom as pl
from pipeloom.cli import main as command_line
from pipeloom.errors import PipeloomError, ScheduleError, SizeError

SECONDS, MEMORY = 20, 512 << 20
NAMES = pl.schedules.names()
PIECES = [
    *"0123456789FBIW,;()<>-+.eE \t\n\r#'\"\\{}[]:", "SEND_F", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD",
    "OVERLAP_F_B", "99999999999", "999999", "-1", "\0", "é", "٣", "\u2028", "\U0001d53d", "NaN", "Infinity", "1e999",
    "null", "true", "0F0", ",,",
]  # fmt: skip
NUMBERS = ["0", "1", "2", "3", "4", "7", "-1", "1.5", "nan", "inf", "1e3", "x", "", "٣", "99999999999", "9" * 400]
EXITS = (0, 1, 2)


class TooLongError(Exception):
    """A try took longer than its size explains."""


def damaged(chance: random.Random, text: str) -> str:
    """`text` with a few pieces put in, left out, doubled or moved."""
    for _ in range(chance.choice((0, 1, 1, 2, 3, 10))):
        at = chance.randint(0, len(text))
        to = min(len(text), at + chance.choice((0, 1, 2, 5, 30)))
        middle = chance.choice(("", chance.choice(PIECES), text[at:to] * 2, text[at:to][::-1]))
        text = text[:at] + middle + text[to:]
    return text


def some_schedule(chance: random.Random) -> pl.Schedule:
    while True:
        try:
            schedule = pl.schedules.make(
                chance.choice(NAMES), ranks=chance.randint(1, 4), microbatches=chance.randint(1, 5)
            )
        except SizeError:
            continue
        return chance.choice((schedule, pl.lower(schedule, shard=chance.random() < 0.3)))


def texts(chance: random.Random, _: Path) -> str:
    text = damaged(chance, some_schedule(chance).to_csv())
    with contextlib.suppress(PipeloomError):
        schedule = pl.Schedule.from_csv(text.encode("utf-8", "surrogatepass"))
        str(schedule)
        problems = pl.check(schedule, memory=chance.choice((None, 1.0)))
        for call in (pl.lower, pl.forward_only, pl.simulate):
            try:
                call(schedule)
            except ScheduleError:
                assert problems, f"{call.__name__} refuses what checks"
    return text


def some_costs(chance: random.Random) -> str:
    def number() -> object:
        return chance.choice((0, 1, 2.5, -1, 1e308, [1, 2, 3, 4], [], "1", None, True, {}))

    keys = ["F", "B", "I", "W", "communication", "bandwidth", "activation", "overlap", "fused", "optimizer", "unknown"]
    return json.dumps({key: number() for key in chance.sample(keys, chance.randint(0, 5))})


def costs(chance: random.Random, _: Path) -> str:
    text = damaged(chance, some_costs(chance))
    with contextlib.suppress(PipeloomError):
        pl.simulate(some_schedule(chance), pl.Costs.from_json(text.encode("utf-8", "surrogatepass")))
    return text


def commands(chance: random.Random, folder: Path) -> str:
    (folder / "rows.csv").write_text(damaged(chance, some_schedule(chance).to_csv()), errors="replace")
    (folder / "costs.json").write_text(damaged(chance, some_costs(chance)), errors="replace")
    files = [str(folder / name) for name in ("rows.csv", "costs.json", "none", "out.svg", "out.html", "out.csv", ".")]
    words = [
        *NAMES,
        *files,
        "-",
        "",
        "GPip",
        "any",
        "V",
        "linear",
        "span",
        "eager",
        "blocking",
        "0:2",
        "2:0",
        "x:y",
        "60%",
    ]
    options = [
        "--ranks", "--microbatches", "--stages-per-rank", "--group", "--memory", "--copies", "--pieces", "--skip",
        "--costs", "--receives", "-o", "--ahead", "--placement", "--objective", "--stages", "--no-such-option",
    ]  # fmt: skip
    name = chance.choice(
        ("show", "check", "lower", "simulate", "draw", "compare", "explain", "search", "split", "list")
    )
    line = [name, *chance.sample(words, chance.randint(0, 2))]
    if chance.random() < 0.8:
        line += ["--ranks", chance.choice(NUMBERS[:5]), "--microbatches", chance.choice(NUMBERS[:5])]
    for option in chance.sample(options, chance.randint(0, 4)):
        line += [option, chance.choice((*NUMBERS, *words))]
    line += chance.sample(["--json", "--shard", "--reduce", "--whole"], chance.randint(0, 2))
    if name == "search":
        line += ["--work", "0.01"]
    sys.argv = ["pipeloom", *line]
    out, sys.stdin = io.StringIO(), io.TextIOWrapper(io.BytesIO(b"0F0,0B0\n"))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            command_line()
            code: object = "none"
        except SystemExit as stop:
            code = stop.code or 0
    assert code in EXITS, f"exit status {code}: {out.getvalue()[-500:]}"
    assert "Traceback" not in out.getvalue(), out.getvalue()
    return " ".join(map(repr, line))


KINDS: dict[str, Callable[[random.Random, Path], str]] = {"texts": texts, "costs": costs, "commands": commands}


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Raise where more time passes than a try may take."""

    def ring(*_: object) -> None:
        raise TooLongError

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=list(KINDS))
    parser.add_argument("--times", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    failed = 0
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # some command lines write files
        for seed in range(options.seed, options.seed + options.times):
            try:
                with limited():
                    KINDS[options.kind](random.Random(seed), Path(folder))
            except Exception:
                failed += 1
                print(f"{options.kind}, seed {seed}:\n{traceback.format_exc()}", file=sys.__stdout__, flush=True)
    print(f"{options.times - failed} well, {failed} failed", file=sys.__stdout__)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
