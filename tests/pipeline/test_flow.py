"""What crosses the cuts beside the chain: found by one step on absent tensors, and no more than is needed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel.pipeline.absent import AbsentTensor, AbsentValueError
from lightning_parallel.pipeline.flow import Cargo, Flow, chain_only, tensors_of
from lightning_parallel.pipeline.partition import partition
from lightning_parallel.pipeline.stage import Stage
from tests.pipeline import by_hand
from tests.pipeline.by_hand import CPU
from tests.pipeline.nets import (
    BLOCKS,
    Dicts,
    Glue,
    HiddenPenalty,
    InPlace,
    Loose,
    Mixed,
    MultiExit,
    Net,
    Normalised,
    Tied,
    Tuples,
    UNet,
)

X = torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3)


@pytest.fixture(autouse=True)
def in_double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def step(model: Any) -> Any:
    return model.step(X)


def stage_of(model: nn.Module, stages: int, index: int = 0, **options: Any) -> Stage:
    return Stage(model, partition(model, stages, **(options or BLOCKS)), index, CPU)


def crossing(model: nn.Module, stages: int, **options: Any) -> list[set[tuple[str, int]]]:
    """For each cut what every stage finds to cross it."""
    flows = set()
    for index in range(stages):
        one = copy.deepcopy(model)
        flows.add(stage_of(one, stages, index, **options).survey(lambda one=one: step(one)))  # type: ignore[misc]
    (flow,) = flows  # all ranks have to agree
    return [{(cargo.module, cargo.call) for cargo in cut} for cut in flow.cuts]


@pytest.mark.parametrize("kind", [Net, Tuples, Dicts, InPlace, Normalised, Tied, Mixed])
def test_nothing_crosses_a_chain_but_the_layers_outputs(kind: type[Net]) -> None:
    assert crossing(kind(), 4) == [set(), set(), set()]


def test_skip_connections_cross_up_to_the_stage_that_needs_them() -> None:
    # blocks.1 is needed by blocks.2, right after its own cut; blocks.0 by blocks.3; the stem by the head.
    assert crossing(UNet(), 4) == [{("stem", 0)}, {("stem", 0), ("blocks.0", 0)}, {("stem", 0), ("blocks.0", 0)}]
    assert crossing(UNet(), 2) == [{("stem", 0), ("blocks.0", 0)}]


def test_what_the_step_itself_adds_up_crosses_part_by_part() -> None:
    """Residual sums outside the layers: only outputs of modules cross, so the sum is made again on each stage."""
    assert crossing(Loose(), 2) == [{("stem", 0), ("blocks.0", 0)}]
    assert crossing(Glue(), 2) == [{("stem", 0), ("blocks.0", 0)}]


def test_each_call_of_a_module_is_cargo_of_its_own() -> None:
    class TwoViews(Net):
        def step(self, x: Tensor) -> Tensor:
            first, second, third = self.stem(x), self.stem(2 * x), self.stem(3 * x)
            return self.head(self.body(first + second) + third).square().mean()

    assert crossing(TwoViews(), 2) == [{("stem", 2)}]


def test_what_the_loss_is_computed_from_crosses_to_the_last_stage() -> None:
    assert crossing(HiddenPenalty(), 4) == [set(), {("blocks.0", 0)}, {("blocks.0", 0)}]
    outputs = {("blocks.0", 0), ("blocks.1", 0)}
    assert crossing(MultiExit(), 4) == [set(), {("blocks.0", 0)}, outputs]


TOLD = ["returned", "logged", "kept in a list", "kept in a new dictionary", "kept as an attribute", "kept as a buffer"]


@pytest.mark.parametrize(("where", "asks"), [(where, asks) for where in TOLD for asks in (False, where != "returned")])
def test_what_is_told_beside_the_loss_crosses_too(where: str, asks: bool) -> None:
    class Tells(Net):
        def __init__(self) -> None:
            super().__init__()
            self.kept: dict[int, list[Any]] = {0: []}
            self.last: Any = None
            self.register_buffer("mean", torch.zeros(2))

        def step(self, x: Tensor) -> Any:
            early = self.stem(x)
            loss = self.head(self.body(early)).square().mean()
            if where == "logged":
                logged.append((("early", early.mean()), {}))
            elif where == "kept in a list":
                self.kept[0].append(early.detach())
            elif where == "kept in a new dictionary":
                self.kept[0].append({"loss": loss, "early": [early]})
            elif where == "kept as an attribute":
                self.last = (early, 1)
            elif where == "kept as a buffer":
                self.mean = early.mean(0)
            if asks:
                assert loss.item() < 1e9
            return (loss, early) if where == "returned" else loss

    for index in range(2):
        logged: list[Any] = []
        model = Tells()
        stage = stage_of(model, 2, index)
        flow = stage.survey(lambda model=model: step(model), logged)  # type: ignore[misc]
        assert flow.cuts == ((Cargo("stem", 0, 1),),)
        assert model.kept == {0: []} and model.last is None and torch.equal(model.mean, torch.zeros(2))


def test_what_a_layer_keeps_for_itself_stays_on_its_stage() -> None:
    class Keeps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.map = x.softmax(-1)
            return super().forward(x)

    class Maps(Net):
        def block(self) -> nn.Module:
            return Keeps(self.width, self.width)

    assert crossing(Maps(), 4) == [set(), set(), set()]


def test_an_error_after_the_layers_is_the_last_stages() -> None:
    """What the loss can't do with absent values it may do with real ones."""

    class Odd(Net):
        def step(self, x: Tensor) -> Tensor:
            x = self.head(self.body(self.stem(x)))
            if isinstance(x, AbsentTensor):
                raise TypeError("of the user")
            return x.square().mean()

    assert crossing(Odd(), 2) == [set()]


def test_the_number_of_tensors_is_told() -> None:
    class Recurrent(Net):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.LSTM(3, self.width)

        def step(self, x: Tensor) -> Tensor:
            x, (h, c) = self.stem(x[:, None])
            return self.head(self.body(x) + h + c).square().mean()

    stage = stage_of(Recurrent(), 2)
    assert stage.survey(lambda: step(stage.module)) == Flow(((Cargo("stem", 0, 3),),))


def test_a_mask_made_from_a_shape_makes_nothing_cross() -> None:
    class Masked(Net):
        def step(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            mask = torch.ones_like(x).tril() * x.new_full((1,), 2.0)
            for block in self.blocks:
                x = block(x) * mask
            return self.head(x).square().mean()

    assert crossing(Masked(), 4) == [set(), set(), set()]


def test_flow_of_a_stage() -> None:
    first, second = Cargo("a", 0, 1), Cargo("b", 1, 2)
    flow = Flow(((first,), (first, second)))
    assert [flow.into(stage) for stage in range(3)] == [(), (first,), (first, second)]
    assert [flow.out_of(stage) for stage in range(3)] == [(first,), (first, second), ()]
    assert chain_only(partition(Net(), 3, **BLOCKS)).cuts == ((), ())


def test_the_heaviest_cut_is_told_by_tensors() -> None:
    many, one = Cargo("many", 0, 3), Cargo("one", 0, 1)
    assert [tensors_of(cut) for cut in ((), (one,), (one, many))] == [0, 1, 4]
    assert Flow(((one, one), (many,), ())).heaviest() == 1
    assert Flow(((one, one), (one, many), (many,))).heaviest() == 1
    assert chain_only(partition(Net(), 3, **BLOCKS)).heaviest() == 0


# -- the survey is only a look -----------------------------------------------------------------------------------------


def test_the_survey_leaves_the_module_as_it_was() -> None:
    model = Normalised()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    identities = {name: id(p) for name, p in model.named_parameters()}
    stage = stage_of(model, 1)
    random = torch.get_rng_state()
    stage.survey(lambda: step(model))
    assert {name: id(p) for name, p in model.named_parameters()} == identities
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_the_survey_computes_nothing() -> None:
    events: list[str] = []

    class Watched(Net):
        def step(self, x: Tensor) -> Tensor:
            x = self.head(self.body(self.stem(x)))
            events.append("absent" if isinstance(x, AbsentTensor) else "computed")
            return x.square().mean()

    stage = stage_of(Watched(), 1)
    stage.survey(lambda: step(stage.module))
    assert events == ["absent"]


def test_a_survey_in_inference_mode_serves_training() -> None:
    """The sanity check before training is the first to be surveyed."""
    model = UNet()
    made = by_hand.stages_of(model, step, 2, **BLOCKS)
    for stage in made:
        fresh = Stage(stage.module, stage.partition, stage.index, CPU)  # one that has answered nothing so far
        with torch.inference_mode():
            assert fresh.survey(lambda stage=stage: step(stage.module)) == stage.flow  # type: ignore[misc]
        stage._absent = fresh._absent
    output, departures, arrivals = by_hand.forward(made, step)
    by_hand.backward(made, output, departures, arrivals)
    loss, gradients = by_hand.plain(model, step)
    torch.testing.assert_close(output.detach(), loss, rtol=0, atol=1e-12)
    found = by_hand.gradients_of(made)
    assert all(torch.allclose(found[name], gradient, rtol=0, atol=1e-12) for name, gradient in gradients.items())


def test_an_error_of_the_users_leaves_the_module_as_it_was() -> None:
    class Fails(Net):
        def step(self, x: Tensor) -> Tensor:
            self.stem(x)
            raise KeyError("of the user")

    model = Fails()
    stage = stage_of(model, 1)
    with pytest.raises(KeyError, match="of the user"):
        stage.survey(lambda: step(model))
    assert not any(isinstance(p, AbsentTensor) for p in model.parameters())
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_values_asked_for_after_the_layers_do_not_end_a_step_that_leaves_a_module_out() -> None:
    class TwoHeads(Net):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(self.width, 2)  # for another kind of step

        def step(self, x: Tensor) -> Tensor:
            loss = self.head(self.body(self.stem(x))).square().mean()
            assert loss.item() >= 0
            return loss

    assert crossing(TwoHeads(), 2) == [set()]


def test_values_asked_for_before_the_last_layer_are_refused_on_every_rank() -> None:
    class Peeks(Net):
        def step(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            scale = x.abs().max().item()
            return self.head(self.body(x / scale)).square().mean()

    for index in range(2):
        stage = stage_of(Peeks(), 2, index)
        with pytest.raises(AbsentValueError, match="the output of 'stem', which lives on another pipeline stage"):
            stage.survey(lambda stage=stage: step(stage.module))  # type: ignore[misc]


# -- what can't be run -------------------------------------------------------------------------------------------------


def calls(*order: int) -> Callable[[Any, Tensor], Tensor]:
    def run(self: Net, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i in order:
            x = self.blocks[i](x)
        return self.head(x).square().mean()

    return run


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ((0, 1, 1, 2, 3), "Layer 'blocks.1' was called a second time"),
        ((0, 1, 2), "Layer 'blocks.3' was not called by the step"),
        ((0, 2, 1, 3), "Layer 'blocks.2' was called before 'blocks.1'"),
        ((), "Layer 'blocks.0' was not called by the step"),
    ],
)
def test_layers_out_of_order_are_refused_on_every_rank(order: tuple[int, ...], words: str) -> None:
    kind = type("Disordered", (Net,), {"step": calls(*order)})
    for index in range(2):
        stage = stage_of(kind(), 2, index)
        with pytest.raises(RuntimeError, match=words) as refusal:
            stage.survey(lambda stage=stage: step(stage.module))  # type: ignore[misc]
        assert "`layers`" in str(refusal.value)


def test_a_module_that_is_needed_too_early_is_named_with_the_fix() -> None:
    class LateStem(Net):
        def __init__(self) -> None:
            super().__init__()
            self.after = nn.Linear(3, self.width)  # registered after the blocks, used before them

        def step(self, x: Tensor) -> Tensor:
            return self.head(self.body(self.stem(x) + self.after(x))).square().mean()

    words = r"'blocks.0' is on stage 0, but needs the output of 'after' on stage 1.*register 'after'.*before 'blocks.0'"
    with pytest.raises(RuntimeError, match=words):
        crossing(LateStem(), 2)
    assert partition(LateStem(), 2, ["after", "blocks.*"]).outside["stem"] == 0  # as it says, and the stem stays


def test_a_module_that_layers_share_is_named_with_the_fix() -> None:
    class Shared(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(self.width)  # registered after the blocks, used between them

        def step(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = self.norm(block(x))
            return self.head(x).square().mean()

    with pytest.raises(RuntimeError, match="'norm' on stage 1.* If it runs several times, call it inside the layers'"):
        crossing(Shared(), 2)


def test_a_second_pass_is_named_as_one() -> None:
    class TwoPasses(Net):
        def step(self, x: Tensor) -> Any:
            return super().step(x) - super().step(2 * x)

    with pytest.raises(RuntimeError, match="Layer 'blocks.0' was called a second time"):
        crossing(TwoPasses(), 2)


def test_a_module_called_where_its_stage_has_left_is_named_with_the_fix() -> None:
    class Again(Net):
        def step(self, x: Tensor) -> Tensor:
            return self.head(self.body(self.stem(x)) - self.stem(2 * x)).square().mean()

    with pytest.raises(RuntimeError, match="'stem' is on stage 0, but is called after 'blocks.1', where.*`layers`"):
        crossing(Again(), 2)


def test_a_module_registered_before_the_layers_and_called_after_them_is_named_on_every_rank() -> None:
    class Criterion(Net):
        def __init__(self) -> None:
            super().__init__()
            blocks, head = self.blocks, self.head
            del self.blocks, self.head
            self.criterion = nn.Linear(2, 2)
            self.blocks, self.head = blocks, head

        def step(self, x: Tensor) -> Tensor:
            return self.criterion(self.head(self.body(self.stem(x)))).square().mean()

    for index in range(2):
        stage = stage_of(Criterion(), 2, index)
        with pytest.raises(RuntimeError, match="'criterion' is on stage 0, but needs the output of 'head' on stage 1"):
            stage.survey(lambda stage=stage: step(stage.module))  # type: ignore[misc]
