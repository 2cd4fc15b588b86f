"""cluster=slurm: a job that is preempted is saved, requeued, resumed, and ends with the numbers of one left alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.disturbed import HOLD, KILL, KILLED, SAVED, attempts, command, numbers, start, wait_for
from tests.clusters.slurm import Slurm, missing, slurm

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"no {', '.join(missing())}: install slurm-wlm and munge")

# Both nodes are this machine, whose other name need not resolve.
NODES = ["cluster=slurm", "cluster.nodes=2", "cluster.devices=1"]
NODES += ["cluster.interface=lo", "cluster.rendezvous=127.0.0.1"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def submit(cluster: Slurm, folder: Path, *options: str) -> subprocess.Popen[str]:
    program = [sys.executable, *command(folder, *NODES, "cluster.partition=low", *options)]
    return start(program, cluster.environment)


@pytest.mark.programs
def test_a_preempted_job_is_saved_requeued_and_resumed(
    cluster: Slurm, tmp_path: Path, undisturbed: dict[str, float]
) -> None:
    program = submit(cluster, tmp_path, HOLD)
    wait_for(tmp_path / "run" / "reached")
    first = (tmp_path / "run" / "job.id").read_text()
    urgent = ["--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"]
    other = cluster.run("sbatch", "--parsable", *urgent).strip()
    cluster.wait_for(other, "COMPLETED", seconds=90)
    cluster.release(first)
    printed, _ = program.communicate(timeout=150)
    assert program.returncode == 0, printed + (tmp_path / "run" / "job.log").read_text()
    preempted, last = attempts(tmp_path)
    assert preempted[0] == "preempted" and preempted[3] == 75 and last[0] == "completed"
    assert 0 == preempted[1] < preempted[2] == last[1] < last[2] == 10
    assert numbers(tmp_path) == undisturbed


@pytest.mark.thorough
def test_a_killed_worker_is_named_and_restarts_the_job(
    cluster: Slurm, tmp_path: Path, undisturbed: dict[str, float]
) -> None:
    program = submit(cluster, tmp_path, KILL, "cluster.max_restarts=1")
    printed, _ = program.communicate(timeout=200)
    log = (tmp_path / "run" / "job.log").read_text()
    assert program.returncode == 0, printed + log
    killed, last = attempts(tmp_path)
    assert killed[1:3] in [(0, step) for step in (SAVED, KILLED)] and last == ("completed", SAVED, 10, 0)
    assert numbers(tmp_path) == undisturbed


@pytest.mark.thorough
def test_what_went_wrong_reaches_the_terminal(cluster: Slurm, tmp_path: Path) -> None:
    program = submit(cluster, tmp_path, "strategy.layers=[net.nowhere.*]", "cluster.max_restarts=2")
    printed, _ = program.communicate(timeout=150)
    assert program.returncode == 1 and "failed:\nValueError: layers: 'net.nowhere.*' matches no module." in printed
    assert (tmp_path / "run" / "job.log").read_text().count("=== the workers start") == 1  # it would fail again


@pytest.mark.thorough
def test_a_job_can_be_shown_and_left_to_itself(cluster: Slurm, tmp_path: Path) -> None:
    options = ["cluster.submit=print", "cluster.time='1:00:00'", "cluster.setup=[module x]"]
    shown = submit(cluster, tmp_path / "shown", *options)
    printed, _ = shown.communicate(timeout=100)
    assert shown.returncode == 0 and "submit it with: sbatch" in printed
    assert "#SBATCH --time=1:00:00\n" in printed and "\nmodule x\n" in printed
    folder = tmp_path / "left"
    left = submit(cluster, folder, "cluster.wait=false", "cluster.options=[--hold]")
    printed, _ = left.communicate(timeout=100)
    assert left.returncode == 0 and "is in the queue" in printed
    job = (folder / "run" / "job.id").read_text()
    again = submit(cluster, folder, "resume=auto")
    printed, _ = again.communicate(timeout=100)
    assert again.returncode == 1 and f"has a run that goes on: job {job} is pending" in printed
    cluster.run("scontrol", "release", job)
    cluster.wait_for(job, "COMPLETED", seconds=120)
    assert attempts(folder) == [("completed", 0, 10, 0)]
