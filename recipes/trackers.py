"""Runs at a tracking server, Weights & Biases or MLflow: a run that is resumed goes on there as the same run.

The server gives a run an id, which is kept in the run's folder. (``logs.py`` has the loggers that write files.)
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import MLFlowLogger, WandbLogger
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from typing_extensions import override

# Lightning makes a client on every rank, and clients that set up one database at the same time fail. Ranks that log
# nothing get this address, which is never connected to.
_UNUSED_SERVER = "http://localhost"

_SERVERS = ("wandb", "mlflow")


class RunAtServer:
    """What is known of a run at its tracking server, in a file of the run's folder: its id, and where it is."""

    def __init__(self, folder: str | Path, server: str) -> None:
        self._path = Path(folder, f"{server}_run.json")
        self.known: dict[str, str] = json.loads(self._path.read_text()) if self._path.exists() else {}

    @rank_zero_only
    def keep(self, **known: str | None) -> None:
        """Keep what the server has told."""
        if known != self.known and all(known.values()):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(known))
            self.known = {key: str(value) for key, value in known.items()}

    @rank_zero_only
    def forget(self) -> None:
        """The folder's next run is another one."""
        self._path.unlink(missing_ok=True)


@rank_zero_only
def forget_runs(folder: Path, checkpoint: str | None) -> None:
    """Unless a run goes on from a checkpoint of its own folder, it is a new one at the servers."""
    if checkpoint is None or not Path(checkpoint).resolve().is_relative_to(folder.resolve()):
        for server in _SERVERS:
            RunAtServer(folder, server).forget()


class ContinuedWandbLogger(WandbLogger):
    """Lightning's logger. A resumed run goes on as the same run at the server."""

    def __init__(self, *, folder: str, **settings: Any) -> None:
        self._kept = RunAtServer(folder, "wandb")
        super().__init__(**{"version": self._kept.known.get("id")} | settings)

    @property
    @override
    def experiment(self) -> Any:
        experiment = super().experiment
        self._kept.keep(id=self.version)
        return experiment


class ContinuedMLFlowLogger(MLFlowLogger):
    """Lightning's logger. A resumed run goes on as the same run at the server.

    Args:
        folder: of the run.
        tracking_uri: of the server. None: where the run is already; or else what ``MLFLOW_TRACKING_URI`` says, or
            MLflow's own default, a database in the current folder. (Lightning's default is a folder, which MLflow no
            longer accepts.)
        **settings: see Lightning's.
    """

    def __init__(self, *, folder: str, tracking_uri: str | None = None, **settings: Any) -> None:
        self._kept = RunAtServer(folder, "mlflow")
        default = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path('mlflow.db').resolve()}"
        self._server = tracking_uri or self._kept.known.get("tracking_uri") or default
        if rank_zero_only.rank != 0:  # type: ignore[attr-defined]
            self._server, self._kept.known = _UNUSED_SERVER, {}
        run_id = self._kept.known.get("run_id")
        self._goes_on = run_id is not None
        super().__init__(tracking_uri=self._server, **{"run_id": run_id} | settings)

    @property
    @override
    def run_id(self) -> str | None:
        run_id = super().run_id
        self._kept.keep(run_id=run_id, tracking_uri=self._server)
        return run_id

    @override
    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        from mlflow.exceptions import MlflowException

        try:
            super().log_hyperparams(params)
        except MlflowException as error:
            if not self._goes_on:
                raise
            rank_zero_warn(f"MLflow keeps the hyperparameters with which the run began. {error}")
