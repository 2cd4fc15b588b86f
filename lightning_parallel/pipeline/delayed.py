"""The asynchronous pipeline without a pipeline: the same late gradients, in one process.

All that asynchrony does to the numbers is that a microbatch's forward reads each stage's weights as that stage's list
of actions has them by then, and that corrections say what it reads. So one process that keeps the last versions of all
stages' weights computes what p processes compute, and answers what a choice costs in quality before anyone owns p
devices. In float64 the two are equal to the bit, where what crosses the cuts is contiguous and read on one stage (else
sums differ in their order). It takes the lists from the schedule, and shares no code with the engine and the weight
versions that do it in processes, for which it is the reference.

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

from lightning_parallel.pipeline.schedule import AsyncOneFOneB, Forward, Step
from lightning_parallel.pipeline.staleness import Correction, Stashing, correction_weight, extrapolate, is_second_order


@dataclass(frozen=True)
class Reading:
    """What one microbatch reads.

    Attributes:
        stages: for each stage, its parameters by name: leaves, in whose ``grad`` gradients gather. Microbatches that
            read one version of a stage share them.
        versions: for each stage, the number of updates that made what is read.
    """

    stages: tuple[Mapping[str, Tensor], ...]
    versions: tuple[int, ...]

    @property
    def weights(self) -> dict[str, Tensor]:
        """Those of all stages together, as ``torch.func.functional_call`` takes them."""
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
    """Late gradients of an asynchronous pipeline.

    Every stage makes all its updates when :meth:`update` is called, earlier than in the pipeline, and the versions kept
    say what is read when. Nothing reads an update early.

    Args:
        stages: each stage's parameters, by name; names are unique over the stages.
        weights, correction, extra_in_flight: see :class:`~lightning_parallel.AsyncPipelineStrategy`.

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
        """Made so far."""
        return self._updates

    def feed(self, microbatches: int, *, ends_update: bool = True) -> list[Reading]:
        """What the next microbatches read, in their order. Those before that end an update must have been updated.

        Args:
            ends_update: else the update goes on with the next call, as with gradient accumulation.
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
        """Add a microbatch's gradients to those of the update under way. Microbatches come in their order.

        Args:
            weight: of its loss in the update.
        """
        if self._weights != "latest":
            torch.autograd.backward(loss, torch.full_like(loss, weight))
            return
        # What the graph has saved of the weights is the leaves' memory: for the backward it holds the newest values.
        newest = [stage.versions[self._updates] for stage in self._stages]
        before = [{name: leaf.detach().clone() for name, leaf in stage.items()} for stage in reading.stages]
        _write(reading.stages, newest)
        torch.autograd.backward(loss, torch.full_like(loss, weight))
        _write(reading.stages, before)

    def update(self, step: Callable[[int], None]) -> None:
        """Make the update whose microbatches have run.

        Args:
            step: called with every stage's number, its parameters' gradients in ``grad``, to change its parameters.
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
            # What the list's next forward reads is the oldest still wanted; of 2BW the version before the newest.
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
            last = before[name] - stage.versions[self._updates][name].detach() if second_order else None
            values[name] = extrapolate(parameter.detach(), before[name] - parameter.detach(), last, weight)
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
    """Those of the update under way, summed over versions, the oldest first."""
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
