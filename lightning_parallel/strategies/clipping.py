"""Gradient clipping where a rank has shards of some gradients, parts of the model, and copies of what others have too.

What the precision plugin's own would do to the whole model's gradients; it sees one rank's only, and takes no list in
which shards (DTensors) and whole gradients are mixed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def install(plugin: Precision, by_norm: Callable[[Optimizer, int | float], None]) -> None:
    """Have ``gradient_clip_val`` call ``by_norm``, or :func:`clip_by_value`, in place of the plugin's own."""

    def by_value(optimizer: Optimizer, clip_val: int | float) -> None:
        clip_by_value(list(plugin.main_params(optimizer)), clip_val)

    plugin.clip_grad_by_norm = by_norm  # type: ignore[method-assign, assignment]
    plugin.clip_grad_by_value = by_value  # type: ignore[method-assign]


def clip_by_norm(
    parameters: Sequence[Tensor],
    clip_val: float,
    *,
    counts: Callable[[Tensor], bool],
    replicas: dist.ProcessGroup | None,
    parts: dist.ProcessGroup | None,
    device: torch.device,
) -> None:
    """Scale all gradients so that the norm of the whole model's is at most ``clip_val``.

    Args:
        counts: does this rank's gradient of a parameter enter the norm? Of copies within ``parts``, one does.
        replicas: the ranks that share out DTensors, and have equal copies of all else; None: nothing is a DTensor.
        parts: the ranks that hold the model together; None: each holds all of it.
    """
    held = [parameter for parameter in parameters if parameter.grad is not None]
    counted = [parameter.grad for parameter in held if parameter.grad is not None and counts(parameter)]
    square = torch.zeros((), dtype=torch.float64, device=device)
    if replicas is not None:
        square += _square_of_norm([g.to_local() for g in counted if isinstance(g, DTensor)], device)
        dist.all_reduce(square, group=replicas)
    square += _square_of_norm([g for g in counted if not isinstance(g, DTensor)], device)
    if parts is not None:
        dist.all_reduce(square, group=parts)
    scale = (clip_val / (square.sqrt() + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    for gradient in _local_gradients(held):
        gradient.mul_(scale.to(gradient))


def clip_by_value(parameters: Sequence[Tensor], clip_val: float) -> None:
    """Limit every element of the gradients to +- ``clip_val``."""
    for gradient in _local_gradients(parameters):
        gradient.clamp_(-clip_val, clip_val)


def _local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    gradients = [parameter.grad.detach() for parameter in parameters if parameter.grad is not None]
    return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]


def _square_of_norm(gradients: list[Tensor], device: torch.device) -> Tensor:
    return torch.nn.utils.get_total_norm(gradients).to(device=device, dtype=torch.float64).square()
