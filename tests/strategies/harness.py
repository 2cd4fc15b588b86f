"""Train a model of `models.py` under a strategy, inside a worker of the pool, and report all there is to compare."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

import lightning_parallel as lp
from lightning_parallel.pipeline.absent import AbsentTensor
from tests.strategies.models import MODELS

STRATEGIES = {"sync": lp.PipelineStrategy, "async": lp.AsyncPipelineStrategy}


@dataclass
class Report:
    """What one rank has after a run."""

    losses: list[float] = field(default_factory=list)  # as training_step returned them
    gradients: list[dict[str, Tensor]] = field(default_factory=list)  # before clipping, one dict an update
    weights: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    validation: list[Any] = field(default_factory=list)


class Witness(Callback):
    def __init__(self, report: Report) -> None:
        self.report = report

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *args: Any) -> None:
        self.report.losses.append(float(outputs["loss"]))

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        self.report.gradients.append({n: p.grad.clone() for n, p in here(module).items() if p.grad is not None})


def here(module: torch.nn.Module) -> dict[str, Tensor]:
    """The parameters that are on this rank. Tied names both, so that stages agree on what a name means."""
    named = module.named_parameters(remove_duplicate=False)
    return {name: p for name, p in named if not isinstance(p, AbsentTensor)}


def train(
    model: str,
    strategy: str = "single",
    options: dict[str, Any] | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    shuffle: bool = False,
    callbacks: list[Callback] | None = None,
    **trainer_options: Any,
) -> Report:
    """``strategy``: "single", "sync" or "async"; ``options`` are its constructor's."""
    torch.set_default_dtype(dtype)
    module = MODELS[model]()
    report = Report()
    arguments: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1 if strategy == "single" else int(os.environ["WORLD_SIZE"]),
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "callbacks": [Witness(report), *(callbacks or [])],
    }
    if strategy != "single":
        arguments["strategy"] = STRATEGIES[strategy](**(options or {}))
    trainer = L.Trainer(**(arguments | trainer_options))
    if shuffle:
        torch.manual_seed(11)  # as a user's seed_everything would
    trainer.fit(module, MODELS[model].loader(shuffle), MODELS[model].loader())
    report.weights = {name: p.detach().clone() for name, p in here(module).items()}
    report.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    report.validation = trainer.validate(module, MODELS[model].loader(), verbose=False)
    return report


def joined(reports: list[Report], what: str, update: int | None = None) -> dict[str, Tensor]:
    """The stages' weights, or their gradients of an update, as one model's. What several hold must agree."""
    result: dict[str, Tensor] = {}
    for report in reports:
        part = report.weights if what == "weights" else report.gradients[update or 0]
        for name, tensor in part.items():
            assert name not in result or torch.equal(result[name], tensor), f"stages disagree on {name}"
            result[name] = tensor
    return result


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys(), f"only one has {sorted(a.keys() ^ b.keys())}"
    return max(float((a[name] - b[name]).abs().max()) for name in a)
