"""Clipping by the norm of all stages, without waiting for it: an update is made first, and validated in the next batch.

::

    gradients complete -> copy, update as if nothing were clipped -> next batch begins -> the norm is in
        not clipped: go on
        clipped:     undo, clip, update again, begin the batch anew
        infinite, with a loss scaler (``16-mixed``): undo, skip the update, begin the batch anew

So the numbers are those of stages that wait. ``pipeline/validation.py`` says how the norm travels. Where many updates
were clipped or skipped, stages wait for a while, since an update that is made twice costs more than a wait.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback, WeightAveraging
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel.gradients.clipping import Clipping
from lightning_parallel.gradients.loss_scale import scaler_of
from lightning_parallel.gradients.overridden import overridden
from lightning_parallel.gradients.swapping import Gradients, swap_gradients
from lightning_parallel.optimizers.closures import closure_first
from lightning_parallel.optimizers.undoable import UndoableStep, refuse_undoing
from lightning_parallel.optimizers.undoable_scaler import UndoableScaler
from lightning_parallel.pipeline.chunk import Microbatch
from lightning_parallel.pipeline.validation import TakenBack, Validation
from lightning_parallel.private.lightning.launching import callbacks_of
from lightning_parallel.private.lightning.replaced import replaced
from lightning_parallel.private.torch.groups import CommonScaler
from lightning_parallel.private.torch.modules import has_step_hooks
from lightning_parallel.ranks.collectives import reduce_tensor
from lightning_parallel.ranks.local_model import LocalModel
from lightning_parallel.ranks.run import Run
from lightning_parallel.tracing.snapshot import StateKept

SETTING = "post_validation=True"

_REMEMBERED = 20  # updates
_MOST = 0.2  # the part of these that may be clipped or skipped before stages wait
_CERTAIN = 1e-9  # relative: a norm so near to the limit counts as beyond it, in whichever order it was summed

# Code of the user's here would see weights of an update that may be taken back.
_BETWEEN = ("on_train_batch_start", "on_train_batch_end", "on_validation_model_eval", "optimizer_step")


class _Open(NamedTuple):
    """An update that isn't validated yet.

    Attributes:
        square: the squared norm of this stage's gradients.
        limit: the largest norm of all stages' gradients with which the update holds; None: any finite one.
    """

    step: UndoableStep
    square: Tensor
    limit: float | None


class PostValidation:
    """Clips for Lightning's precision plugin, which is set up to clip by the norm of all stages (``clipping.py``), and
    tells its loss scaler which updates to skip.

    Args:
        layers: of this stage's first chunk, whose forwards may run again.
        clipping: what the plugin clips by.
        drain: validates the last update on all stages, by :meth:`settle`.
        has_to_wait: do stages have to meet before the next update?
    """

    def __init__(
        self,
        run: Run,
        local: LocalModel,
        *,
        layers: Sequence[nn.Module],
        clipping: Clipping,
        drain: Callable[[], None],
        has_to_wait: Callable[[], bool],
    ) -> None:
        self._run, self._local, self._clipping = run, local, clipping
        self._layers, self._has_to_wait = nn.ModuleList(layers), has_to_wait
        self._open: _Open | None = None  # the last update, if it isn't validated yet
        self._clipped = deque[bool](maxlen=_REMEMBERED)  # have the last updates been clipped, or skipped?
        self._waits = False  # do stages wait before the next update?
        # Tells whether the last update would have held, if stages waited before it.
        self._held: Callable[[], bool] | None = None
        self._end = ExitStack()
        self._end.callback(replaced(run.precision, "clip_grad_by_norm", self.clip))
        scaler = scaler_of(run.precision)
        self._scaler: UndoableScaler | None = None
        if isinstance(scaler, CommonScaler):
            self._scaler = UndoableScaler(
                scaler, run.groups.model, run.groups.along("tensor"), self._decide, self._step, until=self._end
            )
        for optimizer in run.trainer.optimizers:
            # The closure makes the update before this one again, and this one's copy.
            closure_first(optimizer, partial(_without_hooks, optimizer), self._end)
        # Other callbacks may read weights where Lightning's validation starts.
        first = LambdaCallback(on_validation_start=lambda *_: drain())
        callbacks = callbacks_of(run.trainer)
        callbacks.insert(0, first)
        self._end.callback(callbacks.remove, first)

    def end(self) -> None:
        """Give the plugin, its loss scaler and the optimizers their own functions back."""
        self._end.close()
        self._open = None

    # -- an update -----------------------------------------------------------------------------------------------

    def clip(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip before an update, or leave it to the validation."""
        if self._scaler is None:  # else it has asked before it unscaled the gradients
            self._decide()
        if self._waits:
            norm = self._clipping.by_norm(optimizer, clip_val)
            self._held = lambda: _holds(norm.square(), clip_val)
        else:
            self._leave_open(optimizer, clip_val)

    def _decide(self) -> bool:
        """Decide whether stages wait before the next update."""
        if self._held is not None:  # not before now: the host would have waited for the device
            self._clipped.append(not self._held())
            self._held = None
        self._waits = self._has_to_wait() or sum(self._clipped) > _MOST * _REMEMBERED
        return self._waits

    def _leave_open(self, optimizer: Optimizer, limit: float | None) -> _Open:
        square = self._clipping.square(optimizer, self._run.groups.along("tensor"))
        self._open = _Open(UndoableStep(optimizer), square, limit)
        return self._open

    def _step(self, optimizer: Optimizer, step: Callable[[], Any], held: Callable[[], bool]) -> Any:
        """Let the loss scaler make an optimizer's step, or skip it. After the update ``held`` tells whether it did."""
        if self._waits:
            self._held = self._held or held
            return step()
        left_open = self._open or self._leave_open(optimizer, None)  # `clip` has opened it already, if it was called
        result = step()
        left_open.step.made()
        return result

    # -- its validation ------------------------------------------------------------------------------------------

    def run(
        self,
        run_schedule: Callable[[Mapping[int, Microbatch]], list[Any]],
        work: dict[int, Microbatch],
        drop: Callable[[], None],
        earlier: Gradients,
    ) -> list[Any]:
        """Run a batch, which validates the update before it. If that doesn't hold, take it back, and begin the batch
        anew. Returns what ``run_schedule`` does.

        Args:
            work: the batch's microbatches, by index.
            drop: drops what has run of the batch.
            earlier: the gradients of that update, if they are kept. Those with which it is taken back replace them.
        """
        if self._open is None:
            return run_schedule(work)
        limit = self._open.limit
        validation = Validation(self._square(self._open), lambda total: _holds(total, limit), self.accept)
        with ExitStack() as undone:
            undone.enter_context(StateKept(self._layers))  # what they write to themselves
            try:
                outputs = run_schedule({**work, 0: replace(work[0], validation=validation)})
            except TakenBack:
                drop()
            else:
                undone.pop_all()
                return outputs
        self.take_back()
        if self._scaler is not None:  # the scale is lower, if the update was skipped
            work = {number: replace(each, scale=self._scaler.scale) for number, each in work.items()}
        gradients = swap_gradients(self._local.parameters, {})
        if earlier:
            earlier.update(gradients)
        return run_schedule(work)

    def _square(self, update: _Open) -> Tensor:
        """The squared norm that other stages get. Clipping by value, or a hook, may have made an overflow finite."""
        has_skipped = self._scaler is not None and self._scaler.has_skipped
        return torch.full_like(update.square, torch.inf) if has_skipped else update.square

    def accept(self) -> None:
        """The last update holds."""
        self._open = None
        self._clipped.append(False)

    def take_back(self) -> None:
        """Undo the last update. Make it again with clipped gradients, which stay on the parameters, or skip it. All
        stages call it."""
        assert self._open is not None, "an update is open that doesn't hold"
        step, _, limit = self._open
        self._open = None
        step.undo()
        if limit is not None:
            self._clipping.by_norm(step.optimizer, limit)
        if self._scaler is None or not self._scaler.skips():
            step.make_again()
        self._clipped.append(True)

    def settle(self) -> None:
        """Validate the last update now, if it isn't yet. All stages call it."""
        if self._open is not None:
            total = self._square(self._open).clone()
            reduce_tensor(total, self._run.groups.along("pipeline"), dist.ReduceOp.SUM)
            self.accept() if _holds(total, self._open.limit) else self.take_back()


def _holds(square: Tensor, limit: float | None) -> bool:
    """Does an update by gradients of this squared norm hold, neither clipped nor skipped?"""
    norm = float(square.sqrt())
    return math.isfinite(norm) and (limit is None or norm + 1e-6 <= limit * (1 - _CERTAIN))


# -- what is refused ---------------------------------------------------------------------------------------------


def refuse_post_validation(trainer: pl.Trainer, module: pl.LightningModule, reasons: Collection[str]) -> None:
    """Refuse it where the user's code would see an update that is taken back, or where stages wait for each other
    in any case, for these ``reasons``.

    Raises:
        ValueError: it names what is in the way.
    """
    for found in (*reasons, *_in_the_way(trainer, module)):
        raise ValueError(f"{SETTING} doesn't go together with {found}. Leave one of the two out.")
    for optimizer in trainer.optimizers:
        _without_hooks(optimizer)
        refuse_undoing(optimizer, SETTING)


def _in_the_way(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[str]:
    for callback in callbacks_of(trainer):
        if isinstance(callback, WeightAveraging):
            yield f"{type(callback).__name__}, which averages the weights of each update"
    for hook in overridden(trainer, module, *_BETWEEN, unless="reads_weights"):
        yield (
            f"{hook}, which may see weights that are taken back (if it doesn't use them, set "
            f"{hook.partition('.')[0]}.reads_weights = False)"
        )
    for optimizer in trainer.optimizers if scaler_of(trainer.precision_plugin) is not None else ():
        if optimizer.defaults.get("fused"):
            yield (
                f"{type(optimizer).__name__}(fused=True), which unscales the gradients of 16-mixed itself "
                f"(foreach=True doesn't)"
            )


def _without_hooks(optimizer: Optimizer) -> AbstractContextManager[None]:
    """Refuse hooks on the optimizer's steps, which may be registered at any time. The context does nothing."""
    if has_step_hooks(optimizer):
        raise ValueError(
            f"{SETTING} doesn't go together with a hook on the steps of {type(optimizer).__name__}, which may see an "
            f"update that is taken back. Leave one of the two out."
        )
    return nullcontext()
