"""A search before a run puts its own state back: a run that is resumed would begin anew, so it refuses the search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, LearningRateFinder, ModelCheckpoint
from torch import nn

import lightning_parallel as lp


class Learned(L.LightningModule):
    """With a learning rate and a batch size to be found."""

    lr, batch_size = 0.1, 2

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.steps: list[int] = []

    def training_step(self, batch: Any) -> Any:
        self.steps.append(self.global_step)
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr)

    def train_dataloader(self) -> Any:
        return lp.ResumableDataLoader(torch.ones(60, 1), batch_size=self.batch_size)


def fit(folder: Path, steps: int, strategy: Any, *callbacks: Callback, resumed: bool = False) -> Learned:
    keeper = ModelCheckpoint(folder / "saved", save_last=True)
    trainer = L.Trainer(
        accelerator="cpu", strategy=strategy, devices=1, max_steps=steps, default_root_dir=folder, logger=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[*callbacks, lp.ExactResume(), keeper],
    )  # fmt: skip
    module = Learned()
    trainer.fit(module, ckpt_path=folder / "saved" / "last.ckpt" if resumed else None)
    return module


@pytest.mark.parametrize(("kind", "name"), [
    (lambda: LearningRateFinder(num_training_steps=20, min_lr=1e-4), "LearningRateFinder"),
    (lambda: BatchSizeFinder(max_trials=2), "BatchSizeFinder"),
])  # fmt: skip
def test_a_search_is_refused_where_a_run_is_resumed(tmp_path: Path, kind: Any, name: str) -> None:
    fit(tmp_path, 3, "auto", kind())
    with pytest.raises(ValueError, match=name):
        fit(tmp_path, 5, "auto", kind(), resumed=True)
    assert fit(tmp_path, 5, "auto", resumed=True).steps == [3, 4]


def test_it_is_refused_before_training_where_the_checkpoint_is_loaded_later(tmp_path: Path) -> None:
    fit(tmp_path, 3, lp.PipelineStrategy(stages=1))
    with pytest.raises(ValueError, match="LearningRateFinder"):
        fit(tmp_path, 5, lp.PipelineStrategy(stages=1), LearningRateFinder(num_training_steps=20), resumed=True)


def test_one_in_the_middle_of_a_run_may_search(tmp_path: Path) -> None:
    class Later(LearningRateFinder):
        def on_fit_start(self, *_: Any) -> None:
            """Not yet."""

    fit(tmp_path, 3, "auto")
    assert fit(tmp_path, 5, "auto", Later(), resumed=True).steps == [3, 4]
