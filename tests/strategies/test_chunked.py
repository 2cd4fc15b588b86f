"""Schedules with several chunks a stage, with all else that pipelines do: the numbers of a single process."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_parallel import PipelineStrategy
from lightning_parallel.ranks.layout import Placement
from lightning_parallel.schedules.actions import placement
from tests.pool import WorkerPool
from tests.strategies.equality import assert_equal
from tests.strategies.harness import make_trainer, train
from tests.strategies.models import BATCH, MODELS
from tests.thorough import thorough

ALL_AT_ONCE = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
FULLY = {"stages": 2, "data_parallel": 2, "data_parallel_kind": "fully_shard"}
TENSOR = {"stages": 2, "tensor_parallel": 2, "sequence_parallel": True}


@pytest.mark.parametrize(
    ("model", "stages", "schedule"),
    [
        ("Shifts", 3, "vhalf"),
        *thorough(
            ("Shifts", 3, "interleaved"),
            ("GPT2", 3, "interleaved"),
            *((model, 2, schedule) for model in MODELS for schedule in ("interleaved", "zbv")),
            *((model, 3, "vmin") for model in MODELS),
        ),
    ],
)
def test_unmodified_models_train_as_in_one_process(
    pool: WorkerPool, single: Any, model: str, stages: int, schedule: Any
) -> None:
    reports = pool.run(train, stages, model, "sync", {"schedule": schedule, "microbatches": 4}, init=False)
    assert_equal(reports, single(model))


def held_in_a_fit(limit: float | str, *, evaluates: bool = False) -> int:
    """The bytes of activations that this rank expects to hold. ``evaluates``: before it trains."""
    options = {"schedule": "zbv", "microbatches": BATCH, "activation_memory": limit}
    trainer = make_trainer("sync", [], options, max_epochs=1)
    module, loader = MODELS["Shifts"](), MODELS["Shifts"].loader()
    if evaluates:
        trainer.validate(module, loader, verbose=False)
    trainer.fit(module, loader)
    assert isinstance(trainer.strategy, PipelineStrategy)
    return trainer.strategy.activation_bytes()


def test_a_limit_of_activations_in_bytes_is_kept_to(pool: WorkerPool) -> None:
    most = max(pool.run(held_in_a_fit, 3, 1.0, init=False))
    assert most / 2 < max(pool.run(held_in_a_fit, 3, f"{0.8 * most / 2**10:.3f}KiB", init=False)) <= 0.8 * most
    for error in pool.run(held_in_a_fit, 3, "0.001KiB", init=False, expect_errors=True):
        assert "activation_memory='0.001KiB': V-Min" in error
    for error in pool.run(held_in_a_fit, 3, "1GiB", evaluates=True, init=False, expect_errors=True):
        assert "activation_memory='1GiB': this module was cut for an evaluation" in error


@pytest.mark.parametrize(
    ("model", "ranks", "options", "schedule", "trainer_options"),
    [
        ("ShardableLlama", 4, {**TENSOR, "activation_checkpointing": True}, "zbv", ALL_AT_ONCE),
        ("Shifts", 4, {**FULLY, "microbatches": BATCH // 2}, "zbv", {"accumulate_grad_batches": 2}),
        *thorough(
            *(("Blocks", 4, {"stages": 2, "data_parallel": 2}, kind, ALL_AT_ONCE) for kind in ("interleaved", "zbv")),
            ("Llama", 4, {**FULLY, "activation_checkpointing": True}, "interleaved", ALL_AT_ONCE),
            ("GPT2", 4, FULLY, "zbv", {}),
            ("Blocks", 4, FULLY, "interleaved", {}),
            ("Shifts", 4, {**FULLY, "microbatches": BATCH // 2}, "interleaved", {"accumulate_grad_batches": 2}),
            ("ShardableGPT2", 4, TENSOR, "interleaved", {}),
            ("Blocks", 2, {"activation_checkpointing": True}, "zbv", ALL_AT_ONCE),
        ),
    ],
)
def test_other_axes_and_settings_with_chunks_equal_one_process(
    pool: WorkerPool,
    single: Any,
    model: str,
    ranks: int,
    options: dict[str, Any],
    schedule: str,
    trainer_options: dict[str, Any],
) -> None:
    given, replicas = {"microbatches": 2, **options, "schedule": schedule}, options.get("data_parallel", 1)
    share = BATCH // replicas
    reports = pool.run(train, ranks, model, "sync", given, init=False, batch_size=share, **trainer_options)
    assert_equal(reports, single(model, **trainer_options), replicas=replicas)


# -- settings ---------------------------------------------------------------------------------------------------------


def test_chunks_are_a_setting_of_the_interleaved_schedule() -> None:
    def placed(**options: Any) -> Placement:
        _, make = PipelineStrategy(**options).options.generator
        return placement(make(2, 4))

    assert placed(schedule="interleaved", chunks=3) == (0, 1, 0, 1, 0, 1)
    assert placed(schedule="interleaved") == (0, 1, 0, 1)
    with pytest.raises(ValueError, match="chunks=2: only schedule='interleaved' takes their number"):
        PipelineStrategy(schedule="zbv", chunks=2)
    with pytest.raises(ValueError, match="activation_memory=0.5: only schedule='zbv' takes a limit"):
        PipelineStrategy(schedule="vhalf", activation_memory=0.5)
    with pytest.raises(ValueError, match="activation_memory='6 gigs': give a number from 0 to 1, or a string such as"):
        PipelineStrategy(schedule="zbv", activation_memory="6 gigs")


def test_a_model_with_fewer_layers_than_chunks_is_refused_before_training(pool: WorkerPool) -> None:
    options = {"schedule": "interleaved", "chunks": 40}
    for failure in pool.run(train, 2, "LeNet", "sync", options, init=False, expect_errors=True):
        assert "stages=2 with 40 chunks each, but the model has only" in failure
