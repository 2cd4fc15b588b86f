"""The job of a run under SLURM: one task for each device, with nothing between SLURM and the worker.

So SLURM's signals reach the worker itself, which saves the run and leaves with :data:`REQUEUE`. The job's script then
puts the job back into the queue, and what starts there goes on from the newest checkpoint::

    sbatch job.sh -> srun -> worker 0, 1, ...     USR1 before the limit, TERM at a preemption
                     exit code 75 <- saved
              scontrol requeue -> srun -> ...     SLURM_RESTART_COUNT=1

torchrun inside of srun would get the signals in place of the workers, and kill them. SLURM itself puts back only what
it had to kill.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from recipes import record
from recipes.processes import REFUSED, REQUEUE, WORKER

if TYPE_CHECKING:
    from recipes.launchers.slurm import SlurmLauncher

JOB, OUTPUT = "job.sh", "job.log"  # files in the run's folder
FAILURES, EARLY = "failures", "early"  # files there: a line for each that the job has had
STARTS = "=== the workers start\n"  # a line of the output

_MOST_EARLY = 3  # ends in a row before a worker listened
_FIRST_MACHINE = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'

# --kill-on-bad-exit=0: the others are to write what they know, and end by themselves; --wait: within the timeout.
_SRUN = """\
srun --cpus-per-task={threads} --kill-on-bad-exit=0 --wait={wait} bash -c '
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


def script(cluster: SlurmLauncher, config_file: Path, processes: int) -> str:
    """The job's file.

    Args:
        cluster: what the user has set.
        config_file: a resolved config.
        processes: the number of workers.
    """
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
            threads=cluster.threads,
            wait=int(cluster.timeout),
            worker=shlex.join(WORKER),
            python=shlex.quote(sys.executable),
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


def _options(cluster: SlurmLauncher, folder: Path, processes: int) -> Iterator[str]:
    """Of sbatch."""
    yield f"--job-name={re.sub('[^A-Za-z0-9_.-]', '-', folder.name)}"
    yield f"--nodes={cluster.nodes if processes > 1 else 1}"
    yield f"--ntasks-per-node={cluster.devices if processes > 1 else 1}"
    yield f"--cpus-per-task={cluster.threads}"
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
