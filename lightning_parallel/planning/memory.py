"""The bytes that the fullest rank of a layout holds.

Parameters, gradients and the optimizer's state are counted, activations are those that autograd has saved. NCCL's
buffers follow from a formula. Not known is what else lies outside of tensors: the process itself, CUDA's context, other
libraries' buffers, what an allocator doesn't give back. Of the moment's tensors in a forward or a backward, the largest
layer's are counted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields

from torch import Tensor, nn

from lightning_parallel.costs.chunk_costs import ChunkCost
from lightning_parallel.costs.devices import Channels
from lightning_parallel.costs.updates import Updates
from lightning_parallel.cuts.partition import Partition
from lightning_parallel.fully_sharded.units import untied
from lightning_parallel.planning.communicators import nccl_buffers
from lightning_parallel.planning.layouts import Choice
from lightning_parallel.planning.moments import held_and_fullest, message_buffers
from lightning_parallel.schedules.asynchronous import AsyncOneFOneB
from lightning_parallel.set_up.unit_shards import find_units


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank.

    Attributes:
        parameters, buffers: of its stage, or its parts of them.
        gradients: as they are when the optimizer steps.
        optimizer: its state.
        activations: what forwards hold for their backwards.
        gathered: layers that fully sharded replicas gather.
        messages: buffers of those between stages.
        copies: DDP's buckets, which stay from step to step; earlier versions of weights.
        working: what else is there at the fullest moment, such as gradients on their way to other replicas, which other
            strategies' buckets have; below 0 where gradients, or what forwards hold, aren't yet.
        communicators: buffers of NCCL's, which are no tensors.
    """

    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    gathered: int = 0
    messages: int = 0
    copies: int = 0
    working: int = 0
    communicators: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


class Tensors:
    """The parameters and buffers of a module, as plans of many layouts need them.

    Attributes:
        units: the bytes of what the strategy ``fully_sharded`` gathers at a time, in the module's order.
        trained_units: of these, the bytes of parameters that are trained.
    """

    def __init__(self, module: nn.Module) -> None:
        self.parameters = dict(module.named_parameters())
        self.buffers = dict(module.named_buffers())
        self._module = module
        self._divided: dict[tuple[str, ...], frozenset[str]] = {}  # by layers
        units = [[*unit.parameters()] for unit in find_units(module).values()]
        self.units = [_nbytes(unit) for unit in units]
        self.trained_units = [_nbytes(p for p in unit if p.requires_grad) for unit in units]

    def divided(self, parts: Partition) -> frozenset[str]:
        """The parameters of layers that fully sharded replicas of a pipeline divide."""
        if parts.layers not in self._divided:
            once = [name for name in parts.layers if parts.layers.count(name) == 1]
            self._divided[parts.layers] = frozenset(
                f"{layer}.{name}"
                for layer, unit in untied(self._module, once).items()
                for name, parameter in unit.named_parameters()
                if parameter.dim() > 0
            )
        return self._divided[parts.layers]

    def held(self, choice: Choice, parts: Partition) -> list[dict[str, float]]:
        """For each stage, by name the parameters that a rank of it holds, and which part of each."""
        divided: Collection[str] = self.parameters if choice.strategy == "fully_sharded" else ()
        if choice.sharded:
            divided = self.divided(parts)
        found: list[dict[str, float]] = [{} for _ in range(choice.stages)]
        for name, parameter in self.parameters.items():
            for stage in parts.owners[name]:
                found[stage][name] = _part(parameter, choice.data) if name in divided else 1.0
        return found


def on_each_stage(
    choice: Choice,
    tensors: Tensors,
    updates: Updates,
    parts: Partition,
    chunks: Sequence[ChunkCost],
    batches: int,
    channels: Channels,
) -> list[Memory]:
    """What a rank of each stage holds. A layout without stages has one.

    Args:
        batches: the bytes of the batch, and of the next one where that is in the same memory.
        channels: as a :class:`.Device` has them.
    """
    found = []
    whole = {name: parameter.nbytes for name, parameter in tensors.parameters.items()}
    for stage, held in enumerate(tensors.held(choice, parts)):
        sizes = {name: round(whole[name] * part) for name, part in held.items()}  # of what a rank has
        trained = [name for name in held if tensors.parameters[name].requires_grad]
        buffers = [b for n, b in tensors.buffers.items() if not choice.is_pipeline or stage in parts.holders_of(n)]
        gradients = sum(sizes[name] for name in trained)
        copies = gathered = undivided = last_undivided = 0
        averaged: Collection[str] = ()
        if choice.is_late:
            late = math.ceil(AsyncOneFOneB(choice.stages, stage).warmup / choice.microbatches)
            copies = (late + (late > 0)) * gradients  # versions, and what corrected forwards read
        if choice.strategy == "ddp":
            copies = gradients  # its buckets
        elif choice.strategy == "fully_sharded":
            # What lies in no unit is gathered throughout. The next unit is gathered while one runs.
            gathered = sum(whole[name] for name in held) - sum(tensors.units) + sum(sorted(tensors.units)[-2:])
            outside = sum(whole[name] for name in trained) - sum(tensors.trained_units)
            undivided = outside + max(tensors.trained_units, default=0)
            last_undivided = outside + sum(tensors.trained_units[:1])
        elif choice.sharded:
            divided = tensors.divided(parts)
            gathered = sum(whole[name] for name in held if name in divided)
            averaged = [name for name in trained if name not in divided]
        elif choice.data > 1:
            averaged = trained
        own = parts.chunks_of(stage)
        used_in = {name: [chunk for chunk in own if chunk in parts.uses[name]] or own for name in trained}
        # A chunk's gradients begin with the backward of the last one that uses them, and end with the first one's. An
        # update's microbatches add up whole gradients of layers that are gathered throughout.
        added_up = whole if choice.sharded else sizes
        by_chunk, in_messages = [0] * parts.chunks, [0] * parts.chunks
        for name in trained:
            by_chunk[used_in[name][-1]] += added_up[name]
        for name in averaged:
            in_messages[used_in[name][0]] += sizes[name]
        activations, moment = held_and_fullest(
            choice, stage, chunks, by_chunk, max((sizes[name] for name in trained), default=0),
            averaged=in_messages, undivided=undivided, last_undivided=last_undivided,
        )  # fmt: skip
        found.append(
            Memory(
                parameters=sum(sizes.values()),
                buffers=_nbytes(buffers),
                gradients=gradients,
                optimizer=sum(updates.nbytes(name, held[name]) for name in trained),
                activations=activations,
                gathered=gathered,
                messages=message_buffers(choice, stage, chunks),
                copies=copies,
                working=batches + moment - gradients - activations,
                communicators=nccl_buffers(choice, stage, parts, channels),
            )
        )
    return found


def _part(parameter: Tensor, ranks: int) -> float:
    """The part of a parameter that the first of some ranks has: rows are divided, and rounded up for it."""
    rows = parameter.shape[0] if parameter.dim() else 1
    return math.ceil(rows / ranks) / rows if rows else 1.0


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
