"""Asynchronous training of one stage: its pending actions, its updates, and the drains of the pipeline.

Each batch that is fed brings new actions to the stage's endless list. Some fall due at once: forwards of this batch,
and backwards and updates of batches that this stage saw some steps ago. The rest is owed until later batches come, or
until the pipeline drains before a validation, at a checkpoint or at the end of an epoch::

    fed        batch 0      batch 1      batch 2      drain
    runs       F0 F1 F2     F3 B0 | F4   B1 | F5 B2 |  B3 | B4 | B5 |        | is an update

In a V each of the stage's two chunks has updates of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_parallel.cuts.partition import Partition
from lightning_parallel.gradients.swapping import Gradients, swap_gradients
from lightning_parallel.late.settings import LateGradients
from lightning_parallel.optimizers.options import Options, options_of, restored
from lightning_parallel.pipeline.engine import Engine
from lightning_parallel.pipeline.staleness import is_second_order
from lightning_parallel.pipeline.weights import WeightVersions
from lightning_parallel.ranks.collectives import broadcast_tensors, guarded, highest
from lightning_parallel.ranks.local_model import LocalModel
from lightning_parallel.ranks.run import Run
from lightning_parallel.schedules.actions import Action


class AsynchronousTraining:
    """One stage's updates.

    Args:
        partition: tells which parameters are loose.
        versions: by chunk, the versions of the weights that are in use.
        completed: given a chunk's gradients of an update, and the chunk, returns those of all replicas and shards.
    """

    def __init__(
        self,
        run: Run,
        late: LateGradients,
        *,
        local: LocalModel,
        partition: Partition,
        versions: Mapping[int, WeightVersions],
        completed: Callable[[Gradients, int], Gradients],
    ) -> None:
        self._run, self._late, self._layout = run, late, run.layout
        self._local, self.versions = local, versions
        self._completed = completed
        self._list = late.actions(run.layout.stages, run.layout.stage)
        # Fewer microbatches than these decide what falls due in a batch; in a V all do.
        self._enough = inf if late.in_v(run.layout.stages) else late.ahead(run.layout.stages, 0)
        self._replicas: dist.ProcessGroup | None = None  # this stage's, between hosts: no device waits
        if self._enough > 1 and run.layout.size("data") > 1:
            self._replicas = run.groups.on_host(run.layout.peers("data"))
        self._written: set[str] = set()  # options that the optimizer is known to write itself
        self._loose = _LooseParameters(sorted(partition.loose), local, run)
        # Updates whose batches have been fed, the oldest first: the optimizer's options as they were when the last of
        # these batches came, the number of microbatches, and what is called after the update; for each chunk.
        self._owed: dict[int, deque[tuple[Options, int, list[Callable[[], Any]]]]] = {c: deque() for c in versions}
        self.fed = 0  # microbatches so far
        self._batches = 0
        self._has_updated = False
        self.begun = 0  # updates whose last batch has been fed
        self._fed_to_next = 0  # microbatches fed to the next update
        self._last = 0  # microbatches of the last of those begun

    @property
    def _optimizer(self) -> Optimizer:
        """The Trainer's optimizer. A hook may replace it during training."""
        (optimizer,) = self._run.trainer.optimizers
        return optimizer

    # -- a batch -------------------------------------------------------------------------------------------------

    def feed(self, engine: Engine, count: int, ends_update: bool) -> Iterator[Action]:
        """Register a batch of ``count`` microbatches before it runs, and give the actions that fall due. If it
        ``ends_update``, an update follows it."""
        if self._replicas is not None:
            self._refuse_unequal(count, self._replicas)
        if not self.fed:
            self._late.check(self._layout.stages, count * self._run.trainer.accumulate_grad_batches)
        if self._late.weights == "2bw" and 0 < self._last < self._late.ahead(self._layout.stages, 0):
            self.drain(engine)  # this batch would ask the first stage for a version that it hasn't made yet
        for versions in self.versions.values():
            versions.begin(self.begun, self._batches)
        self._batches += 1
        self.fed += count
        self._fed_to_next += count
        if ends_update:
            for chunk, owed in self._owed.items():
                number, count_of_update = self._run.trainer.global_step, self._fed_to_next
                factor = self._late.rate_factor(self._layout.stages, chunk, count_of_update, number)
                owed.append((options_of(self._optimizer, factor), count_of_update, []))
            self.begun += 1
            self._last, self._fed_to_next = self._fed_to_next, 0
        return self._list.feed(count, ends_update=ends_update)

    def _refuse_unequal(self, count: int, replicas: dist.ProcessGroup) -> None:
        """Refuse a batch with another number of microbatches on another replica, where it decides what falls due, and
        in a V in which order the chunks make their updates: replicas would wait for each other's gradients for ever, or
        average those of different chunks. They meet at each update anyhow.

        Raises:
            ValueError: on all ranks.
        """
        most, least = highest(replicas, count, -count)
        if most == -least or -least >= self._enough:
            return
        # All stages find the same, each when it begins this batch. One that left before would seem to be lost.
        self._run.collectives.barrier()
        batch = self._run.trainer.fit_loop.batch_idx
        enough = "" if self._enough == inf else f", or at least {self._enough:g}"
        raise ValueError(
            f"data_parallel={self._layout.size('data')} with schedule={self._late.schedule!r}: replicas have from "
            f"{-least} to {most} microbatches of batch {batch}, but need equally many{enough}. Use batches of "
            f"equal sizes (drop_last=True in the DataLoader)."
        )

    @property
    def after_last(self) -> list[Callable[[], Any]] | None:
        """What this stage will call after the last update that it owes; None if it owes none."""
        owed = next(iter(self._owed.values()))  # the first chunk's, which are made last
        return owed[-1][2] if owed else None

    def update(self, chunk: int | None = None) -> None:
        """One update of a chunk, by default of the stage's only one: the hooks, the clipping and the step that
        Lightning would run, with the options that were in force when its batch came."""
        chunk = next(iter(self._owed)) if chunk is None else chunk
        versions = self.versions[chunk]
        optimizer, (options, microbatches, following) = self._optimizer, self._owed[chunk].popleft()
        gradients = self._completed({**versions.take_gradients()}, chunk)
        self._loose.note(gradients)

        def update() -> None:
            if not self._has_step(chunk):
                return
            self._refuse_unforeseen(swap_gradients(self._local.parameters, gradients))
            with restored(optimizer, options, self._written):
                step = self._run.precision.optimizer_step
                step(optimizer, model=self._run.module, closure=lambda: None)  # type: ignore[arg-type]
            swap_gradients(self._local.parameters, {})

        weight = self._late.correction_factor(self._layout.stages, chunk, microbatches)
        versions.update(update, weight, is_second_order(self._late.correction, weight))
        for call in following:
            call()

    def _has_step(self, chunk: int) -> bool:
        """Does the optimizer step for this chunk? Where one of a stage's two trains nothing of its own, it and
        its hooks are left to the other one."""
        first, *_ = self.versions
        trained = [each for each, versions in self.versions.items() if versions.trains]
        return chunk in (trained or [first])

    def _refuse_unforeseen(self, found: Gradients) -> None:
        """Refuse gradients that backwards have left on the parameters themselves: a chunk has read a parameter of the
        stage's other one, which it didn't in the first step."""
        name = next((name for name, gradient in found.items() if gradient is not None), None)
        if name is not None and self._has_updated:
            raise RuntimeError(
                f"The step reads '{name}' outside of its layer, as it didn't in the first step, in another of the "
                f"stage's two chunks, so its gradient would be lost. Read it in each step, with a weight: "
                f"loss + float(global_step >= 100) * term."
            )
        self._has_updated = True

    # -- where the stages meet -----------------------------------------------------------------------------------

    def drain(self, engine: Engine) -> None:
        """Run the actions that are left, until nothing is in flight on any stage. Every rank calls it after the same
        batch."""
        # Validation, where this is called too, runs in inference mode.
        with torch.inference_mode(False), torch.enable_grad():
            engine.run(self._list.drain(), {}, update=self.update, more_follow=True)
            engine.end_stream()
        for versions in self.versions.values():
            versions.refresh()
        self._loose.copy()


class _LooseParameters:
    """Parameters outside all layers, of which every stage has a copy. Only one stage may train each of them in an
    asynchronous pipeline. The other stages' copies are overwritten with its values when the pipeline drains.

    Which stage that is shows at each drain: a step may begin to use a parameter at any time. Before training, the
    strategy has refused those that the traced step reads on several stages.
    """

    def __init__(self, names: list[str], local: LocalModel, run: Run) -> None:
        self._names = names if run.layout.stages > 1 else []
        self._local, self._layout, self._device = local, run.layout, run.device
        self._group = run.groups.along("pipeline")
        self._trained: set[str] = set()  # those that got a gradient on this stage

    def note(self, gradients: Gradients) -> None:
        """Note which parameters an update's gradients train."""
        self._trained |= {name for name in self._names if gradients.get(name) is not None}

    def copy(self) -> None:
        """Copy each parameter from the stage that trains it, at a drain.

        Raises:
            ValueError: on all stages, if two of them train one.
        """
        if not self._names:
            return
        table = torch.zeros(self._layout.stages, len(self._names), dtype=torch.int, device=self._device)
        table[self._layout.stage] = torch.tensor([name in self._trained for name in self._names])
        guarded(dist.all_reduce, table, group=self._group)
        for name, trained in zip(self._names, table.T.tolist(), strict=True):
            stages = [stage for stage, yes in enumerate(trained) if yes]
            if len(stages) > 1:
                raise ValueError(
                    f"'{name}' gets gradients on stages {stages}: asynchronous updates of different staleness would "
                    f"drive its copies apart. Use it in one stage, or use PipelineStrategy."
                )
            for stage in stages:
                broadcast_tensors((self._local.parameters[name],), self._layout.rank_at(pipeline=stage), self._group)
