"""Decides whether the stages of a synchronous pipeline wait for each other between two batches.

Each stage updates its own parameters, from gradients that are complete as soon as its own list is done. With chunks in
a V (:func:`~lightning_parallel.schedules.v_shaped.zbv`) stages end one after the other, and those that end first can
begin the next batch, with exactly the weights that one process would have::

    wait                                     go on
    stage 0   . F F ... B B W |  . F F       stage 0   . F F ... B B W |F F
    stage 1   F F ... B B W . |  F F         stage 1   F F ... B B W |F F

They wait where something needs all stages at once. A value that only the last stage has is awaited where it is read
(``results/late_values.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_parallel.gradients.loss_scale import scaler_of
from lightning_parallel.schedules.actions import Schedule
from lightning_parallel.schedules.simulate import BATCHES, Order

_WORTH = 0.005  # of the stages' time; less can't be seen


def gained(schedule: Schedule | Order) -> float:
    """The fraction of the stages' time that going on saves, in theory. Stages gain where those that begin a batch first
    also end it first."""
    order = schedule if isinstance(schedule, Order) else Order(schedule)
    once = order.run(order.equal, 0.0)
    if once.updates[order.places[0]][-1] == once.makespan:
        return 0.0  # the stage with the first chunk ends last, and all others need its next forward
    busy = sum(order.busy(order.equal)) / len(order.schedule)
    gain = busy / order.run(order.equal, 0.0, BATCHES).period - busy / once.makespan
    return gain if gain > _WORTH else 0.0


def reasons_to_wait(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    precision: Precision,
    shared: Collection[str],
    *,
    validates: bool,
) -> Iterator[str]:
    """The reasons, in words, for which all stages have to meet at the end of each batch. ``shared`` are the trainable
    parameters that several stages hold. ``validates``: updates are validated later (``post_validation.py``)."""
    hint = "post_validation=True avoids the wait"
    by_norm = trainer.gradient_clip_algorithm in (None, "norm")
    if is_overridden("configure_gradient_clipping", module):
        yield f"{type(module).__name__}.configure_gradient_clipping"
    elif trainer.gradient_clip_val and by_norm and not validates:
        yield f"gradient_clip_val={trainer.gradient_clip_val:g} (clipping by the norm of all stages; {hint})"
    if scaler_of(precision) is not None and not validates:
        yield f"precision='16-mixed' (all stages skip the same updates; {hint})"
    for name in shared:
        yield f"'{name}', which several stages hold"
