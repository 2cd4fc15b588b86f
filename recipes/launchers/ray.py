"""Workers placed by Ray, on this machine or on a cluster of Ray's. What each does: :mod:`recipes.launchers.ray_worker`.

Ray Train starts all workers anew when one has failed, if need be on other machines, and they go on from the newest
checkpoint in the run's folder. It is to be on storage that all machines share, as the checkout is.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_parallel.settings import Natural
from recipes import record
from recipes.launchers.cause import first_failure
from recipes.launchers.cluster import Cluster
from recipes.launchers.launcher import Failure, Preempted, WorkersFailed

if TYPE_CHECKING:
    from ray.train import TrainingFailedError
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    from recipes.launchers.ray_worker import Work

log = logging.getLogger(__name__)

_STATE = "ray"  # a folder in the run's: what Ray keeps of it
_PREEMPTING = (signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True, kw_only=True)
class RayLauncher(Cluster):
    """Lets Ray start the workers, and start them again.

    Args:
        address: of a cluster of Ray's, as ``ray.init`` takes it, such as ``"auto"``; None: RAY_ADDRESS, or else Ray is
            started on this machine for as long as the run.
        gpus: of each worker; None: one where the backend is nccl.
        resources: more that each worker needs, by Ray's names, such as ``{"memory": 64e9}``.
    """

    address: str | None = None
    gpus: Natural | None = None
    resources: dict[str, float] | None = None

    def launch(self, config_file: Path, processes: int) -> None:
        """As :meth:`Launcher.launch <recipes.launchers.launcher.Launcher.launch>`."""
        from ray.train import TrainingFailedError

        from recipes.launchers.ray_worker import LEAVE, Work

        folder = config_file.parent
        leave = folder / LEAVE
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(self.threads))}  # Ray sets its own
        work = Work(config_file.absolute(), self.nodes, self.devices, {**self.variables, **threads}, Path.cwd())
        leave.unlink(missing_ok=True)
        with self._ray(processes), _told_by(leave):
            try:
                _wait_for(self._trainer(work, processes))
            except TrainingFailedError as error:
                if not leave.exists():  # else one has lost its connection to another that left
                    raise WorkersFailed(_first(error, folder), processes) from None
        status = record.read(folder)["status"]
        if status == "failed":  # refused
            raise WorkersFailed(first_failure(folder) or Failure(0, "failed", None), processes)
        if status != "completed":
            raise Preempted

    @contextmanager
    def _ray(self, processes: int) -> Iterator[None]:
        """A connection to Ray, whose end ends what the run has there."""
        import ray

        elsewhere = self.address or os.environ.get("RAY_ADDRESS")
        # On this machine alone there is no more room to wait for.
        room = None if elsewhere else max(processes * self.threads, os.cpu_count() or 1)
        handlers = {number: signal.getsignal(number) for number in (*_PREEMPTING, signal.SIGINT)}
        runtime = {"env_vars": self.variables, "worker_process_setup_hook": "recipes.launchers.ray_worker.quiet"}
        try:
            ray.init(elsewhere or "local", runtime_env=runtime, logging_level=logging.WARNING, num_cpus=room)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise WorkersFailed(Failure(0, f"Ray at {elsewhere or 'this machine'}: {error}", None), processes) from None
        try:
            for name, each in self._needed.items():
                there = ray.cluster_resources().get(name, 0)
                if processes * each > there:  # it may grow
                    log.warning("waits until Ray has %g of %s; it has %g", processes * each, name, there)
            yield
        finally:
            ray.shutdown()
            for number, handler in handlers.items():
                signal.signal(number, handler)  # Ray sets its own

    @property
    def _needed(self) -> dict[str, float]:
        """By each worker, by Ray's names."""
        gpus = self.gpus if self.gpus is not None else int(self.backend == "nccl")
        return {"CPU": self.threads, **({"GPU": gpus} if gpus else {}), **(self.resources or {})}

    def _trainer(self, work: Work, processes: int) -> DataParallelTrainer:
        from ray.train.v2.api.config import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

        from recipes.launchers import ray_worker

        run_config: Any = RunConfig(  # the trainer's annotation is of Ray's earlier version
            name=_STATE,
            storage_path=str(work.config_file.parent),
            failure_config=FailureConfig(max_failures=self.max_restarts),
            logging_config=LoggingConfig(log_level="ERROR"),
        )
        return DataParallelTrainer(
            lambda: ray_worker.run(work),
            backend_config=ray_worker.Processes(),
            scaling_config=ScalingConfig(
                num_workers=processes, use_gpu="GPU" in self._needed, resources_per_worker=self._needed
            ),
            run_config=run_config,
        )


@contextmanager
def _told_by(leave: Path) -> Iterator[None]:
    """A scheduler's signal to this process reaches the workers by a file, on whatever machine they are."""

    def tell(*_: Any) -> None:
        leave.touch()

    for number in _PREEMPTING:
        signal.signal(number, tell)
    try:
        yield
    finally:
        leave.unlink(missing_ok=True)


def _wait_for(trainer: DataParallelTrainer) -> None:
    """Run it in a thread: in the main one it would set a handler by which Ctrl-C ends this process.

    Raises:
        TrainingFailedError: of Ray's.
    """
    errors: list[BaseException] = []

    def fit() -> None:
        try:
            trainer.fit()
        except BaseException as error:  # noqa: B036 (raised again in the main thread)
            errors.append(error)

    thread = threading.Thread(target=fit, daemon=True)
    thread.start()
    while thread.is_alive():  # with a timeout it lets signals through
        thread.join(0.2)
    if errors:
        raise errors[0]


def _first(error: TrainingFailedError, folder: Path) -> Failure:
    """What went wrong first: an error of a worker's own, else the worker that was killed, else what Ray says."""
    cause = first_failure(folder)
    if cause is not None:
        return cause
    said = {rank: str(each) for rank, each in getattr(error, "worker_failures", {}).items()}
    rank = next((rank for rank, message in said.items() if "killed by" in message), next(iter(said), 0))
    message = re.sub(rf"^.*\brank {rank}: ", "", said.get(rank, str(error)).strip().splitlines()[-1])
    return Failure(rank, message, None, record.place(folder, rank))


def is_installed() -> bool:
    """Can this cluster be used?"""
    return find_spec("ray") is not None
