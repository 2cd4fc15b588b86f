"""What a step does on some stages only, though all would have to, is refused by the dry run; the rest is not."""

from __future__ import annotations

import copy
import random
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_parallel.cuts.flow import Flow, FlowError
from lightning_parallel.cuts.flow_of_step import flow_of_step
from lightning_parallel.cuts.search import partition
from tests.pipeline.nets import Around, Calls, Code, Net, nothing

X = torch.linspace(-1, 1, 15).view(5, 3)
Placement = tuple[int, ...] | None


def flow_of(model: Any, stages: int = 2, placement: Placement = None) -> Flow:
    def step() -> Any:
        return model.step(X)

    return flow_of_step(model, partition(model, step, stages, placement=placement), step)


def draw(model: Any, x: Tensor) -> Tensor:
    return x * model.kept.random()


def draw_after_a_value(model: Any, x: Tensor) -> Tensor:
    return draw(model, x) if x.sum().item() > -1e9 else x


@pytest.mark.parametrize("code", [draw, draw_after_a_value])
def test_a_generator_of_its_own_is_not_drawn_from_in_stages(code: Code) -> None:
    model = Around(random.Random(1), after=code)
    state = model.kept.getstate()
    with pytest.raises(FlowError, match="draws from a random generator of its own, on a module"):
        flow_of(model)
    flow_of(model, stages=1)
    assert model.kept.getstate() == state


# -- what a layer keeps, or shares with others, is for its own stage ---------------------------------------------------


class Kind(Enum):
    IMAGE = 1
    LABEL = 2


class Object:
    def __init__(self) -> None:
        self.kinds = [Kind.IMAGE, {"label": (Kind.LABEL, Object)}]
        self.numbers = [0.0]


def keeps(m: Any, x: Tensor) -> Tensor:
    """Keeps numbers, and a list of them. Makes lists again with what was in them; numbers may be others in the next
    step."""
    y: Tensor = m.layer(x).relu()
    m.zeros = (y == 0).float().mean().item() + 0 * m.zeros
    m.history.append(m.zeros)
    m.object.kinds = copy.deepcopy(m.object.kinds)
    m.counting.numbers = [0.0 * m.zeros]
    return y


def sparse() -> nn.Module:
    return Calls(keeps, layer=nn.Linear(6, 6), object=Object(), counting=Object(), zeros=0.0, history=[])


class Sharing(nn.Module):
    """Has something that other layers have too, which its code is given."""

    def __init__(self, shared: Any, does: Code) -> None:
        super().__init__()
        self.layer, self.shared, self.does = nn.Linear(6, 6), shared, does

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).relu()
        found = self.does(self.shared, y)
        return y if found is None else y * found


class Common(nn.Module):
    """A part of several layers, which one of them or all of them write to."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.table, self.found = 1.0, None, {"scale": 1.0}
        self.buffer = nn.Buffer(torch.ones(()))


def deepen(shared: Any, y: Tensor) -> None:
    shared.depth = getattr(shared, "depth", 0) + 1


def put(tensor: Tensor, y: Tensor) -> None:
    tensor.copy_(y.detach().mean())


def get(tensor: Tensor, y: Tensor) -> Tensor:
    return tensor.clone()


def add(shared: Any, y: Tensor) -> None:
    shared["of"] += 1


def flag(common: Any, y: Tensor) -> Any:
    was = hasattr(common, "flag")
    common.flag = 1.0
    return 2.0 if was else None


def drop(common: Any, y: Tensor) -> None:
    with suppress(AttributeError):
        del common.flag


def take(common: Any, y: Tensor) -> Any:
    """Take down what another layer has set."""
    was, common.kept = common.kept, 1.0
    return was


SHARING: dict[str, tuple[Any, Code, Code]] = {  # what is shared, what a layer does with it, and what a later one
    "number": (dict, lambda d, y: d.update(scale=0.9 * d.get("scale", 1.0)), lambda d, y: d.get("scale", 1.0)),
    "tensor": (dict, lambda d, y: d.update(mean=y.mean()), lambda d, y: d.get("mean", 1.0)),
    "inside another": (
        lambda: {"of": [SimpleNamespace()]},
        lambda shared, y: deepen(shared["of"][0], y),
        lambda shared, y: float(len(vars(shared["of"][0]))),
    ),
    "number of each": (
        dict,
        lambda d, y: d.update(a=y.mean().item() + d.get("a", 0.0)),
        lambda d, y: d.update(b=0.5 * d.get("a", 1.0)),
    ),
    "list": (list, lambda kept, y: kept.append(1.5), lambda kept, y: float(len(kept))),
    "counted by both": (SimpleNamespace, deepen, deepen),
    "tensor in place": (lambda: torch.ones(()), put, lambda tensor, y: tensor),
    "array": (lambda: {"of": np.ones(1)}, add, lambda d, y: float(d["of"][0])),
    "kept": (Common, lambda c, y: setattr(c, "kept", y.mean().item()), lambda c, y: c.kept),
    "table": (Common, lambda c, y: setattr(c, "table", y.mean()), lambda c, y: 1.0 if c.table is None else c.table),
    "buffer": (Common, lambda c, y: setattr(c, "buffer", y.mean()), lambda c, y: c.buffer),
    "found": (Common, lambda c, y: c.found.update(scale=y.mean().item()), lambda c, y: c.found["scale"]),
    # At the end as before the step.
    "flag": (Common, flag, drop),
    "taken": (Common, lambda c, y: setattr(c, "kept", 2.0), take),
}  # fmt: skip


def sharing(shared: Any, does: Mapping[int, Code], before: Code = nothing, after: Code = nothing) -> Around:
    return Around(None, before, after, {block: Sharing(shared, each) for block, each in does.items()})


def reads(attribute: str) -> Callable[[int], Around]:
    """The end of the step reads what a block keeps."""

    def make(block: int) -> Around:
        def read(model: Any, x: Tensor) -> Tensor:
            kept = getattr(model.blocks[block], attribute)
            return x + (kept[-1] if isinstance(kept, list) else kept if isinstance(kept, float) else 1.0)

        return Around(after=read, blocks={block: sparse()})

    return make


def shares(case: str, before: Code = nothing, *, last_first: bool = False) -> Callable[[int], Around]:
    """A block, and the last one, have something of a case of SHARING. ``last_first``: the last one has changed it in
    the step before."""
    kind, *does = SHARING[case]
    return lambda block: sharing(kind(), dict(zip((3, block) if last_first else (block, 3), does, strict=True)), before)


def every_other(model: Any, x: Tensor) -> Tensor:
    """Only every other step has layers."""
    model.count = getattr(model, "count", 0) + 1
    if model.count % 2 == 0:
        raise ValueError("not this one")
    return x


def makes_what_is_shared(model: Any, x: Tensor) -> Tensor:
    shared: dict[str, Any] = {}
    for block in model.blocks:
        if isinstance(block, Sharing):
            block.shared = shared
    return x


def puts_back(first: Code, later: Code) -> Callable[[int], Around]:
    """Puts back at the end of its step what layers have changed in a dictionary, having used the loss in it."""

    def make(block: int) -> Around:
        shared = {"scale": 1.0, "loss": 0.0}

        def put_back(model: Any, x: Tensor) -> Tensor:
            result = x + shared["loss"]
            model.shared.update(scale=1.0, loss=0.0)
            return result

        model = sharing(shared, {block: first, 3: later}, after=put_back)
        model.shared = shared
        return model

    return make


def reads_shared(block: int) -> Around:
    """The end of the step reads what a layer has changed."""
    model = sharing(SimpleNamespace(), {block: deepen}, after=lambda m, x: x * m.shared.depth)
    model.shared = model.blocks[block].shared
    return model


def add_loss(shared: Any, y: Tensor) -> None:
    shared["loss"] = shared["loss"] + y.square().mean()


def grow(shared: Any, y: Tensor) -> None:
    shared.update(scale=shared["scale"] + 1)


def leaves(does: Code, change: Code, *, alone: bool) -> Callable[[int], Around]:
    """The end of the step leaves something on a layer, or on a part of several, for the next step's layers."""

    def make(block: int) -> Around:
        common = Common()

        def leave(model: Any, x: Tensor) -> Tensor:
            change(common, x)
            return x

        return sharing(common, {block: does} if alone else {block: does, 3: lambda common, y: None}, after=leave)

    return make


def keep_loss(common: Any, out: Tensor) -> None:
    common.kept = out.sum().item()


def integrate(neuron: Any, y: Tensor) -> Any:
    neuron.kept = 0.5 * neuron.kept + y
    return neuron.kept.sigmoid()


def neurons(first: int) -> Around:
    """Those from a block on, of which each step runs two time steps, are reset at its end."""

    def first_time_step(model: Any, x: Tensor) -> Tensor:
        model.body(x)
        return x

    def reset(model: Any, x: Tensor) -> Tensor:
        for block in model.blocks[first:]:
            block.shared.kept = 1.0
        return x

    return Around(None, first_time_step, reset, {block: Sharing(Common(), integrate) for block in range(first, 4)})


def shares_buffer(*does: Code) -> Callable[[int], Around]:
    def make(block: int) -> Around:
        buffer = nn.Buffer(torch.ones(()))
        return Around(blocks={b: Sharing(buffer, each) for b, each in zip((block, 3), does, strict=True)})

    return make


def average(common: Any, y: Tensor) -> None:
    common.buffer.lerp_(y.detach().mean(), 0.1)


def average_anew(common: Any, y: Tensor) -> None:
    common.buffer = 0.9 * common.buffer + 0.1 * y.detach().mean()


def reads_average(does: Code) -> Callable[[int], Around]:
    return lambda b: sharing(Common(), {b: does}, after=lambda m, x: x + m.blocks[b].shared.buffer)


V, V_BACK, LOOP = (1, 0, 0, 1), (0, 1, 1, 0), (0, 1, 0, 1)
KEEPS = r"'blocks.0', on stage \d.*, keeps something in its attribute '{}'"
SHARED = r"'blocks\.[03].*', on stage [01].*, changes what its attribute '\w+' holds, and stage [01].* uses"
STALE = r"reads 'blocks\.0\.{}' on stage 0, but changes it after"
OF_BUFFER = r"'blocks\.0\.shared', which 'blocks\.0' on stage 0, 'blocks\.3' on"


@pytest.mark.parametrize(("make", "placement", "words"), [
    *((reads(name), None, KEEPS.format(name)) for name in ("zeros", "history", "counting", "object")),
    (reads("zeros"), V, r"'blocks.0', on stage 1 \(chunk 0\), keeps .*, and stage 1 \(chunk 3\) reads"),
    *((shares(case), None, SHARED) for case in SHARING),
    (shares("number"), V_BACK, SHARED),
    (shares("kept", last_first=True), None, SHARED),
    *((shares(case, every_other), None, SHARED) for case in ("number", "kept")),  # which no second run shows
    (shares("number", makes_what_is_shared), None, SHARED),
    *((puts_back(lambda d, y: d.update(scale=2.0), lambda d, y: d["scale"]), each, SHARED) for each in (None, V_BACK)),
    (puts_back(grow, grow), V_BACK, SHARED),
    (reads_shared, None, SHARED),
    *((shares_buffer(*does), None, OF_BUFFER) for does in ((put, get), (get, put), (put, put))),
    (leaves(lambda c, y: c.kept, keep_loss, alone=False), None, STALE.format("shared.kept")),
    (leaves(lambda c, y: c.kept, keep_loss, alone=True), None, STALE.format("shared.kept")),
    (leaves(lambda c, y: c.kept, lambda c, x: setattr(c, "kept", 0.9 * c.kept), alone=False), None,
     STALE.format("shared.kept")),
    (leaves(flag, lambda c, x: delattr(c, "flag"), alone=False), None, STALE.format("shared.flag")),
    (neurons, None, STALE.format("shared.kept")),
    *((reads_average(does), V, r"\(chunk 3\) reads 'blocks.0.shared.buffer', which 'blocks.0' on .* changes")
      for does in (average, average_anew)),
])  # fmt: skip
def test_what_a_layer_keeps_or_shares_is_for_its_own_stage(
    make: Callable[[int], Around], placement: Placement, words: str
) -> None:
    flow_of(make(2) if placement is None else make(3), placement=placement)
    model = make(0)
    with pytest.raises(FlowError, match=words):
        flow_of(model, placement=placement)
    for block in model.blocks:
        assert getattr(block, "history", []) == [] and getattr(block, "zeros", 0.0) == 0.0


def fill(shared: Any, y: Tensor) -> Any:
    if shared.get("table") is None:
        shared["table"] = torch.linspace(0, 1, 6)
    return shared["table"]


def work(common: Any, y: Tensor) -> Any:
    common.kept = y.mean().item()
    return common.kept


@pytest.mark.parametrize("model", [
    Around(blocks={0: sparse()}),
    *(sharing(shared, dict.fromkeys(range(4), does)) for shared, does in (
        ({}, fill),  # each stage makes its own
        ({}, lambda d, y: d.update(size=(y.shape[1], y.device))),  # equal, and made anew
        (torch.ones(()), get),
        (SimpleNamespace(scale=0.5), lambda o, y: o.scale),
        (Common(), work),  # written before it is read
        (Common(), lambda common, y: common.kept),
    )),
    # A tensor that a part of layers keeps goes to the step that reads it, and a loss that layers add to, too.
    sharing(Common(), dict.fromkeys((0, 1), lambda common, y: setattr(common, "table", y.mean())),
            after=lambda model, x: x + model.blocks[0].shared.table),
    puts_back(add_loss, add_loss)(0),
    shares_buffer(get, get)(0),
])  # fmt: skip
def test_what_layers_do_not_change_for_others_is_theirs(model: Around) -> None:
    flow_of(model)


class Penalised(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.penalty = self.weight.square().mean()
        return super().forward(x)


def test_what_a_layer_computes_from_its_parameters_is_not_for_another_chunk_of_its_stage() -> None:
    model = Around(None, nothing, lambda model, x: x + model.blocks[0].penalty, {0: Penalised(6, 6)})
    assert "blocks.0" in flow_of(model).transparent
    assert "blocks.0" in flow_of(model, placement=(1, 0, 1, 0)).transparent
    with pytest.raises(FlowError, match=r"'blocks\.0', on stage 0 \(chunk 0\), keeps a value that it computes"):
        flow_of(model, placement=V_BACK)


def test_a_large_thing_that_layers_share_is_looked_at_quickly() -> None:
    kept = SimpleNamespace(data=[*range(300_000)], depth=0)
    begin = time.process_time()
    with pytest.raises(FlowError, match="changes what its attribute 'shared' holds"):
        flow_of(sharing(kept, dict.fromkeys(range(4), deepen)))
    assert time.process_time() - begin < 3  # 1 at most on an idle machine


# -- what a step keeps for the next one ------------------------------------------------------------------------------


def use(model: Any, x: Tensor) -> Tensor:
    return x * (1 + model.kept)


def count(model: Any, x: Tensor) -> Tensor:
    model.kept += 1
    return x


def use_and_count(model: Any, x: Tensor) -> Tensor:
    return count(model, use(model, x))


def sets(find: Callable[[Any, Tensor], Any]) -> Code:
    """Sets what is kept, by the model and what is computed so far."""

    def set_kept(model: Any, x: Tensor) -> Tensor:
        model.kept = find(model, x)
        return x

    return set_kept


def count_or_exit(model: Any, out: Tensor) -> Tensor:
    if not out.isfinite().all():
        sys.exit("not finite")
    return count(model, out)


def count_after_a_loop(model: Any, out: Tensor) -> Tensor:
    while not out.abs().max() < 0.5:
        out = out * 0.9
    while out.abs().max().item() > 1e-3:
        out = out * 0.9
    return count(model, out)


def count_sometimes(model: Any, out: Tensor) -> Tensor:
    return count(model, out) if out.mean() < 1 else out


def change_object(model: Any, x: Tensor) -> Tensor:
    model.kept.scale = model.kept.scale + 1
    return x * model.kept.scale


BUFFER = nn.Buffer(torch.zeros(()))


@pytest.mark.parametrize(("kept", "before", "after"), [
    (0, use, count),
    (BUFFER, use, count),
    # Other kinds are those that layers share.
    (False, use, sets(lambda model, out: not model.kept)),
    ([0], lambda model, x: x * len(model.kept), sets(lambda model, out: [*model.kept, 1][-3:])),
    (torch.ones(()), use, sets(lambda model, out: model.kept + 1)),
    (np.zeros(1), lambda model, x: x * float(model.kept[0]), count),
    (np.int64(1), use, count),
    (2.0, use, sets(lambda model, out: 1.0)),
    (2.0, use, sets(lambda model, out: out.mean().item())),
    *((2.0, use, end) for end in (count_or_exit, count_after_a_loop, count_sometimes)),
])  # fmt: skip
def test_what_changes_after_a_stage_has_left_the_step_may_not_be_read_there(
    kept: Any, before: Code, after: Code
) -> None:
    with pytest.raises(FlowError, match="reads 'kept' on stage 0, but changes it after that stage has left"):
        flow_of(Around(kept, before, after))


def test_the_code_after_a_stages_last_call_is_the_next_stages() -> None:
    """The hooks on that call are its own, and the next stage's too."""
    model = Around(0, use)

    def hook(*_: Any) -> None:
        model.kept += 1

    model.blocks[1].register_forward_hook(hook)
    assert flow_of(model).last[0] == ("blocks.1", 0)
    with pytest.raises(FlowError, match="reads 'kept' on stage 0, but changes it after"):
        flow_of(Around(0, use, between=count))


@pytest.mark.parametrize(("kept", "before", "after", "is_told"), [
    *((kept, *does, True) for kept in (0, BUFFER)
      for does in ((use_and_count, nothing), (count, use), (nothing, use_and_count))),
    ([], lambda model, x: model.kept.append(1.0) or x, nothing, False),  # only collected
    (0, sets(lambda model, x: len(x)), use, False),  # made anew
    (MeanMetric(), lambda model, x: model.kept.update(X.mean()) or x, nothing, False),
    (SimpleNamespace(scale=1.0), change_object, lambda model, out: out * model.kept.scale, False),
    (float("nan"), use, sets(lambda model, out: float("nan")), False),  # to the same value
])  # fmt: skip
def test_what_no_stage_lacks_may_be_kept_and_what_is_counted_is_told(
    kept: Any, before: Code, after: Code, is_told: bool
) -> None:
    model = Around(kept, before, after)
    assert flow_of(model).carried == ({"kept"} if is_told else set()) and (kept != [] or model.kept == [])


# -- several chunks a stage: the code around the layers runs once in each of them --------------------------------------


def counts(m: Any, x: Tensor) -> Tensor:
    """Counts its calls, or doesn't, and knows from the first one on how wide its input is."""
    m.width = m.width or x.shape[-1]
    if m.counting:
        m.calls += 1
    return m.layer(x) * m.calls  # type: ignore[no-any-return]


@pytest.mark.parametrize("placement", [(0, 1), LOOP, V])
def test_a_layer_that_counts_its_calls_makes_them_in_one_chunk(placement: tuple[int, ...]) -> None:
    def called_twice(*, counting: bool) -> Around:
        layer = Calls(counts, layer=nn.Linear(6, 6), calls=0, width=0, counting=counting)
        return Around(blocks=dict.fromkeys((1, 3), layer))

    flow_of(called_twice(counting=False), placement=placement)
    with pytest.raises(FlowError, match=r"'blocks.1' is called on .* changes its 'blocks.1.calls'.*`balance`"):
        flow_of(called_twice(counting=True), placement=placement)


@pytest.mark.parametrize("placement", [LOOP, V])
def test_what_is_counted_is_counted_once_a_stage(placement: tuple[int, ...]) -> None:
    flow_of(Around(0, nothing, use_and_count), placement=placement)
    with pytest.raises(FlowError, match=r"changes 'kept', and would change it several times on stage \d.*'1f1b'"):
        flow_of(Around(0, use_and_count, nothing), placement=placement)


class Teacher(Net):
    """A copy of the first block follows it, or follows what it returns."""

    def __init__(self, by_output: bool) -> None:
        super().__init__()
        self.by_output = by_output
        self.teacher = nn.Linear(6, 6).requires_grad_(False)

    def step(self, x: Tensor) -> Tensor:
        x = first = self.blocks[0](self.stem(x))
        with torch.no_grad():
            if self.by_output:
                self.teacher.bias.add_(first.mean(0))
            else:
                self.teacher.bias.lerp_(self.blocks[0][0].bias, 0.5)
        for block in self.blocks[1:]:
            x = block(x)
        return (self.head(x).square().mean() + self.teacher(x).square().mean()).mean()


def test_a_parameter_may_follow_parameters_in_each_chunk_but_not_what_layers_return() -> None:
    for placement in (LOOP, V):
        assert flow_of(Teacher(by_output=False), placement=placement).updated == {"teacher.bias"}
    flow_of(Teacher(by_output=True), placement=V)  # in the last chunk alone: the first one has left
    with pytest.raises(FlowError, match="changes 'teacher.bias', on stage 1, by what layers return. A stage with"):
        flow_of(Teacher(by_output=True), placement=LOOP)
    with torch.no_grad(), pytest.raises(FlowError, match=r"'teacher.bias', on stage \d, in evaluation. A stage with"):
        flow_of(Teacher(by_output=False), placement=LOOP)


def test_a_parameter_of_a_stage_that_has_left_the_step_is_not_changed() -> None:
    def change_stem(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            model.stem.bias.mul_(0.9)
        return x

    with pytest.raises(FlowError, match="changes 'stem.bias', which is on stage 0"):
        flow_of(Around(None, nothing, change_stem))
