"""Sends parts of divided parameters to the ranks that own them, and back.

Which part of the whole a rank holds is described by boxes (:mod:`~lightning_parallel.checkpoint.slices`), so that one
way does for tensor shards, for fully sharded parameters, and for both at once. Several tensors travel in one message,
from each rank of the group to each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.checkpoint.slices import Slices, boxes_of
from lightning_parallel.ranks.collectives import buckets, gather_objects, guarded
from lightning_parallel.ranks.local_model import LocalModel, local_part

_MESSAGE = 2**27  # bytes of whole tensors that travel together

Place = tuple[slice, ...]  # of a box in the whole


class Division:
    """How the ranks of a ``group`` divide parameters between them, and which of them owns which. They make it together.

    Args:
        local: what this rank holds of the model.
        names: of the parameters, in one order on all ranks.
        device: where the ranks of the group meet.

    Attributes:
        here: by name, does this rank own it? The ranks own about as much each.
    """

    def __init__(self, local: LocalModel, names: Sequence[str], group: dist.ProcessGroup, device: torch.device) -> None:
        self._local, self.group, self._device = local, group, device
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]  # received, and sent
        self._rank, ranks = group.rank(), range(group.size())
        self._shapes = {n: local.shards[n].shape if n in local.shards else local.parameters[n].shape for n in names}
        self._owner: dict[str, int] = {}
        load = [0] * len(ranks)
        for name in sorted(names, key=lambda name: -torch.Size(self._shapes[name]).numel()):
            self._owner[name] = owner = min(ranks, key=load.__getitem__)
            load[owner] += torch.Size(self._shapes[name]).numel()
        self.here = {name: owner == self._rank for name, owner in self._owner.items()}
        own = {name: [_place(at, box) for at, box in self._boxes(name, local.parameters[name])] for name in names}
        self._places: list[dict[str, list[Place]]] = gather_objects(own, group)  # by rank
        # Of parameters that are whole along an axis several ranks have one box: the first of them sends it.
        self._sent = [
            {
                name: [not any(place in lower[name] for lower in self._places[:rank]) for place in each[name]]
                for name in names
            }
            for rank, each in enumerate(self._places)
        ]

    # -- messages ------------------------------------------------------------------------------------------------

    def _boxes(self, name: str, tensor: Tensor) -> list[tuple[Sequence[int], Tensor]]:
        """This rank's part of a parameter, or of something alike, as boxes of the whole."""
        shard = self._local.shards.get(name)
        return boxes_of(tensor if shard is None else Slices(tensor, shard))

    def gathered(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole tensors, by the parameters' names, on their owners. All ranks pass their parts."""
        wholes = {
            name: torch.empty(self._shapes[name], dtype=part.dtype, device=local_part(part).device)
            for name, part in parts.items()
            if self.here[name]
        }
        for bucket in self._buckets(parts):
            out: list[list[Tensor]] = [[] for _ in self._places]
            for name in bucket:
                boxes = zip(self._boxes(name, parts[name]), self._sent[self._rank][name], strict=True)
                out[self._owner[name]] += [box for (_, box), is_sent in boxes if is_sent]
            into = [
                [
                    wholes[name][place]
                    for name in bucket
                    if self.here[name]
                    for place, is_sent in zip(places[name], sent[name], strict=True)
                    if is_sent
                ]
                for places, sent in zip(self._places, self._sent, strict=True)
            ]
            self._exchange(out, into, parts[bucket[0]].dtype)
        return wholes

    @torch.no_grad()
    def fill(self, parts: Mapping[str, Tensor], wholes: Mapping[str, Tensor]) -> None:
        """Fill all ranks' parts from the owners' wholes, by the parameters' names. All ranks call it."""
        for bucket in self._buckets(parts):
            owned = [name for name in bucket if self.here[name]]
            out = [[wholes[n][place].detach() for n in owned for place in each[n]] for each in self._places]
            into: list[list[Tensor]] = [[] for _ in self._places]
            for name in bucket:
                into[self._owner[name]] += [box for _, box in self._boxes(name, parts[name])]
            self._exchange(out, into, parts[bucket[0]].dtype)

    def _buckets(self, parts: Mapping[str, Tensor]) -> Iterator[list[str]]:
        """The names in their order, in lists that make one message; each list is of one dtype."""

        def nbytes(name: str) -> int:
            return torch.Size(self._shapes[name]).numel() * parts[name].dtype.itemsize

        return buckets(parts, nbytes, lambda name: parts[name].dtype, _MESSAGE)

    def _exchange(self, out: list[list[Tensor]], into: list[list[Tensor]], dtype: torch.dtype) -> None:
        """Send boxes to each rank of the group, and fill those ``into`` which each sends. Its own it copies."""
        for box, values in zip(into[self._rank], out[self._rank], strict=True):
            box.copy_(values)
        out[self._rank], into[self._rank] = [], []
        counts = [[sum(box.numel() for box in boxes) for boxes in each] for each in (into, out)]
        received, message = (self._buffer(index, sum(each), dtype) for index, each in enumerate(counts))
        for box, values in _cut(message, out):
            values.copy_(box)
        guarded(dist.all_to_all_single, received, message, *counts, group=self.group)
        for box, values in _cut(received, into):
            box.copy_(values)

    def _buffer(self, index: int, size: int, dtype: torch.dtype) -> Tensor:
        """A piece of memory that is kept between updates: the system gives new memory to a process page by page, which
        takes longer than to copy what goes there."""
        nbytes = size * dtype.itemsize
        if self._buffers[index].numel() < nbytes:
            self._buffers[index] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._buffers[index][:nbytes].view(dtype)


def _cut(message: Tensor, boxes: Iterable[Iterable[Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each box, with its values in the message, as a view."""
    begin = 0
    for box in chain(*boxes):
        yield box, message[begin : begin + box.numel()].view(box.shape)
        begin += box.numel()


def _place(at: Sequence[int], box: Tensor) -> Place:
    return tuple(slice(start, start + size) for start, size in zip(at, box.shape, strict=True))
