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
from torch.utils.data import DataLoader

from lightning_parallel import PerformanceMonitor
from lightning_parallel.callbacks.performance import content, flops_per_second, memory_in_use, share_of
from lightning_parallel.callbacks.performance_monitor import _texts
from tests.flops import flop_counter
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


def flops_of_a_forward(model: str) -> float:
    """For each token."""
    module, batch = ALL[model](), next(iter(ALL[model].loader(False, 2, 16)))
    module.log = lambda *_, **__: None
    with flop_counter() as counted:
        module.training_step(batch, 0)
    return counted.get_total_flops() / batch["input_ids"].numel()


@pytest.mark.parametrize(("strategy", "model", "options", "more"), [
    ("sync", "GPT2Untied", {"microbatches": 2}, {"bubble_theory"}),
    ("sync", "GPT2Untied", {"stages": 1, "data_parallel": 2}, {"bubble_theory"}),
    ("sync", "GPT2Untied", {"schedule": "zbv", "microbatches": 2, "timeline": True},
     {"bubble_theory", "bubble_measured"}),
    ("async", "GPT2Untied", {"timeline": True}, {"bubble_theory", "bubble_measured", "staleness"}),
])  # fmt: skip
def test_pipelines_figures_are_logged_on_one_rank_and_count_the_operations_of_one_process(
    pool: WorkerPool, strategy: str, model: str, options: dict[str, Any], more: set[str]
) -> None:
    (flops,) = pool.run(flops_of_a_forward, 1, model, init=False)
    found, other = pool.run(figures, 2, strategy, model, options, init=False)
    assert other == {}
    assert [*found] == [1, 3]
    for each in found.values():
        assert {*each} == {"tokens_per_second", "mfu", "memory_gib/rank0", "memory_gib/rank1"} | more
        assert flops_of_a_token(each, 2) == pytest.approx(3 * flops, rel=0.03)
        assert all(0.05 < each[f"memory_gib/rank{rank}"] < 50 for rank in range(2))
        assert 0 <= each.get("bubble_theory", 0) < 1 and 0 < each.get("bubble_measured", 0.5) < 1
    if "staleness" in more:
        assert 0 < found[3]["staleness"] <= 1


# Attention and the head are computed by each rank as a whole.
MLP_ALONE = {"plan": {"model.transformer.h.*.mlp.c_fc": "column", "model.transformer.h.*.mlp.c_proj": "row"}}
PIECES = {"sequence_parallel": True}


@pytest.mark.parametrize(("strategy", "model", "options"), [
    ("tensor", "ShardableGPT2", {}), ("tensor", "ShardableGPT2", MLP_ALONE), ("tensor", "ShardableGPT2", PIECES),
    ("fsdp", "GPT2Untied", {}), ("ddp", "GPT2Untied", {}),
])  # fmt: skip
def test_other_strategies_count_the_operations_of_one_process_too(
    pool: WorkerPool, strategy: str, model: str, options: dict[str, Any]
) -> None:
    (flops,) = pool.run(flops_of_a_forward, 1, model, init=False)
    found, other = pool.run(figures, 2, strategy, model, options, init=False)
    assert other == {} and [*found] == [1, 3]
    for each in found.values():
        assert {*each} == {"tokens_per_second", "mfu", "memory_gib/rank0", "memory_gib/rank1"}
        assert flops_of_a_token(each, 2) == pytest.approx(3 * flops, rel=0.01)  # shards may be uneven


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


def fit(module: L.LightningModule, peak: float = PEAK, **given: Any) -> dict[int, dict[str, float]]:
    kept = Kept()
    arguments: dict[str, Any] = {"val_check_interval": 3, "limit_val_batches": 0, "log_every_n_steps": 5} | given
    L.Trainer(
        accelerator="cpu", devices=1, max_steps=-1, max_epochs=1, limit_train_batches=6, logger=kept,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[PerformanceMonitor(peak)], **arguments,
    ).fit(module)  # fmt: skip
    return kept.figures


def test_validation_does_not_count() -> None:
    (found,) = fit(Sleeps(), limit_val_batches=1).values()
    assert found["samples_per_second"] > 4  # four batches of one sample


def test_the_operations_of_a_batch_may_be_given() -> None:
    (found,) = fit(Given()).values()
    assert found["mfu"] * PEAK / found["samples_per_second"] == pytest.approx(7000)


def test_a_utilisation_of_more_than_all_there_is_is_not_told() -> None:
    (found,) = fit(Given(), peak=1.0).values()
    assert {*found} == {"samples_per_second", "memory_gib/rank0"}


def test_the_progress_bar_says_whether_a_bubble_was_measured() -> None:
    theory: dict[str, float] = {"samples_per_second": 1.0, "memory_gib/rank0": 1.0, "bubble_theory": 0.25}
    texts = {"samples/s": "1", "memory": "1.00 GiB"}
    assert _texts(theory, "samples") == texts | {"bubble_theory": "25.0%"}
    assert _texts(theory | {"bubble_measured": 0.375}, "samples") == texts | {"bubble_measured": "37.5%"}


def test_a_first_batch_with_nothing_in_it_has_no_utilisation() -> None:
    class Empty(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(torch.ones(1, 32)).sum()

        def train_dataloader(self) -> Any:
            return DataLoader([{"boxes": torch.ones(0, 4, dtype=torch.int64)}] * 6, batch_size=None)

    (found,) = fit(Empty()).values()
    assert "mfu" not in found


def test_an_interval_of_none_logs_nothing() -> None:
    assert fit(BoringModel(), log_every_n_steps=0) == {}


def doubled(rows: Tensor) -> Tensor:
    return 2 * rows


class Compiled(BoringModel):
    """With a function that torch.compile has compiled, and an operator that takes functions."""

    def __init__(self) -> None:
        super().__init__()
        self.ran = 0
        self.doubled = torch.compile(doubled, backend=self._backend)

    def _backend(self, graph: Any, inputs: Any) -> Any:
        def run(*arguments: Any) -> Any:
            self.ran += 1
            return graph(*arguments)

        return run

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = torch.cond(batch.sum() > 0, torch.sin, torch.cos, (batch,))
        return self.doubled(self.layer(rows)).sum()


def test_what_is_compiled_stays_so_and_operators_that_take_functions_run() -> None:
    module = Compiled()
    (found,) = fit(module).values()
    assert module.ran == 6
    assert {*found} == {"samples_per_second", "mfu", "memory_gib/rank0"}


def test_a_model_of_which_the_graph_shows_a_part_only_has_no_utilisation() -> None:
    class Hidden(BoringModel):
        def configure_model(self) -> None:
            self.layer = torch.compile(nn.Linear(32, 2), backend="aot_eager")

    (found,) = fit(Hidden()).values()
    assert {*found} == {"samples_per_second", "memory_gib/rank0"}


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


# -- a device's peak ---------------------------------------------------------------------------------------------------


def test_a_device_s_speed_is_in_flops_per_second() -> None:
    """Between those of the slowest and of the fastest machine, not in another unit."""
    assert 1e8 < flops_per_second(torch.device("cpu")) < 1e14


def test_a_device_s_speed_is_that_of_the_products_that_nothing_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first products, and most of the others, take a time slice of another process longer."""
    now, read = 0.0, 0

    def clock() -> float:
        nonlocal now, read
        read += 1
        now += 0.001 if read % 7 == 0 else 0.021
        return now

    monkeypatch.setattr("lightning_parallel.callbacks.performance.time.perf_counter", clock)
    monkeypatch.setattr("lightning_parallel.callbacks.performance._TIMED", 1.0)
    assert flops_per_second(torch.device("cpu")) * 1.001 >= 2 * 256**3 / 0.001
    assert flops_per_second(torch.device("cpu")) <= 2 * 512**3 / 0.001 * 1.001


def test_ranks_share_a_gpu_and_the_cores_that_there_are_too_few_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(6))
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    assert [share_of(torch.device("cpu"), ranks) for ranks in (1, 3, 6)] == [1, 1, 0.5]
    assert share_of(torch.device("cuda"), 4) == 0.25
