"""The replicas' graphs as one node: the gradients that one graph would give, however the backward is run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel.threaded_replicas import graphs
from lightning_parallel.threaded_replicas.data_parallel import DataParallel
from lightning_parallel.threaded_replicas.join import joined

CPU = torch.device("cpu")


@pytest.fixture(params=["a thread each", "one call"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the CPU, and as on GPUs."""
    monkeypatch.setattr(graphs, "_has_backward_threads", lambda device: request.param == "one call")


@pytest.fixture
def parallel() -> Iterator[DataParallel]:
    opened = DataParallel([CPU] * 3)
    yield opened
    opened.close()


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def forward(parallel: DataParallel, model: Any, batch: Tensor) -> Tensor:
    outputs, samples = parallel.apply(model, lambda replica, share: replica.module(share.batch), batch)
    output: Tensor = joined(outputs, samples, CPU)
    return output


def test_gradients_of_weights_and_inputs_are_those_of_one_graph(parallel: DataParallel) -> None:
    runs = []
    for through in (lambda model, x: model(x), lambda model, x: forward(parallel, model, x)):
        model, x = net(), torch.linspace(-1, 1, 28, dtype=torch.float64).view(7, 4).requires_grad_()
        through(model, x * 2).pow(2).sum().backward()
        runs.append([x.grad, *(p.grad for p in model.parameters())])
    for found, expected in zip(*runs, strict=True):
        assert (found - expected).abs().max() < 1e-12


def test_gradients_accumulate(parallel: DataParallel) -> None:
    model, x = net(), torch.ones(4, 4, dtype=torch.float64)
    forward(parallel, model, x).sum().backward()
    once = [p.grad.clone() for p in model.parameters()]
    forward(parallel, model, x).sum().backward()
    assert all(torch.allclose(p.grad, 2 * g) for p, g in zip(model.parameters(), once, strict=True))


def test_weights_that_no_replica_used_get_no_gradient(parallel: DataParallel) -> None:
    model = net()
    outputs, _ = parallel.apply(model, lambda r, share: r.module[2](share.batch), torch.ones(4, 5).double())
    sum(output.sum() for output in outputs).backward()
    assert [p.grad is None for p in model.parameters()] == [True, True, False, False]


def test_outputs_that_are_not_used_cost_nothing(parallel: DataParallel) -> None:
    model = net()
    outputs, _ = parallel.apply(model, lambda r, share: r.module(share.batch), torch.ones(3, 4).double())
    outputs[1].sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_model_s_own_weights_count_once(parallel: DataParallel) -> None:
    """What was bound to the model before replicas were made, uses them."""
    model, alone, batch = net(), net(), torch.ones(3, 4).double()

    def loss(replica: Any, share: Any) -> Tensor:
        result: Tensor = replica.module(share.batch).mean() + model[0].weight.pow(2).sum()
        return result

    outputs, samples = parallel.apply(model, loss, batch)
    joined(outputs, samples, CPU).backward()
    (alone(batch).mean() + alone[0].weight.pow(2).sum()).backward()
    assert all(torch.allclose(p.grad, q.grad) for p, q in zip(model.parameters(), alone.parameters(), strict=True))


def test_a_hook_on_a_weight_sees_one_gradient(parallel: DataParallel) -> None:
    model, seen = net(), []
    model[0].weight.register_hook(seen.append)
    forward(parallel, model, torch.ones(3, 4).double()).sum().backward()
    assert len(seen) == 1 and torch.equal(seen[0], model[0].weight.grad)


def test_without_gradients_there_is_no_node(parallel: DataParallel) -> None:
    with torch.no_grad():
        assert not forward(parallel, net(), torch.ones(3, 4).double()).requires_grad
    assert not forward(parallel, net().requires_grad_(False), torch.ones(3, 4).double()).requires_grad


def test_a_second_backward_finds_the_graphs_only_if_they_were_retained(parallel: DataParallel) -> None:
    model = net()
    loss = forward(parallel, model, torch.ones(3, 4).double()).sum()
    loss.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    loss.backward()
    twice = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert once and all(torch.equal(2 * a, b) for a, b in zip(once, twice, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_a_second_derivative_is_refused(parallel: DataParallel) -> None:
    inputs = torch.ones(3, 4).double().requires_grad_()
    outputs = forward(parallel, net(), inputs)
    with pytest.raises(RuntimeError, match="have no second derivative"):
        torch.autograd.grad(outputs.sum(), inputs, create_graph=True)


def test_an_error_in_a_backward_is_raised(parallel: DataParallel) -> None:
    class Refusing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            raise KeyError("no way back")

    outputs, _ = parallel.apply(net(), lambda r, s: Refusing.apply(r.module(s.batch)), torch.ones(3, 4).double())
    with pytest.raises(KeyError, match="no way back"):
        outputs[0].sum().backward()
