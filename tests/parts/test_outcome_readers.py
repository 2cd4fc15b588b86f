"""Hooks that read what a batch came to are found by their code; in doubt they read it."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only

from lightning_parallel import Preemption
from lightning_parallel.parts.outcome_readers import readers


class Counts(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps = trainer.global_step + module.current_epoch


class Named(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        print(outputs["loss"])


class Starred(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
        print(rest[0])


class Unused(Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        print("done")


class Metrics(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        print(trainer.callback_metrics["loss"])


class HandsOn(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        print(trainer)


class Inner(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        print([outputs for _ in range(2)])


class Net(L.LightningModule):
    pass


class Reads(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.last = outputs


class ReadsMetrics(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.last = self.trainer.callback_metrics


class CountsSteps(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps = self.global_step + self.trainer.global_step


class Helped(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.report()


class Told(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        print(self.trainer)


class AsksTheModule(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module.report()


class AsksTheModulesTrainer(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        print(module.trainer)


class InTheStep(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return [self.trainer.callback_metrics["loss"] for _ in range(1)][0]


class StopsInTheStep(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.should_stop = True


class ReadsWhereStagesMeet(Net):
    def on_validation_epoch_end(self) -> None:
        print(self.trainer.callback_metrics)

    def on_train_epoch_end(self) -> None:
        self.trainer.should_stop = True


class OwnStep(Net):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)


class SeesTheLoss(Net):
    def on_before_backward(self, loss: Any) -> None:
        print("backward")


class Decorated(Net):
    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.last = outputs


class SetsRate(Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] = trainer.callback_metrics["loss"]


class OnlyFirst(Callback):
    @rank_zero_only
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        print(outputs)


def found(*callbacks: Callback, module: L.LightningModule | None = None) -> list[str]:
    trainer = L.Trainer(
        accelerator="cpu", callbacks=list(callbacks), logger=False, enable_progress_bar=False, enable_checkpointing=True
    )
    return readers(trainer, module or Net())


@pytest.mark.parametrize("kind", [Named, Starred, Metrics, HandsOn, Inner, AsksTheModule, AsksTheModulesTrainer])
def test_a_callback_that_may_read_the_outcome_is_named(kind: type[Callback]) -> None:
    assert found(kind()) == [f"{kind.__name__}.on_train_batch_end"]


def test_callbacks_that_read_neither_loss_nor_metrics_are_not_named(tmp_path: Any) -> None:
    assert found(Counts(), Unused(), ModelCheckpoint(tmp_path, every_n_train_steps=1), Preemption()) == []


def test_functions_as_callbacks_and_the_learning_rate_finder_read_it() -> None:
    reads = LambdaCallback(on_train_batch_end=lambda trainer, module, outputs, batch, number: print(outputs))
    assert found(reads) == ["LambdaCallback.on_train_batch_end"]
    assert found(LambdaCallback(on_train_batch_end=lambda *args: None)) == []
    assert found(LambdaCallback(on_train_start=print)) == []
    assert found(LambdaCallback(on_train_batch_end=print)) == ["LambdaCallback.on_train_batch_end"]
    assert found(LearningRateFinder()) == ["LearningRateFinder"]


def test_the_module_s_own_hook_counts_too() -> None:
    assert found(module=CountsSteps()) == []
    assert found(module=Reads()) == ["Reads.on_train_batch_end"]
    for module in (ReadsMetrics(), Helped(), Told()):
        assert found(module=module) == [f"{type(module).__name__}.on_train_batch_end"]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (InTheStep(), "training_step"),
        (StopsInTheStep(), "training_step"),
        (OwnStep(), "optimizer_step"),
        (SeesTheLoss(), "on_before_backward"),
        (Decorated(), "on_train_batch_end"),
    ],
)
def test_whatever_of_the_module_may_read_it_or_stop_the_training_is_named(module: Net, name: str) -> None:
    assert f"{type(module).__name__}.{name}" in found(module=module)


def test_what_is_read_where_stages_meet_does_not_count() -> None:
    assert found(module=ReadsWhereStagesMeet()) == []


def test_other_hooks_of_callbacks_count_too() -> None:
    assert found(SetsRate()) == ["SetsRate.on_train_batch_start"]
    assert found(OnlyFirst()) == ["OnlyFirst.on_train_batch_end"]


def test_a_schedule_of_the_rate_may_read_it() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
    metrics: Any = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    plain = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    reading = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: metrics.callback_metrics.get("loss", 1.0))
    assert readers(metrics, Net(), [plain]) == []
    assert readers(metrics, Net(), [reading]) == ["a function of LambdaLR"]
