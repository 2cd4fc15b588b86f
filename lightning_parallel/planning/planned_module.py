"""The module to be planned, as one rank of a tensor group has it: its step, where it is cut, what its layers take."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from lightning_parallel.batch import batch_size, cloned, split
from lightning_parallel.checks.late_gradients import refuse_hooks, refuse_ties
from lightning_parallel.checks.manual import SEVERAL_OPTIMIZERS, refuse_manual_optimization
from lightning_parallel.cuts.balance import balanced
from lightning_parallel.cuts.partition import Partition
from lightning_parallel.cuts.search import NOT_REPEATABLE, partition
from lightning_parallel.disk_offload import DiskOffload
from lightning_parallel.loading.first_batch import as_in
from lightning_parallel.planning.devices import Device, as_one_of
from lightning_parallel.planning.layouts import Choice
from lightning_parallel.planning.memory import Memory, State, Tensors
from lightning_parallel.planning.profile import Profile
from lightning_parallel.planning.updates import Updates
from lightning_parallel.private.group_on_paper import GroupOnPaper
from lightning_parallel.private.torch import tree_leaves
from lightning_parallel.results.logs import discard, logging_through
from lightning_parallel.set_up.part_of_model import configure_part
from lightning_parallel.set_up.stages import refuse_training
from lightning_parallel.steps.between_batches import gained, reasons_to_wait
from lightning_parallel.tensor.plan import find_plan
from lightning_parallel.tensor.sharding import shard_module
from lightning_parallel.tracing.dry_run import trace
from lightning_parallel.tracing.repeated import unrepeatable
from lightning_parallel.tracing.trace import Call, Trace
from lightning_parallel.values import first_few

_WORTH = 1.03  # the slowest chunk has to be so much slower, for cuts to be moved by time
_FEW = 4  # samples, by which a plan for tensor parallelism is found


@contextmanager
def ready(module: pl.LightningModule, trainer: pl.Trainer) -> Iterator[pl.LightningModule]:
    """A copy of a module, as the Trainer has it before the first step. Large tensors lie in files."""
    with DiskOffload():
        own = copy.deepcopy(module)
        own.trainer = trainer
        trainer.strategy.connect(own)
        trainer.state.fn = TrainerFn.FITTING
        own.setup("fit")
        own.configure_model()
        trainer.precision_plugin.convert_module(own)
    for part in own.modules():  # a step may compute with buffers outside of layers, which then need some values
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(part, name, torch.zeros_like(buffer, device="cpu"))
    own.train()
    with as_in(trainer, own), logging_through(own, discard):
        yield own


class _Traces:
    """The dry runs of one step, each made once: cuts of the same units are found by the same ones.

    Attributes:
        units: those of the last one.
    """

    def __init__(self) -> None:
        self.units: Mapping[int, str] = {}
        self._made: dict[Any, Trace] = {}

    def get(self, module: nn.Module, units: Mapping[int, str], step: Callable[[], Any], **options: Any) -> Trace:
        self.units = units
        options.pop("logged", None)  # nothing is kept of what a planned step logs
        options.pop("hooks", None)
        exits = options.pop("exits", ())
        key = frozenset(units.values()), tuple(map(repr, sorted(options.items())))
        if key not in self._made:
            self._made[key] = trace(module, units, step, exits=_Everything(), **options)
        seen = self._made[key]
        return replace(seen, stored_after={call for call in seen.stored_after if call is None or call in exits})


class _Everything(Container[Call]):
    def __contains__(self, call: object) -> bool:
        return True


class PlannedModule:
    """A copy of the module that ``ready`` has made, of which one rank of a tensor group has its part.

    Args:
        batch: of all replicas together.
        tensor: the ranks of the tensor group.
        devices: of a layout, which share the cores of this machine if it is planned for.

    Attributes:
        samples: of the batch; None if it can't be split.
        nbytes: of the batch.
        tensors: its parameters and buffers.
        state: what the optimizer keeps.
        profile: what its layers take.

    Raises:
        ValueError: it can't be divided over tensor ranks.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        trainer: pl.Trainer,
        batch: Any,
        device: Device,
        tried_on: torch.device,
        *,
        tensor: int,
        devices: int,
    ) -> None:
        self.module, self._trainer, self._device = module, trainer, device
        batch = trainer.precision_plugin.convert_input(batch)
        batch = module.on_before_batch_transfer(batch, 0)
        batch = module.transfer_batch_to_device(batch, module.device, 0)
        self._batch = module.on_after_batch_transfer(batch, 0)
        try:
            self.samples: int | None = batch_size(self._batch)
        except ValueError:
            self.samples = None
        self.nbytes = sum(x.nbytes for x in tree_leaves(self._batch) if isinstance(x, Tensor))
        group = None if tensor == 1 else self._divided(tensor)
        self.tensors = Tensors(module)
        self.state = self._optimizer_state()
        samples = self.samples or 1
        share = max(1, samples * tensor // devices)  # of the smallest replica
        sizes = max(1, share // 4), max(share, min(samples, 2))
        context = trainer.precision_plugin.forward_context
        self.profile = Profile(module, self._step_of, sizes, device, tried_on, context, devices, group)
        with as_one_of(devices if device.measured else 1, tried_on):
            self._updates = Updates(module, trainer.strategy.optimizers, device, tried_on)
        self._step, _ = self._step_of(1)
        self._traces = _Traces()
        self._cuts: dict[Any, Partition | ValueError] = {}
        self._changed: dict[tuple[str, ...], set[str]] = {}  # by layers: those that can't run again
        self._moved: dict[Any, tuple[int, ...] | None] = {}  # the numbers of layers, where cuts are moved

    def _divided(self, tensor: int) -> GroupOnPaper:
        """Make layers the first rank's shards of them, as the strategies do."""
        group = GroupOnPaper(tensor)
        manual = not self.module.automatic_optimization  # then the strategies can't run a step ahead either
        rules = find_plan(self.module, None, tensor, make_run=None if manual else lambda: self._step_of(_FEW)[0])
        shard_module(self.module, rules, group)
        configure_part(self.module)
        return group

    @property
    def layers(self) -> int:
        """The number of calls of layers, between which cuts may fall."""
        return len(self.cut(Choice("single")).layers)

    # -- where the module is cut -----------------------------------------------------------------------------------

    def refused_or_cut(self, choice: Choice) -> Partition:
        """Its parts under a layout.

        Raises:
            ValueError: the layout can't train it.
        """
        if choice.is_pipeline:
            refuse_manual_optimization(self.module)
            refuse_training(self.module)
            if len(self._trainer.strategy.optimizers) > 1:
                raise ValueError(SEVERAL_OPTIMIZERS)
            if self.samples is None and choice.microbatches > 1:
                raise ValueError("The batch can't be split into microbatches.")
        if choice.is_late:
            refuse_hooks(self._trainer, self.module)
        parts = self.cut(choice)
        if choice.is_late:
            refuse_ties(self.module, parts)
        return parts

    def cut(self, choice: Choice) -> Partition:
        """The module's parts in a layout, without the checks of its schedule.

        Raises:
            ValueError: it can't be cut so.
        """
        key = choice.placement, choice.balance, choice.is_late
        if key not in self._cuts:
            balance = "parameters" if choice.balance is None else choice.balance
            try:
                self._cuts[key] = partition(
                    self.module,
                    self._step,
                    choice.stages,
                    None,
                    balance,
                    placement=choice.placement,
                    keep_together=choice.is_late,
                    traced=self._traces.get,
                )
            except ValueError as error:
                self._cuts[key] = error
            except Exception as error:  # any: of the user's step
                self._cuts[key] = ValueError(f"The step can't be traced: {type(error).__name__}: {error}")
        found = self._cuts[key]
        if isinstance(found, ValueError):
            raise found
        if choice.recompute:
            self._refuse_rerun(found)
        return found

    def _refuse_rerun(self, parts: Partition) -> None:
        if parts.layers not in self._changed:
            again = partial(trace, self.module, self._traces.units, self._step)
            self._changed[parts.layers] = unrepeatable(self.module, parts.layers, again)
        if self._changed[parts.layers]:
            raise ValueError(NOT_REPEATABLE.format(min(self._changed[parts.layers])))

    def by_time(self, choice: Choice, parts: Partition, samples: int) -> Choice:
        """The layout with its cuts moved, if the slowest stage gets faster by it."""
        key = choice.placement, choice.is_late
        if key not in self._moved:
            seconds = self.profile.seconds(parts, samples)
            bounds = balanced([round(1e9 * each) for each in seconds], parts.chunks, [True] * len(seconds))
            moved = tuple(b - a for a, b in pairwise(bounds))
            self._moved[key] = None
            with suppress(ValueError):  # no cut may be there
                other = self.cut(replace(choice, balance=moved))
                slowest, faster = (max(self._of_stages(each, samples)) for each in (parts, other))
                self._moved[key] = moved if slowest > _WORTH * faster else None
        return replace(choice, balance=self._moved[key])

    def _of_stages(self, parts: Partition, samples: int) -> list[float]:
        """The seconds of each stage for a microbatch."""
        sums = [0.0] * parts.stages
        for stage, cost in zip(parts.placement, self.profile.chunks(parts, samples), strict=True):
            sums[stage] += cost.forward + cost.backward
        return sums

    def goes_on(self, choice: Choice, parts: Partition) -> bool:
        """Do stages begin the next batch without waiting for each other?"""
        if not gained(choice.schedule()):
            return False
        shared = [name for name in parts.shared() if self.tensors.parameters[name].requires_grad]
        plugin = self._trainer.precision_plugin
        return not any(True for _ in reasons_to_wait(self._trainer, self.module, plugin, shared))

    def update_times(self, choice: Choice, parts: Partition, memory: Sequence[Memory]) -> list[float]:
        """The seconds of the optimizer's step on each stage."""
        divided = choice.strategy == "fully_sharded"
        part = 1 / choice.data if divided else 1.0
        trained: list[dict[str, float]] = [{} for _ in memory]
        for name, parameter in self.tensors.parameters.items():
            for stage in parts.owners[name] if parameter.requires_grad else ():
                trained[stage][name] = part
        return [
            self._updates.seconds(own, each.parameters + each.gradients + each.optimizer, divided=divided)
            for own, each in zip(trained, memory, strict=True)
        ]

    # -- the step, and the optimizer ---------------------------------------------------------------------------------

    def _step_of(self, samples: int) -> tuple[Callable[[], Any], int]:
        """The step on a microbatch of about so many samples, and their number."""
        part = self._batch
        if self.samples is not None:
            part = split(part, max(1, self.samples // samples))[0]
        takes_index = is_param_in_hook_signature(self.module.training_step, "batch_idx", min_args=2)
        indices = [0] if takes_index else []
        return lambda: self.module.training_step(cloned(part), *indices), batch_size(part) if self.samples else 1

    def _optimizer_state(self) -> State:
        strategy = self._trainer.strategy
        strategy.optimizers = []  # what stands in for them while the step is traced
        try:
            strategy.setup_optimizers(self._trainer)
            return State(self.module, strategy.optimizers)
        except Exception:  # any: of the user's method, which may need a run
            strategy.optimizers = []
            return State(self.module, None)

    def tokens(self) -> int | None:
        """The tokens of a sample, where the batch has integers in two dimensions."""
        leaves = [x for x in tree_leaves(self._batch) if isinstance(x, Tensor)]
        return next((x.shape[1] for x in leaves if x.dim() == 2 and not x.dtype.is_floating_point), None)

    def notes(self) -> Iterator[str]:
        """What the numbers of this module rest on."""
        if self.state.problem:
            yield f"The optimizer's state is assumed to be two tensors for each parameter: {self.state.problem}."
        if self.profile.untried:
            names = first_few(sorted(self.profile.untried))
            yield f"By their operations alone, since they fail on random inputs: {names}."
        if any(getattr(part, "track_running_stats", False) for part in self.module.modules()):
            yield "BatchNorm sees a microbatch, or a replica's share: not the numbers of one process, by nature."
        if is_overridden("configure_gradient_clipping", self.module):
            yield "configure_gradient_clipping makes stages wait for each other at each update."
