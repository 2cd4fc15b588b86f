"""A resumed run goes on with its batches and its random numbers, wherever it was saved."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, LearningRateFinder
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader

import lightning_parallel as lp
from tests.strategies.saves import SavesIn
from tools.workers.pool import WorkerPool

STEPS, SAVED, EPOCH = 15, 8, 6


class Remembers(L.LightningModule):
    """Its data come in an order that torch's default generator decides, and so does the noise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(1, 4), nn.Linear(4, 1)
        self.seen: list[tuple[list[float], float]] = []

    def training_step(self, batch: Any) -> Any:
        self.seen.append((batch.flatten().tolist(), torch.rand(()).item()))
        return self.last(torch.tanh(self.first(batch))).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)

    def train_dataloader(self) -> DataLoader:
        return lp.ResumableDataLoader(torch.arange(12.0)[:, None], batch_size=2, shuffle=True)


def run(
    strategy: Any, devices: int, resume: Path | None, *callbacks: Callback, kind: Callable[[], Remembers] = Remembers
) -> list[tuple[list[float], float]]:
    """What each step of a run has seen."""
    torch.manual_seed(5)
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_steps=STEPS, callbacks=[*callbacks], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = kind()
    trainer.fit(module, ckpt_path=resume)
    return module.seen


def test_a_save_inside_a_batch_has_it_before_its_update(tmp_path: Path) -> None:
    path = tmp_path / "inside.ckpt"
    whole = run("auto", 1, None, SavesIn("on_before_optimizer_step", path, SAVED), lp.ExactResume())
    resumed = run("auto", 1, path, lp.ExactResume())
    # What the step had drawn before the save it draws again, so the next epoch may have another order.
    left = EPOCH - SAVED % EPOCH
    assert [batch for batch, _ in resumed[:left]] == [batch for batch, _ in whole[SAVED:][:left]]


def staged(stages: int, path: Path, resume: bool) -> list[tuple[list[float], float]]:
    # With `layers`, one stage is a pipeline too: steps don't move the generators that loaders draw from.
    strategy = lp.PipelineStrategy(layers=["first", "last"][:stages], microbatches=1)
    callbacks = [] if resume else [SavesIn("on_train_batch_start", path, SAVED)]
    return run(strategy, stages, path if resume else None, *callbacks)


def test_another_number_of_stages_goes_on_with_the_same_batches(pool: WorkerPool, tmp_path: Path) -> None:
    """In the next epoch too, of which the generators decide."""
    path = tmp_path / "stages.ckpt"
    whole = pool.run(staged, 1, 1, path, resume=False, init=False)[0]
    resumed = pool.run(staged, 2, 2, path, resume=True, init=False)[0]
    steps = {repr(batch) for batch, _ in resumed}
    assert steps == {repr(batch) for batch, _ in whole[-len(steps) :]}


class TwoLoaders(Remembers):
    mode = "max_size"

    def training_step(self, batch: Any) -> Any:
        long, short = batch
        self.seen.append((long.flatten().tolist(), -1.0 if short is None else short.sum().item()))
        return self.last(torch.tanh(self.first(long))).square().mean()

    def train_dataloader(self) -> Any:
        long = super().train_dataloader()
        short = lp.ResumableDataLoader(torch.arange(100.0, 104.0)[:, None], batch_size=2, shuffle=True)
        return CombinedLoader([long, short], self.mode)


@pytest.mark.parametrize("mode", ["max_size", "max_size_cycle", "min_size"])
@pytest.mark.parametrize(("hook", "saved"), [
    ("on_train_batch_start", 3), ("on_train_batch_end", 1), ("on_train_batch_end", 5)
])  # fmt: skip
def test_loaders_of_unequal_lengths_go_on(tmp_path: Path, mode: str, hook: str, saved: int) -> None:
    path = tmp_path / "inside.ckpt"
    kind = type("Kind", (TwoLoaders,), {"mode": mode})
    whole = run("auto", 1, None, SavesIn(hook, path, saved), lp.ExactResume(), kind=kind)
    resumed = run("auto", 1, path, lp.ExactResume(), kind=kind)
    assert resumed == whole[saved + (hook == "on_train_batch_end") :]


# -- a search before a run puts its own state back: a run that is resumed would begin anew, so it refuses the search ---


class Learned(Remembers):
    """With a learning rate and a batch size to be found."""

    lr, batch_size = 0.1, 2

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr)

    def train_dataloader(self) -> DataLoader:
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
        made = "auto" if strategy is None else strategy(stages=1)
        return len(run(made, 1, resume, *callbacks, lp.ExactResume(), kind=Learned))

    path = tmp_path / "it.ckpt"
    fit(None, search(), SavesIn("on_train_batch_end", path, SAVED))
    with nullcontext() if refused is None else pytest.raises(ValueError, match=refused):
        assert fit(path, search()) == STEPS - SAVED - 1
    assert fit(path) == STEPS - SAVED - 1
