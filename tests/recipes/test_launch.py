"""Whole programs: recipes/train.py, launchers/local.py and worker.py together. Few, since each starts processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import yaml
from lightning_utilities.core.rank_zero import rank_zero_only

from recipes import ROOT, record
from recipes.launchers.launcher import WorkersFailed
from recipes.launchers.local import LocalLauncher
from recipes.processes import REQUEUE
from tests.recipes.test_configs import composed

TINY = [
    "model=mlp", "data=digits", "model.width=16", "data.batch_size=12",
    "trainer.max_steps=2", "trainer.limit_val_batches=2",
    "print_config=false", "trainer.enable_progress_bar=false", "trainer.enable_model_summary=false",
]  # fmt: skip


class FailsOnRankOne(L.LightningModule):
    """Rank 1 raises in its first step; the others wait for it in a collective."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if rank_zero_only.rank == 1:
            raise ValueError("no luck today")
        dist.barrier()
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.layer(images.flatten(1)), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(folder: Path, *overrides: str, sweep: bool = False) -> subprocess.Popen[str]:
    folders = [f"paths.log_dir={folder}/logs", f"paths.data_dir={folder}/data"]
    return subprocess.Popen(
        [sys.executable, "-m", "recipes.train", *["-m"] * sweep, *TINY, *folders, *overrides],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def runs(folder: Path) -> dict[str, dict[str, Any]]:
    """Folder name -> run.json."""
    return {file.parent.name: json.loads(file.read_text()) for file in sorted(folder.rglob(record.RUN))}


def processes_of(folder: Path) -> list[str]:
    """Command lines of the processes that name ``folder``."""
    listing = subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listing.splitlines() if str(folder) in line]


@pytest.mark.thorough  # the sweeps on the pages run in `make test`
def test_every_job_of_a_sweep_gets_workers_and_a_world_of_its_own(tmp_path: Path) -> None:
    program = train(tmp_path, "strategy=pipeline_sync", "cluster.devices=1,2", "test=true", sweep=True)
    output, _ = program.communicate()
    assert program.returncode == 0, output
    found = runs(tmp_path)
    assert list(found) == ["0", "1"]  # one tree, a folder a job
    assert [run["layout"]["world_size"] for run in found.values()] == [1, 2]
    assert {run["status"] for run in found.values()} == {"completed"}
    for job, run in found.items():
        ranks = run["layout"]["ranks"]
        assert [rank["rank"] for rank in ranks] == list(range(len(ranks)))
        assert sorted(rank["coordinates"]["pipeline"] for rank in ranks) == list(range(len(ranks)))
        assert all(rank["coordinates"]["data"] == 0 and rank["host"] and rank["device"] for rank in ranks)
        (tree,) = tmp_path.glob(f"logs/train/multiruns/*/{job}")
        files = (record.CONFIG, "csv/metrics.csv", "checkpoints/last.ckpt")
        assert all((tree / file).exists() for file in files)
        assert record.read_metrics(tree) == run["metrics"]
    # What is computed does not depend on the layout.
    first, second = (run["metrics"] for run in found.values())
    assert {"train_loss", "val_loss", "val_acc", "test_loss", "test_acc"} <= set(first)
    assert second == pytest.approx(first, rel=1e-4)
    assert processes_of(tmp_path) == []


@pytest.mark.thorough  # a run's own interruption is tested beside its launcher
def test_interrupting_a_sweep_ends_all_of_it(tmp_path: Path) -> None:
    program = train(tmp_path, "strategy=ddp", "seed=1,2", "cluster.devices=1", "trainer.max_steps=100000", sweep=True)
    deadline = time.monotonic() + 120
    while not any("layout" in run for run in runs(tmp_path).values()):  # until it trains
        assert program.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    assert len(processes_of(tmp_path)) == 2
    os.killpg(program.pid, signal.SIGINT)  # what Ctrl-C in a terminal does
    output, _ = program.communicate(timeout=60)
    assert program.returncode == 130, output
    assert {job: run["status"] for job, run in runs(tmp_path).items()} == {"0": "interrupted"}
    assert "Traceback" not in output
    assert processes_of(tmp_path) == []


def steps_of(folder: Path) -> tuple[int, str, dict[str, float | None]]:
    (content,) = runs(folder).values()
    (file,) = folder.rglob(record.METRICS)
    return content["steps"], content["status"], json.loads(file.read_text())


@pytest.mark.thorough  # the kill matrix's sample is such a run, too
def test_a_run_that_is_preempted_and_started_again_has_the_numbers_of_one_that_is_not(tmp_path: Path) -> None:
    whole, twice = tmp_path / "whole", tmp_path / "twice"
    options = ["strategy=pipeline_sync", "trainer.max_steps=400"]
    program = train(whole, *options)
    output, _ = program.communicate()
    assert program.returncode == 0, output

    again = [*options, f"hydra.run.dir={twice}/run", "resume=auto"]
    program = train(twice, *again)
    deadline = time.monotonic() + 120
    while not any("layout" in run for run in runs(twice).values()):  # until it trains
        assert program.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(0.5)
    program.send_signal(signal.SIGTERM)
    output, _ = program.communicate(timeout=60)
    assert program.returncode == REQUEUE, output
    assert "SIGTERM after step" in output and "Traceback" not in output
    assert [run["status"] for run in runs(twice).values()] == ["preempted"]
    assert processes_of(twice) == []

    program = train(twice, *again[:-1], "ckpt_path=last")
    output, _ = program.communicate()
    assert program.returncode == 0 and "Restored all states" in output, output
    assert steps_of(twice) == steps_of(whole)


def test_a_failing_rank_is_named_and_the_launcher_is_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = composed("strategy=ddp", "callbacks=none", *TINY)
    config["paths"]["output_dir"] = str(tmp_path)
    config["logger"] = {}
    config["model"] = {"_target_": "tests.recipes.test_launch.FailsOnRankOne"}
    (tmp_path / record.CONFIG).write_text(yaml.safe_dump(config))

    environment = dict(os.environ)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    handlers = [signal.getsignal(number) for number in numbers]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    started = time.monotonic()
    with pytest.raises(WorkersFailed, match="ValueError: no luck today") as raised:
        LocalLauncher(devices=2, threads=1).launch(tmp_path / record.CONFIG, processes=2)
    assert time.monotonic() - started < 60  # rank 0 waited in a collective without an end
    assert (raised.value.failure.rank, raised.value.failure.place) == (1, "replica 1 of 2")
    told = str(raised.value)
    assert told.startswith("rank 1 of 2 (replica 1 of 2) failed:") and told.count("no luck today") == 2  # source line
    assert "fit_loop.py" not in told
    errors = {file.name: file.read_text() for file in (tmp_path / record.ERRORS).iterdir()}
    assert errors["rank-1.txt"].count("fit_loop.py") > 0 and set(errors) <= {"rank-0.txt", "rank-1.txt"}
    assert dict(os.environ) == environment
    assert [signal.getsignal(number) for number in numbers] == handlers
    assert list(scratch.iterdir()) == []
    assert processes_of(tmp_path) == []


@pytest.mark.thorough  # the callback's own tests show the rest
def test_a_run_whose_loss_is_nan_ends_with_an_error(tmp_path: Path) -> None:
    program = train(tmp_path, "strategy=pipeline_async", "optimizer.lr=1e30", "trainer.max_steps=40", "logger=none")
    output, _ = program.communicate(timeout=120)
    assert program.returncode == 1, output
    assert output.count("The loss is NaN or infinite, for the first time at step") == 1
    assert "FloatingPointError: The loss has been NaN or infinite for 10 batches in a row, up to step" in output
    assert "Traceback" not in output
    (run,) = runs(tmp_path).values()
    assert run["status"] == "failed" and run["error"]["message"].startswith("FloatingPointError: The loss has been")
    assert processes_of(tmp_path) == []


def test_a_config_with_problems_starts_nothing(tmp_path: Path) -> None:
    program = train(tmp_path, "strategy=pipelin", "model=gtp")
    output, _ = program.communicate()
    assert program.returncode == 1
    assert output.startswith("2 problems in the config, nothing was started:")
    assert "no such strategy; did you mean pipeline_" in output
    assert list(tmp_path.iterdir()) == []
