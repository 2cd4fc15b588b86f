"""What every strategy with a tensor axis shares: layers in shards, and gradients that know of it.

The module's layers are replaced by their shards before anything else is made of it (:meth:`ShardedStrategy.shard`).
From then on the ranks of a tensor group compute one model together, and have to see one batch and come to one loss.
That, and that parameters which the plan leaves whole get one gradient on all of them, is checked in the first step:
a plan with a hole in it would else train on, wrong and silent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel.data.copies import make_equal
from lightning_parallel.layout import Size
from lightning_parallel.pipeline.microbatch import tensors
from lightning_parallel.strategies.clipping import clip_by_norm, install
from lightning_parallel.strategies.metrics import named_loss_of_peers
from lightning_parallel.strategies.replicated import ReplicatedStrategy
from lightning_parallel.tensor.apply import Sharding, shard_module
from lightning_parallel.tensor.plan import Plan, find_plan
from lightning_parallel.tensor.random import ShardedRegion

_TOLERANCE = 1e-2  # of norms: rounding differs by far less, a forgotten sum by far more


class ShardedStrategy(ReplicatedStrategy):
    """A strategy whose ranks may hold shards of layers.

    Args:
        tensor_parallel, plan, sequence_parallel: see :class:`~lightning_parallel.TensorParallelStrategy`.
        **kwargs: of :class:`~lightning_parallel.strategies.replicated.ReplicatedStrategy`.
    """

    def __init__(self, *, tensor_parallel: Size, plan: Plan | None, sequence_parallel: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._tensor_parallel = tensor_parallel
        self._plan = dict(plan) if plan is not None else None
        self._sequence_parallel = sequence_parallel
        self._sharding = Sharding({}, ())
        self._region: ShardedRegion | None = None
        self._sharded: pl.LightningModule | None = None
        self._unchecked = True  # until the first step's gradients have been compared

    @override
    def axes(self) -> Mapping[str, Size]:
        return {"tensor": self._tensor_parallel, **super().axes()}

    # -- set-up --------------------------------------------------------------------------------------------------

    def shard(self, module: pl.LightningModule) -> None:
        """Replace the layers that the plan names by this rank's shards. Once for a module."""
        if self._sharded is module or self.layout.tensor == 1:
            return
        plan = find_plan(module, self._plan)
        self._region = ShardedRegion(self.layout.tensor_rank, self.root_device)
        self._sharding = shard_module(
            module, plan, self.groups.tensor, sequence_parallel=self._sequence_parallel, region=self._region
        )
        self._sharded = module

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self._unchecked = self.layout.tensor > 1
        super().setup(trainer)

    @override
    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        plugin = self.precision_plugin
        # The plugin's own see this rank's gradients only, and take no shards beside others.
        install(plugin, self.clip_gradients_by_norm)
        if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
            # An overflow on one rank must skip the step on all.
            state = plugin.scaler.state_dict()
            plugin.scaler = ShardedGradScaler(device=self.root_device.type, process_group=dist.group.WORLD)
            plugin.scaler.load_state_dict(state)

    @override
    def make_copies_equal(self) -> None:
        super().make_copies_equal()
        held = self.held()
        whole = [parameter for name, parameter in held.parameters.items() if name not in held.shards]
        make_equal((*whole, *held.buffers.values()), self.layout.rank_of(tensor=0), self.groups.tensor)

    @contextmanager
    def sharded_region(self) -> Iterator[None]:
        """Around a step: however it ends, the tensor ranks draw the same numbers again."""
        try:
            yield
        finally:
            if self._region is not None:
                self._region.leave()

    # -- one batch, one loss -------------------------------------------------------------------------------------

    def check_same_batch(self, batch: Any) -> None:
        """Do all ranks of a replica see the same first batch? A loader shuffled differently on each would train
        nonsense."""
        digest = hashlib.blake2b(digest_size=7)  # 56 bits: its negative fits into a signed word too
        for tensor in tensors(batch):
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        number = int.from_bytes(digest.digest(), "little")
        mine = torch.tensor([number, -number], device=self.root_device)
        with named_loss_of_peers():
            dist.all_reduce(mine, dist.ReduceOp.MAX, group=self.groups.model)
        highest, lowest = mine.tolist()
        if highest != -lowest:
            raise RuntimeError(
                "The ranks of one replica see different batches: their first ones differ. Every stage and every tensor "
                "rank must load the same samples in the same order: seed the sampler with `seed_everything(...)` or a "
                "generator of its own, or leave `use_distributed_sampler=True`."
            )

    def complete_gradients(self, gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """An update's gradients: averaged over the replicas; and summed, over the tensor group, where whole parameters
        have worked on pieces of the activations.

        Args:
            gradients: this rank's, by parameter name, with the same names on all ranks of the group.
        """
        if self._region is not None:
            self._region.close()
        complete = self.averaged_gradients(gradients)
        mine = [name for name in self._sharding.partial if complete.get(name) is not None]
        parts = [gradient for name in mine if (gradient := complete[name]) is not None]
        if parts:
            dtype = max((part.dtype for part in parts), key=lambda dtype: dtype.itemsize)
            flat = torch.cat([part.to(dtype).flatten() for part in parts])
            dist.all_reduce(flat, group=self.groups.tensor)
            summed = flat.split([part.numel() for part in parts])
            for name, part, total in zip(mine, parts, summed, strict=True):
                complete[name] = total.to(part.dtype).view_as(part)
        if self._unchecked:
            self._unchecked = False
            self._check_whole_gradients(complete)
        return complete

    def _check_whole_gradients(self, gradients: Mapping[str, Tensor | None]) -> None:
        whole = [name for name in gradients if name not in self._sharding.shards]
        if not whole:
            return
        mine = torch.stack([_fingerprint(gradients[name]) for name in whole]).to(self.root_device)  # [names, 2]
        first = mine.clone()
        dist.broadcast(first, self.layout.rank_of(tensor=0), self.groups.tensor)
        apart = (mine - first).abs().amax(1) > _TOLERANCE * torch.maximum(mine[:, 0], first[:, 0])
        votes = apart.to(torch.int32)
        dist.all_reduce(votes, dist.ReduceOp.MAX, group=self.groups.tensor)
        differing = [name for name, vote in zip(whole, votes.tolist(), strict=True) if vote]
        if differing:
            raise RuntimeError(
                f"'{differing[0]}' is whole on every tensor rank, but its gradient differs between them"
                + (f" (so do {len(differing) - 1} others, such as '{differing[1]}')" if len(differing) > 1 else "")
                + ". If it works on shards, give its module the style 'sum_gradient' in the plan. Else the ranks come "
                "to different losses: by random numbers of their own, or by gathered outputs that differ."
            )

    # -- the norm of all gradients -------------------------------------------------------------------------------

    def norm_group(self) -> dist.ProcessGroup:
        """The ranks whose gradients make one norm."""
        return self.groups.model

    def counts(self, name: str) -> bool:
        """Is this the rank whose copy of a parameter enters the norm?"""
        return name in self._sharding.shards or self.layout.tensor_rank == 0

    def clip_gradients_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """What ``gradient_clip_val`` with the algorithm "norm" does: shards make up one norm, copies count once."""
        held = self.held().parameters
        names = {id(parameter): name for name, parameter in held.items()}
        shared_out = any(isinstance(parameter, DTensor) for parameter in held.values())
        clip_by_norm(
            list(self.precision_plugin.main_params(optimizer)),
            clip_val,
            counts=lambda parameter: self.counts(names[id(parameter)]),
            replicas=self.groups.data if shared_out else None,
            parts=self.norm_group(),
            device=self.root_device,
        )


def _fingerprint(gradient: Tensor | None) -> Tensor:
    """Two numbers of the same size that differ where gradients do."""
    if gradient is None:
        return torch.zeros(2, dtype=torch.float64)
    values = gradient.detach().double().flatten()
    return torch.stack([values.norm(), values.sum() / max(1, values.numel()) ** 0.5])
