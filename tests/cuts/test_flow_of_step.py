"""What crosses the cuts beside the chain: found by one step on absent tensors, and no more than is needed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_parallel.cuts.flow import Cargo, Flow, FlowError
from lightning_parallel.cuts.search import partition
from lightning_parallel.pipeline.stage import Stage
from tests.pipeline.by_hand import CPU
from tests.pipeline.nets import BLOCKS, Glue, MultiExit, Net, UNet, Views
from tests.pipeline.test_stage import X, assert_equal_to_the_whole, step

pytestmark = pytest.mark.usefixtures("in_double_precision")


def stage_of(model: nn.Module, stages: int, index: int = 0, **options: Any) -> Stage:
    return Stage(model, partition(model, lambda: step(model), stages, **(options or BLOCKS)), index, CPU)


def crossing(model: nn.Module, stages: int, **options: Any) -> list[set[tuple[str, int]]]:
    """For each cut what every stage finds to cross it, besides the output of the layer before it."""
    flows = set()
    for index in range(stages):
        one = copy.deepcopy(model)
        stage = stage_of(one, stages, index, **options)
        flows.add(stage.flow_of(lambda one=one: step(one)))  # type: ignore[misc]
    (flow,) = flows  # all ranks have to agree
    before = [stage.partition.layers[bound - 1] for bound in stage.partition.bounds[1:-1]]
    return [
        {(cargo.module, cargo.call) for cargo in cut} - {(layer, 0)}
        for cut, layer in zip(flow.cuts, before, strict=True)
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


TOLD = ["returned", "logged", "kept in a list", "kept in a new dictionary", "kept as an attribute", "kept as a buffer"]


@pytest.mark.parametrize(("where", "asks"), [*((where, False) for where in TOLD), ("logged", True), (TOLD[4], True)])
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
        logged.clear()
        flow = stage.flow_of(lambda model=model: step(model), logged)  # type: ignore[misc]
        assert flow.cuts == ((Cargo("stem", 0, 1), Cargo("blocks.1", 0, 1)),)
        assert model.kept == {0: []} and model.last is None and torch.equal(model.mean, torch.zeros(2))


# -- what escapes ------------------------------------------------------------------------------------------------------


class Collects(Net):
    """A loss over what hooks and attributes have collected from inside the layers."""

    class Block(nn.Module):
        def __init__(self, width: int, keeps: bool) -> None:
            super().__init__()
            self.layer, self.gate = nn.Linear(width, width), nn.Linear(width, 2)
            self.keeps, self.kept = keeps, torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            scores = self.gate(x).softmax(-1)
            if self.keeps:
                self.kept = scores.square() * x[:, :1]
            return self.layer(x).tanh() * scores[:, :1]

    keeps = False

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[Tensor] = []
        for block in self.blocks:
            if not self.keeps:
                block.gate.register_forward_hook(_Keep())

    def block(self) -> nn.Module:
        return self.Block(self.width, self.keeps)

    def step(self, x: Tensor) -> Tensor:
        hooks = [hook for block in self.blocks for hook in block.gate._forward_hooks.values() if type(hook) is _Keep]
        for hook in hooks:
            hook.kept.clear()
        loss = self.head(self.body(self.stem(x))).square().mean()
        kept = [block.kept for block in self.blocks] if self.keeps else [k for hook in hooks for k in hook.kept]
        return loss + sum(each.square().mean() for each in kept)


class _Keep:
    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.kept.append(output)


class Keeps(Collects):
    keeps = True


@pytest.mark.parametrize("kind", [Collects, Keeps])
def test_what_is_collected_inside_a_layer_crosses_like_its_output(kind: type[Net]) -> None:
    torch.manual_seed(0)
    flow = assert_equal_to_the_whole(kind(), step, 3, **BLOCKS).stages[0].flow
    assert "blocks.0.gate" in flow.inside and flow.transparent >= {"blocks.0"}
    assert "blocks.3" not in flow.transparent  # which is where the loss is


# -- what can't be run -------------------------------------------------------------------------------------------------


class Reentrant(Net):
    """Its checkpoints run their parts without gradients, and make up for it in the backward."""

    def step(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x).square().mean()


class Inferring(Net):
    """Its first layers run in inference mode."""

    def step(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            x = self.blocks[1](self.blocks[0](self.stem(x)))
        return self.head(self.blocks[3](self.blocks[2](x.clone()))).square().mean()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(("kind", "frozen"), [(Reentrant, False), (Reentrant, True), (Inferring, False)])
def test_a_layer_at_a_cut_that_hides_gradients_is_refused(kind: type[Net], frozen: bool) -> None:
    """``frozen``: the layer at the cut, through which the gradients of earlier ones pass."""
    model = kind()
    model.blocks[1].requires_grad_(not frozen)
    stage = stage_of(model, 2)
    with pytest.raises(RuntimeError, match="'blocks.1' hands its output from stage 0 .* use_reentrant=False"):
        stage.flow_of(lambda: step(stage.module))
    with torch.no_grad():  # an evaluation step has no gradients anywhere
        stage.flow_of(lambda: step(stage.module))


class Penalised(Net):
    """Takes gradients in the step itself, by the batch, by a parameter, or by what the last stage computes."""

    by = "batch"

    def step(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        output = self.head(self.body(self.stem(x)))
        if self.by == "backward":
            output.sum().backward()
            return output.mean() + x.grad.mean()
        inputs = {"batch": x, "stem": self.stem.weight, "head": self.head.weight, "output": output}[self.by]
        (gradient,) = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
        return output.mean() + gradient.square().mean()


@pytest.mark.parametrize("by", ["batch", "stem", "backward", "head", "output"])
def test_gradients_through_several_stages_are_refused(by: str) -> None:
    model = Penalised()
    model.by = by
    stage = stage_of(model, 2)
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


class Twice(Net):
    """In validation, the first block and a head that may write to the batch are called twice."""

    validating = writes = False

    def __init__(self) -> None:
        super().__init__()
        self.head = Writer(self.width, 2)

    def step(self, x: Tensor) -> Tensor:
        if not self.validating:
            return super().step(x)
        first = self.head(self.blocks[0](self.stem(x)), x if self.writes else None)
        return (first + self.head(self.blocks[0](self.stem(x)))).square().mean()


def test_a_batch_that_a_later_stage_writes_to_is_read_before_that() -> None:
    model = Twice()
    stage = stage_of(model, 2)
    model.validating = True
    assert stage.flow_of(lambda: step(model)).last == (("blocks.0", 1), ("head", 1))
    model.writes = True
    with pytest.raises(FlowError, match="'head' on stage 1 changes a tensor in place"):
        stage.flow_of(lambda: step(model))


class Counts(nn.Linear):
    """Changes one of its buffers, and only reads the other."""

    def __init__(self) -> None:
        super().__init__(3, 6)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(x.abs().max())
        return super().forward(x) * self.scale


@pytest.mark.parametrize("name", ["scale", "count"])
def test_a_buffer_is_where_the_step_reads_it_unless_its_layer_changes_it(name: str) -> None:
    class Reads(Net):
        def __init__(self) -> None:
            super().__init__()
            self.stem = Counts()

        def step(self, x: Tensor) -> Tensor:
            return super().step(x) / getattr(self.stem, name)

    stage = stage_of(Reads(), 2, 1)
    assert stage.partition.holders_of(f"stem.{name}") == ((0, 1) if name == "scale" else (0,))
    changed = pytest.raises(RuntimeError, match="count")
    with changed if name == "count" else nullcontext():
        stage.flow_of(lambda: step(stage.module))


def test_a_step_is_traced_three_times() -> None:
    model, runs = Net(), []

    def counted() -> Tensor:
        runs.append(1)
        return step(model)

    Stage(model, partition(model, counted, 2, **BLOCKS), 0, CPU).flow_of(counted)
    assert len(runs) == 3  # twice for the cuts, once for what crosses them
