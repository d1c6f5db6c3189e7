"""What errors and exits have in common, for the modules that stand before `errors`."""

from __future__ import annotations

READER_LEFT = 141
"""What a shell reports of a process that wrote to a closed pipe."""
PRINTED = 50
"""How many of the things that are wrong a message prints."""


class PipeloomError(Exception):
    """Anything that pipeloom refuses or finds at fault."""


class ArgumentError(PipeloomError, ValueError):
    """A call makes no sense: an argument is of another kind, or out of its range."""


class ActionError(PipeloomError, ValueError):
    """A text is not an action. `at` and `length` mark the place in `text`, counted in characters from 0."""

    def __init__(self, text: str, message: str, hint: str, at: int = 0, length: int = 1) -> None:
        super().__init__(f"'{shown(text)}' is not an action: {message} (character {at + 1}); {hint}")
        self.text, self.message, self.hint, self.at, self.length = text, message, hint, at, length


def counted(count: int, word: str) -> str:
    """How many there are of what `word` names, in words."""
    return f"{count} {word}" + ("" if count == 1 else "es" if word.endswith("ch") else "s")


def shown(text: str, most: int = 72) -> str:
    """`text` as a message shows it: on one line, what cannot be printed escaped, and not longer than `most`."""
    cut = text if len(text) <= most else text[:most] + "..."
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in cut)
