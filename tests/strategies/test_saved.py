"""What a user's module brings into a checkpoint: hyperparameters that hold networks, hooks, and a ``state_dict`` of its
own."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torchmetrics import MeanMetric

from lightning_parallel.checkpoint import read_plain
from tests.pool import WorkerPool
from tests.strategies.harness import Report, complete, here, joined, largest_difference, make_trainer
from tests.strategies.observed import WIDTH, loader
from tests.strategies.test_lightning_idioms import LAYOUTS


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


class Given(L.LightningModule):
    """As lightning-hydra-template's: the network, the loss, a metric and a partial optimizer are hyperparameters."""

    def __init__(self, net: nn.Module, loss: nn.Module, parts: dict[str, Any], optimizer: Any, rate: float) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net, self.loss, self.metric = net, loss, parts["metric"]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(self.net(batch[0]), batch[1])
        self.metric(loss)
        self.log("mean", self.metric)
        return loss

    def configure_optimizers(self) -> Any:
        return self.hparams["optimizer"](self.parameters(), lr=self.hparams["rate"])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["special"] = {"loss": self.loss, "metric": self.metric}  # as pytorch-forecasting


class Copies(Callback):
    """Copies the module, as averages of weights do."""

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        copy.deepcopy(module.net)

    def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        copy.deepcopy(module.net)
        pickle.dumps((module.loss, module.metric))


def given(seed: int = 5) -> Given:
    optimizer = partial(torch.optim.SGD, momentum=0.9)
    return Given(network(seed), nn.CrossEntropyLoss(), {"metric": MeanMetric()}, optimizer, 1)


def save_and_resume(layout: str, path: Path) -> list[Report]:
    torch.set_default_dtype(torch.float64)
    reports = []
    for epochs, resume in ((1, None), (2, path)):
        module = given(5 if resume is None else 6)
        module.hparams["rate"] = 0.1
        strategy, settings = LAYOUTS[layout]
        trainer = make_trainer(strategy, [Copies()] if strategy != "fsdp" else [], settings, max_epochs=epochs)
        trainer.fit(module, loader(20), ckpt_path=resume, weights_only=False)
        if resume is None:
            trainer.save_checkpoint(path)
        weights = {name: complete(p.detach()) for name, p in here(module).items()}
        reports.append(Report(weights=weights, shards=trainer.strategy.local_model.shards))  # type: ignore[attr-defined]
    return reports


@pytest.mark.parametrize("layout", ["1f1b", "zbv", "async", "tensor", "fully sharded", "replicas"])
def test_hyperparameters_hold_the_network_that_is_trained(pool: WorkerPool, layout: str, tmp_path: Path) -> None:
    path = tmp_path / "it.ckpt"
    ranks = pool.run(save_and_resume, 2, layout, path, init=False)
    trained = joined([first for first, _ in ranks], "weights") if layout != "fully sharded" else ranks[0][0].weights
    content = read_plain(path, weights_only=False)
    module = Given(**content["hyper_parameters"])
    module.load_state_dict(content["state_dict"])
    assert largest_difference(dict(module.named_parameters()), trained) == 0
    assert content["hyper_parameters"]["rate"] == 0.1
    assert not content["special"]["loss"]._forward_hooks and content["special"]["metric"].dist_sync_fn is None
