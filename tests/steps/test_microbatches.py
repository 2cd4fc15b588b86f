"""From a batch to microbatches, and back to what the batch would have given."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from tests.strategies.observed import Net, loader, make_trainer
from tools.workers.pool import WorkerPool


class Returns(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits, loss = self.logits_and_loss(batch)
        correct = (logits.argmax(-1) == batch[1]).double()
        return {
            "loss": loss.reshape(1),
            "logits": logits,
            "both": (correct.mean(), correct),
            "batch": batch_idx,
            "none": None,
        }


class Keeps(Callback):
    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *args: Any) -> None:
        self.outputs.append(outputs)


def outputs_of(strategy: str) -> list[Any]:
    torch.set_default_dtype(torch.float64)
    keeps = Keeps()
    options = {"microbatches": 3}  # of 2, 1 and 1 samples
    make_trainer(strategy, [keeps], options, max_epochs=1).fit(Returns(moves=False), loader())
    return keeps.outputs


def test_the_output_of_training_step_is_that_of_the_whole_batch(pool: WorkerPool) -> None:
    (expected,) = pool.run(outputs_of, 1, "single", init=False)
    assert len(expected) == 3
    for strategy in ("sync", "async"):
        for mine, whole in zip(pool.run(outputs_of, 2, strategy, init=False)[0], expected, strict=True):
            assert mine.keys() == whole.keys()
            assert (mine["batch"], mine["none"]) == (whole["batch"], None)
            for a, b in zip((mine["logits"], *mine["both"]), (whole["logits"], *whole["both"]), strict=True):
                torch.testing.assert_close(a, b.detach(), rtol=0, atol=1e-12)
            assert not mine["loss"].requires_grad
            torch.testing.assert_close(mine["loss"].reshape(1), whole["loss"], rtol=0, atol=1e-12)
