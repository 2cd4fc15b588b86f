"""The four steps together, in a plain PyTorch loop."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_parallel.threaded_replicas.data_parallel import DataParallel
from lightning_parallel.threaded_replicas.join import joined
from lightning_parallel.threaded_replicas.replicate import Replica
from lightning_parallel.threaded_replicas.scatter import Share

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


class Marked(torch.autograd.Function):
    """Notes when its backward begins and ends."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, events: list[Any], replica: int) -> Tensor:
        ctx.events, ctx.replica = events, replica
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.events.append(("begin", ctx.replica))
        time.sleep(0.02 * (3 - ctx.replica))
        ctx.events.append(("end", ctx.replica))
        return gradients[0], None, None


def test_the_backward_of_replicas_that_drew_takes_turns(parallel: DataParallel) -> None:
    events: list[Any] = []

    def run(replica: Replica, share: Share) -> Tensor:
        return Marked.apply(replica.module(share.batch) * torch.rand(1), events, replica.number)

    outputs, _ = parallel.apply(nn.Linear(2, 1), run, torch.ones(3, 2))
    sum(output.sum() for output in outputs).backward()
    assert events == [(what, replica) for replica in range(3) for what in ("begin", "end")]


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
