"""The asynchronous pipeline in one process: `tools.study.delayed` trains a model of `models.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from lightning_parallel.batch import batch_size, split
from lightning_parallel.pipeline.staleness import discount, mean_staleness
from lightning_parallel.plan.search import partition
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
    **options: Any,
) -> Report:
    """Train as AsyncPipelineStrategy does, drained at the end of every epoch, and where 2BW has to.

    Args:
        weigh: a microbatch's weight in its batch.
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
        held = torch.nn.ParameterDict({n.replace(".", "/"): parameters[n] for n in names[stage]})
        with_only = kind.configure_optimizers(held)  # its self.parameters() are the stage's
        optimizers.append(with_only["optimizer"])
        schedulers.append(with_only["lr_scheduler"]["scheduler"])
    pipeline = Delayed([{n: parameters[n] for n in names[s]} for s in range(stages)], **options)
    gathering = before = 0  # microbatches of the update under way, and of the last

    def step(stage: int) -> None:
        mine = [parameters[n] for n in names[stage]]
        report.gradients[-1].update({n: g.clone() for n in names[stage] if (g := parameters[n].grad) is not None})
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(mine, clip)
        ahead = AsyncOneFOneB(stages, stage, options.get("extra_in_flight", 0)).warmup
        late = mean_staleness(options.get("weights", "stash"), ahead, gathering)
        (group,) = optimizers[stage].param_groups
        rate = group["lr"]
        group["lr"] = rate * discount(late, pipeline.updates, lr_discount)
        optimizers[stage].step()
        group["lr"] = rate
        schedulers[stage].step()

    for _ in range(epochs):
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
                before, gathering = gathering, 0
        pipeline.drain()
    report.weights = {n: p.detach().clone() for n, p in parameters.items()}
    return report


def _owner(name: str, owners: dict[str, tuple[int, ...]], stages: int) -> int:
    """Loose parameters: `Blocks.temperature` is used on the last stage, all others on the first."""
    if len(owners[name]) == 1:
        return owners[name][0]
    return stages - 1 if name.endswith("temperature") else 0
