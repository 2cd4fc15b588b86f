"""The asynchronous pipeline without a pipeline: the same late gradients, in one process.

Asynchrony changes the numbers in one way only: which version of a stage's weights a microbatch's forward uses. The
stage's list of actions determines the version; a correction may change its values. So one process that keeps the last
versions of all stages' weights computes what p processes compute. It tells what a choice costs in quality before anyone
owns p devices. In float64 the two are equal to the bit where what crosses the cuts is contiguous and read on one stage;
otherwise sums differ in their order. This module takes the lists from the schedule, and shares no code with the engine
and the weight versions that do it in processes, for which it is the reference::

    asynchronous = Delayed([dict(stage.named_parameters()) for stage in stages], weights="stash")
    optimizers = [torch.optim.AdamW(stage.parameters()) for stage in stages]
    for batch in batches:
        for part, reading in zip(split(batch, 16), asynchronous.feed(16)):
            loss = functional_call(model, reading.weights, part)
            asynchronous.backward(reading, loss, weight=1 / 16)
        asynchronous.update(lambda stage: optimizers[stage].step())
    asynchronous.drain()    # before a validation, a checkpoint, and at the end
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_parallel.pipeline.staleness import Correction, Stashing, correction_weight, extrapolate, is_second_order
from lightning_parallel.schedules.actions import Forward, Step
from lightning_parallel.schedules.asynchronous import AsyncOneFOneB


@dataclass(frozen=True)
class Reading:
    """What one microbatch reads.

    Attributes:
        stages: for each stage, its parameters by name: leaves, in whose ``grad`` gradients accumulate. Microbatches
            that read one version of a stage share them.
        versions: for each stage, the number of updates that made what is read.
    """

    stages: tuple[Mapping[str, Tensor], ...]
    versions: tuple[int, ...]

    @property
    def weights(self) -> dict[str, Tensor]:
        """The leaves of all stages together, as ``torch.func.functional_call`` takes them."""
        return {name: leaf for stage in self.stages for name, leaf in stage.items()}


@dataclass
class _Stage:
    """A stage's parameters, their versions by number of updates, and its list of actions."""

    parameters: Mapping[str, nn.Parameter]
    actions: AsyncOneFOneB
    steps: int = 0  # in the list so far
    versions: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    kept: dict[str, Tensor] = field(default_factory=dict)  # gradients from before the last drain


class Delayed:
    """The late gradients of an asynchronous pipeline.

    Every stage makes each of its updates when :meth:`update` is called, which is earlier than in the pipeline. The
    versions kept say what is read when, so nothing reads an update early.

    Args:
        stages: each stage's parameters, by name. Names are unique over the stages.
        weights: as in :class:`~lightning_parallel.AsyncPipelineStrategy`.
        correction: as there.
        extra_in_flight: as there.

    Raises:
        ValueError: (by :meth:`feed`) ``weights="2bw"`` with fewer microbatches an update than a stage runs ahead.
    """

    def __init__(
        self,
        stages: Sequence[Mapping[str, nn.Parameter]],
        *,
        weights: Stashing = "stash",
        correction: Correction = "second_order",
        extra_in_flight: int = 0,
    ) -> None:
        count = len(stages)
        self._stages = [_Stage(dict(p), AsyncOneFOneB(count, s, extra_in_flight)) for s, p in enumerate(stages)]
        self._weights: Stashing = weights
        self._correction: Correction = correction
        self._updates = 0  # made, on all stages
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
        columns: list[list[int]] = []
        for stage in self._stages:
            read: list[int] = []
            for action in stage.actions.feed(microbatches, ends_update=ends_update):
                if isinstance(action, Forward):
                    # 2BW: one before the newest that every stage has; none is older than the last drain.
                    version = max(self._begun - 1, self._drained) if self._weights == "2bw" else stage.steps
                    if version > stage.steps:
                        raise ValueError(
                            f"weights='2bw' with {microbatches} microbatches: a stage has {stage.actions.warmup} in "
                            f"flight, and not yet the version to read. Give at least {stage.actions.warmup} an update."
                        )
                    read.append(version)
                stage.steps += isinstance(action, Step)
            columns.append(read)
        self._fed += microbatches
        self._begun += ends_update
        return [
            Reading(tuple(s.versions[v] for s, v in zip(self._stages, row, strict=True)), row)
            for row in zip(*columns, strict=True)
        ]

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
        newest = [stage.versions[self._updates] for stage in self._stages]
        before = [{name: leaf.detach().clone() for name, leaf in stage.items()} for stage in reading.stages]
        _write(reading.stages, newest)
        torch.autograd.backward(loss, torch.full_like(loss, weight))
        _write(reading.stages, before)

    def update(self, step: Callable[[int], None]) -> None:
        """Make the update whose microbatches have run.

        Args:
            step: called with every stage's number, to change its parameters. Their gradients are in ``grad``.
        """
        assert self._begun == self._updates + 1, "feed() has not ended an update"
        for number, stage in enumerate(self._stages):
            gradients = _take_gradients(stage)
            before = {name: p.detach().clone() for name, p in stage.parameters.items()}
            for name, parameter in stage.parameters.items():
                parameter.grad = gradients.get(name)
            step(number)
            for parameter in stage.parameters.values():
                parameter.grad = None
            weight = correction_weight(self._correction, self._weights, stage.actions.warmup, self._fed)
            stage.versions[self._updates + 1] = _leaves(stage, self._values(stage, before, weight))
            # The version that the list's next forward reads is the oldest still wanted; with 2BW, the last but one.
            oldest = self._updates if self._weights == "2bw" else stage.steps
            stage.versions = {version: leaves for version, leaves in stage.versions.items() if version >= oldest}
        self._updates += 1
        self._fed = 0

    def _values(self, stage: _Stage, before: Mapping[str, Tensor], weight: float) -> dict[str, Tensor]:
        """What forwards read of the version that an update has just made."""
        second_order = is_second_order(self._correction, weight)
        values: dict[str, Tensor] = {}
        for name, parameter in stage.parameters.items():
            if not weight or not parameter.requires_grad:
                values[name] = parameter.detach().clone()
                continue
            values[name] = before[name]
            read = [stage.versions[self._updates][name].detach()] if second_order else None
            extrapolate([values[name]], [parameter.detach()], read, weight)
        return values

    def drain(self) -> None:
        """All stages run what they owe: nothing is late afterwards, and forwards read the parameters themselves.
        Gradients of an update under way are kept for it."""
        for stage in self._stages:
            stage.steps += sum(isinstance(action, Step) for action in stage.actions.drain())
            assert stage.steps == self._updates
        self._drained = self._updates
        self._make_versions()

    def _make_versions(self) -> None:
        for stage in self._stages:
            stage.kept = _take_gradients(stage)
            values = {name: p.detach().clone() for name, p in stage.parameters.items()}
            stage.versions = {self._updates: _leaves(stage, values)}


def _take_gradients(stage: _Stage) -> dict[str, Tensor]:
    """The gradients of the update under way, summed over versions, the oldest first."""
    gradients, stage.kept = stage.kept, {}
    for _, leaves in sorted(stage.versions.items()):
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                gradients[name] = gradients[name] + leaf.grad if name in gradients else leaf.grad
                leaf.grad = None
    return gradients


def _leaves(stage: _Stage, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: v.requires_grad_(stage.parameters[name].requires_grad) for name, v in values.items()}


def _write(leaves: Sequence[Mapping[str, Tensor]], values: Sequence[Mapping[str, Tensor]]) -> None:
    for mine, theirs in zip(leaves, values, strict=True):
        for name, leaf in mine.items():
            leaf.data.copy_(theirs[name].detach())
