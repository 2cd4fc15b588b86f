"""The asynchronous pipeline without a pipeline: delayed gradients in one process.

Microbatch k of a batch is computed with stage s's weights as they were after max(0, floor((k - ahead_s) / m)) updates
since the last drain (k counted from there too), and update u of every stage is made of batch u's microbatches. That is
all that asynchrony does to the numbers; this reference shares no code with the engine that does it in processes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from lightning_parallel.pipeline.microbatch import batch_size, split
from lightning_parallel.pipeline.partition import partition
from tests.strategies.harness import Report
from tests.strategies.models import MODELS


class _Loss(torch.nn.Module):
    """So that functional_call reaches the parameters behind `module.loss`."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> Tensor:
        loss: Tensor = self.module.loss(batch)
        return loss


def delayed(
    model: str,
    stages: int,
    microbatches: int,
    *,
    extra_in_flight: int = 0,
    accumulate: int = 1,
    clip: float | None = None,
    epochs: int = 2,
) -> Report:
    """Train as AsyncPipelineStrategy does, drained at the end of every epoch."""
    torch.set_default_dtype(torch.float64)
    module = MODELS[model]()
    owners = partition(module, stages).owners
    report = Report()
    names = [[n for n, _ in module.named_parameters() if _owner(n, owners, stages) == s] for s in range(stages)]
    current = dict(module.named_parameters())
    optimizers, schedulers = [], []
    for stage in range(stages):
        held = torch.nn.ParameterDict({n.replace(".", "/"): current[n] for n in names[stage]})
        with_only = MODELS[model].configure_optimizers(held)  # its self.parameters() are the stage's
        optimizers.append(with_only["optimizer"])
        schedulers.append(with_only["lr_scheduler"]["scheduler"])
    for _ in range(epochs):
        # versions[s][u]: stage s's weights after u updates in this epoch
        versions = [[{n: current[n].detach().clone() for n in names[s]}] for s in range(stages)]
        loader = list(MODELS[model].loader())
        k, gathered = 0, {n: torch.zeros_like(p) for n, p in current.items()}
        touched: set[str] = set()
        for number, batch in enumerate(loader):
            size = batch_size(batch)
            total = 0.0
            for part in split(batch, microbatches):
                used: dict[str, Tensor] = {}
                for s in range(stages):
                    ahead = (stages - 1 - s) * (1 + extra_in_flight)
                    version = max(0, (k - ahead) // (microbatches * accumulate))
                    for n, p in versions[s][version].items():
                        used[n] = p.clone().requires_grad_(current[n].requires_grad)
                loss = functional_call(_Loss(module), {f"module.{n}": p for n, p in used.items()}, (part,))
                share = batch_size(part) / size
                (loss * (share / accumulate)).backward()
                total += float(loss) * share
                for n, p in used.items():
                    if p.grad is not None:
                        gathered[n] += p.grad
                        touched.add(n)
                k += 1
            report.losses.append(total / accumulate)  # as Lightning reports it
            if (number + 1) % accumulate and number + 1 < len(loader):
                continue
            report.gradients.append({n: gathered[n].clone() for n in touched})
            for s in range(stages):
                for n in names[s]:
                    current[n].grad = gathered[n].clone() if n in touched else None
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_([current[n] for n in names[s]], clip)
                optimizers[s].step()
                schedulers[s].step()
                versions[s].append({n: current[n].detach().clone() for n in names[s]})
            gathered = {n: torch.zeros_like(p) for n, p in current.items()}
            touched = set()
    report.weights = {n: p.detach().clone() for n, p in module.named_parameters()}
    return report


def _owner(name: str, owners: dict[str, tuple[int, ...]], stages: int) -> int:
    """Loose parameters: `Blocks.temperature` is used on the last stage, all others on the first."""
    if len(owners[name]) == 1:
        return owners[name][0]
    return stages - 1 if name.endswith("temperature") else 0
