"""cluster=slurm: a job that is preempted is saved, requeued, resumed, and ends with the numbers of one left alone. The
nodes are two machines where network namespaces can be made, else this one: tensor groups stay inside a node."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback

from tests.clusters.disturbed import HOLD, KILL, assert_went_on, attempts, command, numbers, start, train, wait_for
from tests.clusters.slurm import Slurm, missing, slurm, two_machines

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"no {', '.join(missing())}: install slurm-wlm and munge")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with two_machines() as machines, slurm(tmp_path_factory.mktemp("slurm"), machines) as running:
        yield running


def there(cluster: Slurm, words: list[str], devices: int = 1) -> subprocess.Popen[str]:
    """Start a command of the recipes on the first machine, for both."""
    first = cluster.machine
    nodes = ["cluster=slurm", "cluster.nodes=2", f"cluster.devices={devices}", f"cluster.interface={first.interface}"]
    nodes += [f"cluster.rendezvous={first.address}"]
    return start([*first.enter, sys.executable, *words[:2], *nodes, *words[2:]], cluster.environment)


def submit(cluster: Slurm, folder: Path, *options: str) -> subprocess.Popen[str]:
    return there(cluster, command(folder, "cluster.partition=low", *options))


@pytest.mark.programs
def test_a_preempted_job_is_saved_requeued_and_resumed(
    cluster: Slurm, tmp_path: Path, undisturbed: dict[str, float]
) -> None:
    program = submit(cluster, tmp_path, HOLD)
    wait_for(tmp_path / "run" / "reached")
    urgent = ["--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"]
    cluster.run("sbatch", "--wait", *urgent)
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
    assert_went_on(tmp_path, undisturbed)


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
    cluster.run("sbatch", "--wait", f"--dependency=afterok:{job}", "--output=/dev/null", "--wrap=true")
    assert attempts(folder) == [("completed", 0, 10, 0)]


@pytest.mark.thorough
def test_where_gloo_takes_an_address_of_one_machine_alone_the_error_names_the_setting(
    cluster: Slurm, tmp_path: Path
) -> None:
    """As where the name of each machine is 127.0.1.1. By default, private/test_torch.py has what gloo says."""
    if not cluster.machine.enter:
        pytest.skip("network namespaces can't be made")
    program = submit(cluster, tmp_path, "cluster.interface=lo", "cluster.timeout=30")
    printed, _ = program.communicate(timeout=150)
    assert program.returncode == 1 and "Set GLOO_SOCKET_IFNAME on all machines" in printed


class WhereItIs(Callback):
    """Writes down on which node each rank is."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        place = {"node": int(os.environ["SLURM_NODEID"])}
        place |= {axis: trainer.strategy.layout.index(axis) for axis in ("tensor", "pipeline")}  # type: ignore[attr-defined]
        (self._folder / f"place-{trainer.global_rank}.json").write_text(json.dumps(place))


@pytest.mark.thorough
def test_a_run_over_both_has_the_loss_of_one_process(cluster: Slurm, tmp_path: Path) -> None:
    where = f"+callbacks.where={{_target_:{WhereItIs.__module__}.WhereItIs,folder:{tmp_path}}}"
    program = there(cluster, command(tmp_path, "strategy=pipeline_tensor", "model.dropout=0", where), devices=2)
    printed, _ = program.communicate(timeout=250)
    assert program.returncode == 0, printed
    places: list[dict[str, Any]] = [json.loads((tmp_path / f"place-{rank}.json").read_text()) for rank in range(4)]
    assert [(place["node"], place["tensor"]) for place in places] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert places[0]["pipeline"] == places[1]["pipeline"] != places[2]["pipeline"] == places[3]["pipeline"]
    train(tmp_path / "alone", "strategy=single", "model.dropout=0")
    assert numbers(tmp_path) == pytest.approx(numbers(tmp_path / "alone"), rel=1e-6)


@pytest.mark.thorough
def test_a_comparison_over_both(cluster: Slurm, tmp_path: Path) -> None:
    """It says what a layout costs."""
    small = ["model=mlp", "data=digits", "model.width=16", "data.batch_size=12", "trainer.accelerator=cpu"]
    folders = [f"output={tmp_path}/compared", f"paths.data_dir={tmp_path}/data"]
    words = ["strategies=[ddp,pipeline_tensor]", "trainer.max_steps=8", *small, *folders]
    program = there(cluster, ["-m", "recipes.compare", *words], devices=2)
    printed, _ = program.communicate(timeout=250)
    assert program.returncode == 0, printed
    assert "cluster.nodes=2 x cluster.devices=2" in " ".join(printed.split())
    with (tmp_path / "compared" / "compare.csv").open() as file:
        rows = {row["strategy"]: row for row in csv.DictReader(file)}
    assert [rows[name]["devices"] for name in ("single", "ddp", "pipeline_tensor")] == ["1", "4", "4"]
    assert not any(row["error"] for row in rows.values())
