"""The asynchronous pipeline without a pipeline: the same late gradients, in one process.

Asynchrony changes the numbers in one way only: which version of a chunk's weights a microbatch's forward uses. (A stage
has one chunk; in a V it has two.) The stage's list of actions determines the version; a correction may change its
values. So one process that keeps the last versions of all chunks' weights computes what p processes compute. It tells
what a choice costs in quality before anyone owns p devices. In float64 the two are equal to the bit where what crosses
the cuts is contiguous and read on one stage; otherwise sums differ in their order. This module takes the lists from the
schedule, and shares no code with the engine and the weight versions that do it in processes, for which it is the
reference::

    asynchronous = Delayed([dict(stage.named_parameters()) for stage in stages], weights="stash")
    optimizers = [torch.optim.AdamW(stage.parameters()) for stage in stages]
    for batch in batches:
        for part, reading in zip(split(batch, 16), asynchronous.feed(16)):
            loss = functional_call(model, reading.weights, part)
            asynchronous.backward(reading, loss, weight=1 / 16)
        asynchronous.update(lambda stage: optimizers[stage].step())
    asynchronous.drain()    # before a validation, a checkpoint, and at the end

A parameter that both chunks of a stage use is the first one's. Each use reads the newest version that the first chunk
has made by then, and the gradients of both uses for one update's microbatches go into the first chunk's update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_parallel.pipeline.staleness import Correction, Stashing, correction_weight, extrapolate, is_second_order
from lightning_parallel.schedules.actions import Action, Forward, Step
from lightning_parallel.schedules.named import Endless, endless, placement_of
from lightning_parallel.schedules.steady import mean_ahead


@dataclass(frozen=True)
class Reading:
    """What one microbatch reads.

    Attributes:
        stages: for each stage, or chunk, its parameters by name: leaves, in whose ``grad`` gradients accumulate.
            Microbatches that read one version of a chunk share them.
        versions: for each stage, or chunk, the number of updates that made what is read.
    """

    stages: tuple[Mapping[str, Tensor], ...]
    versions: tuple[int, ...]

    @property
    def weights(self) -> dict[str, Tensor]:
        """The leaves of all chunks together, as ``torch.func.functional_call`` takes them."""
        return {name: leaf for stage in self.stages for name, leaf in stage.items()}


@dataclass
class _Chunk:
    """A chunk's parameters, their versions by number of updates, and what it reads of the first chunk of its stage, by
    its own version and that one's."""

    parameters: Mapping[str, nn.Parameter]
    borrowed: Mapping[str, str]  # by the name under which it is read, that of the first chunk's
    steps: int = 0  # in the list so far
    versions: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    copies: dict[tuple[int, int], dict[str, Tensor]] = field(default_factory=dict)
    kept: dict[str, Tensor] = field(default_factory=dict)  # gradients of the update's earlier batches

    def take(self) -> dict[str, Tensor]:
        """The gradients of the update under way, batch by batch, and in a batch from version to version."""
        grown: dict[str, Tensor] = {}
        for _, leaves in [*sorted(self.versions.items()), *sorted(self.copies.items())]:
            for name, leaf in leaves.items():
                if leaf.grad is not None:
                    grown[name] = grown[name] + leaf.grad if name in grown else leaf.grad
                    leaf.grad = None
        kept, self.kept = self.kept, {}
        return {**grown, **{n: g + grown[n] if n in grown else g for n, g in kept.items()}}


class Delayed:
    """The late gradients of an asynchronous pipeline.

    Every chunk makes each of its updates when :meth:`update` is called, which is earlier than in the pipeline. The
    versions kept say what is read when, so nothing reads an update early.

    Args:
        chunks: each chunk's parameters, by name, in the order of a forward: with ``schedule="1f1b"`` each stage's.
            Names are unique over the chunks.
        weights: as in :class:`~lightning_parallel.AsyncPipelineStrategy`.
        correction: as there.
        extra_in_flight: as there.
        schedule: as there.
        tied: parameters that both chunks of a stage use, by the names under which the second one reads them: there the
            names under which they are among the first one's.

    Raises:
        ValueError: (by :meth:`feed`) ``weights="2bw"`` with fewer microbatches an update than a stage runs ahead.
    """

    def __init__(
        self,
        chunks: Sequence[Mapping[str, nn.Parameter]],
        *,
        weights: Stashing = "stash",
        correction: Correction = "second_order",
        extra_in_flight: int = 0,
        schedule: Endless = "1f1b",
        tied: Mapping[str, str] | None = None,
    ) -> None:
        self._schedule, self._extra = schedule, extra_in_flight
        places = placement_of(schedule, 1 if len(chunks) == 1 else len(chunks) // (1 if schedule == "1f1b" else 2))
        count = max(places) + 1
        self._lists = [endless(schedule, count, stage, extra_in_flight) for stage in range(count)]
        # The two chunks of a stage stand opposite each other.
        self._first = [min(chunk, places.index(stage)) for chunk, stage in enumerate(places)]
        self._chunks: list[_Chunk] = []
        for chunk, (parameters, first) in enumerate(zip(chunks, self._first, strict=True)):
            others = (tied or {}).items() if chunk != first else ()
            borrowed = {name: own for name, own in others if own in chunks[first]}
            self._chunks.append(_Chunk(dict(parameters), borrowed))
        self._weights: Stashing = weights
        self._correction: Correction = correction
        self._updates = 0  # made, on all chunks
        self._begun = 0  # whose last microbatches have been fed
        self._drained = 0  # made by the last drain
        self._fed = 0  # microbatches of the update under way
        self._make_versions()

    @property
    def updates(self) -> int:
        """The number of updates made so far."""
        return self._updates

    def feed(self, microbatches: int, *, ends_update: bool = True) -> list[Reading]:
        """What the next microbatches read, in their order. Call :meth:`update` before, if the last ones ended one.

        Args:
            microbatches: how many.
            ends_update: if False, the update goes on with the next call, as with gradient accumulation.
        """
        assert self._begun == self._updates, "update() comes between the updates' microbatches"
        for chunk in self._chunks:
            chunk.kept = chunk.take()
        read: dict[int, list[tuple[int, int]]] = {}  # by chunk: its version, and the first one's on its stage
        for actions in self._lists:
            for action in actions.feed(microbatches, ends_update=ends_update):
                if isinstance(action, Forward):
                    made, of_first = (self._chunks[c].steps for c in (action.chunk, self._first[action.chunk]))
                    # 2BW: one before the newest that every stage has; none is older than the last drain.
                    version = max(self._begun - 1, self._drained) if self._weights == "2bw" else made
                    if version > made:
                        ahead = mean_ahead(self._schedule, len(self._lists), action.chunk, microbatches, self._extra)
                        raise ValueError(
                            f"weights='2bw' with {microbatches} microbatches: a stage has {ahead:g} in flight, and not "
                            f"yet the version to read. Give at least {ahead:g} an update."
                        )
                    read.setdefault(action.chunk, []).append((version, of_first))
                self._count(action)
        self._fed += microbatches
        self._begun += ends_update
        return [
            Reading(
                tuple(self._leaves_of(chunk, *versions) for chunk, versions in enumerate(row)),
                tuple(version for version, _ in row),
            )
            for row in zip(*(read[chunk] for chunk in range(len(self._chunks))), strict=True)
        ]

    def _count(self, action: Action) -> None:
        """Count a step in a list: of one chunk, or of a stage's only one."""
        if isinstance(action, Step):
            self._chunks[getattr(action, "chunk", action.stage)].steps += 1

    def _leaves_of(self, number: int, version: int, of_first: int) -> dict[str, Tensor]:
        """What a chunk reads of a version of its own, and of one of the first chunk on its stage."""
        chunk = self._chunks[number]
        if not chunk.borrowed:
            return chunk.versions[version]
        if (version, of_first) not in chunk.copies:
            values = self._chunks[self._first[number]].versions[of_first]
            own = {name: values[other] for name, other in chunk.borrowed.items()}
            chunk.copies[version, of_first] = {
                name: value.detach().clone().requires_grad_(value.requires_grad) for name, value in own.items()
            }
        return {**chunk.versions[version], **chunk.copies[version, of_first]}

    def backward(self, reading: Reading, loss: Tensor, weight: float = 1.0) -> None:
        """Add a microbatch's gradients to those of the update under way. Call it in the order of the microbatches.

        Args:
            reading: what the microbatch read.
            loss: of the microbatch.
            weight: of its loss in the update.
        """
        if self._weights != "latest":
            torch.autograd.backward(loss, torch.full_like(loss, weight))
            return
        # The graph has saved the leaves' memory as its weights: during the backward it holds the newest values.
        newest = [chunk.versions[self._updates] for chunk in self._chunks]
        before = [{name: leaf.detach().clone() for name, leaf in chunk.items()} for chunk in reading.stages]
        _write(reading.stages, newest)
        torch.autograd.backward(loss, torch.full_like(loss, weight))
        _write(reading.stages, before)

    def update(self, step: Callable[[int], None]) -> None:
        """Make the update whose microbatches have run.

        Args:
            step: called with every chunk's number, to change its parameters. Their gradients are in ``grad``.
        """
        assert self._begun == self._updates + 1, "feed() has not ended an update"
        for number, (chunk, gradients) in enumerate(zip(self._chunks, self._taken(), strict=True)):
            before = {name: p.detach().clone() for name, p in chunk.parameters.items()}
            for name, parameter in chunk.parameters.items():
                parameter.grad = gradients.get(name)
            step(number)
            for parameter in chunk.parameters.values():
                parameter.grad = None
            ahead = mean_ahead(self._schedule, len(self._lists), number, self._fed, self._extra)
            weight = correction_weight(self._correction, self._weights, ahead, self._fed)
            chunk.versions[self._updates + 1] = _leaves(chunk, self._values(chunk, before, weight))
            # The version that the list's next forward reads is the oldest still wanted; with 2BW, the last but one.
            oldest = self._updates if self._weights == "2bw" else chunk.steps
            chunk.versions = {version: leaves for version, leaves in chunk.versions.items() if version >= oldest}
            chunk.copies = {}
        self._updates += 1
        self._fed = 0

    def _taken(self) -> list[dict[str, Tensor]]:
        """Each chunk's gradients of the update, with those of a later chunk's uses of its parameters."""
        taken = [chunk.take() for chunk in self._chunks]
        for number, chunk in enumerate(self._chunks):
            of_first = taken[self._first[number]]
            for name, own in chunk.borrowed.items():
                if (gradient := taken[number].pop(name, None)) is not None:
                    of_first[own] = of_first[own] + gradient if own in of_first else gradient
        return taken

    def _values(self, chunk: _Chunk, before: Mapping[str, Tensor], weight: float) -> dict[str, Tensor]:
        """What forwards read of the version that an update has just made."""
        second_order = is_second_order(self._correction, weight)
        values: dict[str, Tensor] = {}
        for name, parameter in chunk.parameters.items():
            if not weight or not parameter.requires_grad:
                values[name] = parameter.detach().clone()
                continue
            values[name] = before[name]
            read = [chunk.versions[self._updates][name].detach()] if second_order else None
            extrapolate([values[name]], [parameter.detach()], read, weight)
        return values

    def drain(self) -> None:
        """All stages run what they owe: nothing is late afterwards, and forwards read the parameters themselves.
        Gradients of an update under way are kept for it."""
        for actions in self._lists:
            for action in actions.drain():
                self._count(action)
        assert all(chunk.steps == self._updates for chunk in self._chunks)
        self._drained = self._updates
        self._make_versions()

    def _make_versions(self) -> None:
        for chunk in self._chunks:
            chunk.kept = chunk.take()
            values = {name: p.detach().clone() for name, p in chunk.parameters.items()}
            chunk.versions, chunk.copies = {self._updates: _leaves(chunk, values)}, {}


def _leaves(chunk: _Chunk, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: v.requires_grad_(chunk.parameters[name].requires_grad) for name, v in values.items()}


def _write(leaves: Sequence[Mapping[str, Tensor]], values: Sequence[Mapping[str, Tensor]]) -> None:
    for mine, theirs in zip(leaves, values, strict=True):
        for name, leaf in mine.items():
            leaf.data.copy_(theirs[name].detach())
