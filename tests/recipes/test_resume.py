"""recipes/resume.py: a run goes on from its newest whole checkpoint. python -m recipes.convert."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning_utilities.core.rank_zero import rank_zero_only
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_parallel import ExactResume, ResumableDataLoader
from lightning_parallel.checkpoint import read_full
from lightning_parallel.checkpoint.format import save
from recipes import convert, record, resume
from recipes.build import loggers
from recipes.logs import ContinuedCSVLogger, ContinuedLogs, read
from recipes.trackers import RunAtServer, forget_runs
from tests.recipes.runs import composed
from tools.workers.pool import WorkerPool


def config(folder: Path, *, ckpt_path: str | None = None, again: str | None = "auto") -> dict[str, Any]:
    callbacks = {"checkpoint": {"_target_": "...ModelCheckpoint"}, "progress_bar": {"_target_": "...TQDMProgressBar"}}
    return {
        "ckpt_path": ckpt_path, "resume": again, "callbacks": callbacks, "paths": {"output_dir": str(folder)}
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files and a directory; the newest one is half a file, the directory lacks the tensors' index."""
    saved = tmp_path / "checkpoints"
    saved.mkdir()
    for age, name in enumerate(["half.ckpt", "new.ckpt", "old.ckpt"]):
        torch.save({"state_dict": torch.ones(100)}, saved / name)
        os.utime(saved / name, (1000 - age, 1000 - age))
    content = (saved / "half.ckpt").read_bytes()
    (saved / "half.ckpt").write_bytes(content[: len(content) // 2])
    (saved / "part.ckpt").mkdir()
    (saved / "part.ckpt" / "trainer.pt").touch()
    return tmp_path


def test_a_run_that_begins_leaves_an_earlier_one_in_its_folder_alone(folder: Path) -> None:
    assert resume.would_overwrite(config(folder, again=None)) and not resume.would_overwrite(config(folder))
    assert not resume.would_overwrite(config(folder, ckpt_path="last", again=None))
    shutil.rmtree(folder / "checkpoints")
    assert not resume.would_overwrite(config(folder, again=None))
    (folder / record.RUN).write_text('{"status": "completed"}')  # without checkpoints it has logs
    assert resume.would_overwrite(config(folder, again=None))


def test_the_newest_whole_checkpoint_is_found_and_a_damaged_newer_one_warned_of(folder: Path) -> None:
    with pytest.warns(UserWarning, match=r"Not whole, so it goes on from .*/new\.ckpt: .*/half\.ckpt.*/part\.ckpt\.$"):
        assert resume.chosen(config(folder)) == str(folder / "checkpoints" / "new.ckpt")
    (folder / "checkpoints" / "new.ckpt").unlink()
    (folder / "checkpoints" / "old.ckpt").unlink()
    with pytest.warns(UserWarning, match="goes on afresh: "):
        assert resume.chosen(config(folder)) is None


def test_last_is_the_same_a_path_is_itself_and_weights_alone_are_not_enough(folder: Path) -> None:
    assert resume.chosen(config(folder, ckpt_path="last", again=None)) == str(folder / "checkpoints" / "new.ckpt")
    assert resume.chosen(config(folder, ckpt_path="first.ckpt", again=None)) == "first.ckpt"
    assert resume.chosen(config(folder, again=None)) is None
    settings = config(folder)
    settings["callbacks"]["checkpoint"]["save_weights_only"] = True
    assert resume.chosen(settings) is None
    settings["callbacks"]["another"] = {"_target_": "...ModelCheckpoint", "dirpath": str(folder / "checkpoints")}
    assert resume.chosen(settings) == str(folder / "checkpoints" / "new.ckpt")
    shutil.rmtree(folder / "checkpoints")  # then it starts with ckpt_path
    assert resume.chosen(config(folder)) is None
    assert resume.chosen(config(folder, ckpt_path="first.ckpt")) == "first.ckpt"


def start(paths: list[str | None], steps: list[int]) -> str:
    """What a rank says whose own checkpoint is another one."""
    rank, trainer, model = dist.get_rank(), SimpleNamespace(), BoringModel()
    same = resume.SameStart(paths[rank])
    try:
        same.setup(trainer, model, "fit")  # type: ignore[arg-type]
        same.on_load_checkpoint(trainer, model, {"global_step": steps[rank]})  # type: ignore[arg-type]
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_would_go_on_from_different_checkpoints_end_the_run(pool: WorkerPool) -> None:
    assert pool.run(start, 3, ["a", "a", "a"], [4, 4, 4]) == [""] * 3
    (said,) = set(pool.run(start, 3, ["a", "a", None], [4, 4, 0]))
    assert said.startswith("rank 0 begins with checkpoint a, rank 2 with None: the run's folder")
    (said,) = set(pool.run(start, 3, ["a", "a", "a"], [4, 2, 4]))
    assert said.startswith("rank 0 begins with step 4, rank 1 with 2")


WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3)}


def test_a_checkpoint_is_converted_or_what_is_wrong_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, plain = tmp_path / "last.ckpt", tmp_path / "plain.ckpt"
    save(checkpoint, model=WEIGHTS, optimizers=[], trainer={}, rank_state={}, coordinate="pp0.dp0.tp0")
    convert.main([str(checkpoint), str(plain)])
    assert capsys.readouterr().out.strip() == str(plain)
    assert torch.equal(read_full(plain)["a"], WEIGHTS["a"])
    (checkpoint / "trainer.pt").write_bytes(b"")
    with pytest.raises(SystemExit, match=r"last.ckpt/trainer.pt is damaged: [^\n]*$"):
        convert.main([str(checkpoint), str(plain)])
    with pytest.raises(SystemExit, match=r"There is no checkpoint at [^\n]*$"):
        convert.main([str(tmp_path / "other.ckpt"), str(plain)])


# -- its logs, and its run at a tracking server ------------------------------------------------------------------------


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


@pytest.fixture
def of_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Logger]:
    """Makes a run's logger, as each attempt does. It writes files, since MLflow takes seconds to set up a database."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    words = ["strategy=single", "logger=mlflow", f"logger.mlflow.tracking_uri={tmp_path}/server"]
    return lambda: loggers(composed(*words, folder=tmp_path))[0]


def test_a_resumed_run_goes_on_at_mlflow_and_a_fresh_one_begins(
    tmp_path: Path, of_mlflow: Callable[[], Logger]
) -> None:
    from mlflow import MlflowClient  # takes seconds: only in the worker that needs it

    fit(tmp_path, of_mlflow(), 2)
    resumed = of_mlflow()
    fit(tmp_path, resumed, 3, resume=True)
    forget_runs(tmp_path, None)
    fresh = of_mlflow()
    fit(tmp_path, fresh, 1)
    client = MlflowClient(str(tmp_path / "server"))
    experiment = client.get_experiment_by_name("lightning-parallel")
    assert experiment is not None
    runs = {run.info.run_id for run in client.search_runs([experiment.experiment_id])}
    assert runs == {resumed.version, fresh.version}
    assert [row.step for row in client.get_metric_history(resumed.version, "loss")] == [0, 1, 2]
    assert [row.step for row in client.get_metric_history(fresh.version, "loss")] == [0]


def test_the_other_ranks_leave_mlflows_server_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_mlflow: Callable[[], Logger]
) -> None:
    """Clients that set up one database at the same time fail."""
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    fit(tmp_path, of_mlflow(), 1)
    assert not (tmp_path / "server").exists() and not (tmp_path / "mlflow_run.json").exists()


def test_only_a_checkpoint_of_the_folder_itself_goes_on_at_the_server(tmp_path: Path) -> None:
    for checkpoint, goes_on in (("checkpoints/last.ckpt", True), ("../other/last.ckpt", False), (None, False)):
        RunAtServer(tmp_path, "wandb").keep(id="abc")
        (tmp_path / "notes_run.json").write_text("mine")
        forget_runs(tmp_path, None if checkpoint is None else str(tmp_path / checkpoint))
        assert RunAtServer(tmp_path, "wandb").known == ({"id": "abc"} if goes_on else {})
        assert (tmp_path / "notes_run.json").exists()
