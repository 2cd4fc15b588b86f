"""Asynchronous pipeline parallelism (PipeDream, or a V): no flush, so no bubble, at the price of late gradients.

Each ``training_step`` feeds one batch's microbatches to the stage's endless list of actions, and runs the slice that
falls due: forwards of this batch, backwards and updates of batches that this stage saw some steps ago. A rank waits for
another one only for the schedule's messages, so Lightning's broadcast before every batch is switched off. The
pipeline is drained where weights or metrics have to be whole::

    Lightning              here
    training_step          batch -> microbatches -> fed to the list -> engine.run(slice)
                               | within it, an update: gradients completed -> clipped -> step, on this stage alone,
                               | in a V of one chunk alone
    backward               hooks only
    validation, save, end  drain
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from torch.autograd.graph import GradientEdge
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel.callbacks.defaults import ASYNCHRONOUS
from lightning_parallel.callbacks.start_table import Holding
from lightning_parallel.checks.late_gradients import check_in_v, refuse_averages, refuse_hooks, refuse_ties
from lightning_parallel.checks.optimizer_trial import refuse_steps_apart
from lightning_parallel.cuts.partition import Partition
from lightning_parallel.gradients.loss_scale import scaler_of
from lightning_parallel.gradients.swapping import Gradients
from lightning_parallel.late.settings import LateGradients
from lightning_parallel.late.training import AsynchronousTraining
from lightning_parallel.pipeline.staleness import Correction, Stashing
from lightning_parallel.pipeline.weights import WeightVersions
from lightning_parallel.private.lightning.batches import ends_update
from lightning_parallel.ranks.layout import Placement
from lightning_parallel.schedules.named import TITLES, Endless, placement_of
from lightning_parallel.schedules.simulate import most_held
from lightning_parallel.schedules.steady import steady
from lightning_parallel.set_up.options import StagedOptions
from lightning_parallel.settings import Count, Natural, takes
from lightning_parallel.strategies.staged import StagedStrategy


@dataclass(frozen=True, kw_only=True)
class AsyncPipelineOptions(StagedOptions):
    """The settings of :class:`AsyncPipelineStrategy`.

    Args:
        weights: ``"stash"``: a backward uses the weights that its forward used; one copy of the stage's weights is kept
            for each update in flight. ``"2bw"``: every gradient, on every stage, is exactly one update late
            (PipeDream-2BW). ``"latest"``: a backward uses the current weights: no copies, and a biased gradient.
        correction: what forwards read in the place of the parameters, to make up for the delay
            (:mod:`lightning_parallel.pipeline.staleness`). ``"error_feedback"``: the parameters extrapolated by the
            last update. ``"second_order"``: by the previous extrapolation too. A number: by so many times the last
            update. All of them hold one more copy of the stage's weights. None: the parameters themselves, as suits
            an optimizer without momentum. After a drain (validation, checkpoints) forwards read the parameters
            themselves.
        lr_discount: for this many updates (PipeMare's T1), stages whose gradients are more than one update late use a
            smaller learning rate, which grows to the full one. None: all stages use the full rate from the start.
        schedule: ``"1f1b"``: one chunk of layers a stage. ``"vhalf"`` and ``"vmin"``: two, in a V, which hold about a
            half and three eighths of its activations with 16 stages, with gradients that are no later or half as late;
            each chunk has updates of its own, and is late by itself. The first and the last layers share a stage, so
            they may share weights. Stages wait a little at each batch, the less the more microbatches it has
            (:mod:`lightning_parallel.schedules.asynchronous_v`). Only with ``weights="stash"``.
        extra_in_flight: microbatches in flight on each link beyond the fewest that keep all stages busy. 1 hides the
            latency of messages, and doubles the staleness. ``microbatches="auto"`` gives an update twice as many
            microbatches as there are stages, and as many again for each extra one in flight, if the batch has the
            samples. With 1 microbatch it is PipeDream.

    Raises:
        ValueError: a value that its setting doesn't take, ``data_parallel_kind="fully_shard"``, or in a V other
            ``weights`` than ``"stash"``, or ``extra_in_flight``.
    """

    schedule: Endless = "1f1b"
    weights: Stashing = "stash"
    correction: Correction = "second_order"
    lr_discount: Count | None = None
    extra_in_flight: Natural = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data_parallel_kind == "fully_shard":
            raise ValueError(
                "data_parallel_kind='fully_shard': an asynchronous pipeline keeps several versions of its weights, "
                "which layers that are gathered for a step don't have. Use 'replicate', or PipelineStrategy."
            )
        if self.schedule == "1f1b":
            return
        if self.weights != "stash":
            raise ValueError(
                f"weights={self.weights!r} with schedule={self.schedule!r}: in a V a backward uses the weights of its "
                f"forward. Use weights='stash', or schedule='1f1b'."
            )
        if self.extra_in_flight:
            raise ValueError(
                f"extra_in_flight={self.extra_in_flight} with schedule={self.schedule!r}: a V has a number in flight "
                f"of its own. Leave it out, take 'vhalf', which has more than 'vmin', or take schedule='1f1b'."
            )


class AsyncPipelineStrategy(StagedStrategy):
    """Asynchronous 1F1B, or V: every stage is busy all the time, and steps on its own.

    Stage s of p runs its forward of a microbatch (p - 1 - s) microbatches before its backward, and may step in between:
    its gradients are up to ceil((p - 1 - s) / microbatches) updates late. Update u uses the learning rate that
    schedulers have set for batch u, on every stage. Gradients are clipped by each stage's own norm, since a norm over
    stages would make them wait for each other. In a V, read chunk for stage.
    """

    refused_callbacks = ASYNCHRONOUS  # type: ignore[assignment]  # also on one stage
    gradients_on_parameters = False  # they grow on the leaves of versions, which come and go
    keep_together = True  # a copy on another stage is updated at another time
    training: AsynchronousTraining  # this stage's updates, from set-up on

    @takes(AsyncPipelineOptions)
    def __init__(self, options: AsyncPipelineOptions) -> None:
        super().__init__(options)
        self._late = LateGradients(
            options.weights, options.correction, options.lr_discount, options.extra_in_flight, options.schedule
        )
        self._own: dict[int, frozenset[str]] = {}  # the names of the parameters that each chunk updates
        self._steps = False  # does the optimizer step after the batch that runs?

    # -- set-up --------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if scaler_of(self.precision_plugin) is not None:
            raise ValueError(
                "precision='16-mixed': its loss scale follows overflows that all stages see at the same time, which an "
                "asynchronous pipeline doesn't have. Use 'bf16-mixed' or '32-true'."
            )
        assert self.lightning_module is not None
        if trainer.state.fn == TrainerFn.FITTING:
            refuse_hooks(trainer, self.lightning_module)
            if self._late.in_v(self.layout.stages):
                check_in_v(trainer, self.lightning_module, self._late.schedule)
        super().setup(trainer)

    @property
    @override
    def placement(self) -> Placement:
        return placement_of(self._late.schedule, self.layout.stages)

    @override
    def check_partition(self, partition: Partition) -> None:
        refuse_ties(self.run.module, partition)

    @property
    @override
    def norm_group(self) -> dist.ProcessGroup:
        return self.groups.along("tensor")  # of this stage alone: its update is not that of others

    @property
    @override
    def batches_ahead(self) -> int:
        if self._late.in_v(self.layout.stages):
            return 1  # no stage ends a batch before all have begun it
        return (self.layout.stages - 1) * (1 + self._late.extra_in_flight)  # with one microbatch a batch

    def _updates_microbatches(self) -> int:
        """The number of microbatches of an update, as far as it is known before the first batch."""
        if self.options.microbatches != "auto":
            return self.options.microbatches * self._accumulation
        return self._late.wanted_microbatches(self.layout.stages)

    @override
    def automatic_microbatches(self, batch_size: int) -> int:
        """The smallest count from ``needed`` to ``2 * needed`` that divides the batch evenly; otherwise ``needed``."""
        needed = math.ceil(self._updates_microbatches() / self._accumulation)
        equal = (count for count in range(needed, 2 * needed + 1) if batch_size % count == 0)
        return min(batch_size, next(equal, needed))

    @property
    def _accumulation(self) -> int:
        return self.run.trainer.accumulate_grad_batches

    @override
    def holding(self) -> Holding:
        stages, stage, microbatches = self.layout.stages, self.layout.stage, self._updates_microbatches()
        extra = self.activation_bytes()
        for chunk, names in self._own_parameters().items():
            held = (self.local_model.parameters[name] for name in names)
            trained = sum(parameter.nbytes for parameter in held if parameter.requires_grad)  # others aren't copied
            extra += self._late.copies(stages, chunk, microbatches) * trained
        return Holding(self._stages.layers, self._late.description(stages, stage, microbatches), extra)

    @override
    def activation_bytes(self) -> int:
        # A list of some updates is as full as an endless one.
        endless, count = self._late.actions(self.layout.stages, self.layout.stage), self._updates_microbatches()
        actions = [action for _ in range(3 + self.layout.stages // count) for action in endless.feed(count)]
        return most_held(actions, self.stage.partition.held, self.stage.partition.computed)

    def _own_parameters(self) -> dict[int, list[str]]:
        """The names of the parameters that each chunk updates. One that both use is the first one's."""
        first, *later = self.stage.chunks
        own = {chunk: self.stage.used_only_in(chunk) for chunk in later}
        others = {name for names in own.values() for name in names}
        return {first: [name for name in self.local_model.parameters if name not in others], **own}

    @override
    def make_versions(self) -> dict[int, WeightVersions]:
        """Make the versions of the weights, and the updates that create them."""
        layout, parameters, uses = self.layout, self.local_model.parameters, self.stage.partition.uses
        first = self.stage.chunks[0]
        own = self._own_parameters()
        self._own = {chunk: frozenset(names) for chunk, names in own.items()}
        versions: dict[int, WeightVersions] = {}
        for chunk, names in own.items():
            versions[chunk] = WeightVersions(
                self.run.module,
                {name: parameters[name] for name in names},
                self._late.weights,
                corrected=self._late.may_correct(layout.stages, chunk),
                grown=self._gradient_grown if layout.size("data") > 1 and len(own) == 1 else None,
                lender=versions.get(first),
                borrowed=[name for name in own[first] if chunk in uses[name]] if chunk != first else (),
            )
        self.training = AsynchronousTraining(
            self.run,
            self._late,
            local=self.local_model,
            partition=self.stage.partition,
            versions=versions,
            completed=self._completed,
        )
        return versions

    def _gradient_grown(self, name: str) -> None:
        averager = self.replicas.averager
        if averager is not None and averager.begun:  # in an update's last backward
            (versions,) = self.training.versions.values()
            averager.ready(name, versions.gradient(name))

    def _completed(self, gradients: Gradients, chunk: int) -> Gradients:
        # In a V a chunk's averages would meet those of another one's update, so they are sent when it is complete.
        names = self._own[chunk] if len(self.stage.chunks) > 1 else None
        return self._shards.completed(self.replicas.averaged(gradients, names))

    @override
    def completing(self, chunk: int, edges: Sequence[GradientEdge]) -> AbstractContextManager[None]:
        return super().completing(chunk, edges) if len(self.stage.chunks) == 1 else nullcontext()

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        refuse_averages(self.run.trainer, self._late.in_v(self.layout.stages))
        # A stage that lags behind steps its scheduler before its first update. Each update still uses its own rate.
        warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler.step\(\)` before")

    @override
    def try_optimizer(self, optimizer: Optimizer) -> set[int]:
        groups = super().try_optimizer(optimizer)
        if self._late.in_v(self.layout.stages):
            strategy = f"{type(self).__name__}(schedule={self._late.schedule!r})"
            refuse_steps_apart(optimizer, self.local_model, strategy)
        return groups

    # -- a batch -------------------------------------------------------------------------------------------------

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Called once for a batch that ends an update. The stage's own updates happen inside the closure."""
        self._steps = True
        try:
            return closure()
        finally:
            self._steps = False

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        microbatches, engine = self.at_work.microbatches, self.at_work.engine
        if not self._steps and ends_update(self.run.trainer):
            raise RuntimeError(
                f"{type(self.lightning_module).__name__}.optimizer_step calls the closure itself, but in the "
                f"asynchronous pipeline each stage steps inside it. Use optimizer.step(closure=closure) in every batch."
            )
        work = microbatches.begin_batch((*args, *kwargs.values()), first=self.training.fed)
        if microbatches.changes.known:
            raise ValueError(
                f"training_step changes {microbatches.changes.known[0]!r}. In the asynchronous pipeline several "
                f"batches are under way at once: change it in on_train_batch_end, or use PipelineStrategy."
            )
        actions = self.training.feed(engine, len(work), ends_update=self._steps)
        with microbatches.recorded():
            outputs = engine.run(actions, work, update=self.training.update, more_follow=True)
        return microbatches.joined(outputs)

    @override
    def make_gradients(self, backward: Callable[[], None]) -> None:
        """Nothing: the schedule has run the backwards that were due."""

    @override
    def after_last_update(self) -> list[Callable[[], Any]] | None:
        return self.training.after_last

    # -- where the pipeline drains -------------------------------------------------------------------------------

    @override
    def drain(self) -> None:
        if self._at_work is not None:
            self.training.drain(self._at_work.engine)

    # -- the end -------------------------------------------------------------------------------------------------

    @override
    def timeline_title(self) -> str:
        extra, count = self._late.extra_in_flight, self.training.fed // max(1, self.training.begun)
        more = f", {extra} extra in flight" if extra else ""
        batches = f"{count} microbatch{'' if count == 1 else 'es'}"
        return f"asynchronous {TITLES[self._late.schedule]}, {self.layout.stages} stages, {batches} an update{more}"

    @override
    def theoretical_bubble(self) -> float:
        """The fraction of time that the schedule leaves stages idle in its steady state."""
        if not self._late.in_v(self.layout.stages):
            return 0.0
        count = self.training.fed // max(1, self.training.begun)
        return 1 - steady(self._late.schedule, self.layout.stages, count).busy

    @property
    @override
    def staleness(self) -> Mapping[int, int]:
        counts = (versions.staleness for versions in self.training.versions.values())
        return sum(counts, Counter[int]())
