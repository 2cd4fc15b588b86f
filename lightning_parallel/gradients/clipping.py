"""Clipping where a rank holds shards of some gradients, a part of the model, and copies of what other ranks hold too.

The result is that of clipping the whole model's gradients in one process. torch's own functions see one rank's
gradients only, and refuse a list that mixes DTensors with plain tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_parallel.private.torch import norms_of, scale_all
from lightning_parallel.ranks.collectives import guarded
from lightning_parallel.ranks.local_model import local_part


def clip_by_norm(
    parameters: Sequence[Tensor],
    clip_val: float,
    *,
    counted: Set[Tensor],
    replicas: dist.ProcessGroup | None,
    parts: dist.ProcessGroup | None,
    device: torch.device,
) -> None:
    """Scale all gradients so that the norm of the whole model's gradient is at most ``clip_val``.

    Args:
        counted: the parameters whose gradients here enter the norm. Of the copies within ``parts``, one does.
        replicas: the ranks over which DTensors are sharded, and which have equal copies of all else; None if no
            parameter is a DTensor.
        parts: the ranks that hold the model together; None if each of them holds all of it.
    """
    held = [parameter for parameter in parameters if parameter.grad is not None]
    own = [parameter.grad for parameter in held if parameter.grad is not None and parameter in counted]
    square = torch.zeros((), dtype=torch.float64, device=device)
    if replicas is not None:
        square += _square_of_norm([local_part(g) for g in own if isinstance(g, DTensor)], device)
        guarded(dist.all_reduce, square, group=replicas)
    square += _square_of_norm([g for g in own if not isinstance(g, DTensor)], device)
    if parts is not None:
        guarded(dist.all_reduce, square, group=parts)
    scale = (clip_val / (square.sqrt() + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    for gradients in _alike(_local_gradients(held)):
        scale_all(gradients, scale.to(gradients[0]))


def clip_by_value(parameters: Sequence[Tensor], clip_val: float) -> None:
    """Limit every element of the gradients to the range from ``-clip_val`` to ``clip_val``."""
    for gradient in _local_gradients(parameters):
        gradient.clamp_(-clip_val, clip_val)


def _local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]


def _alike(gradients: list[Tensor]) -> Iterable[list[Tensor]]:
    """Tensors grouped by dtype and device."""
    found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for gradient in gradients:
        found.setdefault((gradient.dtype, gradient.device), []).append(gradient)
    return found.values()


def _square_of_norm(gradients: list[Tensor], device: torch.device) -> Tensor:
    """The squared norm in float64. The single norms are computed in float32 at least: rounded to bfloat16, the sum
    would depend on which rank holds what."""
    square = torch.zeros((), dtype=torch.float64, device=device)
    for alike in _alike(gradients):
        norms = norms_of(alike, torch.promote_types(alike[0].dtype, torch.float32))
        square += torch.stack(norms).double().square().sum().to(device)
    return square
