"""Logging and callbacks are those of a single process, on every rank.

An asynchronous run has other weights than a single process, so other values; here its gradients are zero, and with them
the difference: what is left to compare is where the values went.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from tests.strategies.failures import LIMIT, assert_lost, assert_refused
from tests.strategies.observed import Net, Observed, Reader, fit, loader, make_trainer
from tests.thorough import thorough
from tools.workers.pool import WorkerPool

EXACT = 1e-6  # float32
STAGES = {"sync": 2, "async": 3}


# -- what callbacks read -------------------------------------------------------------------------------------


class Scheduled(Observed):
    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        _ = self.trainer.log_dir  # which Lightning sends to all ranks, where only the last stage is

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


def observe(strategy: str, moves: bool, folder: Path, **options: Any) -> dict[str, Any]:
    """Fit, validate, test and predict: all that the trainer tells of metrics on the way, and writes to a logger."""
    reader = Reader(every_step=moves)  # an asynchronous stage learns of the loss where the pipeline drains
    logger = CSVLogger(folder, "csv", version=0)
    callbacks = [reader, LearningRateMonitor("step")]
    trainer = make_trainer(strategy, callbacks, logger=logger, log_every_n_steps=2, **options)
    module, validation = Scheduled(moves), loader(8, 4, 5)
    trainer.fit(module, loader(), validation)
    progress_bar = dict(trainer.progress_bar_metrics)
    return {
        "seen": reader.seen,
        "steps": (trainer.global_step, trainer.current_epoch),
        "progress bar": progress_bar,
        "validate": trainer.validate(module, validation, verbose=False),
        "test": trainer.test(module, loader(8, 4, 6), verbose=False),
        "predict": trainer.predict(module, loader(8, 4, 6)),
        "logged": {name: float(value) for name, value in trainer.logged_metrics.items()},
    }


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    """Nested dicts and lists: the same keys in any order, values equal but for rounding."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), f"{where}: {sorted(found.keys() ^ expected.keys())}"
        for key, value in expected.items():
            assert_same(found[key], value, f"{where} {key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), f"{where}: {len(found)} instead of {len(expected)}"
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_same(a, b, f"{where} {i}")
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=EXACT)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=0, abs=EXACT), where
    else:
        assert found == expected, where


def read_csv(folder: Path) -> list[dict[str, float]]:
    with (folder / "csv" / "version_0" / "metrics.csv").open() as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


# The run ends in the middle of an epoch.
ACCUMULATION = {
    "max_steps": 3, "max_epochs": -1, "accumulate_grad_batches": 2, "val_check_interval": 1, "limit_val_batches": 1,
}  # fmt: skip
MID_EPOCH = {"val_check_interval": 2, "num_sanity_val_steps": 2}


@pytest.mark.parametrize(("strategy", "options"), [
    ("sync", ACCUMULATION), ("async", MID_EPOCH), *thorough(("sync", MID_EPOCH)),
])  # fmt: skip
def test_every_rank_reads_what_a_single_process_reads(
    pool: WorkerPool, tmp_path: Path, strategy: str, options: dict[str, Any]
) -> None:
    moves, one, many = strategy == "sync", tmp_path / "one", tmp_path / "many"
    (expected,) = pool.run(observe, 1, "single", moves, one, init=False, **options)
    for rank, found in enumerate(pool.run(observe, STAGES[strategy], strategy, moves, many, init=False, **options)):
        predictions = found.pop("predict")
        assert_same(found, {what: value for what, value in expected.items() if what != "predict"}, f"rank {rank}")
        if rank == 0:  # where Lightning's users look for them; the other stages have none
            assert_same(predictions, expected["predict"])
        else:
            assert all(prediction is None for prediction in predictions)
    rows = read_csv(one)
    assert {"lr-SGD", "train_loss_step", "val_acc", "test_mean"} <= {name for row in rows for name in row}
    assert_same(read_csv(many), rows)
    assert [path.name for path in (many / "csv").iterdir()] == ["version_0"]  # and no other rank's


# -- checkpoints, early stopping, schedulers -----------------------------------------------------------------


class Decided(Observed):
    """Its validation gets better for an epoch, then worse; the learning rate falls with another metric of it."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_score", abs(self.current_epoch - 1.0))
        self.log("val_level", self.logits_and_loss(batch)[1] * 0 + 1)
        return super().validation_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_level"}}


class ByStep(Decided):
    """The learning rate falls in the middle of an epoch, by what the step logs."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("train_level", self.logits_and_loss(batch)[1] * 0 + batch_idx // 2, on_step=True)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        made["lr_scheduler"] |= {"monitor": "train_level", "interval": "step", "frequency": 2}
        return made


class LogsGradients(Decided):
    """Each rank logs a metric of its own parameters, on which they have to agree."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", sum(float(p.grad.norm()) for p in self.parameters() if p.grad is not None))


class Rates(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])


def decide(
    strategy: str, moves: bool, kind: type[Decided], directory: Path, batches: float = 1.0, **options: Any
) -> Any:
    """What callbacks and a scheduler decided by metrics, without the directory."""
    keeper = ModelCheckpoint(directory, auto_insert_metric_name=False, **options)
    stopper, rates = EarlyStopping("val_score", patience=2), Rates()
    given = {"enable_checkpointing": True, "max_epochs": 8, "limit_train_batches": batches}
    trainer = make_trainer(strategy, [keeper, stopper, rates], **given)
    trainer.fit(kind(moves), loader(16), loader(8, 4, 5))
    kept = {Path(path).name: float(score) for path, score in keeper.best_k_models.items()}
    stopped = trainer.global_step, stopper.stopped_epoch, float(stopper.best_score or 0)
    return Path(keeper.best_model_path).name, kept, float(keeper.best_model_score or 0), stopped, rates.seen


@pytest.mark.parametrize(("strategy", "kind", "options"), [
    ("sync", Decided, {"monitor": "val_trend", "mode": "max", "save_top_k": 2, "filename": "{step}-{val_trend:.3f}"}),
    ("sync", ByStep, {"monitor": "train_mean_by_hand", "save_on_train_epoch_end": True, "filename": "{epoch}"}),
    ("async", Decided, {"monitor": "train_loss_step", "every_n_train_steps": 3, "filename": "{step}-{train_acc:.3f}"}),
    *((name, LogsGradients, {"monitor": "norm", "every_n_train_steps": 1, "save_top_k": 2, "batches": 1})
      for name in STAGES),
])  # fmt: skip
def test_callbacks_and_schedulers_decide_on_every_rank_as_in_a_single_process(
    pool: WorkerPool, tmp_path: Path, strategy: str, kind: type[Decided], options: dict[str, Any]
) -> None:
    moves = strategy == "sync" or kind is LogsGradients
    found = pool.run(decide, STAGES[strategy], strategy, moves, kind, tmp_path / "many", init=False, **options)
    single = decide, 1, "single", moves, kind, tmp_path / "single"
    expected = found[0] if kind is LogsGradients else pool.run(*single, init=False, **options)[0]
    _, kept, _, (steps, *_), rates = expected
    assert kept and 0 < steps < 8 * 4 and rates[-1] < rates[0]
    for rank, decided in enumerate(found):
        assert_same(decided, expected, f"rank {rank}")
    assert {path.name for path in (tmp_path / "many").iterdir()} == {*kept}


# -- code that runs on the last stage alone meets nobody ---------------------------------------------------------------


class Saves(Net):
    """Saves where other ranks never come."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.trainer.save_checkpoint("here.ckpt")
        return loss


class SavesLater(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.logits_and_loss(batch)

    def on_validation_epoch_end(self) -> None:
        self.trainer.save_checkpoint("here.ckpt")


@pytest.mark.parametrize(("strategy", "kind", "place"), [
    ("sync", Saves, "training_step"), ("async", SavesLater, "on_validation_epoch_end"),
])  # fmt: skip
def test_a_checkpoint_where_not_all_ranks_meet_is_refused(
    pool: WorkerPool, strategy: str, kind: type[Net], place: str
) -> None:
    given = {"validates": True, "init": False, "expect_errors": True, "timeout": LIMIT}
    last, *others = pool.run(fit, 2, kind, strategy, **given)
    assert_refused([last], "RuntimeError", ["A checkpoint needs every rank", place, "callback"])
    assert_lost(others)


# -- what callbacks are given ------------------------------------------------------------------------------------------


class Returns(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits, loss = self.logits_and_loss(batch)
        correct = (logits.argmax(-1) == batch[1]).double()
        return {
            "loss": loss.reshape(1),
            "logits": logits,
            "both": (correct.mean(), correct),
            "batch": batch_idx,
            "none": None,
        }


class Keeps(Callback):
    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *args: Any) -> None:
        self.outputs.append(outputs)


def outputs_of(strategy: str) -> list[Any]:
    torch.set_default_dtype(torch.float64)
    keeps = Keeps()
    options = {"microbatches": 3}  # of 2, 1 and 1 samples
    make_trainer(strategy, [keeps], options, max_epochs=1).fit(Returns(moves=False), loader())
    return keeps.outputs


def test_the_output_of_training_step_is_that_of_the_whole_batch(pool: WorkerPool) -> None:
    (expected,) = pool.run(outputs_of, 1, "single", init=False)
    assert len(expected) == 3
    for strategy in ("sync", "async"):
        for mine, whole in zip(pool.run(outputs_of, 2, strategy, init=False)[0], expected, strict=True):
            assert not mine["loss"].requires_grad
            mine["loss"] = mine["loss"].reshape(1)
            assert_same(mine, whole, strategy)
