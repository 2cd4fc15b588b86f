"""Clipping where a rank holds shards of some gradients, a part of the model, and copies of what other ranks hold too.

The result is that of clipping the whole model's gradients in one process. torch's own functions see one rank's
gradients only, and refuse a list that mixes DTensors with plain tensors. Lightning's precision plugin calls them, and
is made to clip so, and to skip a step on all ranks or on none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from contextlib import ExitStack, nullcontext

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_parallel.gradients.hook_watch import GradientWatch
from lightning_parallel.private.lightning.replaced import replaced
from lightning_parallel.private.torch.groups import CommonScaler
from lightning_parallel.private.torch.tensors import norms_of, scale_all
from lightning_parallel.ranks.collectives import reduce_tensor
from lightning_parallel.ranks.local_model import LocalModel, local_part
from lightning_parallel.ranks.run import Run
from lightning_parallel.tensor_lists import alike


def clip_by_norm(
    parameters: Sequence[Tensor],
    clip_val: float,
    *,
    counted: Set[Tensor],
    replicas: dist.ProcessGroup | None,
    parts: dist.ProcessGroup | None,
    device: torch.device,
) -> Tensor:
    """Scale all gradients so that the norm of the whole model's gradient is at most ``clip_val``, and return that norm
    as it was.

    Args:
        counted: the parameters whose gradients here enter the norm. Of the copies within ``parts``, one does.
        replicas: the ranks over which DTensors are sharded, and which have equal copies of all else; None if no
            parameter is a DTensor.
        parts: the ranks that hold the model together; None if each of them holds all of it.
    """
    own = [p.grad for p in parameters if p.grad is not None and p in counted]
    square = torch.zeros((), dtype=torch.float64, device=device)
    if replicas is not None:
        square += square_of_norm([local_part(g) for g in own if isinstance(g, DTensor)], device)
        reduce_tensor(square, replicas, dist.ReduceOp.SUM)
    square += square_of_norm([g for g in own if not isinstance(g, DTensor)], device)
    if parts is not None:
        reduce_tensor(square, parts, dist.ReduceOp.SUM)
    norm = square.sqrt()
    scale = (clip_val / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    for (gradients,) in alike([local_part(p.grad) for p in parameters if p.grad is not None]):
        scale_all(gradients, scale.to(gradients[0]))
    return norm


def square_of_norm(gradients: list[Tensor], device: torch.device) -> Tensor:
    """The squared norm in float64. The single norms are computed in float32 at least: rounded to bfloat16, the sum
    would depend on which rank holds what."""
    square = torch.zeros((), dtype=torch.float64, device=device)
    for (group,) in alike(gradients):
        norms = norms_of(group, torch.promote_types(group[0].dtype, torch.float32))
        square += torch.stack(norms).double().square().sum().to(device)
    return square


# -- in Lightning's precision plugin ---------------------------------------------------------------------------


def install_clipping(
    run: Run,
    local: LocalModel,
    *,
    counts: Callable[[str], bool],
    parts: dist.ProcessGroup,
    watch: GradientWatch | None,
) -> Callable[[], None]:
    """Make the precision plugin clip as :func:`clip_by_norm` does. Returns a function that undoes this.

    Args:
        counts: tells whether this rank's copy of a parameter, by name, enters the norm.
        parts: the ranks whose gradients make one norm.
        watch: paused while the plugin clips.
    """
    plugin, paused = run.precision, nullcontext if watch is None else watch.paused
    sharded_over = run.groups.along("data") if local.is_fully_sharded else None

    def by_norm(optimizer: Optimizer, clip_val: int | float) -> Tensor:
        with paused():
            held = list(plugin.main_params(optimizer))
            counted: set[Tensor] = {parameter for parameter in held if counts(local.names[id(parameter)])}
            return clip_by_norm(held, clip_val, counted=counted, replicas=sharded_over, parts=parts, device=run.device)

    def by_value(optimizer: Optimizer, clip_val: int | float) -> None:
        with paused():
            held = [parameter for parameter in plugin.main_params(optimizer) if parameter.grad is not None]
            if held:  # torch takes no empty list, and for several at a time no mix of DTensors and plain tensors
                nn.utils.clip_grad_value_(held, clip_val, foreach=False)

    put_back = ExitStack()
    put_back.callback(replaced(plugin, "clip_grad_by_norm", by_norm))
    put_back.callback(replaced(plugin, "clip_grad_by_value", by_value))
    return put_back.close


def share_overflows(run: Run) -> Callable[[], None]:
    """Make a loss scaler skip the step on all ranks if the gradients of one overflow. Returns a function that gives the
    plugin its own scaler back, with the scale that has been reached."""
    plugin = run.precision
    if not isinstance(plugin, MixedPrecision) or plugin.scaler is None:
        return lambda: None
    own = plugin.scaler
    plugin.scaler = common = CommonScaler(device=run.device.type, process_group=dist.group.WORLD)
    common.load_state_dict(own.state_dict())

    def put_back() -> None:
        own.load_state_dict(common.state_dict())
        plugin.scaler = own

    return put_back
