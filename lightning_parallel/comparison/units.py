"""Notes what units get and return in a batch, and the gradients of both.

A unit is a module inside the LightningModule. In a pipeline it is one that stages run as a whole, or a module inside
such a one.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_parallel.absent.tensor import AbsentTensor
from lightning_parallel.comparison.evidence import copied
from lightning_parallel.interception import Interception, can_intercept
from lightning_parallel.private.torch.tensors import tensors_in
from lightning_parallel.ranks.collectives import gather_objects_on_first
from lightning_parallel.strategies.base import LayoutStrategy
from lightning_parallel.strategies.staged import StagedStrategy

INPUT, OUTPUT = "its input", "its output"
OF_INPUT, OF_OUTPUT = GRADIENTS = "the gradient of its input", "the gradient of its output"


class Place(NamedTuple):
    """A tensor among those that a call of a unit gets or returns: ``call`` is the call's number among the unit's,
    ``leaf`` that of the tensor."""

    what: str
    unit: str
    call: int
    leaf: int


@dataclass
class Notes:
    """What a rank has noted in a batch. Tensors are copies in the host's memory.

    Attributes:
        seen: by place, when it was, and the tensor.
        parts: the number of microbatches that have run here.
        replica: this rank's index among the replicas, and their number.
        piece: this rank's index among those that share a layer, and their number.
        fused: the sizes of fused parts of this rank's shards.
    """

    seen: dict[Place, tuple[float, Tensor]] = field(default_factory=dict)
    parts: int = 1
    replica: tuple[int, int] = (0, 1)
    piece: tuple[int, int] = (0, 1)
    fused: frozenset[tuple[int, ...]] = frozenset()

    def by_part(self) -> list[dict[Place, Tensor]]:
        """What was noted of each microbatch in the order of time, with calls counted from 0 again. Units that aren't
        called equally often in all of them are left out."""
        calls = Counter(place.unit for place in self.seen if (place.what, place.leaf) == (OUTPUT, 0))
        found: list[dict[Place, Tensor]] = [{} for _ in range(self.parts)]
        for place, (_, tensor) in sorted(self.seen.items(), key=lambda item: item[1][0]):
            if calls[place.unit] and calls[place.unit] % self.parts == 0:
                part, call = divmod(place.call, calls[place.unit] // self.parts)
                found[part][place._replace(call=call)] = tensor
        return found


class UnitWatch(Callback):
    """Notes what happens in an update.

    Args:
        batch: the number of its batch; None for none.
        shares: into how many batches of one process it is divided: one for each replica of a layout.

    Attributes:
        of_all_ranks: on the first rank, from the end of the run on.
    """

    def __init__(self, batch: int | None, shares: int = 1) -> None:
        self.of_all_ranks: list[Notes] = []
        self._batches = range(0) if batch is None else range(batch * shares, (batch + 1) * shares)
        self._notes, self._on = Notes(parts=0), Interception()
        self._clock = itertools.count()
        self._calls: Counter[str] = Counter()
        # By unit: when it was entered, its inputs, and their values then.
        self._entered: defaultdict[str, list[tuple[float, list[Tensor], list[Tensor]]]] = defaultdict(list)
        self._made: dict[int, tuple[Place, Tensor]] = {}  # outputs by their ids, which hold as long as they are kept
        self._gradients_of: set[Place] = set()  # that this batch has made

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx not in self._batches:
            return
        stage = trainer.strategy.stage if isinstance(trainer.strategy, StagedStrategy) else None
        for name, part in pl_module.named_modules():
            unit = name if stage is None else _unit_of(name, stage.partition.units)
            if name and unit and can_intercept(part):
                runs = (lambda: True) if stage is None else partial(stage.runs, unit)
                self._on.before(part, partial(self._enter, name))
                self._on.after(part, partial(self._leave, name, runs), first=True)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx not in self._batches:
            return
        self._on.remove()
        self._made.clear()
        strategy, notes = trainer.strategy, self._notes
        if isinstance(strategy, LayoutStrategy):
            layout = strategy.layout
            notes.replica, notes.piece = ((layout.index(axis), layout.size(axis)) for axis in ("data", "tensor"))
            notes.fused = frozenset(shard.parts for shard in strategy.local_model.shards.values())
        parts, factor = 1, 1.0
        if isinstance(strategy, StagedStrategy):
            microbatches = strategy.at_work.microbatches
            parts, factor = microbatches.count, float(microbatches.loss.factor)
        notes.parts += parts
        for place in self._gradients_of:
            when, gradient = notes.seen[place]
            notes.seen[place] = when, gradient * (factor / notes.replica[1])
        self._gradients_of.clear()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.of_all_ranks = gather_objects_on_first(self._notes, None) or []

    # -- hooks on units ------------------------------------------------------------------------------------------

    @torch.compiler.disable
    def _enter(self, name: str, part: nn.Module, args: Any, kwargs: Any) -> None:
        tensors = _comparable((args, kwargs))
        values = [] if _has_absent(tensors) else [*map(copied, tensors)]
        self._entered[name].append((next(self._clock), tensors, values))

    @torch.compiler.disable
    def _leave(self, name: str, runs: Callable[[], bool], part: nn.Module, args: Any, output: Any) -> None:
        when, inputs, values = self._entered[name].pop()
        outputs = _comparable(output)
        if not runs() or _has_absent((*inputs, *outputs)):
            return
        seen, call = self._notes.seen, self._calls[name]
        self._calls[name] += 1
        for leaf, (tensor, value) in enumerate(zip(inputs, values, strict=True)):
            seen[Place(INPUT, name, call, leaf)] = when, value
            if tensor.grad_fn is not None:
                made = self._made.get(id(tensor))
                place = Place(OF_INPUT, name, call, leaf)
                tensor.register_hook(partial(self._gradient, place, None if made is None else made[0]))
        for leaf, tensor in enumerate(outputs):
            seen[Place(OUTPUT, name, call, leaf)] = next(self._clock), copied(tensor)
            if tensor.grad_fn is not None and id(tensor) not in self._made:
                place = Place(OF_OUTPUT, name, call, leaf)
                self._made[id(tensor)] = place, tensor
                tensor.register_hook(partial(self._gradient, place, None))

    def _gradient(self, place: Place, output: Place | None, gradient: Tensor) -> None:
        seen = self._notes.seen
        if place in seen:
            return
        # Of one tensor, an output that other units read: for these it comes first.
        when = seen[output][0] - 0.5 if output in seen else next(self._clock)
        seen[place] = when, copied(gradient)
        self._gradients_of.add(place)


def _unit_of(name: str, units: Container[str]) -> str | None:
    """The unit that a module is, or is inside of."""
    words = name.split(".")
    return next((unit for n in range(len(words), 0, -1) if (unit := ".".join(words[:n])) in units), None)


def _comparable(value: Any) -> list[Tensor]:
    """The tensors of numbers in a nested structure."""
    return [each for each in tensors_in(value) if each.layout is torch.strided and each.dtype is not torch.bool]


def _has_absent(tensors: Iterable[Tensor]) -> bool:
    return any(isinstance(tensor, AbsentTensor) for tensor in tensors)
