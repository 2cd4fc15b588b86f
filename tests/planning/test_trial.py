"""What becomes of a plan: its best layouts are run, and ranked by what they take; it is recorded and drawn."""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import replace
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
from lightning_parallel.planning.memory import Memory
from lightning_parallel.planning.picture import frontier
from lightning_parallel.planning.table import Plan
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


# -- records and pictures ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found() -> Plan:
    return plan(Blocks(), Blocks.batches()[0], devices=4, device="h100", memory="3GiB")


def test_no_layout_beats_those_of_the_frontier(found: Plan) -> None:
    best = frontier(found.rows)
    assert best[0].seconds == min(row.seconds for row in found.rows)
    assert best[-1].memory.total == min(row.memory.total for row in found.rows)
    for one in best:
        others = [row for row in found.rows if row.seconds < one.seconds and row.memory.total <= one.memory.total]
        assert not others


def test_records_have_what_the_table_has(found: Plan) -> None:
    records = found.records()
    assert len(records) == len(found.found)
    for record, row in zip(records, found.found, strict=True):
        assert (record["layout"], record["fits"], record["bytes"]) == (str(row.choice), row.fits, row.memory.total)
        assert sum(v for k, v in record.items() if k.endswith("_bytes")) == row.memory.total
        if row.fits:
            parts = sum(v for k, v in record.items() if k.endswith("_seconds"))
            assert parts == pytest.approx(row.seconds) == record["seconds"]
    assert {record["seconds"] is None for record in records if not record["fits"]} == {True}
    assert [record["verdict"] for record in records].count("best") == 1


def test_a_plan_is_drawn(found: Plan, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert found.best.choice.stages == 1
    found.draw(tmp_path / "one.png")
    assert [file.name for file in tmp_path.iterdir()] == ["one.png"]
    small = replace(found.best, ranks=[Memory()], measured=timing.Measured(1e-3, 1))
    pipeline = next(row for row in found.rows if row.choice.stages > 1 and not row.choice.is_late)
    replace(found, found=[pipeline, small, *found.found]).draw(tmp_path / "two.svg")
    assert {file.name for file in tmp_path.iterdir()} == {"one.png", "two.svg", "two_schedule.svg"}


def test_what_does_not_fit_is_not_drawn(found: Plan, tmp_path: Path) -> None:
    nothing = replace(found, found=[replace(row, fits=False) for row in found.found])
    with pytest.raises(ValueError, match="no layout"):
        nothing.draw(tmp_path / "none.png")
    assert {record["verdict"].split()[0] for record in nothing.records()} == {"needs"}
