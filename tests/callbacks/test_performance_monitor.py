"""A run's figures are the same model's under every layout, on one rank, at the log intervals, and change no numbers."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils.data import DataLoader

from lightning_parallel import PerformanceMonitor
from lightning_parallel.callbacks import performance_monitor
from lightning_parallel.callbacks.performance_monitor import _texts, content
from tests.flops import flop_counter
from tests.strategies.harness import ALL, make_trainer
from tools.workers.pool import WorkerPool

PEAK = 1e9


class Kept(DummyLogger):
    """Keeps what is logged, by step."""

    def __init__(self) -> None:
        super().__init__()
        self.figures: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if any(name.endswith("_per_second") for name in metrics):
            assert step is not None
            self.figures[step] = dict(metrics)


def figures(strategy: str, model: str, options: dict[str, Any], **given: Any) -> dict[int, dict[str, float]]:
    kept = Kept()
    arguments = {"max_epochs": 1, "logger": kept, "log_every_n_steps": 2, "limit_train_batches": 4} | given
    trainer = make_trainer(strategy, [PerformanceMonitor(PEAK)], options, **arguments)
    trainer.fit(ALL[model](), ALL[model].loader(False, 2, 16))
    return kept.figures


def flops_of_a_token(found: dict[str, float], ranks: int) -> float:
    return found["mfu"] * PEAK * ranks / found["tokens_per_second"]


def flops_of_a_forward(model: str) -> float:
    """For each token."""
    module, batch = ALL[model](), next(iter(ALL[model].loader(False, 2, 16)))
    module.log = lambda *_, **__: None
    with flop_counter() as counted:
        module.training_step(batch, 0)
    return counted.get_total_flops() / batch["input_ids"].numel()


@pytest.mark.parametrize(("strategy", "model", "options"), [
    ("sync", "GPT2Untied", {"schedule": "zbv", "microbatches": 2}),
    ("async", "GPT2Untied", {}),
])  # fmt: skip
def test_pipelines_figures_are_logged_on_one_rank_and_count_the_operations_of_one_process(
    pool: WorkerPool, strategy: str, model: str, options: dict[str, Any]
) -> None:
    (flops,) = pool.run(flops_of_a_forward, 1, model, init=False)
    found, other = pool.run(figures, 2, strategy, model, options, init=False)
    assert other == {}
    assert [*found] == [1, 3]
    for each in found.values():
        assert {*each} == {"tokens_per_second", "mfu", "memory_gib/rank0", "memory_gib/rank1"}
        assert flops_of_a_token(each, 2) == pytest.approx(3 * flops, rel=0.03)
        assert all(0.05 < each[f"memory_gib/rank{rank}"] < 50 for rank in range(2))


class Clock:
    """Goes on by a millisecond whenever the monitor looks at it."""

    now = 0.0

    def monotonic(self) -> float:
        self.now += 1e-3
        return self.now


class Sleeps(BoringModel):
    """Its validation takes its time."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.now += 1.0


class Given(BoringModel):
    flops_per_batch = 7000


def fit(module: L.LightningModule, peak: float | None = PEAK, **given: Any) -> dict[int, dict[str, float]]:
    kept = Kept()
    arguments: dict[str, Any] = {"val_check_interval": 3, "limit_val_batches": 0, "log_every_n_steps": 5} | given
    arguments |= {"max_epochs": 1, "limit_train_batches": 6, "logger": kept}
    make_trainer("single", [PerformanceMonitor(peak)], {}, **arguments).fit(module)
    return kept.figures


class Empty(Given):
    """Its first batch has nothing in it."""

    def train_dataloader(self) -> Any:
        return DataLoader([torch.ones(0, 32)] * 6, batch_size=None)


def test_validation_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(performance_monitor, "time", clock)
    (found,) = fit(Sleeps(clock), limit_val_batches=1).values()
    assert found["samples_per_second"] > 4  # four batches of one sample


def test_utilisation_is_of_the_operations_that_are_given_or_left_out() -> None:
    """It is left out above one, of an unknown peak, and of nothing."""
    (found,) = fit(Given()).values()
    assert found["mfu"] * PEAK / found["samples_per_second"] == pytest.approx(7000)
    for module, peak in ((Given(), 1.0), (Given(), None), (Empty(), PEAK)):
        (found,) = fit(module, peak).values()
        assert "mfu" not in found and "memory_gib/rank0" in found
    found = {"samples_per_second": 1.0, "memory_gib/rank0": 1.0, "memory_gib/rank1": 2.0}
    assert _texts(found, "samples") == {"samples/s": "1", "memory": "2.00 GiB"}  # the highest


def test_tokens_are_what_an_integer_tensor_of_two_dimensions_has() -> None:
    ids, mask = torch.ones(3, 5, dtype=torch.int64), torch.ones(3, 5, dtype=torch.bool)
    assert content({"mask": mask, "ids": ids}) == content((torch.ones(3, 2), ids)) == ("tokens", 15)
    assert content([torch.ones(3, 8, 8), torch.ones(3, dtype=torch.int64)]) == ("samples", 3)
    assert content("a text") == ("batches", 1)
