"""Workers in a job of SLURM's: one task for each device, with nothing between SLURM and the worker.

A signal of SLURM's so reaches the worker itself, which saves the run and leaves with :data:`REQUEUE`. The job's script
then puts the job back into the queue, and what starts there goes on from the newest checkpoint::

    sbatch job.sh -> srun -> worker 0, 1, ...     USR1 before the limit, TERM at a preemption
                     exit code 75 <- saved
              scontrol requeue -> srun -> ...     SLURM_RESTART_COUNT=1

torchrun inside of srun would get the signals in place of the workers, and kill them.
"""

from __future__ import annotations

import logging
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lightning_parallel.settings import Natural
from recipes import record
from recipes.launchers.cause import first_failure
from recipes.launchers.cluster import Cluster
from recipes.launchers.launcher import Failure, WorkersFailed
from recipes.processes import REQUEUE

log = logging.getLogger(__name__)

JOB, OUTPUT, FAILURES = "job.sh", "job.log", "failures"  # files in the run's folder
_OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "GONE"}
_KILLED = re.compile(r"^srun: error: (\S+): tasks? (\d+)\S*: ((?!Exited).+)$", re.MULTILINE)
_LOOKS = (1.0, 15.0)  # seconds between two looks at the job: at first, and at most


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
        container: an image that the tasks run in, for clusters with pyxis.
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
    container: str | None = None
    rendezvous: str | None = None
    submit: bool | Literal["print"] = True
    wait: bool = True

    def launch(self, config_file: Path, processes: int) -> str | None:
        """As :meth:`Launcher.launch <recipes.launchers.launcher.Launcher.launch>`.

        Raises:
            RuntimeError: the job was not accepted.
        """
        folder = config_file.parent
        (folder / FAILURES).unlink(missing_ok=True)
        job_file = folder / JOB
        job_file.write_text(self.script(config_file, processes))
        if self.submit == "print":
            print(job_file.read_text(), end="")
        if self.submit is not True:
            return f"written to {job_file}; submit it with: sbatch {job_file}"
        job = _run("sbatch", "--parsable", str(job_file)).split(";")[0]
        record.update(folder, job_id=job)
        log.info("job %s submitted; it prints to %s", job, folder / OUTPUT)
        if not self.wait:
            return f"job {job} is in the queue; its run is in {folder}"
        try:
            state = _over(job)
        except KeyboardInterrupt:
            return f"job {job} goes on; end it with: scancel {job}"
        if record.read(folder)["status"] == "completed":
            return None
        said = Failure(0, f"job {job} has ended: {state}; see {folder / OUTPUT}", None)
        raise WorkersFailed(first_failure(folder) or _killed(folder) or said, processes)

    def script(self, config_file: Path, processes: int) -> str:
        """The job's file."""
        lines = [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in self._options(config_file.parent, processes)),
            "",
            *self.setup,
            *(f"export {name}={shlex.quote(value)}" for name, value in sorted(self.variables.items())),
            f"export MASTER_ADDR={self.rendezvous or _FIRST_MACHINE}",
            "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))",
            _SRUN.format(
                container=f" --container-image={shlex.quote(self.container)}" if self.container else "",
                python=shlex.quote(sys.executable),
                config=shlex.quote(str(config_file)),
            ),
            _END.format(
                failures=shlex.quote(str(config_file.parent / FAILURES)),
                most=self.max_restarts,
                requeue=REQUEUE if self.requeue else -1,
            ),
        ]
        return "\n".join(lines)

    def _options(self, folder: Path, processes: int) -> Iterator[str]:
        yield f"--job-name={folder.name}"
        yield f"--nodes={self.nodes if processes > 1 else 1}"
        yield f"--ntasks-per-node={self.devices if processes > 1 else 1}"
        yield f"--cpus-per-task={self.threads}"
        named = {"partition": self.partition, "account": self.account, "time": self.time, "mem": self.memory}
        yield from (f"--{name}={value}" for name, value in named.items() if value is not None)
        if self.gpus is not None:
            yield f"--gpus-per-node={self.gpus}"
        yield f"--output={folder / OUTPUT}"
        yield "--open-mode=append"  # a job that is started again goes on with its file
        yield "--requeue" if self.requeue or self.max_restarts else "--no-requeue"
        yield f"--signal=USR1@{self.signal_before_end}"
        yield from self.options


_FIRST_MACHINE = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'

# --kill-on-bad-exit=0: the others are to write what they know, and end by themselves; --wait: within a minute.
_SRUN = """\
srun --kill-on-bad-exit=0 --wait=60{container} bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
    export LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES)) GROUP_RANK=$SLURM_NODEID
    exec {python} -u -m recipes.worker "$0"' {config}
code=$?"""

_END = """\
if [ $code -eq {requeue} ]; then  # saved after a signal
    scontrol requeue $SLURM_JOB_ID
elif [ $code -ne 0 ]; then
    echo $code >> {failures}
    [ $(wc -l < {failures}) -le {most} ] && scontrol requeue $SLURM_JOB_ID
fi
exit $code
"""


def _over(job: str) -> str:
    """Wait for the end of a job, and tell what becomes of it meanwhile. Its last state."""
    told, pause = "", _LOOKS[0]
    while True:
        state = _state(job)
        if state != told:
            log.info("job %s: %s", job, state.lower())
            told, pause = state, _LOOKS[0]
        if state.split(" ")[0] in _OVER:
            return state
        time.sleep(pause)
        pause = min(2 * pause, _LOOKS[1])


def _state(job: str) -> str:
    """A job's state; SLURM forgets it some minutes after its end."""
    try:
        return _run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T").strip() or "GONE"
    except RuntimeError as error:
        if "Invalid job id" in str(error):
            return "GONE"
        log.warning("%s", error)  # the controller may be busy
        return "UNKNOWN"


def _killed(folder: Path) -> Failure | None:
    """The first task that was killed from outside, as srun says it."""
    output = folder / OUTPUT
    found = _KILLED.search(output.read_text()) if output.exists() else None
    if found is None:
        return None
    host, rank, how = found[1], int(found[2]), found[3]
    return Failure(rank, f"ended on {host}: {how}", None, record.place(folder, rank))


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[0]}: {(done.stderr or done.stdout).strip()}")
    return done.stdout.strip()


def is_here() -> bool:
    """Can jobs be submitted from this machine?"""
    return shutil.which("sbatch") is not None
