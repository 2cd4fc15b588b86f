"""checks/optimizer_trial.py: whether an optimizer is the same on parts of parameters is tried, not looked up."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_parallel.checks.optimizer_trial import refuse_steps_apart, stepped_whole
from lightning_parallel.ranks.layout import Layout
from lightning_parallel.ranks.local_model import LocalModel
from lightning_parallel.ranks.shard import Shard
from recipes.models.muon import MuonAdamW
from tools.optimizer_table import optimizers

AXES = ("tensor", "pipeline")
Make = Callable[[Any], Optimizer]


def of_torch(name: str, **options: Any) -> Make:
    return lambda params: getattr(torch.optim, name)(params, **options)


def hybrid(params: Any) -> Optimizer:
    """Of each group another kind."""
    matrices = [p for p in params if p.ndim == 2]
    return torch.optim.SGD([{"params": matrices, "momentum": 0.9}, {"params": [p for p in params if p.ndim != 2]}], 0.1)


def waits(params: Any) -> Optimizer:
    """A scheduler begins with a rate of zero, and has taken the place of ``optimizer.step``."""
    optimizer = torch.optim.Muon([p for p in params if p.ndim == 2])
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0
    return optimizer


ELEMENTWISE: dict[str, Make] = {
    **{name: of_torch(name) for name in (
        "SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"
    )},
    "momentum": of_torch("SGD", momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True),
    "amsgrad": of_torch("Adam", amsgrad=True, weight_decay=0.1),
    "foreach": of_torch("AdamW", foreach=True),
    "fused": of_torch("AdamW", fused=True),
    "rate-tensor": of_torch("AdamW", lr=torch.tensor(1e-3)),
    "rate-zero": of_torch("SGD", lr=0.0),
    "state-at-first": of_torch("Adagrad", initial_accumulator_value=0.1),
    "groups": hybrid,
    "Lion": pytorch_optimizer.Lion,
    "ScheduleFree": pytorch_optimizer.ScheduleFreeAdamW,
    "Lookahead": lambda params: optimizers.Lookahead(torch.optim.AdamW(params)),
}  # fmt: skip
BY_PARAMETER: dict[str, Make] = {
    "Adafactor": of_torch("Adafactor"),
    "Muon": lambda params: torch.optim.Muon([p for p in params if p.ndim == 2]),
    "Muon ": waits,
    **{kind.__name__: kind for kind in (
        optimizers.LARS, optimizers.LAMB, optimizers.HostLAMB, optimizers.Kronecker,
        optimizers.FloorSGD, optimizers.Noted, optimizers.NotedInState, optimizers.NotedByName,
    )},
    "Lookahead": lambda params: optimizers.Lookahead(optimizers.LAMB(params)),
}  # fmt: skip
BY_ALL: dict[str, Make] = {
    "Prodigy": optimizers.Prodigy,
    "NormedSGD": optimizers.NormedSGD,
    "SAM": lambda params: optimizers.SAM(params, torch.optim.SGD, lr=0.1),
}


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(50, 30), nn.LayerNorm(30), nn.Conv1d(4, 6, 3), nn.Linear(3, 1))

    def held(self, axis: str) -> LocalModel:
        """As a rank has it, all layers by name but divided in words only."""
        shards = {
            "0.weight": Shard((60, 50), 0, (60,), 0, 2),
            "0.bias": Shard((60,), 0, (60,), 0, 2),
            "3.weight": Shard((2, 3), 0, (2,), 0, 2),
        }
        return LocalModel.of(self, shards if axis == "tensor" else {})


def tried(make: Make, axis: str) -> set[int]:
    model = Model()
    layout = Layout.resolve(2, **{axis: 2})
    return stepped_whole(make(list(model.parameters())), model.held(axis), layout, "SomeStrategy")


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_pass_without_a_word(name: str, axis: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not tried(ELEMENTWISE[name], axis)


class CountsItself(torch.optim.SGD):
    """Its steps get smaller. The count is its own, not an option."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        before = [group["lr"] for group in self.param_groups]
        for group, rate in zip(self.param_groups, before, strict=True):
            group["lr"] = rate / self.steps
        result = super().step(closure)
        for group, rate in zip(self.param_groups, before, strict=True):
            group["lr"] = rate
        return result


def tried_in_v(make: Make) -> None:
    model = Model()
    refuse_steps_apart(make(list(model.parameters())), model.held("pipeline"), "SomeStrategy(schedule='vmin')")


COUNTING = ("Lookahead", "Lion", "ScheduleFree")


@pytest.mark.parametrize("name", [name for name in (*ELEMENTWISE, *BY_PARAMETER) if name not in COUNTING])
def test_those_that_treat_parameters_apart_pass_in_a_v(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tried_in_v({**BY_PARAMETER, **ELEMENTWISE}[name])


@pytest.mark.parametrize("make", [lambda params: CountsItself(params, lr=0.1), *(ELEMENTWISE[it] for it in COUNTING)])
def test_one_that_counts_its_steps_is_refused_in_a_v(make: Make) -> None:
    with pytest.raises(ValueError, match=r"under SomeStrategy\(schedule='vmin'\): .*group 0.*schedule='1f1b'"):
        tried_in_v(make)


class NeedsItsParameters(torch.optim.SGD):
    """A trial's parameters aren't those that it was made with."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.shapes = [p.shape for group in self.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> Any:
        if self.shapes != [p.shape for group in self.param_groups for p in group["params"]]:
            raise LookupError("no such parameter")
        return super().step(closure)


class Waits(torch.optim.SGD):
    """It begins later than a trial goes."""

    def step(self, closure: Any = None) -> Any:
        return None


@pytest.mark.parametrize(("kind", "reason"), [(NeedsItsParameters, "LookupError"), (Waits, "left parameters")])
def test_one_that_can_not_be_tried_is_refused_in_a_v(kind: type[torch.optim.SGD], reason: str) -> None:
    with pytest.raises(ValueError, match=rf"{kind.__name__} under .*schedule='vmin'.*{reason}.*schedule='1f1b'"):
        tried_in_v(lambda params: kind(params, lr=0.1))


@pytest.mark.parametrize("name", BY_PARAMETER)
def test_those_that_treat_a_parameter_as_one_step_wholes_where_it_is_divided(name: str) -> None:
    assert tried(BY_PARAMETER[name], "tensor") == {0}
    assert not tried(BY_PARAMETER[name], "pipeline")


def test_one_that_moves_before_its_closure_is_refused_where_owners_would_step() -> None:
    with pytest.raises(ValueError, match=r"LooksAhead under SomeStrategy: .*tensor_parallel=2.*parameter group 0"):
        tried(optimizers.LooksAhead, "tensor")
    assert not tried(optimizers.LooksAhead, "pipeline")


def test_one_that_fails_on_a_rank_that_owns_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"NeverEmpty under SomeStrategy: .*it fails there: RuntimeError"):
        tried(lambda params: optimizers.NeverEmpty([p for p in params if p.ndim == 2]), "tensor")
    assert tried(optimizers.NeverEmpty, "tensor") == {0}  # it has vectors that all ranks hold


def test_of_one_with_several_kinds_of_groups_some_step_wholes() -> None:
    def make(params: list[nn.Parameter]) -> Optimizer:
        matrices = [p for p in params if p.ndim == 2]
        others = [p for p in params if p.ndim != 2]
        return MuonAdamW([{"params": others}, {"params": matrices, "muon": True}], lr=0.01)

    assert tried(make, "tensor") == {1}


def test_frozen_parameters_are_tried_since_they_may_be_trained_later() -> None:
    def make(params: list[nn.Parameter]) -> Optimizer:
        return optimizers.LAMB([p.requires_grad_(False) for p in params])

    assert tried(make, "tensor") == {0}


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("name", BY_ALL)
def test_those_that_treat_all_parameters_as_one_are_refused_where_a_rank_lacks_some(name: str, axis: str) -> None:
    with pytest.raises(ValueError) as caught:
        tried(BY_ALL[name], axis)
    axis_words = {"tensor": "tensor_parallel=2", "pipeline": "2 stages"}[axis]
    words = [
        name,
        "SomeStrategy",
        axis_words,
        "parameter group 0" if name != "SAM" or axis != "tensor" else "fails",
        "AdamW",
    ]
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("axis", AXES)
def test_what_cannot_be_tried_is_warned_of_and_goes_on(axis: str) -> None:
    with pytest.warns(UserWarning, match="SparseAdam .*SomeStrategy"):
        tried(of_torch("SparseAdam"), axis)


def test_no_optimizer_is_tried_where_each_rank_has_all() -> None:
    model = Model()
    layout = Layout.resolve(2, data=2)
    assert not stepped_whole(optimizers.Prodigy(model.parameters()), LocalModel.of(model), layout, "SomeStrategy")


@pytest.mark.parametrize("make", [
    ELEMENTWISE["AdamW"], ELEMENTWISE["ScheduleFree"], ELEMENTWISE["Lookahead"], ELEMENTWISE["state-at-first"],
])  # fmt: skip
def test_the_user_s_optimizer_is_left_as_it_was(make: Make) -> None:
    model = Model()
    optimizer = make(list(model.parameters()))
    calls: list[Any] = []
    optimizer.register_step_pre_hook(lambda *args: calls.append(args))
    of_all = register_optimizer_step_pre_hook(lambda *args: calls.append(args))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), [*vars(optimizer)], torch.get_rng_state()))
    stepped_whole(optimizer, model.held("tensor"), Layout.resolve(2, tensor=2), "SomeStrategy")
    of_all.remove()
    after = (model.state_dict(), optimizer.state_dict(), [*vars(optimizer)], torch.get_rng_state())
    assert str(after) == str(before)
    assert not calls and all(parameter.grad is None for parameter in model.parameters())
