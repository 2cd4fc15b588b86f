"""Workers in a job of SLURM's, submitted and waited for. What the job does: :mod:`recipes.launchers.slurm_job`."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lightning_parallel.settings import Natural
from recipes import record
from recipes.launchers.cause import first_failure
from recipes.launchers.cluster import Cluster
from recipes.launchers.launcher import Failure, LeftAlone, Preempted, WorkersFailed
from recipes.launchers.slurm_job import EARLY, FAILURES, JOB, OUTPUT, STARTS, script

log = logging.getLogger(__name__)

JOB_ID = "job.id"  # a file in the run's folder
_GONE, _UNKNOWN = "GONE", "UNKNOWN"  # to SLURM; to this process
_OVER = {
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED",
    "REVOKED", "SPECIAL_EXIT", _GONE,
}  # fmt: skip
_LOOKS = (1.0, 15.0)  # seconds between two looks at the job: at first, and at most
_SILENCE = 300.0  # seconds after which a SLURM that doesn't answer is given up
_KILLED = re.compile(r"^srun: error: (\S+): tasks? (\d+)\S*: ((?!Exited).+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class SlurmLauncher(Cluster):
    """Submits the run as a job of SLURM's.

    Args:
        partition: of the cluster; None, here and below: the cluster's own choice.
        account: that pays.
        time: limit of the job, as sbatch takes it.
        memory: of a machine, such as ``"64G"``.
        gpus: of a machine: a number, or a kind and a number such as ``"a100:4"``.
        signal_before_end: seconds before the limit at which the workers are told to save and leave.
        requeue: start a preempted run again.
        options: more options of sbatch.
        setup: lines of bash that run before the workers start, once on the job's first machine.
        rendezvous: a host by which all workers reach rank 0; None: the job's first machine.
        submit: False: only write the job's file; ``"print"``: show it, too.
        wait: return only when the job is over.
    """

    partition: str | None = None
    account: str | None = None
    time: str | None = None
    memory: str | None = None
    gpus: int | str | None = None
    signal_before_end: Natural = 60
    requeue: bool = True
    options: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    rendezvous: str | None = None
    submit: bool | Literal["print"] = True
    wait: bool = True

    def launch(self, config_file: Path, processes: int) -> str | None:
        """As :meth:`Launcher.launch <recipes.launchers.launcher.Launcher.launch>`."""
        folder = config_file.parent
        job_file = folder / JOB
        for counted in (FAILURES, EARLY):
            (folder / counted).unlink(missing_ok=True)
        job_file.write_text(script(self, config_file, processes))
        if self.submit == "print":
            print(job_file.read_text(), end="")
        if self.submit is not True:
            return f"written to {job_file}; submit it with: sbatch {job_file}"
        try:
            job = _run("sbatch", "--parsable", str(job_file)).split(";")[0]
        except RuntimeError as refused:
            raise _failed(str(refused), processes) from None
        (folder / JOB_ID).write_text(job)
        log.info("job %s submitted; it prints to %s", job, folder / OUTPUT)
        if not self.wait:
            return f"job {job} is in the queue; its run is in {folder}"
        try:
            state = _over(job)
        except KeyboardInterrupt:
            raise LeftAlone(f"job {job} goes on; end it with: scancel {job}") from None
        status = record.read(folder).get("status")
        if status == "completed":
            return None
        if status == "preempted" and state.startswith("FAILED"):  # and not requeued
            raise Preempted
        ended = _failed(f"job {job} has ended: {state}; see {folder / OUTPUT}", processes)
        cause = first_failure(folder) or _killed(folder)
        raise WorkersFailed(cause, processes) if cause else ended


def _failed(message: str, processes: int) -> WorkersFailed:
    return WorkersFailed(Failure(0, message, None), processes)


def _over(job: str) -> str:
    """Wait for the end of a job, and tell what becomes of it meanwhile. Its last state.

    Raises:
        KeyboardInterrupt: also if SLURM doesn't answer for some minutes.
    """
    told, pause, silent = "", _LOOKS[0], 0.0
    while True:
        state = _state(job)
        if state != told:
            log.info("job %s: %s", job, state.lower())
            told, pause = state, _LOOKS[0]
        if state.partition(" ")[0] in _OVER:
            return state
        silent = silent + pause if state == _UNKNOWN else 0.0
        if silent > _SILENCE:
            raise KeyboardInterrupt
        time.sleep(pause)
        pause = min(2 * pause, _LOOKS[1])


def _state(job: str) -> str:
    """A job's state, and the reason for it, such as what it waits for. SLURM forgets a job after some minutes."""
    try:
        said = _run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T %r")
    except RuntimeError as error:
        if "Invalid job id" in str(error):
            return _GONE
        log.warning("%s", error)  # the controller may be busy
        return _UNKNOWN
    return said.removesuffix(" None") or _GONE


def _killed(folder: Path) -> Failure | None:
    """The first task that was killed from outside since the last start, as srun says it."""
    output = folder / OUTPUT
    found = _KILLED.search(output.read_text().rpartition(STARTS)[2]) if output.exists() else None
    if found is None:
        return None
    host, rank, how = found[1], int(found[2]), found[3]
    return Failure(rank, f"ended on {host}: {how}", None, record.place(folder, rank))


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SILENCE)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{command[0]} does not answer") from None
    if done.returncode:
        raise RuntimeError(f"{command[0]}: {(done.stderr or done.stdout).strip()}")
    return done.stdout.strip()


def unfinished_job(folder: Path) -> str | None:
    """The job of a run in this folder, which waits or runs, and its state; None for none."""
    file = folder / JOB_ID
    if not file.exists() or not is_here():
        return None
    state = _state(file.read_text())
    return None if state.partition(" ")[0] in _OVER else f"job {file.read_text()} is {state.lower()}"


def is_here() -> bool:
    """Can jobs be submitted from this machine?"""
    return shutil.which("sbatch") is not None
