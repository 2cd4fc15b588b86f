"""A loss that isn't finite is told once, and ends the run on all ranks together, with the same error."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import (
    AsyncPipelineStrategy,
    DataParallelStrategy,
    FiniteLoss,
    FullyShardedStrategy,
    PipelineStrategy,
    TensorParallelStrategy,
)
from tests.thorough import thorough
from tools.workers.pool import WorkerPool

WORLDS = {
    "single": 1, "threads": 1, "ddp": 2, "fully sharded": 2, "tensor": 2, "pipeline": 2, "asynchronous": 2,
    "replicas": 4, "asynchronous replicas": 4,
}  # fmt: skip


class Model(pl.LightningModule):
    """Its loss isn't finite in some batches, on some rank."""

    def __init__(self, wrong: range, value: float = float("nan"), rank: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 2)
        self.wrong, self.value, self.rank = wrong, value, rank
        self.ended = self.updates = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.last(self.second(self.first(x)).tanh()), y)
        now = self.trainer.fit_loop.total_batch_idx in self.wrong
        # Constant: the gradients, and with them the other ranks' and batches' losses, stay finite.
        return loss + self.value if now and self.rank in (None, rank_zero_only.rank) else loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.ended += 1

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.01)
        optimizer.register_step_post_hook(self._count)
        return optimizer

    def _count(self, *args: Any) -> None:
        self.updates += 1


def strategy_of(name: str) -> Any:
    layers = ["first", "second", "last"]
    return {
        "single": lambda: "auto",
        "threads": DataParallelStrategy,
        "ddp": lambda: "ddp",
        "fully sharded": FullyShardedStrategy,
        "tensor": lambda: TensorParallelStrategy(plan={"first": "column", "second": "row"}),
        "pipeline": lambda: PipelineStrategy(microbatches=2, layers=layers),
        "asynchronous": lambda: AsyncPipelineStrategy(microbatches=2, layers=layers),
        "replicas": lambda: PipelineStrategy(stages=2, microbatches=2, layers=layers),
        "asynchronous replicas": lambda: AsyncPipelineStrategy(stages=2, microbatches=2, layers=layers),
    }[name]()


def train(name: str, model: Model, callbacks: list[Callback], **options: Any) -> tuple[int, str | None, list[str]]:
    """The batches that have ended, the error, and the warnings about the loss."""
    devices = 2 if name == "threads" else WORLDS[name]
    trainer = pl.Trainer(
        accelerator="cpu", strategy=strategy_of(name), devices=devices, callbacks=callbacks, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        **{"max_steps": 30, "use_distributed_sampler": False, **options},
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(24, 4, generator=generator), torch.randn(24, 2, generator=generator))
    error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(model, DataLoader(data, batch_size=4))
        except FloatingPointError as caught_error:
            error = str(caught_error)
    said = [str(each.message) for each in caught if "NaN" in str(each.message)]
    return model.ended, error, said


def stop(name: str, first: int, stop_after: int, value: float, rank: int | None, options: dict[str, Any]) -> Any:
    """What :func:`train` returns, and the updates: asynchronous stages drain before they leave."""
    model = Model(range(first, 1000), value, rank)
    return *train(name, model, [FiniteLoss(stop_after)], **options), model.updates


OFTEN = ("single", "ddp", "asynchronous replicas")


@pytest.mark.parametrize("name", [*OFTEN, *thorough(*(name for name in WORLDS if name not in OFTEN))])
def test_all_ranks_end_after_the_same_batch_with_the_same_error(pool: WorkerPool, name: str) -> None:
    world = WORLDS[name]
    ahead = 3 if "asynchronous" in name else 0  # the next look after two batches
    found = pool.run(stop, world, name, 4, 3, float("nan"), None, {}, init=False)
    ended, errors, said, updates = zip(*found, strict=True)
    assert set(ended) == {8 + ahead}  # looks after 3, 6, 9 batches; the error comes before the module's own hook
    assert "asynchronous" not in name or set(updates) == {9 + ahead}
    assert len(set(errors)) == 1
    assert f"for 3 batches in a row, up to step {9 + ahead}. Go on from an earlier checkpoint" in errors[0]
    assert said[0] == ["The loss is NaN or infinite, for the first time at step 5."]
    assert not any(said[1:])


@pytest.mark.parametrize("name", ["ddp", "asynchronous replicas", *thorough("replicas")])
def test_one_rank_s_loss_ends_all(pool: WorkerPool, name: str) -> None:
    """In a pipeline with two replicas, ranks 0 and 1 are the last stages."""
    found = pool.run(stop, WORLDS[name], name, 0, 2, float("inf"), 1, {}, init=False)
    ended, errors, *_ = zip(*found, strict=True)
    assert len(set(ended)) == 1 and ended[0] < 8
    assert len(set(errors)) == 1 and errors[0] is not None


@pytest.mark.parametrize("name", ["single", "asynchronous", *thorough("pipeline")])
def test_batches_count_where_gradients_are_accumulated(pool: WorkerPool, name: str) -> None:
    found = pool.run(stop, WORLDS[name], name, 0, 5, float("nan"), None, {"accumulate_grad_batches": 3}, init=False)
    assert {error is None for _, error, *_ in found} == {False}
    assert {ended for ended, *_ in found} == {4 if name != "asynchronous" else 9}


@pytest.mark.parametrize("name", ["ddp", "asynchronous", *thorough("single", "pipeline")])
def test_the_last_batches_count_too(pool: WorkerPool, name: str) -> None:
    found = pool.run(stop, WORLDS[name], name, 2, 4, float("nan"), None, {"max_steps": 6}, init=False)
    assert all(error is not None and "up to step 6" in error for _, error, *_ in found)
    found = pool.run(stop, WORLDS[name], name, 3, 4, float("nan"), None, {"max_steps": 6}, init=False)
    assert [error for _, error, *_ in found] == [None] * WORLDS[name]
    assert [len(said) for _, _, said, _ in found] == [1] + [0] * (WORLDS[name] - 1)


def interrupted_rows() -> Any:
    """NaN in two batches of three."""
    model = Model(range(0))
    model.wrong = [number for number in range(30) if number % 3]  # type: ignore[assignment]
    return train("single", model, [FiniteLoss(stop_after=3)])


def test_only_batches_in_a_row_count_and_it_is_said_once(pool: WorkerPool) -> None:
    ((ended, error, said),) = pool.run(interrupted_rows, 1, init=False)
    assert (ended, error, len(said)) == (30, None, 1)


def warn_only(name: str) -> Any:
    """The strategy's own callback; it decides nothing together with other ranks."""
    model = Model(range(2, 1000))

    class NoMeetings(Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            def decide(*args: Any, **kwargs: Any) -> bool:
                raise AssertionError("a collective")

            trainer.strategy.reduce_boolean_decision = decide  # type: ignore[method-assign]

    return train(name, model, [NoMeetings()])


@pytest.mark.parametrize("name", ["tensor", "asynchronous", *thorough("threads", "pipeline", "fully sharded")])
def test_the_strategies_bring_along_one_that_only_warns(pool: WorkerPool, name: str) -> None:
    found = pool.run(warn_only, WORLDS[name], name, init=False)
    assert [(ended, error) for ended, error, _ in found] == [(30, None)] * WORLDS[name]
    first = ["The loss is NaN or infinite, for the first time at step 3."]
    assert [said for _, _, said in found] == [first, *[[]] * (WORLDS[name] - 1)]


@pytest.mark.parametrize("stop_after", [0, -1])
def test_a_number_of_batches_is_at_least_one(stop_after: int) -> None:
    with pytest.raises(ValueError, match=f"stop_after={stop_after}: give an integer of at least 1, or None"):
        FiniteLoss(stop_after)
