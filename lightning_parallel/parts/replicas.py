"""Replicas of the model along the data axis: equal at the start, with gradients averaged once an update.

Each replica gets its share of every batch (samplers see to that), and its gradients are those of its own share until
the backward that completes an update. Then they are averaged, bucket by bucket, while that backward goes on
(:mod:`lightning_parallel.gradients.averaging`). Batches that only accumulate gradients send nothing::

    batch 0 (accumulates)    forward  backward
    batch 1 (ends update)    forward  backward + average   step
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_parallel.collectives import broadcast_tensors
from lightning_parallel.gradients.averaging import GradientAverager
from lightning_parallel.gradients.swapping import Gradients
from lightning_parallel.local_model import LocalModel


class Replicas:
    """This rank's replica, beside the others.

    Args:
        local: what this rank holds of the model.
        group: the ranks that hold the same in their replicas.
    """

    def __init__(self, local: LocalModel, group: dist.ProcessGroup) -> None:
        self._local = local
        self._group = group
        self._first = dist.get_global_rank(group, 0)
        self._averager: GradientAverager | None = None
        self._hooks: list[RemovableHandle] = []

    @property
    def averages(self) -> bool:
        """Are gradients averaged?"""
        return self._averager is not None

    def copy_parameters(self) -> None:
        """Take over the first replica's parameters and buffers. So a script needs no seed for its initial weights."""
        broadcast_tensors(self._local.replicated.values(), self._first, self._group)
        self.copy_buffers()

    def copy_buffers(self) -> None:
        """Take over the first replica's buffers. What batches leave there (BatchNorm's statistics) differs between
        replicas, and wherever it is used or saved, the first one's counts."""
        broadcast_tensors(self._local.buffers().values(), self._first, self._group)

    # -- gradients -----------------------------------------------------------------------------------------------

    def begin(self, *, watch: bool) -> None:
        """Training begins.

        Args:
            watch: gradients grow on the parameters, and hooks tell of it. Otherwise :meth:`ready` is called.
        """
        if self._group.size() == 1:
            return
        self._averager = GradientAverager(self._local.replicated, self._group)
        if watch:
            self._hooks = [
                parameter.register_post_accumulate_grad_hook(partial(self._grown, name))
                for name, parameter in self._local.replicated.items()
                if parameter.requires_grad
            ]

    def _grown(self, name: str, parameter: nn.Parameter | Tensor) -> None:
        assert parameter.grad is not None
        self.ready(name, parameter.grad)

    def begin_last_backward(self) -> None:
        """The next backward completes an update's gradients: from here on they are averaged while it runs."""
        if self._averager is not None:
            self._averager.begin()

    @contextmanager
    def completing(self, names: Collection[str] | None = None) -> Iterator[None]:
        """Inside, a backward completes an update's gradients of these parameters, by default of all."""
        if self._averager is None:
            yield
            return
        with self._averager.completing(self._local.replicated.keys() if names is None else names):
            yield

    @property
    def in_last_backward(self) -> bool:
        """Is :meth:`ready` waited for?"""
        return self._averager is not None and self._averager.begun

    def ready(self, name: str, gradient: Tensor) -> None:
        """A parameter's gradient has grown. In an update's last backward it is complete then."""
        if self._averager is not None:
            self._averager.ready(name, gradient)

    def averaged(self, gradients: Mapping[str, Tensor | None]) -> Gradients:
        """The mean of an update's gradients over the replicas, all of which call it. Those of fully sharded parameters
        come as means already."""
        averages = {} if self._averager is None else self._averager.finish(gradients)
        return {**gradients, **averages}

    def end(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._averager = [], None
