"""Replicas in one process have the numbers of a single model with the whole batch."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lightning_parallel as lp
from tests.strategies.equality import assert_equal
from tests.strategies.harness import Report, train
from tests.strategies.models import Base, LeNet


class Forward(LeNet):
    """The loss outside of `forward`, whose calls torch.nn.DataParallel shares out."""

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def loss(self, batch: Any) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self(images), labels)


class Dropping(Forward):
    """Dropout, in a layer that is computed again in the backward."""

    recompute = False

    def build(self) -> None:
        super().build()
        self.hidden = nn.Sequential(nn.Linear(10, 10), nn.Dropout(0.5), nn.Tanh())

    def forward(self, images: Tensor) -> Tensor:
        logits = self.net(images)
        if self.recompute:
            return checkpoint(self.hidden, logits, use_reentrant=False)
        return self.hidden(logits)


Recomputing = type("Recomputing", (Dropping,), {"recompute": True})


class Penalised(Forward):
    """A penalty on the weights; a method that was bound before replicas were made; a hook on a parameter."""

    def build(self) -> None:
        super().build()
        self.bound = self.head_norm
        next(self.parameters()).register_hook(lambda gradient: 3 * gradient)

    def head_norm(self) -> Tensor:
        return self.net[-1].weight.pow(2).sum()

    def loss(self, batch: Any) -> Tensor:
        penalty = sum(parameter.abs().sum() for parameter in self.parameters())
        return super().loss(batch) + 0.01 * penalty + 0.1 * self.bound()


class Failing(Forward):
    """Can't stand the last share of three: of eight samples, it has two."""

    def forward(self, images: Tensor) -> Tensor:
        if len(images) == 2:
            raise KeyError("images")
        return super().forward(images)


def replicated(launch: Any, model: type[Base], replicas: int, **options: Any) -> Report:
    report: Report = launch(train, 1, model, "data", {}, devices=replicas, **options)[0]
    return report


# -- equality with one model -------------------------------------------------------------------------------------


# Others, in two replicas, with accumulation and clipping, are in the table of test_contract.py.
@pytest.mark.parametrize(("model", "replicas", "given"), [
    (Forward, 7, {"batch_size": 5, "samples": 11}),  # fewer samples, at last one
    (Penalised, 3, {"validates_after": True}),
])  # fmt: skip
def test_models_train_as_in_one_process(
    launch: Any, single: Any, model: type[Base], replicas: int, given: dict[str, Any]
) -> None:
    assert_equal([replicated(launch, model, replicas, **given)], single(model, **given))


def test_mixed_precision_reaches_the_replicas(launch: Any, single: Any) -> None:
    options = {"precision": "bf16-mixed", "dtype": torch.float32}
    found, expected = replicated(launch, Forward, 2, **options), single(Forward, **options)
    full = single(Forward, dtype=torch.float32)
    assert found.losses == pytest.approx(expected.losses, rel=1e-3)
    first, alone, exact = (report.losses[0] for report in (found, expected, full))
    assert abs(first - alone) < 1e-6 < 1e-5 < abs(first - exact)


def test_dropout_that_is_computed_again_is_the_same_dropout(launch: Any) -> None:
    runs = [replicated(launch, model, 3, shuffle=True) for model in (Dropping, Recomputing)]
    assert_equal([runs[0]], runs[1])


# -- one process -------------------------------------------------------------------------------------------------


class AnyBatch(Forward):
    """Steps that take and return what no replica could share."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
        return {"loss": super().training_step(batch, batch_idx), "seen": torch.zeros(3), "how": self}

    def predict_step(self, batch: Any) -> Any:
        return {"length": len(batch)}


def test_one_device_takes_any_batch_and_returns_anything() -> None:
    one = trainer(devices=1, fast_dev_run=True, enable_progress_bar=False)
    one.fit(AnyBatch(), AnyBatch.loader())
    assert one.predict(AnyBatch(), ["one", "three"]) == [{"length": 3}]  # type: ignore[arg-type]


# -- refusals and failures ---------------------------------------------------------------------------------------


def test_an_error_keeps_its_type_and_names_the_replica(launch: Any) -> None:
    error = launch(train, 1, Failing, "data", {}, devices=3, expect_errors=True)[0]
    assert "KeyError" in str(error) and "raised in replica 2 of 3, on cpu" in str(error)


def trainer(**options: Any) -> L.Trainer:
    strategy = lp.DataParallelStrategy()
    return L.Trainer(**{"accelerator": "cpu", "devices": 2, "logger": False, "strategy": strategy} | options)


def test_several_nodes_are_refused_where_the_trainer_is_made() -> None:
    with pytest.raises(ValueError, match="num_nodes=2.*one process.*num_nodes=1.*'ddp'"):
        trainer(num_nodes=2)


def test_several_launched_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = {
        "RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "localhost",
        "MASTER_PORT": 1, "TORCHELASTIC_RUN_ID": 1,
    }  # fmt: skip
    for name, value in launched.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ValueError, match="2 processes were launched.*Launch one"):
        trainer()
