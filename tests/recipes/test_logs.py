"""recipes/logs.py, trackers.py: a run that was killed and resumed has the logs of one that wasn't, and is one run at
its tracking server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning_utilities.core.rank_zero import rank_zero_only
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_parallel import ExactResume, ResumableDataLoader
from recipes.build import loggers
from recipes.logs import ContinuedCSVLogger, ContinuedLogs, read
from recipes.trackers import RunAtServer, forget_runs
from tests.recipes.runs import composed

STEPS, SAVED, KILLED = 12, 6, 9


class Logs(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.layer(batch).sum())

    def train_dataloader(self) -> Any:
        return ResumableDataLoader(torch.arange(12 * 32.0).reshape(12, 32) / 400, batch_size=1)

    val_dataloader = train_dataloader


class Killed(Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == KILLED:
            for logger in trainer.loggers:
                logger.save()  # more than the checkpoint knows of has been written
            raise SystemExit


def fit(folder: Path, loggers: Any, steps: int, *callbacks: Callback, resume: bool = False) -> None:
    keeper = ModelCheckpoint(folder, "saved", every_n_train_steps=min(steps, SAVED), save_top_k=-1)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=steps, logger=loggers, callbacks=[keeper, *callbacks],
        log_every_n_steps=1, val_check_interval=4, limit_val_batches=2, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Logs(), ckpt_path=folder / "saved.ckpt" if resume else None)


def run(folder: Path, *more: Callback, resume: bool = False) -> None:
    torch.manual_seed(0)
    loggers = [ContinuedCSVLogger(folder, "csv", ""), TensorBoardLogger(folder, "tensorboard", "")]
    fit(folder, loggers, STEPS, ExactResume(), ContinuedLogs(), *more, resume=resume)


def rows(folder: Path) -> list[tuple[str, ...]]:
    return [(row["step"], row["loss"], row.get("val", "")) for row in read(folder / "csv")]


def events(folder: Path, name: str) -> list[tuple[int, float]]:
    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(name)]


@pytest.mark.filterwarnings("error:Experiment logs directory")
def test_logs_go_on_where_the_checkpoint_was(tmp_path: Path) -> None:
    run(tmp_path / "whole")
    with pytest.raises(SystemExit):
        run(tmp_path / "twice", Killed())
    assert int(rows(tmp_path / "twice")[-1][0]) == KILLED - 2  # that of the killed batch is logged after it
    run(tmp_path / "twice", resume=True)
    assert rows(tmp_path / "twice") == rows(tmp_path / "whole") and len(rows(tmp_path / "whole")) == STEPS + STEPS // 4
    for name in ("loss", "val"):
        assert events(tmp_path / "twice", name) == events(tmp_path / "whole", name)


def test_a_row_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("loss,step,val\n0.5,0,\n0.25")
    assert read(tmp_path) == [{"loss": "0.5", "step": "0", "val": ""}]
    assert read(tmp_path / "none") == []


def made(folder: Path, *overrides: str) -> Logger:
    """The logger of a config, as each attempt of a run makes it."""
    (logger,) = loggers(composed("strategy=single", *overrides, folder=folder))
    return logger


def client_of(file: Path) -> Any:
    from mlflow import MlflowClient  # takes seconds: only in the worker that needs it

    return MlflowClient(f"sqlite:///{file}")


def of_mlflow(folder: Path) -> Logger:
    return made(folder, "logger=mlflow", f"logger.mlflow.tracking_uri=sqlite:///{folder}/mlflow.db")


def test_a_resumed_run_goes_on_at_mlflow_and_a_fresh_one_begins(tmp_path: Path) -> None:
    fit(tmp_path, of_mlflow(tmp_path), 2)
    resumed = of_mlflow(tmp_path)
    fit(tmp_path, resumed, 3, resume=True)
    forget_runs(tmp_path, None)
    fresh = of_mlflow(tmp_path)
    fit(tmp_path, fresh, 1)

    client = client_of(tmp_path / "mlflow.db")
    experiment = client.get_experiment_by_name("lightning-parallel")
    assert experiment is not None
    runs = {run.info.run_id for run in client.search_runs([experiment.experiment_id])}
    assert runs == {resumed.version, fresh.version}
    assert [row.step for row in client.get_metric_history(resumed.version, "loss")] == [0, 1, 2]
    assert [row.step for row in client.get_metric_history(fresh.version, "loss")] == [0]


def test_the_other_ranks_leave_mlflows_server_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that set up one database at the same time fail."""
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    fit(tmp_path, of_mlflow(tmp_path), 1)
    assert not (tmp_path / "mlflow.db").exists() and not (tmp_path / "mlflow_run.json").exists()


def test_only_a_checkpoint_of_the_folder_itself_goes_on_at_the_server(tmp_path: Path) -> None:
    for checkpoint, goes_on in (("checkpoints/last.ckpt", True), ("../other/last.ckpt", False), (None, False)):
        RunAtServer(tmp_path, "wandb").keep(id="abc")
        (tmp_path / "notes_run.json").write_text("mine")
        forget_runs(tmp_path, None if checkpoint is None else str(tmp_path / checkpoint))
        assert RunAtServer(tmp_path, "wandb").known == ({"id": "abc"} if goes_on else {})
        assert (tmp_path / "notes_run.json").exists()
