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

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.trainer.save_checkpoint("here.ckpt")
        return loss


class SavesLater(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.logits_and_loss(batch)

    def on_validation_epoch_end(self) -> None:
        self.trainer.save_checkpoint("here.ckpt")


def fit_saving(strategy: str, kind: type[Net]) -> None:
    make_trainer(strategy, []).fit(kind(), loader(), loader(8, 4, 5))


@pytest.mark.parametrize(("strategy", "kind", "place"), [
    ("sync", Saves, "training_step"), ("async", SavesLater, "on_validation_epoch_end"),
])  # fmt: skip
def test_a_checkpoint_where_not_all_ranks_meet_is_refused(
    pool: WorkerPool, strategy: str, kind: type[Net], place: str
) -> None:
    last, *others = pool.run(fit_saving, 2, strategy, kind, init=False, expect_errors=True, timeout=LIMIT)
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
