"""What `import pipeloom` offers and what docs/api.md says of it are the same."""

import enum
import inspect
import re
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import pipeloom as pl

PAGE = (Path(__file__).parent.parent / "docs" / "api.md").read_text()
SECTIONS = dict(re.findall(r"^### `pl\.(.+)`\n((?:(?!#).*\n)*)", PAGE, re.MULTILINE))
CLASSES = [name for name in pl.__all__ if inspect.isclass(getattr(pl, name))]


def signature(function: Callable[..., Any]) -> str:
    """The parameters of a function as a reader needs them: names and defaults."""
    found = inspect.signature(function)
    kept = [each.replace(annotation=each.empty) for each in found.parameters.values() if each.name != "self"]
    return str(found.replace(parameters=kept, return_annotation=found.empty))


def members(cls: type) -> Iterator[str]:
    """The public members of a class as the page should write them, its constructor's parameters left out."""
    given = inspect.signature(cls).parameters
    for name in vars(cls):
        if not name.startswith("_") and name not in given:
            bound = getattr(cls, name)
            yield f"`.{name}{signature(bound) if callable(bound) else ''}`"


def test_the_page_and_all_name_the_same_things() -> None:
    assert len(set(pl.__all__)) == len(pl.__all__)
    assert {re.split(r"[.(]", heading)[0] for heading in SECTIONS} == set(pl.__all__)


@pytest.mark.parametrize("heading", SECTIONS)
def test_headings_are_signatures(heading: str) -> None:
    name, bracket, _ = heading.partition("(")
    found = attrgetter(name)(pl)
    assert not isinstance(found, ModuleType)
    assert heading == (name + signature(found) if bracket else name)


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_member_is_on_the_page(name: str) -> None:
    cls = getattr(pl, name)
    section = next(text for heading, text in SECTIONS.items() if heading.partition("(")[0] == name)
    if issubclass(cls, enum.Enum):
        assert [member for member in cls.__members__ if f"`{member}`" not in section] == []
    elif not issubclass(cls, Exception):
        assert [member for member in members(cls) if member not in section] == []


def test_everything_public_has_a_docstring() -> None:
    assert [name for name in pl.__all__ if not inspect.getdoc(getattr(pl, name))] == []
