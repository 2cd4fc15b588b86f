"""What trains a model on replicas that share every batch: the strategies in a Trainer, torch's own in bare loops.

A contestant is a function that every rank calls. It builds model and optimizer anew, trains for some steps on the same
batch over and over, and tells when each step ended and what its loss was.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from lightning_parallel import DataParallelStrategy, FullyShardedStrategy, PipelineStrategy
from tools.bench.layers import Clock, MakeOptimizer, Trained, intervals, loss_of
from tools.bench.sharded import blocks


@dataclass(frozen=True)
class Work:
    """``layers`` blocks of a GPT of ``width``, on batches of ``samples`` x ``length`` tokens for each of ``replicas``;
    a pipeline splits a replica's share into ``microbatches``."""

    layers: int
    width: int
    heads: int
    length: int
    samples: int
    microbatches: int = 1
    replicas: int = 2

    def model(self) -> nn.Sequential:
        """The same numbers in every process."""
        return blocks(self.layers, self.width, self.heads)

    def shares(self) -> Tensor:
        """Of each replica: [replicas, samples, length, width]."""
        shape = (self.replicas, self.samples, self.length, self.width)
        return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Run:
    """What a rank saw of a training.

    Attributes:
        seconds: between the ends of consecutive steps.
        losses: of each step, of the batch or of this rank's share; none on a rank that sees no loss.
    """

    seconds: list[float]
    losses: list[Tensor]


Train = Callable[[Work, int, MakeOptimizer], Run]


# -- bare loops --------------------------------------------------------------------------------------------------


def one_process(work: Work, steps: int, optimizer: MakeOptimizer) -> Run:
    """The whole batch on rank 0, microbatches one after the other; the other ranks do nothing."""
    if dist.get_rank():
        return Run([], [])
    model = work.model()
    parts = torch.tensor_split(work.shares().flatten(0, 1), work.microbatches)

    def forward_backward() -> Tensor:
        total = torch.zeros(())
        for part in parts:
            loss = loss_of(model(part)) / len(parts)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    return _loop(forward_backward, optimizer(model.parameters()), steps)


def ddp_bare(work: Work, steps: int, optimizer: MakeOptimizer) -> Run:
    return bare_loop(DistributedDataParallel(work.model()), work, steps, optimizer)


def fully_shard_bare(work: Work, steps: int, optimizer: MakeOptimizer) -> Run:
    """Each block is gathered by itself, freed after its forward and gathered again for its backward."""
    model = work.model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return bare_loop(model, work, steps, optimizer)


def pipelining_with_ddp(work: Work, steps: int, optimizer: MakeOptimizer) -> Run:
    """1F1B of torch.distributed.pipelining on two stages, each in torch's DDP over the replicas."""
    mesh = init_device_mesh("cpu", (2, work.replicas), mesh_dim_names=("pipeline", "data"))
    index, half = mesh.get_local_rank("pipeline"), work.layers // 2
    model = work.model()
    stage = DistributedDataParallel(model[half:] if index else model[:half], process_group=mesh.get_group("data"))
    schedule = Schedule1F1B(
        PipelineStage(stage, index, 2, torch.device("cpu"), group=mesh.get_group("pipeline")),
        work.microbatches,
        loss_fn=lambda output, _: loss_of(output),
    )
    share = work.shares()[mesh.get_local_rank("data")]
    if index == 0:

        def first_stage() -> None:
            schedule.step(share, return_outputs=False)

        return _loop(first_stage, optimizer(stage.parameters()), steps)

    def last_stage() -> Tensor:
        losses: list[Tensor] = []
        schedule.step(target=share, losses=losses, return_outputs=False)
        return torch.stack(losses).mean()

    return _loop(last_stage, optimizer(stage.parameters()), steps)


def bare_loop(model: nn.Module, work: Work, steps: int, optimizer: MakeOptimizer) -> Run:
    """Each rank trains ``model`` on its share; what is averaged is the model's business."""
    share = work.shares()[dist.get_rank()]

    def forward_backward() -> Tensor:
        loss = loss_of(model(share))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return _loop(forward_backward, optimizer(model.parameters()), steps)


def _loop(forward_backward: Callable[[], Tensor | None], optimizer: torch.optim.Optimizer, steps: int) -> Run:
    ends: list[float] = []
    losses: list[Tensor] = []
    for _ in range(steps):
        loss = forward_backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss is not None:
            losses.append(loss.detach())
        ends.append(time.perf_counter())
    return Run(intervals(ends), losses)


# -- in Trainer.fit ----------------------------------------------------------------------------------------------


def ddp_fit(work: Work, steps: int, optimizer: MakeOptimizer) -> Run:
    return _fit(work, steps, optimizer, DDPStrategy(), work.shares().unbind())


def fully_sharded_fit(work: Work, steps: int, optimizer: MakeOptimizer) -> Run:
    return _fit(work, steps, optimizer, FullyShardedStrategy(), work.shares().unbind())


def pipeline_fit(work: Work, steps: int, optimizer: MakeOptimizer) -> Run:
    strategy = PipelineStrategy(
        stages=2, data_parallel=work.replicas, schedule="1f1b", microbatches=work.microbatches, balance="layers"
    )
    return _fit(work, steps, optimizer, strategy, work.shares().unbind())


def data_parallel_fit(work: Work, steps: int, optimizer: MakeOptimizer) -> Run:
    """All replicas on rank 0; the other ranks do nothing."""
    if dist.get_rank():
        return Run([], [])
    batch = work.shares().flatten(0, 1)
    return _fit(work, steps, optimizer, DataParallelStrategy(), [batch], devices=work.replicas, plugins=[_Alone()])


class _Alone(LightningEnvironment):
    """A process that belongs to no group, whatever the environment says."""

    def world_size(self) -> int:
        return 1

    def teardown(self) -> None:
        """Leaves the variables that the next contestant reads."""


class _Watch(Clock):
    """Ends and losses of the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(outputs["loss"].detach())
        super().on_train_batch_end()


class _Sharing(Trained):
    """Every replica trains on its share, the same in each step."""

    def __init__(self, work: Work, optimizer: MakeOptimizer, shares: Sequence[Tensor], steps: int) -> None:
        super().__init__(work.model(), optimizer, log=False)
        self._dataset = [*shares] * steps

    def train_dataloader(self) -> DataLoader[Tensor]:
        # Not left to Lightning, which shuffles: replicas would have different shares in each step.
        place = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        sampler: DistributedSampler[Tensor] = DistributedSampler(self._dataset, shuffle=False, **place)  # type: ignore[arg-type]
        return DataLoader(self._dataset, batch_size=None, sampler=sampler)  # type: ignore[arg-type]


def _fit(
    work: Work,
    steps: int,
    optimizer: MakeOptimizer,
    strategy: Strategy,
    shares: Sequence[Tensor],
    devices: int | None = None,
    plugins: list[Any] | None = None,
) -> Run:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    watch = _Watch()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices or dist.get_world_size(),
        strategy=strategy,
        plugins=plugins,
        max_epochs=1,
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(_Sharing(work, optimizer, shares, steps))
    return Run(intervals(watch.ends), watch.losses)
