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

Make = Callable[[Any], Optimizer]
Verdict = set[int] | str  # the groups whose parameters are stepped as wholes, or words of a refusal


def of_torch(name: str, **options: Any) -> Make:
    return lambda params: getattr(torch.optim, name)(params, **options)


def waits(params: Any) -> Optimizer:
    """A scheduler begins with a rate of zero, and has taken the place of ``optimizer.step``."""
    optimizer = torch.optim.Muon(matrices_of(params))
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0
    return optimizer


def matrices_of(params: Any) -> list[Any]:
    return [p for p in params if p.ndim == 2]


class Waits(torch.optim.SGD):
    """It begins later than a trial goes."""

    def step(self, closure: Any = None) -> Any:
        return None


def of_two_kinds(params: Any) -> Optimizer:
    others = [p for p in params if p.ndim != 2]
    return MuonAdamW([{"params": others}, {"params": matrices_of(params), "muon": True}], lr=0.01)


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
    optimizer = make(list(model.parameters()))
    if axis == "a V":
        refuse_steps_apart(optimizer, model.held("pipeline"), "SomeStrategy")
        return set()
    return stepped_whole(optimizer, model.held(axis), Layout.resolve(2, **{axis: 2}), "SomeStrategy")


COUNTS = r"under SomeStrategy: in a V .*group 0.*schedule='1f1b'"
UNTRIED = r"under SomeStrategy: in a V .*{}.*schedule='1f1b'"
ALIKE: dict[str, Verdict] = {"tensor": set(), "pipeline": set(), "a V": set()}
COUNTING = ALIKE | {"a V": COUNTS}
BY_PARAMETER = ALIKE | {"tensor": {0}}
BY_ALL: dict[str, Verdict] = {
    "tensor": "{} under SomeStrategy: .*tensor_parallel=2.*parameter group 0.*AdamW",
    "pipeline": "{} under SomeStrategy: .*2 stages.*parameter group 0.*AdamW",
}
# By name: how it is made, and what a trial says of it where ranks have parts of the parameters.
CASES: dict[str, tuple[Make, dict[str, Verdict]]] = {
    **{name: (of_torch(name), ALIKE) for name in (
        "SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"
    )},
    "momentum": (of_torch("SGD", momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True), ALIKE),
    "fused": (of_torch("AdamW", fused=True), ALIKE),
    "rate-tensor": (of_torch("AdamW", lr=torch.tensor(1e-3)), ALIKE),
    "rate-zero": (of_torch("SGD", lr=0.0), ALIKE),
    "state-at-first": (of_torch("Adagrad", initial_accumulator_value=0.1), ALIKE),
    "Lion": (pytorch_optimizer.Lion, COUNTING),
    "ScheduleFree": (pytorch_optimizer.ScheduleFreeAdamW, COUNTING),
    "Lookahead": (lambda params: optimizers.Lookahead(torch.optim.AdamW(params)), COUNTING),
    "SparseAdam": (of_torch("SparseAdam"), {"a V": UNTRIED.format("RuntimeError")}),
    "Waits": (Waits, {"a V": UNTRIED.format("left parameters")}),
    **{kind.__name__: (kind, BY_PARAMETER) for kind in (
        torch.optim.Adafactor, optimizers.LARS, optimizers.LAMB, optimizers.HostLAMB, optimizers.Kronecker,
        optimizers.FloorSGD, optimizers.Noted, optimizers.NotedInState, optimizers.NotedByName,
    )},
    "Muon": (waits, BY_PARAMETER),
    "Lookahead of LAMB": (lambda params: optimizers.Lookahead(optimizers.LAMB(params)), {"tensor": {0}}),
    "two kinds of groups": (of_two_kinds, {"tensor": {1}}),
    # They may be trained later.
    "frozen": (lambda params: optimizers.LAMB([p.requires_grad_(False) for p in params]), {"tensor": {0}}),
    # It moves before its closure.
    "LooksAhead": (optimizers.LooksAhead, {"tensor": "{} .*tensor_parallel=2.*parameter group 0", "pipeline": set()}),
    # A rank may own nothing; of all parameters it has vectors that all ranks hold.
    "NeverEmpty": (optimizers.NeverEmpty, {"tensor": {0}}),
    "NeverEmpty of matrices": (
        lambda params: optimizers.NeverEmpty(matrices_of(params)),
        {"tensor": "NeverEmpty under SomeStrategy: .*it fails there: RuntimeError"},
    ),
    "Prodigy": (optimizers.Prodigy, BY_ALL | {"data": set()}),  # not tried where each rank has all
    "NormedSGD": (optimizers.NormedSGD, BY_ALL),
    "SAM": (lambda params: optimizers.SAM(params, torch.optim.SGD, lr=0.1), BY_ALL | {"tensor": "SAM .*2.*fails"}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "where"), [(name, where) for name, (_, found) in CASES.items() for where in found])
def test_a_trial_says_what_steps_wholes_and_what_is_refused(name: str, where: str) -> None:
    make, verdicts = CASES[name]
    verdict = verdicts[where]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if isinstance(verdict, str):
            with pytest.raises(ValueError, match=verdict.format(name)):
                tried(make, where)
        else:
            assert tried(make, where) == verdict


def test_what_cannot_be_tried_is_warned_of_and_goes_on() -> None:
    with pytest.warns(UserWarning, match="SparseAdam .*SomeStrategy"):
        tried(of_torch("SparseAdam"), "tensor")


@pytest.mark.parametrize("name", ["AdamW", "ScheduleFree", "Lookahead", "state-at-first"])
def test_the_user_s_optimizer_is_left_as_it_was(name: str) -> None:
    model = Model()
    optimizer = CASES[name][0](list(model.parameters()))
    calls: list[Any] = []
    optimizer.register_step_pre_hook(lambda *args: calls.append(args))
    of_all = register_optimizer_step_pre_hook(lambda *args: calls.append(args))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), [*vars(optimizer)], torch.get_rng_state()))
    stepped_whole(optimizer, model.held("tensor"), Layout.resolve(2, tensor=2), "SomeStrategy")
    of_all.remove()
    after = (model.state_dict(), optimizer.state_dict(), [*vars(optimizer)], torch.get_rng_state())
    assert str(after) == str(before)
    assert not calls and all(parameter.grad is None for parameter in model.parameters())
