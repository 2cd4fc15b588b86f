"""What strategies with a tensor axis do besides running the divided layers.

The layers that the plan names become this rank's shards before optimizers are made. From then on the ranks of a tensor
group compute one model together: they must come to the same loss. In the first step and some later ones it is compared
between ranks, and so is what else the step leaves (:mod:`lightning_parallel.checks.first_steps`). In the first updates
the gradients of parameters that the plan leaves whole are compared. Otherwise an incomplete plan would train wrongly
without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_parallel.checks.first_steps import FirstSteps
from lightning_parallel.disk_offload import DiskOffload
from lightning_parallel.gradients.averaging import summed_over
from lightning_parallel.gradients.swapping import Gradients
from lightning_parallel.loading.first_batch import trial_of
from lightning_parallel.ranks.collectives import broadcast_object, broadcast_tensors, gather_objects, together
from lightning_parallel.ranks.local_model import LocalModel, local_part
from lightning_parallel.ranks.run import Run
from lightning_parallel.ranks.shard import Shard
from lightning_parallel.ranks.writes import Writes
from lightning_parallel.tensor.dropout import ShardedRegion
from lightning_parallel.tensor_plans.plan import find_plan
from lightning_parallel.tensor_plans.sharding import Sharding, shard_module
from lightning_parallel.tensor_plans.style import Plan

T = TypeVar("T")

_CHECKED = 5  # updates
_TOLERANCE = 1e-2  # of norms: rounding differs by far less, a forgotten sum by far more
_CHANGES_PARTS = (
    "training_step changes '{}' in place, which is divided over tensor ranks: each would do so by its own part alone, "
    "as in a norm of that part. Compute with another tensor inside the layer, or leave the layer out of the plan, so "
    "that it is whole."
)


class TensorShards:
    """This rank's shards of a module's layers. The first two arguments are settings of the strategy; the last one has
    the files in which the module's large tensors may lie."""

    # Set by `begin` in each run.
    _local: LocalModel
    _group: dist.ProcessGroup
    _steps: FirstSteps | None
    _writes: Writes | None
    _checks_left: int  # updates whose gradients will be compared
    _compared: set[str]  # whole parameters of which a gradient other than zero has been

    def __init__(self, plan: Plan | Literal["none"] | None, sequence_parallel: bool, disk_offload: DiskOffload) -> None:
        self._plan, self._sequence_parallel, self._disk_offload = plan, sequence_parallel, disk_offload
        self._divided: nn.Module | None = None
        self._sharding = Sharding({}, ())
        self._region: ShardedRegion | None = None

    def divide(self, run: Run) -> None:
        """Make the layers that the plan names this rank's shards, once for a module. All ranks of the world call it. If
        no plan is known, one is found by the first step.

        Raises:
            ValueError: there is no plan, or it doesn't fit.
        """
        module, group = run.module, run.groups.along("tensor")
        if self._divided is module or group.size() == 1:
            return
        world = dist.group.WORLD
        assert world is not None, "the ranks have met"
        with self._disk_offload:
            plan = together(
                world,
                lambda: find_plan(
                    module,
                    self._plan,
                    group.size(),
                    announce=rank_zero_info,
                    make_run=partial(trial_of, run),
                    agreed=lambda found: broadcast_object(found, 0, world),  # replicas try batches of their own
                ),
            )
            self._region = ShardedRegion(group.rank(), run.device)
            self._sharding = shard_module(
                module, plan, group, sequence_parallel=self._sequence_parallel, region=self._region
            )
        _refuse_whole_averages(module, self.shards)
        self._divided = module

    @property
    def shards(self) -> Mapping[str, Shard]:
        """How the divided parameters were cut, by name."""
        return self._sharding.shards

    def begin(self, run: Run, local: LocalModel) -> None:
        """Make parameters and buffers that are whole on every tensor rank equal, at the start of a run."""
        self._local, self._group = local, run.groups.along("tensor")
        group, automatic = self._group, run.module.automatic_optimization  # else steps run the optimizer themselves
        self._checks_left, self._compared = _CHECKED if group.size() > 1 else 0, set()
        self._steps = None if self._divided is None else FirstSteps(self._divided, list(self.shards), group)
        self._writes = Writes(_CHANGES_PARTS, group) if group.size() > 1 and automatic else None
        whole = [local_part(parameter) for name, parameter in local.parameters.items() if name not in self.shards]
        broadcast_tensors((*whole, *local.buffers().values()), dist.get_global_rank(group, 0), group)

    def run(self, kind: str, step: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Run a step of a kind (its name). Afterwards the tensor ranks draw the same random numbers again, even if the
        step raised.

        Raises:
            RuntimeError: on all ranks of the group, if they come to different losses.
        """
        if self._writes is not None and self._writes.is_on and kind == "training_step":
            self._writes.begin(dict(self._trained()))
        try:
            bound = partial(step, *args, **kwargs)
            return bound() if self._steps is None else self._steps.run(kind, bound)
        finally:
            if self._writes is not None:
                self._writes.end(self._trained())
            if self._region is not None:
                self._region.leave()

    def _trained(self) -> Iterator[tuple[str, Tensor]]:
        """The divided parameters that are trained, as they are now. A mean teacher's follow them element by element."""
        for name, parameter in self._local.parameters.items():
            if name in self.shards and parameter.requires_grad:
                yield name, local_part(parameter)

    def counts(self, name: str) -> bool:
        """Does this rank's copy of a parameter enter a norm over the tensor group?"""
        return name in self.shards or self._group.rank() == 0

    # -- gradients -----------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """End a step that ran backwards itself."""
        self._checks_left = max(0, self._checks_left - 1)
        if self._region is not None:
            self._region.close()

    def completed(self, gradients: Gradients, *, more_follow: bool = False) -> Gradients:
        """An update's gradients, where partial ones are summed over the tensor group. A collective.

        Args:
            gradients: this rank's gradients by name, with the same names on all ranks of the group.
            more_follow: other backwards of the step may follow, until :meth:`end_step` is called.

        Raises:
            RuntimeError: in the first updates, if ranks have different gradients of what they hold whole.
            ValueError: in the first updates, if the step has changed divided parameters itself.
        """
        if self._writes is not None:
            self._writes.check()
        if self._region is not None and not more_follow:
            self._region.close()
        partial = {name: self._local.parameters[name] for name in self._sharding.partial if name in gradients}
        if partial:
            gradients = {**gradients, **summed_over(self._group, partial, gradients)}
        if self._checks_left:
            self._checks_left -= not more_follow
            self._check_whole(gradients)
        return gradients

    def _check_whole(self, gradients: Gradients) -> None:
        whole = [name for name in gradients if name not in self.shards and name not in self._compared]
        if not whole:
            return
        ranks = gather_objects({name: _fingerprint(gradients[name]) for name in whole}, self._group)
        differing: list[str] = []
        for name in whole:
            values = torch.stack([each[name] for each in ranks])  # [ranks, 2]
            largest = float(values[:, 0].max())
            if largest:  # zero, as after a layer with zero-initialised weights, proves nothing: it is compared again
                self._compared.add(name)
            if float((values - values[0]).abs().max()) > _TOLERANCE * largest:
                differing.append(name)
        if differing:
            raise RuntimeError(
                f"'{differing[0]}' is whole on every tensor rank, but its gradient differs between them"
                + (f" (so do {len(differing) - 1} others, such as '{differing[1]}')" if len(differing) > 1 else "")
                + ". If it works on shards, put it into a module of its own, and give that the style 'sum_gradient' in "
                "the plan. Otherwise the ranks come to different losses: by random numbers of their own, or by "
                "gathered outputs that differ."
            )


def _refuse_whole_averages(module: nn.Module, shards: Mapping[str, Shard]) -> None:
    """Refuse torch's ``AveragedModel`` on the module that averages a layer which is divided now, and isn't itself."""
    for path, part in module.named_modules():
        for name, average in part.module.named_parameters() if isinstance(part, AveragedModel) else ():
            for divided, shard in shards.items():
                if f".{divided}".endswith(f".{name}") and average.shape == shard.shape:
                    raise ValueError(
                        f"'{path}' is an AveragedModel of whole layers, but tensor parallelism divides '{divided}'. "
                        f"Use Lightning's callback EMAWeightAveraging, or leave the layer out of the plan."
                    )


def _fingerprint(gradient: Tensor | None) -> Tensor:
    """Two numbers of similar size that differ where gradients do: the norm, and a scaled sum. On the CPU."""
    if gradient is None:
        return torch.zeros(2, dtype=torch.float64)
    values = local_part(gradient).double().flatten()
    return torch.stack([values.norm(), values.sum() / max(1, values.numel()) ** 0.5]).cpu()
