"""Makes Lightning's precision plugin clip by the norm of the whole model, and skip a step on all ranks or on none. By
itself it sees one rank's gradients only."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor
from torch.optim import Optimizer

from lightning_parallel.gradients.clipping import clip_by_norm, clip_by_value
from lightning_parallel.gradients.hook_watch import GradientWatch
from lightning_parallel.private.lightning.replaced import replaced
from lightning_parallel.private.torch import CommonScaler
from lightning_parallel.ranks.local_model import LocalModel


def install_clipping(
    plugin: Precision,
    local: LocalModel,
    *,
    counts: Callable[[str], bool],
    replicas: dist.ProcessGroup,
    parts: dist.ProcessGroup,
    device: torch.device,
    watch: GradientWatch | None,
) -> Callable[[], None]:
    """Make the plugin clip as :func:`~lightning_parallel.gradients.clipping.clip_by_norm` does. Returns a function that
    undoes this.

    Args:
        counts: tells whether this rank's copy of a parameter, by name, enters the norm.
        replicas: the ranks over which fully sharded parameters are divided.
        parts: the ranks whose gradients make one norm.
        watch: paused while the plugin clips.
    """
    paused = nullcontext if watch is None else watch.paused
    sharded_over = replicas if local.is_fully_sharded else None

    def by_norm(optimizer: Optimizer, clip_val: int | float) -> None:
        with paused():
            held = list(plugin.main_params(optimizer))
            counted: set[Tensor] = {parameter for parameter in held if counts(local.names[id(parameter)])}
            clip_by_norm(held, clip_val, counted=counted, replicas=sharded_over, parts=parts, device=device)

    def by_value(optimizer: Optimizer, clip_val: int | float) -> None:
        with paused():
            clip_by_value(list(plugin.main_params(optimizer)), clip_val)

    put_back = ExitStack()
    put_back.callback(replaced(plugin, "clip_grad_by_norm", by_norm))
    put_back.callback(replaced(plugin, "clip_grad_by_value", by_value))
    return put_back.close


def share_overflows(plugin: Precision, device: torch.device) -> Callable[[], None]:
    """Make a loss scaler skip the step on all ranks if the gradients of one overflow. Returns a function that gives the
    plugin its own scaler back, with the scale that has been reached."""
    if not isinstance(plugin, MixedPrecision) or plugin.scaler is None:
        return lambda: None
    own = plugin.scaler
    plugin.scaler = common = CommonScaler(device=device.type, process_group=dist.group.WORLD)
    common.load_state_dict(own.state_dict())

    def put_back() -> None:
        own.load_state_dict(common.state_dict())
        plugin.scaler = own

    return put_back
