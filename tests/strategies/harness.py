"""Train a model of `models.py` under a strategy, inside a worker of the pool, and report all there is to compare."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

import lightning_parallel as lp
from lightning_parallel.ranks.groups import Groups
from lightning_parallel.ranks.shard import Shard
from tests.pipeline.test_no_host_reads import announced
from tests.strategies.models import BATCH, MODELS, SAMPLES
from tests.strategies.shardable import SHARDABLE
from tools.study import reference
from tools.study.reference import Trained
from tools.workers.held import complete, here, weights_of
from tools.workers.worker import texts_of_warnings

STRATEGIES = {
    "sync": lp.PipelineStrategy,
    "async": lp.AsyncPipelineStrategy,
    "data": lp.DataParallelStrategy,
    "tensor": lp.TensorParallelStrategy,
    "fsdp": lp.FullyShardedStrategy,
    "ddp": DDPStrategy,  # Lightning's, to compare with
}
ALL = {**MODELS, **SHARDABLE}


def spoil(module: torch.nn.Module) -> None:
    """Give a module other weights: a checkpoint has to bring back all of them."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)


@dataclass
class Report:
    """What one rank has after a run."""

    losses: list[float] = field(default_factory=list)  # as training_step returned them
    gradients: list[dict[str, Tensor]] = field(default_factory=list)  # before clipping, one dict an update
    weights: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    validation: list[Any] = field(default_factory=list)
    shards: dict[str, Shard] = field(default_factory=dict)  # of which parameters this rank holds a part
    warnings: list[str] = field(default_factory=list)  # of `Trainer.fit`

    def warned_of(self, *words: str) -> list[str]:
        """The warnings that have one of these words."""
        return [text for text in self.warnings if any(word in text for word in words)]


class Losses(Callback):
    def __init__(self, report: Any) -> None:
        self.report = report
        self.losses: list[Tensor] = []

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        self.report.losses = [float(loss) for loss in self.losses]

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *args: Any) -> None:
        if outputs:  # with manual optimization there may be none
            self.losses.append(outputs["loss"])  # to be read after the run: a stage would wait for it here


class Witness(Losses):
    """Notes the gradients, too."""

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        self.report.gradients.append({n: complete(p.grad) for n, p in here(module).items() if p.grad is not None})


def make_trainer(strategy: str, callbacks: list[Callback], options: dict[str, Any], /, **given: Any) -> L.Trainer:
    """One that trains for two epochs on the CPU and does nothing beside, but for what is ``given``.

    Args:
        strategy: "single", or one of STRATEGIES, on all ranks of the pool's call.
        options: of the strategy's constructor.
    """
    arguments: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1 if strategy == "single" else int(os.environ["WORLD_SIZE"]),
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "callbacks": callbacks,
    }
    if strategy != "single":
        arguments["strategy"] = STRATEGIES[strategy](**options)
    return L.Trainer(**(arguments | given))


def train(
    model: str | type[Any],
    strategy: str = "single",
    options: dict[str, Any] | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    shuffle: bool = False,
    batch_size: int = BATCH,
    samples: int = SAMPLES,
    callbacks: list[Any] | None = None,
    max_epochs: int = 1,
    validates_after: bool = False,
    **trainer_options: Any,
) -> Report:
    """``strategy`` and ``options`` as in `make_trainer`; ``batch_size`` of each replica; ``callbacks``, or what makes
    them where they can't be pickled. The Trainer may validate once more after the run. What the turn of an epoch does
    is in the contract."""
    torch.set_default_dtype(dtype)
    module, report = (ALL[model] if isinstance(model, str) else model)(), Report()
    watching = [Witness(report), *(each if isinstance(each, Callback) else each() for each in callbacks or [])]
    trainer = make_trainer(strategy, watching, options or {}, max_epochs=max_epochs, **trainer_options)
    loader, replicas = module.loader, getattr(trainer.strategy, "is_distributed", False)
    share = trainer.distributed_sampler_kwargs if replicas else None
    if shuffle:
        torch.manual_seed(11)  # as a user's seed_everything would
    with texts_of_warnings() as report.warnings:
        trainer.fit(module, loader(shuffle, batch_size, samples, share), loader())
    collect(report, trainer, module)
    if validates_after:
        report.validation = trainer.validate(module, loader(), verbose=False)
    return report


def delayed(model: str | type[Any], stages: int, microbatches: int, average: Any = None, **options: Any) -> Trained:
    """The asynchronous pipeline in one process: `tools.study.reference` trains a model. Options of its `delayed`, and
    what makes its average."""
    options |= {"average": average and average(), "read_last": ("temperature",)}
    return reference.delayed(ALL[model] if isinstance(model, str) else model, stages, microbatches, **options)


def announcing(run: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """Call ``run`` with messages as they are over NCCL."""
    wires = Groups.wires
    with mock.patch.object(Groups, "wires", lambda groups, placement: announced(wires(groups, placement))):
        return run(*args, **given)


def collect(report: Report, trainer: L.Trainer, module: torch.nn.Module) -> Report:
    """Note the weights, and what is logged."""
    report.weights = weights_of(module)
    report.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    local = getattr(trainer.strategy, "local_model", None)
    report.shards = {} if local is None else local.shards
    return report


def joined(reports: list[Report], what: str, update: int | None = None) -> dict[str, Tensor]:
    """The ranks' weights, or their gradients of an update, as one model's. What several hold must agree."""
    result: dict[str, Tensor] = {}
    for report in reports:
        part = report.weights if what == "weights" else report.gradients[update or 0]
        for name, tensor in part.items():
            if name in report.shards:
                paste(result, name, tensor, report.shards[name])
                continue
            assert name not in result or torch.equal(result[name], tensor), f"ranks disagree on {name}"
            result[name] = tensor
    assert not any(tensor.isnan().any() for tensor in result.values()), "a shard is missing"
    return result


def paste(result: dict[str, Tensor], name: str, local: Tensor, shard: Shard) -> None:
    """Put a shard into its place in the whole, which is NaN where no shard has been."""
    whole = result.setdefault(name, torch.full(shard.shape, torch.nan, dtype=local.dtype))
    lengths = [stop - start for start, stop in shard.ranges()]
    for (start, stop), piece in zip(shard.ranges(), local.split(lengths, shard.dim), strict=True):
        place = whole.narrow(shard.dim, start, stop - start)
        assert place.isnan().all() or torch.equal(place, piece), f"ranks disagree on {name}"
        place.copy_(piece)


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys(), f"only one has {sorted(a.keys() ^ b.keys())}"
    differences = [float((a[name] - b[name]).abs().max()) for name in a]
    return max(differences, key=lambda each: (each != each, each))  # NaN is larger than any number
