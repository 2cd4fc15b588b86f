"""Runs at a tracking server, Weights & Biases or MLflow: a run that is resumed goes on there as the same run.

The server gives a run an id, which is kept in the run's folder. (``logs.py`` has the loggers that write files.)
"""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import MLFlowLogger, WandbLogger
from lightning_utilities.core.rank_zero import rank_zero_only
from typing_extensions import override

# Lightning makes a client on every rank, and clients that set up one database at the same time fail. Ranks that log
# nothing get this address, which is never connected to.
_UNUSED_SERVER = "http://localhost"

_SERVERS = ("wandb", "mlflow")


class RunId:
    """The id of a run at its tracking server, in a file.

    Args:
        folder: of the run.
        server: its name.

    Attributes:
        path: of the file.
        known: the id; None if the run has none yet.
    """

    def __init__(self, folder: str | Path, server: str) -> None:
        self.path = Path(folder, f"{server}_run.txt")
        self.known = self.path.read_text() if self.path.exists() else None

    @rank_zero_only
    def keep(self, run_id: str | None) -> None:
        """Keep the id that the server has given."""
        if run_id is not None and run_id != self.known:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(run_id)
            self.known = run_id


class ContinuedWandbLogger(WandbLogger):
    """Lightning's logger. A resumed run goes on as the same run at the server."""

    @wraps(WandbLogger.__init__)  # type: ignore[misc]  # its signature, by which configs are checked
    def __init__(self, *, save_dir: str, **settings: Any) -> None:
        self._kept = RunId(save_dir, "wandb")
        super().__init__(save_dir=save_dir, **{"version": self._kept.known} | settings)

    @property
    @override
    def experiment(self) -> Any:
        experiment = super().experiment
        self._kept.keep(self.version)
        return experiment


class ContinuedMLFlowLogger(MLFlowLogger):
    """Lightning's logger. A resumed run goes on as the same run at the server. Without a ``tracking_uri`` MLflow says
    where the server is: Lightning would name a folder, which MLflow no longer accepts."""

    @wraps(MLFlowLogger.__init__)  # type: ignore[misc]
    def __init__(self, *, save_dir: str, tracking_uri: str | None = None, **settings: Any) -> None:
        import mlflow

        self._kept = RunId(save_dir, "mlflow")
        server = tracking_uri or mlflow.get_tracking_uri()
        if rank_zero_only.rank != 0:  # type: ignore[attr-defined]
            server = _UNUSED_SERVER
        super().__init__(save_dir=save_dir, tracking_uri=server, **{"run_id": self._kept.known} | settings)

    @property
    @override
    def run_id(self) -> str | None:
        run_id = super().run_id
        self._kept.keep(run_id)
        return run_id


@rank_zero_only
def forget_runs(folder: Path) -> None:
    """Before a fresh start in a folder: its run gets new ids at the servers."""
    for server in _SERVERS:
        RunId(folder, server).path.unlink(missing_ok=True)
