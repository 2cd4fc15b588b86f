"""Logs of a run that is resumed: one file, as if the run had never been stopped.

A run that was killed has logged more than its last checkpoint knows of. These rows are cut off, and logged again.
"""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning_utilities.core.rank_zero import rank_zero_only
from typing_extensions import override

from recipes.tables import write_csv

Row = dict[str, Any]


class ContinuedCSVLogger(CSVLogger):
    """Lightning's, which deletes the file that is there, and starts a new one. This one goes on with it."""

    _begun = False

    @property
    @override
    def experiment(self) -> Any:
        if self._begun or rank_zero_only.rank != 0:  # type: ignore[attr-defined]
            return super().experiment
        self._begun = True
        rows = read(Path(self.log_dir))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Experiment logs directory .* exists and is not empty")
            writer = super().experiment
        self._write(writer, rows)
        return writer

    @rank_zero_only
    def go_on_at(self, step: int) -> None:
        """Cut off what an earlier run has logged at this step or later."""
        self._write(self.experiment, [row for row in read(Path(self.log_dir)) if int(row["step"]) < step])

    def _write(self, writer: Any, rows: list[Row]) -> None:
        path = Path(writer.metrics_file_path)
        path.unlink(missing_ok=True)
        writer.metrics_keys = list(rows[0]) if rows else []
        if rows:
            write_csv(path, writer.metrics_keys, rows)


def read(folder: Path) -> list[Row]:
    """The rows of a CSVLogger's file; none if there is no file."""
    path = folder / "metrics.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if (row["step"] or "").isdigit()]  # a kill may cut the last one


class ContinuedLogs(Callback):
    """Writes loggers' rows with each checkpoint, and lets loggers go on where the checkpoint was."""

    reads_weights = False

    def __init__(self) -> None:
        self._begun = False

    @override
    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        for logger in trainer.loggers:
            logger.save()

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begun = False

    @override
    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if self._begun:
            return
        self._begun = True  # only now Lightning knows at which step its loggers are
        step = trainer.fit_loop.epoch_loop.on_save_checkpoint()["_batches_that_stepped"]  # loggers count so
        for logger in trainer.loggers:
            if isinstance(logger, ContinuedCSVLogger):
                logger.go_on_at(step)
            elif isinstance(logger, TensorBoardLogger) and step:
                _purge(logger, step)


@rank_zero_only
def _purge(logger: TensorBoardLogger, step: int) -> None:
    """Let TensorBoard leave out what earlier files of the run have from this step on."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    start = SessionLog(status=SessionLog.START)
    logger.experiment.file_writer.add_event(Event(step=step, session_log=start))
