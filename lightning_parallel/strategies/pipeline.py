"""Synchronous pipeline parallelism: every update is that of the whole batch, whatever the schedule.

Lightning's step has one backward (``training_step``, ``zero_grad``, ``backward``, ``optimizer_step``); a schedule has
many. So the whole schedule runs in ``training_step``. Its gradients are taken off the parameters before
``zero_grad`` can erase them, and added in ``backward``. Accumulation, clipping, scaling and every hook work as
usual::

    Lightning            here
    training_step        batch -> microbatches -> engine.run(schedule) -> gradients taken, averaged, summed
    zero_grad
    backward             gradients added to what zero_grad has left
    clip, step           by the norm of the whole model
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.autograd.graph import GradientEdge
from typing_extensions import override

from lightning_parallel.cuts.partition import Partition
from lightning_parallel.gradients.overridden import erased_are_read
from lightning_parallel.gradients.swapping import Gradients, add_gradients, swap_gradients
from lightning_parallel.losses.graph import Number
from lightning_parallel.ranks.layout import Placement
from lightning_parallel.schedules.actions import Action, Schedule, placement
from lightning_parallel.schedules.checks import of_one_update
from lightning_parallel.schedules.generators import Generator, interleaved, one_at_a_time
from lightning_parallel.schedules.named import SCHEDULES
from lightning_parallel.schedules.simulate import busy_across_batches, most_held, simulate
from lightning_parallel.schedules.v_shaped import zbv, zbv_in_bytes
from lightning_parallel.set_up.options import StagedOptions
from lightning_parallel.settings import Auto, Bytes, Count, Range, binary_size, bytes_of, takes
from lightning_parallel.steps.between_batches import gained, reasons_to_wait
from lightning_parallel.steps.post_validation import PostValidation, refuse_post_validation
from lightning_parallel.strategies.staged import StagedStrategy


@dataclass(frozen=True, kw_only=True)
class PipelineOptions(StagedOptions):
    """The settings of :class:`PipelineStrategy`.

    Args:
        schedule: ``"1f1b"`` (each backward as early as it can run; activations of at most ``stages`` microbatches),
            ``"gpipe"`` (all forwards, then all backwards: the same bubble and numbers, more memory), ``"naive"`` (the
            model split, one stage at work at a time), or a function that makes one from a number of stages and a number
            of microbatches (:mod:`lightning_parallel.schedules.generators`). The bubble of the first two is
            (stages - 1) / (microbatches + stages - 1). ``"interleaved"``: 1F1B with several chunks of layers a stage:
            a bubble smaller by their number, for more messages and activations. ``"zbv"``: two chunks a stage, and
            backwards in two halves: the smallest bubble; every stage holds what the first one does in 1F1B.
            ``"vhalf"`` and ``"vmin"`` hold about a half and a third of it where there are many stages (with two, all),
            for a larger bubble. With more than two stages they wait at the end of each batch.
            ``microbatches="auto"`` is four a stage, as GPipe advises, or as many as the batch has samples; one with
            ``"naive"``, and where there is one stage.
        chunks: the number of chunks of layers in each stage, with ``"interleaved"``; ``"auto"``: 2.
        activation_memory: with ``"zbv"``, the most activations that a stage may hold, as a part of what the first stage
            of 1F1B holds, or in bytes, such as ``"6GiB"``. The less, the larger is the bubble. V-Min's are the
            least, about a third with many stages; with two, all. Bytes are those that the start of a run estimates.
        post_validation: with ``"zbv"`` and ``gradient_clip_val`` or a loss scaler (``16-mixed``), don't wait for the
            norm of all stages. A stage makes its update as if nothing were clipped, or skips it by its own gradients.
            Where that was wrong, the update is undone, and made again or skipped. The numbers are the same, but after
            an error the module may hold an update that should have been clipped or skipped. It takes the memory of
            the weights, the gradients and the optimizer's state once more.

    Raises:
        ValueError: a value that its setting doesn't take, several microbatches with ``"naive"``, ``chunks`` with
            another schedule than ``"interleaved"``, ``activation_memory`` with another than ``"zbv"``, or
            ``post_validation`` with another than ``"zbv"``, a limit, or fully sharded replicas.
    """

    schedule: Literal["naive", "gpipe", "1f1b", "interleaved", "zbv", "vhalf", "vmin"] | Generator = "1f1b"
    chunks: Count | Auto = "auto"
    activation_memory: Annotated[float, Range(0, 1)] | Bytes = 1.0
    post_validation: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule == "naive" and self.microbatches not in ("auto", 1):
            raise ValueError(f"microbatches={self.microbatches!r}: the naive schedule has one; use '1f1b' for more.")
        if self.chunks != "auto" and self.schedule != "interleaved":
            raise ValueError(
                f"chunks={self.chunks}: only schedule='interleaved' takes their number, of layers in a stage. Leave it "
                f"out, or take that. The parts of a batch are `microbatches`."
            )
        if self.activation_memory != 1 and self.schedule != "zbv":
            raise ValueError(
                f"activation_memory={self.activation_memory}: only schedule='zbv' takes a limit. Take that, or leave "
                f"it out."
            )

        if self.post_validation and (self.schedule != "zbv" or self.activation_memory != 1):
            raise ValueError(
                f"post_validation=True with schedule={self.schedule!r}, activation_memory={self.activation_memory!r}: "
                f"only schedule='zbv' without a limit has stages that go on to the next batch without waiting for each "
                f"other. Take that, or leave post_validation out."
            )
        if self.post_validation and self.data_parallel_kind == "fully_shard":
            raise ValueError(
                "post_validation=True with data_parallel_kind='fully_shard': an update of sharded parameters can't be "
                "undone. Leave one of the two out."
            )

    @property
    def generator(self) -> tuple[str, Generator]:
        """What makes the schedule's lists, after its name in messages and titles."""
        if callable(self.schedule):
            return getattr(self.schedule, "__name__", "schedule"), self.schedule
        if self.schedule == "interleaved":
            chunks = 2 if self.chunks == "auto" else self.chunks
            return f"interleaved, {chunks} chunks a stage", partial(interleaved, chunks=chunks)
        if not isinstance(self.activation_memory, str) and self.activation_memory != 1:
            limit = f"zbv, {self.activation_memory:g} of its activations"
            return limit, partial(zbv, activation_memory=self.activation_memory)
        return self.schedule, SCHEDULES[self.schedule]


class PipelineStrategy(StagedStrategy):
    """Splits the layers over devices and streams microbatches through them. Gradients are those of the whole batch.

    ::

        trainer = L.Trainer(devices=4, strategy=PipelineStrategy(microbatches=16))
        trainer.fit(AnyLightningModule(), datamodule)
    """

    options: PipelineOptions

    @takes(PipelineOptions)
    def __init__(self, options: PipelineOptions) -> None:
        super().__init__(options)
        self._schedule_name, self._generator = options.generator
        # By the number of microbatches: all batches but an epoch's last have the same.
        self._schedules: dict[int, Schedule] = {}
        self._knows_bytes = True  # does the partition tell what training holds?
        self._gradients: Gradients = {}  # from training_step to backward
        self._sums: list[Callable[[Gradients], Gradients]] = []  # of gradients, over tensor ranks and over stages
        self._keeps_erased = False  # may the user's code read an update's gradients before they are erased?
        self._runs_ahead = False  # do stages not wait for each other between batches?
        self._post_validation: PostValidation | None = None  # of updates, by the next batch
        self._is_cold = False  # has the device's first batch yet to run?
        self._alone_in: dict[int, list[str]] = {}  # by chunk, the parameters that no other chunk here uses

    # -- set-up --------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self.is_one_process = self.layout.world_size == 1 and self.options.keeps_steps_whole(1)
        if callable(self.options.schedule):
            # An epoch's last batch may have fewer microbatches: a bad schedule is refused now.
            places = {placement(self._schedule_for(count)) for count in range(self._usual_microbatches(), 0, -1)}
            if len(places) > 1:
                raise ValueError(
                    f"schedule={self._schedule_name}: with other numbers of microbatches its chunks are on other "
                    f"stages, {sorted(places)}. Place them by the number of stages alone."
                )
        self._runs_ahead, self._post_validation = False, None  # of the run before
        super().setup(trainer)
        if self.run.trains and not self._knows_bytes:
            raise ValueError(
                f"activation_memory={self.options.activation_memory!r}: this module was cut for an evaluation, which "
                f"doesn't tell what training holds. Train before you evaluate, or give a part such as 0.75."
            )
        self._alone_in = {chunk: self.stage.used_only_in(chunk) for chunk in self.stage.chunks}
        self._sums = [self._shards.completed] if self.layout.size("tensor") > 1 else []
        self._sums += [self._stages.summed_shared] if self._stages.shared else []
        self._runs_ahead = self.run.trains and self._decide_to_run_ahead()
        if self._runs_ahead and self.options.post_validation:
            units = self.stage.partition.units.items()
            self._post_validation = PostValidation(
                self.run,
                self.local_model,
                layers=[self.run.module.get_submodule(n) for n, of in units if self.stage.chunks[0] in of],
                clipping=self.clipping,
                drain=self.drain,
                # A parameter that steps change would have to be put back, too.
                has_to_wait=lambda: bool(self.at_work.microbatches.changes.known),
            )
            self._at_end.callback(self._post_validation.end)
        self._is_cold = self.run.device.type != "cpu"

    @property
    @override
    def placement(self) -> Placement:
        return (0,) if self.is_one_process else placement(self._schedule_for(self._usual_microbatches()))

    @override
    def check_partition(self, partition: Partition) -> None:
        memory = self.options.activation_memory
        if not isinstance(memory, str) or self.layout.stages == 1:
            return
        self._knows_bytes = self.run.trains
        if not self._knows_bytes:  # an evaluation's batches aren't split
            return

        def fullest(lists: Schedule) -> int:
            return max(self._held(actions, partition) for actions in lists)

        limit = bytes_of(memory)
        self._schedule_name = f"zbv, {memory} of activations"
        self._generator = partial(zbv_in_bytes, limit=limit, nbytes=fullest)
        self._schedules.clear()
        least = fullest(self._schedule_for(self._usual_microbatches()))
        if least > limit:
            raise ValueError(
                f"activation_memory={memory!r}: the smallest schedule, V-Min, needs {binary_size(least)} on a "
                f"stage. Give more, or take more microbatches of fewer samples, or activation_checkpointing=True."
            )

    @override
    def counts(self, name: str) -> bool:
        return super().counts(name) and self._stages.counts(name)

    @override
    def gradient_factor(self) -> Number:
        return self.at_work.microbatches.loss.factor

    def _schedule_for(self, microbatches: int) -> Schedule:
        """The schedule's lists."""
        if microbatches not in self._schedules:
            self._schedules[microbatches] = of_one_update(self._generator, self.layout.stages, microbatches)
        return self._schedules[microbatches]

    def _decide_to_run_ahead(self) -> bool:
        """Decide whether stages go on to the next batch without waiting for each other. If not, the banner gives the
        reason."""
        microbatches = self._usual_microbatches()
        gain = gained(self._schedule_for(microbatches))
        if not gain:
            if self.options.post_validation:
                rank_zero_warn(
                    f"post_validation=True has no effect: with stages={self.layout.stages} and "
                    f"microbatches={microbatches} no stage would begin the next batch early. Take more of them, or "
                    f"leave it out."
                )
            return False
        module = self.run.module
        trained = {name for name, p in module.named_parameters() if p.requires_grad}
        shared = [name for name in self.stage.partition.shared() if name in trained]
        validates = self.options.post_validation
        reasons = list(reasons_to_wait(self.run.trainer, module, self.precision_plugin, shared, validates=validates))
        if validates:
            refuse_post_validation(self.run.trainer, module, reasons)
        if reasons:
            more = f" and {len(reasons) - 1} more" if len(reasons) > 1 else ""
            rank_zero_info(
                f"{self._schedule_name}: stages wait for each other at the end of each batch, which costs {gain:.0%} "
                f"of their time by theory, because of {reasons[0]}{more}."
            )
        else:
            rank_zero_info(f"{self._schedule_name}: each stage goes on to the next batch when its own update is done.")
        return not reasons

    @property
    @override
    def batches_ahead(self) -> int:
        return int(self._runs_ahead)

    def _usual_microbatches(self) -> int:
        """The number of microbatches of a batch that is large enough for them."""
        if self.options.microbatches != "auto":
            return self.options.microbatches
        return 1 if self._schedule_name == "naive" or self.layout.stages == 1 else 4 * self.layout.stages

    @override
    def automatic_microbatches(self, batch_size: int) -> int:
        return min(batch_size, self._usual_microbatches())

    @override
    def activation_bytes(self) -> int:
        actions = self._schedule_for(self._usual_microbatches())[self.layout.stage]
        return self._held(actions, self.stage.partition)

    def _held(self, actions: list[Action], parts: Partition) -> int:
        return most_held(actions, parts.held, None if self.is_fully_sharded else parts.computed)

    @override
    def ask_hooks(self) -> None:
        super().ask_hooks()
        self._keeps_erased = erased_are_read(self.run.trainer, self.run.module)

    # -- a batch -------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_one_process:
            return super().training_step(*args, **kwargs)
        microbatches = self.at_work.microbatches
        parameters, trainer = self.local_model.parameters, self.run.trainer
        work = microbatches.begin_batch((*args, *kwargs.values()))
        actions = self._schedule_for(microbatches.count)[self.run.layout.stage]
        if self._is_cold:
            # While kernels are loaded and tuned, a host may wait for its whole device, and so for all that it has sent:
            # one message is under way at a time.
            self._is_cold, actions = False, one_at_a_time(actions)
        earlier = swap_gradients(parameters, {})
        if not self._keeps_erased and trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0:
            earlier = {}  # they are about to be erased
        if self._stages.fully_sharded is not None:
            self._stages.fully_sharded.begin_update()
        run = partial(self.at_work.engine.run, actions, more_follow=self._runs_ahead)
        with microbatches.recorded():
            if self._post_validation is None:
                outputs = run(work)
            else:
                outputs = self._post_validation.run(run, work, self.at_work.engine.drop_batch, earlier)
        if self._stages.fully_sharded is not None:
            self._stages.fully_sharded.end_update()
        gradients = self.replicas.averaged(swap_gradients(parameters, earlier))
        for summed in self._sums:
            gradients = summed(gradients)
        self._gradients = gradients
        return microbatches.joined(outputs)

    @override
    @contextmanager
    def completing(self, chunk: int, edges: Sequence[GradientEdge]) -> Iterator[None]:
        """Gradients are averaged while a chunk's last backward in a batch runs."""
        layers, completed = self._stages.fully_sharded, self._alone_in[chunk]
        if layers is not None:
            parts = self.stage.partition
            names = [parts.layers[i] for i in parts.layers_of(chunk)]
            if not layers.expect_last_backward(names, edges, self.stage.named_parameters()):
                completed = []
        with self.replicas.completing(completed):
            yield

    @override
    def make_gradients(self, backward: Callable[[], None]) -> None:
        """Add the gradients that the schedule has made to the parameters'."""
        if self.is_one_process:
            return backward()
        add_gradients(self.local_model.parameters, self._gradients)  # to those of accumulated batches
        self._gradients = {}

    # -- where stages meet again -----------------------------------------------------------------------------------

    @override
    def drain(self) -> None:
        """Tell the stages that expect one more batch that it won't come. Every rank calls it after the same
        batch."""
        if self._runs_ahead and self._at_work is not None:
            with torch.inference_mode(False):  # validation, where this is called too, runs in it
                self._at_work.engine.end_stream()
                if self._post_validation is not None:
                    self._post_validation.settle()

    # -- the end -------------------------------------------------------------------------------------------------

    @override
    def theoretical_bubble(self) -> float:
        """The fraction of time that the schedule leaves stages idle, with the microbatches of the last batch."""
        schedule = self._schedule_for(self.at_work.microbatches.count)
        return 1 - busy_across_batches(schedule) if self._runs_ahead else simulate(schedule).bubble

    @override
    def timeline_title(self) -> str:
        return f"{self._schedule_name}, {self.layout.stages} stages, {self.at_work.microbatches.count} microbatches"
