"""Workers placed by Ray, on this machine or on a cluster of Ray's. What each does: :mod:`recipes.launchers.ray_worker`.

Ray Train starts all workers anew when one has failed, if need be on other machines, and they go on from the newest
checkpoint in the run's folder. It is to be on storage that all machines share, as the checkout is.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_parallel.settings import Natural
from recipes import record
from recipes.launchers.cluster import Cluster
from recipes.launchers.launcher import Failure, Preempted, WorkersFailed, first_failure
from recipes.processes import PREEMPTING

if TYPE_CHECKING:
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    from recipes.launchers.ray_worker import Work

log = logging.getLogger(__name__)

_STATE = "ray"  # a folder in the run's: what Ray keeps of it
_OWN = "local"  # the address by which Ray starts one
_ANSWER = 10.0  # seconds in which a cluster answers
_UNANSWERED = 15.0  # seconds after a signal: a worker that hasn't told its processes by then isn't there


@dataclass(frozen=True, kw_only=True)
class RayLauncher(Cluster):
    """Lets Ray start the processes, and start them again. Ray has a worker for each machine, with room for all of its
    processes. conf/cluster/ray.yaml says what its settings mean."""

    address: str | None = None
    gpus: Natural | None = None
    resources: dict[str, float] | None = None

    def launch(self, config_file: Path, processes: int) -> None:
        """As :meth:`Launcher.launch <recipes.launchers.launcher.Launcher.launch>`."""
        from ray.exceptions import RayError
        from ray.train import TrainingFailedError

        from recipes.launchers.ray_worker import LEAVE, Work

        folder = config_file.parent
        leave = folder / LEAVE
        # strategy=single and data_parallel are one process.
        nodes, each = (self.nodes, self.devices) if processes > 1 else (1, 1)
        work = Work(config_file.absolute(), nodes, each, self._handed_on, Path.cwd())
        _forget(folder)
        with self._ray(nodes) as needed, _told_by(leave):
            try:
                _wait_for(self._trainer(work, needed), leave)
            except (TrainingFailedError, RayError, ValueError) as error:
                # After a signal, a rank may fail just because another one left.
                if not leave.exists() or first_failure(folder) is not None:
                    raise WorkersFailed(_first(error, folder), processes) from None
        if record.read(folder)["status"] == "completed":
            return
        cause = first_failure(folder)
        raise Preempted if cause is None else WorkersFailed(cause, processes)

    @property
    def _handed_on(self) -> dict[str, str]:
        """Variables of the processes. Ray hands on none of this process's, and sets OMP_NUM_THREADS."""
        names = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        return self.variables | {name: os.environ[name] for name in names if name in os.environ}

    @contextmanager
    def _ray(self, nodes: int) -> Iterator[dict[str, float]]:
        """A connection to Ray, whose end ends what the run has there; what each machine needs, by Ray's names.

        Raises:
            WorkersFailed: there is no such Ray, or it can never have what is needed.
            Preempted: a signal came before Ray had started.
        """
        import ray

        address = self.address or os.environ.get("RAY_ADDRESS") or _OWN
        cpus = self.threads * self.devices
        # A Ray of its own is told enough CPUs, since processes may share cores.
        room = max(cpus, os.cpu_count() or 1) if address == _OWN else None
        handlers = {number: signal.getsignal(number) for number in (*PREEMPTING, signal.SIGINT)}
        runtime = {"env_vars": self.variables, "worker_process_setup_hook": "recipes.launchers.ray_worker.quiet"}
        _check(address)
        try:
            ray.init(address, runtime_env=runtime, logging_level=logging.WARNING, num_cpus=room)
        except SystemExit:  # Ray's answer to SIGTERM
            raise Preempted from None
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise _refused(f"Ray at {address}: {error}") from None
        try:
            machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            needed = self._needed(nodes, machines)
            fitting = _fitting(needed, machines)
            if fitting < nodes:
                each = ", ".join(f"{count:g} {name}" for name, count in needed.items())
                lacking = f"the run needs {nodes} of Ray's machines with {each}; there are {fitting}"
                if address == _OWN:
                    raise _refused(f"{lacking}. Ray is this machine alone: ask for less, or set cluster.address")
                log.warning("%s: it waits for them", lacking)  # the cluster may grow
            yield needed
        finally:
            ray.shutdown()
            for number, handler in handlers.items():
                if handler is not None:  # None: it was not set from Python
                    signal.signal(number, handler)  # Ray sets its own

    def _needed(self, nodes: int, machines: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """What a machine has to have, by Ray's names. Without a GPU for each process they share what is there."""
        needed = {"CPU": float(self.threads * self.devices), **(self.resources or {})}
        with_gpus = {**needed, "GPU": float(self.devices if self.gpus is None else self.gpus)}
        wanted = _fitting(with_gpus, machines) >= nodes if self.gpus is None else self.gpus > 0
        return with_gpus if wanted else needed

    def _trainer(self, work: Work, needed: dict[str, float]) -> DataParallelTrainer:
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
            scaling_config=ScalingConfig(
                num_workers=work.nodes,
                use_gpu="GPU" in needed,
                resources_per_worker=needed,
                placement_strategy="STRICT_SPREAD",  # each on a machine of its own
            ),
            run_config=run_config,
        )


def _refused(message: str) -> WorkersFailed:
    return WorkersFailed(Failure(0, message, None), 1)


def _check(address: str) -> None:
    """Raise WorkersFailed if nothing listens there. Ray itself would try for minutes."""
    host, found, port = address.rpartition(":")
    if found and port.isdigit() and "/" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER).close()
        except OSError as error:
            raise _refused(f"no Ray listens at {address} ({error}): change cluster.address or RAY_ADDRESS") from None


def _fitting(needed: Mapping[str, float], machines: Sequence[Mapping[str, float]]) -> int:
    """How many machines have what is needed?"""
    return sum(all(machine.get(name, 0) >= each for name, each in needed.items()) for machine in machines)


@contextmanager
def _told_by(leave: Path) -> Iterator[None]:
    """A scheduler's signal to this process reaches the workers by a file, on whatever machine they are."""

    def tell(*_: Any) -> None:
        leave.touch()

    for number in PREEMPTING:
        signal.signal(number, tell)
    try:
        yield
    finally:
        _forget(leave.parent)


def _forget(folder: Path) -> None:
    from recipes.launchers.ray_worker import LEAVE, LEAVING

    for name in (LEAVE, LEAVING):
        (folder / name).unlink(missing_ok=True)


def _wait_for(trainer: DataParallelTrainer, leave: Path) -> None:
    """Run it in a thread: in the main one it would set a handler by which Ctrl-C ends this process.

    Raises:
        Preempted: the workers are to leave, and there are none: Ray waits for room.
    """
    from recipes.launchers.ray_worker import LEAVING

    errors: list[BaseException] = []

    def fit() -> None:
        try:
            trainer.fit()
        except BaseException as error:  # noqa: B036 (raised again in the main thread)
            errors.append(error)

    thread = threading.Thread(target=fit, daemon=True)
    thread.start()
    until = None
    while thread.is_alive():  # with a timeout it lets signals through
        thread.join(0.2)
        if leave.exists() and until is None:
            until = time.monotonic() + _UNANSWERED
        if until is not None and time.monotonic() > until and not (leave.parent / LEAVING).exists():
            raise Preempted
    if errors:
        raise errors[0]


def _first(error: Exception, folder: Path) -> Failure:
    """What went wrong first: an error of a process's own, else the one that was killed, else what Ray says."""
    cause = first_failure(folder)
    if cause is not None:
        return cause
    said = [str(each).strip() for each in getattr(error, "worker_failures", {}).values()] or [str(error).strip()]
    told = [re.search(r"\brank (\d+): (.*)$", message) for message in said]
    killed = next((each for each in told if each and each[2].startswith("killed by")), None)
    lost = next((message for message, each in zip(said, told, strict=True) if not each), None)
    if killed is None and lost is not None:  # a machine, or a worker of Ray's
        return Failure(0, lost, None)
    found = killed or told[0]
    assert found is not None
    return Failure(int(found[1]), found[2], None, record.place(folder, int(found[1])))
