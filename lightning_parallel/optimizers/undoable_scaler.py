"""Lets a stage step or skip by its own gradients, before it knows whether those of other stages overflow.

::

    unscale own gradients -> step, or skip if they overflow -> new loss scale -> next batch
        gradients of some stage overflow:    the other stages skip, too, and lower their loss scale
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_parallel.private.lightning.replaced import replaced
from lightning_parallel.private.torch.groups import CommonScaler
from lightning_parallel.ranks.collectives import highest
from lightning_parallel.values import changed


class UndoableScaler:
    """Lets a common loss scaler decide by this stage's gradients alone, until the stack is closed.

    Args:
        parts: the ranks that hold one copy of the model together. Other copies have equal gradients.
        shards: the ranks of this rank's stage, which skip the same updates: an optimizer's step may need all of them.
        has_to_wait: asked before each update. If it is true, the scaler asks all ranks, as it does by itself.
        around_step: makes an optimizer's step. It is called with the optimizer, the step, and a function that tells
            after the update whether the step was made, not skipped.

    Attributes:
        has_skipped: was the last update skipped on this stage?
    """

    def __init__(
        self,
        scaler: CommonScaler,
        parts: dist.ProcessGroup,
        shards: dist.ProcessGroup,
        has_to_wait: Callable[[], bool],
        around_step: Callable[[Optimizer, Callable[[], Any], Callable[[], bool]], Any],
        *,
        until: ExitStack,
    ) -> None:
        self._scaler, self._parts, self._shards = scaler, parts, shards
        self._has_to_wait, self._around_step = has_to_wait, around_step
        self._before: dict[str, Any] = {}  # the scaler's state before the last update
        self.has_skipped = False
        for name in ("unscale_", "step", "update"):
            until.callback(replaced(scaler, name, getattr(self, name)))

    @property
    def scale(self) -> float:
        """What losses are multiplied by. The host waits for a GPU here."""
        return float(self._scaler.get_scale())

    # These three take the place of the scaler's own methods, which they call by its class.

    def unscale_(self, optimizer: Optimizer) -> None:
        if self._has_to_wait():
            CommonScaler.unscale_(self._scaler, optimizer)
        elif self._shards.size() == 1:
            GradScaler.unscale_(self._scaler, optimizer)
        else:
            with changed([(vars(self._scaler), "process_group", self._shards)]):
                CommonScaler.unscale_(self._scaler, optimizer)

    def step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        step = partial(CommonScaler.step, self._scaler, optimizer, **kwargs)
        return self._around_step(optimizer, step, lambda: not self.has_skipped)

    def update(self) -> None:
        self._before = self._scaler.state_dict()
        CommonScaler.update(self._scaler)
        self.has_skipped = self._scaler.get_scale() < self._before["scale"]

    def skips(self) -> bool:
        """Does a rank have to skip the last update? Then all do, and this one's loss scale is lowered if it hasn't
        skipped yet. All ranks call it."""
        overflow = highest(self._parts, int(self.has_skipped)) != [0]
        if overflow and not self.has_skipped:
            scale = self._before["scale"] * self._before["backoff_factor"]
            self._scaler.load_state_dict(self._before | {"scale": scale, "_growth_tracker": 0})
        return overflow
