"""A module's hooks around a step, in its dry run: they see a Trainer that can only be read."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch

from lightning_parallel.set_up.step_hooks import StepHooks


class Hooked(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.did: list[Any] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.did.append(("start", len(batch), batch_idx))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.did.append("step")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.trainer.save_checkpoint("nowhere.ckpt")
        self.did.append("saved")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.did.append(("end", outputs, self.trainer.global_step))


def test_each_runs_as_far_as_it_only_reads_the_trainer() -> None:
    module = Hooked()
    trainer = module.trainer = L.Trainer(max_epochs=1, logger=False, accelerator="cpu")
    StepHooks(module, torch.ones(3, 2))("an output")
    assert module.trainer is trainer
    assert module.did == [("start", 3, 0), "step", ("end", {"loss": "an output"}, 0)]
