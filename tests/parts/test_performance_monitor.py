"""A run's figures are the same model's under every layout, on one rank, at the log intervals, and change no numbers."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn

from lightning_parallel import PerformanceMonitor
from lightning_parallel.parts.performance import content, memory_in_use
from tests.pool import WorkerPool
from tests.strategies.harness import ALL, make_trainer, train

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


@pytest.mark.parametrize(("strategy", "model", "options", "more"), [
    ("sync", "GPT2Untied", {"microbatches": 2}, {"bubble_theory"}),
    ("sync", "GPT2Untied", {"schedule": "zbv", "microbatches": 2, "timeline": True},
     {"bubble_theory", "bubble_measured"}),
    ("async", "GPT2Untied", {"timeline": True}, {"bubble_theory", "bubble_measured", "staleness"}),
    ("tensor", "ShardableGPT2", {}, set()),
    ("fsdp", "GPT2Untied", {}, set()),
    ("ddp", "GPT2Untied", {}, set()),
])  # fmt: skip
def test_figures_are_logged_on_one_rank_and_count_the_operations_of_one_process(
    pool: WorkerPool, strategy: str, model: str, options: dict[str, Any], more: set[str]
) -> None:
    (alone,) = pool.run(figures, 1, "single", model, {}, init=False)
    assert [*alone] == [1, 3]
    assert {*alone[3]} == {"tokens_per_second", "mfu", "memory_gib/rank0"}
    found, other = pool.run(figures, 2, strategy, model, options, init=False)
    assert other == {}
    assert [*found] == [1, 3]
    for each in found.values():
        assert {*each} == {"tokens_per_second", "mfu", "memory_gib/rank0", "memory_gib/rank1"} | more
        assert flops_of_a_token(each, 2) == pytest.approx(flops_of_a_token(alone[3], 1), rel=0.03)
        assert all(0.05 < each[f"memory_gib/rank{rank}"] < 50 for rank in range(2))
        assert 0 <= each.get("bubble_theory", 0) < 1 and 0 < each.get("bubble_measured", 0.5) < 1
    if "staleness" in more:
        assert 0 < found[3]["staleness"] <= 1


def test_a_training_has_the_same_numbers_with_and_without(pool: WorkerPool) -> None:
    (plain,) = pool.run(train, 1, "GPT2", init=False)
    (watched,) = pool.run(train, 1, "GPT2", callbacks=[PerformanceMonitor(PEAK)], log_every_n_steps=1, init=False)
    assert plain.losses == watched.losses
    assert all(torch.equal(plain.weights[name], weight) for name, weight in watched.weights.items())


class Sleeps(BoringModel):
    """Its validation takes its time."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(1)


class Given(BoringModel):
    flops_per_batch = 7000


class Manual(BoringModel):
    """Computes twice in a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for _ in range(2):
            self.manual_backward(self.layer(batch).sum())


class Doubles(nn.Linear):
    """torch.compile leaves torch's own layers as they are."""

    def __init__(self) -> None:
        super().__init__(32, 2)

    def forward(self, rows: Tensor) -> Tensor:
        return 2 * super().forward(rows)


def fit(module: L.LightningModule, **given: Any) -> dict[int, dict[str, float]]:
    kept = Kept()
    arguments: dict[str, Any] = {"val_check_interval": 3, "limit_val_batches": 0} | given
    L.Trainer(
        accelerator="cpu", devices=1, max_steps=-1, max_epochs=1, limit_train_batches=6, logger=kept,
        log_every_n_steps=5, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[PerformanceMonitor(PEAK)], **arguments,
    ).fit(module)  # fmt: skip
    return kept.figures


def test_validation_does_not_count() -> None:
    (found,) = fit(Sleeps(), limit_val_batches=1).values()
    assert found["samples_per_second"] > 4  # four batches of one sample


@pytest.mark.parametrize(("module", "flops"), [
    (BoringModel(), 3 * 2 * 32 * 2), (Given(), 7000), (Manual(), 2 * 2 * 2 * 32 * 2)
])  # fmt: skip
def test_the_operations_of_a_sample_are_three_forwards_unless_they_are_given_or_seen(
    module: L.LightningModule, flops: int
) -> None:
    (found,) = fit(module).values()
    assert found["mfu"] * PEAK / found["samples_per_second"] == pytest.approx(flops)


def test_a_compiled_model_runs_its_first_batch_compiled_and_has_no_utilisation() -> None:
    module, ran = BoringModel(), []

    def backend(graph: Any, inputs: Any) -> Any:
        ran.append(graph)
        return graph.forward

    module.layer = Doubles()
    module.layer.compile(backend=backend)
    (found,) = fit(module).values()
    assert ran and {*found} == {"samples_per_second", "memory_gib/rank0"}


def test_tokens_are_what_an_integer_tensor_of_two_dimensions_has() -> None:
    ids, mask = torch.ones(3, 5, dtype=torch.int64), torch.ones(3, 5, dtype=torch.bool)
    assert content({"mask": mask, "ids": ids}) == content((torch.ones(3, 2), ids)) == ("tokens", 15)
    assert content([torch.ones(3, 8, 8), torch.ones(3, dtype=torch.int64)]) == ("samples", 3)
    assert content("a text") == ("batches", 1)


def test_memory_grows_with_what_a_process_holds() -> None:
    before = memory_in_use(torch.device("cpu"))
    held = torch.ones(2**26)  # 256 MiB
    assert memory_in_use(torch.device("cpu")) - before > 0.9 * held.nbytes


def test_a_peak_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="peak_flops=0: give the FLOP/s of one device"):
        PerformanceMonitor(0)
