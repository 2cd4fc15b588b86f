"""Synchronous pipelines have the numbers of a single process."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from lightning_parallel import PipelineStrategy
from lightning_parallel.schedules.actions import Action, Backward, Forward, Schedule, Step
from lightning_parallel.schedules.generators import interleaved, one_f_one_b
from lightning_parallel.schedules.v_shaped import zbv
from tests.pool import WorkerPool
from tests.strategies.equality import assert_equal
from tests.strategies.harness import train
from tests.strategies.models import MODELS
from tests.thorough import thorough

USUAL = [(model, 3) for model in ("Blocks", "SharedPart")]


@pytest.mark.parametrize(
    ("model", "stages"), [*USUAL, *thorough(*(row for row in product(MODELS, (2, 3, 4)) if row not in USUAL))]
)
def test_unmodified_models_train_as_in_one_process(pool: WorkerPool, single: Any, model: str, stages: int) -> None:
    schedule = {2: "gpipe", 3: "1f1b", 4: "gpipe"}[stages]
    recomputed = model in ("Blocks", "Llama", "LeNet") and stages == 3
    options = {"schedule": schedule, "microbatches": 4, "activation_checkpointing": recomputed}
    assert_equal(pool.run(train, stages, model, "sync", options, init=False), single(model))


def test_the_default_schedule_is_1f1b() -> None:
    assert PipelineStrategy().options.schedule == "1f1b"


# -- a schedule of the user's own ------------------------------------------------------------------------------------


def eager(stages: int, microbatches: int) -> Schedule:
    """1F1B, with one warm-up forward more on every stage but the last."""
    schedule: Schedule = []
    for stage in range(stages):
        warmup = min(stages - stage if stage < stages - 1 else 0, microbatches)
        actions: list[Action] = [Forward(stage, k) for k in range(warmup)]
        for k in range(warmup, microbatches):
            actions += [Forward(stage, k), Backward(stage, k - warmup)]
        actions += [Backward(stage, k) for k in range(microbatches - warmup, microbatches)]
        schedule.append([*actions, Step(stage, 0)])
    return schedule


@dataclass
class Eager:
    """A schedule with settings. Python gives no hash to a dataclass that can change."""

    more: int

    def __call__(self, stages: int, microbatches: int) -> Schedule:
        return eager(stages, microbatches)


def forgetful(stages: int, microbatches: int) -> Schedule:
    return one_f_one_b(stages, microbatches - 1)


def moving(stages: int, microbatches: int) -> Schedule:
    return (interleaved if microbatches % 2 else zbv)(stages, microbatches)


@pytest.mark.parametrize("schedule", [eager, Eager(more=1)], ids=["function", "object"])
def test_a_schedule_of_one_s_own_is_a_function_that_makes_lists(pool: WorkerPool, single: Any, schedule: Any) -> None:
    options = {"schedule": schedule, "microbatches": 4}
    assert_equal(pool.run(train, 3, "LeNet", "sync", options, init=False), single("LeNet"))


@pytest.mark.parametrize(("schedule", "said"), [
    (forgetful, "ValueError: schedule=forgetful, 2 stages, 4 microbatches: chunk 0: the forwards are of"),
    (moving, "its chunks are on other stages, [(0, 1, 0, 1), (1, 0, 0, 1)]. Place them by the number of stages alone."),
])  # fmt: skip
def test_a_schedule_of_one_s_own_is_checked_before_it_runs(pool: WorkerPool, schedule: Any, said: str) -> None:
    options = {"schedule": schedule, "microbatches": 4}
    for failure in pool.run(train, 2, "LeNet", "sync", options, init=False, expect_errors=True):
        assert said in failure


# -- the timeline ----------------------------------------------------------------------------------------------------
