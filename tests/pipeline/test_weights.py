"""Versions of the weights: how many are held, what they cost, and what changes them.

That a backward sees the weights of its forward is in ``tests/strategies/test_pipeline_async.py``.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel.gradients.swapping import gradients_apart, swap_gradients
from lightning_parallel.pipeline.staleness import Correction, Stashing, copies, correction_weight, is_second_order
from lightning_parallel.pipeline.weights import WeightVersions
from lightning_parallel.private.torch.tensors import TorchDispatchMode
from tests.pipeline.nets import Calls


def copies_held(weights: WeightVersions) -> int:
    """The copies of a stage's weights that are held besides its parameters."""
    held = [version for version in weights._versions() if version.copied]
    return min(1, len(held)) if weights._stashing == "latest" else len(held)  # its versions share one


pytestmark = pytest.mark.usefixtures("in_double_precision")


def between() -> Any:
    """A layer between two others: its input's gradient matters too."""
    torch.manual_seed(1)
    parts = {"before": nn.Linear(3, 6), "layer": nn.GRU(6, 6, batch_first=True), "after": nn.Linear(6, 1)}
    return Calls(lambda m, x: m.after(m.layer(m.before(x))[0].tanh()).square().mean(), **parts)


def batch(k: int) -> Tensor:
    return torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(k))


class Training:
    """A stage of its own: forwards run `delay` microbatches ahead of backwards; an update each `count` backwards."""

    def __init__(
        self,
        model: nn.Module,
        stashing: Stashing,
        delay: int,
        count: int = 1,
        *,
        correction: float = 0.0,
        second_order: bool = False,
    ) -> None:
        self.model, self.delay, self.count = model, delay, count
        self.correction, self.second_order = correction, second_order
        self.parameters = dict(model.named_parameters())
        self.optimizer = torch.optim.SGD(self.parameters.values(), lr=0.05)
        self.versions = WeightVersions(model, self.parameters, stashing, corrected=correction != 0)
        self.fed = 0
        self.flights: deque[tuple[Tensor, Any]] = deque()
        self.done = 0

    def microbatch(self, x: Tensor) -> None:
        self.versions.begin(self.fed // self.count)
        self.fed += 1
        loss, token = self.versions.forward(lambda: self.model(x))
        self.flights.append((loss, token))
        if len(self.flights) > self.delay:
            self.backward()

    def backward(self) -> None:
        loss, token = self.flights.popleft()
        with self.versions.backward(token):
            loss.backward()
        self.done += 1
        if self.done % self.count == 0:
            gradients = self.versions.take_gradients()
            self.versions.update(lambda: self._apply(gradients), self.correction, self.second_order)

    def _apply(self, gradients: dict[str, Tensor]) -> None:
        swap_gradients(self.parameters, gradients)
        self.optimizer.step()
        swap_gradients(self.parameters, {})

    def fed_with(self, microbatches: int) -> Training:
        for k in range(microbatches):
            self.microbatch(batch(k))
        return self


def scalars() -> Any:
    """x * w * v: each factor's gradient is the product of the others."""
    return Calls(lambda m, x: x * m.w * m.v, w=nn.Parameter(torch.tensor(2.0)), v=nn.Parameter(torch.tensor(3.0)))


def test_frozen_parameters_are_neither_copied_nor_extrapolated_nor_given_gradients() -> None:
    model = between()
    model.layer.requires_grad_(False)
    frozen = {name: (p.data_ptr(), p.detach().clone()) for name, p in model.layer.named_parameters()}
    training = Training(model, "stash", delay=2, count=2, correction=1.0, second_order=True)
    for k in range(9):
        training.microbatch(batch(k))
        for tensors in (dict(model.named_parameters()), *(token.leaves for _, token in training.flights)):
            for name, (address, value) in frozen.items():
                leaf = tensors[f"layer.{name}"]
                assert leaf.data_ptr() == address and torch.equal(leaf, value) and not leaf.requires_grad
                assert isinstance(leaf, nn.Parameter)  # torch's parametrizations ask
    assert training.versions.updates == 3
    assert set(training.versions.take_gradients()) == {n for n, p in training.parameters.items() if p.requires_grad}


@pytest.mark.parametrize("stashing", ["stash", "2bw", "latest"])
def test_a_parameter_unfrozen_under_way_is_corrected_from_its_first_update_on(stashing: Stashing) -> None:
    model = scalars()
    model.w.requires_grad_(False)
    versions = WeightVersions(model, dict(model.named_parameters()), stashing, corrected=True)

    def step() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1.0 if parameter.requires_grad else 0.0

    for update in range(3):
        versions.begin(update)
        versions.forward(lambda: None)
        model.w.requires_grad_(update == 2)
        versions.update(step, 0.5, True)
    versions.begin(4)
    read = versions.forward(lambda: model.w.item())[0]
    assert model.w.item() == 1.0
    assert read == 0.25


@pytest.mark.parametrize(("stashing", "delay", "count", "correction", "expected"), [
    ("stash", 0, 2, None, 0),  # the last stage
    ("stash", 2, 4, None, 1),
    ("stash", 3, 1, None, 3),
    ("stash", 2, 4, "second_order", 2),  # what is in flight, and what forwards read
    ("stash", 3, 1, "second_order", 4),  # of first order: more than an update lies between
    ("2bw", 2, 4, None, 1),
    ("2bw", 2, 4, 1.0, 2),
    ("latest", 2, 4, None, 0),
    ("latest", 2, 4, "error_feedback", 1),
])  # fmt: skip
def test_copies_held_are_those_in_flight_and_those_of_the_correction(
    stashing: Stashing, delay: int, count: int, correction: Correction, expected: int
) -> None:
    assert copies(stashing, correction, delay, count) == expected
    weight = correction_weight(correction, stashing, delay, count)
    second_order = is_second_order(correction, weight)
    training = Training(between(), stashing, delay, count, correction=weight, second_order=second_order)
    seen = []
    for k in range(6 * count + delay):
        training.microbatch(batch(k))
        seen.append(copies_held(training.versions))
    assert max(seen) == expected
    steady = [held for k, held in enumerate(seen) if k >= 3 * count + delay and (k + 1 - delay) % count == 0]
    assert set(steady) == {expected}  # as an update ends


@pytest.mark.parametrize("stashing", ["stash", "2bw", "latest"])
def test_an_update_that_no_forward_came_before_is_corrected_too(stashing: Stashing) -> None:
    model = scalars()
    versions = WeightVersions(model, dict(model.named_parameters()), stashing, corrected=True)
    with torch.no_grad():
        versions.update(lambda: model.w.sub_(1.0), 1.0)  # type: ignore[arg-type, return-value]
    assert model.w.item() == 1.0
    assert versions.forward(lambda: model.w.item())[0] == 0.0


class Operations(TorchDispatchMode):
    """Counts what a GPU would run."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is not torch.ops.aten.detach.default
        return func(*args, **(kwargs or {}))


def many(pairs: int) -> nn.Module:
    """As many parameters in float64 as in float32."""
    dtypes = (torch.float64, torch.float32) * pairs
    weights = nn.ParameterList(nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in dtypes)
    return Calls(lambda m, x: x.mean() * sum(each.double().square().sum() for each in m.weights), weights=weights)


def operations_of_update(pairs: int, stashing: Stashing, correction: float, second_order: bool) -> int:
    """Operations of an update of gradients on two versions, without the optimizer's."""
    training = Training(many(pairs), stashing, 3, 2, correction=correction, second_order=second_order).fed_with(10)
    loss, token = training.flights.popleft()
    with training.versions.backward(token):
        loss.backward()
    training.versions._loss.factor = 0.5
    with Operations() as operations:
        training.versions.take_gradients()
        training.versions.update(lambda: None, correction, second_order)
    return operations.count


@pytest.mark.parametrize(
    ("stashing", "correction", "second_order", "expected"),
    [("stash", 0.0, False, 3), ("stash", 0.5, False, 4), ("stash", 0.5, True, 6), ("latest", 0.5, True, 7)],
)
def test_an_update_runs_as_few_operations_for_many_parameters_as_for_few(
    stashing: Stashing, correction: float, second_order: bool, expected: int
) -> None:
    few, many = (operations_of_update(pairs, stashing, correction, second_order) for pairs in (2, 20))
    assert few == many == 2 * expected  # for two dtypes


@pytest.mark.parametrize(("stashing", "delay", "count"), [("stash", 3, 2), ("latest", 3, 1), ("2bw", 2, 4)])
def test_staleness_is_counted_for_every_microbatch(stashing: Stashing, delay: int, count: int) -> None:
    training = Training(between(), stashing, delay, count).fed_with(12)
    while training.flights:
        training.backward()
    read = [max(0, k // count - 1) if stashing == "2bw" else max(0, k - delay) // count for k in range(12)]
    assert training.versions.staleness == Counter(k // count - read[k] for k in range(12))


def test_the_modules_parameters_are_back_after_a_step_that_fails() -> None:
    model = scalars()
    before = {name: id(p) for name, p in model.named_parameters()}
    versions = WeightVersions(model, dict(model.named_parameters()))

    def fails() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        versions.forward(fails)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert versions.updates == 0
    versions.refresh()  # nothing is in flight


def test_a_change_from_outside_is_seen_after_a_refresh() -> None:
    model = scalars()
    versions = WeightVersions(model, dict(model.named_parameters()))
    loss, token = versions.forward(lambda: model(1.0))
    with versions.backward(token):
        loss.backward()
    versions.take_gradients()
    model.w.data = torch.tensor(7.0)  # a checkpoint that is loaded
    model.v.requires_grad_(False)  # a callback that freezes
    versions.refresh()
    loss, token = versions.forward(lambda: model(1.0))
    assert loss.item() == 21.0
    with versions.backward(token):
        loss.backward()
    assert {name: g.item() for name, g in versions.take_gradients().items()} == {"w": 3.0}


def test_a_gradient_of_several_versions_grows_in_one_place() -> None:
    """Each one is kept until its message is sent, so a copy of each would be one of all in the message."""
    model = scalars()
    versions = WeightVersions(model, dict(model.named_parameters()), "stash", corrected=True)
    versions.begin(0)
    flights = [versions.forward(lambda: model(1.0))]
    versions.update(lambda: None, 1.0)
    flights.append(versions.forward(lambda: model(2.0)))
    addresses = set()
    for loss, token in flights:
        with versions.backward(token):
            loss.backward()
            gradient = versions.gradient("w")
            addresses.add(gradient.data_ptr())
    (_, first), (_, second) = flights
    assert first.leaves["w"] is not second.leaves["w"]
    assert len(addresses) == 1 and gradient.item() == 9.0
    assert versions.take_gradients()["w"].item() == 9.0


def test_first_gradients_have_memory_of_their_own_also_where_one_is_sparse() -> None:
    """For one sample autograd gives a sparse gradient's values the memory of another leaf's gradient."""
    embedding, bias = nn.Embedding(3, 2, sparse=True, dtype=torch.float64), nn.Parameter(torch.zeros(2).double())
    for microbatch in range(3):
        arrived = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
        output = (arrived + embedding(torch.tensor([microbatch])) + bias[None]) * 2
        with gradients_apart([embedding.weight, bias]):
            output.backward(torch.ones_like(output))
    assert embedding.weight.grad is not None and bias.grad is not None
    assert embedding.weight.grad.to_dense().tolist() == [[2.0, 2.0]] * 3 and bias.grad.tolist() == [6.0, 6.0]
