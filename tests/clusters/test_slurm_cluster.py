"""The SLURM that other tests run on: it starts, preempts and requeues, and nothing is left of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.clusters.slurm import Slurm, missing, slurm

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"no {', '.join(missing())} on this machine")

PREEMPTED = """\
#!/bin/bash
#SBATCH --partition=low --nodes=2 --ntasks-per-node=1 --exclusive --time=5
#SBATCH --requeue --open-mode=append --signal=USR1@60
srun --kill-on-bad-exit=0 bash -c '
    echo "run ${SLURM_RESTART_COUNT:-0}"
    [ "$SLURM_RESTART_COUNT" = 1 ] && exit
    trap "echo asked to end; exit 85" TERM
    while true; do sleep 0.2; done'
code=$?
[ $code -eq 85 ] && scontrol requeue $SLURM_JOB_ID
exit $code
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def test_each_node_runs_a_task(cluster: Slurm) -> None:
    command = ("srun", "--nodes=2", "--ntasks-per-node=1", "bash", "-c", "echo $SLURM_PROCID $SLURMD_NODENAME")
    assert sorted(cluster.run(*command).splitlines()) == ["0 n0", "1 n1"]


def test_a_preempted_job_is_asked_to_end_and_runs_again(cluster: Slurm, tmp_path: Path) -> None:
    (tmp_path / "low.sh").write_text(PREEMPTED)
    output = tmp_path / "output"
    low = cluster.run("sbatch", "--parsable", f"--output={output}", str(tmp_path / "low.sh")).strip()
    end = time.monotonic() + 60
    while not output.exists() or output.read_text().count("run 0") < 2:
        assert time.monotonic() < end, cluster.job(low)
        time.sleep(0.1)
    wrapped = ("--nodes=2", "--ntasks-per-node=1", "--exclusive", "--output=/dev/null", "--wrap=true")
    high = cluster.run("sbatch", "--parsable", "--partition=high", *wrapped).strip()
    cluster.wait_for(high, "COMPLETED", seconds=60)
    cluster.wait_for(low, "PENDING", seconds=30)
    cluster.release(low)
    cluster.wait_for(low, "COMPLETED", seconds=60)
    lines = output.read_text().splitlines()
    assert [lines.count(line) for line in ("run 0", "asked to end", "run 1")] == [2, 2, 2]
    assert cluster.job(low)["Restarts"] == "1"


def test_nothing_is_left_when_a_test_fails(tmp_path: Path) -> None:
    sleep = f"sleep 1000.{time.time_ns()}"  # nobody else's
    with pytest.raises(KeyError), slurm(tmp_path) as cluster:
        wrap = f"--wrap=setsid env --ignore-environment {sleep} & {sleep}"
        job = cluster.run("sbatch", "--parsable", "--output=/dev/null", wrap).strip()
        cluster.wait_for(job, "RUNNING", seconds=60)
        end = time.monotonic() + 60
        while len(_running(sleep)) < 2:
            assert time.monotonic() < end
        raise KeyError
    assert _running(sleep) == _running(str(tmp_path)) == []


def _running(words: str) -> list[list[str]]:
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [command for command in commands if words in " ".join(command)]
