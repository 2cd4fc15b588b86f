"""A run as a job of SLURM's, submitted and waited for: one task for each device, with nothing between SLURM and the
worker.

So SLURM's signals reach the worker itself, which saves the run and leaves with :data:`REQUEUE`. The job's script then
puts the job back into the queue, and what starts there goes on from the newest checkpoint::

    sbatch job.sh -> srun -> worker 0, 1, ...     USR1 before the limit, TERM at a preemption
                     exit code 75 <- saved
              scontrol requeue -> srun -> ...     SLURM_RESTART_COUNT=1

torchrun inside of srun would get the signals in place of the workers, and kill them. SLURM itself puts back only what
it had to kill.
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

from lightning_parallel.settings import Auto, Count, Natural
from recipes import IN_CHECKOUT, ROOT, record
from recipes.launchers.cluster import Cluster
from recipes.launchers.launcher import Failure, LeftAlone, Preempted, WorkersFailed, first_failure
from recipes.problem import ConfigError, Problem
from recipes.processes import REFUSED, REQUEUE, WORKER

log = logging.getLogger(__name__)

JOB_ID = "job.id"  # a file in the run's folder
JOB, OUTPUT = "job.sh", "job.log"  # files in the run's folder
FAILURES, EARLY = "failures", "early"  # files there: a line for each that the job has had
STARTS = "=== the workers start\n"  # a line of the output
_GONE, _UNKNOWN = "GONE", "UNKNOWN"  # to SLURM; to this process
_OVER = {
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED",
    "REVOKED", "SPECIAL_EXIT", _GONE,
}  # fmt: skip
_LOOKS = (1.0, 15.0)  # seconds between two looks at the job: at first, and at most
_SILENCE = 300.0  # seconds after which a SLURM that doesn't answer is given up
_KILLED = re.compile(r"^srun: error: (\S+): tasks? (\d+)\S*: ((?!Exited).+)$", re.MULTILINE)
_MOST_EARLY = 3  # ends in a row before a worker listened
_FIRST_MACHINE = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'

# --kill-on-bad-exit=0: the others are to write what they know, and end by themselves; --wait: within the timeout.
_SRUN = """\
srun --cpus-per-task={cpus} {container}--kill-on-bad-exit=0 --wait={wait} bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
    export LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES)) GROUP_RANK=$SLURM_NODEID
    exec "$0" {worker} "$1"' {python} {config}
code=$?"""

# 138 and 143: the signal came before a worker listened to it. A limit that is shorter than the start would requeue the
# job without end.
_END = """\
case $code in
    {requeue})  # after a signal; saved, if the run had begun
        rm -f {early}
        {preempted} ;;
    138|143)
        echo $code >> {early}
        if [ $(wc -l < {early}) -lt {most_early} ]; then {preempted}
        else echo "told {most_early} times to leave before a worker listened: is cluster.time too short?"; fi ;;
    0|{refused}) ;;  # a refused run would be refused again
    *)
        echo $code >> {failures}
        [ $(wc -l < {failures}) -le {most} ] && scontrol requeue $SLURM_JOB_ID ;;
esac
exit $code
"""


@dataclass(frozen=True, kw_only=True)
class SlurmLauncher(Cluster):
    """Submits the run as a job of SLURM's. conf/cluster/slurm.yaml says what its settings mean."""

    partition: str | None = None
    account: str | None = None
    time: str | None = None
    memory: str | None = None
    gpus: int | str | None = None
    cpus: Count | Auto = 1
    signal_before_end: Natural = 60
    requeue: bool = True
    options: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    container: str | None = None
    mounts: list[str] = field(default_factory=list)
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


# -- the job's file ----------------------------------------------------------------------------------------------------


def script(cluster: SlurmLauncher, config_file: Path, processes: int) -> str:
    """The job's file."""
    folder = config_file.parent
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {shlex.quote(option)}" for option in _options(cluster, folder, processes)),
        "",
        *cluster.setup,
        *(f"export {name}={shlex.quote(value)}" for name, value in sorted(cluster.variables.items())),
        f"export MASTER_ADDR={shlex.quote(cluster.rendezvous) if cluster.rendezvous else _FIRST_MACHINE}",
        "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))",
        f"rm -rf {shlex.quote(str(folder / record.ERRORS))}  # of an earlier start",
        f"echo {shlex.quote(STARTS.strip())}",
        _SRUN.format(
            cpus=cluster.cpus,
            container=_container(cluster, folder.absolute()),
            wait=int(cluster.timeout),
            worker=shlex.join(WORKER),
            python="python3" if cluster.container else shlex.quote(sys.executable),
            config=shlex.quote(str(config_file)),
        ),
        _END.format(
            early=shlex.quote(str(folder / EARLY)),
            most_early=_MOST_EARLY,
            failures=shlex.quote(str(folder / FAILURES)),
            most=cluster.max_restarts,
            requeue=REQUEUE,
            refused=REFUSED,
            preempted="scontrol requeue $SLURM_JOB_ID" if cluster.requeue else ":",
        ),
    ]
    return "\n".join(lines)


def _container(cluster: SlurmLauncher, folder: Path) -> str:
    """Options of srun's, which NVIDIA's Pyxis brings. What the workers read and write by its path is in the container
    by the same one.

    Raises:
        ConfigError: a folder's name has a comma or a colon, which srun takes for the end of a path, and no other mount
            brings the folder.
    """
    if cluster.container is None:
        return ""
    here = Path.cwd()
    own = {here: "cluster.container", folder: "hydra.run.dir"} | ({ROOT: "cluster.container"} if IN_CHECKOUT else {})
    at_their_paths = (source for source, *to in (each.split(":") for each in cluster.mounts) if to in ([], [source]))
    mounted = {*own, *map(Path, at_their_paths)}
    for place in [each for each in own if {",", ":"} & {*str(each)}]:
        setting, why = own.pop(place), f"{str(place)!r} can't be mounted, since a comma or colon ends a path"
        if mounted.isdisjoint(place.parents):
            raise ConfigError([Problem(setting, place, why, "use a folder of another name, or one inside a mount")])
    mounts = ",".join([*(f"{place}:{place}" for place in own), *cluster.mounts])
    # By default a variable that the image sets itself would win over the job's.
    names = ",".join([*sorted(cluster.variables), "MASTER_ADDR", "MASTER_PORT"])
    chosen = {"image": cluster.container, "mounts": mounts, "workdir": here, "env": names}
    return "".join(f"{shlex.quote(f'--container-{name}={value}')} " for name, value in chosen.items())


def _options(cluster: SlurmLauncher, folder: Path, processes: int) -> Iterator[str]:
    """Of sbatch."""
    yield f"--job-name={re.sub('[^A-Za-z0-9_.-]', '-', folder.name)}"
    yield f"--nodes={cluster.nodes if processes > 1 else 1}"
    yield f"--ntasks-per-node={cluster.devices if processes > 1 else 1}"
    yield f"--cpus-per-task={cluster.cpus}"
    named = {"partition": cluster.partition, "account": cluster.account, "time": cluster.time, "mem": cluster.memory}
    yield from (f"--{name}={value}" for name, value in named.items() if value is not None)
    if cluster.gpus is not None:
        yield f"--gpus-per-node={cluster.gpus}"
    output = str(folder / OUTPUT).replace("%", "%%")
    yield f"--output={output}"
    yield "--open-mode=append"  # a job that is started again goes on with its file
    yield "--requeue" if cluster.requeue or cluster.max_restarts else "--no-requeue"
    yield f"--signal=USR1@{cluster.signal_before_end}"
    yield from cluster.options
