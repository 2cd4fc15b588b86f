"""Synchronous pipeline parallelism: every update is that of the whole batch, whatever the schedule.

Lightning's step has one backward (``training_step``, ``zero_grad``, ``backward``, ``optimizer_step``); a schedule has
many. So the whole schedule runs in ``training_step``. Its gradients are taken off the parameters before
``zero_grad`` can erase them, and published in ``backward``. Accumulation, clipping, scaling and every hook work as
usual::

    Lightning            here
    training_step        batch -> microbatches -> engine.run(schedule) -> gradients taken, averaged, summed
    zero_grad
    backward             gradients published
    clip, step           by the norm of the whole model
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel.gradients.swapping import Gradients, swap_gradients
from lightning_parallel.parts.logs import LogRecorder
from lightning_parallel.parts.microbatches import loss_scale
from lightning_parallel.parts.options import StagedOptions
from lightning_parallel.pipeline.schedule import SCHEDULES, Generator, Schedule, of_one_update
from lightning_parallel.pipeline.simulate import ideal_bubble
from lightning_parallel.settings import takes
from lightning_parallel.strategies.staged import StagedStrategy


@dataclass(frozen=True, kw_only=True)
class PipelineOptions(StagedOptions):
    """The settings of :class:`PipelineStrategy`.

    Args:
        schedule: ``"1f1b"`` (each backward as early as it can run; activations of at most ``stages`` microbatches),
            ``"gpipe"`` (all forwards, then all backwards: the same bubble and numbers, more memory), ``"naive"`` (the
            model split, one stage at work at a time), or a function that makes one from a number of stages and a number
            of microbatches (:mod:`lightning_parallel.pipeline.schedule`). The bubble of the first two is
            (stages - 1) / (microbatches + stages - 1). ``microbatches="auto"`` is four a stage, as GPipe advises, or as
            many as the batch has samples; one with ``"naive"``.

    Raises:
        ValueError: a value that its setting doesn't take, or several microbatches with ``"naive"``.
    """

    schedule: Literal["naive", "gpipe", "1f1b"] | Callable[[int, int], Schedule] = "1f1b"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule == "naive" and self.microbatches not in ("auto", 1):
            raise ValueError(f"microbatches={self.microbatches!r}: the naive schedule has one; use '1f1b' for more.")


class PipelineStrategy(StagedStrategy):
    """Splits the layers over devices and streams microbatches through them. Gradients are those of the whole batch.

    ::

        trainer = L.Trainer(devices=4, strategy=PipelineStrategy(microbatches=16))
        trainer.fit(AnyLightningModule(), datamodule)
    """

    @takes(PipelineOptions)
    def __init__(self, options: PipelineOptions) -> None:
        super().__init__(options)
        if callable(options.schedule):
            self._schedule, self._schedule_name = options.schedule, getattr(options.schedule, "__name__", "schedule")
        else:
            self._schedule, self._schedule_name = SCHEDULES[options.schedule], options.schedule
        self._count = 1  # microbatches of the last batch
        self._gradients: Gradients = {}  # from training_step to backward
        self._ends_update = False  # does an update follow the batch that runs?
        self._accumulates = False  # do gradients of earlier batches wait for that update?

    # -- set-up --------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self._ends_update = self._accumulates = False
        self.set_up(
            trainer,
            automatic_microbatches=self._automatic_microbatches,
            completing=self._complete_gradients,
            norm_group=self.groups.model,
            counts=lambda name: self._shards.counts(name) and self._stages.counts(name),
        )

    def _automatic_microbatches(self, batch_size: int) -> int:
        return 1 if self._schedule_name == "naive" else min(batch_size, 4 * self.layout.stages)

    # -- a batch -------------------------------------------------------------------------------------------------

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Lightning's step of the optimizer. Its closure runs the batch. Accumulating batches run outside it."""
        self._ends_update = True
        try:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            self._ends_update = self._accumulates = False

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._microbatches is not None and self.lightning_module is not None
        parameters, layout = self.local_model.parameters, self.layout
        recorder = LogRecorder()
        scale = loss_scale(self.precision_plugin) / self.lightning_module.trainer.accumulate_grad_batches
        arguments, begins_update = (*args, *kwargs.values()), not self._accumulates
        work, sizes = self._microbatches.of(arguments, recorder, scale=scale, begins_update=begins_update)
        self._count = len(sizes)
        actions = _lists(self._schedule, layout.stages, self._count)[layout.stage]

        # zero_grad runs later: set aside what `p.grad` still holds of the last update.
        earlier = {} if self._accumulates else swap_gradients(parameters, {})
        if self._stages.fully_sharded is not None:
            self._stages.fully_sharded.hold_back()
        with self._microbatches.recorded(recorder):
            outputs = self.engine.run(actions, work)
        gradients = swap_gradients(parameters, earlier)
        if self._ends_update:
            gradients = self._shards.completed(self.replicas.averaged(gradients))
            gradients = self._stages.summed_shared(gradients)
        self._gradients, self._accumulates = gradients, True

        if not layout.is_last_stage:
            return self.last_stage.publish_step(None)
        output = self._microbatches.joined(outputs, sizes, recorder)
        if layout.stages > 1:
            self.last_stage.publish_step(output["loss"] if isinstance(output, dict) else output)
        return output

    def _complete_gradients(self) -> None:
        """Before the last backward of a batch. If an update follows it, gradients are averaged while it runs."""
        if self._ends_update:
            self.replicas.begin_last_backward()
            if self._stages.fully_sharded is not None:
                self._stages.fully_sharded.release()

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Publish the gradients that the schedule has made, between the hooks that Lightning calls here."""
        module = self.lightning_module
        assert module is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        swap_gradients(self.local_model.parameters, self._gradients)
        self._gradients = {}
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    # -- the end -------------------------------------------------------------------------------------------------

    @override
    def theoretical_bubble(self) -> float:
        """The fraction of time that the schedule leaves stages idle, with the microbatches of the last batch."""
        return ideal_bubble(_lists(self._schedule, self.layout.stages, self._count))

    @override
    def on_train_end(self) -> None:
        title = f"{self._schedule_name}, {self.layout.stages} stages, {self._count} microbatches"
        self.write_timeline(title, self.theoretical_bubble())


@lru_cache
def _lists(schedule: Generator, stages: int, microbatches: int) -> Schedule:
    """A schedule's lists, made once, since all batches but an epoch's last have the same."""
    return of_one_update(schedule, stages, microbatches)
