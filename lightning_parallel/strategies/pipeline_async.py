"""Asynchronous pipeline parallelism (PipeDream): no flush, so no bubble, at the price of stale gradients.

Each ``training_step`` feeds one batch's microbatches to the stage's endless list of actions, and runs the slice that
falls due: forwards of this batch, backwards and updates of batches that this stage saw some steps ago. No rank waits
for another but for the messages of the schedule: Lightning's own broadcast before every batch is taken out. The
pipeline is drained where weights or metrics have to be whole: before validation, at a checkpoint, at the end of an
epoch.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel.data.copies import make_equal
from lightning_parallel.layout import Size
from lightning_parallel.pipeline.balance import Balance
from lightning_parallel.pipeline.logs import LogRecorder
from lightning_parallel.pipeline.partition import Partition
from lightning_parallel.pipeline.schedule import AsyncOneFOneB
from lightning_parallel.pipeline.staleness import Correction, Stashing, is_second_order
from lightning_parallel.pipeline.weights import WeightVersions, swap_gradients
from lightning_parallel.strategies.late_gradients import LateGradients
from lightning_parallel.strategies.optimizer_options import Options, options_of, with_options
from lightning_parallel.strategies.pipeline_base import Microbatches, PipelineBase
from lightning_parallel.strategies.staged import DataParallelKind
from lightning_parallel.tensor.plan import Plan


@dataclass(frozen=True)
class _Owed:
    """An update whose batches have been fed.

    Attributes:
        options: of the optimizer, as they were when its last batch came.
        microbatches: that it is made of.
    """

    options: Options
    microbatches: int


class AsyncPipelineStrategy(PipelineBase):
    """Asynchronous 1F1B: every stage is busy all the time, and steps on its own.

    The stage s of p runs its forward of a microbatch (p - 1 - s) microbatches before its backward, and may step in
    between: its gradients are up to ceil((p - 1 - s) / microbatches) updates late. Update u uses the learning rate that
    schedulers have set for batch u, on every stage. Gradients are clipped by each stage's own norm, since a norm over
    stages would make them wait for each other.

    Args:
        stages: how many; ``"auto"``: one a process.
        microbatches: per batch. The more an update has, the less late are its gradients, at the same utilisation.
            ``"auto"``: such that an update has twice as many as there are stages (and as many again for each extra in
            flight), where the batch has the samples. 1 is PipeDream.
        weights: ``"stash"``: a backward uses the weights that its forward used; one copy of the stage's weights is kept
            for each update in flight. ``"2bw"``: every gradient, on every stage, is exactly one update late
            (PipeDream-2BW). ``"latest"``: a backward uses the current weights; no copies, a biased gradient.
        correction: what forwards read in place of the parameters, to meet the delay (:mod:`~.pipeline.staleness`).
            ``"error_feedback"``: extrapolated by the last update. ``"second_order"``: by the extrapolation before it
            too. A number: by so many times the last update. All hold one more copy of the stage's weights. None: the
            parameters themselves. Once drained (validation, checkpoints) the parameters are what counts.
        lr_discount: the first so many updates take smaller steps on stages whose gradients are more than one update
            late, up to the full learning rate at its end (PipeMare's T1); None: none do.
        extra_in_flight: microbatches in flight on each link beyond the fewest that keep all stages busy. 1 hides the
            latency of messages, and doubles staleness.
        layers, balance, activation_checkpointing, tensor_parallel, plan, sequence_parallel, data_parallel: as in
            :class:`~lightning_parallel.PipelineStrategy`. Replicas of a stage average the gradients of each update.
        timeline: as there; with the version of the weights that each forward used, and how late the gradients were.
        **kwargs: of :class:`~lightning_parallel.strategies.base.LayoutStrategy`.
    """

    def __init__(
        self,
        *,
        stages: Size = "auto",
        microbatches: Microbatches = "auto",
        weights: Stashing = "stash",
        correction: Correction = "second_order",
        lr_discount: int | None = None,
        extra_in_flight: int = 0,
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
        rules = LateGradients(weights, correction, lr_discount, extra_in_flight)
        if data_parallel_kind == "shard":
            raise ValueError(
                "data_parallel_kind='shard': an asynchronous pipeline keeps several versions of its weights, which "
                "shards that are gathered for a step don't have. Use 'replicate', or PipelineStrategy."
            )
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
        self._late = rules
        self._list: AsyncOneFOneB | None = None
        self._versions: WeightVersions | None = None
        self._fed = 0  # microbatches so far
        self._begun = 0  # updates whose last batch has been fed
        self._gathering = 0  # microbatches fed to the update after those
        self._before = 0  # microbatches of the last of those, the same on all stages
        self._owed: deque[_Owed] = deque()  # updates under way, oldest first
        self._stop = False  # has the user's step asked for the end of training?
        self._loose_owners: dict[str, int] | None = None  # the stage that trains each loose parameter; once known

    @property
    def versions(self) -> WeightVersions:
        assert self._versions is not None
        return self._versions

    # -- set-up --------------------------------------------------------------------------------------------------

    @override
    def check_partition(self, parts: Partition) -> None:
        tied = {name: stages for name, stages in parts.shared().items() if name not in parts.loose}
        for name, stages in tied.items():
            others = [other for other, first in parts.aliases.items() if first == name and other != name]
            raise ValueError(
                f"'{name}' is tied to {others} on stages {list(stages)}: asynchronous updates of different staleness "
                f"would drive the copies apart. Untie the weights (tie_word_embeddings=False in transformers), or use "
                f"PipelineStrategy."
            )

    @override
    def describe_stage(self, stage: int) -> str:
        return self._late.description(self.layout.pipeline, stage, self._microbatches_of_update())

    def _microbatches_of_update(self) -> int:
        """As far as it is known before the first batch."""
        if self._microbatches != "auto":
            return int(self._microbatches) * self._module().trainer.accumulate_grad_batches
        return self._late.wanted_microbatches(self.layout.pipeline)

    @override
    def wanted_microbatches(self, size: int) -> int:
        """Of ``"auto"``: equal ones, if that doesn't take more than twice as many as needed."""
        if self._microbatches != "auto":
            return int(self._microbatches)
        needed = math.ceil(self._microbatches_of_update() / self._module().trainer.accumulate_grad_batches)
        equal = (count for count in range(needed, 2 * needed + 1) if size % count == 0)
        return min(size, next(equal, needed))

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        plugin = self.precision_plugin
        if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
            raise ValueError(
                "precision='16-mixed': its loss scale follows overflows seen by all stages at one time, which an "
                "asynchronous pipeline doesn't have. Use 'bf16-mixed' or '32-true'."
            )
        super().setup(trainer)
        self._list = self._late.actions(self.layout.pipeline, self.layout.stage)
        self._fed = self._begun = self._gathering = self._before = 0
        self._stop = False
        self._owed.clear()
        self._loose_owners = None

    @override
    def make_weights(self) -> WeightVersions:
        grown = None if self._averager is None else self._gradient_grown
        corrected = self._late.weight(self.layout.pipeline, self.layout.stage, 1) > 0
        self._versions = WeightVersions(
            self._module(), self._parameters, self._late.weights, corrected=corrected, grown=grown
        )
        return self._versions

    @override
    def on_train_start(self) -> None:
        # Before every batch Lightning broadcasts from rank 0 whether it received SIGTERM, and waits for the answer: no
        # rank could start a batch before the last stage does. Each rank still acts on a SIGTERM of its own.
        loop = self._module().trainer.fit_loop.epoch_loop
        loop._broadcast_sigterm_tensor = _nothing  # type: ignore[method-assign]
        # A stage that lags steps its scheduler before its first update, and uses the options of the right one.
        warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler.step\(\)` before")

    @override
    def watch_gradients(self, ready: Callable[[str, Tensor], None]) -> list[torch.utils.hooks.RemovableHandle]:
        return []  # they grow on the leaves of versions, which come and go

    def _gradient_grown(self, name: str) -> None:
        assert self._averager is not None
        if self._averager.begun:
            self._averager.ready(name, self.versions.gradient(name))

    @override
    def before_last_backward(self) -> None:
        if self._averager is not None:
            self._averager.begin()

    @override
    def norm_group(self) -> dist.ProcessGroup:
        return self.groups.tensor  # of this stage alone: its update is not that of others

    # -- training ------------------------------------------------------------------------------------------------

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Called once a batch that ends an update; the stage's own updates happen inside the closure."""
        self._ends_update = True
        return closure()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._list is not None
        ends_update, self._ends_update = self._ends_update, False
        recorder = LogRecorder()
        scale = 1 / self._module().trainer.accumulate_grad_batches
        work, sizes = self.microbatches((*args, *kwargs.values()), recorder, scale, first=self._fed)
        self._feed(len(sizes), ends_update)
        with self.recorded(recorder), self._stop_held_back():
            actions = self._list.feed(len(sizes), ends_update=ends_update)
            outputs = self.engine.run(actions, work, update=self._update, endless=True)
        if not self.stage.is_last:
            return torch.zeros((), device=self.root_device)  # the loss is not waited for
        recorder.replay(self._module().log)
        return self.joined_output(outputs, sizes)

    def _feed(self, count: int, ends_update: bool) -> None:
        """Take note of a batch's microbatches, before they run."""
        if not self._fed:
            count_of_update = count * self._module().trainer.accumulate_grad_batches
            self._late.check(self.layout.pipeline, count_of_update)
        if self._late.weights == "2bw" and 0 < self._before < self._late.ahead(self.layout.pipeline, 0):
            self.drain()  # this batch would ask the first stage for a version that it hasn't made yet
        self.versions.begin(self._begun)
        self._fed += count
        self._gathering += count
        if ends_update:
            update = self._module().trainer.global_step
            factor = self._late.factor(self.layout.pipeline, self.layout.stage, self._gathering, update)
            self._owed.append(_Owed(options_of(self.optimizers[0], factor), self._gathering))
            self._begun += 1
            self._before, self._gathering = self._gathering, 0

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Hooks only: the schedule has run the backwards that were due."""
        module = self._module()
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        return self.precision_plugin.post_backward(closure_loss, module)

    @contextmanager
    def _stop_held_back(self) -> Iterator[None]:
        """``trainer.should_stop = True`` in the user's step, which the last stage runs batches after the first: it
        counts from where the stages next meet, since all have to stop at the same batch."""
        trainer = self._module().trainer
        before = trainer.should_stop
        yield
        if self.layout.pipeline > 1 and trainer.should_stop and not before:
            self._stop, trainer.should_stop = True, False

    def _update(self) -> None:
        """One update of this stage: the hooks, clipping and step that Lightning would run, with the options that were
        in force when its batch came."""
        module, optimizer, owed = self._module(), self.optimizers[0], self._owed.popleft()
        gradients = self.complete_gradients(self.versions.take_gradients())
        self._find_loose_owners(gradients)

        def step() -> None:
            swap_gradients(self._parameters, gradients)
            with with_options(optimizer, owed.options):
                self.precision_plugin.optimizer_step(optimizer, model=module, closure=_nothing)
            swap_gradients(self._parameters, {})

        weight = self._late.weight(self.layout.pipeline, self.layout.stage, owed.microbatches)
        self.versions.update(step, weight, is_second_order(self._late.correction, weight))

    def drain(self) -> None:
        """Run what is owed, until nothing is in flight on any stage. Every rank calls it after the same batch."""
        if self._list is None or self._engine is None or self._failed:
            return
        # Validation, where this is called too, runs in inference mode.
        with torch.inference_mode(False), torch.enable_grad():
            self.engine.run(self._list.drain(), {}, update=self._update, endless=True)
            self.engine.end_stream()
        self.versions.refresh()
        for name, stage in (self._loose_owners or {}).items():
            make_equal((self._parameters[name],), self.layout.rank_of(stage=stage), self.groups.pipeline)

    def _find_loose_owners(self, gradients: Mapping[str, Tensor | None]) -> None:
        """A parameter outside all layers lives on every stage; asynchronously, one only may train it. The first update
        shows which. The others' copies follow when the pipeline drains."""
        loose = sorted(self.stage.partition.loose)
        if self._loose_owners is not None or not loose or self.layout.pipeline == 1:
            return
        mine = torch.zeros(self.layout.pipeline, len(loose), dtype=torch.int, device=self.root_device)
        mine[self.layout.stage] = torch.tensor([gradients.get(name) is not None for name in loose])
        dist.all_reduce(mine, group=self.groups.pipeline)
        self._loose_owners = {}
        for name, trained in zip(loose, mine.T.tolist(), strict=True):
            stages = [stage for stage, yes in enumerate(trained) if yes]
            if len(stages) > 1:
                raise ValueError(
                    f"'{name}' gets gradients on stages {stages}: asynchronous updates of different staleness would "
                    f"drive its copies apart. Use it in one stage, or use PipelineStrategy."
                )
            if stages:
                self._loose_owners[name] = stages[0]

    # -- where the pipeline drains -------------------------------------------------------------------------------

    @override
    def on_validation_start(self) -> None:
        self.drain()
        super().on_validation_start()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.drain()  # the first call of a save, on all ranks
        return super().lightning_module_state_dict()

    @override
    def on_train_end(self) -> None:
        self.drain()
        super().on_train_end()

    @override
    def _publish(self, hook: str) -> None:
        if hook == "on_train_batch_end" and not self.read_after_this_batch():
            return
        if hook in ("on_train_batch_end", "on_train_epoch_end"):
            self.drain()
        self._module().trainer.should_stop |= self._stop
        self._stop = False
        super()._publish(hook)

    @override
    def _write_timeline(self) -> None:
        super()._write_timeline()
        gathered: list[Any] = [None] * self.layout.world_size
        dist.all_gather_object(gathered, (self.layout.stage, dict(self.versions.staleness)))
        for stage, counts in sorted(dict(gathered).items()):
            total = max(1, sum(counts.values()))
            shares = ", ".join(f"{late}: {100 * count / total:.0f} %" for late, count in sorted(counts.items()))
            mean = sum(late * count for late, count in counts.items()) / total
            rank_zero_info(f"stage {stage}: gradients {mean:.2f} updates late in the mean ({shares})")

    @override
    def theoretical_bubble(self) -> float:
        return 0.0

    @override
    def title(self) -> str:
        extra = self._late.extra_in_flight
        more = f", {extra} extra in flight" if extra else ""
        count = self._fed // max(1, self._begun)
        batches = f"{count} microbatch{'' if count == 1 else 'es'}"
        return f"asynchronous 1F1B, {self.layout.pipeline} stages, {batches} an update{more}"

    @override
    def teardown(self) -> None:
        trainer = self._module()._trainer
        if trainer is not None:
            trainer.fit_loop.epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)
        super().teardown()


def _nothing() -> None:
    """A closure without a step, a broadcast that isn't."""
