"""Stages in a V that don't wait for each other between batches have the numbers of one process, or else they wait."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from tests.pool import WorkerPool
from tests.strategies.harness import ALL, complete, here, joined, largest_difference, make_trainer
from tests.thorough import thorough

EXACT = 1e-12  # float64
RUNS = 10  # at most, until one is undisturbed


@dataclass
class Run:
    """What one rank has after a run."""

    ahead: int
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    shards: dict[str, Any] = field(default_factory=dict)  # none: `joined` asks


class Gradients(Callback):
    """Those of each update. It reads nothing else."""

    def __init__(self) -> None:
        self.found: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        self.found.append({n: complete(p.grad) for n, p in here(module).items() if p.grad is not None})


def trained(model: str, options: dict[str, Any] | None, **trainer_options: Any) -> Run:
    """On several ranks with stages; on one, without options, as one process."""
    torch.set_default_dtype(torch.float64)
    module, watch = ALL[model](), Gradients()
    strategy = "single" if options is None else "sync"
    given = {"max_epochs": 4} | trainer_options
    trainer = make_trainer(strategy, [watch], options or {}, **given)
    trainer.fit(module, ALL[model].loader(), ALL[model].loader())
    return Run(
        getattr(trainer.strategy, "batches_ahead", 0),
        watch.found,
        {name: complete(p.detach()) for name, p in here(module).items()},
        {name: float(value) for name, value in trainer.callback_metrics.items()},
        trainer.global_step,
    )


V = {"schedule": "zbv", "microbatches": 4}


def assert_same(runs: list[Run], expected: Run, ahead: int) -> None:
    for run in runs:
        assert run.ahead == ahead
        assert run.steps == expected.steps >= 10
        assert run.metrics == pytest.approx(expected.metrics, rel=0, abs=EXACT)
    for update, gradients in enumerate(expected.gradients):
        assert largest_difference(joined(runs, "gradients", update), gradients) < EXACT, update  # type: ignore[arg-type]
    assert largest_difference(joined(runs, "weights"), expected.weights) < EXACT  # type: ignore[arg-type]


CLIPPED = {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"}


@pytest.mark.parametrize(
    ("model", "stages", "options", "trainer_options"),
    [
        ("LeNet", 2, {}, {"accumulate_grad_batches": 2, "max_epochs": 5}),
        *thorough(
            ("GPT2", 2, {}, {}),  # whose tied embeddings are on one stage
            ("LeNet", 2, {}, {}),
            ("Llama", 3, {"microbatches": 6}, {"accumulate_grad_batches": 2, "max_epochs": 8}),
            ("Llama", 2, {"activation_checkpointing": True}, CLIPPED),
        ),
    ],
)
def test_updates_across_batches_are_those_of_one_process(
    pool: WorkerPool, model: str, stages: int, options: dict[str, Any], trainer_options: dict[str, Any]
) -> None:
    runs = pool.run(trained, stages, model, V | options, init=False, **trainer_options)
    (expected,) = pool.run(trained, 1, model, None, init=False, **trainer_options)
    assert_same(runs, expected, ahead=1)


@pytest.mark.parametrize(
    ("model", "stages", "trainer_options"),
    [
        ("Blocks", 2, {}),  # with a parameter on both stages
        *thorough(("Llama", 2, {"gradient_clip_val": 0.05})),
    ],
)
def test_stages_wait_where_they_must(
    pool: WorkerPool, model: str, stages: int, trainer_options: dict[str, Any]
) -> None:
    runs = pool.run(trained, stages, model, V, init=False, **trainer_options)
    (expected,) = pool.run(trained, 1, model, None, init=False, **trainer_options)
    assert_same(runs, expected, ahead=0)


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
