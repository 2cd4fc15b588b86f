"""Schedules with several chunks a stage, with all else that pipelines do: the numbers of a single process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_parallel import PipelineStrategy
from lightning_parallel.ranks.layout import Placement
from lightning_parallel.schedules.actions import Action, Backward, Forward, Schedule, Step, placement
from lightning_parallel.schedules.generators import one_at_a_time
from lightning_parallel.schedules.v_shaped import zbv
from tests.pool import WorkerPool
from tests.strategies.equality import assert_equal
from tests.strategies.harness import make_trainer, train
from tests.strategies.models import BATCH, MODELS, SAMPLES, Base
from tests.thorough import thorough

ALL_AT_ONCE = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
FULLY = {"stages": 2, "data_parallel": 2, "data_parallel_kind": "fully_shard"}
TENSOR = {"stages": 2, "tensor_parallel": 2, "sequence_parallel": True}


def in_order(stages: int, microbatches: int) -> Schedule:
    """ZB-V in a run's first batch on GPUs."""
    return [one_at_a_time(actions) for actions in zbv(stages, microbatches)]


@pytest.mark.parametrize(
    ("model", "stages", "schedule"),
    [
        ("Shifts", 3, "interleaved"),
        ("Blocks", 2, in_order),
        ("Shifts", 3, "vhalf"),
        *thorough(
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


@pytest.mark.parametrize("limit", [0.5, "1KiB"])
def test_one_process_has_nothing_to_limit(pool: WorkerPool, limit: float | str) -> None:
    given = {"schedule": "zbv", "activation_memory": limit}
    (report,) = pool.run(train, 1, "Shifts", "sync", given, init=False)
    (plain,) = pool.run(train, 1, "Shifts", "single", init=False)
    assert report.losses == plain.losses


@pytest.mark.parametrize(
    ("model", "ranks", "options", "schedule", "trainer_options"),
    [
        ("Blocks", 4, {"stages": 2, "data_parallel": 2}, "interleaved", ALL_AT_ONCE),
        ("ShardableLlama", 4, {**TENSOR, "activation_checkpointing": True}, "zbv", ALL_AT_ONCE),
        ("Shifts", 4, {**FULLY, "microbatches": BATCH // 2}, "zbv", {"accumulate_grad_batches": 2}),
        *thorough(
            ("Blocks", 4, {"stages": 2, "data_parallel": 2}, "zbv", ALL_AT_ONCE),
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


class Crops(Base):
    """As SwaV: one model for all crops of a batch, and a loss that begins with zeros, into which terms are added."""

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def loss(self, batch: Any) -> Tensor:
        outputs = [self.net(batch * scale) for scale in (1.0, 0.5, 0.3, 0.7)]
        loss = outputs[0].new_zeros(1)
        for output in outputs[1:]:
            loss += F.mse_loss(output, outputs[0].detach().softmax(-1))
        return loss.sum()

    @classmethod
    def samples(cls) -> list[Any]:
        return [*torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(3))]


def test_a_loss_may_be_added_up_in_place(pool: WorkerPool) -> None:
    (expected,) = pool.run(train, 1, Crops, init=False, max_epochs=1)
    options = {"microbatches": 4, "schedule": "zbv"}
    assert_equal(pool.run(train, 2, Crops, "sync", options, init=False, max_epochs=1), expected)


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


def there_and_back(stages: int, microbatches: int) -> Schedule:
    """Chunks in a V, one microbatch after the other."""
    lists: Schedule = [[] for _ in range(stages)]
    places = [*reversed(range(stages)), *range(stages)]
    for k in range(microbatches):
        forwards: list[Action] = [Forward(chunk, k) for chunk in range(2 * stages)]
        for chunk, action in [*enumerate(forwards), *((c, Backward(c, k)) for c in reversed(range(2 * stages)))]:
            lists[places[chunk]].append(action)
    return [[*actions, Step(stage, 0)] for stage, actions in enumerate(lists)]


def test_a_schedule_of_one_s_own_may_have_several_chunks(pool: WorkerPool, single: Any) -> None:
    options = {"schedule": there_and_back, "microbatches": 2}
    assert_equal(pool.run(train, 2, "LeNet", "sync", options, init=False), single("LeNet"))
