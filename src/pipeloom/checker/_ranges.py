"""Numbers as people write them."""

from __future__ import annotations

from collections.abc import Iterable


def ranges(numbers: Iterable[int]) -> list[range]:
    """Rising numbers as ranges."""
    found: list[range] = []
    for number in numbers:
        if found and number == found[-1].stop:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


def gaps(numbers: Iterable[int], start: int, stop: int) -> list[range]:
    """The ranges from `start` to before `stop` that rising `numbers` leave out, without walking through them."""
    found = []
    for number in numbers:
        if start < number < stop:
            found.append(range(start, number))
        start = max(start, number + 1)
    return [*found, range(start, stop)] if start < stop else found


def named(word: str, found: list[range]) -> str:
    """Ranges in words: "stages 1 to 4 and 7", "microbatch 3"."""
    texts: list[str] = []
    for span in found:
        texts += [f"{span[0]} to {span[-1]}"] if len(span) > 2 else map(str, span)
    if len(texts) == len(found) == len(found[0]) == 1:
        return f"{word} {texts[0]}"
    plural = f"{word}es" if word.endswith("h") else f"{word}s"
    return f"{plural} {', '.join(texts[:-1])}{' and ' if len(texts) > 1 else ''}{texts[-1]}"
