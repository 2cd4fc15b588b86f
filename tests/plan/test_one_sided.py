"""What a step does on some stages only, though all would have to, is refused in the look; the rest is not."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_parallel.plan.flow import Flow, FlowError
from lightning_parallel.plan.flow_of_step import flow_of_step
from lightning_parallel.plan.search import partition
from tests.pipeline.nets import Net

X = torch.linspace(-1, 1, 15).view(5, 3)


def flow_of(model: Any, stages: int = 2, placement: tuple[int, ...] | None = None) -> Flow:
    def step() -> Any:
        return model.step(X)

    return flow_of_step(model, partition(model, step, stages, placement=placement), step)


class Draws(Net):
    """Draws from a generator of its own in some places: before, between and after the blocks, and inside one."""

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
        for place in ("before", "again"):
            x = x * self.generator.random() if place in self.places else x
        x = self.body(x)
        x = x * self.generator.random() if "after" in self.places else x
        return self.head(x).sum()


@pytest.mark.parametrize("places", [(), ("before",), ("before", "again"), ("after",), ("inside 0", "inside 1")])
def test_a_generator_may_be_drawn_from_where_all_stages_are_or_on_one(places: tuple[str, ...]) -> None:
    model = Draws(*places)
    state = model.generator.getstate()
    flow_of(model)
    assert model.generator.getstate() == state


@pytest.mark.parametrize("places", [("before", "after"), ("inside 0", "inside 3"), ("before", "inside 0")])
def test_a_generator_drawn_from_in_places_of_different_stages_is_refused(places: tuple[str, ...]) -> None:
    with pytest.raises(FlowError, match="draws from a random generator of its own in 2 places, of which stage"):
        flow_of(Draws(*places))
    flow_of(Draws(*places), stages=1)


class AtTheCut(Net):
    """Counts and draws right after a layer: in a hook on it, or in the code after its call."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.generator, self.steps = random.Random(1), 0
        if where == "hook":
            self.blocks[1].register_forward_hook(lambda *_: self.after())

    def after(self) -> None:
        self.steps += 1
        self.generator.random()

    def step(self, x: Tensor) -> Tensor:
        x = self.stem(x) * self.generator.random() + self.steps
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 1 and self.where == "code":
                self.after()
        return self.head(x).sum()


def test_the_code_after_a_stages_last_call_is_the_next_stages() -> None:
    """The hooks on that call are its own, and the next stage's too."""
    assert flow_of(AtTheCut("hook")).last[0] == ("blocks.1", 0)
    with pytest.raises(FlowError, match="of which stage 0 runs 1"):
        flow_of(AtTheCut("code"))


class Sparse(nn.Module):
    """Keeps numbers, and a list of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.zeros = 0.0
        self.history: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).relu()
        self.zeros = (y == 0).float().mean().item() + 0 * self.zeros
        self.history.append(self.zeros)
        return y


class Reads(Net):
    def __init__(self, block: int, attribute: str | None) -> None:
        super().__init__()
        self.blocks[block] = Sparse()
        self.sparse, self.attribute = block, attribute

    def step(self, x: Tensor) -> Tensor:
        loss = self.head(self.body(self.stem(x))).sum()
        kept = getattr(self.blocks[self.sparse], self.attribute) if self.attribute is not None else 0.0
        return loss + (kept[-1] if isinstance(kept, list) else kept)


@pytest.mark.parametrize("attribute", ["zeros", "history"])
def test_a_number_that_a_layer_keeps_is_no_other_stages_to_read(attribute: str) -> None:
    with pytest.raises(FlowError, match=f"'blocks.0', on stage 0, keeps something in its attribute '{attribute}'"):
        flow_of(Reads(0, attribute))


@pytest.mark.parametrize(("block", "attribute"), [(0, None), (3, "zeros"), (3, "history")])
def test_it_is_its_own_stages(block: int, attribute: str | None) -> None:
    model = Reads(block, attribute)
    flow_of(model)
    assert model.blocks[block].zeros == 0.0 and model.blocks[block].history == []


class Counts(Net):
    """Counts its steps, in a number or a buffer; where, and where it is used."""

    def __init__(self, used: str, counted: str, buffer: bool = False) -> None:
        super().__init__()
        self.used, self.counted = used, counted
        self.steps: Any = 0
        if buffer:
            del self.steps
            self.register_buffer("steps", torch.zeros(()))

    def at(self, place: str, x: Tensor) -> Tensor:
        x = x * (1 + self.steps) if self.used == place else x
        if self.counted == place:
            self.steps += 1
        return x

    def step(self, x: Tensor) -> Tensor:
        return self.at("end", self.head(self.body(self.at("beginning", self.stem(x))))).sum()


@pytest.mark.parametrize("buffer", [False, True])
@pytest.mark.parametrize(("used", "counted"), [("beginning", "beginning"), ("end", "beginning"), ("end", "end")])
def test_what_is_counted_is_told(used: str, counted: str, buffer: bool) -> None:
    assert flow_of(Counts(used, counted, buffer)).carried == {"steps"}


@pytest.mark.parametrize("buffer", [False, True])
def test_what_is_counted_after_a_stage_has_left_it_may_not_read(buffer: bool) -> None:
    with pytest.raises(FlowError, match="reads 'steps' on stage 0, but changes it after that stage has left"):
        flow_of(Counts("beginning", "end", buffer))


class Goes(Net):
    """Keeps something from step to step: read at the beginning, changed at the end, after the loss was looked at."""

    KINDS: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
        "bool": (False, lambda kept: not kept, float),
        "dictionary": ({"n": 1}, lambda kept: kept.update(n=kept["n"] + 1) or kept, lambda kept: kept["n"]),
        "list": ([0], lambda kept: kept.append(1) or kept, len),
        "tensor": (torch.ones(()), lambda kept: kept + 1, lambda kept: kept),
        "array": (np.zeros(1), lambda kept: kept.__iadd__(1), lambda kept: float(kept[0])),
        "scalar": (np.int64(1), lambda kept: kept + 1, float),
        "object": (SimpleNamespace(n=1), lambda kept: vars(kept).update(n=kept.n + 1) or kept, lambda kept: kept.n),
    }

    def __init__(self, kind: str) -> None:
        super().__init__()
        kept, self.change, self.number = self.KINDS[kind]
        self.kept = copy.deepcopy(kept)

    def step(self, x: Tensor) -> Tensor:
        loss = self.head(self.body(self.stem(x) * self.number(self.kept))).sum()
        if torch.isnan(loss):
            raise ValueError("not a number")
        self.kept = self.change(self.kept)
        return loss


@pytest.mark.parametrize("kind", Goes.KINDS)
def test_whatever_is_kept_for_the_next_step_has_to_be_kept_on_the_stages_that_read_it(kind: str) -> None:
    with pytest.raises(FlowError, match="reads 'kept' on stage 0, but changes it after that stage has left"):
        flow_of(Goes(kind))


def test_what_is_only_collected_may_be_collected_anywhere() -> None:
    class Collects(Net):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[float] = []

        def step(self, x: Tensor) -> Tensor:
            self.seen.append(1.0)
            out = self.head(self.body(self.stem(x))).sum()
            self.seen.append(2.0)
            return out

    model = Collects()
    assert flow_of(model).carried == frozenset() and model.seen == []


def test_what_is_made_anew_or_is_a_metric_is_not_counted() -> None:
    class Anew(Net):
        def __init__(self) -> None:
            super().__init__()
            self.size, self.mean, self.losses = 0, MeanMetric(), [0.0]

        def step(self, x: Tensor) -> Tensor:
            self.size = len(x)
            self.mean.update(x.mean())
            self.losses.append(1.0)
            return self.head(self.body(self.stem(x))).sum() * self.size

    assert flow_of(Anew()).carried == frozenset()


class Does(Net):
    """Keeps ``scale``, which it uses at the beginning; the end is given."""

    def __init__(self, end: Callable[[Any, Tensor], None], scale: Any = 2.0) -> None:
        super().__init__()
        self.end, self.scale = end, scale

    def step(self, x: Tensor) -> Tensor:
        scale = self.scale if isinstance(self.scale, float) else len(self.scale)
        if isinstance(self.scale, list):
            self.scale = self.scale[-3:]
        out = self.head(self.body(self.stem(x) * scale))
        self.end(self, out)
        return out.sum()


def set_once(model: Any, out: Tensor) -> None:
    model.scale = 1.0


def keep_the_loss(model: Any, out: Tensor) -> None:
    model.scale = out.mean().item()


def count_unless_it_is_not_finite(model: Any, out: Tensor) -> None:
    assert out.isfinite().all()
    model.scale += 1


def count_or_exit(model: Any, out: Tensor) -> None:
    if not out.isfinite().all():
        sys.exit("not finite")
    model.scale += 1


def count_after_a_loop(model: Any, out: Tensor) -> None:
    while not out.abs().max() < 0.5:
        out = out * 0.9
    while out.abs().max().item() > 1e-3:
        out = out * 0.9
    model.scale += 1


def count_sometimes(model: Any, out: Tensor) -> None:
    if out.mean() < 1:
        model.scale += 1


def append(model: Any, out: Tensor) -> None:
    model.scale.append(1)


@pytest.mark.parametrize(("end", "scale"), [
    (set_once, 2.0), (keep_the_loss, 2.0), (count_unless_it_is_not_finite, 2.0), (count_or_exit, 2.0),
    (count_after_a_loop, 2.0), (count_sometimes, 2.0), (append, [1]),
])  # fmt: skip
def test_the_end_of_a_step_is_seen_after_what_it_asks_for(end: Callable[[Any, Tensor], None], scale: Any) -> None:
    with pytest.raises(FlowError, match="reads 'scale' on stage 0, but changes it after that stage has left"):
        flow_of(Does(end, scale))
    flow_of(Does(end, scale), stages=1)


def test_what_the_end_only_reads_may_change_at_the_beginning() -> None:
    class Augments(Net):
        def __init__(self) -> None:
            super().__init__()
            self.augmentation = SimpleNamespace(scale=1.0)

        def step(self, x: Tensor) -> Tensor:
            self.augmentation.scale = self.augmentation.scale + 1
            return self.head(self.body(self.stem(x * self.augmentation.scale))).sum() * self.augmentation.scale

    assert flow_of(Augments()).carried == frozenset()


def test_what_is_set_to_the_same_value_does_not_change() -> None:
    def set_again(model: Any, out: Tensor) -> None:
        model.scale = float("nan")

    assert flow_of(Does(set_again, float("nan"))).carried == frozenset()


# -- several chunks a stage: the code around the layers runs once in each of them --------------------------------------

PLACEMENTS = [(0, 1, 0, 1), (1, 0, 0, 1)]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_generator_is_drawn_from_once_a_stage(placement: tuple[int, ...]) -> None:
    flow_of(Draws("inside 1"), placement=placement)
    flow_of(Draws("after"), placement=placement)
    with pytest.raises(FlowError, match=r"would draw several times on stage 0\. A stage with several chunks .*'1f1b'"):
        flow_of(Draws("before"), placement=placement)
    with pytest.raises(FlowError, match="would draw several times on stage"):  # as many as places, but not each
        flow_of(Draws("before", "inside 0", "inside 1"), placement=placement)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_is_counted_is_counted_once_a_stage(placement: tuple[int, ...]) -> None:
    flow_of(Counts("end", "end"), placement=placement)
    with pytest.raises(FlowError, match=r"changes 'steps', and would change it several times on stage \d.*'1f1b'"):
        flow_of(Counts("beginning", "beginning"), placement=placement)


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
