"""What the synchronous and the asynchronous pipeline share: how the stages of a module are set up, evaluated and ended.

Training differs: see ``pipeline.py`` and ``pipeline_async.py``. The parts, in the order of set-up::

    Stages          this rank's stage; what several stages share
    TensorShards    its layers divided over tensor ranks
    Replicas        copies of the stage, gradients averaged
    LastStage       hooks and logs of the last stage, for all
    FirstLook       what crosses the cuts in a step
    LossMeans       by what microbatches are weighted
    Engine          runs a schedule on the stage
    Evaluation      validation, test, prediction
    Microbatches    a batch's work, and its outputs joined
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_parallel.absent.tensor import AbsentTensor
from lightning_parallel.callbacks.defaults import IN_STAGES
from lightning_parallel.callbacks.graph_flops import ForwardFlops
from lightning_parallel.callbacks.performance import StageFigures
from lightning_parallel.callbacks.start_table import Holding
from lightning_parallel.checks.manual import SEVERAL_OPTIMIZERS, refuse_manual_optimization
from lightning_parallel.gradients.in_trainer import share_overflows
from lightning_parallel.losses.graph import Number
from lightning_parallel.pipeline.engine import Engine
from lightning_parallel.pipeline.stage import Stage
from lightning_parallel.pipeline.weights import Weights
from lightning_parallel.plan.partition import Partition
from lightning_parallel.private.lightning.launching import trainer_of
from lightning_parallel.ranks.layout import Placement
from lightning_parallel.results.last_stage import LastStage
from lightning_parallel.results.timelines import warn_without_pictures, write_timeline
from lightning_parallel.set_up.afterwards import PartOfModel
from lightning_parallel.set_up.cutting import agreed_partition
from lightning_parallel.set_up.first_batch import trial_of
from lightning_parallel.set_up.first_look import FirstLook
from lightning_parallel.set_up.options import StagedOptions
from lightning_parallel.set_up.splitting import Splitting
from lightning_parallel.set_up.stages import Stages, refuse_evaluation, refuse_training
from lightning_parallel.set_up.tensor_shards import TensorShards
from lightning_parallel.steps.earlier_chunks import EarlierChunks
from lightning_parallel.steps.evaluation import Evaluation
from lightning_parallel.steps.loss_means import LossMeans
from lightning_parallel.steps.microbatches import Microbatches, loss_of
from lightning_parallel.strategies.base import LayoutStrategy
from lightning_parallel.timeline.recording import Timeline


class StagedStrategy(LayoutStrategy):
    """Base of the synchronous and the asynchronous pipeline."""

    options: StagedOptions
    refused_callbacks = IN_STAGES
    calls_configure_part = True

    def __init__(self, options: StagedOptions) -> None:
        super().__init__(options, pipeline=options.stages, data=options.data_parallel, tensor=options.tensor_parallel)
        self._shards = TensorShards(options.plan, options.sequence_parallel, self.disk_offload)
        self._stages = Stages(options)
        self._timeline = Timeline(enabled=options.timeline)
        self._last_stage: LastStage | None = None
        self._part = PartOfModel()
        self._engine: Engine | None = None
        self._evaluation: Evaluation | None = None
        self._microbatches: Microbatches | None = None
        self._forward: ForwardFlops | None = None  # of the first batch, where there was no dry run to count it
        self._forward_flops: int | None = None

    @property
    def stage(self) -> Stage:
        """This rank's stage, from set-up on."""
        return self._stages.stage

    @property
    def timeline(self) -> Timeline:
        """The actions that this rank has recorded in this run."""
        return self._timeline

    @property
    def engine(self) -> Engine:
        """Runs the schedule on this rank's stage, from set-up to the end of the run."""
        assert self._engine is not None, "engines are made in Trainer.fit, validate, test and predict"
        return self._engine

    @property
    def last_stage(self) -> LastStage:
        """Hooks and logs that the last stage runs for all, from set-up to the end of the run."""
        assert self._last_stage is not None, "made in Trainer.fit, validate, test and predict"
        return self._last_stage

    @property
    def is_one_process(self) -> bool:
        """Is there one rank, and nothing that asks for parts of a step? Lightning runs it then."""
        return False

    # -- set-up --------------------------------------------------------------------------------------------------

    def set_up(
        self,
        trainer: pl.Trainer,
        *,
        automatic_microbatches: Callable[[int], int],
        completing: Callable[[int], AbstractContextManager[None]],
        placement: Placement | None = None,
        check: Callable[[Partition], None] = lambda parts: None,
        weights: Callable[[], Weights | None] = lambda: None,
        norm_group: dist.ProcessGroup,
        counts: Callable[[str], bool],
        gradients_on_parameters: bool = True,
        factor: Callable[[], Number] = lambda: 1.0,
    ) -> None:
        """What ``setup`` does for both pipelines. The arguments are what differs between them.

        Args:
            automatic_microbatches: gives the number for ``microbatches="auto"``, from a batch's size.
            completing: given a chunk, a context around the backward that completes its gradients of an update.
            placement: the stage of each chunk; by default each stage has one chunk.
            check: raises for a partition that can't be trained.
            weights: makes the weights that the engine's forwards read; None for the module's own parameters.
            norm_group: the ranks over which the norm for clipping is taken.
            counts: whether this rank's copy of a parameter enters that norm.
            gradients_on_parameters: backwards add to ``p.grad``.
            factor: gives the number by which the gradients that a batch's backwards have added up are multiplied.
        """
        self._part.end()
        run = self.prepare(trainer)
        module, groups = run.module, run.groups

        # The module in parts, before it takes memory on the device.
        if run.trains and not self.is_one_process:
            refuse_manual_optimization(module)
            refuse_training(module)
        if run.layout.stages > 1:
            refuse_evaluation(module)

        splitting = Splitting(self.options, automatic_microbatches)
        places = placement or tuple(range(run.layout.stages))
        self._stages.take(
            run,
            cut=lambda: agreed_partition(run, self.options, splitting, places),
            check=check,
            divide=lambda: self._shards.divide(
                module, groups.along("tensor"), run.device, partial(trial_of, trainer, module)
            ),
        )
        local = self._stages.local_model(self._shards.shards)
        self.hold(local, counts=counts, norm_group=norm_group)
        share_overflows(self.precision_plugin, run.device)

        # Make equal what several ranks hold.
        self.replicas.copy_parameters()
        self._shards.begin(local, groups.along("tensor"))
        self._stages.join_shared(local, run)
        if run.trains:
            self.replicas.begin(watch=gradients_on_parameters, factor=factor)
            if self._stages.fully_sharded is not None:
                self._stages.fully_sharded.multiply_by(factor)

        # What runs a batch.
        self._timeline = Timeline(enabled=self._timeline.enabled, device=run.device)  # of this run alone
        if self._timeline.enabled and run.trains:
            warn_without_pictures()
        self._forward = None if any(self.stage.partition.operations) else ForwardFlops(run.layout.size("tensor"))
        self._last_stage = LastStage(
            run,
            deciding=self.stage.partition.placement[0],
            before_meeting=self._before_meeting,
            failed=self.on_exception,
        )
        versions = weights()
        look = FirstLook(run, self._stages, self._last_stage, late=versions is not None)
        self._engine = Engine(
            self.stage,
            run.layout,
            groups.links(self.stage.partition.placement),
            run.device,
            loss_of=self._loss_of,
            weights=versions,
            timeline=self._timeline,
            # Layers that are gathered for a backward are freed at the end of its first half.
            halves=self._stages.fully_sharded is None,
            completing=completing,
        )
        earlier = EarlierChunks(module, self.stage)
        self._evaluation = Evaluation(run, self._engine, self._stages, look, self._last_stage, self._shards, earlier)
        known = partial(look.known, "training_step")
        means = LossMeans(run, self.options.microbatch_weight, self._last_stage, known, by_user=splitting.by_user)
        self._microbatches = Microbatches(
            run,
            splitting,
            shards=self._shards,
            look=look,
            means=means,
            last_stage=self._last_stage,
            earlier=earlier,
            stage=self.stage,
        )

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

    # -- where stages meet ---------------------------------------------------------------------------------------

    @abstractmethod
    def drain(self) -> None:
        """Finish what stages have begun of later batches, until nothing is in flight. Every rank calls it after the
        same batch."""

    def _before_meeting(self, hook: str) -> None:
        """Drain before the stages exchange metrics at the end of this hook: it may do so after a batch or an epoch."""
        if hook in ("on_train_batch_end", "on_train_epoch_end"):
            self.drain()

    @override
    def on_validation_start(self) -> None:
        self.drain()
        super().on_validation_start()

    @property
    @override
    def holds_all(self) -> bool:
        in_parts = self.options.data_parallel_kind == "fully_shard" and self.layout.size("data") > 1
        return super().holds_all and not in_parts

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.drain()  # the first call of a save, on all ranks
        return super().lightning_module_state_dict()

    # -- evaluation ----------------------------------------------------------------------------------------------

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._evaluation is not None
        with self.precision_plugin.val_step_context():
            return self._evaluation.run(self.run.module.validation_step, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._evaluation is not None
        with self.precision_plugin.test_step_context():
            return self._evaluation.run(self.run.module.test_step, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._evaluation is not None
        step = partial(self._evaluation.run, self.run.module.predict_step, *args, **kwargs)
        with self.precision_plugin.predict_step_context():
            return self.predict_equally(step)

    # -- the end -------------------------------------------------------------------------------------------------

    @abstractmethod
    def theoretical_bubble(self) -> float:
        """The fraction of time that the schedule leaves stages idle."""

    def stage_figures(self) -> StageFigures:
        """The figures that :class:`~lightning_parallel.PerformanceMonitor` reads from a pipeline while it trains."""
        assert self._microbatches is not None
        forward = self._microbatches.count * sum(self.stage.partition.operations) or self._forward_flops or 0
        return StageFigures(forward, self.theoretical_bubble, self._timeline, self.mean_staleness())

    def _loss_of(self, output: Any) -> Tensor:
        """The loss in what a step returned. The first one's graph is counted where nothing else has been."""
        loss = loss_of(output)
        if self._forward is not None:
            self._forward.add(loss)
            self._forward_flops = self._forward.total
            self._forward = None  # it holds the graph
        return loss

    def mean_staleness(self) -> float | None:
        """By how many updates this rank's gradients were late so far, on average; None for a pipeline without late
        gradients."""
        return None

    def write_timeline(self, title: str, theory: float, staleness: dict[int, int] | None = None) -> None:
        """Write the timeline at the end of training, if it is on. All ranks call it."""
        if self._timeline.enabled:
            trainer = self.run.trainer
            directory = Path(trainer.log_dir or trainer.default_root_dir)
            write_timeline(
                self._timeline,
                self.layout,
                self.groups.host_group,
                directory,
                title=title,
                theory=theory,
                staleness=staleness,
            )

    @override
    def on_exception(self, exception: BaseException) -> None:
        # The engine holds the connections. Neighbours notice the error only when these are closed.
        self._engine = self._evaluation = None
        if self._last_stage is not None:
            self._last_stage.outcomes.end()  # a callback that saves reads metrics, for which none is to wait any more
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self._stages.end()
        self._engine = self._evaluation = None  # with its sending threads
        if self._last_stage is not None and self.lightning_module is not None:
            if trainer_of(self.lightning_module) is not None:
                self._last_stage.end()
            self._last_stage = None
        if self.lightning_module is not None:
            self._part.begin(part for part in self.lightning_module.modules() if _has_absent_ones(part))
        super().teardown()


def _has_absent_ones(module: nn.Module) -> bool:
    return any(isinstance(parameter, AbsentTensor) for parameter in module.parameters())
