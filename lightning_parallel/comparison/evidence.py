"""What a few steps of a run have come to: losses, gradients, weights, buffers and logs, as far as a rank holds them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_parallel.ranks.collectives import gather_objects_on_first
from lightning_parallel.ranks.local_model import LocalModel, whole
from lightning_parallel.ranks.shard import Shard
from lightning_parallel.strategies.base import LayoutStrategy
from lightning_parallel.values import scalars

SEED = 11


@dataclass
class Evidence:
    """What a rank has seen. Tensors are copies in the host's memory.

    Attributes:
        losses: what ``training_step`` returned, one a batch; empty if the module optimizes by itself and returns none.
        gradients: one dictionary an update, by parameter; before clipping. A step of an optimizer is an update.
        batches: the number of each update's batch.
        weights: after each update, by parameter.
        buffers: at the end, by name; those that a checkpoint keeps.
        logged: ``trainer.callback_metrics`` at the end.
        shards: the parameters of which this rank holds a shard.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)
    shards: dict[str, Shard] = field(default_factory=dict)


class Witness(Callback):
    """Notes the evidence of a run. It seeds the generators at the start, whatever set-up has drawn.

    Attributes:
        of_all_ranks: on the first rank, from the end of the run on.
    """

    def __init__(self) -> None:
        self.of_all_ranks: list[Evidence] = []
        self._evidence = Evidence()
        self._losses: list[Any] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        torch.manual_seed(SEED)
        self._evidence.shards = dict(_local(trainer, pl_module).shards)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self._note_weights(trainer, pl_module)  # after another step in this batch
        self._evidence.batches.append(trainer.fit_loop.total_batch_idx)
        named = _local(trainer, pl_module).parameters.items()
        self._evidence.gradients.append({name: copied(p.grad) for name, p in named if p.grad is not None})

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if isinstance(trainer.strategy, LayoutStrategy):
            trainer.strategy.drain()  # late gradients would be others
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:
            self._losses.append(loss)
        self._note_weights(trainer, pl_module)

    def _note_weights(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if len(self._evidence.weights) < len(self._evidence.gradients):
            named = _local(trainer, module).parameters.items()
            self._evidence.weights.append({name: copied(p.detach()) for name, p in named})

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._evidence.losses = [float(loss) for loss in self._losses]  # before the end a stage would wait for it
        if isinstance(trainer.strategy, LayoutStrategy):
            trainer.strategy.share_buffers()
        self._evidence.buffers = {
            name: copied(each if each.is_floating_point() or each.is_complex() else each.double())
            for name, each in _local(trainer, pl_module).buffers().items()
        }
        self._evidence.logged = scalars(trainer.callback_metrics)
        self.of_all_ranks = gather_objects_on_first(self._evidence, None) or []


def _local(trainer: pl.Trainer, module: pl.LightningModule) -> LocalModel:
    strategy = trainer.strategy
    return strategy.local_model if isinstance(strategy, LayoutStrategy) else LocalModel.of(module)


def copied(tensor: Tensor) -> Tensor:
    """A copy in the host's memory, of all of the tensor."""
    return (whole(tensor) if isinstance(tensor, DTensor) else tensor).detach().to("cpu", copy=True)
