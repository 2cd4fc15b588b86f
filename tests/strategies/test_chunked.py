"""Schedules with several chunks a stage, with all else that pipelines do: the numbers of a single process."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_parallel import PipelineStrategy
from lightning_parallel.ranks.layout import Placement
from lightning_parallel.schedules.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Schedule,
    Step,
    needed,
    placement,
    sent,
)
from tests.pool import WorkerPool
from tests.strategies.equality import assert_equal
from tests.strategies.harness import make_trainer, train
from tests.strategies.models import BATCH, MODELS
from tests.strategies.test_asynchronous_v import Deep, Skips
from tests.thorough import thorough

ALL_AT_ONCE = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
FULLY = {"stages": 2, "data_parallel": 2, "data_parallel_kind": "fully_shard"}
TENSOR = {"stages": 2, "tensor_parallel": 2, "sequence_parallel": True}


class Sum(nn.Module):
    """A weight that is the sum of two parameters, read through views: autograd takes one memory for the gradients of
    both, whatever the number of samples, where the matmul's backward runs in halves."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.randn(16 * 16) / 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.one.view(16, 16) + self.other.view(16, 16)).tanh()


class Sums(MODELS["Shifts"]):  # type: ignore[misc]
    def build(self) -> None:
        super().build()
        self.shifts = nn.ModuleList(Sum() for _ in range(4))


def test_gradients_in_one_memory_are_those_of_one_process(pool: WorkerPool) -> None:
    reports = pool.run(train, 2, Sums, "sync", {"schedule": "zbv", "microbatches": 4}, init=False)
    assert_equal(reports, pool.run(train, 1, Sums, init=False)[0])


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
        ("Shifts", 4, {**FULLY, "microbatches": BATCH // 2}, "zbv", {"accumulate_grad_batches": 2}),
        *thorough(
            ("ShardableLlama", 4, {**TENSOR, "activation_checkpointing": True}, "zbv", ALL_AT_ONCE),
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


# -- lists of one's own -----------------------------------------------------------------------------------------------

_LAYERS = 8  # of the models: there are no more chunks


def any_order(stages: int, microbatches: int, seed: int) -> Schedule:
    """Valid lists without any plan: two or three chunks a stage anywhere, of which one that can run is drawn each
    time; backwards whole or in halves."""
    draw = random.Random(seed)
    places = [stage for stage in range(stages) for _ in range(draw.choice([2, 3]))][:_LAYERS]
    places.remove(stages - 1)
    draw.shuffle(places)
    places.append(stages - 1)  # the last chunk
    chunks = len(places)
    lists: Schedule = [[] for _ in range(stages)]
    halved = {(chunk, k): draw.random() < 0.5 for chunk in range(chunks) for k in range(microbatches)}
    kinds: tuple[type[Any], ...] = (Forward, BackwardInput, BackwardWeight)
    due = {(kind, chunk): 0 for kind in kinds for chunk in range(chunks)}
    done: set[Any] = {None}
    while any(number < microbatches for number in due.values()):
        ready: list[tuple[Any, Action]] = []
        for (kind, chunk), k in due.items():
            if k == microbatches:
                continue
            action = kind(chunk, k)
            before = {BackwardInput: Forward, BackwardWeight: BackwardInput}.get(kind)
            if needed(action, chunks) in done and (before is None or before(chunk, k) in done):
                ready.append(((kind, chunk), action))
        place, action = draw.choice(ready)
        due[place] += 1
        done |= {action, sent(action, chunks)}
        assert not isinstance(action, Step)
        whole = not halved[action.chunk, action.microbatch]
        if whole and isinstance(action, BackwardWeight):
            continue
        if whole and isinstance(action, BackwardInput):
            action = Backward(action.chunk, action.microbatch)
        lists[places[action.chunk]].append(action)
    for stage, actions in enumerate(lists):
        actions.append(Step(stage, 0))
    return lists


@pytest.mark.parametrize(
    ("model", "seed"),
    [(Deep, 1), (Skips, 2), *thorough(*((kind, k) for kind in (Deep, Skips) for k in range(3, 20)))],
)
def test_any_valid_lists_give_the_numbers_of_one_process(pool: WorkerPool, model: type[Any], seed: int) -> None:
    options = {"schedule": partial(any_order, seed=seed), "microbatches": 5}
    reports = pool.run(train, 2 + seed % 2, model, "sync", options, init=False)
    assert_equal(reports, pool.run(train, 1, model, init=False)[0])


def breadth_first(stages: int, microbatches: int) -> Schedule:
    """All forwards of a chunk, then those of the stage's next chunk, then the backwards."""
    lists: Schedule = []
    for s in range(stages):
        forwards: list[Action] = [Forward(c, k) for c in (s, s + stages) for k in range(microbatches)]
        backwards: list[Action] = [Backward(c, k) for c in (s + stages, s) for k in range(microbatches)]
        lists.append([*forwards, *backwards, Step(s, 0)])
    return lists


class FrozenFirst(Deep):
    """The first stage has a trained parameter, but its output depends on none: no gradient comes back to it."""

    def build(self) -> None:
        super().build()
        self.net[:6].requires_grad_(False)
        self.net[1].unused = nn.Parameter(torch.zeros(1))

    def loss(self, batch: Any) -> Tensor:
        images, labels = batch
        with torch.no_grad():
            hidden = self.net[:2](images)
        return F.cross_entropy(self.net[2:](hidden), labels)


def test_chunks_to_which_no_gradient_comes_back_hold_nobody_up_within_a_batch(pool: WorkerPool) -> None:
    options = {"schedule": breadth_first, "microbatches": BATCH}
    reports = pool.run(train, 2, FrozenFirst, "sync", options, init=False)
    assert_equal(reports, pool.run(train, 1, FrozenFirst, init=False)[0])


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
