"""Trains a whole module as the asynchronous pipeline does, in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel

from lightning_parallel.batch import batch_size, split
from lightning_parallel.cuts.partition import Partition
from lightning_parallel.cuts.search import partition
from lightning_parallel.pipeline.staleness import discount, mean_staleness
from lightning_parallel.schedules.named import placement_of
from lightning_parallel.schedules.steady import mean_ahead
from tools.study.delayed import Delayed


@dataclass
class Trained:
    """What a run has come to.

    Attributes:
        losses: one a step.
        gradients: before clipping, by name, one dict an update.
        weights: by name.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


class _Loss(torch.nn.Module):
    """Calls `module.loss` in its forward, so that functional_call reaches the parameters."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> Tensor:
        loss: Tensor = self.module.loss(batch)
        return loss


def delayed(
    kind: Any,
    stages: int,
    microbatches: int,
    *,
    accumulate: int = 1,
    clip: float | None = None,
    epochs: int = 1,
    lr_discount: int | None = None,
    weigh: Callable[[Any], float] = batch_size,
    average: WeightAveraging | None = None,
    read_last: tuple[str, ...] = (),
    **options: Any,
) -> Trained:
    """Train as AsyncPipelineStrategy does, drained at the end of every epoch, and where 2BW has to.

    Args:
        kind: makes the module, which has a method ``loss`` and makes its ``loader``.
        weigh: a microbatch's weight in its batch.
        average: averages the weights as in Lightning's Trainer. They are the weights in the end.
        read_last: endings of the names of loose parameters that the last chunk uses; the first uses all others.
        options: of `Delayed`.
    """
    torch.set_default_dtype(torch.float64)
    module = kind()
    first = next(iter(kind.loader()))
    schedule, extra = options.get("schedule", "1f1b"), options.get("extra_in_flight", 0)
    places = placement_of(schedule, stages)
    cut = partition(module, lambda: module.training_step(first, 0), stages, placement=places, keep_together=True)
    report = Trained()
    parameters = dict(module.named_parameters())
    chunks = range(len(places))
    names = [[n for n in parameters if _owner(n, cut, read_last) == c] for c in chunks]
    tied = _tied(cut, read_last)
    optimizers, schedulers = [], []
    for chunk in chunks:
        configured = module.configure_optimizers()
        optimizer, held = configured["optimizer"], {parameters[n] for n in names[chunk]}
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p in held]
        for parameter in [p for p in optimizer.state if p not in held]:
            del optimizer.state[parameter]
        optimizers.append(optimizer)
        schedulers.append(configured["lr_scheduler"]["scheduler"])
    pipeline = Delayed([{n: parameters[n] for n in names[c]} for c in chunks], tied=tied, **options)
    averages = average and AveragedModel(module, use_buffers=True, **average._kwargs)
    gathering = before = 0  # microbatches of the update under way, and of the last

    def step(chunk: int) -> None:
        groups = optimizers[chunk].param_groups
        own = {n: parameters[first].grad for n, first in cut.aliases.items() if first in names[chunk]}
        report.gradients[-1].update({n: g.clone() for n, g in own.items() if g is not None})
        if clip is not None:
            torch.nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], clip)  # as Lightning does
        ahead = mean_ahead(schedule, stages, chunk, gathering, extra)
        late = mean_staleness(options.get("weights", "stash"), ahead, gathering)
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * (discount(late, pipeline.updates, lr_discount) if lr_discount else 1.0)
        optimizers[chunk].step()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        schedulers[chunk].step()

    for epoch in range(epochs):
        loader = list(kind.loader())
        for number, batch in enumerate(loader):
            ends_update = not (number + 1) % accumulate or number + 1 == len(loader)
            total = 0.0
            parts = split(batch, min(microbatches, batch_size(batch)))
            size = sum(weigh(part) for part in parts)
            if options.get("weights") == "2bw" and 0 < before < stages - 1:
                pipeline.drain()
            gathering += len(parts)
            for part, reading in zip(parts, pipeline.feed(len(parts), ends_update=ends_update), strict=True):
                read = {f"module.{n}": p for n, p in reading.weights.items()}
                loss = functional_call(_Loss(module), read, (part,), tie_weights=not tied)
                pipeline.backward(reading, loss, weigh(part) / size * (1 / accumulate))
                total += float(loss) * (weigh(part) / size)
            report.losses.append(total / accumulate)  # as Lightning reports it
            if ends_update:
                report.gradients.append({})
                pipeline.update(step)
                if average and averages and average.should_update(step_idx=pipeline.updates - 1):
                    averages.update_parameters(module)
                before, gathering = gathering, 0
        pipeline.drain()
        if average and averages and average.should_update(epoch_idx=epoch):
            averages.update_parameters(module)
    trained = averages.module if averages else module
    report.weights = {n: p.detach().clone() for n, p in trained.named_parameters(remove_duplicate=False)}
    return report


def _owner(name: str, cut: Partition, read_last: tuple[str, ...]) -> int:
    """The chunk that updates a parameter: the first one that uses it on its stage."""
    if name in cut.loose:
        return cut.chunks_of(cut.placement[-1 if name.endswith(read_last) else 0])[0]
    return min(cut.uses[name])


def _tied(cut: Partition, read_last: tuple[str, ...]) -> dict[str, str]:
    """The parameters that both chunks of a stage use, by the names under which the second one reads them."""
    tied = {
        other: name
        for other, name in cut.aliases.items()
        if name != other and len(cut.uses[name]) > 1 and name not in cut.loose
    }
    loose = (name for name in cut.loose if name.endswith(read_last) and len(cut.chunks_of(cut.placement[-1])) > 1)
    return tied | {name: name for name in loose}
