"""Two machines: tensor groups stay inside one, and a comparison says what a layout costs."""

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

from recipes import ROOT
from tests.clusters.disturbed import command, numbers, train, variables
from tests.clusters.slurm import Slurm, missing, slurm
from tests.machines import Machine, two_machines

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(bool(missing()), reason=f"no {', '.join(missing())}")]


class WhereItIs(Callback):
    """Writes down on which node each rank is."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        place = {"node": int(os.environ["SLURM_NODEID"])}
        place |= {axis: trainer.strategy.layout.index(axis) for axis in ("tensor", "pipeline")}  # type: ignore[attr-defined]
        (self._folder / f"place-{trainer.global_rank}.json").write_text(json.dumps(place))


@pytest.fixture(scope="module")
def machines() -> Iterator[list[Machine]]:
    with two_machines() as made:
        if not made[0].enter:
            pytest.skip("network namespaces can't be made")
        yield made


@pytest.fixture(scope="module")
def cluster(machines: list[Machine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm"), machines) as running:
        yield running


def there(cluster: Slurm, machines: list[Machine], *words: str) -> str:
    """Run a command of the recipes on the first machine, for both."""
    first = machines[0]
    words += ("cluster=slurm", "cluster.nodes=2", "cluster.devices=2", f"cluster.interface={first.interface}")
    program = [*first.enter, sys.executable, *words, f"cluster.rendezvous={first.address}"]
    done = subprocess.run(
        program, cwd=ROOT, env=variables(cluster.environment), text=True, capture_output=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_run_over_both_has_the_loss_of_one_process(cluster: Slurm, machines: list[Machine], tmp_path: Path) -> None:
    where = f"+callbacks.where={{_target_:{WhereItIs.__module__}.WhereItIs,folder:{tmp_path}}}"
    there(cluster, machines, *command(tmp_path, "strategy=pipeline_tensor", "model.dropout=0", where))
    places: list[dict[str, Any]] = [json.loads((tmp_path / f"place-{rank}.json").read_text()) for rank in range(4)]
    assert [(place["node"], place["tensor"]) for place in places] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert places[0]["pipeline"] == places[1]["pipeline"] != places[2]["pipeline"] == places[3]["pipeline"]
    train(tmp_path / "alone", "strategy=single", "model.dropout=0")
    assert numbers(tmp_path) == pytest.approx(numbers(tmp_path / "alone"), rel=1e-6)


def test_a_comparison_over_both(cluster: Slurm, machines: list[Machine], tmp_path: Path) -> None:
    small = ["model=mlp", "data=digits", "model.width=16", "data.batch_size=12", "trainer.accelerator=cpu"]
    folders = [f"output={tmp_path}/compared", f"paths.data_dir={tmp_path}/data"]
    words = ["strategies=[ddp,pipeline_tensor]", "trainer.max_steps=8", *small, *folders]
    said = there(cluster, machines, "-m", "recipes.compare", *words)
    assert "cluster.nodes=2 x cluster.devices=2" in " ".join(said.split())
    with (tmp_path / "compared" / "compare.csv").open() as file:
        rows = {row["strategy"]: row for row in csv.DictReader(file)}
    assert [rows[name]["devices"] for name in ("single", "ddp", "pipeline_tensor")] == ["1", "4", "4"]
    assert not any(row["error"] for row in rows.values())
