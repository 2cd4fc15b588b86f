"""Errors of the user's code that have their cause in the layout say so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.strategies.harness import make_trainer
from tools.workers.pool import WorkerPool


class Net(L.LightningModule):
    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), between or nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class ReadsAllGradients(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            assert parameter.grad.norm() >= 0  # type: ignore[union-attr]


class LogsNorms(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


class ReadsTrainingOutputs(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        assert outputs["size"] >= 0


class Returns(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "size": len(batch)}

    def configure_callbacks(self) -> Any:
        return ReadsTrainingOutputs()


class HookReads(Returns):
    def configure_callbacks(self) -> Any:
        return []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["size"] >= 0


class Pads(Net):
    """Pads to the longest sequence that it sees. The longest one of the batch is the first."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        longest = 4 if batch[0, 0].item() == 0 else 3
        loss: Tensor = (self.layers(batch).expand(-1, longest) - batch).square().mean()
        return loss


class ReadsOutputs(Callback):
    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any, **kwargs: Any) -> None:
        assert outputs["loss"] >= 0


class Validated(Net):
    def validation_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"loss": self.layers(batch).square().mean()}

    def configure_callbacks(self) -> Any:
        return ReadsOutputs()


class StaysNear(Net):
    """A penalty towards the first weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        near = sum((p - self.first[name]).square().sum() for name, p in self.named_parameters())
        return super().training_step(batch, batch_idx) + near


class Averages(Net):
    """An average of the weights is loaded with them."""

    def __init__(self) -> None:
        super().__init__()
        self.average = copy.deepcopy(self.layers).requires_grad_(False)

    def on_train_batch_end(self, *args: Any) -> None:
        self.average.load_state_dict(self.layers.state_dict())


class Masks(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.layers[0].weight.grad.mul_(torch.ones(8, 4))  # type: ignore[union-attr, operator]


CASES: dict[str, tuple[Callable[[], Net], str, str]] = {
    "gradients": (ReadsAllGradients, "sync", "whose grad is None"),
    "BatchNorm": (lambda: Net(nn.BatchNorm1d(8)), "sync", "drop_last=True"),
    "norms": (LogsNorms, "fsdp", "torch.stack"),
    "outputs": (Validated, "sync", "outputs that are None"),
    "outputs of training": (Returns, "sync", "beside the loss is on the last stage"),
    "outputs of training in a hook": (HookReads, "sync", "'size' of what training_step returned, which exists on the"),
    "lengths": (Pads, "sync", "total_length=x.size(1)"),
    "stored weights": (StaysNear, "tensor", 'plan="none"'),
    "average": (Averages, "tensor", "an average of the weights for the validation, is whole"),
    "parts and a mask": (Masks, "fsdp", "needs strategy='ddp', or in a pipeline"),
}


def trained(case: str) -> None:
    made, strategy, _ = CASES[case]
    trainer = make_trainer(strategy, [], {"microbatches": 2} if strategy == "sync" else {})
    loader = DataLoader(torch.linspace(0, 2, 40).view(10, 4), batch_size=8)  # type: ignore[arg-type]
    trainer.fit(made(), loader, loader)


@pytest.mark.parametrize("case", CASES)
def test_errors_that_the_layout_causes_have_a_note(pool: WorkerPool, case: str) -> None:
    failures = pool.run(trained, 2, case, init=False, expect_errors=True)
    assert any(CASES[case][2] in failure for failure in failures)
