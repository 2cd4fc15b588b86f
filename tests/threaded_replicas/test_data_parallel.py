"""The four steps together, in a plain PyTorch loop."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import BatchEncoding

from lightning_parallel.batch import mapped, tensors
from lightning_parallel.threaded_replicas.data_parallel import DataParallel, Share, scatter
from lightning_parallel.threaded_replicas.join import joined
from lightning_parallel.threaded_replicas.replicate import Replica

CPU = torch.device("cpu")


@pytest.fixture
def parallel() -> Iterator[DataParallel]:
    opened = DataParallel([CPU] * 3)
    yield opened
    opened.close()


def test_a_plain_loop_trains_as_without_replicas(parallel: DataParallel) -> None:
    trained = []
    for replicated in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        optimizer = torch.optim.Adam(model.parameters(), 0.1, eps=1e-4)
        for step in range(5):
            x = torch.randn(7 if step else 2, 4, generator=torch.Generator().manual_seed(step)).double()
            if replicated:
                outputs, samples = parallel.apply(model, lambda replica, share: replica.module(share.batch), x)
                predicted = joined(outputs, samples, CPU)
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
def test_replicas_draw_other_numbers_each_and_the_same_in_every_run(
    parallel: DataParallel, draw: Callable[[], list[float]]
) -> None:
    runs = []
    for _ in range(2):
        torch.manual_seed(3), random.seed(3), np.random.seed(3)
        steps = [parallel.apply(nn.Linear(1, 1), lambda *_: draw(), torch.zeros(3))[0] for _ in range(4)]
        runs.append(steps)
        assert all(a != b for step in steps for a in step for b in step if a is not b)
    assert runs[0] == runs[1]


def test_replicas_that_draw_nothing_run_together(parallel: DataParallel) -> None:
    barrier = threading.Barrier(3, timeout=20)
    parallel.apply(nn.Linear(1, 1), lambda *_: None, torch.zeros(3), kind="calm")  # the first takes turns
    parallel.apply(nn.Linear(1, 1), lambda *_: torch.rand(1), torch.zeros(3), kind="drawing")
    assert sorted(parallel.apply(nn.Linear(1, 1), lambda *_: barrier.wait(), torch.zeros(3), kind="calm")[0]) == [
        0,
        1,
        2,
    ]


def test_a_recomputation_draws_what_the_forward_drew(parallel: DataParallel) -> None:
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(5)
        layer = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16), nn.Dropout(0.5))

        def run(replica: Replica, share: Share, recompute: bool = recompute) -> Tensor:
            layer: Any = replica.module
            return checkpoint(layer, share.batch, use_reentrant=False) if recompute else layer(share.batch)

        for _ in range(3):
            outputs, samples = parallel.apply(layer, run, torch.ones(9, 16))
            joined(outputs, samples, CPU).sum().backward()
        gradients.append([p.grad for p in layer.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_the_model_keeps_what_replica_0_did(parallel: DataParallel) -> None:
    model = nn.BatchNorm1d(2)

    def run(replica: Replica, share: Share) -> Tensor:
        replica.module.last = replica.number  # type: ignore[assignment]
        return replica.module(share.batch)

    parallel.apply(model, run, torch.randn(6, 2))
    assert model.last == 0 and model.num_batches_tracked == 1


def test_replicas_are_gone_when_the_loss_is(parallel: DataParallel) -> None:
    model, alive = nn.Linear(2, 1), []

    def run(replica: Replica, share: Share) -> Tensor:
        alive.append(weakref.ref(replica.module))
        return replica.module(share.batch)

    gc.disable()  # by their references alone, at once
    try:
        outputs, _ = parallel.apply(model, run, torch.ones(3, 2))
        sum(output.sum() for output in outputs).backward()
        del outputs
        assert len(alive) == 3 and not any(reference() for reference in alive)
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.parametrize("replicas", [1, 3])
def test_replicas_on_gpus_train_as_one_model(replicas: int) -> None:
    """Each on a GPU, or several on one."""
    gpus = [torch.device("cuda", i % torch.cuda.device_count()) for i in range(replicas)]
    parallel = DataParallel(gpus)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double().to(gpus[0])
    x = torch.randn(7, 4, device=gpus[0]).double()
    for _ in range(2):
        outputs, samples = parallel.apply(model, lambda replica, share: replica.module(share.batch), x)
        joined(outputs, samples, gpus[0]).pow(2).mean().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for _ in range(2):
        model(x).pow(2).mean().backward()
    assert all((a - p.grad).abs().max() < 1e-12 for a, p in zip(found, model.parameters(), strict=True))
    parallel.close()


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


def test_a_second_derivative_is_that_of_one_graph(parallel: DataParallel) -> None:
    runs = []
    for through in (lambda model, x: model(x), lambda model, x: forward(parallel, model, x)):
        model, x = net(), torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4).requires_grad_()
        (slope,) = torch.autograd.grad(through(model, x).pow(2).sum(), x, create_graph=True)
        slope.pow(2).sum().backward()
        runs.append([x.grad, *(p.grad for p in model.parameters() if p.grad is not None)])
    for found, expected in zip(*runs, strict=True):
        assert (found - expected).abs().max() < 1e-12


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
