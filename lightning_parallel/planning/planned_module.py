"""The module to be planned, as one rank of a tensor group has it: its step, where it is cut, what its layers take."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.optim import Optimizer

from lightning_parallel.batch import batch_size, cloned, samples_of, split
from lightning_parallel.costs.devices import Device, as_one_of
from lightning_parallel.costs.loading import Loaded
from lightning_parallel.costs.profile import Profile
from lightning_parallel.costs.updates import Updates
from lightning_parallel.disk_offload import DiskOffload
from lightning_parallel.loading.first_batch import as_in
from lightning_parallel.planning.cutting import Cuts
from lightning_parallel.planning.memory import Tensors
from lightning_parallel.private.group_on_paper import GroupOnPaper
from lightning_parallel.private.torch.tensors import tree_leaves
from lightning_parallel.results.logs import discard, logging_through
from lightning_parallel.set_up.part_of_model import configure_part
from lightning_parallel.tensor_plans.plan import find_plan
from lightning_parallel.tensor_plans.sharding import shard_module
from lightning_parallel.values import first_few

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


class PlannedModule:
    """A copy of the module that ``ready`` has made, of which one rank of a tensor group has its part.

    Args:
        loaded: the batch of all replicas together.
        tensor: the ranks of the tensor group.

    Attributes:
        loaded, device: as given.
        devices: of a layout, which share the cores of this machine if it is planned for.
        samples: of the batch; 1 if it can't be split.
        nbytes: of the batch.
        tensors: its parameters and buffers.
        updates: what the optimizer keeps and takes.
        profile: what its layers take.
        cuts: where layouts cut it.

    Raises:
        ValueError: it can't be divided over tensor ranks.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        trainer: pl.Trainer,
        loaded: Loaded,
        device: Device,
        tried_on: torch.device,
        *,
        tensor: int,
        devices: int,
    ) -> None:
        self.module, self._trainer = module, trainer
        self.loaded, self.device, self.devices = loaded, device, devices
        batch = trainer.precision_plugin.convert_input(loaded.batch)
        batch = module.on_before_batch_transfer(batch, 0)
        batch = module.transfer_batch_to_device(batch, module.device, 0)
        self._batch = module.on_after_batch_transfer(batch, 0)
        samples = samples_of(self._batch)
        self._divisible, self.samples = bool(samples), samples or 1
        self.nbytes = sum(x.nbytes for x in tree_leaves(self._batch) if isinstance(x, Tensor))
        group = self._divided(tensor) if tensor > 1 else GroupOnPaper(1)
        self.tensors = Tensors(module)
        share = max(1, self.samples * tensor // devices)  # of the smallest replica
        sizes = max(1, share // 4), max(share, min(self.samples, 2))
        context = trainer.precision_plugin.forward_context
        sharing = devices if device.measured else 1  # ranks, one of which this process is while it tries something
        self.profile = Profile(module, self._step_of, sizes, device, tried_on, context, sharing, group)
        with as_one_of(sharing, tried_on):
            self.updates = Updates(module, self._optimizers(), device, tried_on)
        step, _ = self._step_of(2)  # some layers, such as BatchNorm, refuse one sample
        self.cuts = Cuts(module, trainer, step, divisible=self._divisible)

    def _divided(self, tensor: int) -> GroupOnPaper:
        """Make layers the first rank's shards of them, as the strategies do."""
        group = GroupOnPaper(tensor)
        manual = not self.module.automatic_optimization  # then the strategies can't run a step ahead either
        rules = find_plan(self.module, None, tensor, make_run=None if manual else lambda: self._step_of(_FEW)[0])
        shard_module(self.module, rules, group)
        configure_part(self.module)
        return group

    # -- the step, and the optimizer ---------------------------------------------------------------------------------

    def _step_of(self, samples: int) -> tuple[Callable[[], Any], int]:
        """The step on a microbatch of about so many samples, and their number."""
        takes_index = is_param_in_hook_signature(self.module.training_step, "batch_idx", min_args=2)
        indices = [0] if takes_index else []
        part, size = self._batch, 1
        if self._divisible:
            part = split(part, max(1, self.samples // samples))[0]
            size = batch_size(part)
        return lambda: self.module.training_step(cloned(part), *indices), size

    def _optimizers(self) -> list[Optimizer] | None:
        """The module's optimizers; None if they can't be made ahead."""
        strategy = self._trainer.strategy
        strategy.optimizers = []  # what stands in for them while the step is traced
        with suppress(Exception):  # any: of the user's method, which may need a run
            strategy.setup_optimizers(self._trainer)
            return strategy.optimizers
        return None

    def tokens(self) -> int | None:
        """The tokens of a sample, where the batch has integers in two dimensions."""
        leaves = [x for x in tree_leaves(self._batch) if isinstance(x, Tensor)]
        return next((x.shape[1] for x in leaves if x.dim() == 2 and not x.dtype.is_floating_point), None)

    def notes(self) -> Iterator[str]:
        """What the numbers of this module rest on."""
        if self.updates.problem:
            yield f"The optimizer's state is assumed to be two tensors for each parameter: {self.updates.problem}."
        if self.profile.untried:
            names = first_few(sorted(self.profile.untried))
            yield f"By their operations alone, since they fail on random inputs: {names}."
        if any(getattr(part, "track_running_stats", False) for part in self.module.modules()):
            yield "BatchNorm sees a microbatch, or a replica's share: not the numbers of one process, by nature."
        if is_overridden("configure_gradient_clipping", self.module):
            yield "configure_gradient_clipping makes stages wait for each other at each update."
