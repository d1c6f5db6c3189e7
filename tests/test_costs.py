"""Costs: defaults, ranges, and JSON that is read strictly."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipeloom as pl
from pipeloom.costs import PER_STAGE
from pipeloom.errors import CostsError

amounts = st.floats(0, 1e6)


@st.composite
def some_costs(draw: st.DrawFn) -> pl.Costs:
    """Any costs for three stages."""
    names = draw(st.lists(st.sampled_from(sorted(set(PER_STAGE) - {"activation_at_I"})), unique=True))
    values: dict[str, Any] = {
        name: draw(st.one_of(amounts, st.lists(amounts, min_size=3, max_size=3))) for name in names
    }
    values["overlap"] = draw(st.one_of(st.none(), st.floats(0, 1)))
    values["fused"] = draw(st.one_of(st.none(), amounts, st.dictionaries(st.sampled_from(["0F;1B", "2B;0F"]), amounts)))
    values["bandwidth"] = draw(st.floats(1e-3, 1e9))
    return pl.Costs(**values)


def problems(**values: Any) -> list[str]:
    with pytest.raises(CostsError) as error:
        pl.Costs(**values)
    return [f"{problem.where}: {problem.message}" for problem in error.value.problems]


def problems_of_text(text: str | bytes) -> list[str]:
    with pytest.raises(CostsError) as error:
        pl.Costs.from_json(text, "c.json")
    assert all(problem.hint and problem.where.startswith("c.json") for problem in error.value.problems)
    return [f"{problem.where}: {problem.message}" for problem in error.value.problems]


def test_defaults_are_the_papers() -> None:
    table = pl.Costs().table(pl.Wiring(2))
    assert [table[name] for name in ("F", "I", "W", "B", "activation")] == [[1, 1], [1, 1], [1, 1], [2, 2], [1, 1]]
    assert not any(any(table[name]) for name in set(PER_STAGE) - {"F", "I", "W", "B", "activation"})


def test_b_is_i_and_w_unless_it_is_given() -> None:
    assert pl.Costs(I=[1, 2], W=3).table(pl.Wiring(2))["B"] == [4, 5]
    assert pl.Costs(I=1, W=3, B=3.5).table(pl.Wiring(2))["B"] == [3.5, 3.5]


def test_gradients_travel_like_activations_unless_told_otherwise() -> None:
    table = pl.Costs(communication=[1, 2], output_size=5).table(pl.Wiring(2))
    assert (table["communication_back"], table["gradient_size"]) == ([1, 2], [5, 5])
    assert pl.Costs(communication=1, communication_back=2).table(pl.Wiring(2))["communication_back"] == [2, 2]


def test_a_value_a_stage_holds_for_every_copy() -> None:
    wiring = pl.Wiring(2, copies=2)
    assert pl.Costs(F=[1, 2]).table(wiring)["F"] == [1, 2, 1, 2]
    assert pl.Costs(F=[1, 2, 3, 4]).table(wiring)["F"] == [1, 2, 3, 4]


def test_the_number_of_stages_must_fit() -> None:
    with pytest.raises(CostsError) as error:
        pl.Costs(F=[1, 2, 3], W=[1]).table(pl.Wiring(2))
    assert [problem.where for problem in error.value.problems] == ["F", "W"]
    assert error.value.problems[0].message == "expected 2 numbers, one a stage, got 3"


def test_i_releases_no_more_than_f_holds() -> None:
    assert problems(activation=[2, 1], activation_at_I=2) == [
        "activation_at_I: I of stage 1 releases 2.0, more than the 1.0 that F holds"
    ]
    assert problems(activation_at_I=2) == ["activation_at_I: I releases 2.0, more than the 1.0 that F holds"]
    assert problems(activation=[2, 1], activation_at_I=[1, 1, 1, 2]) == [
        "activation_at_I: I of stage 3 releases 2.0, more than the 1.0 that F holds"
    ]
    assert problems(activation=-1, activation_at_I=2) == ["activation: expected a number, 0 or more, got -1"]


def test_every_mistake_is_said() -> None:
    assert problems(F=-1, I="fast", W=[1, float("nan")], optimizer=True, bandwidth=0, overlap=1.5, activation=[]) == [
        "F: expected a number, 0 or more, got -1",
        "I: expected a number or a list of them, got the text 'fast'",
        "W[1]: expected a number, 0 or more, got nan",
        "optimizer: expected a number or a list of them, got true",
        "bandwidth: expected a bandwidth above 0, got 0",
        "overlap: expected a share from 0 to 1, got 1.5",
        "activation: the list is empty",
    ]


@pytest.mark.parametrize("name", [each.name for each in fields(pl.Costs)])
@pytest.mark.parametrize("value", [-1, 0, 1e999, float("nan"), "x", True, [1, "x"], {"x": 1}, numpy.ones(2), object()])
def test_no_hint_allows_what_is_refused(name: str, value: Any) -> None:
    try:
        pl.Costs(**{name: value})
    except CostsError as error:
        for problem in error.problems:
            assert not (type(value) is int and value == 0 and "0 or more" in problem.hint)
            assert (problem.hint == "arrays have .tolist()") == (type(value) in (numpy.ndarray, object))


def test_too_large_is_no_number() -> None:
    assert problems(F=10**400) == ["F: expected a finite number, got one too large"]
    assert problems(F=float("inf")) == ["F: expected a finite number, got one too large"]


def test_fused_names_parts() -> None:
    assert pl.Costs(fused={"0F;7B": 2}).fused == {"0F;7B": 2.0}
    assert problems(fused={"0F7;7B3": 2, "F": -1}) == [
        "fused: '0F7;7B3' does not name the parts of a composite",
        "fused: 'F' does not name the parts of a composite",
        "fused['F']: expected a number, 0 or more, got -1",
    ]


@given(some_costs())
def test_json_gives_the_same_costs(costs: pl.Costs) -> None:
    assert pl.Costs.from_json(costs.to_json()) == costs


def test_json_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text('\ufeff{"F": 2, "I": [1, 2]}', encoding="utf-8")
    assert pl.Costs.from_json(path) == pl.Costs.from_json(str(path)) == pl.Costs(F=2, I=[1, 2])


def test_every_mistake_of_a_file_is_said() -> None:
    text = '{"F": [1, -1, null, 1e999], "Comunication": 1, "B": null, "weights": {"0": 1}, "W": NaN, "I": "1"}'
    assert problems_of_text(text) == [
        "c.json: F[1]: expected a number, 0 or more, got -1",
        "c.json: F[2]: expected a number or a list of them, got null",
        "c.json: F[3]: expected a finite number, got one too large",
        "c.json: 'Comunication' is not a cost",
        "c.json: weights: expected a number or a list of them, got an object",
        "c.json: W: expected a number, 0 or more, got nan",
        "c.json: I: expected a number or a list of them, got the text '1'",
    ]


def test_a_hint_names_the_closest_cost() -> None:
    with pytest.raises(CostsError, match="did you mean communication"):
        pl.Costs.from_json('{"comunication": 1}')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"F": 1,}', "c.json:1:9: this is not JSON: Expecting property name"),
        ("[1]", "c.json: expected an object, got a list"),
        ("", "c.json:1:1: this is not JSON: Expecting value"),
        ('{"F": 1, "F": 2}', "c.json: 'F' is given twice"),
        ('{"F": ' + "9" * 5000 + "}", "c.json: F: expected a finite number, got one too large"),
        ('{"F": ' + "[" * 100_000, "c.json: it is nested too deeply"),
        (b"\xff{}", "c.json: byte 1 is not UTF-8"),
    ],
)
def test_what_is_no_json_is_said(text: str | bytes, expected: str) -> None:
    found = problems_of_text(text if isinstance(text, bytes) else text.encode())
    assert len(found) == 1
    assert found[0].startswith(expected)


def test_unreadable_files_are_said(tmp_path: Path) -> None:
    with pytest.raises(CostsError, match="cannot be read: Is a directory"):
        pl.Costs.from_json(tmp_path)
    with pytest.raises(CostsError, match="cannot be read: No such file"):
        pl.Costs.from_json(tmp_path / "none.json")
    with pytest.raises(CostsError, match="cannot be read"):
        pl.Costs.from_json("a\0b")


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(PER_STAGE), inner)),
    max_leaves=8,
)


@given(
    st.one_of(
        st.binary(max_size=40),
        st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass")),
        json_values.map(lambda value: json.dumps(value).encode()),
        st.dictionaries(
            st.sampled_from([*PER_STAGE, "fused", "overlap", "bandwidth", "x"]), json_values, max_size=4
        ).map(lambda value: json.dumps(value).encode()),
    )
)
def test_any_bytes_are_costs_or_a_report(data: bytes) -> None:
    with suppress(CostsError):
        costs = pl.Costs.from_json(data)
        assert pl.Costs.from_json(costs.to_json()) == costs
