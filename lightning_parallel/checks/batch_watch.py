"""Detects steps that change their batch in place, by trial runs on a copy of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_parallel.batch import cloned, tensors
from lightning_parallel.plan.flow import TWICE, FlowError
from lightning_parallel.plan.partition import Partition
from lightning_parallel.private.torch import version_of


class BatchWatch:
    """Runs trials of steps. A step that changes its batch would do so once for each of a stage's chunks."""

    def __init__(self) -> None:
        self._changed = False

    def run_on_copy(self, step: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        """Run a trial of a step on a copy of its batch, and note whether it changed the copy."""
        own = cloned((arguments, more))
        given = [(tensor, version_of(tensor)) for tensor in tensors(own)]
        try:
            return step(*own[0], **own[1])
        finally:
            self._changed |= any(version_of(tensor) != version for tensor, version in given)

    def check(self, name: str, parts: Partition) -> None:
        """Refuse steps of this name that have changed their batch, after a trial. All ranks call it.

        Raises:
            FlowError: it changes its batch, and a stage has several chunks.
        """
        changed, self._changed = self._changed, False
        if changed and parts.chunks > parts.stages:
            raise FlowError(
                f"{name} changes a tensor of its batch in place. {TWICE} change a clone, do it in the data loader, or "
                f"take a schedule with one chunk a stage ('1f1b')."
            )
