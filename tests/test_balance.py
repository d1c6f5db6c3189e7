"""Layers placed on stages, against brute force; `pipeloom split`; and what is wrong with a file of layers."""

import io
import json
import sys
from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeloom as pl
from pipeloom.balance import balanced
from pipeloom.cli import main
from pipeloom.errors import CostsError, SizeError
from pipeloom.layers import Layer, costs_of, read_layers

Run = Callable[..., tuple[int, str, str]]


def longest(layers: list[Layer], starts: list[int]) -> float:
    return max(sum(layer.time for layer in layers[a:b]) for a, b in pairwise([*starts, len(layers)]))


def memory_of(layers: list[Layer], starts: list[int], schedule: pl.Schedule) -> float:
    """The most that any rank holds, by walking over its row."""
    pieces = [layers[a:b] for a, b in pairwise([*starts, len(layers)])]
    most = 0.0
    for rank, row in enumerate(schedule.rows):
        held = sum(layer.static for stage in schedule.stages_of(rank) for layer in pieces[stage])
        most = max(most, held)
        for cell in row:
            parts = [(action.kind, sum(layer.activation for layer in pieces[action.stage])) for action in cell.computes]
            held += sum(size for kind, size in parts if kind == "F")
            most = max(most, held)
            held -= sum(size for kind, size in parts if kind in ("B", "W"))
    return most


def every_way(count: int, stages: int) -> list[list[int]]:
    return [[0, *cuts] for cuts in combinations(range(1, count), stages - 1)]


sizes = st.integers(0, 9)


@given(st.data())
def test_brute_force_without_a_limit(data: st.DataObject) -> None:
    layers = data.draw(st.lists(st.builds(Layer, name=st.just("x"), F=sizes, W=sizes), min_size=1, max_size=9))
    stages = data.draw(st.integers(1, len(layers)))
    starts = balanced(layers, stages)
    assert starts in every_way(len(layers), stages)
    assert longest(layers, starts) == min(longest(layers, each) for each in every_way(len(layers), stages))


@settings(max_examples=40)
@given(st.data())
def test_brute_force_within_a_memory(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["1F1B", "ZBVZeroBubble", "Interleaved1F1B", "V-Half", "DualPipeV", "GPipe"]))
    schedule = pl.schedules.make(name, ranks=data.draw(st.integers(1, 3)), microbatches=4)
    count = data.draw(st.integers(schedule.stages, schedule.stages + 3))
    layers = data.draw(
        st.lists(
            st.builds(Layer, name=st.just("x"), F=sizes, activation=sizes, weights=sizes),
            min_size=count,
            max_size=count,
        )
    )
    ways = every_way(count, schedule.stages)
    needed = [memory_of(layers, each, schedule) for each in ways]
    limit = data.draw(st.sampled_from(sorted(needed)))
    fitting = [each for each, memory in zip(ways, needed, strict=True) if memory <= limit]
    starts = balanced(layers, schedule.stages, schedule, limit)
    assert starts in fitting
    assert longest(layers, starts) == min(longest(layers, each) for each in fitting)
    if min(needed) >= 1:
        with pytest.raises(SizeError, match="the least that works is") as error:
            balanced(layers, schedule.stages, schedule, min(needed) - 0.5)
        assert min(needed) * 0.999 <= float(str(error.value).split()[-1]) <= min(needed) * 1.002


def test_an_embedding_and_a_head_that_cost_more_than_a_block() -> None:
    layers = [Layer(name="embed", F=2), *(Layer(name=f"blocks.{i}", F=1) for i in range(12)), Layer(name="head", F=4)]
    assert longest(layers, balanced(layers, 4)) == 5
    assert balanced([Layer(name=f"blocks.{i}", F=1) for i in range(64)], 8) == list(range(0, 64, 8))


def test_many_stages() -> None:
    layers = [Layer(name=str(i), F=1 + i % 3, activation=1, weights=5) for i in range(300)]
    schedule = pl.schedules.make("1F1B", ranks=64, microbatches=64)
    starts = balanced(layers, 64, schedule, 250)
    assert memory_of(layers, starts, schedule) <= 250
    assert longest(layers, starts) <= 12


def test_stages_get_the_sums_of_their_layers() -> None:
    layers = [Layer(name="a", F=1, W=2, weights=3), Layer(name="b", I=4, activation=5), Layer(name="c", F=6)]
    assert costs_of([layers[:2], layers[2:]]) == pl.Costs(
        F=[1, 6], I=[4, 0], W=[2, 0], activation=[5, 0], weights=[3, 0], gradients=[0, 0], optimizer_state=[0, 0]
    )


MODEL = {
    "layers": [
        {"name": "embed", "F": 1, "W": 1, "activation": 1, "weights": 8},
        *({"name": f"blocks.{i}", "F": 2, "I": 2, "W": 2, "activation": 4, "weights": 3} for i in range(6)),
        {"name": "head", "F": 2, "I": 2, "W": 2, "activation": 2, "weights": 8},
    ],
    "loss": {"F": 1, "I": 1},
}


def test_the_loss_belongs_to_the_last_layer() -> None:
    head = read_layers(json.dumps(MODEL))[-1]
    assert (head.name, head.F, head.I, head.W) == ("head", 3, 3, 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "layers: expected a list of objects"),
        ('{"layers": []}', "layers: expected a list of objects"),
        ('{"layers": [1]}', r"layers\[0\]: expected an object"),
        ('{"layers": [{"F": 1}]}', r"layers\[0\].name: expected the name of the layer"),
        ('{"layers": [{"name": "a"}, {"name": "a"}]}', r"layers\[1\].name: 'a' is given twice"),
        ('{"layers": [{"name": "a", "f": 1}]}', r"layers\[0\].f: expected one of F, I, W"),
        ('{"layers": [{"name": "a", "F": -1}]}', r"layers\[0\].F: expected a number, 0 or more, got -1"),
        ('{"layers": [{"name": "a", "F": NaN}]}', r"layers\[0\].F: expected a number, 0 or more, got nan"),
        ('{"layers": [{"name": "a", "F": true}]}', r"layers\[0\].F: expected a number, 0 or more, got True"),
        ('{"layers": [{"name": "a"}], "loss": 1}', "loss: expected an object"),
        ('{"layers": [{"name": "a"}], "more": 1}', 'more: expected "layers" and perhaps "loss"'),
        ('{"layers": [{"name": "a", "F": 1, "F": 1}]}', "'F' is given twice"),
    ],
)
def test_what_is_wrong_with_a_file(text: str, words: str) -> None:
    with pytest.raises(CostsError, match=words):
        read_layers(text)


@pytest.fixture
def pipeloom(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs one command line in this process."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pipeloom", *args])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
        with pytest.raises(SystemExit) as exit:
            main()
        return int(exit.value.code or 0), *capsys.readouterr()

    return run


@pytest.fixture
def costs(tmp_path: Path) -> str:
    path = tmp_path / "layers.json"
    path.write_text(json.dumps(MODEL))
    return str(path)


def test_split_prints_cuts(pipeloom: Run, costs: str) -> None:
    status, out, err = pipeloom("split", "--costs", costs, "--stages", "4")
    assert (status, err) == (0, "")
    assert out == (
        "STAGE  TIME  LAYERS\n"
        "    0    14  embed to blocks.1\n"
        "    1    12  blocks.2 to blocks.3\n"
        "    2    12  blocks.4 to blocks.5\n"
        "    3     8  head\n"
        "\n"
        "cuts=['blocks.2', 'blocks.4', 'head']\n"
    )


def test_split_for_a_schedule_in_a_memory(pipeloom: Run, costs: str, tmp_path: Path) -> None:
    sizes = ("ZBVZeroBubble", "--ranks", "2", "--microbatches", "4")
    path = tmp_path / "stages.json"
    status, out, _ = pipeloom("split", *sizes, "--costs", costs, "--memory", "66B", "-o", str(path), "--json")
    found = json.loads(out)
    assert status == 0
    assert [name for names in found["stages"] for name in names] == [layer["name"] for layer in MODEL["layers"]]  # type: ignore[index]
    assert found["cuts"] == [names[0] for names in found["stages"][1:]]
    priced = pl.Costs.from_json(path)
    assert [sum(each) for each in zip(priced.F, priced.I, priced.W, strict=True)] == found["times"]  # type: ignore[arg-type]
    timeline = pl.simulate(pl.schedules.make("ZBVZeroBubble", ranks=2, microbatches=4), priced)
    assert max(timeline.peak_memory) <= 66
    assert found["largest"] >= 14


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "either a SCHEDULE or --stages"),
        (["--stages", "4", "1F1B"], "either a SCHEDULE or --stages"),
        (["--stages", "9"], "stages must be from 1 to 8, the number of layers, got 9"),
        (["--stages", "4", "--memory", "9B"], "--memory needs a SCHEDULE"),
        (["1F1B", "--ranks", "2", "--microbatches", "4", "--memory", "9"], "write it in the unit of the costs"),
        (["1F1B", "--ranks", "2", "--microbatches", "4", "--memory", "nanB"], "write it in the unit of the costs"),
        (["1F1B", "--ranks", "2", "--microbatches", "4", "--memory", "9B"], "the least that works is"),
        (["Chimera", "--ranks", "2", "--microbatches", "4"], "no single chain of stages"),
        (["--stages", "4", "-o", "/no/such/folder/x.json"], "No such file or directory"),
    ],
)
def test_bad_usage_of_split(pipeloom: Run, costs: str, args: list[str], words: str) -> None:
    status, out, err = pipeloom("split", "--costs", costs, *args)
    assert (status, out) == (2, "")
    assert words in " ".join(err.split())
