"""The settings that several strategies share, each declared once. Constructors, schemas and YAML files read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated, Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision

from lightning_parallel.settings import SET_BY_TRAINER, Auto, Count, Range, check
from lightning_parallel.tensor_plans.style import Plan

Seconds = Annotated[float, Range(1)]
DataParallelKind = Literal["replicate", "fully_shard"]


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """What every strategy takes that runs a process on each device.

    Args:
        timeout: how long a rank waits for another one before it gives up: seconds, or a ``timedelta``.
        process_group_backend: ``"gloo"`` or ``"nccl"``. By default NCCL where every rank has a GPU of its own, and gloo
            elsewhere.
        checkpoint: ``"directory"``: all ranks write a directory together. ``"auto"``: where a rank holds all of the
            model, one file, as Lightning does in one process; else a directory. Either opens under every layout.
        async_save: write checkpoints while training goes on: a save waits only until the state has been copied to host
            memory. A failed one ends the run at its end, or at the next save, which is written before.
        accelerator: filled in by the Trainer, as are those below.
        parallel_devices: may name one GPU several times, for ranks that share it.

    Raises:
        ValueError: a value that its setting doesn't take.
    """

    timeout: Seconds | timedelta = 1800
    process_group_backend: Literal["gloo", "nccl"] | None = None
    checkpoint: Literal["auto", "directory"] = "auto"
    async_save: bool = False
    accelerator: Accelerator | None = field(default=None, metadata=SET_BY_TRAINER)
    parallel_devices: list[torch.device] | None = field(default=None, metadata=SET_BY_TRAINER)
    cluster_environment: ClusterEnvironment | None = field(default=None, metadata=SET_BY_TRAINER)
    checkpoint_io: CheckpointIO | None = field(default=None, metadata=SET_BY_TRAINER)
    precision_plugin: Precision | None = field(default=None, metadata=SET_BY_TRAINER)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class StagedOptions(ProcessOptions):
    """What both pipelines take.

    Args:
        stages: the number of pipeline stages; ``"auto"``: as many as the processes that the other axes leave.
        microbatches: the number of parts into which a batch is split. Losses and logs are means weighted by samples,
            or by what the loss averages over, such as labels that aren't ignored. BatchNorm normalises over a
            microbatch. ``"auto"``: chosen by the schedule; 1 for batches that can't be split. 1 takes any batch, and
            splits nothing.
        split: a function of a batch and a number that returns at most that many batches, for batches whose samples
            don't lie along dimension 0 of all tensors. Batches of torch_geometric's graphs need none.
        microbatch_weight: a function of a microbatch that returns what its loss averages over, such as
            ``lambda batch: (batch["labels"] != -100).sum()``. Losses, and logged values equal to them, are then
            weighted by it. By default it is read off the loss; a warning says where that is not possible.
        layers: names or patterns of the layers between which the model may be cut, such as ``["net.blocks.*"]``. By
            default what hangs in lists, in the order in which the first step calls it; where that is less than there
            are stages, all modules.
        balance: ``"parameters"`` (stages of equal size), ``"operations"`` (of equal work, counted in the first step),
            ``"layers"`` (equal counts), or the number of layers of each stage; of each chunk where stages have several.
        activation_checkpointing: keep only the inputs of layers, and run the layers again in the backward: less memory,
            for about a third more time.
        tensor_parallel: the number of ranks that share a stage's layers; see
            :class:`~lightning_parallel.TensorParallelStrategy`.
        plan: which layers these ranks divide, and how; see there.
        sequence_parallel: divide activations between these layers along the sequence; see there.
        data_parallel: the number of replicas of the whole pipeline, each of which gets its share of every batch;
            ``"auto"``: as many as there are ranks for, or one if another axis is ``"auto"`` too.
        data_parallel_kind: ``"replicate"``: each replica holds all of its stage. ``"fully_shard"``: each holds a
            part of every layer's parameters and optimizer state, and gathers the layers for a step (torch's
            ``fully_shard``). With tensor parallelism, these are parts of the tensor rank's shards.
        timeline: record what each rank runs when. At the end of training a picture (with matplotlib installed) and a
            trace are written to the log directory, and the measured bubble is printed beside the theoretical one.

    Raises:
        ValueError: a value that its setting doesn't take.
    """

    stages: Count | Auto = "auto"
    microbatches: Count | Auto = "auto"
    split: Callable[[Any, int], Sequence[Any]] | None = None
    microbatch_weight: Callable[[Any], float] | None = None
    layers: Sequence[str] | None = None
    balance: Literal["parameters", "operations", "layers"] | Sequence[Count] = "parameters"
    activation_checkpointing: bool = False
    tensor_parallel: Count | Auto = 1
    plan: Plan | Literal["none"] | None = None
    sequence_parallel: bool = False
    data_parallel: Count | Auto = "auto"
    data_parallel_kind: DataParallelKind = "replicate"
    timeline: bool = False

    def keeps_steps_whole(self, replicas: int) -> bool:
        """Does a step on one stage run as in one process, so that nothing has to be known of it ahead?"""
        asks_for_layers = self.layers is not None or self.balance != "parameters" or self.activation_checkpointing
        shards_layers = self.data_parallel_kind == "fully_shard" and replicas > 1
        return self.microbatches in ("auto", 1) and not (asks_for_layers or shards_layers or self.timeline)
