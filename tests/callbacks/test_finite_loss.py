"""A loss that isn't finite is told once, and ends the run on all ranks together, with the same error."""

from __future__ import annotations

from collections.abc import Container
from math import inf, nan
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor

from lightning_parallel import FiniteLoss
from tests.callbacks.test_preemption import WORLDS, Model, loaders, make_trainer
from tests.thorough import thorough
from tools.workers.pool import WorkerPool
from tools.workers.worker import texts_of_warnings

NOT_EACH_THIRD = {number for number in range(30) if number % 3}


class Wrong(Model):
    """Its loss isn't finite in some batches, on some rank."""

    def __init__(self, wrong: Container[int], value: float = nan, rank: int | None = None) -> None:
        super().__init__()
        self.wrong, self.value, self.rank = wrong, value, rank
        self.updates = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        now = self.trainer.fit_loop.total_batch_idx in self.wrong
        # Constant: the gradients, and with them the other ranks' and batches' losses, stay finite.
        return loss + self.value if now and self.rank in (None, rank_zero_only.rank) else loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.01)
        optimizer.register_step_post_hook(self._count)
        return optimizer

    def _count(self, *args: Any) -> None:
        self.updates += 1


def train(
    name: str, wrong: Container[int], callback: Callback, *of_model: Any, **options: Any
) -> tuple[int, str | None, list[str], int]:
    """The batches that have ended, the error, the warnings about the loss, and the updates."""
    model, error = Wrong(wrong, *of_model), None
    given = {"max_epochs": None, "max_steps": 30, "limit_val_batches": 0, **options}
    trainer = make_trainer(name, callbacks=[callback], **given)
    with texts_of_warnings() as told:
        try:
            trainer.fit(model, loaders()[0])
        except FloatingPointError as caught_error:
            error = str(caught_error)
    return int(model.ended), error, [text for text in told if "NaN" in text], model.updates


ACCUMULATED, SHORT = {"accumulate_grad_batches": 3}, {"max_steps": 6}
OTHERS = ("threads", "fully sharded", "tensor", "pipeline", "replicas")


@pytest.mark.parametrize(("name", "wrong", "stop_after", "of_model", "options", "ended", "step"), [
    # It looks after 3, 6, 9 batches, and late stages end one look later; the error comes before the module's own hook.
    ("single", 4, 3, (), {}, 8, 9), ("ddp", 4, 3, (), {}, 8, 9), ("of stages", 4, 3, (), {}, 11, 12),
    # On one rank only. In a pipeline with two replicas, ranks 0 and 1 are the last stages.
    ("ddp", 0, 2, (inf, 1), {}, 1, 2), ("of stages", 0, 2, (inf, 1), {}, 5, 6),
    # Batches count, not updates, and so do the last ones.
    ("single", 0, 5, (), ACCUMULATED, 4, 1), ("asynchronous", 0, 5, (), ACCUMULATED, 9, 3),
    ("ddp", 2, 4, (), SHORT, 6, 6), ("asynchronous", 2, 4, (), SHORT, 6, 6),
    # Too few in a row.
    ("ddp", 3, 4, (), SHORT, 6, None), ("asynchronous", 3, 4, (), SHORT, 6, None),
    ("single", NOT_EACH_THIRD, 3, (), {}, 30, None),
    *thorough(
        *((name, 4, 3, (), {}, 8, 9) for name in OTHERS), ("replicas", 0, 2, (inf, 1), {}, 1, 2),
    ),
])  # fmt: skip
def test_all_ranks_end_after_the_same_batch_with_the_same_error_or_with_none(
    pool: WorkerPool, name: str, wrong: Any, stop_after: int, of_model: Any, options: Any, ended: int, step: int | None
) -> None:
    """``wrong``: the batches, or the first of them."""
    batches_of_nan = range(wrong, 1000) if isinstance(wrong, int) else wrong
    given = (name, batches_of_nan, FiniteLoss(stop_after), *of_model)
    found = pool.run(train, WORLDS.get(name, 2), *given, init=False, **options)
    batches, errors, said, updates = zip(*found, strict=True)
    assert set(batches) == {ended} and len(set(errors)) == 1
    assert len(said[0]) == (not of_model) and not any(said[1:])
    if step is None:
        assert errors[0] is None
        return
    assert f"for {stop_after} batches in a row, up to step {step}. Go on from an earlier checkpoint" in errors[0]
    assert name not in ("of stages", "asynchronous") or set(updates) == {step}  # they drain before they leave


class NoMeetings(Callback):
    """Nothing is decided together with other ranks."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        def decide(*args: Any, **kwargs: Any) -> bool:
            raise AssertionError("a collective")

        trainer.strategy.reduce_boolean_decision = decide


@pytest.mark.parametrize("name", ["tensor", "asynchronous", *thorough("threads", "pipeline")])
def test_the_strategies_bring_along_one_that_only_warns(pool: WorkerPool, name: str) -> None:
    found = pool.run(train, WORLDS.get(name, 2), name, range(2, 1000), NoMeetings(), init=False)
    assert [(ended, error) for ended, error, *_ in found] == [(30, None)] * len(found)
    first = ["The loss is NaN or infinite, for the first time at step 3."]
    assert [said for _, _, said, _ in found] == [first, *[[]] * (len(found) - 1)]


def test_a_number_of_batches_is_at_least_one() -> None:
    with pytest.raises(ValueError, match="stop_after=0"):
        FiniteLoss(0)
