"""Commands whose --help is an answer like any other."""

from __future__ import annotations

from typing import Any

from typer import Context, Exit
from typer.core import TyperCommand, TyperGroup

from pipeloom.cli._answer import answer


class Command(TyperCommand):
    def get_help_option(self, ctx: Any) -> Any:
        return _answering(super().get_help_option(ctx))


class Group(TyperGroup):
    def get_help_option(self, ctx: Any) -> Any:
        return _answering(super().get_help_option(ctx))


def _answering(option: Any) -> Any:
    option.callback = _help
    return option


def _help(context: Context, _parameter: object, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        answer(context.get_help())
        raise Exit
