"""Splitting a model: names, weights and values stay those of the whole model, or it is refused with the reason."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate, combinations, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.errors import SplitError
from pipeloom.placement import loop, v
from pipeloom.runtime.launcher import launch
from pipeloom.runtime.stage import Stage
from pipeloom.schedule import Schedule
from pipeloom.splitter import fill
from pipeloom.wiring import Wiring


def schedule_of(placement: dict[int, int]) -> Schedule:
    """A schedule of which nothing but the placement matters."""
    return Schedule(((),) * (max(placement.values()) + 1), placement, Wiring(len(placement)), 1)


def all_stages(model: nn.Module, placement: dict[int, int], cuts: list[str] | None = None) -> list[Stage]:
    schedule = schedule_of(placement)
    stages = [stage for rank in range(schedule.ranks) for stage in pl.split(model, schedule, cuts, rank)]
    return sorted(stages, key=lambda stage: stage.index)


def keys(stages: list[Stage]) -> list[list[str]]:
    return [list(stage.module.state_dict()) for stage in stages]


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.linear(self.norm(x)).relu()
        return result


class Model(nn.Module):
    """Things before and after a ModuleList, one of them in a container of its own."""

    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 4)
        self.body = nn.ModuleDict({"blocks": nn.ModuleList(Block() for _ in range(blocks))})
        self.after = nn.Sequential(nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
        self.head = nn.Linear(4, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.body["blocks"].children():
            x = block(x)
        result: Tensor = self.head(self.after(x))
        return result


class Declared(nn.Module):
    """Code between the layers, and a parameter of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, 4)
        self.positions = nn.Parameter(torch.randn(8, 4))
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 16)
        self.register_buffer("scale", torch.tensor(2.0))
        self.scale: Tensor

    def embed(self, x: Tensor) -> Tensor:
        result: Tensor = self.tokens(x) + self.positions[: x.shape[-1]]
        return result

    def logits(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(x)) * self.scale
        return result

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.logits(x)

    def pipeline_layers(self) -> list[object]:
        return [
            (self.embed, self.tokens, self.positions),
            *self.blocks,
            (self.logits, self.norm, self.head, self.scale),
        ]


@pytest.mark.parametrize("placement", [loop(1), loop(2), loop(4), loop(2, 2), v(4), {0: 1, 1: 0, 2: 1}])
@pytest.mark.parametrize("kind", [Model, Declared])
def test_stages_together_are_the_model(kind: type[nn.Module], placement: dict[int, int]) -> None:
    torch.manual_seed(1)
    model = kind()
    tokens = torch.randint(16, (5,) if kind is Model else (5, 8))
    expected = model(tokens)
    stages = all_stages(model, placement)
    assert [stage.index for stage in stages] == sorted(placement)
    assert sorted(key for stage in keys(stages) for key in stage) == sorted(model.state_dict())
    whole = model.state_dict()
    for stage in stages:
        assert all(tensor.data_ptr() == whole[key].data_ptr() for key, tensor in stage.module.state_dict().items())
    value = tokens
    for stage in stages:
        value = stage.module(value)
    assert torch.equal(value, expected)


def test_a_rank_gets_its_own_stages_only() -> None:
    stages = pl.split(Model(), schedule_of(v(2)), rank=0)
    assert [stage.index for stage in stages] == [0, 3]


def test_the_model_stays_as_it_is() -> None:
    model = Model()
    before = (str(model), list(model.state_dict()), type(model))
    all_stages(model, loop(3))
    assert (str(model), list(model.state_dict()), type(model)) == before


def test_a_stage_is_still_the_users_model() -> None:
    first, last = all_stages(Model(), loop(2))
    assert isinstance(first.module, Model)
    assert not hasattr(first.module, "head")
    assert not hasattr(last.module, "embedding")
    assert not first.module.eval().body["blocks"][0].training  # type: ignore[index]


def test_equal_blocks_are_dealt_out_evenly() -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(30)))
    counts = [len(stage.module) for stage in all_stages(model, loop(4))]  # type: ignore[arg-type]
    assert sorted(counts) == [7, 7, 8, 8]


def test_large_layers_get_a_stage_of_their_own() -> None:
    model = nn.Sequential(nn.Embedding(1000, 4), *(nn.Linear(4, 4) for _ in range(6)), nn.Linear(4, 1000))
    assert [len(stage.module) for stage in all_stages(model, loop(3))] == [1, 6, 1]  # type: ignore[arg-type]


@given(layers=st.integers(1, 40), stages=st.integers(1, 12))
def test_every_layer_lands_in_one_stage(layers: int, stages: int) -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(layers)))
    counts = [len(stage.module) for stage in all_stages(model, loop(stages))]  # type: ignore[arg-type]
    filled = [count for count in counts if count]
    assert sum(counts) == layers
    assert max(filled) - min(filled) <= 1
    assert len(filled) == min(layers, stages)


@given(widths=st.lists(st.integers(0, 9), min_size=4, max_size=9), count=st.integers(2, 4))
def test_no_other_cuts_are_better_balanced(widths: list[int], count: int) -> None:
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) if width else nn.Identity() for width in widths))
    weights = [width**2 + 1 for width in widths]

    def cost(ends: list[int]) -> int:
        return sum(sum(weights[start:end]) ** 2 for start, end in pairwise([0, *ends, len(weights)]))

    found = list(accumulate(len(stage.module) for stage in all_stages(model, loop(count))))  # type: ignore[arg-type]
    assert cost(found[:-1]) == min(cost(list(ends)) for ends in combinations(range(1, len(weights)), count - 1))


def test_left_over_stages_are_identities() -> None:
    stages = all_stages(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), loop(4))
    value = torch.randn(3, 2)
    assert keys(stages)[2:] == [[], []]
    assert torch.equal(stages[3].module(value), value)


def test_cuts_by_name() -> None:
    stages = all_stages(Model(), loop(4), cuts=["body.blocks.1", "body.blocks.4", "after"])
    names = [sorted({key.rsplit(".", 1)[0] for key in stage}) for stage in keys(stages)]
    assert names[0] == ["body.blocks.0.linear", "body.blocks.0.norm", "embedding"]
    assert names[3] == ["after.0", "after.1.0", "head"]
    assert "body.blocks.3.linear" in names[1]
    assert "body.blocks.4.norm" in names[2]


def test_a_cut_given_twice_makes_an_identity() -> None:
    assert keys(all_stages(Model(), loop(3), cuts=["head", "head"]))[1] == []


def test_wrong_cuts_are_all_named() -> None:
    with pytest.raises(SplitError) as caught:
        all_stages(Model(), loop(4), cuts=["head", "body.blocks.9", "body.blocks.1", "after"])
    text = str(caught.value)
    assert "4 stages need 3 cuts, got 4" in text
    assert "'body.blocks.9' names no layer; the layers are embedding, body.blocks.0" in text
    assert "'body.blocks.1' comes before" in text


def test_copies_hold_the_same_layers() -> None:
    schedule = Schedule(((), ()), {0: 0, 1: 1, 2: 1, 3: 0}, Wiring(2, copies=2), 2)
    first, second = pl.split(Model(), schedule, rank=0)
    assert (first.index, second.index) == (0, 3)
    assert "embedding.weight" in first.module.state_dict()
    assert "head.weight" in second.module.state_dict()


class Several(nn.Module):
    """Gives a tuple of tensors, and takes one as one value."""

    def __init__(self, outputs: int, takes_tuple: bool = True) -> None:
        super().__init__()
        self.outputs, self.takes_tuple = outputs, takes_tuple
        self.linear = nn.Linear(4, 4)

    def forward(self, values: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert isinstance(values, tuple) == self.takes_tuple
        first, *rest = values if isinstance(values, tuple) else (values,)
        mixed = self.linear(first) + sum(rest)
        return tuple(mixed * number for number in range(1, 1 + self.outputs))


def test_a_tuple_between_layers_is_one_value_between_stages_too(tmp_path: Path) -> None:
    model = nn.Sequential(Several(2, takes_tuple=False), Several(1), Several(3), Several(1))
    inputs = torch.randn(4, 4)

    def loss_fn(output: tuple[Tensor]) -> Tensor:
        return output[0].square().mean()

    def work() -> None:
        schedule = pl.schedules.make("Interleaved1F1B", ranks=2, microbatches=2)
        stages = pl.split(model, schedule, cuts=["1", "2", "3"])
        pipe = pl.Pipeline(stages, schedule, loss_fn=loss_fn)
        pipe.step(*[inputs] if pipe.first else [])
        for stage in stages:
            for name, parameter in stage.module.named_parameters():
                torch.save(parameter.grad, tmp_path / name)
        pipe.close()

    torch.set_num_threads(1)
    launch(work, 2)
    loss_fn(model(inputs)).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(torch.load(tmp_path / name), parameter.grad)


def test_a_layer_may_be_replaced_after_the_split() -> None:
    (stage,) = all_stages(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), loop(1))
    stage.module[0] = nn.Identity()  # type: ignore[operator]
    value = torch.tensor([[-1.0, 2.0]])
    assert stage.module(value).tolist() == [[0.0, 2.0]]


class AddsPositions(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) + torch.arange(4)
        return super().forward(x)


class UsesTwice(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(super().forward(self.after(x)))  # type: ignore[no-any-return]


class NeverUses(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x))  # type: ignore[no-any-return]


class Branches(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.after(self.embedding(x)) if x else x)  # type: ignore[no-any-return]


class LeavesGradients(Model):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.embedding(x)
        return self.head(x)  # type: ignore[no-any-return]


class KeepsTheInput(Model):
    def forward(self, x: Tensor) -> Tensor:
        self.embedding(x)
        return self.head(x)  # type: ignore[no-any-return]


class GivesAway(Model):
    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return x


class Keeps(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.half(), lambda kept: kept.float()):
            return self.head(x)  # type: ignore[no-any-return]


class Trains(Model):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else self.head(self.embedding(x))


class Asks(Model):
    """A chain but for what is done with its input, or beside it."""

    def __init__(self, ask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.ask(x))


def halved_if_it_can_be(x: Tensor) -> Tensor:
    try:
        return x / 2
    except TypeError:
        return x


def seeded(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return x


class HasMore(Model):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))
        self.register_buffer("steps", torch.zeros(()))


def hooked() -> nn.Module:
    model = Model()
    model.after.register_forward_hook(lambda *_: None)
    return model


def tied() -> nn.Module:
    model = Model()
    model.head.weight = model.embedding.weight
    return model


def declares(*entries: object) -> nn.Module:
    class Declares(Declared):
        def pipeline_layers(self) -> list[object]:
            return list(entries) or [self.tokens, self.norm, self.norm]

    return Declares()


@pytest.mark.parametrize(
    ("model", "reasons"),
    [
        (AddsPositions(), ["not a plain chain of layers: it uses add on the", "torch.arange(4)", "pipeline_layers"]),
        (UsesTwice(), ["'head' is used 2 times", "'after.0' is used 2 times"]),
        (NeverUses(), ["forward never runs layer 'body.blocks.0'", "forward never runs layer 'after.1.1'"]),
        (Branches(), ["it uses bool on the value", "if x else x"]),
        (LeavesGradients(), ["layer 'embedding' is called under autocast, no_grad"]),
        (Keeps(), ["is called under autocast, no_grad"]),
        (Trains(), ["forward runs other layers in training than in evaluation"]),
        (Asks(lambda x: x / 2 if isinstance(x, Tensor) else x), ["it asks for .__class__ of the value"]),
        (Asks(lambda x: x / 2 if torch.is_tensor(x) else x), ["it asks for .__class__ of the value"]),
        (Asks(lambda x: x / 2 if hasattr(x, "shape") else x), ["it asks for .shape of the value"]),
        (Asks(lambda x: x / 2 if getattr(x, "ndim", None) else x), ["it asks for .ndim of the value"]),
        (Asks(halved_if_it_can_be), ["it uses truediv on the value"]),
        (Asks(torch.relu), ["it asks for .__class__ of the value"]),
        (Asks(lambda x: x if random.random() < 1 else -x), ["draws random numbers"]),
        (Asks(lambda x: x if torch.rand(()) < 1 else -x), ["draws random numbers"]),
        (Asks(seeded), ["draws random numbers, or seeds them"]),
        (KeepsTheInput(), ["layer 'head' is not called with the one value", "return self.head(x)"]),
        (GivesAway(), ["does not return what its last layer gave"]),
        (HasMore(), ["parameter 'temperature' belongs to no layer", "buffer 'steps' belongs to no layer"]),
        (hooked(), ["'after' has hooks"]),
        (declares(), ["'norm' is used 2 times", "parameter 'positions' belongs", "buffer 'scale' belongs"]),
        (declares(len, (len, 3)), ["entry 0 of pipeline_layers()", "entry 1 of pipeline_layers()"]),
        (nn.Sequential(), ["has no layers"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_refused_with_the_reason(model: nn.Module, reasons: list[str]) -> None:
    with pytest.raises(SplitError) as caught:
        all_stages(model, loop(2))
    for reason in reasons:
        assert reason in str(caught.value)


def test_a_shared_weight_stays_one_weight(tmp_path: Path) -> None:
    with torch.device("meta"):
        part = tied()
    inputs, target = torch.randint(16, (8,)), torch.randint(16, (8,))

    def work() -> None:
        schedule = pl.schedules.make("1F1B", ranks=2, microbatches=2)
        (stage,) = pl.split(part, schedule)
        fill(stage.module, seed=7)
        pipe = pl.Pipeline([stage], schedule, loss_fn=nn.functional.cross_entropy)
        stage.module.eval()
        pipe.step(*[inputs] if pipe.first else [], target=target if pipe.last else None)
        name = "embedding.weight" if pipe.first else "head.weight"
        weight = stage.module.get_parameter(name)
        torch.save([weight, weight.grad], tmp_path / name)
        pipe.close()

    torch.set_num_threads(1)
    launch(work, 2)
    whole = tied().eval()
    fill(whole, seed=7)
    nn.functional.cross_entropy(whole(inputs), target).backward()
    expected = whole.get_parameter("head.weight")
    assert expected is whole.get_parameter("embedding.weight")
    for name in ("embedding.weight", "head.weight"):
        weight, gradient = torch.load(tmp_path / name)
        assert torch.equal(weight, expected)
        torch.testing.assert_close(gradient, expected.grad)


def test_refused_without_a_rank() -> None:
    with pytest.raises(SplitError, match="has no rank yet"):
        pl.split(Model(), schedule_of(loop(2)))
    with pytest.raises(SplitError, match="rank 2 has no row in 'schedule', which has 2 ranks"):
        pl.split(Model(), schedule_of(loop(2)), rank=2)


def test_skips_are_refused() -> None:
    schedule = Schedule(((),), {0: 0, 1: 0, 2: 0}, Wiring(3, skips=((0, 2),)), 1)
    with pytest.raises(SplitError, match="skip edges"):
        pl.split(Model(), schedule, rank=0)


def test_filled_on_its_rank_as_in_the_whole_model() -> None:
    with torch.device("meta"):
        model = Model()
    whole = Model()
    fill(whole, seed=3)
    state = torch.get_rng_state()
    for stage in all_stages(model, v(2)):
        assert all(parameter.is_meta for parameter in stage.module.parameters())
        fill(stage.module, seed=3)
        for key, tensor in stage.module.state_dict().items():
            assert torch.equal(tensor, whole.state_dict()[key]), key
    assert torch.equal(torch.get_rng_state(), state)


def test_torchs_own_blocks_are_filled() -> None:
    with torch.device("meta"):
        block = nn.TransformerEncoderLayer(4, 2, 8)
    other = nn.TransformerEncoderLayer(4, 2, 8)
    for each in (block, other):
        fill(each, seed=1)
    assert all(map(torch.equal, block.state_dict().values(), other.state_dict().values()))
    bound = (6 / (4 + 12)) ** 0.5  # Xavier's, as MultiheadAttention has it
    assert 0.8 * bound < block.self_attn.in_proj_weight.abs().max() <= bound
    assert not block.self_attn.in_proj_bias.any()


def test_another_seed_fills_with_other_weights() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    fill(first, seed=1)
    fill(second, seed=2)
    assert not torch.equal(first.weight, second.weight)


def test_loaded_on_its_rank_from_the_whole_models_state() -> None:
    with torch.device("meta"):
        model = Model()
    whole = Model()
    for stage in all_stages(model, loop(3)):
        stage.module.to_empty(device="cpu")
        stage.module.load_state_dict({key: whole.state_dict()[key] for key in stage.module.state_dict()})
        assert torch.equal(
            next(stage.module.parameters()), dict(whole.named_parameters())[next(iter(stage.module.state_dict()))]
        )


def test_what_nothing_initialises_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), HasMore())
    with pytest.raises(SplitError, match=r"'1.temperature' is not initialised(.|\n)*'1.steps' is not") as caught:
        fill(model, seed=0)
    assert str(caught.value).startswith("Sequential cannot be filled:\n")


def test_a_hook_on_one_stage_is_not_on_others() -> None:
    one, other = all_stages(Model(), {0: 0, 1: 0})
    calls = []
    one.module.register_forward_hook(lambda *_: calls.append(1))
    hidden = one.module(torch.arange(4))
    other.module(*hidden if isinstance(hidden, tuple) else (hidden,))
    assert calls == [1]
