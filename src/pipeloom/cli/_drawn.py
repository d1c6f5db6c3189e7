"""Pictures in text as answers: in the width of a terminal, and in colours where it has them."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable

from pipeloom.cli._answer import answer
from pipeloom.drawing import Segment


def answer_drawn(drawn: Callable[[int | None, bool], Iterable[Segment]]) -> None:
    """Answer with what `drawn` makes.

    Args:
        drawn: a picture of so many columns, None where nothing limits them, and whether it can do without colours.
    """
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    if width is not None and not os.environ.get("NO_COLOR"):
        from rich.console import Console
        from rich.text import Text

        console = Console()
        if console.color_system is not None:
            few = console.color_system in ("standard", "windows")
            console.print(Text.assemble(*drawn(width, few)), soft_wrap=True)
            return
    text = "".join(text for text, _ in drawn(width, True))
    answer("\n".join(line.rstrip() for line in text.split("\n")))
