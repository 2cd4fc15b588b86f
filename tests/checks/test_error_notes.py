"""Errors of the user's code that have their cause in the layout say so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import grad_norm
from torch import nn

from tests.strategies.harness import make_trainer
from tests.strategies.observed import WIDTH, Net, loader
from tools.workers.pool import WorkerPool


class ReadsAllGradients(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            assert parameter.grad.norm() >= 0  # type: ignore[union-attr]


class Normed(Net):
    def build(self) -> None:
        self.net[1] = nn.BatchNorm1d(8)


class LogsNorms(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


class Reads(Callback):
    """Reads what a step of training has returned beside the loss, or one of a validation."""

    def __init__(self, training: bool) -> None:
        self.training = training

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        assert not self.training or outputs["size"] >= 0

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any, **kwargs: Any) -> None:
        assert self.training or outputs["loss"] >= 0


class Returns(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "size": len(batch)}

    validation_step = training_step


class HookReads(Returns):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["size"] >= 0


class Pads(Net):
    """Pads to the longest sequence that it sees. The last microbatches have shorter ones."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits, loss = self.logits_and_loss(batch)
        longest = WIDTH if len(logits) > 1 else WIDTH - 1
        return loss + (logits[:, :1].expand(-1, longest) - batch[0]).square().mean()


class StaysNear(Net):
    """A penalty towards the first weights."""

    def build(self) -> None:
        self.first = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        near = sum((p - self.first[name]).square().sum() for name, p in self.named_parameters())
        return super().training_step(batch, batch_idx) + near


class Averages(Net):
    """An average of the weights is loaded with them."""

    def build(self) -> None:
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    def on_train_batch_end(self, *args: Any) -> None:
        self.average.load_state_dict(self.net.state_dict())


class Masks(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.net[0].weight.grad.mul_(torch.ones(8, WIDTH))  # type: ignore[union-attr, operator]


CASES: dict[str, tuple[Callable[[], Net], list[Callable[[], Callback]], str, str]] = {
    "gradients": (ReadsAllGradients, [], "sync", "whose grad is None"),
    "BatchNorm": (Normed, [], "sync", "drop_last=True"),
    "norms": (LogsNorms, [], "fsdp", "torch.stack"),
    "outputs": (Returns, [partial(Reads, training=False)], "sync", "outputs that are None"),
    "outputs of training": (Returns, [partial(Reads, training=True)], "sync", "beside the loss is on the last stage"),
    "outputs of training in a hook": (
        HookReads, [], "sync", "'size' of what training_step returned, which exists on the"
    ),
    "lengths": (Pads, [], "sync", "total_length=x.size(1)"),
    "stored weights": (StaysNear, [], "tensor", 'plan="none"'),
    "average": (Averages, [], "tensor", "an average of the weights for the validation, is whole"),
    "parts and a mask": (Masks, [], "fsdp", "needs strategy='ddp', or in a pipeline"),
}  # fmt: skip


def trained(case: str) -> None:
    kind, callbacks, strategy, _ = CASES[case]
    options = {"microbatches": 2} if strategy == "sync" else {}
    trainer = make_trainer(strategy, [made() for made in callbacks], options)
    trainer.fit(kind(), loader(10, 8), loader(10, 8))


@pytest.mark.parametrize("case", CASES)
def test_errors_that_the_layout_causes_have_a_note(pool: WorkerPool, case: str) -> None:
    failures = pool.run(trained, 2, case, init=False, expect_errors=True)
    assert any(CASES[case][-1] in failure for failure in failures)
