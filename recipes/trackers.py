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

# Of the ranks that log nothing. Lightning makes a client on each, and clients that set up one database at once fail.
_NEVER_ASKED = "http://localhost"


class RunId:
    """The id of a run at its tracking server, in a file.

    Args:
        folder: of the run.
        server: its name.
    """

    def __init__(self, folder: str | Path, server: str) -> None:
        self._path = Path(folder, f"{server}_run.txt")
        self.known = self._path.read_text() if self._path.exists() else None

    @rank_zero_only
    def keep(self, name: str | None) -> None:
        """Keep the id that the server has given."""
        if name is not None and name != self.known:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(name)
            self.known = name


class ContinuedWandbLogger(WandbLogger):
    """Lightning's, for one run at the server, however often it is resumed."""

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
    """Lightning's, for one run at the server, however often it is resumed. Without a ``tracking_uri`` MLflow says where
    the server is: Lightning would name a folder, which MLflow takes no longer."""

    @wraps(MLFlowLogger.__init__)  # type: ignore[misc]
    def __init__(self, *, save_dir: str, tracking_uri: str | None = None, **settings: Any) -> None:
        import mlflow

        self._kept = RunId(save_dir, "mlflow")
        server = tracking_uri or mlflow.get_tracking_uri()
        if rank_zero_only.rank != 0:  # type: ignore[attr-defined]
            server = _NEVER_ASKED
        super().__init__(save_dir=save_dir, tracking_uri=server, **{"run_id": self._kept.known} | settings)

    @property
    @override
    def run_id(self) -> str | None:
        run_id = super().run_id
        self._kept.keep(run_id)
        return run_id


@rank_zero_only
def forget_runs(folder: Path) -> None:
    """Before a fresh start in a folder: what an earlier run in it was at the server isn't gone on with."""
    for path in folder.glob("*_run.txt"):
        path.unlink(missing_ok=True)
