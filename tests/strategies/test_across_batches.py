"""Stages in a V that don't wait for each other between batches have the numbers of one process, or else they wait."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from tests.strategies.equality import assert_equal
from tests.strategies.harness import ALL, Report, Witness, collect, make_trainer
from tests.thorough import thorough
from tools.workers.pool import WorkerPool

RUNS = 10  # at most, until one is undisturbed
V = {"schedule": "zbv", "microbatches": 4}
CLIPPED = {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"}


def trained(model: str, strategy: str, options: dict[str, Any], **given: Any) -> tuple[int, Report]:
    """How many batches stages may be ahead, and what this rank has."""
    torch.set_default_dtype(torch.float64)
    module, report = ALL[model](), Report()
    trainer = make_trainer(strategy, [Witness(report)], options, **{"max_epochs": 4} | given)
    trainer.fit(module, ALL[model].loader(), ALL[model].loader())
    return getattr(trainer.strategy, "batches_ahead", 0), collect(report, trainer, module)


@pytest.mark.parametrize(
    ("model", "stages", "options", "given", "ahead"),
    [
        ("LeNet", 2, {}, {"accumulate_grad_batches": 2, "max_epochs": 5}, 1),
        ("Blocks", 2, {}, {"max_epochs": 1}, 0),  # with a parameter on both stages
        *thorough(
            ("GPT2", 2, {}, {}, 1),  # whose tied embeddings are on one stage
            ("Llama", 3, {"microbatches": 6}, {"accumulate_grad_batches": 2, "max_epochs": 8}, 1),
            ("Llama", 2, {"activation_checkpointing": True}, CLIPPED, 1),
            ("Llama", 2, {}, {"gradient_clip_val": 0.05}, 0),
        ),
    ],
)
def test_updates_across_batches_are_those_of_one_process_and_stages_wait_where_they_must(
    pool: WorkerPool, model: str, stages: int, options: dict[str, Any], given: dict[str, Any], ahead: int
) -> None:
    runs = pool.run(trained, stages, model, "sync", V | options, init=False, **given)
    ((_, expected),) = pool.run(trained, 1, model, "single", {}, init=False, **given)
    assert [of_rank for of_rank, _ in runs] == [ahead] * stages
    assert len(expected.gradients) >= 10 * ahead
    assert_equal([report for _, report in runs], expected)


def begins_and_ends(schedule: str) -> tuple[float, float]:
    """On this rank: when it began its first forward of the last batch, and when it ended the batch before it."""
    torch.set_default_dtype(torch.float64)
    trainer = make_trainer("sync", [], {"schedule": schedule, "microbatches": 4, "timeline": True}, max_epochs=1)
    trainer.fit(Slow(), ALL["Llama"].loader())
    spans = trainer.strategy.timeline.spans  # type: ignore[attr-defined]
    forwards = [span for span in spans if span.kind == "forward" and span.microbatch == 0]
    backwards = [span for span in spans if span.kind.startswith("backward")]
    first = max(span.start for span in forwards if span.chunk == 0)
    return first, max(span.end for span in backwards if span.end < first)


class Slow(ALL["Llama"]):  # type: ignore[misc]
    """The gradients of the weights in its middle, on the first stage, take some time: that stage ends last."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for name, parameter in self.named_parameters():  # before the first batch, hooks on parameters are refused
            if batch_idx == 1 and parameter.dim() == 2 and (".layers.1." in name or ".layers.2." in name):
                parameter.register_hook(lambda gradient: time.sleep(0.003))


def test_the_stage_with_the_input_begins_the_next_batch_before_the_others_end_theirs(pool: WorkerPool) -> None:
    """In a V the first stage ends last, unless another program keeps the last one from a core: not in each run."""
    for _ in range(RUNS):
        (begun, _), (_, ended) = pool.run(begins_and_ends, 2, "zbv", init=False)  # the last stage, the first stage
        if begun < ended:
            break
    assert begun < ended
    (_, ended), (begun, _) = pool.run(begins_and_ends, 2, "1f1b", init=False)
    assert begun > ended
