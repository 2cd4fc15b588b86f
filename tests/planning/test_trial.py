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
from torch import Tensor, nn
from torch.multiprocessing import start_processes  # type: ignore[attr-defined]

from lightning_parallel import plan
from lightning_parallel.comparison import timing
from lightning_parallel.comparison.held import Held
from tests.planning.test_plan import Sleepers
from tests.thorough import thorough
from tools.faults.models import Blocks
from tools.workers.pool import WorkerPool

SLEEP = 0.001  # seconds
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
def start_method() -> str:
    return "forkserver"


@pytest.fixture
def started(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, start_method: str) -> None:
    """Ranks are forked from the pool's server, which has imported all that they need; users' import it anew."""
    pool.run(os.getpid, 1, init=False)  # starts the server

    def start(*args: Any, **kwargs: Any) -> Any:
        return start_processes(*args, **kwargs | {"start_method": start_method})

    monkeypatch.setattr(timing.torch_multiprocessing, "start_processes", start)


@pytest.mark.usefixtures("started", "untimed")
@pytest.mark.parametrize("start_method", ["forkserver", *thorough("spawn")])
def test_the_best_are_run_and_ranked_by_what_was_measured() -> None:
    found = plan(Sleepers(*[SLEEP] * 4), torch.randn(8, 4), devices=2, measure=2)
    first, second, *others = found.rows
    assert first.measured is not None and second.measured is not None
    assert all(row.measured is None for row in others)
    assert first.measured.seconds <= second.measured.seconds
    asleep = 8 * 4 * 3 * SLEEP  # of all samples and layers, forward and backward
    assert first.measured.seconds > asleep / 2
    assert found.best is first and "measured" in str(found)


@pytest.mark.usefixtures("started", "untimed")
def test_one_that_fails_is_refused_with_its_error() -> None:
    found = plan(FailsInDDP(), FailsInDDP.batches()[0], devices=2, measure=3)
    assert "no luck on rank 1" in found.refused["ddp, 2 replicas"]
    assert {row.strategy for row in found.found} == {"fully_sharded", "tensor_parallel"}
    assert found.best.measured is not None


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


def test_what_cannot_be_measured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Blocks.batches()[0]
    with pytest.raises(ValueError, match="measure=-1"):
        plan(Blocks(), batch, measure=-1)
    with pytest.raises(ValueError, match="measure=3, device='h100'"):
        plan(Blocks(), batch, measure=3, device="h100")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="measure=3, devices=4: this machine has 1"):
        plan(Blocks(), batch, devices=4, measure=3)


def test_memory_is_held_until_it_is_freed() -> None:
    weight = nn.Parameter(torch.zeros(100, 100))
    held = Held([weight, weight[1:]])
    own = 4 * 100 * 100
    assert held.most == own
    with held:
        kept = weight * 2
        for _ in range(3):
            weight * 3
        kept.view(-1)[:50].add_(1)
    assert held.most == 3 * own
    with held:
        again = kept @ kept + 1  # of this the product is freed
        large = torch.empty(2 * own, dtype=torch.int8)
        large.untyped_storage().resize_(0)
        another = torch.empty(own // 4)
    assert held.most == 5 * own
    del again, large, another
