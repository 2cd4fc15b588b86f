"""Modules that run backwards and optimizers themselves: ``automatic_optimization=False``.

A user may step after any ``self.manual_backward``, so each one completes the gradients that it adds. Gradients of a
backward that is run in another way would never be completed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import lightning.pytorch as pl
from torch import Tensor

_CAN = "TensorParallelStrategy and FullyShardedStrategy train such modules"
SEVERAL_OPTIMIZERS = (
    f"configure_optimizers returned several optimizers, but a pipeline runs backward and step itself, by its schedule, "
    f"for one. Return one optimizer, with parameter groups if need be. With automatic_optimization=False, {_CAN}."
)


def refuse_manual_optimization(module: pl.LightningModule) -> None:
    """Refuse manual optimization, for strategies that run backward and step by a schedule."""
    if not module.automatic_optimization:
        raise ValueError(
            f"automatic_optimization=False: a pipeline runs backward and step itself, by its schedule. Use automatic "
            f"optimization with one optimizer, or another strategy: {_CAN}."
        )


class BackwardGuard:
    """Refuses backwards that don't run inside ``self.manual_backward``."""

    def __init__(self) -> None:
        self.is_open = False  # may a backward that is running make gradients?

    def begin(self, parameters: Iterable[Tensor], until: ExitStack) -> None:
        """Begin training with manual optimization, in which the gradients of these parameters have to be completed. It
        ends when the stack is closed."""
        for parameter in parameters:
            if parameter.requires_grad:
                until.callback(parameter.register_post_accumulate_grad_hook(self._grown).remove)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Inside, gradients may grow."""
        before, self.is_open = self.is_open, True
        try:
            yield
        finally:
            self.is_open = before

    def _grown(self, parameter: Tensor) -> None:
        if not self.is_open:
            raise RuntimeError(
                "A backward has run outside of self.manual_backward, so its gradients are not joined with those of "
                "other ranks. Call self.manual_backward(loss) in the place of loss.backward()."
            )
