"""What the synchronous and the asynchronous pipeline share: how the stages of a module are set up, evaluated and ended.

Training differs: see ``pipeline.py`` and ``pipeline_async.py``. The parts, in the order of set-up::

    Splitting       a batch's microbatches
    TensorShards    layers divided over tensor ranks
    Stages          this rank's stage; what several stages share
    Replicas        copies of the stage, gradients averaged
    LastStage       hooks and logs of the last stage, for all
    DryRuns         what crosses the cuts in a step
    Engine          runs a schedule on the stage
    Microbatches    a batch's work, and its outputs joined
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import nn
from torch.autograd.graph import GradientEdge
from typing_extensions import override

from lightning_parallel.absent.tensor import AbsentTensor
from lightning_parallel.callbacks.defaults import IN_STAGES, Reasons
from lightning_parallel.callbacks.start_table import Holding
from lightning_parallel.checks.manual import SEVERAL_OPTIMIZERS, refuse_manual_optimization
from lightning_parallel.cuts.partition import Partition
from lightning_parallel.gradients.loss_scale import share_overflows
from lightning_parallel.losses.graph import Number
from lightning_parallel.messages.posting import short_switch_interval
from lightning_parallel.pipeline.engine import Engine
from lightning_parallel.pipeline.stage import Stage
from lightning_parallel.pipeline.weights import WeightVersions
from lightning_parallel.ranks.layout import Placement
from lightning_parallel.ranks.local_model import LocalModel
from lightning_parallel.results.last_stage import LastStage
from lightning_parallel.results.timelines import warn_without_pictures, write_timeline
from lightning_parallel.set_up.cutting import agreed_partition
from lightning_parallel.set_up.dry_runs import DryRuns
from lightning_parallel.set_up.options import StagedOptions
from lightning_parallel.set_up.part_of_model import refuse_calls
from lightning_parallel.set_up.splitting import Splitting
from lightning_parallel.set_up.stages import Stages, refuse_evaluation, refuse_training
from lightning_parallel.set_up.tensor_shards import TensorShards
from lightning_parallel.steps.microbatches import Microbatches, loss_of
from lightning_parallel.strategies.base import LayoutStrategy
from lightning_parallel.timeline.recording import Timeline


@dataclass(frozen=True)
class _AtWork:
    """What runs batches on this rank's stage, from set-up to the end of the run."""

    last_stage: LastStage
    engine: Engine
    dry_runs: DryRuns
    microbatches: Microbatches


class StagedStrategy(LayoutStrategy):
    """Base of the synchronous and the asynchronous pipeline."""

    options: StagedOptions
    keep_together = False  # has one stage to hold all of a unit, where a cut allows it?
    is_one_process = False  # is there one rank, and nothing that asks for parts of a step? Lightning runs it then
    timeline: Timeline  # from set-up on, what this rank has run when

    def __init__(self, options: StagedOptions) -> None:
        super().__init__(options, pipeline=options.stages, data=options.data_parallel, tensor=options.tensor_parallel)
        self._shards = TensorShards(options.plan, options.sequence_parallel, self.disk_offload)
        self._stages = Stages(options)
        self._at_work: _AtWork | None = None

    @property
    def stage(self) -> Stage:
        """This rank's stage, from set-up on."""
        return self._stages.stage

    @property
    def at_work(self) -> _AtWork:
        """What runs batches, from set-up to the end of the run."""
        assert self._at_work is not None, "made in Trainer.fit, validate, test and predict"
        return self._at_work

    @property
    @override
    def refused_callbacks(self) -> Reasons:
        return super().refused_callbacks if self.saves_as_lightning else IN_STAGES

    # -- set-up --------------------------------------------------------------------------------------------------

    # What differs between the two pipelines.

    @abstractmethod
    def automatic_microbatches(self, batch_size: int) -> int:
        """The number of microbatches for ``microbatches="auto"``."""

    @property
    @abstractmethod
    def placement(self) -> Placement:
        """The stage of each chunk."""

    @abstractmethod
    def check_partition(self, partition: Partition) -> None:
        """Refuse a partition that can't be trained."""

    @override
    def counts(self, name: str) -> bool:
        return self._shards.counts(name)

    def make_versions(self) -> Mapping[int, WeightVersions] | None:
        """The weights that the engine's forwards read, by chunk; None for the module's own parameters."""
        return None

    def completing(self, chunk: int, edges: Sequence[GradientEdge]) -> AbstractContextManager[None]:
        """A context around the backward that completes a chunk's gradients of an update, where there are several
        replicas. The backward begins at ``edges``."""
        return self.replicas.completing()

    def gradient_factor(self) -> Number:
        """The number by which the gradients are multiplied that a batch's backwards have added up."""
        return 1.0

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        run = self.prepare(trainer)
        module = run.module

        # The module in parts, before it takes memory on the device.
        if run.trains and not self.is_one_process:
            refuse_manual_optimization(module)
            refuse_training(module)
        if run.layout.stages > 1:
            refuse_evaluation(module)

        splitting = Splitting(self.options, self.automatic_microbatches)
        self._at_end.callback(lambda: refuse_calls(filter(_has_absent_ones, module.modules()), self._at_next_run))
        self._at_end.callback(self._stages.end)
        if not self._stages.are_of(module):
            parts = agreed_partition(run, self.options, splitting, self.placement, keep_together=self.keep_together)
            self.check_partition(parts)
            # After the partition, which weighs whole layers.
            self._shards.divide(run)
            self._stages.take(run, parts)
        self._stages.install()
        stage, shards = self.stage, self._shards.shards
        local = LocalModel(stage.named_parameters(), stage.named_buffers, shards, stage.partition.aliases)
        self.hold(local)
        share_overflows(run, self._at_end)
        self._shards.begin(run, local)
        self._stages.join_shared(local, run)
        if run.trains:
            self.replicas.begin(self._at_end, watch=self.gradients_on_parameters, factor=self.gradient_factor)
            if self._stages.fully_sharded is not None:
                self._stages.fully_sharded.multiply_by(self.gradient_factor)

        # What runs a batch.
        self.timeline = Timeline(enabled=self.options.timeline, device=run.device)
        if self.timeline.enabled and run.trains:
            warn_without_pictures()
        last_stage = LastStage(
            run,
            shared=self._stages.shared,
            drain=self.drain,
            failed=self.on_exception,
        )
        self._at_end.callback(last_stage.end)
        self._at_end.enter_context(short_switch_interval())  # messages leave during updates and evaluations, too
        versions = self.make_versions()
        dry_runs = DryRuns(run, self._stages, last_stage, late=versions is not None)
        engine = Engine(
            stage,
            run.layout,
            run.groups.wires(stage.partition.placement),
            run.device,
            loss_of=loss_of,
            weights=versions,
            timeline=self.timeline,
            # Layers that are gathered for a backward are freed at the end of its first half.
            halves=self._stages.fully_sharded is None,
            completing=self.completing if run.layout.size("data") > 1 else None,
        )
        weight = self.options.microbatch_weight
        microbatches = Microbatches(run, splitting, weight, self._shards, dry_runs, last_stage, stage)
        self._at_work = _AtWork(last_stage, engine, dry_runs, microbatches)
        self.begin_averages()

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:
            if "multiple optimizers" not in str(error):
                raise
            # Lightning advises manual optimization.
            raise ValueError(SEVERAL_OPTIMIZERS) from error

    @override
    def holding(self) -> Holding:
        if not self.stage.partition.units:  # there was no dry run of the step
            return Holding("all")
        return Holding(self._stages.layers, extra=self.activation_bytes())

    @abstractmethod
    def activation_bytes(self) -> int:
        """An estimate of the most bytes of activations that this rank holds in training."""

    @property
    @override
    def holds_all(self) -> bool:
        return super().holds_all and not self.is_fully_sharded

    @property
    def is_fully_sharded(self) -> bool:
        """Does each replica hold a part of its stage?"""
        return self.options.data_parallel_kind == "fully_shard" and self.layout.size("data") > 1

    # -- evaluation ----------------------------------------------------------------------------------------------

    @override
    def run_step(self, kind: str, *args: Any, **kwargs: Any) -> Any:
        """Run a step. A batch of an evaluation is one message to the next chunk, and with one chunk a stage no stage
        waits for the end of a batch. It is not split, so metrics see what they see in one process."""
        if kind == "training_step":  # of one process
            return super().run_step(kind, *args, **kwargs)
        work, step = self.at_work, getattr(self.run.module, kind)
        indices = [index for index in args[1:] if isinstance(index, int)]  # of the batch, and of its loader
        alone = partial(work.last_stage.alone, kind, *indices)

        def run() -> Any:
            with alone():
                return work.microbatches.wrapped(kind, step)(*args, **kwargs)

        with self.precision_plugin.forward_context():
            # Each loader may have a step of its own.
            trial = partial(work.dry_runs.on_copy, step, *args, **kwargs)
            flow = work.dry_runs.set_flow(f"{kind} {args[2:]}", trial)
            if flow is not None and not any(flow.last):  # it calls no layer, so no stage would leave it
                if not self.stage.has_last_chunk:
                    return None
                with alone():
                    return step(*args, **kwargs)
            output = work.engine.evaluate(run, next(iter(indices), 0))
        if self._stages.fully_sharded is not None:
            self._stages.fully_sharded.free()
        return output

    # -- the end -------------------------------------------------------------------------------------------------

    @abstractmethod
    def theoretical_bubble(self) -> float:
        """The fraction of time that the schedule leaves stages idle."""

    def forward_flops(self) -> float:
        """The floating-point operations of the forwards of a replica's batch, by torch's formulas."""
        return self.at_work.microbatches.count * sum(self.stage.partition.operations)

    @abstractmethod
    def timeline_title(self) -> str:
        """The title of the picture of a training."""

    @property
    def staleness(self) -> Mapping[int, int] | None:
        """For each number of updates that this rank's gradients were late so far, how many were; None for a pipeline
        without late gradients."""
        return None

    @override
    def on_train_end(self) -> None:
        self.drain()
        super().on_train_end()
        self.at_work.last_stage.outcomes.take(keep=0)  # all stages meet here
        if self.timeline.enabled:
            trainer = self.run.trainer
            write_timeline(
                self.timeline,
                self.layout,
                self.groups.host_group,
                Path(trainer.log_dir or trainer.default_root_dir),
                title=self.timeline_title(),
                theory=self.theoretical_bubble(),
                staleness=self.staleness,
            )

    @override
    def on_exception(self, exception: BaseException) -> None:
        # The engine holds the connections. Neighbours notice the error only when these are closed.
        if self._at_work is not None:
            # A callback that saves reads metrics, for which none is to wait any more.
            self._at_work.last_stage.outcomes.end()
        self._at_work = None
        super().on_exception(exception)

    @override
    def end_run(self) -> None:
        self._at_work = None  # with its sending threads
        super().end_run()


def _has_absent_ones(module: nn.Module) -> bool:
    return any(isinstance(parameter, AbsentTensor) for parameter in module.parameters())
