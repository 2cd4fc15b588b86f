"""cluster=torchrun, cluster=local: after a kill the processes go on in the run's folder, with the numbers of a run left
alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.clusters.disturbed import KILL, assert_went_on, command, free_port, numbers, run_beside, start, train

pytestmark = pytest.mark.thorough
AGENT = [sys.executable, "-m", "torch.distributed.run"]


def test_after_a_kill_two_agents_go_on_where_the_run_was_saved(tmp_path: Path, undisturbed: dict[str, float]) -> None:
    """With a process each, as on two machines."""
    meeting = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    program = [*AGENT, *meeting, "--rdzv-id=a-run", "--local-addr=127.0.0.1", "--max-restarts=1"]
    run_beside([*program, *command(tmp_path, "cluster=torchrun", KILL)], [{}, {}])
    assert_went_on(tmp_path, undisturbed)


def test_after_a_kill_workers_of_a_written_config_go_on(tmp_path: Path, undisturbed: dict[str, float]) -> None:
    """Of ``launch=false``, which says how torchrun starts them."""
    train(tmp_path, KILL, "launch=false")
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    run_beside([*AGENT, *options, "-m", "recipes.worker", str(tmp_path / "run" / "resolved.yaml")], [{}])
    assert_went_on(tmp_path, undisturbed)


def test_processes_of_another_launcher_join(tmp_path: Path, undisturbed: dict[str, float]) -> None:
    """Such as MPI's: it sets variables for each, and has no store."""
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    program = [sys.executable, *command(tmp_path, "cluster=torchrun")]
    run_beside(program, [{**common, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"])
    assert numbers(tmp_path) == undisturbed


@pytest.mark.parametrize(("options", "code"), [(["launch=false"], 0), (["strategy=nothing"], 1)])
def test_where_rank_0_has_no_config_the_others_leave_with_it(tmp_path: Path, options: list[str], code: int) -> None:
    program = [*AGENT, "--standalone", "--nproc-per-node=2", *command(tmp_path, "cluster=torchrun", *options)]
    left = start(program, {})
    left.communicate(timeout=100)
    assert left.returncode == code


def test_a_killed_worker_restarts_the_run(tmp_path: Path, undisturbed: dict[str, float]) -> None:
    said = train(tmp_path, "cluster.max_restarts=1", KILL)
    assert "restart 1 of 1, from the newest whole checkpoint" in said
    assert_went_on(tmp_path, undisturbed, "rank 1: killed by SIGKILL (out of memory?)")
