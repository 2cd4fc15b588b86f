"""Code that runs on the last stage alone meets nobody: what it may do there, and what is refused."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.strategies.failures import LIMIT, assert_lost, assert_refused
from tests.strategies.observed import Net, loader, make_trainer
from tools.workers.pool import WorkerPool


class Saves(Net):
    """Saves where other ranks never come."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place

    def save(self, place: str) -> None:
        if place == self.place:
            self.trainer.save_checkpoint("here.ckpt")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.save("training_step")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.logits_and_loss(batch)

    def on_validation_epoch_end(self) -> None:
        self.save("on_validation_epoch_end")


def fit_saving(strategy: str, place: str) -> str:
    trainer = make_trainer(strategy, [])
    trainer.fit(Saves(place), loader(), loader(8, 4, 5))
    return "went on"


@pytest.mark.parametrize(("strategy", "place"), [("sync", "training_step"), ("async", "on_validation_epoch_end")])
def test_a_checkpoint_where_not_all_ranks_meet_is_refused(pool: WorkerPool, strategy: str, place: str) -> None:
    last, *others = pool.run(fit_saving, 2, strategy, place, init=False, expect_errors=True, timeout=LIMIT)
    assert_refused([last], "RuntimeError", ["A checkpoint needs every rank", place, "callback"])
    assert_lost(others)


def log_directory(strategy: str) -> list[str | None]:
    seen: list[str | None] = []

    class Looks(Net):
        def on_train_epoch_end(self) -> None:
            seen.append(self.trainer.log_dir)

    make_trainer(strategy, [], max_epochs=1, default_root_dir="runs").fit(Looks(), loader())
    return seen


def test_the_log_directory_may_be_asked_for_where_only_the_last_stage_is(pool: WorkerPool) -> None:
    last, first = pool.run(log_directory, 2, "sync", init=False, timeout=LIMIT)
    assert [os.path.basename(str(path)) for path in last] == ["runs"]
    assert first == []
