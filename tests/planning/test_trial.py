"""The best layouts of a plan are run, and ranked by what they take."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import start_processes  # type: ignore[attr-defined]

from lightning_parallel import plan
from lightning_parallel.comparison import timing
from lightning_parallel.planning import planner
from tools.faults.models import Blocks
from tools.workers.pool import WorkerPool

FORK = multiprocessing.get_context("fork")


class FailsInDDP(Blocks):
    """Its step fails in one of two processes; the other one waits for it. No pipeline takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if dist.is_initialized() and dist.get_rank() == 1 and type(self.trainer.strategy).__name__ == "DDPStrategy":
            raise RuntimeError("no luck on rank 1")
        return super().training_step(batch, batch_idx)


@pytest.fixture
def started(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forked from the pool's server, which has imported all that they need; users' import it anew."""
    pool.run(os.getpid, 1, init=False)  # starts the server

    def start(*args: Any, **kwargs: Any) -> Any:
        return start_processes(*args, **kwargs | {"start_method": "forkserver"})

    monkeypatch.setattr(timing.torch_multiprocessing, "start_processes", start)


@pytest.mark.usefixtures("started", "untimed")
def test_the_best_are_run_and_ranked_and_one_that_fails_is_refused_with_its_error() -> None:
    found = plan(FailsInDDP(), FailsInDDP.batches()[0], devices=2, measure=2)
    assert "no luck on rank 1" in found.refused["ddp, 2 replicas"]
    assert {row.strategy for row in found.found} == {"fully_sharded", "tensor_parallel"}
    ran, other = (row.measured for row in found.rows)
    assert ran is not None and ran.seconds > 0 and other is None
    assert found.best is found.rows[0] and "measured" in str(found)


@pytest.mark.usefixtures("untimed")
def test_what_has_run_comes_first_by_what_it_has_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([9.0, 8.0])  # what seems to be the best takes longer
    monkeypatch.setattr(planner, "measured", lambda *_: timing.Measured(next(seconds), 1))
    rows = plan(Blocks(), Blocks.batches()[0], devices=2, measure=2).rows
    assert [row.measured and row.measured.seconds for row in rows[:3]] == [8.0, 9.0, None]


def wait(*_: Any, **__: Any) -> None:
    time.sleep(60)


def start_a_rank(folder: Path) -> None:
    rank = FORK.Process(target=timing._rank, args=(0, 1, 0, str(folder)))
    rank.start()
    (folder / "started").write_text(str(rank.pid))
    rank.join()


def test_a_rank_ends_with_the_process_that_has_started_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "load", wait)
    parent, started = FORK.Process(target=start_a_rank, args=(tmp_path,)), tmp_path / "started"
    parent.start()
    while not (started.exists() and started.read_text()):
        time.sleep(0.05)
    rank, end = psutil.Process(int(started.read_text())), time.monotonic() + 20
    parent.kill()
    while rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.05)
