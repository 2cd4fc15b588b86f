"""What crosses the cuts beside the chain: found by one step on absent tensors, and no more than is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_parallel.cuts.flow import Cargo, Flow, FlowError
from lightning_parallel.cuts.search import partition
from lightning_parallel.pipeline.stage import Stage
from tests.pipeline.by_hand import CPU, stages_of
from tests.pipeline.nets import BLOCKS, Calls, Glue, MultiExit, Net, UNet, Views
from tests.pipeline.test_stage import X, assert_equal_to_the_whole, step

pytestmark = pytest.mark.usefixtures("in_double_precision")


def stage_of(model: nn.Module, stages: int, index: int = 0, **options: Any) -> Stage:
    return Stage(model, partition(model, lambda: step(model), stages, **(options or BLOCKS)), index, CPU)


def crossing(model: nn.Module, stages: int) -> list[set[tuple[str, int]]]:
    """For each cut what every stage finds to cross it, besides the output of the layer before it."""
    stage = stages_of(model, step, stages, **BLOCKS)[0]
    before = [stage.partition.layers[bound - 1] for bound in stage.partition.bounds[1:-1]]
    return [
        {(cargo.module, cargo.call) for cargo in cut} - {(layer, 0)}
        for cut, layer in zip(stage.flow.cuts, before, strict=True)
    ]


class Asks(Net):
    """Goes on with a value of the last stage."""

    def step(self, x: Tensor) -> Tensor:
        first = self.stem(x)
        output = self.head(self.body(first))
        return output.square().mean() + output.abs().mean().item() * first.mean()


STEM, FIRST = ("stem", 0), ("blocks.0", 0)


@pytest.mark.parametrize(("kind", "expected"), [
    (Net, [set(), set(), set()]),
    # blocks.1 is needed by blocks.2, right after its own cut; blocks.0 by blocks.3; the stem by the head.
    (UNet, [{STEM}, {STEM, FIRST}, {STEM, FIRST}]),
    # Only outputs of modules cross, so residual sums outside the layers are made again on each stage.
    (Glue, [{STEM, FIRST}]),
    (MultiExit, [set(), {FIRST}, {FIRST, ("blocks.1", 0)}]),
    (Asks, [{STEM}]),
    (Views, [{("blocks.1", 1)}]),
])  # fmt: skip
def test_what_later_stages_need_crosses(kind: type[Net], expected: list[set[tuple[str, int]]]) -> None:
    assert crossing(kind(), len(expected) + 1) == expected


def test_what_a_stage_has_is_not_sent_to_it() -> None:
    def flow(places: tuple[int, ...]) -> Flow:
        stage = stage_of(model := UNet(), max(places) + 1, **BLOCKS, balance="layers", placement=places)
        return stage.flow_of(lambda: step(model))

    stem, *blocks = (Cargo(name, 0, 1) for name in ("stem", "blocks.0", "blocks.1", "blocks.2"))
    in_a_v = flow((1, 0, 0, 1))  # the stem and blocks.0; blocks.1; blocks.2; blocks.3 and the head
    assert in_a_v.cuts == ((blocks[0],), (blocks[1],), (blocks[2],))
    assert in_a_v.kept == {(0, 3): (stem, blocks[0])}
    interleaved = flow((0, 1, 0, 1))  # chunk 2 passes on what its stage has; chunk 1 has been sent blocks.0
    assert interleaved.cuts == ((blocks[0],), (blocks[1],), (stem, blocks[2]))
    assert interleaved.kept == {(0, 2): (stem,), (1, 3): (blocks[0],)}
    without = flow((0, 1, 2, 3))
    assert without.cuts == ((stem, blocks[0]), (stem, blocks[0], blocks[1]), (stem, blocks[0], blocks[2]))
    assert without.kept == {}


def test_a_stage_goes_on_to_its_further_calls_past_those_of_later_stages() -> None:
    stage = stage_of(model := Views(), 2)
    flow = stage.flow_of(lambda: step(model))
    assert flow.last == (("blocks.1", 1), ("head", 1))
    assert flow.passed == ({("blocks.2", 0), ("blocks.3", 0), ("head", 0)}, set())


@pytest.mark.parametrize(("where", "asks"), [
    ("returned", False), ("kept in a list", False), ("kept as a buffer", False), ("logged", True),
    ("kept in a list", True),
])  # fmt: skip
def test_what_is_told_beside_the_loss_crosses_too(where: str, asks: bool) -> None:
    class Tells(Net):
        def __init__(self) -> None:
            super().__init__()
            self.kept: dict[int, list[Any]] = {0: []}
            self.register_buffer("mean", torch.zeros(2))

        def step(self, x: Tensor) -> Any:
            early = self.stem(x)
            loss = self.head(self.body(early)).square().mean()
            if where == "logged":
                logged.append((("early", early.mean()), {}))
            elif where == "kept in a list":
                self.kept[0].append({"loss": loss, "early": [early]})
            elif where == "kept as a buffer":
                self.mean = early.mean(0)
            if asks:
                assert loss.item() < 1e9
            return (loss, early) if where == "returned" else loss

    for index in range(2):
        logged: list[Any] = []
        model = Tells()
        stage = stage_of(model, 2, index)
        logged.clear()
        flow = stage.flow_of(lambda model=model: step(model), logged)  # type: ignore[misc]
        assert flow.cuts == ((Cargo("stem", 0, 1), Cargo("blocks.1", 0, 1)),)
        assert model.kept == {0: []} and torch.equal(model.mean, torch.zeros(2))


# -- what escapes ------------------------------------------------------------------------------------------------------


class Collects(Net):
    """A loss over what hooks have collected from inside the layers."""

    def block(self) -> nn.Module:
        layer, gate = nn.Linear(self.width, self.width), nn.Linear(self.width, 2)
        return Calls(lambda m, x: m.layer(x).tanh() * m.gate(x).softmax(-1)[:, :1], layer=layer, gate=gate)

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[Tensor] = []
        for block in self.blocks:
            block.gate.register_forward_hook(self.keep)

    def keep(self, gate: nn.Module, args: Any, output: Tensor) -> None:
        self.scores.append(output)

    def step(self, x: Tensor) -> Tensor:
        self.scores.clear()
        return super().step(x) + sum(each.square().mean() for each in self.scores)


def test_what_is_collected_inside_a_layer_crosses_like_its_output() -> None:
    flow = assert_equal_to_the_whole(Collects(), step, 3, **BLOCKS).stages[0].flow
    assert "blocks.0.gate" in flow.inside and flow.transparent >= {"blocks.0"}
    assert "blocks.3" not in flow.transparent  # which is where the loss is


# -- what can't be run -------------------------------------------------------------------------------------------------


def reentrant(model: Any, x: Tensor) -> Tensor:
    """Checkpoints run their parts without gradients, and make up for it in the backward."""
    x = model.stem(x)
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=True)
    return model.head(x).square().mean()


def inferring(model: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        x = model.blocks[1](model.blocks[0](model.stem(x)))
    return model.head(model.blocks[3](model.blocks[2](x.clone()))).square().mean()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(("runs", "frozen"), [(reentrant, False), (reentrant, True), (inferring, False)])
def test_a_layer_at_a_cut_that_hides_gradients_is_refused(runs: Callable[[Any, Tensor], Tensor], frozen: bool) -> None:
    """``frozen``: the layer at the cut, through which the gradients of earlier ones pass."""
    model = Net()
    model.blocks[1].requires_grad_(not frozen)
    stage = stage_of(model, 2)
    with pytest.raises(RuntimeError, match="'blocks.1' hands its output from stage 0 .* use_reentrant=False"):
        stage.flow_of(lambda: runs(model, X))
    with torch.no_grad():  # an evaluation step has no gradients anywhere
        stage.flow_of(lambda: runs(model, X))


@pytest.mark.parametrize("by_backward", [False, True])
def test_gradients_through_several_stages_are_refused(by_backward: bool) -> None:
    """Also after the last layer, whose stage goes on without values otherwise."""

    class Penalised(Net):
        def step(self, x: Tensor) -> Tensor:
            output = super().step(x := x.clone().requires_grad_())
            if by_backward:
                output.backward()
                return output + x.grad.mean()
            (gradient,) = torch.autograd.grad(output, x, create_graph=True)
            return output + gradient.square().mean()

    stage = stage_of(model := Penalised(), 2)
    with pytest.raises(RuntimeError, match=r"torch\.autograd\.grad or backward on what several"):
        stage.flow_of(lambda: step(model))


def backwards(model: Any, x: Tensor) -> Tensor:
    x = model.stem(x)
    for block in reversed(model.blocks):
        x = block(x)
    return model.head(x).square().mean()


def calls_for_nobody(model: Any, x: Tensor) -> Tensor:
    output = model.body(model.stem(x))
    model.blocks[0](output)
    return model.head(output).square().mean()


def asks_and_calls_again(model: Any, x: Tensor) -> Tensor:
    output = model.head(model.body(model.stem(x)))
    return model.head(model.body(model.stem(x * output.abs().mean().item()))).square().mean()


@pytest.mark.parametrize(("other", "words"), [
    (backwards, r"'blocks.\d' is on stage 0, which leaves the step before this call, made after 'blocks.3'"),
    (calls_for_nobody, "'blocks.0' is on stage 0, which leaves the step before this call"),  # it may count
    (asks_and_calls_again, "asks for a value, which only stage 1 has, and then calls 'blocks.0'"),
])  # fmt: skip
def test_a_step_of_another_kind_must_meet_the_stages_in_the_same_order(
    other: Callable[[Any, Tensor], Tensor], words: str
) -> None:
    stage = stage_of(model := Net(), 2)
    with pytest.raises(FlowError, match=words):
        stage.flow_of(lambda: other(model, X))


def test_a_step_may_leave_layers_out_that_another_kind_calls() -> None:
    stage = stage_of(model := Net(), 4)
    flow = stage.flow_of(lambda: model.head(model.blocks[0](model.stem(X))).square().mean())
    assert flow.cuts == ((Cargo("blocks.0", 0, 1),),) * 3
    assert flow.last == (("blocks.0", 0), None, None, ("head", 0))
    assert flow.passed[1] == flow.passed[2] == frozenset()  # they leave the step in front of the head


class Writer(nn.Linear):
    def forward(self, x: Tensor, written: Tensor | None = None) -> Tensor:
        if written is not None:
            written.mul_(2)
        return super().forward(x)


def test_a_batch_that_a_later_stage_writes_to_is_read_before_that() -> None:
    def calls_twice(*, writes: bool) -> Tensor:
        first = model.head(model.blocks[0](model.stem(X)), X if writes else None)
        return (first + model.head(model.blocks[0](model.stem(X)))).square().mean()

    model: Any = Net()
    model.head = Writer(6, 2)
    stage = stage_of(model, 2)
    assert stage.flow_of(lambda: calls_twice(writes=False)).last == (("blocks.0", 1), ("head", 1))
    with pytest.raises(FlowError, match="'head' on stage 1 changes a tensor in place"):
        stage.flow_of(lambda: calls_twice(writes=True))


def count(m: Any, x: Tensor) -> Tensor:
    m.count.add_(x.abs().max())
    return m.layer(x)


def test_a_buffer_that_its_layer_changes_is_not_read_on_another_stage() -> None:
    """What layers don't change is, as in the contract (Loose)."""

    class Reads(Net):
        def step(self, x: Tensor) -> Tensor:
            return super().step(x) / self.stem.count

    model: Any = Reads()
    model.stem = Calls(count, layer=nn.Linear(3, 6), count=nn.Buffer(torch.zeros(())))
    stage = stage_of(model, 2, 1)
    assert stage.partition.holders_of("stem.count") == (0,)
    with pytest.raises(RuntimeError, match="count"):
        stage.flow_of(lambda: step(stage.module))


def test_a_step_is_traced_three_times() -> None:
    model, runs = Net(), []

    def counted() -> Tensor:
        runs.append(1)
        return step(model)

    Stage(model, partition(model, counted, 2, **BLOCKS), 0, CPU).flow_of(counted)
    assert len(runs) == 3  # twice for the cuts, once for what crosses them
