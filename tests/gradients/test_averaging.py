"""Gradients are summed over ranks, whoever lacks one."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel.gradients.averaging import GradientAverager, summed_over
from lightning_parallel.gradients.clipping import square_of_norm
from tests.strategies.harness import joined, largest_difference, make_trainer, train
from tools.workers.pool import WorkerPool

SHAPES = {"a": (3, 2), "b": (5,), "c": (), "frozen": (4,), "d": (2, 2), "rare": (3,), "never": (2,)}
Gradients = dict[str, Tensor | None]


def parameters() -> dict[str, Tensor]:
    made = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    made["d"] = made["d"].float()  # a bucket of its own
    return {name: p.requires_grad_(name != "frozen") for name, p in made.items()}


def gradient(name: str, rank: int, update: int) -> Tensor | None:
    if name in ("frozen", "never") or (name == "rare" and rank != 1):
        return None
    generator = torch.Generator().manual_seed(ord(name[0]) + 7 * rank)
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64).to(parameters()[name].dtype) + update


def sums() -> list[Gradients]:
    """As over gloo, and as over NCCL, where hosts tell each other which gradients there are."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    trained = {name: parameter for name, parameter in parameters().items() if name != "frozen"}
    ways = None, dist.new_group(range(group.size()))
    return [summed_over(group, trained, {n: gradient(n, rank, i) for n in SHAPES}, way) for i, way in enumerate(ways)]


def test_sums_count_a_missing_gradient_as_zero(pool: WorkerPool) -> None:
    """Averages, in parts too, are compared with one process in ``tests/strategies/test_contract.py``."""
    for results in pool.run(sums, 3):
        for update, totals in enumerate(results):
            assert totals.keys() == SHAPES.keys() - {"frozen"}
            for name, found in totals.items():
                present = [g for rank in range(3) if (g := gradient(name, rank, update)) is not None]
                if not present:
                    assert found is None
                    continue
                assert found is not None and found.shape == SHAPES[name] and found.dtype == present[0].dtype
                assert float((found - torch.stack(present).sum(0)).abs().max()) < (1e-5 if name == "d" else 1e-14)


def test_what_grows_after_it_was_complete_is_refused() -> None:
    trained = {name: torch.zeros(2, requires_grad=True) for name in "ab"}
    averager = GradientAverager(trained, None)  # type: ignore[arg-type]
    with averager.completing(["b"]):
        averager.ready("a", torch.ones(2))  # not yet complete
    with averager.completing(["a"]):
        averager.ready("a", torch.ones(2))
    with pytest.raises(RuntimeError, match="'a' grew twice.*use_reentrant=False"):
        averager.ready("a", torch.ones(2))


def test_a_device_is_not_waited_for_if_no_gradient_is_missing() -> None:
    """The meta device has no values: whatever read one would fail."""
    made = {name: torch.zeros(3, device="meta", requires_grad=True) for name in "abc"}
    gradients: Gradients = {name: torch.ones(3, device="meta") for name in made}
    group: Any = SimpleNamespace(size=lambda: 2)
    with patch.object(dist, "all_reduce", return_value=SimpleNamespace(wait=bool)):
        assert all(total is not None for total in summed_over(group, made, gradients).values())
        with pytest.raises(NotImplementedError):  # another rank may have it
            summed_over(group, made, {**gradients, "b": None})
        hosts: Any = object()  # the other rank's flags are this one's
        sums = summed_over(group, made, {**gradients, "b": None}, hosts)
        assert [name for name, total in sums.items() if total is None] == ["b"]


# -- clipping ----------------------------------------------------------------------------------------------------------


CPU = torch.device("cpu")


def test_a_norm_is_not_rounded_to_the_gradients_dtype() -> None:
    """Else it would depend on how gradients are grouped: 16.0935 would be 16.125."""
    assert square_of_norm([torch.ones(259, dtype=torch.bfloat16)], CPU) == pytest.approx(259)


def test_fully_sharded_stages_are_clipped_by_value_as_one_process(pool: WorkerPool) -> None:
    clipping: dict[str, Any] = {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value", "max_steps": 1}
    options = {"stages": 2, "microbatches": 2, "data_parallel_kind": "fully_shard"}
    # Loose parameters are in no layer, so they stay whole: torch takes such a mix one by one only.
    reports = pool.run(train, 4, "Blocks", "sync", options, init=False, batch_size=4, **clipping)
    whole = pool.run(train, 1, "Blocks", init=False, **clipping)
    assert largest_difference(joined(reports, "weights"), joined(whole, "weights")) < 1e-12


# -- gradients are taken off and put back ------------------------------------------------------------------------------


class Net(L.LightningModule):
    """Counts, in each step, the gradients of the update before that are still there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.last: list[Any] = []
        self.kept: list[int] = []
        self.seen: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.trainer.state.fn == "fit" and self.trainer.fit_loop.epoch_loop.batch_idx >= 0 and self.last:
            self.kept.append(sum(each() is not None for each in self.last))
            self.last = []
        return self.layers(batch).square().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        self.last = [weakref.ref(p.grad) for p in self.layers.parameters() if p.grad is not None]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Looks(Net):
    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen.append(sum(float(p.grad.norm()) for p in self.layers.parameters() if p.grad is not None))


class OwnZeroGrad(torch.optim.SGD):
    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)


class LooksInTheOptimizer(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OwnZeroGrad(self.parameters(), 0.1)


class Callback(L.Callback):
    def on_before_zero_grad(self, *args: Any) -> None:
        pass


class LooksLater(Net):
    """In a callback that comes after the strategy's set-up."""

    def on_train_epoch_start(self) -> None:
        self.trainer.callbacks.append(Callback())


KINDS = [Net, Looks, LooksInTheOptimizer, LooksLater]


def fit(kinds: list[type[Net]], strategy: str) -> list[tuple[list[int], list[float]]]:
    modules = [kind() for kind in kinds]
    for module in modules:
        trainer = make_trainer(strategy, [], {"microbatches": 2}, max_steps=3)
        trainer.fit(module, DataLoader(torch.ones(12, 4), batch_size=4))  # type: ignore[arg-type]
    return [(module.kept, module.seen) for module in modules]


def test_the_last_gradients_are_kept_only_if_somebody_may_look_at_them(pool: WorkerPool) -> None:
    ranks = pool.run(fit, 2, KINDS, "sync", init=False)
    for found in ranks:
        # A weight and a bias in each of two layers.
        assert [kept for kept, _ in found] == [[0, 0], *[[4, 4]] * 3]
    (((_, expected),),) = pool.run(fit, 1, [Looks], "single", init=False)
    parts = zip(*(found[1][1] for found in ranks), strict=True)
    assert [sum(each) for each in parts] == pytest.approx(expected, rel=1e-5)
    assert expected[0] == 0 < expected[1]
