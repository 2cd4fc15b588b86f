"""A search before a run puts its own state back: a run that is resumed would begin anew, so it refuses the search."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, LearningRateFinder

import lightning_parallel as lp
from tests.callbacks.test_resumed_moments import Scheduled, run
from tests.strategies.saves import SavesIn

STEPS, SAVED = 15, 8


class Learned(Scheduled):
    """With a learning rate and a batch size to be found."""

    lr, batch_size = 0.1, 2

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr)

    def train_dataloader(self) -> Any:
        return lp.ResumableDataLoader(torch.ones(60, 1), batch_size=self.batch_size)


class SearchesLater(LearningRateFinder):
    """In the middle of a run, which it may."""

    def on_fit_start(self, *_: Any) -> None:
        """Not yet."""


@pytest.mark.parametrize(("strategy", "search", "refused"), [
    (None, lambda: LearningRateFinder(num_training_steps=20, min_lr=1e-4), "LearningRateFinder"),
    (None, lambda: BatchSizeFinder(max_trials=2), "BatchSizeFinder"),
    (lp.PipelineStrategy, lambda: LearningRateFinder(num_training_steps=20), "LearningRateFinder"),  # it loads later
    (None, SearchesLater, None),
])  # fmt: skip
def test_a_search_is_refused_where_a_run_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: Any, search: Any, refused: str | None
) -> None:
    monkeypatch.chdir(tmp_path)  # searches save their own state there

    def fit(resume: Path | None, *callbacks: Callback) -> int:
        """The number of batches."""
        options = {"kind": Learned, "max_epochs": None, "max_steps": STEPS, "limit_val_batches": 0}
        made = "auto" if strategy is None else strategy(stages=1)
        events, *_ = run(resume, None, "", {**options, "callbacks": callbacks}, made)
        return sum(event[0] == "batch" for event in events)

    path = tmp_path / "it.ckpt"
    fit(None, search(), SavesIn("on_train_batch_end", path, SAVED))
    with nullcontext() if refused is None else pytest.raises(ValueError, match=refused):
        assert fit(path, search()) == STEPS - SAVED - 1
    assert fit(path) == STEPS - SAVED - 1
