"""Stages in a V don't wait for each other between batches, unless they must. The numbers of models whose stages go on
are compared in the contract."""

from __future__ import annotations

import time
from typing import Any

import torch

from tests.strategies.equality import assert_equal
from tests.strategies.harness import ALL, Report, Witness, collect, make_trainer
from tests.strategies.test_asynchronous_v import Deep
from tools.workers.pool import WorkerPool

RUNS = 10  # at most, until one is undisturbed


def trained(strategy: str, options: dict[str, Any]) -> tuple[int, Report]:
    """How many batches stages may be ahead, and what this rank has."""
    torch.set_default_dtype(torch.float64)
    module, report = ALL["Blocks"](), Report()
    trainer = make_trainer(strategy, [Witness(report)], options, max_epochs=1)
    trainer.fit(module, ALL["Blocks"].loader())
    return getattr(trainer.strategy, "batches_ahead", 0), collect(report, trainer, module)


def test_stages_wait_for_a_parameter_that_several_hold(pool: WorkerPool) -> None:
    runs = pool.run(trained, 2, "sync", {"schedule": "zbv", "microbatches": 4}, init=False)
    ((_, expected),) = pool.run(trained, 1, "single", {}, init=False)
    assert [ahead for ahead, _ in runs] == [0, 0]
    assert_equal([report for _, report in runs], expected)


def begins_and_ends(schedule: str) -> tuple[float, float]:
    """On this rank: when it began its first forward of the last batch, and when it ended the batch before it."""
    torch.set_default_dtype(torch.float64)
    trainer = make_trainer("sync", [], {"schedule": schedule, "microbatches": 4, "timeline": True}, max_epochs=1)
    trainer.fit(Slow(), Slow.loader())
    spans = trainer.strategy.timeline.spans  # type: ignore[attr-defined]
    forwards = [span for span in spans if span.kind == "forward" and span.microbatch == 0]
    backwards = [span for span in spans if span.kind.startswith("backward")]
    first = max(span.start for span in forwards if span.chunk == 0)
    return first, max(span.end for span in backwards if span.end < first)


class Slow(Deep):
    """The gradients of the weights in its middle, on the first stage, take some time: that stage ends last."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for name, parameter in self.named_parameters():  # before the first batch, hooks on parameters are refused
            if batch_idx == 1 and name in ("net.4.0.weight", "net.5.0.weight"):
                parameter.register_hook(lambda gradient: time.sleep(0.02))


def test_the_stage_with_the_input_begins_the_next_batch_before_the_others_end_theirs(pool: WorkerPool) -> None:
    """In a V the first stage ends last, unless another program keeps the last one from a core: not in each run."""
    for _ in range(RUNS):
        (begun, _), (_, ended) = pool.run(begins_and_ends, 2, "zbv", init=False)  # the last stage, the first stage
        if begun < ended:
            break
    assert begun < ended
    (_, ended), (begun, _) = pool.run(begins_and_ends, 2, "1f1b", init=False)
    assert begun > ended
