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
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import nn
from torchmetrics import MeanMetric

from lightning_parallel.checkpoint import read_full, read_plain
from tests.strategies.harness import Report, collect, joined, largest_difference, make_trainer, spoil, weights_of
from tests.strategies.observed import WIDTH, loader
from tests.strategies.test_lightning_idioms import LAYOUTS, Plain
from tests.thorough import thorough


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


class HereOnly:
    """It can be pickled on the first rank only, which saves it."""

    def __deepcopy__(self, memo: Any) -> HereOnly:
        return self

    def __reduce__(self) -> Any:
        if dist.is_initialized() and dist.get_rank():
            raise RuntimeError("not on this rank")
        return HereOnly, ()


def given(seed: int = 5) -> Given:
    optimizer = partial(torch.optim.SGD, momentum=0.9)
    parts = {"odd": HereOnly(), "metric": MeanMetric()}
    return Given(network(seed), nn.CrossEntropyLoss(), parts, optimizer, 1)


def save_and_resume(layout: str, path: Path) -> list[Report]:
    reports = []
    for epochs, resume in ((1, None), (2, path)):
        module = given(5 if resume is None else 6)
        module.hparams["rate"] = 0.1
        strategy, settings = LAYOUTS[layout]
        trainer = make_trainer(strategy, [Copies()] if strategy != "fsdp" else [], settings, max_epochs=epochs)
        trainer.fit(module, loader(8), ckpt_path=resume, weights_only=False)
        if resume is None:
            trainer.save_checkpoint(path)
        reports.append(collect(Report(), trainer, module))
    return reports


@pytest.mark.parametrize("layout", ["1f1b", "tensor", "fully sharded", *thorough("async", "zbv", "replicas")])
def test_hyperparameters_hold_the_network_that_is_trained(launch: Any, layout: str, tmp_path: Path) -> None:
    path = tmp_path / "it.ckpt"
    ranks = launch(save_and_resume, 2, layout, path)
    trained = joined([first for first, _ in ranks], "weights") if layout != "fully sharded" else ranks[0][0].weights
    content = read_plain(path, weights_only=False)
    module = Given(**content["hyper_parameters"])
    module.load_state_dict(content["state_dict"])
    assert largest_difference(dict(module.named_parameters()), trained) == 0
    assert content["hyper_parameters"]["rate"] == 0.1
    assert not content["special"]["loss"]._forward_hooks and content["special"]["metric"].dist_sync_fn is None


# -- what a module leaves out --------------------------------------------------------------------------------------


class LeavesOut(Plain):
    """As one whose backbone is frozen and kept elsewhere. Its ``state_dict`` takes no arguments."""

    strict_loading = False

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {name: value for name, value in super().state_dict().items() if not name.startswith("net.2.")}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["state_dict"]["net.4.bias"]
        del checkpoint["state_dict"]["net.0.weight"]  # which stays, as net.6.weight


class Renames(Plain):
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return {f"model.{name}": value for name, value in super().state_dict(*args, **kwargs).items()}


Weights = dict[str, torch.Tensor]


def save_weights_and_validate(layout: str, path: Path) -> tuple[Weights, Weights]:
    """The weights that another module has after it has read the checkpoint, and those that it had before."""
    strategy, settings = LAYOUTS[layout]
    trainer = make_trainer(strategy, [], settings, max_epochs=1)
    trainer.fit(LeavesOut(), loader(8))
    trainer.save_checkpoint(path, weights_only=True)
    module, before = LeavesOut(), LeavesOut()
    spoil(module)
    spoil(before)
    module.validation_step = module.training_step  # type: ignore[method-assign]
    trainer.validate(module, loader(8), ckpt_path=path, verbose=False)
    weights = weights_of(module)
    return weights, {name: p.detach() for name, p in before.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("layout", ["1f1b", "tensor", *thorough("fully sharded", "replicas")])
def test_what_a_module_leaves_out_is_left_out(launch: Any, layout: str, tmp_path: Path) -> None:
    path = tmp_path / "it.ckpt"
    ranks = launch(save_weights_and_validate, 2, layout, path)
    saved, before = read_full(path), ranks[0][1]
    assert not {"optimizer_states", "lr_schedulers"} & read_plain(path, weights_only=False).keys()
    saved.setdefault("net.0.weight", saved["net.6.weight"])  # one tensor; a directory has both of its names
    assert before.keys() - saved.keys() == {"net.2.weight", "net.2.bias", "net.4.bias"}
    for weights, _ in ranks:
        for name, value in weights.items():
            expected = {**before, **saved}[name]
            assert value.shape != expected.shape or torch.equal(value, expected), name  # not of shards


def fit_refused(kind: type[Plain], callbacks: list[Callback], **settings: Any) -> None:
    make_trainer("sync", callbacks, {"stages": 2}, enable_checkpointing=True, **settings).fit(kind(), loader(8))


def test_what_can_not_be_saved_is_refused_before_training(refused: Any) -> None:
    refused(["state_dict()", "'model.net.", "a key of their own"], fit_refused, 2, Renames, [])
    keeper = ModelCheckpoint(save_on_exception=True)
    refused(["ModelCheckpoint(save_on_exception=True)", "every_n_train_steps"], fit_refused, 2, Plain, [keeper])
    refused(["AsyncCheckpointIO", "async_save=True"], fit_refused, 2, Plain, [], plugins=[AsyncCheckpointIO()])
