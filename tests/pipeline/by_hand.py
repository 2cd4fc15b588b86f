"""A pipeline without processes: the stages of a model, each on a copy of it, run one after the other by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.cuts.search import partition
from lightning_parallel.messages.arrival import NO_GRADIENT, Arrival
from lightning_parallel.messages.message import format_of
from lightning_parallel.pipeline.stage import Stage

CPU = torch.device("cpu")
Step = Callable[[Any], Any]  # a model's step: takes the model, returns the loss


def stages_of(model: nn.Module, step: Step, stages: int, **options: Any) -> list[Stage]:
    """Every stage of ``model``, hooked, on a deep copy of its own; what crosses the cuts as each finds it."""
    parts = partition(model, partial(step, model), stages, **options)
    made = [Stage(copy.deepcopy(model), parts, index, CPU) for index in range(stages)]
    for stage in made:
        stage.install()
        stage.flow = stage.flow_of(lambda stage=stage: step(stage.module))  # type: ignore[misc]
    assert all(stage.flow == made[0].flow for stage in made), "every rank has to find the same flow"
    return made


@dataclass
class Result:
    output: Any
    gradients: dict[str, Tensor]
    stages: list[Stage]


def forward(stages: list[Stage], step: Step) -> tuple[Any, list[list[Tensor]], list[Arrival]]:
    """The last stage's output, and what passed each cut."""
    departures: list[list[Tensor]] = []
    arrivals: list[Arrival] = []
    output: Any = None
    for stage in stages:
        bound = partial(step, stage.module)
        if 0 in stage.chunks:
            output = stage.run(bound, None, 0)
        else:
            values = [t.detach().clone() for t in departures[-1]]
            arrivals.append(Arrival(values, format_of(departures[-1])))
            output = stage.run(bound, arrivals[-1], stage.chunks[0])
        if not stage.has_last_chunk:
            assert isinstance(output, list)
            departures.append(output)
    return output, departures, arrivals


def backward(stages: list[Stage], loss: Tensor, departures: list[list[Tensor]], arrivals: list[Arrival]) -> None:
    if loss.requires_grad:
        with stages[-1].backward():
            loss.backward()
    for stage, departure, arrival in reversed(list(zip(stages, departures, arrivals, strict=False))):
        pairs = zip([t for t in departure if t.requires_grad], arrival.gradients(), strict=True)
        present = [(tensor, gradient) for tensor, gradient in pairs if gradient is not NO_GRADIENT]
        if present:
            with stage.backward():
                torch.autograd.backward([tensor for tensor, _ in present], [gradient for _, gradient in present])


def gradients_of(stages: list[Stage]) -> dict[str, Tensor]:
    """By original name; of a parameter that several stages hold, the sum."""
    total: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters().items():
            if parameter.grad is not None:
                total[name] = total[name] + parameter.grad if name in total else parameter.grad
    return total


def run(model: nn.Module, step: Step, stages: int, recompute: bool = False, **options: Any) -> Result:
    """One forward and backward through all stages."""
    made = stages_of(model, step, stages, **options)
    for stage in made if recompute else []:
        stage.remove()
        stage.install(recompute)
    output, departures, arrivals = forward(made, step)
    backward(made, output, departures, arrivals)
    return Result(output, gradients_of(made), made)


def plain(model: nn.Module, step: Step) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of an ordinary run, on a copy of the model."""
    model = copy.deepcopy(model)
    loss = step(model)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
