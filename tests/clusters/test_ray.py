"""cluster=ray: Ray places the processes, and starts them again after a kill; the run ends with the same numbers."""

from __future__ import annotations

import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from tests.clusters import disturbed
from tests.clusters.disturbed import HOLD, KILL, assert_went_on, attempts, command, numbers, start, train, wait_for

# It takes a minute to start.
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(find_spec("ray") is None, reason='no Ray: pip install ".[recipes,ray]"'),
]

# Ray hands on RAY_ADDRESS, by which it would join a cluster that is there.
ALONE = {"RAY_ADDRESS": ""}


def run(folder: Path, *options: str) -> subprocess.Popen[str]:
    return start([sys.executable, *command(folder, "cluster=ray", *options)], ALONE)


def test_after_a_kill_ray_starts_the_run_again_on_two_machines(
    tmp_path: Path, undisturbed: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two parts of Ray on this one, as it has them in its own tests."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    machines = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        machines.add_node(num_cpus=1)
        where = [f"cluster.address={machines.address}", "cluster.nodes=2", "cluster.devices=1"]
        said = train(tmp_path, "cluster=ray", "cluster.max_restarts=1", *where, KILL)
    finally:
        machines.shutdown()
    assert said.count("started again, from the newest whole checkpoint") == 1
    assert_went_on(tmp_path, undisturbed)


# Neither what Ray can never have, nor what is refused, nor a worker that was killed for good is started again.
@pytest.mark.parametrize(("options", "said"), [
    (["cluster.nodes=2"], "the run needs 2 of Ray's machines with 2 CPU; there are 1. Ray is this machine alone"),
    (["cluster.gpus=2"], "the run needs 1 of Ray's machines with 2 CPU, 2 GPU; there are 0"),
    (["cluster.address=127.0.0.1:1"], "no Ray listens at 127.0.0.1:1"),
    (["cluster.max_restarts=3", "strategy.layers=[net.nowhere.*]"],
     "failed:\nValueError: layers: 'net.nowhere.*' matches no module."),
    ([KILL], "rank 1 of 2 (stage 0 of 2) failed:\nkilled by SIGKILL (out of memory?)\n"),
])  # fmt: skip
def test_what_ends_a_run_for_good_is_told(tmp_path: Path, options: list[str], said: str) -> None:
    program = run(tmp_path, *options)
    printed, _ = program.communicate(timeout=200)
    assert program.returncode == 1 and said in printed and "started again" not in printed


def test_one_process_is_enough_for_one(tmp_path: Path) -> None:
    train(tmp_path, "cluster=ray", "strategy=single")
    assert attempts(tmp_path) == [("completed", 0, 10, 0)]


def test_a_signal_reaches_the_workers_which_save_and_leave(tmp_path: Path, undisturbed: dict[str, float]) -> None:
    program = run(tmp_path, HOLD)
    wait_for(tmp_path / "run" / "reached")
    program.send_signal(signal.SIGTERM)
    printed, _ = program.communicate(timeout=200)
    assert program.returncode == 75, printed
    train(tmp_path, "cluster=ray", "ckpt_path=last")
    preempted, last = attempts(tmp_path)
    saved = disturbed.KILLED + 1
    assert preempted == ("preempted", 0, saved, 75) and last == ("completed", saved, 10, 0)
    assert numbers(tmp_path) == undisturbed


def test_ctrl_c_ends_the_run_and_ray(tmp_path: Path) -> None:
    program = run(tmp_path, HOLD)
    wait_for(tmp_path / "run" / "reached")
    program.send_signal(signal.SIGINT)
    printed, _ = program.communicate(timeout=60)
    assert program.returncode == 130, printed
    left = [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(tmp_path) in " ".join(process.info["cmdline"] or ())
    ]
    assert not left
