"""The command line, one file a sub-command.

Answers go to the standard output, everything else to the standard error. The exit status is 0 when all is good, 1 when
the schedule or the run is at fault, and 2 when the command was used wrongly.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer

from pipeloom.cli._answer import BAD_USAGE, FAULT, UsageError, answer
from pipeloom.cli._check import check
from pipeloom.cli._compare import compare
from pipeloom.cli._draw import draw
from pipeloom.cli._explain import explain
from pipeloom.cli._help import Command, Group
from pipeloom.cli._list import list_schedules
from pipeloom.cli._lower import lower
from pipeloom.cli._parallelism import parallelism
from pipeloom.cli._profile import profile
from pipeloom.cli._search import search
from pipeloom.cli._selftest import selftest
from pipeloom.cli._show import show
from pipeloom.cli._simulate import simulate
from pipeloom.cli._split import split
from pipeloom.cli._train import train
from pipeloom.errors import ArgumentError, DrawingError, PipeloomError, SizeError

app = typer.Typer(
    cls=Group,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("list", cls=Command)(list_schedules)
for command in (
    *(show, check, lower, simulate, draw, compare, explain),
    *(search, split, train, parallelism, profile, selftest),
):
    app.command(cls=Command)(command)


def _version(wanted: bool) -> None:
    if wanted:
        from pipeloom import __version__

        answer(f"pipeloom {__version__}")
        raise typer.Exit


@app.callback()
def _pipeloom(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Pipeline-parallel training for PyTorch in which a schedule is a text.

    A SCHEDULE is a schedule's name (see `pipeloom list`), a CSV file with one row a rank, or - for the standard input.
    """


def main() -> None:
    """Run the command line of this process and exit."""
    _mend_streams()
    try:
        app(prog_name="pipeloom")
    except PipeloomError as error:
        print(f"pipeloom: {error}", file=sys.stderr)
        sys.exit(BAD_USAGE if isinstance(error, ArgumentError | DrawingError | SizeError | UsageError) else FAULT)


def _mend_streams() -> None:
    """Stand in for streams that the caller has closed, and let output hold any character."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - as long as the process lasts
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
