"""The steps together, in a plain PyTorch loop."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import BatchEncoding

from lightning_parallel.batch import mapped, tensors
from lightning_parallel.local_replicas.data_parallel import Share, on_replicas, scatter

CPU = torch.device("cpu")
CPUS = [CPU] * 3


def forward(model: Any, batch: Tensor) -> Tensor:
    output: Tensor = on_replicas(lambda replica, share: replica(share.batch), model, batch, CPUS)
    return output


def test_a_plain_loop_trains_as_without_replicas() -> None:
    trained = []
    for replicated in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        optimizer = torch.optim.Adam(model.parameters(), 0.1, eps=1e-4)
        for step in range(5):
            x = torch.randn(7 if step else 2, 4, generator=torch.Generator().manual_seed(step)).double()
            if replicated:
                predicted = forward(model, x)
            else:
                predicted = model(x)
            optimizer.zero_grad()
            (predicted - x.sum(1, keepdim=True)).pow(2).mean().backward()
            optimizer.step()
        trained.append([p.detach() for p in model.parameters()])
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(*trained, strict=True))


@pytest.mark.parametrize("draw", [
    lambda: torch.rand(2).tolist(), lambda: [random.random()], lambda: np.random.rand(2).tolist(),
    lambda: torch.nn.functional.dropout(torch.ones(64)).tolist(),
])  # fmt: skip
def test_replicas_draw_other_numbers_each_and_the_same_in_every_run(draw: Callable[[], list[float]]) -> None:
    runs = []
    for _ in range(2):
        torch.manual_seed(3), random.seed(3), np.random.seed(3)
        steps: list[list[list[float]]] = [[] for _ in range(4)]
        for drawn in steps:
            on_replicas(lambda *_, drawn=drawn: drawn.append(draw()), nn.Linear(1, 1), torch.zeros(3), CPUS)
        runs.append(steps)
        assert all(a != b for step in steps for a in step for b in step if a is not b)
    assert runs[0] == runs[1]


def test_an_error_keeps_its_type_and_names_the_replica() -> None:
    def run(replica: Any, share: Share) -> None:
        if share.batch[0] == 1:
            raise KeyError("one")

    with pytest.raises(KeyError, match="one") as caught:
        on_replicas(run, nn.Linear(1, 1), torch.arange(3), CPUS)
    assert caught.value.__notes__ == ["This was raised in replica 1 of 3, on cpu."]


def test_a_recomputation_draws_what_the_forward_drew() -> None:
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(5)
        layer = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16), nn.Dropout(0.5))

        def run(replica: Any, share: Share, recompute: bool = recompute) -> Tensor:
            return checkpoint(replica, share.batch, use_reentrant=False) if recompute else replica(share.batch)

        for _ in range(3):
            on_replicas(run, layer, torch.ones(9, 16), CPUS).sum().backward()
        gradients.append([p.grad for p in layer.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_the_model_keeps_what_replica_0_did() -> None:
    model = nn.BatchNorm1d(2)

    def run(replica: Any, share: Share) -> Tensor:
        replica.last = float(share.batch[0, 0])
        output: Tensor = replica(share.batch)
        return output

    on_replicas(run, model, torch.arange(12.0).view(6, 2), CPUS)
    assert model.last == 0 and model.num_batches_tracked == 1


def test_replicas_are_gone_when_the_loss_is() -> None:
    model, alive = nn.Linear(2, 1), []

    def run(replica: Any, share: Share) -> Tensor:
        alive.append(weakref.ref(replica))
        output: Tensor = replica(share.batch)
        return output

    gc.disable()  # by their references alone, at once
    try:
        on_replicas(run, model, torch.ones(3, 2), CPUS).sum().backward()
        assert [reference() for reference in alive] == [model, None, None]
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.parametrize("replicas", [1, 3])
def test_replicas_on_gpus_train_as_one_model(replicas: int) -> None:
    """Each on a GPU, or several on one."""
    gpus = [torch.device("cuda", i % torch.cuda.device_count()) for i in range(replicas)]
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double().to(gpus[0])
    x = torch.randn(7, 4, device=gpus[0]).double()
    for _ in range(2):
        on_replicas(lambda replica, share: replica(share.batch), model, x, gpus).pow(2).mean().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for _ in range(2):
        model(x).pow(2).mean().backward()
    assert all((a - p.grad).abs().max() < 1e-12 for a, p in zip(found, model.parameters(), strict=True))


# -- a batch into shares -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    rows: Tensor
    name: str


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("n", [1, 5, 8])
def test_shares_differ_by_one_sample_at_most_and_none_is_empty(n: int, devices: int) -> None:
    shares = scatter(torch.arange(n), [CPU] * devices)
    samples = [share.samples for share in shares]
    assert len(shares) == min(n, devices)
    assert sum(samples) == n and max(samples) - min(samples) <= 1 and min(samples) >= 1
    assert torch.cat([share.batch for share in shares]).tolist() == list(range(n))


@pytest.mark.parametrize("make", [
    lambda rows: (rows, rows + 1),
    lambda rows: [rows, {"deep": (rows, "text", 3)}],
    lambda rows: {"rows": rows, "empty": {}, "none": None},
    lambda rows: Pair(rows, "all"),
    lambda rows: BatchEncoding({"input_ids": rows}),
])  # fmt: skip
def test_containers_keep_their_types(make: Any) -> None:
    batch = make(torch.arange(10).view(5, 2))
    shares = scatter(batch, [CPU] * 2)
    assert [type(share.batch) for share in shares] == [type(batch)] * 2
    for whole, *parts in zip(tensors(batch), *(tensors(share.batch) for share in shares), strict=True):
        assert torch.equal(torch.cat(parts), whole)


def test_a_batch_that_cannot_be_divided_is_told() -> None:
    with pytest.raises(ValueError, match=r"batch\[0\] has 2, batch\[1\] has 3"):
        scatter((torch.zeros(2), torch.zeros(3)), [CPU] * 2)


def test_mapped_leaves_a_tree_without_changes_as_it_is() -> None:
    tree = {"a": (torch.zeros(1), "b")}
    assert mapped(tree, lambda tensor: tensor) is tree
    assert mapped(tree, lambda tensor: tensor + 1)["a"][0] == 1


# -- the graph ---------------------------------------------------------------------------------------------------------


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def test_gradients_of_weights_and_inputs_are_those_of_one_graph() -> None:
    runs = []
    for through in (lambda model, x: model(x), forward):
        model, x = net(), torch.linspace(-1, 1, 28, dtype=torch.float64).view(7, 4).requires_grad_()
        through(model, x * 2).pow(2).sum().backward()
        runs.append([x.grad, *(p.grad for p in model.parameters())])
    for found, expected in zip(*runs, strict=True):
        assert (found - expected).abs().max() < 1e-12


def test_gradients_accumulate() -> None:
    model, x = net(), torch.ones(4, 4, dtype=torch.float64)
    forward(model, x).sum().backward()
    once = [p.grad.clone() for p in model.parameters()]
    forward(model, x).sum().backward()
    assert all(torch.allclose(p.grad, 2 * g) for p, g in zip(model.parameters(), once, strict=True))


def test_weights_that_no_replica_used_get_no_gradient() -> None:
    model = net()
    on_replicas(lambda replica, share: replica[2](share.batch), model, torch.ones(4, 5).double(), CPUS).sum().backward()
    assert [p.grad is None for p in model.parameters()] == [True, True, False, False]


def test_outputs_that_are_not_used_cost_nothing() -> None:
    model = net()
    forward(model, torch.ones(3, 4).double())[1].sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_model_s_own_weights_count_once() -> None:
    """What was bound to the model before replicas were made, uses them."""
    model, alone, batch = net(), net(), torch.ones(3, 4).double()

    def loss(replica: Any, share: Any) -> Tensor:
        result: Tensor = replica(share.batch).mean() + model[0].weight.pow(2).sum()
        return result

    on_replicas(loss, model, batch, CPUS).backward()
    (alone(batch).mean() + alone[0].weight.pow(2).sum()).backward()
    assert all(torch.allclose(p.grad, q.grad) for p, q in zip(model.parameters(), alone.parameters(), strict=True))


def test_a_hook_on_a_weight_sees_one_gradient() -> None:
    model, seen = net(), []
    model[0].weight.register_hook(seen.append)
    forward(model, torch.ones(3, 4).double()).sum().backward()
    assert len(seen) == 1 and torch.equal(seen[0], model[0].weight.grad)


def test_without_gradients_there_is_no_node() -> None:
    with torch.no_grad():
        assert not forward(net(), torch.ones(3, 4).double()).requires_grad
    assert not forward(net().requires_grad_(False), torch.ones(3, 4).double()).requires_grad


def test_a_second_derivative_is_that_of_one_graph() -> None:
    runs = []
    for through in (lambda model, x: model(x), forward):
        model, x = net(), torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4).requires_grad_()
        (slope,) = torch.autograd.grad(through(model, x).pow(2).sum(), x, create_graph=True)
        slope.pow(2).sum().backward()
        runs.append([x.grad, *(p.grad for p in model.parameters() if p.grad is not None)])
    for found, expected in zip(*runs, strict=True):
        assert (found - expected).abs().max() < 1e-12


def test_an_error_in_a_backward_is_raised() -> None:
    class Refusing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            raise KeyError("no way back")

    output = on_replicas(lambda r, s: Refusing.apply(r(s.batch)), net(), torch.ones(3, 4).double(), CPUS)
    with pytest.raises(KeyError, match="no way back"):
        output.sum().backward()
