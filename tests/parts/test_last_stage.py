"""Code that runs on the last stage alone meets nobody: what it may do there, and what is refused."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.pool import WorkerPool
from tests.strategies.failures import LIMIT, assert_lost, assert_refused
from tests.strategies.observed import Net, loader, make_trainer


class Meets(Net):
    """Waits for all ranks where one of them never comes."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place

    def meet(self, place: str) -> None:
        if place == self.place:
            self.trainer.strategy.barrier()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.meet("training_step")
        return loss

    def on_train_epoch_end(self) -> None:
        self.meet("on_train_epoch_end")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.logits_and_loss(batch)

    def on_validation_epoch_end(self) -> None:
        self.meet("on_validation_epoch_end")
        if self.place == "checkpoint":
            self.trainer.save_checkpoint("here.ckpt")


def fit_meeting(strategy: str, place: str) -> str:
    trainer = make_trainer(strategy, [])
    trainer.fit(Meets(place), loader(), loader(8, 4, 5))
    return "went on"


@pytest.mark.parametrize(("strategy", "place"), [
    ("sync", "training_step"), ("async", "training_step"), ("sync", "on_train_epoch_end"),
    ("async", "on_validation_epoch_end"), ("sync", "checkpoint"),
])  # fmt: skip
def test_a_meeting_where_only_the_last_stage_is_is_refused(pool: WorkerPool, strategy: str, place: str) -> None:
    hook = "on_validation_epoch_end" if place == "checkpoint" else place
    last, *others = pool.run(fit_meeting, 2, strategy, place, init=False, expect_errors=True, timeout=LIMIT)
    what = "checkpoint" if place == "checkpoint" else "barrier"
    assert_refused([last], "RuntimeError", [f"A {what} needs every rank", hook, "callback"])
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
