"""What a step does on some stages only, though all would have to, is refused by the dry run; the rest is not."""

from __future__ import annotations

import copy
import random
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from enum import Enum
from functools import partial
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
from tests.pipeline.nets import Net

X = torch.linspace(-1, 1, 15).view(5, 3)


def flow_of(model: Any, stages: int = 2, placement: tuple[int, ...] | None = None) -> Flow:
    def step() -> Any:
        return model.step(X)

    return flow_of_step(model, partition(model, step, stages, placement=placement), step)


class Draws(Net):
    """Draws from a generator of its own in some place: before or after the blocks, or inside one."""

    def __init__(self, *places: str) -> None:
        super().__init__()
        self.places = places
        self.generator = random.Random(1)

        def draw(*_: Any) -> None:
            self.generator.random()

        for i in range(4):
            if f"inside {i}" in places:
                self.blocks[i][0].register_forward_hook(draw)  # one of the block itself runs on all stages

    def step(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x * self.generator.random() if "before" in self.places else x
        x = self.body(x)
        x = x * self.generator.random() if "after" in self.places else x
        if "after a value" in self.places and x.sum().item() > -1e9:
            self.generator.random()
        return self.head(x).sum()


@pytest.mark.parametrize("place", ["before", "after", "after a value", "inside 0", "inside 3"])
def test_a_generator_of_its_own_is_not_drawn_from_in_stages(place: str) -> None:
    model = Draws(place)
    state = model.generator.getstate()
    with pytest.raises(FlowError, match="draws from a random generator of its own, on a module"):
        flow_of(model)
    flow_of(model, stages=1)
    flow_of(Draws())
    assert model.generator.getstate() == state


class AtTheCut(Net):
    """Counts right after a layer: in a hook on it, or in the code after its call."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.steps = 0
        if where == "hook":
            self.blocks[1].register_forward_hook(lambda *_: self.after())

    def after(self) -> None:
        self.steps += 1

    def step(self, x: Tensor) -> Tensor:
        x = self.stem(x) + self.steps
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 1 and self.where == "code":
                self.after()
        return self.head(x).sum()


def test_the_code_after_a_stages_last_call_is_the_next_stages() -> None:
    """The hooks on that call are its own, and the next stage's too."""
    assert flow_of(AtTheCut("hook")).last[0] == ("blocks.1", 0)
    with pytest.raises(FlowError, match="reads 'steps' on stage 0, but changes it after"):
        flow_of(AtTheCut("code"))


class Kind(Enum):
    IMAGE = 1
    LABEL = 2


class Object:
    def __init__(self) -> None:
        self.kinds = [Kind.IMAGE, {"label": (Kind.LABEL, Object)}]
        self.numbers = [0.0]


class Sparse(nn.Module):
    """Keeps numbers, and a list of them. Makes lists again with what was in them; numbers may be others in the next
    step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.object, self.counting = Object(), Object()
        self.zeros = 0.0
        self.history: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).relu()
        self.zeros = (y == 0).float().mean().item() + 0 * self.zeros
        self.history.append(self.zeros)
        self.object.kinds = copy.deepcopy(self.object.kinds)
        self.counting.numbers = [0.0 * self.zeros]
        return y


class Reads(Net):
    def __init__(self, block: int, attribute: str | None) -> None:
        super().__init__()
        self.blocks[block] = Sparse()
        self.sparse, self.attribute = block, attribute

    def step(self, x: Tensor) -> Tensor:
        loss = self.head(self.body(self.stem(x))).sum()
        kept = getattr(self.blocks[self.sparse], self.attribute) if self.attribute is not None else 0.0
        return loss + (kept[-1] if isinstance(kept, list) else kept if isinstance(kept, float) else 1.0)


@pytest.mark.parametrize("attribute", ["zeros", "history", "counting", "object"])
def test_a_number_that_a_layer_keeps_is_no_other_stages_to_read(attribute: str) -> None:
    with pytest.raises(FlowError, match=f"'blocks.0', on stage 0, keeps something in its attribute '{attribute}'"):
        flow_of(Reads(0, attribute))


def test_a_number_that_a_layer_keeps_is_no_other_chunks_to_read() -> None:
    with pytest.raises(FlowError, match=r"'blocks.0', on stage 1 \(chunk 0\), keeps .*, and stage 1 \(chunk 3\) reads"):
        flow_of(Reads(0, "zeros"), 4, (1, 0, 0, 1))


@pytest.mark.parametrize(("block", "attribute"), [(0, None), (3, "zeros"), (3, "history"), (3, "object")])
def test_it_is_its_own_stages(block: int, attribute: str | None) -> None:
    model = Reads(block, attribute)
    flow_of(model)
    assert model.blocks[block].zeros == 0.0 and model.blocks[block].history == []


class Sharing(nn.Module):
    """Has something that other layers have too."""

    def __init__(self, shared: Any, does: Callable[[Any, Tensor], Any]) -> None:
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


Does = Callable[[Any, Tensor], Any]
SHARING: dict[str, tuple[Any, Does, Does]] = {  # what is shared, what a layer does with it, and what a later one
    "number": (dict, lambda d, y: d.update(scale=0.9 * d.get("scale", 1.0)), lambda d, y: d.get("scale", 1.0)),
    "of a value": (dict, lambda d, y: d.update(mean=y.mean().item()), lambda d, y: d.get("mean", 1.0)),
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
    "object": (SimpleNamespace, deepen, lambda o, y: getattr(o, "depth", 0)),
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


def sharing(shared: Any, blocks: dict[int, Does]) -> Net:
    model = Net()
    for block, does in blocks.items():
        model.blocks[block] = Sharing(shared, does)
    return model


@pytest.mark.parametrize(("case", "blocks", "placement"), [
    *((case, (0, 3), None) for case in SHARING),
    ("kept", (3, 0), None),  # of the step before
    ("number", (0, 3), (0, 1, 1, 0)),
])  # fmt: skip
def test_what_layers_share_is_not_changed_by_one_for_another_stage_s(
    case: str, blocks: tuple[int, int], placement: tuple[int, ...] | None
) -> None:
    kind, first, later = SHARING[case]
    words = r"'blocks\.[03].*', on stage [01].*, changes what its attribute '\w+' holds, and stage [01].* uses"
    with pytest.raises(FlowError, match=words):
        flow_of(sharing(kind(), {blocks[0]: first, blocks[1]: later}), placement=placement)


@pytest.mark.parametrize("case", SHARING)
def test_what_layers_of_one_stage_share_is_theirs(case: str) -> None:
    kind, first, later = SHARING[case]
    flow_of(sharing(kind(), {2: first, 3: later}))


def fill(shared: Any, y: Tensor) -> Any:
    if shared.get("table") is None:
        shared["table"] = torch.linspace(0, 1, 6)
    return shared["table"]


def work(common: Any, y: Tensor) -> Any:
    common.kept = y.mean().item()
    return common.kept


@pytest.mark.parametrize(("kind", "does"), [
    (dict, fill),  # each stage makes its own
    (dict, lambda d, y: d.update(size=(y.shape[1], y.device))),  # equal, and made anew
    (lambda: torch.ones(()), lambda t, y: t.clone()),
    (lambda: SimpleNamespace(scale=0.5), lambda o, y: o.scale),
    (Common, work),  # written before it is read
    (Common, lambda common, y: common.kept),
])  # fmt: skip
def test_what_layers_share_and_do_not_change_for_others_is_theirs(kind: Any, does: Does) -> None:
    flow_of(sharing(kind(), dict.fromkeys(range(4), does)))


class ReadsCommon(Net):
    """The code around the layers reads what they have left."""

    def __init__(self) -> None:
        super().__init__()
        common = Common()
        for block in (0, 1):
            self.blocks[block] = Sharing(common, lambda common, y: setattr(common, "table", y.mean()))

    def step(self, x: Tensor) -> Tensor:
        return super().step(x) + self.blocks[0].shared.table


def test_a_tensor_that_a_part_of_layers_keeps_goes_to_the_step_that_reads_it() -> None:
    flow_of(ReadsCommon())


class Leaves(Net):
    """The end of the step leaves something on a layer, or on a part of several, for the next step's layers."""

    def __init__(self, block: int, does: Does, leaves: Callable[[Any, Tensor], Any], *, alone: bool) -> None:
        super().__init__()
        common = Common()
        self.blocks[block] = Sharing(common, does)
        if not alone:
            self.blocks[3] = Sharing(common, lambda common, y: None)
        self.leaves = partial(leaves, common)

    def step(self, x: Tensor) -> Tensor:
        result = super().step(x)
        self.leaves(result)
        return result


def keep_loss(common: Any, result: Tensor) -> None:
    common.kept = result.item()


@pytest.mark.parametrize(("name", "does", "leaves", "alone"), [
    ("kept", lambda c, y: c.kept, keep_loss, False),
    ("kept", lambda c, y: c.kept, keep_loss, True),
    ("kept", lambda c, y: c.kept, lambda c, result: setattr(c, "kept", 0.9 * c.kept), False),
    ("flag", flag, lambda c, result: delattr(c, "flag"), False),
])  # fmt: skip
def test_what_the_end_of_a_step_leaves_for_layers_is_on_the_last_stage(
    name: str, does: Does, leaves: Callable[[Any, Tensor], Any], alone: bool
) -> None:
    flow_of(Leaves(2, does, leaves, alone=alone))
    words = rf"reads 'blocks\.0\.shared\.{name}' on stage 0, but changes it after"
    with pytest.raises(FlowError, match=words):
        flow_of(Leaves(0, does, leaves, alone=alone))


class EveryOther(Net):
    """Every other step ends before its layers."""

    def __init__(self, model: Net) -> None:
        super().__init__()
        self.blocks, self.count = model.blocks, 0

    def step(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.count % 2 == 0:
            raise ValueError("not this one")
        return super().step(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("blocks", [(0, 3), (2, 3)])
def test_what_layers_share_and_no_second_run_of_the_step_shows_is_not_changed(blocks: tuple[int, int]) -> None:
    for shared, *does in (({}, *SHARING["number"][1:]), (Common(), *SHARING["kept"][1:])):
        refused = pytest.raises(FlowError, match=r"'blocks\.0.*' holds, and stage 1 uses")
        with refused if blocks == (0, 3) else nullcontext():
            flow_of(EveryOther(sharing(shared, dict(zip(blocks, does, strict=True)))))


class PutsBack(Net):
    """Puts back at the end of its step what layers have changed in a dictionary, having used the loss in it."""

    def __init__(self, blocks: dict[int, Does]) -> None:
        super().__init__()
        self.shared = {"scale": 1.0, "loss": 0.0}
        for block, does in blocks.items():
            self.blocks[block] = Sharing(self.shared, does)

    def step(self, x: Tensor) -> Tensor:
        result = super().step(x) + self.shared["loss"]
        self.shared.update(scale=1.0, loss=0.0)
        return result


def add_loss(shared: Any, y: Tensor) -> None:
    shared["loss"] = shared["loss"] + y.square().mean()


@pytest.mark.parametrize(("first", "later"), [
    (lambda d, y: d.update(scale=2.0), lambda d, y: d["scale"]),
    (lambda d, y: d.update(scale=d["scale"] + 1), lambda d, y: d.update(scale=d["scale"] + 1)),
])  # fmt: skip
def test_what_layers_share_and_the_step_puts_back_at_its_end_is_not_changed_for_another_stage_s(
    first: Does, later: Does
) -> None:
    flow_of(PutsBack({2: first, 3: later}))
    for placement in (None, (0, 1, 1, 0)):
        with pytest.raises(FlowError, match=r"'blocks\.0', on stage [01].*, changes what its attribute 'shared' holds"):
            flow_of(PutsBack({0: first, 3: later}), placement=placement)


def test_a_loss_that_layers_add_to_is_followed_to_the_end_of_the_step() -> None:
    flow_of(PutsBack({0: add_loss, 3: add_loss}))


class Potential(nn.Module):
    """A neuron's state, which the step resets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.state = nn.Linear(6, 6), 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.state = 0.5 * self.state + self.layer(x)
        return self.state.sigmoid()  # type: ignore[attr-defined, no-any-return]


class Neurons(Net):
    def __init__(self, where: str, first: int) -> None:
        super().__init__()
        self.where, self.first = where, first
        for block in range(first, 4):
            self.blocks[block] = Potential()

    def step(self, x: Tensor) -> Tensor:
        for where in ("before", "at its end"):
            if where == "at its end":
                loss = sum(super(Neurons, self).step(x) for _ in range(2))
            for block in self.blocks[self.first :] if where == self.where else ():
                block.state = 0.0
        return loss


def test_a_state_of_layers_that_a_step_resets_at_its_end_is_reset_on_the_last_stage_only() -> None:
    flow_of(Neurons("before", 0))
    flow_of(Neurons("at its end", 2))
    with pytest.raises(
        FlowError, match=r"reads 'blocks\.0\.state' on stage 0, but changes it after that stage has left"
    ):
        flow_of(Neurons("at its end", 0))


class Penalised(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.penalty = self.weight.square().mean()
        return super().forward(x)


class UsesPenalty(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = Penalised(6, 6)

    def step(self, x: Tensor) -> Tensor:
        return super().step(x) + self.blocks[0].penalty  # type: ignore[no-any-return]


def test_what_a_layer_computes_from_its_parameters_is_not_for_another_chunk_of_its_stage() -> None:
    assert "blocks.0" in flow_of(UsesPenalty()).transparent
    assert "blocks.0" in flow_of(UsesPenalty(), placement=(1, 0, 1, 0)).transparent
    with pytest.raises(FlowError, match=r"'blocks\.0', on stage 0 \(chunk 0\), keeps a value that it computes"):
        flow_of(UsesPenalty(), placement=(0, 1, 1, 0))


class SharesAnew(Net):
    """The step makes what its layers share."""

    def __init__(self, first: int, later: int) -> None:
        super().__init__()
        self.sharing = [Sharing(None, does) for does in SHARING["number"][1:]]
        self.blocks[first], self.blocks[later] = self.sharing

    def step(self, x: Tensor) -> Tensor:
        shared: dict[str, Any] = {}
        for layer in self.sharing:
            layer.shared = shared
        return self.head(self.body(self.stem(x))).sum()


def test_what_the_step_makes_for_layers_to_share_is_not_changed_for_another_stage_s() -> None:
    flow_of(SharesAnew(2, 3))
    with pytest.raises(FlowError, match=r"'blocks\.0', on stage 0, changes what its attribute 'shared' holds"):
        flow_of(SharesAnew(0, 3))


def test_a_large_thing_that_layers_share_is_looked_at_quickly() -> None:
    kept = SimpleNamespace(data=[*range(1_000_000)], depth=0)
    begin = time.perf_counter()
    with pytest.raises(FlowError, match="changes what its attribute 'shared' holds"):
        flow_of(sharing(kept, dict.fromkeys(range(4), deepen)))
    assert time.perf_counter() - begin < 10


class SharesBuffer(Net):
    """Two layers have one buffer."""

    def __init__(self, first: int, later: int, *does: Does) -> None:
        super().__init__()
        self.blocks[first] = Sharing(nn.Buffer(torch.ones(())), does[0])
        self.blocks[later] = Sharing(self.blocks[first].shared, does[1])


def test_a_buffer_that_layers_of_several_stages_have_is_changed_by_none() -> None:
    def read(buffer: Tensor, y: Tensor) -> Tensor:
        return buffer.clone()

    flow_of(SharesBuffer(0, 3, read, read))
    flow_of(SharesBuffer(2, 3, put, read))
    for does in ((put, read), (read, put), (put, put)):
        with pytest.raises(FlowError, match=r"'blocks\.0\.shared', which 'blocks\.0' on stage 0, 'blocks\.3' on"):
            flow_of(SharesBuffer(0, 3, *does))


class ReadsShared(Net):
    def __init__(self, block: int) -> None:
        super().__init__()
        self.shared = SimpleNamespace()
        self.blocks[block] = Sharing(self.shared, deepen)

    def step(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x))).sum() * self.shared.depth


def test_what_a_layer_changes_for_the_end_of_the_step_is_on_the_last_stage() -> None:
    flow_of(ReadsShared(3))
    with pytest.raises(FlowError, match=r"'blocks\.0', on stage 0, changes what its attribute 'shared' holds"):
        flow_of(ReadsShared(0))


# -- what a step keeps for the next one ------------------------------------------------------------------------------


def nothing(model: Any, x: Tensor) -> Tensor:
    return x


def use(model: Any, x: Tensor) -> Tensor:
    return x * (1 + model.kept)


def count(model: Any, x: Tensor) -> Tensor:
    model.kept += 1
    return x


def use_and_count(model: Any, x: Tensor) -> Tensor:
    return count(model, use(model, x))


class Keeps(Net):
    """Does something with what it keeps, before its blocks and at the end."""

    def __init__(self, kept: Any, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        super().__init__()
        self.kept = copy.deepcopy(kept)
        self.before, self.after = before, after

    def step(self, x: Tensor) -> Tensor:
        return self.after(self, self.head(self.body(self.before(self, self.stem(x))))).sum()


def changed(change: Callable[[Any], Any]) -> Callable[[Any, Tensor], Tensor]:
    """A change of what is kept, after the loss was looked at."""

    def change_if_finite(model: Any, out: Tensor) -> Tensor:
        if torch.isnan(out.sum()):
            raise ValueError("not a number")
        model.kept = change(model.kept)
        return out

    return change_if_finite


def sets(find: Callable[[Tensor], Any]) -> Callable[[Any, Tensor], Tensor]:
    def set_kept(model: Any, x: Tensor) -> Tensor:
        model.kept = find(x)
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


BUFFER = nn.Buffer(torch.zeros(()))


@pytest.mark.parametrize("kept", [0, BUFFER], ids=["number", "buffer"])
@pytest.mark.parametrize(("before", "after"), [(use_and_count, nothing), (count, use), (nothing, use_and_count)])
def test_what_is_counted_is_told(before: Any, after: Any, kept: Any) -> None:
    assert flow_of(Keeps(kept, before, after)).carried == {"kept"}


@pytest.mark.parametrize(("kept", "before", "after"), [
    (0, use, count),
    (BUFFER, use, count),
    # Other kinds are those that layers share.
    (False, use, changed(lambda kept: not kept)),
    ([0], lambda model, x: x * len(model.kept), changed(lambda kept: [*kept, 1][-3:])),
    (torch.ones(()), use, changed(lambda kept: kept + 1)),
    (np.zeros(1), lambda model, x: x * float(model.kept[0]), changed(lambda kept: kept.__iadd__(1))),
    (np.int64(1), use, changed(lambda kept: kept + 1)),
    (2.0, use, sets(lambda out: 1.0)),
    (2.0, use, sets(lambda out: out.mean().item())),
    *((2.0, use, end) for end in (count_or_exit, count_after_a_loop, count_sometimes)),
])  # fmt: skip
def test_what_changes_after_a_stage_has_left_the_step_may_not_be_read_there(kept: Any, before: Any, after: Any) -> None:
    with pytest.raises(FlowError, match="reads 'kept' on stage 0, but changes it after that stage has left"):
        flow_of(Keeps(kept, before, after))
    flow_of(Keeps(kept, before, after), stages=1)


def change_object(model: Any, x: Tensor) -> Tensor:
    model.kept.scale = model.kept.scale + 1
    return x * model.kept.scale


@pytest.mark.parametrize(("kept", "before", "after"), [
    ([], lambda model, x: model.kept.append(1.0) or x, nothing),  # only collected
    (0, sets(len), use),
    (MeanMetric(), lambda model, x: model.kept.update(X.mean()) or x, nothing),
    (SimpleNamespace(scale=1.0), change_object, lambda model, out: out * model.kept.scale),
    (float("nan"), use, sets(lambda out: float("nan"))),  # to the same value
], ids=["collected", "anew", "metric", "read at the end", "the same"])  # fmt: skip
def test_what_no_stage_lacks_may_be_kept(kept: Any, before: Any, after: Any) -> None:
    model = Keeps(kept, before, after)
    assert flow_of(model).carried == frozenset() and (kept != [] or model.kept == [])


# -- several chunks a stage: the code around the layers runs once in each of them --------------------------------------

PLACEMENTS = [(0, 1, 0, 1), (1, 0, 0, 1)]


class Counts(nn.Module):
    """Counts its calls, and knows from the first one on how wide its input is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.width = nn.Linear(6, 6), 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.width = self.width or x.shape[-1]
        return self.layer(x) * self.calls


class Counting(Counts):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class CalledTwice(Net):
    """Its second block is its last one, too."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.blocks[1] = self.blocks[3] = block


@pytest.mark.parametrize("placement", [(0, 1), *PLACEMENTS])
def test_a_layer_that_counts_its_calls_makes_them_in_one_chunk(placement: tuple[int, ...]) -> None:
    flow_of(CalledTwice(Counts()), placement=placement)
    with pytest.raises(FlowError, match=r"'blocks.1' is called on .* changes its 'blocks.1.calls'.*`balance`"):
        flow_of(CalledTwice(Counting()), placement=placement)
    flow_of(CalledTwice(Counting()), stages=1)


class Averages(nn.Module):
    """Follows the mean of its input, in place or by another tensor."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place, self.layer = in_place, nn.Linear(6, 6)
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        if self.in_place:
            self.average.lerp_(mean, 0.1)
        else:
            self.average = 0.9 * self.average + 0.1 * mean
        return self.layer(x)


class ReadsAverage(Net):
    def __init__(self, block: int, in_place: bool) -> None:
        super().__init__()
        self.blocks[block] = Averages(in_place)
        self.averaging = block

    def step(self, x: Tensor) -> Tensor:
        return super().step(x) + self.blocks[self.averaging].average.sum()


@pytest.mark.parametrize("in_place", [True, False])
def test_a_buffer_that_its_layer_changes_is_read_in_its_chunk_only(in_place: bool) -> None:
    flow_of(ReadsAverage(3, in_place), placement=(1, 0, 0, 1))
    with pytest.raises(FlowError, match=r"\(chunk 3\) reads 'blocks.0.average', which 'blocks.0' on .* changes"):
        flow_of(ReadsAverage(0, in_place), placement=(1, 0, 0, 1))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_is_counted_is_counted_once_a_stage(placement: tuple[int, ...]) -> None:
    flow_of(Keeps(0, nothing, use_and_count), placement=placement)
    with pytest.raises(FlowError, match=r"changes 'kept', and would change it several times on stage \d.*'1f1b'"):
        flow_of(Keeps(0, use_and_count, nothing), placement=placement)


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
    for placement in PLACEMENTS:
        assert flow_of(Teacher(by_output=False), placement=placement).updated == {"teacher.bias"}
    flow_of(Teacher(by_output=True), placement=(1, 0, 0, 1))  # in the last chunk alone: the first one has left
    with pytest.raises(FlowError, match="changes 'teacher.bias', on stage 1, by what layers return. A stage with"):
        flow_of(Teacher(by_output=True), placement=(0, 1, 0, 1))
    with torch.no_grad(), pytest.raises(FlowError, match=r"'teacher.bias', on stage \d, in evaluation. A stage with"):
        flow_of(Teacher(by_output=False), placement=(0, 1, 0, 1))


class FollowsLate(Net):
    """Changes its first layer after its last one."""

    def step(self, x: Tensor) -> Tensor:
        loss: Tensor = super().step(x)
        with torch.no_grad():
            self.stem.bias.mul_(0.9)
        return loss


def test_a_parameter_of_a_stage_that_has_left_the_step_is_not_changed() -> None:
    with pytest.raises(FlowError, match="changes 'stem.bias', which is on stage 0"):
        flow_of(FollowsLate())
