"""The asynchronous pipeline in one process: `tools.study.delayed` trains a model of `models.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel

from lightning_parallel.batch import batch_size, split
from lightning_parallel.cuts.search import partition
from lightning_parallel.pipeline.staleness import discount, mean_staleness
from lightning_parallel.schedules.asynchronous import AsyncOneFOneB
from tests.strategies.harness import Report
from tests.strategies.models import MODELS, Base
from tools.study.delayed import Delayed


class _Loss(torch.nn.Module):
    """So that functional_call reaches the parameters of `module.loss`."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> Tensor:
        loss: Tensor = self.module.loss(batch)
        return loss


def delayed(
    model: str | type[Base],
    stages: int,
    microbatches: int,
    *,
    accumulate: int = 1,
    clip: float | None = None,
    epochs: int = 1,
    lr_discount: int | None = None,
    weigh: Callable[[Any], float] = batch_size,
    average: WeightAveraging | None = None,
    **options: Any,
) -> Report:
    """Train as AsyncPipelineStrategy does, drained at the end of every epoch, and where 2BW has to.

    Args:
        weigh: a microbatch's weight in its batch.
        average: averages the weights as in Lightning's Trainer. They are the weights in the end.
        options: of `Delayed`.
    """
    torch.set_default_dtype(torch.float64)
    kind = MODELS[model] if isinstance(model, str) else model
    module = kind()
    first = next(iter(kind.loader()))
    owners = partition(module, lambda: module.training_step(first, 0), stages).owners
    report = Report()
    parameters = dict(module.named_parameters())
    names = [[n for n in parameters if _owner(n, owners, stages) == s] for s in range(stages)]
    optimizers, schedulers = [], []
    for stage in range(stages):
        configured = module.configure_optimizers()
        optimizer, held = configured["optimizer"], {parameters[n] for n in names[stage]}
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p in held]
        for parameter in [p for p in optimizer.state if p not in held]:
            del optimizer.state[parameter]
        optimizers.append(optimizer)
        schedulers.append(configured["lr_scheduler"]["scheduler"])
    pipeline = Delayed([{n: parameters[n] for n in names[s]} for s in range(stages)], **options)
    averages = average and AveragedModel(module, use_buffers=True, **average._kwargs)
    gathering = before = 0  # microbatches of the update under way, and of the last

    def step(stage: int) -> None:
        groups = optimizers[stage].param_groups
        report.gradients[-1].update({n: g.clone() for n in names[stage] if (g := parameters[n].grad) is not None})
        if clip is not None:
            torch.nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], clip)  # as Lightning does
        ahead = AsyncOneFOneB(stages, stage, options.get("extra_in_flight", 0)).warmup
        late = mean_staleness(options.get("weights", "stash"), ahead, gathering)
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * discount(late, pipeline.updates, lr_discount)
        optimizers[stage].step()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        schedulers[stage].step()

    for epoch in range(epochs):
        loader = list(kind.loader())
        for number, batch in enumerate(loader):
            size = batch_size(batch)
            ends_update = not (number + 1) % accumulate or number + 1 == len(loader)
            total = 0.0
            parts = split(batch, min(microbatches, batch_size(batch)))
            size = sum(map(weigh, parts))
            if options.get("weights") == "2bw" and 0 < before < stages - 1:
                pipeline.drain()
            gathering += len(parts)
            for part, reading in zip(parts, pipeline.feed(len(parts), ends_update=ends_update), strict=True):
                loss = functional_call(_Loss(module), {f"module.{n}": p for n, p in reading.weights.items()}, (part,))
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
    report.weights = {n: p.detach().clone() for n, p in (averages.module if averages else module).named_parameters()}
    return report


def _owner(name: str, owners: dict[str, tuple[int, ...]], stages: int) -> int:
    """Loose parameters: `Blocks.temperature` is used on the last stage, all others on the first."""
    if len(owners[name]) == 1:
        return owners[name][0]
    return stages - 1 if name.endswith("temperature") else 0
