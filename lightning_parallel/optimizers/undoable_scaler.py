"""A loss scaler that skips an update where this rank's gradients overflow, before it is known whether others' do.

::

    unscale (own gradients) -> step, or skip -> new scale, of which the next batch's losses are multiples
        some rank's gradients overflow:    all ranks skip, and go back to the scale that follows from that
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


class UndoableScaler:
    """Makes a scaler of all ranks work so, until the stack is closed.

    Args:
        parts: the ranks that hold one copy of the model together. Other copies have equal gradients.
        has_to_wait: asked before each update. If it says so, ranks look at their gradients together.
        around_step: called with an optimizer, its step, which it makes, and what tells afterwards whether the step
            wasn't skipped.
    """

    def __init__(
        self,
        scaler: CommonScaler,
        parts: dist.ProcessGroup,
        has_to_wait: Callable[[], bool],
        around_step: Callable[[Optimizer, Callable[[], Any], Callable[[], bool]], Any],
        *,
        until: ExitStack,
    ) -> None:
        self._scaler, self._parts = scaler, parts
        self._has_to_wait, self._around_step = has_to_wait, around_step
        self._before: dict[str, Any] = {}  # the scaler's state before the last update
        self._skipped = False  # was that?
        for name in ("unscale_", "step", "update"):
            until.callback(replaced(scaler, name, getattr(self, name)))

    @property
    def scale(self) -> float:
        """What losses are multiplied by. The host waits for a GPU here."""
        return float(self._scaler.get_scale())

    def unscale_(self, optimizer: Optimizer) -> None:
        kind = CommonScaler if self._has_to_wait() else GradScaler  # of all ranks' gradients, or of this rank's
        kind.unscale_(self._scaler, optimizer)

    def step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        step = partial(CommonScaler.step, self._scaler, optimizer, **kwargs)
        return self._around_step(optimizer, step, lambda: not self._skipped)

    def update(self) -> None:
        self._before = self._scaler.state_dict()
        CommonScaler.update(self._scaler)
        self._skipped = self._scaler.get_scale() < self._before["scale"]

    def take_back(self) -> bool:
        """Let all ranks skip the last update if one has to, and tell whether they do. All of them call it."""
        overflow = highest(self._parts, int(self._skipped)) != [0]
        if overflow and not self._skipped:
            scale = self._before["scale"] * self._before["backoff_factor"]
            self._scaler.load_state_dict(self._before | {"scale": scale, "_growth_tracker": 0})
        return overflow
