"""recipes/launchers/watch.py: workers that don't end with the others are killed, and it is known why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from lightning_utilities.core.rank_zero import rank_zero_only

from recipes import record
from recipes.launchers import local as watch
from recipes.launchers.launcher import WorkersFailed
from recipes.launchers.local import LocalLauncher
from tests.recipes.test_configs import composed
from tests.recipes.test_launch import TINY, FailsOnRankOne, processes_of

SLEEPS = "import time; time.sleep(60)"


class StopsOnRankOne(FailsOnRankOne):
    """Rank 1 stops in its first step; the others wait for it until their timeout."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if rank_zero_only.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().training_step(batch, batch_idx)


def test_a_stopped_worker_ends_the_others_and_is_named(tmp_path: Path) -> None:
    config = composed("strategy=ddp", "strategy.timeout=3", "callbacks=none", *TINY)
    config["paths"]["output_dir"] = str(tmp_path)
    config["logger"] = {}
    config["model"] = {"_target_": "tests.recipes.test_watch.StopsOnRankOne"}
    (tmp_path / record.CONFIG).write_text(yaml.safe_dump(config))
    with pytest.raises(WorkersFailed, match="stopped") as raised:
        LocalLauncher(devices=2, threads=1).launch(tmp_path / record.CONFIG, processes=2)
    assert raised.value.failure.rank == 1
    assert processes_of(tmp_path) == []


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    """A process that looks as one of a run's."""
    process = subprocess.Popen([sys.executable, "-c", SLEEPS, "recipes.worker"])
    yield process
    process.kill()
    process.wait()


def seconds_until(happens: Callable[[], object]) -> float:
    begin = time.monotonic()
    while not happens():
        assert time.monotonic() < begin + 30
        time.sleep(0.05)
    return time.monotonic() - begin


def test_after_an_error_a_stopped_worker_is_killed_at_once(tmp_path: Path, worker: subprocess.Popen[bytes]) -> None:
    worker.send_signal(signal.SIGSTOP)
    seconds_until(lambda: psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED)
    with watch.watched(tmp_path, patience=20) as ended:
        time.sleep(1.5)
        assert worker.poll() is None  # so far, it may be continued
        (tmp_path / "error.json").touch()
        assert seconds_until(lambda: worker.poll() is not None) < 10
    assert (worker.poll(), ended) == (-signal.SIGKILL, watch.Ended(stopped={worker.pid}))


def test_others_get_some_seconds_to_end_themselves(tmp_path: Path, worker: subprocess.Popen[bytes]) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "error.json").touch()
    with watch.watched(tmp_path, patience=2) as ended:
        assert seconds_until(lambda: worker.poll() is not None) > 1
    assert (worker.poll(), ended) == (-signal.SIGKILL, watch.Ended(slow={worker.pid}))


def test_only_workers_are_killed_and_nobody_is_once_it_is_over(tmp_path: Path, worker: subprocess.Popen[bytes]) -> None:
    other = subprocess.Popen([sys.executable, "-c", SLEEPS])
    try:
        with watch.watched(tmp_path, patience=0.1):
            assert [each.pid for each in watch.workers()] == [worker.pid]
        (tmp_path / "error.json").touch()
        time.sleep(1)
        assert other.poll() is None and worker.poll() is None
    finally:
        other.kill()
        other.wait()
