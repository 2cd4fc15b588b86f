"""Clipping where a rank holds shards of some gradients, a part of the model, and copies of what other ranks hold too.

The result is that of clipping the whole model's gradients in one process. torch's own functions see one rank's
gradients only, and refuse a list that mixes DTensors with plain tensors. Lightning's precision plugin calls them, and
is made to clip so.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_parallel.gradients.hook_watch import GradientWatch
from lightning_parallel.private.lightning.replaced import replaced
from lightning_parallel.private.torch.tensors import norms_of, scale_all
from lightning_parallel.ranks.collectives import reduce_tensor
from lightning_parallel.ranks.local_model import LocalModel, local_part
from lightning_parallel.ranks.run import Run
from lightning_parallel.tensor_lists import alike


class Clipping:
    """Makes the precision plugin clip as in one process, until the stack is closed.

    Args:
        counts: tells whether this rank's copy of a parameter, by name, enters the norm. Of the copies within ``parts``,
            one does.
        parts: the ranks whose gradients make one norm.
        watch: paused while gradients are clipped.
    """

    def __init__(
        self,
        run: Run,
        local: LocalModel,
        *,
        counts: Callable[[str], bool],
        parts: dist.ProcessGroup,
        watch: GradientWatch | None,
        until: ExitStack,
    ) -> None:
        self._plugin, self._device, self._local = run.precision, run.device, local
        self._counts, self._parts = counts, parts
        self._replicas = run.groups.along("data")
        self._paused = nullcontext if watch is None else watch.paused
        until.callback(replaced(self._plugin, "clip_grad_by_norm", self.by_norm))
        until.callback(replaced(self._plugin, "clip_grad_by_value", self.by_value))

    def by_norm(self, optimizer: Optimizer, clip_val: int | float) -> Tensor:
        """Scale all gradients so that the norm of the whole model's gradient is at most ``clip_val``, and return that
        norm as it was."""
        norm = self.square(optimizer, self._parts).sqrt()
        scale = (clip_val / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        with self._paused():
            here = [local_part(p.grad) for p in self._plugin.main_params(optimizer) if p.grad is not None]
            for (gradients,) in alike(here):
                scale_all(gradients, scale.to(gradients[0]))
        return norm

    def by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip the entries of all gradients."""
        with self._paused():
            held = [parameter for parameter in self._plugin.main_params(optimizer) if parameter.grad is not None]
            if held:  # torch takes no empty list, and for several at a time no mix of DTensors and plain tensors
                nn.utils.clip_grad_value_(held, clip_val, foreach=False)

    def square(self, optimizer: Optimizer, parts: dist.ProcessGroup) -> Tensor:
        """The squared norm of the gradients that these ranks hold together. All of them call it, and their replicas if
        any parameter is fully sharded."""
        with self._paused():
            held = [p for p in self._plugin.main_params(optimizer) if self._counts(self._local.names[id(p)])]
            own = [p.grad for p in held if p.grad is not None]
            square = square_of_norm([local_part(g) for g in own if isinstance(g, DTensor)], self._device)
            if self._local.is_fully_sharded:  # of all else replicas have equal copies
                reduce_tensor(square, self._replicas, dist.ReduceOp.SUM)
            square += square_of_norm([g for g in own if not isinstance(g, DTensor)], self._device)
        return reduce_tensor(square, parts, dist.ReduceOp.SUM)


def square_of_norm(gradients: list[Tensor], device: torch.device) -> Tensor:
    """The squared norm in float64. The single norms are computed in float32 at least: rounded to bfloat16, the sum
    would depend on which rank holds what."""
    square = torch.zeros((), dtype=torch.float64, device=device)
    for (group,) in alike(gradients):
        norms = norms_of(group, torch.promote_types(group[0].dtype, torch.float32))
        square += torch.stack(norms).double().square().sum().to(device)
    return square
