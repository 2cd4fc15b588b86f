"""A module's hooks around a step, in its dry run: they see a Trainer that can only be read."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_parallel.absent.origins import parameter_of
from lightning_parallel.cuts.search import partition
from lightning_parallel.set_up.step_hooks import StepHooks
from lightning_parallel.tracing.dry_run import trace


class Hooked(L.LightningModule):
    """Its hooks use a rate, the loss and a layer, before the teacher follows. One needs more of the Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.teacher = nn.Linear(2, 2).requires_grad_(False)
        self.did: list[Any] = []
        self.trainer = L.Trainer(max_epochs=1, logger=False, accelerator="cpu")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch).sum() + self.layer.weight.square().sum()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.did.append(("start", len(batch), batch_idx))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.did.append("step")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.did.append(optimizer.param_groups[0]["lr"])
        self.did.append(self.trainer.fit_loop)

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.did.append(("end", outputs, self.trainer.global_step))
        outputs["loss"].item()
        self.layer(batch)
        self.teacher.weight.lerp_(self.layer.weight, 0.1)


def test_each_runs_as_far_as_it_only_reads_the_trainer_and_may_use_what_every_stage_has() -> None:
    module, batch = Hooked(), torch.ones(3, 2)
    trainer, hooks = module.trainer, StepHooks(module, batch)
    hooks("an output")
    assert module.trainer is trainer
    assert module.did == [("start", 3, 0), "step", 1.0, ("end", {"loss": "an output"}, 0)]
    step = partial(module.training_step, batch, 0)
    seen = trace(module, {id(module.layer): "layer", id(module.teacher): "teacher"}, step, hooks=hooks)
    assert [call.unit for call in seen.calls] == ["layer"]
    assert [update.name for update in seen.updates] == ["teacher.weight"]
    assert parameter_of(min(seen.updates[0].needs)) == "layer.weight"
    hooks.check(partition(module, step, 1), 0)
