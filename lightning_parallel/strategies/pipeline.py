"""Synchronous pipeline parallelism: every update is that of the whole batch, whatever the schedule.

How a schedule of many backwards fits into Lightning's step of one (``training_step``, ``zero_grad``, ``backward``,
``optimizer_step``): the whole schedule runs in ``training_step``; its gradients are taken off the parameters before
``zero_grad`` can erase them, and published in ``backward``. So accumulation, clipping, scaling and every hook keep
their places.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel.layout import Size
from lightning_parallel.pipeline import simulate
from lightning_parallel.pipeline.balance import Balance
from lightning_parallel.pipeline.logs import LogRecorder
from lightning_parallel.pipeline.schedule import SYNCHRONOUS, Action
from lightning_parallel.pipeline.weights import swap_gradients
from lightning_parallel.strategies.pipeline_base import Microbatches, PipelineBase, loss_scale
from lightning_parallel.strategies.staged import DataParallelKind
from lightning_parallel.tensor.plan import Plan


class PipelineStrategy(PipelineBase):
    """Layers shared out over devices, microbatches streaming through them; gradients of the whole batch.

    ::

        trainer = L.Trainer(devices=4, strategy=PipelineStrategy(microbatches=16))
        trainer.fit(AnyLightningModule(), datamodule)

    Args:
        stages: how many; ``"auto"``: one a process.
        schedule: ``"gpipe"`` (all forwards, then all backwards), ``"1f1b"`` (the same bubble, activations of at most
            ``stages`` microbatches) or ``"naive"`` (the model split, one stage at work at a time).
        microbatches: into how many parts a batch is split. The bubble is (stages - 1) / (microbatches + stages - 1).
            ``"auto"``: four a stage, as GPipe advises, or as many as the batch has samples; one with ``"naive"``.
            Losses and logs are means weighted by microbatch size; BatchNorm normalises over a microbatch.
        layers: names or patterns of the layers between which the model may be cut, e.g. ``["net.blocks.*"]``; by
            default the children of the ``nn.Sequential`` or ``nn.ModuleList`` that shares out best.
        balance: ``"parameters"``, ``"layers"``, or the number of layers of each stage.
        activation_checkpointing: keep the inputs of layers only, and run these again in the backward: less memory, for
            about a third more time. BatchNorm then updates its statistics twice.
        timeline: record what each rank runs when; at the end of training a picture and a trace are written to the
            log directory, and the measured bubble is printed beside the theoretical one.
        tensor_parallel, plan, sequence_parallel: each stage's layers in shards, over so many ranks; see
            :class:`~lightning_parallel.TensorParallelStrategy`. ``stages="auto"`` takes the ranks that this leaves.
        data_parallel: replicas of the whole pipeline, each with its share of every batch; ``"auto"``: as many as there
            are ranks for, or one with ``stages="auto"``.
        data_parallel_kind: ``"replicate"``: each replica holds all of its stage. ``"shard"``: it holds a share of the
            layers' parameters and optimizer state, and gathers the layers for a step (torch's ``fully_shard``).
        **kwargs: of :class:`~lightning_parallel.strategies.base.LayoutStrategy`.
    """

    def __init__(
        self,
        *,
        stages: Size = "auto",
        schedule: Literal["gpipe", "1f1b", "naive"] = "gpipe",
        microbatches: Microbatches = "auto",
        layers: Sequence[str] | None = None,
        balance: Balance = "parameters",
        activation_checkpointing: bool = False,
        timeline: bool = False,
        tensor_parallel: Size = 1,
        plan: Plan | None = None,
        sequence_parallel: bool = False,
        data_parallel: Size = "auto",
        data_parallel_kind: DataParallelKind = "replicate",
        **kwargs: Any,
    ) -> None:
        if schedule not in SYNCHRONOUS:
            raise ValueError(f"schedule={schedule!r}: choose one of {', '.join(map(repr, SYNCHRONOUS))}.")
        if schedule == "naive" and microbatches not in ("auto", 1):
            raise ValueError(f"microbatches={microbatches!r}: the naive schedule has one; use 'gpipe' for more.")
        super().__init__(
            stages=stages,
            microbatches=microbatches,
            layers=layers,
            balance=balance,
            activation_checkpointing=activation_checkpointing,
            timeline=timeline,
            tensor_parallel=tensor_parallel,
            plan=plan,
            sequence_parallel=sequence_parallel,
            data_parallel=data_parallel,
            data_parallel_kind=data_parallel_kind,
            **kwargs,
        )
        self._schedule = schedule
        self._gradients: dict[str, Tensor | None] = {}
        self._count = 1  # microbatches of the last batch

    @override
    def wanted_microbatches(self, size: int) -> int:
        if self._microbatches == "auto":
            return 1 if self._schedule == "naive" else min(size, 4 * self.layout.pipeline)
        return int(self._microbatches)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        recorder = LogRecorder()
        scale = loss_scale(self) / self._module().trainer.accumulate_grad_batches
        work, sizes = self.microbatches((*args, *kwargs.values()), recorder, scale)
        self._count = len(sizes)
        actions = _actions_of(self._schedule, self.layout.pipeline, self._count, self.layout.stage)

        # Until zero_grad, gradients of the update before are there too.
        earlier = {} if self._accumulated else swap_gradients(self._parameters, {})
        if self._sharded_layers is not None:
            self._sharded_layers.hold_back()
        with self.recorded(recorder):
            outputs = self.engine.run(actions, work)
        self._gradients = swap_gradients(self._parameters, earlier)
        if self._ends_update:
            self._gradients = self.complete_gradients(self._gradients)
            self._sum_shared_gradients()
        self._accumulated = True  # until the update

        if not self.stage.is_last:
            return self.board.publish_step(None)
        recorder.replay(self._module().log)
        output = self.joined_output(outputs, sizes)
        if self.layout.pipeline > 1:
            self.board.publish_step(output["loss"] if isinstance(output, dict) else output)
        return output

    def _sum_shared_gradients(self) -> None:
        """Over the stages that hold a parameter. One that got a gradient on no stage goes without, as in a single
        process, where the optimizer would skip it."""
        for group, names in self._shared:
            names = [name for name in names if self._parameters[name].requires_grad]
            if not names:
                continue
            gradients = [self._gradients[name] for name in names]
            dtype = max((self._parameters[name].dtype for name in names), key=lambda d: d.itemsize)
            parts = [
                torch.zeros_like(self._parameters[name]) if g is None else g
                for name, g in zip(names, gradients, strict=True)
            ]
            present = torch.tensor([g is not None for g in gradients], dtype=dtype, device=self.root_device)
            flat = torch.cat([present, *(part.to(dtype).flatten() for part in parts)])
            dist.all_reduce(flat, group=group)
            counts, *summed = flat.split([len(names), *(part.numel() for part in parts)])
            for name, part, total, count in zip(names, parts, summed, counts.tolist(), strict=True):
                self._gradients[name] = total.to(part.dtype).view_as(part) if count else None

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Publish the gradients that the schedule has made; hooks and scaling as ever."""
        module = self._module()
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        swap_gradients(self._parameters, self._gradients)
        self._gradients = {}
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    def counts(self, name: str) -> bool:
        # A parameter on several stages: on the first.
        return super().counts(name) and self.stage.partition.owners[name][0] == self.layout.stage

    @override
    def theoretical_bubble(self) -> float:
        return simulate.bubble(self._schedule, self.layout.pipeline, self._count)

    @override
    def title(self) -> str:
        return f"{self._schedule}, {self.layout.pipeline} stages, {self._count} microbatches"


@lru_cache
def _actions_of(schedule: str, stages: int, microbatches: int, stage: int) -> tuple[Action, ...]:
    """What a stage does in a batch: made once, since it is the same for all batches but an epoch's last."""
    return tuple(SYNCHRONOUS[schedule](stages, microbatches)[stage])
