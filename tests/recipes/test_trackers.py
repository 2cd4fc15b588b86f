"""recipes/trackers.py: a run is one run at its tracking server, whatever happens to it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import Logger
from lightning_utilities.core.rank_zero import rank_zero_only

from recipes.build import loggers
from recipes.trackers import RunAtServer, forget_runs
from tests.recipes.test_configs import composed


class Logs(BoringModel):
    def training_step(self, *batch: Any) -> Any:
        self.log("loss", torch.ones(()))
        return super().training_step(*batch)


def fit(folder: Path, logger: Logger, steps: int, resume: bool = False) -> None:
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=steps, logger=logger, callbacks=[ModelCheckpoint(folder, "saved")],
        log_every_n_steps=1, limit_val_batches=0, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Logs(), ckpt_path=folder / "saved.ckpt" if resume else None)


def made(folder: Path, *overrides: str) -> Logger:
    """The logger of a config, as each attempt of a run makes it."""
    (logger,) = loggers(composed("strategy=single", *overrides, folder=folder))
    return logger


def client_of(file: Path) -> Any:
    from mlflow import MlflowClient  # takes seconds: only in the worker that needs it

    return MlflowClient(f"sqlite:///{file}")


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store without runs. MLflow needs seconds to make one."""
    file = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    client_of(file).search_experiments()
    return file


@pytest.fixture
def store(empty: Path, tmp_path: Path) -> Path:
    return shutil.copy(empty, tmp_path / "mlflow.db")


def of_mlflow(folder: Path) -> Logger:
    return made(folder, "logger=mlflow", f"logger.mlflow.tracking_uri=sqlite:///{folder}/mlflow.db")


@pytest.mark.usefixtures("store")
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
