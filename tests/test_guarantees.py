"""docs/guarantees.md names tests and cases that exist, and all of the cases."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from pipeloom.errors import BatchError
from pipeloom.runtime.microbatches import weights
from pipeloom.selftest import CASES

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "guarantees.md").read_text()
NAMED = sorted(set(re.findall(r"(test_\w+\.py)::(test_\w+)", PAGE)))


@pytest.mark.parametrize(("file", "test"), NAMED, ids=lambda name: name)
def test_the_tests_exist(file: str, test: str) -> None:
    assert re.search(rf"^def {test}\(", (TESTS / file).read_text(), re.MULTILINE)


def test_every_row_has_a_test() -> None:
    rows = re.findall(r"^\|(?! what \||---)(.*)\|$", PAGE.partition("## Row by row")[2], re.MULTILINE)
    assert len(rows) > 40
    assert [row for row in rows if "::test_" not in row] == []


def test_the_cases_are_those_of_the_selftest() -> None:
    columns = re.findall(r"^\|[^|]*\|[^|]*\|([^|]*)\|[^|]*::test_[^|]*\|$", PAGE, re.MULTILINE)
    named = [name.strip() for column in columns for name in column.split(",")]
    assert {*named} - {"", "all of them"} == {case.name for case in CASES}


def test_the_arithmetic_of_weights() -> None:
    targets = [torch.tensor([3, 5]), torch.tensor([4, -100])]

    def mean(shares: list[float]) -> float:
        return sum(share * loss for share, loss in zip(shares, (3.0, 6.0), strict=True))

    assert mean(weights("samples", 2, [2, 2], targets)) == pytest.approx(4.5)
    assert mean(weights(lambda y: (y != -100).sum(), 2, [2, 2], targets)) == pytest.approx(4.0)
    assert weights("equal", 4, [2, 2, 2, 1], []) == [0.25] * 4
    assert weights("sum", 4, [2, 2, 2, 1], []) == [1.0] * 4
    assert weights("samples", 4, [2, 2, 2, 1], []) == pytest.approx([2 / 7, 2 / 7, 2 / 7, 1 / 7])
    with pytest.raises(BatchError, match="their sum must be positive"):
        weights(lambda _: 0, 2, [2, 2], targets)
