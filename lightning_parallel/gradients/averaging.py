"""Gradients averaged over replicas, or summed over ranks, in buckets (PyTorch DDP, Li et al. 2020, section 3.2).

Parameters are packed into buckets from the last to the first, which is about the order in which a backward completes
their gradients. A bucket whose gradients are all complete is summed over the replicas at once, in the background::

    backward     layer 3 | layer 2 | layer 1 | layer 0 |
    all-reduce             bucket 0 (3, 2)   | bucket 1 (1, 0) |
                                                        finish(): wait

Every replica sends the same buckets in the same order, whatever the order of its gradients, and whether or not its loss
depended on all parameters: each bucket carries the number of replicas that have each gradient. These flags are read
only on a replica that lacks a gradient, since the host waits for the GPU to read them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_parallel.gradients.swapping import Gradients
from lightning_parallel.ranks.collectives import buckets, guarded
from lightning_parallel.ranks.local_model import local_part

BUCKET_BYTES = 25 * 2**20  # at most, unless one gradient has more; as in DDP


@dataclass
class _Bucket:
    """Parameters whose gradients travel together; all of one dtype and device.

    Attributes:
        sizes: the number of elements of each parameter.
        ready: the gradients that are complete.
        missing: the parameters without a gradient here, once the message is sent.
        message: ``[one flag a parameter, gradient, gradient, ...]``; None before it is sent.
    """

    names: list[str]
    sizes: list[int]
    ready: dict[str, Tensor] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    message: Tensor | None = None
    work: dist.Work | None = None


class GradientAverager:
    """Averages the gradients of one batch at a time.

    ::

        with averager.completing(parameters):  # around the backward that completes their gradients
            loss.backward()  # hooks call averager.ready(name, gradient)
        averages = averager.finish(gradients)

    Args:
        parameters: this rank's parameters by name, in the model's order, which is the same on every replica.
        factor: gives the number by which this replica's gradients are multiplied before they are averaged. It is called
            when the first of them are complete. By default 1.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        group: dist.ProcessGroup,
        factor: Callable[[], float | Tensor] = lambda: 1.0,
    ) -> None:
        self._parameters = dict(parameters)
        self._group = group
        self._factor = factor
        self._buckets: list[_Bucket] = []
        self._of: dict[str, _Bucket] = {}
        self._grown: set[str] = set()
        self._completing: Collection[str] = ()  # what backwards complete now
        self._sent = 0  # the number of buckets on their way
        self.begun = False  # has an update's last backward begun?

    def _begin(self) -> None:
        self._sent, self._grown, self.begun = 0, set(), True
        trained = [(name, p) for name, p in reversed(self._parameters.items()) if p.requires_grad]
        alike = buckets(trained, lambda x: x[1].nbytes, lambda x: (x[1].dtype, x[1].device), BUCKET_BYTES)
        self._buckets = [_Bucket([name for name, _ in each], [p.numel() for _, p in each]) for each in alike]
        self._of = {name: bucket for bucket in self._buckets for name in bucket.names}

    @contextmanager
    def completing(self, names: Collection[str]) -> Iterator[None]:
        """Inside, backwards complete an update's gradients of these parameters: :meth:`ready` counts. Each part of a
        model may have a last backward of its own."""
        if not self.begun:
            self._begin()
        self._completing = names
        try:
            yield
        finally:
            self._completing = ()

    def ready(self, name: str, gradient: Tensor) -> None:
        """Take a parameter's gradient that has grown. Inside an update's last backward it is complete, and is averaged.
        It has to stay as it is until its message is sent. Between updates this does nothing.

        Raises:
            RuntimeError: it was complete already in this update, so what was added to it may not have been averaged.
        """
        if not self.begun:
            return
        if name in self._grown:
            raise RuntimeError(
                f"The gradient of '{name}' grew twice in one backward, but it is averaged over the replicas as soon as "
                f"it has grown. A checkpoint with use_reentrant=True around a layer that is used twice does this: set "
                f"use_reentrant=False."
            )
        if name not in self._completing:
            return
        self._grown.add(name)
        self._of[name].ready[name] = gradient
        while self._sent < len(self._buckets):
            bucket = self._buckets[self._sent]
            if len(bucket.ready) < len(bucket.names):
                return
            self._send(bucket)

    def finish(self, gradients: Mapping[str, Tensor | None]) -> Gradients:
        """Wait for each trainable parameter's gradient, averaged over all replicas. A missing one counts as zero; None
        is the average if no replica has one. ``gradients`` are this replica's, also those passed to :meth:`ready`."""
        if not self.begun:
            self._begin()
        self.begun = False
        for bucket in self._buckets[self._sent :]:
            present = ((name, gradients.get(name)) for name in bucket.names)
            bucket.ready = {name: gradient for name, gradient in present if gradient is not None}
            self._send(bucket)
        averages: Gradients = {}
        for bucket in self._buckets:
            assert bucket.work is not None and bucket.message is not None
            guarded(bucket.work.wait)
            flags, *flat = bucket.message.split([len(bucket.names), *bucket.sizes])
            elsewhere = dict(zip(bucket.names, flags.tolist(), strict=True)) if bucket.missing else {}
            for name, average in zip(bucket.names, flat, strict=True):
                exists = name not in bucket.missing or elsewhere[name]
                averages[name] = average.view(self._parameters[name].shape) if exists else None
        self._buckets, self._of = [], {}
        return averages

    def _send(self, bucket: _Bucket) -> None:
        like = self._parameters[bucket.names[0]]
        share = self._factor() / self._group.size()
        message = torch.empty(len(bucket.names) + sum(bucket.sizes), dtype=like.dtype, device=like.device)
        flags, *flat = message.split([len(bucket.names), *bucket.sizes])
        flags.copy_(torch.tensor([name in bucket.ready for name in bucket.names]), non_blocking=True)
        for name, place in zip(bucket.names, flat, strict=True):
            gradient = bucket.ready.get(name)
            if gradient is None:
                place.zero_()
            else:
                torch.mul(gradient.detach().reshape(-1), share, out=place)
        bucket.message = message
        bucket.work = guarded(dist.all_reduce, message, group=self._group, async_op=True)
        bucket.missing = set(bucket.names) - bucket.ready.keys()
        bucket.ready = {}
        self._sent += 1


def summed_over(
    group: dist.ProcessGroup,
    parameters: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor | None],
    host_group: dist.ProcessGroup | None = None,
) -> Gradients:
    """The sum of gradients over ranks that each hold a part of them. A collective over the group.

    A gradient that no rank has stays None, so an optimizer skips its parameter as in one process.

    Args:
        parameters: those whose gradients are summed, the same on all ranks. Of a fully sharded one, all ranks of the
            group hold the same part.
        gradients: this rank's gradients by name; a missing one counts as zero.
        host_group: the same ranks, for tensors in host memory. With it the ranks tell each other from host to host
            which gradients there are. Without, a rank that lacks one waits for the device to read it there.

    Raises:
        PeerLostError: a rank has stopped.
    """
    parts = {name: local_part(parameter).requires_grad_() for name, parameter in parameters.items()}
    own = {name: local_part(gradient) for name, gradient in gradients.items() if gradient is not None}
    if host_group is not None and host_group is not group:
        flags = torch.tensor([name in own for name in parts], dtype=torch.uint8)
        guarded(dist.all_reduce, flags, dist.ReduceOp.MAX, group=host_group)
        parts = {name: part for (name, part), exists in zip(parts.items(), flags.tolist(), strict=True) if exists}
        own = {name: own[name] if name in own else torch.zeros_like(part) for name, part in parts.items()}
    sums = GradientAverager(parts, group, factor=group.size).finish(own)
    totals = {name: sums.get(name) for name in parameters}
    return {name: None if total is None else _wrapped(parameters[name], total) for name, total in totals.items()}


def _wrapped(parameter: Tensor, local: Tensor) -> Tensor:
    """This rank's part of a gradient, as a DTensor if the parameter is one."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )
