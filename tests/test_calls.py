"""What is around a call ends with it, wherever an exception from outside strikes."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

import pytest

from pipeloom.runtime.calls import _thread, around, entered, running, whole_call

said: list[str] = []


@around
def manager(name: str) -> Iterator[None]:
    said.append(f"{name} begins")
    try:
        yield
    except ValueError as error:
        said.append(f"{name}: {error}")
        raise
    finally:
        said.append(f"{name} ends")


@whole_call
def struck(begun: int) -> None:
    """As if Ctrl-C came when so many managers had begun, and their `with` had not."""
    entered((0, 1), "struck")
    managers = [manager(str(number)) for number in range(3)]
    for each in managers[:begun]:
        each.__enter__()
    raise ValueError("struck")


@whole_call
def plain() -> None:
    with manager("outer"), manager("inner"):
        raise ValueError("plain")


@pytest.fixture(autouse=True)
def silence() -> None:
    said.clear()


@pytest.mark.parametrize("begun", range(4))
def test_what_has_begun_ends_with_the_call_though_its_error_is_kept(begun: int) -> None:
    with pytest.raises(ValueError, match="struck") as kept:
        struck(begun)
    begins = [f"{number} begins" for number in range(begun)]
    ends = [word for number in reversed(range(begun)) for word in (f"{number}: struck", f"{number} ends")]
    assert said == [*begins, *ends]
    assert running((0, 1)) is None
    assert kept.value is not None


def test_what_has_ended_does_not_end_twice_nor_shows_in_the_traceback() -> None:
    with pytest.raises(ValueError, match="plain") as found:
        plain()
    assert said == ["outer begins", "inner begins", "inner: plain", "inner ends", "outer: plain", "outer ends"]
    names = [frame.name for frame in traceback.extract_tb(found.value.__traceback__)]
    assert names.count("call") == names.count("plain") == 1


def test_nothing_is_kept_of_what_is_in_no_call() -> None:
    for _ in range(3):
        with manager("alone"):
            pass
    assert _thread.around == []


def test_calls_within_calls() -> None:
    @whole_call
    def inner() -> None:
        entered((0, 1), "inner")

    @whole_call
    def outer() -> str | None:
        with manager("outer"):
            entered((0, 1), "outer")
            inner()
            assert said == ["outer begins"]
            return running((0, 1))

    assert outer() == "outer"
    assert running((0, 1)) is None
