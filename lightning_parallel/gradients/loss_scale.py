"""The loss scale of ``16-mixed``, where a rank sees the gradients of its own part of the model only.

A scaler multiplies losses, so that small gradients don't vanish in float16. It skips an update whose gradients
overflow, and lowers the scale. All ranks have to skip the same updates.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch.amp import GradScaler

from lightning_parallel.private.torch.groups import CommonScaler
from lightning_parallel.ranks.run import Run


def scaler_of(plugin: Precision) -> GradScaler | None:
    """The loss scaler, if there is one."""
    return plugin.scaler if isinstance(plugin, MixedPrecision) else None


def share_overflows(run: Run, until: ExitStack) -> None:
    """Make a loss scaler skip the step on all ranks if the gradients of one overflow. When the stack is closed, the
    plugin has its own scaler again, with the scale that has been reached."""
    plugin = run.precision
    if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
        own = plugin.scaler
        plugin.scaler = common = CommonScaler(device=run.device.type, process_group=dist.group.WORLD)
        common.load_state_dict(own.state_dict())
        until.callback(setattr, plugin, "scaler", own)
        until.callback(lambda: own.load_state_dict(common.state_dict()))
