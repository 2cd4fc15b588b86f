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
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from tests.strategies.observed import Net, Observed, Reader, loader, make_trainer
from tests.thorough import thorough
from tools.workers.pool import WorkerPool

EXACT = 1e-6  # float32
STAGES = {"sync": 2, "async": 3}
BOTH = pytest.mark.parametrize("strategy", ["sync", "async"])


# -- what callbacks read -------------------------------------------------------------------------------------


def observe(strategy: str, moves: bool, **options: Any) -> dict[str, Any]:
    """Fit, validate, test and predict: all that the trainer tells of metrics on the way."""
    reader = Reader(every_step=moves)  # an asynchronous stage learns of the loss where the pipeline drains
    trainer = make_trainer(strategy, [reader], **options)
    module, validation = Observed(moves), loader(8, 4, 5)
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


@pytest.fixture(scope="module")
def single(pool: WorkerPool) -> Any:
    """Runs of one process to compare with, each made once."""
    runs: dict[str, Any] = {}

    def get(fn: Any, *args: Any, **options: Any) -> Any:
        key = repr((fn.__name__, args, sorted(options.items())))
        if key not in runs:
            runs[key] = pool.run(fn, 1, "single", *args, init=False, **options)[0]
        return runs[key]

    return get


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


PLAIN: dict[str, Any] = {}
MID_EPOCH = {"val_check_interval": 2, "num_sanity_val_steps": 2}
LIMITS = {"limit_train_batches": 2, "limit_val_batches": 1, "max_epochs": 1, "num_sanity_val_steps": 1}
ACCUMULATION = {"max_steps": 4, "max_epochs": -1, "accumulate_grad_batches": 2, "val_check_interval": 1}
ENDS_MID_EPOCH = {"max_steps": 4, "max_epochs": -1, "check_val_every_n_epoch": 2}
TRIAL = {"fast_dev_run": True}


@pytest.mark.parametrize(("strategy", "options"), [
    ("sync", LIMITS), ("sync", ACCUMULATION), ("sync", ENDS_MID_EPOCH), ("async", MID_EPOCH),
    *thorough(("async", TRIAL), ("sync", PLAIN), ("sync", MID_EPOCH), ("async", PLAIN), ("async", ENDS_MID_EPOCH)),
])  # fmt: skip
def test_every_rank_reads_what_a_single_process_reads(
    pool: WorkerPool, single: Any, strategy: str, options: dict[str, Any]
) -> None:
    moves = strategy == "sync"
    expected = single(observe, moves, **options)
    for rank, found in enumerate(pool.run(observe, STAGES[strategy], strategy, moves, init=False, **options)):
        predictions = found.pop("predict")
        assert_same(found, {what: value for what, value in expected.items() if what != "predict"}, f"rank {rank}")
        if rank == 0:  # where Lightning's users look for them; the other stages have none
            assert_same(predictions, expected["predict"])
        else:
            assert all(prediction is None for prediction in predictions)


class LogsGradients(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", sum(float(p.grad.norm()) for p in self.parameters() if p.grad is not None))


def keep_by_gradients(strategy: str, directory: Path) -> Any:
    keeper = ModelCheckpoint(directory, "{step}", monitor="norm", every_n_train_steps=1, save_top_k=2)
    make_trainer(strategy, [keeper], enable_checkpointing=True).fit(LogsGradients(), loader(24))
    return {Path(path).name: float(score) for path, score in keeper.best_k_models.items()}


@BOTH
def test_ranks_agree_on_a_metric_that_each_computes_of_its_own_parameters(
    pool: WorkerPool, tmp_path: Path, strategy: str
) -> None:
    last, *others = pool.run(keep_by_gradients, 3, strategy, tmp_path, init=False, timeout=30)
    assert len(last) == 2
    assert others == [last, last]


class UsesOutputs(Net):
    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits, loss = self.logits_and_loss(batch)
        return {"loss": loss, "logits": logits.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs[self.key].isfinite().all()


def use_outputs(strategy: str, key: str) -> str:
    make_trainer(strategy, []).fit(UsesOutputs(key), loader())
    return "went on"


@BOTH
def test_on_train_batch_end_has_the_loss_on_every_stage_and_says_that_it_has_no_more(
    pool: WorkerPool, strategy: str
) -> None:
    assert pool.run(use_outputs, 2, strategy, "loss", init=False) == ["went on"] * 2
    other = pool.run(use_outputs, 2, strategy, "logits", init=False, expect_errors=True, timeout=30)[1]
    assert "RuntimeError: on_train_batch_end looks at 'logits'" in other
    assert "exists on the last pipeline stage only" in other


# -- checkpoints, early stopping, schedulers -----------------------------------------------------------------


def keep_best(strategy: str, moves: bool, directory: Path, **options: Any) -> Any:
    """What a checkpoint callback decided, without its directory."""
    keeper = ModelCheckpoint(directory, auto_insert_metric_name=False, **options)
    trainer = make_trainer(strategy, [keeper], enable_checkpointing=True, max_epochs=3)
    trainer.fit(Observed(moves), loader(16), loader(8, 4, 5))
    kept = {Path(path).name: float(score) for path, score in keeper.best_k_models.items()}
    return Path(keeper.best_model_path).name, kept, float(keeper.best_model_score or 0), trainer.global_step


MONITORS: dict[str, dict[str, Any]] = {
    "val_trend": {"mode": "max", "save_top_k": 2, "filename": "{epoch}-{step}-{val_trend:.3f}"},
    "val_acc": {"mode": "max", "filename": "{step}-{train_loss_epoch:.3f}-{val_best:.3f}"},
    "train_loss_step": {"every_n_train_steps": 3, "save_top_k": 2, "filename": "{step}-{train_acc:.3f}"},
    "batch_end": {"every_n_train_steps": 2, "mode": "max", "filename": "{step}-{batch_end:.1f}"},
    "train_mean_by_hand": {"save_on_train_epoch_end": True, "filename": "{epoch}-{train_mean_by_hand:.3f}"},
}


@pytest.mark.parametrize(("strategy", "monitor"), [
    ("sync", "val_trend"), ("async", "train_loss_step"),
    *thorough(
        ("sync", "batch_end"), ("async", "val_acc"),
        ("sync", "train_loss_step"), ("sync", "train_mean_by_hand"), ("async", "val_trend"),
        ("async", "train_mean_by_hand"),
    ),
])  # fmt: skip
def test_checkpoints_are_kept_by_the_metrics_of_a_single_process(
    pool: WorkerPool, single: Any, tmp_path: Path, strategy: str, monitor: str
) -> None:
    moves, options = strategy == "sync", {"monitor": monitor, **MONITORS[monitor]}
    expected = single(keep_best, moves, tmp_path / "single", **options)
    assert expected[1], "the callback kept something"
    found = pool.run(keep_best, STAGES[strategy], strategy, moves, tmp_path / "many", init=False, **options)
    for rank, decided in enumerate(found):
        assert_same(decided, expected, f"rank {rank}")
    assert {path.name for path in (tmp_path / "many").iterdir()} == set(expected[1])


class Worsens(Net):
    """Validation gets better for two epochs, then worse."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_score", self.logits_and_loss(batch)[1] * 0 + abs(self.current_epoch - 2))


def stop_early(strategy: str, moves: bool, patience: int, **options: Any) -> Any:
    stopper = EarlyStopping("val_score", patience=patience)
    trainer = make_trainer(strategy, [stopper], max_epochs=20, **options)
    trainer.fit(Worsens(moves), loader(), loader(8, 4, 5))
    return trainer.global_step, stopper.stopped_epoch, stopper.wait_count, float(stopper.best_score)


@pytest.mark.parametrize(("strategy", "options"), [("sync", {"val_check_interval": 2}), ("async", {})])
def test_early_stopping_ends_all_ranks_at_the_step_of_a_single_process(
    pool: WorkerPool, single: Any, strategy: str, options: dict[str, Any]
) -> None:
    moves = strategy == "sync"
    expected = single(stop_early, moves, 2, **options)
    assert 0 < expected[0] < 60
    assert pool.run(stop_early, STAGES[strategy], strategy, moves, 2, init=False, **options) == (
        [expected] * STAGES[strategy]
    )


class OnPlateau(Net):
    """The learning rate falls when a metric no longer does."""

    def __init__(self, moves: bool, monitor: str, interval: str) -> None:
        super().__init__(moves)
        self.monitor, self.interval = monitor, interval

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_level", loss * 0 + batch_idx // 2, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_level", self.logits_and_loss(batch)[1] * 0 + 1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
        config = {"scheduler": plateau, "monitor": self.monitor, "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": config | ({"frequency": 2} if self.interval == "step" else {})}


class Rates(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])


def on_plateau(strategy: str, moves: bool, monitor: str, interval: str) -> list[float]:
    rates = Rates()
    trainer = make_trainer(strategy, [rates], max_epochs=4)
    trainer.fit(OnPlateau(moves, monitor, interval), loader(24), loader(8, 4, 5))
    return rates.seen


@pytest.mark.parametrize(("strategy", "monitor", "interval"), [
    ("sync", "val_level", "epoch"), ("async", "val_level", "epoch"), ("sync", "train_level_step", "step"),
    *thorough(("async", "train_level_step", "step"), ("sync", "train_level_epoch", "epoch")),
])  # fmt: skip
def test_a_plateau_lowers_the_rate_on_every_rank_at_the_same_step(
    pool: WorkerPool, single: Any, strategy: str, monitor: str, interval: str
) -> None:
    moves = strategy == "sync"
    expected = single(on_plateau, moves, monitor, interval)
    assert expected[-1] < expected[0]
    ranks = pool.run(on_plateau, STAGES[strategy], strategy, moves, monitor, interval, init=False)
    assert ranks == [expected] * STAGES[strategy]


# -- loggers -------------------------------------------------------------------------------------------------


class Scheduled(Observed):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


def log_to_files(strategy: str, moves: bool, directory: Path) -> None:
    loggers = [CSVLogger(directory, "csv", version=0), TensorBoardLogger(str(directory), "tensorboard", version=0)]
    trainer = make_trainer(
        strategy, [LearningRateMonitor("step")], logger=loggers, log_every_n_steps=2, max_epochs=2, val_check_interval=2
    )
    module = Scheduled(moves)
    trainer.fit(module, loader(), loader(8, 4, 5))
    trainer.test(module, loader(8, 4, 6), verbose=False)


def read_csv(directory: Path) -> list[dict[str, float]]:
    with (directory / "csv" / "version_0" / "metrics.csv").open() as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


def read_tensorboard(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard" / "version_0"))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@BOTH
def test_loggers_write_once_what_a_single_process_writes(
    pool: WorkerPool, single: Any, tmp_path: Path, strategy: str
) -> None:
    moves = strategy == "sync"
    one, many = tmp_path / "one", tmp_path / "many"
    pool.run(log_to_files, 1, "single", moves, one, init=False)
    pool.run(log_to_files, STAGES[strategy], strategy, moves, many, init=False)
    rows = read_csv(one)
    assert {"lr-SGD", "train_loss_step", "train_loss_epoch", "val_acc", "train_acc_by_hand", "test_mean"} <= {
        name for row in rows for name in row
    }
    assert_same(read_csv(many), rows)
    assert_same(read_tensorboard(many), read_tensorboard(one))
    for directory in (one, many):  # fit's and test's, if they are two, and no other rank's
        assert len(list((directory / "tensorboard" / "version_0").glob("events*"))) <= 2
        assert sorted(path.name for path in (directory / "csv").iterdir()) == ["version_0"]
